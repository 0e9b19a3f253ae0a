"""A model whose every logit is exact integer arithmetic over the whole context, read through the paged cache.

A token that lands in a wrong slot, a wrong block in a table, a stale entry of the prefix cache or a wrong position changes
what is sampled next; batching and chunking change nothing. So the engine's logic is tested without float noise.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.transformer import Output
from etude.protocols import GenerateRequest, Generation
from etude.records import Manifest, Sampling, Version

VOCAB = 61


class ToyDecoder(nn.Module):
    """State of a position = weighted sum of hashes of (token, position, salt) over its context, modulo a prime."""

    def __init__(self, *, experts: int = 7, vocab: int = VOCAB, window: int = 96) -> None:
        super().__init__()
        self.config = ModelConfig(
            vocab_size=vocab,
            hidden=2,
            layers=2,
            heads=1,
            kv_heads=1,
            head_dim=2,
            max_positions=window,
            experts=experts,
            experts_per_token=3,
            expert_intermediate=1,
            shared_intermediate=1,
            family="qwen2_moe",
        )
        self.salt = nn.Parameter(torch.zeros(1))
        self.calls: list[int] = []
        self.fail_at: int | None = None
        self.poison = False
        self.strict = True
        """Tables hold block 0 beyond a context's end. A guess that failed leaves a block of its own sequence there."""

    def forward(self, ids_N: Tensor, plan: Plan, cache: PagedCache) -> Output:
        self.calls.append(len(ids_N))
        if self.fail_at is not None and len(self.calls) >= self.fail_at:
            raise RuntimeError("out of memory")
        if self.strict:
            self._check_padding(plan, cache)
        hash_N = (ids_N * 97 + plan.positions_N * 31 + int(self.salt.item()) * 1009 + 5) % 4093
        return self._answer(hash_N, plan, cache)

    def _check_padding(self, plan: Plan, cache: PagedCache) -> None:
        beyond_SB = torch.arange(plan.tables_SB.shape[1]) * cache.block_size >= torch.tensor(plan.lengths_S)[:, None]
        assert (plan.tables_SB[beyond_SB] == 0).all(), "a table is padded with blocks of somebody else"

    def _answer(self, hash_N: Tensor, plan: Plan, cache: PagedCache) -> Output:
        k_NHD = torch.stack([hash_N, plan.positions_N], 1)[:, None].to(self.salt.dtype)
        for layer in range(self.config.layers):
            keys_HQPD, _ = cache.write(layer, k_NHD, k_NHD, plan.slots_N)
        context_SC = keys_HQPD[0, plan.tables_SB, :, 0].flatten(1).long()
        weights_C = torch.arange(context_SC.shape[1]) * 7 + 1
        state_SC = torch.cumsum(context_SC * weights_C, 1) % 65521
        counts = torch.tensor(plan.starts_S1).diff()
        owner_N = torch.repeat_interleave(torch.arange(len(counts)), counts)
        state_N = state_SC[owner_N, plan.positions_N]
        routes_NLK = (state_N[:, None, None] + torch.arange(6).view(2, 3)) % self.config.experts
        return Output(
            hidden_ND=torch.stack([state_N, state_N], 1).float(),
            routes_NLK=routes_NLK.to(torch.uint16 if self.config.experts > 255 else torch.uint8),
            balance=torch.zeros(()),
            load_LE=None,
        )

    def logits(self, hidden_MD: Tensor) -> Tensor:
        columns_V = torch.arange(self.config.vocab_size) * 31 + 7
        logits_MV = (hidden_MD[:, :1].long() * columns_V % 977).float() / 200.0
        return logits_MV * float("nan") if self.poison else logits_MV


def version(ordinal: int) -> Version:
    return Version(lineage=0, ordinal=ordinal, hash=f"{ordinal:032x}")


def manifest(ordinal: int) -> Manifest:
    return Manifest(lineage=0, base=None, version=version(ordinal), tensors=())


def set_salt(state: dict[str, Tensor], manifest: Manifest, source: str) -> Version:
    """Stands for the receiver: the weights become those of the manifest's version."""
    with torch.no_grad():
        state["salt"].fill_(manifest.version.ordinal)
    return manifest.version


def toy_engine(model: ToyDecoder | None = None, **config: Any) -> NativeEngine:
    settings = {"block_size": 4, "num_blocks": 64, "max_running": 8, "token_budget": 16} | config
    return NativeEngine(model or ToyDecoder(), version=version(0), config=EngineConfig(**settings), apply=set_salt)


def request(
    id: str, ids: Any, *, priority: int = 0, deadline_s: float | None = None, routes: bool = True, **sampling: Any
) -> GenerateRequest:
    settings = {"max_tokens": 12, "seed": 1} | sampling
    return GenerateRequest(id=id, ids=ids, sampling=Sampling(**settings), priority=priority, deadline_s=deadline_s, routes=routes)


async def ticks(n: int) -> None:
    """Let the engine take about n steps."""
    for _ in range(n):
        await asyncio.sleep(0)


def same(a: Generation, b: Generation) -> bool:
    """Equal in everything that was sampled and recorded, bit for bit."""
    return (
        (a.ids, a.finish, [v.key for v in a.versions]) == (b.ids, b.finish, [v.key for v in b.versions])
        and np.array_equal(a.logprob_T, b.logprob_T)
        and np.array_equal(a.logprob_t1_T, b.logprob_t1_T)
        and np.array_equal(a.version_T, b.version_T)
        and np.array_equal(a.kept_T, b.kept_T)
        and (a.routes_PTLK is None) == (b.routes_PTLK is None)
        and (a.routes_PTLK is None or np.array_equal(a.routes_PTLK, b.routes_PTLK))
    )


def idle_clean(engine: NativeEngine) -> bool:
    """Nothing is left of any request: no reference on a block, free + cached == total."""
    engine._pool.check()
    return not engine._active and not engine._scheduler.busy and engine._pool.used == 0 and engine._deadlines == 0


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The helpers above; test modules cannot import a conftest."""
    helpers = (ToyDecoder, version, manifest, set_salt, request, ticks, same, idle_clean)
    return SimpleNamespace(engine=toy_engine, vocab=VOCAB, **{h.__name__: h for h in helpers})


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
