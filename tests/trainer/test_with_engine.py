"""The native engine samples, the trainer trains, the engine swaps: in invariant numerics the two agree to the last bit every time."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.protocols import GenerateRequest
from etude.records import Sampling
from etude.trainer.config import RLConfig
from etude.trainer.losses import numpy, score
from etude.trainer.rl import Policy, RLTrainer


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
def test_mismatch_is_exactly_zero_over_steps_and_swaps(make, folders, tmp_path, kind, replay, dtype):
    async def go():
        engine = make.engine(folders[kind], getattr(torch, dtype))
        config = RLConfig(lr=1e-2, kl=1e-2, numerics="invariant", router_replay=replay, row_tokens=64, compute_dtype=dtype)
        trainer = RLTrainer(config, folders[kind], store=tmp_path)
        reports, late = [], None
        for step in range(3):
            groups = [await make.sampled_group(engine, 10 * step + a, (1.0, 0.0, 0.5)) for a in range(2)]
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


@pytest.mark.parametrize(("kind", "dtype"), [("moe", "float32"), ("latent", "bfloat16")])
def test_a_thousand_samples_in_any_company_are_one_and_the_trainers(make, folders, kind, dtype):
    """Waves of 1 to 48 requests, chunked prompts, neighbours of other lengths; the trainer's rows hold other sequences too."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 48, 37).tolist()
    kinds = rng.permutation([True] * 1000 + [False] * 300)

    def request(number, sample):
        ids = prompt if sample else rng.integers(0, 48, int(rng.integers(1, 70))).tolist()
        sampling = Sampling(temperature=0.0 if sample else 1.0, max_tokens=6 if sample else int(rng.integers(1, 12)), seed=number)
        return GenerateRequest(id=f"{sample} {number}", ids=ids, sampling=sampling)

    async def go():
        engine = make.engine(folders[kind], getattr(torch, dtype), max_running=32, token_budget=40)

        async def one(after, asked):
            for _ in range(after):
                await asyncio.sleep(0)
            return await engine.generate(asked)

        got, at = [], 0
        while at < len(kinds):
            wave = kinds[at : at + int(rng.integers(1, 49))]
            got += await asyncio.gather(*(one(int(rng.integers(0, 8)), request(at + i, bool(k))) for i, k in enumerate(wave)))
            at += len(wave)
        await engine.close()
        return [g for g in got if g.id.startswith("True")]

    samples = asyncio.run(go())
    assert len(samples) == 1000
    assert len({(s.ids, s.logprob_t1_T.tobytes()) for s in samples}) == 1
    policy = Policy(Path(folders[kind]), RLConfig(numerics="invariant", compute_dtype=dtype))
    for neighbours in (0, 1, 5):
        others = [rng.integers(0, 48, int(rng.integers(2, 60))) for _ in range(neighbours)]
        ids = np.concatenate([*others, prompt, samples[0].ids])
        row = make.batch(make.segment(rng, prompt=1, turns=((len(ids) - 1, 0),)))
        starts = np.cumsum([0, *map(len, others), len(prompt) + 6]).tolist()
        row = row.replace(ids_N=ids.astype(np.int32), bounds=tuple(itertools.pairwise(starts)))
        where_M = np.arange(len(ids) - 6, len(ids))
        logp_M = score(policy.model, row, where_M).logp_M
        assert logp_M.requires_grad
        assert np.array_equal(numpy(logp_M), samples[0].logprob_t1_T)
