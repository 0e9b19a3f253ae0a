"""The native engine samples, the trainer trains, the engine swaps: in invariant numerics the two agree to the last bit every time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.transformer import rounded
from etude.model.weights import load_model
from etude.protocols import GenerateRequest
from etude.records import Graded, Group, Sampling, Segment, StopReason, Trajectory, Version, seed_for
from etude.sync.chain import weights_hash
from etude.sync.receive import Receiver
from etude.trainer.config import RLConfig
from etude.trainer.rl import RLTrainer


def native_engine(folder, dtype=torch.float32):
    """Weights arrive in bfloat16 and are computed with in `dtype`."""
    model = load_model(folder, dtype=dtype, numerics="invariant")
    params = dict(model.named_parameters())
    wire = {n: rounded(n, p.detach(), torch.bfloat16) for n, p in params.items()}
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(wire[n])
    current = Version(lineage=0, ordinal=0, hash=weights_hash(wire))

    def apply(state, manifest, source):
        nonlocal current
        current = Receiver(wire, source, version=current).advance(manifest)
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(wire[n])
        return current

    return NativeEngine(model, version=current, config=EngineConfig(num_blocks=256), apply=apply)


async def sampled_group(engine, admission, rewards, *, turns=2):
    """Rollouts of several turns: the context of a turn is all tokens before it, plus two that a tool answered."""

    async def rollout(member, reward):
        prompt = np.random.default_rng(admission).integers(0, 48, 7).tolist()
        ids, sampled, logprob, versions, version = list(prompt), [False] * 7, [0.0] * 7, [], [-1] * 7
        for turn in range(turns):
            seed = seed_for(admission, member, turn)
            request = GenerateRequest(id=f"{admission}-{member}-{turn}", ids=tuple(ids), sampling=Sampling(max_tokens=6, seed=seed))
            out = await engine.generate(request)
            versions += [v for v in out.versions if v.key not in [w.key for w in versions]]
            keys = [v.key for v in versions]
            ids += [*out.ids, 3, 4]
            sampled += [True] * len(out.ids) + [False] * 2
            logprob += [*out.logprob_t1_T.tolist(), 0.0, 0.0]
            version += [keys.index(out.versions[i].key) for i in out.version_T] + [-1, -1]
            routes = out.routes_PTLK
        absent = np.full((len(ids) - len(routes), *routes.shape[1:]), 255, dtype=np.uint8)
        segment = Segment(
            ids_T=np.array(ids, dtype=np.int32),
            sampled_T=np.array(sampled),
            logprob_T=np.array(logprob, dtype=np.float32),
            logprob_t1_T=np.array(logprob, dtype=np.float32),
            version_T=np.array(version, dtype=np.int16),
            message_T=np.zeros(len(ids), dtype=np.int32),
            thinking_T=np.zeros(len(ids), dtype=bool),
            versions=tuple(versions),
            routes_TLK=np.concatenate([routes, absent]),
            sampling=Sampling(),
        )
        trajectory = Trajectory(
            id=f"{admission}-{member}",
            task_id="t",
            task_hash="h",
            group=admission,
            member=member,
            seed=0,
            segments=(segment,),
            messages=(),
            stop=StopReason.DONE,
        )
        return Graded(trajectory=trajectory, parts={"tests": reward})

    members = await asyncio.gather(*(rollout(i, r) for i, r in enumerate(rewards)))
    return Group(admission=admission, task_id="t", admitted_at=await engine.version(), members=tuple(members))


@pytest.mark.parametrize(
    ("kind", "replay", "dtype"),
    [
        ("moe", True, "float32"),
        ("moe", False, "float32"),
        ("moe", True, "bfloat16"),
        ("latent", True, "float32"),
        ("latent", False, "bfloat16"),
    ],
)
def test_mismatch_is_exactly_zero_over_steps_and_swaps(folders, tmp_path, kind, replay, dtype):
    async def go():
        engine = native_engine(folders[kind], getattr(torch, dtype))
        config = RLConfig(lr=1e-2, kl=1e-2, numerics="invariant", router_replay=replay, row_tokens=64, compute_dtype=dtype)
        trainer = RLTrainer(config, folders[kind], store=tmp_path)
        reports, late = [], None
        for step in range(3):
            groups = [await sampled_group(engine, 10 * step + a, (1.0, 0.0, 0.5)) for a in range(2)]
            late = late or groups[0]
            reports.append(await trainer.step(groups))
            manifest, store = await trainer.publish()
            served = await engine.load(manifest, store)
            await trainer.commit(served)
        stale = await trainer.step([late])
        await engine.close()
        await trainer.close()
        return reports, stale

    reports, stale = asyncio.run(go())
    assert len({r.version.hash for r in reports}) == 3, "the weights moved each time"
    for report in reports:
        assert report.metrics["fresh_share"] == 1.0
        assert report.metrics["dlogp_max"] == 0.0
        assert report.metrics["sampled_tokens"] == 2 * 3 * 2 * 6
    assert (stale.metrics["fresh_share"], stale.metrics["lag_max"]) == (0.0, 3.0)
    assert stale.metrics["stale_dlogp_mean"] > 1e-4
