"""Synthetic groups and tiny random models for the trainer's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.config import Latent, ModelConfig
from etude.model.transformer import KEPT, Decoder, rounded
from etude.model.weights import load_model, save_model
from etude.protocols import GenerateRequest
from etude.records import (
    Batch,
    Drop,
    Dropped,
    Failure,
    Graded,
    Group,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Version,
    seed_for,
)
from etude.sync.chain import weights_hash
from etude.sync.receive import Receiver
from etude.trainer.losses import score

DENSE = ModelConfig(vocab_size=48, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_positions=512)
MOE = ModelConfig(
    vocab_size=48,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_intermediate=24,
    shared_intermediate=32,
    qkv_bias=True,
    max_positions=512,
    family="qwen2_moe",
)
LATENT = ModelConfig(
    vocab_size=48, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=40, intermediate=40, experts=4, experts_per_token=2,
    expert_intermediate=24, shared_intermediate=24, dense_layers=1, route_groups=2, route_groups_kept=1, route_scale=1.5, norm_topk=True,
    latent=Latent(kv_rank=32, q_rank=12, nope_dim=32, rope_dim=8, value_dim=32), max_positions=512, family="deepseek_v3",
)  # fmt: skip
SHAPES = {"dense": DENSE, "moe": MOE, "latent": LATENT}
BASE = Version(lineage=0, ordinal=0, hash="0" * 32)


def lively(model: Decoder) -> Decoder:
    """Larger weights than an initialisation has, so that distributions are far from uniform and experts differ."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0 if "embed" not in name else 2.0)
            if name.endswith(KEPT):
                parameter.copy_(4 - 0.004 * torch.arange(len(parameter)))  # all 4 in bfloat16, if anything rounded them
    return model


def tiny(kind: str = "dense", *, seed: int = 3, numerics: str = "fast") -> Decoder:
    model = Decoder(SHAPES[kind], numerics=numerics)
    model.init_weights(seed)
    return lively(model)


def segment(
    rng: np.random.Generator,
    *,
    prompt: int = 6,
    turns: Sequence[tuple[int, int]] = ((5, 3), (4, 0)),
    versions: Sequence[Version] = (BASE,),
    parent: int | None = None,
    vocab: int = 48,
) -> Segment:
    """A prompt, then (sampled, observed) tokens by turn; sampled tokens go through `versions` in order."""
    sampled = [False] * prompt
    for own, observed in turns:
        sampled += [True] * own + [False] * observed
    sampled_T = np.array(sampled)
    version_T = np.full(len(sampled), -1, dtype=np.int16)
    where = np.flatnonzero(sampled_T)
    version_T[where] = np.arange(len(where)) * len(versions) // max(len(where), 1)
    logprob_T = np.where(sampled_T, -np.log(vocab), 0.0).astype(np.float32)
    return Segment(
        ids_T=rng.integers(0, vocab, len(sampled)).astype(np.int32),
        sampled_T=sampled_T,
        logprob_T=logprob_T,
        logprob_t1_T=logprob_T.copy(),
        version_T=version_T,
        message_T=np.zeros(len(sampled), dtype=np.int32),
        thinking_T=np.zeros(len(sampled), dtype=bool),
        versions=tuple(versions),
        sampling=Sampling(),
        parent=parent,
    )


def graded(
    reward: float,
    segments: Sequence[Segment],
    *,
    group: int = 0,
    member: int = 0,
    stop: StopReason = StopReason.DONE,
    failure: Failure | None = None,
) -> Graded:
    trajectory = Trajectory(
        id=f"{group}-{member}",
        task_id="t",
        task_hash="h",
        group=group,
        member=member,
        seed=0,
        segments=tuple(segments),
        messages=(),
        stop=stop,
        failure=failure,
    )
    return Graded(trajectory=trajectory, parts={"tests": reward})


def group_of(
    rewards: Sequence[float],
    *,
    seed: int = 0,
    admission: int = 0,
    stops: Sequence[StopReason] | None = None,
    dropped: Sequence[int] = (),
    segments: Callable[[np.random.Generator, int], Sequence[Segment]] | None = None,
    versions: Sequence[Version] = (BASE,),
) -> Group:
    """A group of random rollouts with these rewards; member i has segments of its own lengths unless given."""
    rng = np.random.default_rng([seed, admission])

    def random_segments(rng: np.random.Generator, member: int) -> Sequence[Segment]:
        turns = [(int(rng.integers(2, 8)), int(rng.integers(0, 5))) for _ in range(int(rng.integers(1, 4)))]
        return [segment(rng, prompt=int(rng.integers(3, 9)), turns=turns, versions=versions)]

    make = segments or random_segments
    members = [
        graded(r, make(rng, i), group=admission, member=i, stop=stops[i] if stops else StopReason.DONE) for i, r in enumerate(rewards)
    ]
    return Group(
        admission=admission,
        task_id=f"t{admission}",
        admitted_at=versions[0],
        members=tuple(members),
        dropped=tuple(Dropped(member=m, reason=Drop.INFRA) for m in dropped),
    )


def as_batch(seg: Segment) -> Batch:
    """One segment as a row, every sampled token with weight 1."""
    n = len(seg.ids_T)
    zeros = np.zeros(n, dtype=np.float32)
    return Batch(
        ids_N=seg.ids_T,
        positions_N=np.arange(n, dtype=np.int32),
        bounds=((0, n),),
        rl_weight_N=seg.sampled_T.astype(np.float32),
        hint_weight_N=zeros,
        ce_weight_N=zeros,
        advantage_N=zeros,
        old_logprob_N=zeros,
        version_N=seg.version_T.astype(np.int32),
    )


