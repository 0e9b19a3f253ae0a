"""Thousands of requests at random moments that finish, are cancelled, dropped, left, or run late, under swaps and in tiny memory.

The model is exact integer arithmetic (see conftest), so what comes out is compared with the naive twin under the version that each token
names. Nothing may be lost, answered twice, or left behind.
"""

import asyncio
import collections

import numpy as np
import pytest
import torch

from etude.errors import BusyError
from etude.inference import naive
from etude.inference.config import EngineConfig
from etude.inference.engine import NativeEngine
from etude.inference.sequence import join
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.records import Finish

pytestmark = pytest.mark.slow
REQUESTS = 3000
ENDS = ("finish", "stream", "score", "cancel", "drop", "leave", "late")


class Soak:
    """Everything that is sent, and what became of it."""

    def __init__(self, lab, policy):
        self.lab, self.rng = lab, np.random.default_rng(7)
        self.engine = lab.engine(num_blocks=40, max_running=6, token_budget=24, max_waiting=30, cache_policy=policy, ageing_steps=32)
        self.policy = policy
        self.models = {}
        self.outcomes = collections.Counter()
        self.done = collections.Counter()
        self.refused = self.checked = 0

    def model(self, ordinal):
        if ordinal not in self.models:
            self.models[ordinal] = self.lab.ToyDecoder()
            self.models[ordinal].salt.data.fill_(ordinal)
        return self.models[ordinal]

    def draw(self, i):
        rng = self.rng
        ids = [int(j) % self.lab.vocab for j in np.arange(int(rng.integers(1, 70))) * int(rng.integers(1, 4))]
        return self.lab.request(
            f"r{i}",
            ids,
            max_tokens=int(rng.integers(1, 20)),
            seed=i,
            priority=int(rng.integers(0, 3)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            deadline_s=None,
        )

    async def one(self, i):
        asked, end, patience = self.draw(i), str(self.rng.choice(ENDS)), int(self.rng.integers(0, 30))
        await self.lab.ticks(int(self.rng.integers(0, 200)))
        while True:
            try:
                await self.play(asked, end, patience)
                break
            except BusyError:
                self.refused += 1
                await self.lab.ticks(20)
        self.done[asked.id] += 1
        self.outcomes[end] += 1

    async def play(self, asked, end, patience):
        engine = self.engine
        if end == "score":
            scored = await engine.score(asked.ids)
            assert len(scored.logprob_T) == len(asked.ids)
            twin = naive.score(self.model(scored.version.ordinal), asked.ids, scored.version, block_size=4)
            assert np.array_equal(scored.logprob_T, twin.logprob_T)
            return
        if end in ("stream", "leave"):
            stream, pieces = engine.generate_stream(asked), []
            async for piece in stream:
                pieces.append(piece)
                if end == "leave" and len(pieces) > patience % 5:
                    break
            await stream.aclose()
            if end == "stream":
                self.check(asked, join(pieces), (Finish.LENGTH,))
            return
        if end == "late":
            got = await engine.generate(self.lab.request(asked.id, asked.ids, deadline_s=1e-3 * patience, max_tokens=15))
            assert got.finish in (Finish.DEADLINE, Finish.LENGTH)
            return
        task = asyncio.create_task(engine.generate(asked))
        if end in ("cancel", "drop"):
            await self.lab.ticks(patience)
            if end == "drop":
                task.cancel()
                results = await asyncio.gather(task, return_exceptions=True)
                if isinstance(results[0], BusyError):
                    raise results[0]
                return
            await engine.cancel(asked.id)
        self.check(asked, await task, (Finish.LENGTH,) if end == "finish" else (Finish.LENGTH, Finish.CANCELLED))

    def check(self, asked, got, finishes):
        assert got.id == asked.id
        assert got.finish in finishes
        assert len(got.ids) == len(got.version_T) == len(got.kept_T) == len(got.logprob_T)
        assert len(got.routes_PTLK) == len(asked.ids) + len(got.ids)
        if got.finish is Finish.LENGTH:
            assert len(got.ids) == min(asked.sampling.max_tokens, 96 - len(asked.ids))
        ids = [*asked.ids, *got.ids]
        if len(asked.ids) % 3 == 0:  # a third is computed again, token by token
            for t, token in enumerate(got.ids):
                if not got.kept_T[t]:
                    version = got.versions[got.version_T[t]]
                    s = asked.sampling
                    again = self.lab.request("x", ids[: len(asked.ids) + t], max_tokens=1, seed=s.seed, temperature=s.temperature)
                    assert naive.generate(self.model(version.ordinal), again, version, block_size=4).ids == (token,)
                    self.checked += 1

    async def swaps(self, finished):
        ordinal = 0
        while not finished.is_set():
            await self.lab.ticks(150)
            ordinal += 1
            await self.engine.load(self.lab.manifest(ordinal % 50), "")
            self.engine._pool.check()

    async def run(self):
        finished = asyncio.Event()
        swapping = asyncio.create_task(self.swaps(finished))
        for first in range(0, REQUESTS, 300):
            async with asyncio.timeout(300):
                await asyncio.gather(*(self.one(i) for i in range(first, first + 300)))
        finished.set()
        await swapping


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_thousands_of_requests_leak_no_block_and_lose_no_request(lab, policy):
    async def main():
        soak = Soak(lab, policy)
        await soak.run()
        stats = await soak.engine.stats()
        assert lab.idle_clean(soak.engine)
        await soak.engine.close()
        return soak, stats

    soak, stats = asyncio.run(main())
    assert len(soak.done) == REQUESTS
    assert set(soak.done.values()) == {1}
    assert set(soak.outcomes) == set(ENDS)
    # the soak is only worth its time when all of it happened, again and again
    assert min(stats[k] for k in ("preemptions", "cancelled", "expired", "swaps", "evictions", "cached_tokens")) > 20
    assert soak.refused > 0
    assert soak.checked > 1000
    assert (stats["stale_tokens"] > 0) == (policy == "keep")
    assert stats["failures"] == 0


def test_a_prompt_of_200_000_tokens_goes_through_in_chunks_beside_one_that_decodes():
    tiny = ModelConfig(vocab_size=64, hidden=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate=16, max_positions=2**18)
    torch.manual_seed(0)

    async def main():
        from etude.protocols import GenerateRequest
        from etude.records import Sampling, Version

        engine = NativeEngine(
            Decoder(tiny).eval(), version=Version(lineage=0, ordinal=0, hash="0"), config=EngineConfig(num_blocks=14_000, token_budget=512)
        )
        other = engine.generate_stream(GenerateRequest(id="other", ids=[1], sampling=Sampling(max_tokens=600)))
        await anext(other)
        ids = np.random.default_rng(0).integers(0, 64, 200_000).tolist()
        long = asyncio.create_task(engine.generate(GenerateRequest(id="long", ids=ids, sampling=Sampling(max_tokens=4))))
        seen = 0
        while not long.done():
            piece = await anext(other)
            seen += len(piece.ids)
        stats = await engine.stats()
        await other.aclose()
        await engine.close()
        return await long, seen, stats

    got, seen, stats = asyncio.run(main())
    assert (len(got.ids), got.finish) == (4, Finish.LENGTH)
    assert np.isfinite(got.logprob_T).all()
    assert seen >= 200_000 // 512  # the other got a token in every step of the prefill
    assert stats["steps"] >= 200_000 // 512