@torch.no_grad()
def rescored(group: Group, model: Decoder, version: Version | None = None, *, routes: bool = False) -> Group:
    """The group as `model` would have sampled it: its own log-probs and, if asked for, its own routes."""

    def one(seg: Segment) -> Segment:
        batch = as_batch(seg)
        where_M = np.flatnonzero(seg.sampled_T)
        scores = score(model, batch, where_M)
        logprob_T = np.zeros(len(seg.ids_T), dtype=np.float32)
        logprob_T[where_M] = scores.logp_M.numpy()
        changes = {"logprob_T": logprob_T, "logprob_t1_T": logprob_T}
        if version is not None:
            changes["versions"] = (version,)
            changes["version_T"] = np.where(seg.sampled_T, 0, -1).astype(np.int16)
        if routes:
            assert scores.routes_NLK is not None
            changes["routes_TLK"] = scores.routes_NLK.numpy()
        return seg.replace(**changes)

    members = tuple(
        g.replace(trajectory=g.trajectory.replace(segments=tuple(one(s) for s in g.trajectory.segments))) for g in group.members
    )
    return group.replace(members=members)


def native_engine(folder: str, dtype: torch.dtype = torch.float32, *, numerics: str = "invariant", **config: Any) -> NativeEngine:
    """Weights arrive in bfloat16 and are computed with in `dtype`."""
    model = load_model(folder, dtype=dtype, numerics=numerics)
    params = dict(model.named_parameters())
    wire = {n: rounded(n, p.detach(), torch.bfloat16) for n, p in params.items()}
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(wire[n])
    current = Version(lineage=0, ordinal=0, hash=weights_hash(wire))

    def apply(state: Any, manifest: Any, source: str) -> Version:
        nonlocal current
        current = Receiver(wire, source, version=current).advance(manifest)
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(wire[n])
        return current

    return NativeEngine(model, version=current, config=EngineConfig(**{"num_blocks": 256, **config}), apply=apply)


async def sampled_segment(
    engine: NativeEngine, name: str, prompt: Sequence[int], *, turns: int = 2, tokens: int = 6, seed: int = 0, parent: int | None = None
) -> Segment:
    """Turns over one context, with two tokens that a tool answered after each. A position keeps the first routes recorded for it."""
    ids, sampled, logprob = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    versions: list[Version] = []
    version, rows = [-1] * len(prompt), []
    for turn in range(turns):
        request = GenerateRequest(
            id=f"{name}-{turn}", ids=tuple(ids), sampling=Sampling(max_tokens=tokens, seed=seed_for(name, turn, seed))
        )
        out = await engine.generate(request)
        versions += [v for v in out.versions if v.key not in [w.key for w in versions]]
        keys = [v.key for v in versions]
        ids += [*out.ids, 3, 4]
        sampled += [True] * len(out.ids) + [False] * 2
        logprob += [*out.logprob_t1_T.tolist(), 0.0, 0.0]
        version += [keys.index(out.versions[i].key) for i in out.version_T] + [-1, -1]
        assert out.routes_PTLK is not None
        assert (out.routes_PTLK[-1] == 255).all(), "the last token has not been fed"
        rows += list(out.routes_PTLK[len(rows) : -1])
    absent = [np.full_like(rows[0], 255)] * (len(ids) - len(rows))
    return Segment(
        ids_T=np.array(ids, dtype=np.int32),
        sampled_T=np.array(sampled),
        logprob_T=np.array(logprob, dtype=np.float32),
        logprob_t1_T=np.array(logprob, dtype=np.float32),
        version_T=np.array(version, dtype=np.int16),
        message_T=np.zeros(len(ids), dtype=np.int32),
        thinking_T=np.zeros(len(ids), dtype=bool),
        versions=tuple(versions),
        routes_TLK=np.stack([*rows, *absent]),
        sampling=Sampling(),
        parent=parent,
    )


async def sampled_group(
    engine: NativeEngine, admission: int, rewards: Sequence[float], *, segments: int = 1, prompt: int = 7, **more: Any
) -> Group:
    """Rollouts of one prompt by a real engine; segments after the first are compactions of the one before."""

    async def rollout(member: int, reward: float) -> Graded:
        start = np.random.default_rng(admission).integers(0, 48, prompt).tolist()
        made: list[Segment] = []
        for index in range(segments):
            ids = start if not made else [*start[:4], *made[-1].ids_T[-6:].tolist()]
            parent = index - 1 if index else None
            made.append(await sampled_segment(engine, f"{admission}-{member}-{index}", ids, parent=parent, **more))
        return graded(reward, made, group=admission, member=member)

    members = await asyncio.gather(*(rollout(i, r) for i, r in enumerate(rewards)))
    return Group(admission=admission, task_id="t", admitted_at=await engine.version(), members=tuple(members))


HELPERS = SimpleNamespace(
    tiny=tiny,
    segment=segment,
    graded=graded,
    group=group_of,
    rescored=rescored,
    batch=as_batch,
    base=BASE,
    shapes=SHAPES,
    engine=native_engine,
    sampled_group=sampled_group,
)


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The helpers above, for tests (which cannot import a conftest)."""
    return HELPERS


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders of the tiny models, by kind."""
    out = {}
    for kind in SHAPES:
        folder = tmp_path_factory.mktemp(f"{kind}-model")
        save_model(tiny(kind), folder, dtype=torch.float32)
        (folder / "tokenizer.json").write_text('{"not": "read by the trainer"}')
        out[kind] = str(folder)
    return out
