"""In-flight weight swap: who keeps going, on which keys and values, under which version."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.inference import naive
from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.records import Version
from etude.sync.publish import Publisher


def salted(lab, ordinal):
    model = lab.ToyDecoder()
    model.salt.data.fill_(ordinal)
    return model


def replay(lab, request, generation):
    """Every token again, from scratch, under the version that is said to have sampled it."""
    ids = list(request.ids)
    for i, token in enumerate(generation.ids):
        version = generation.versions[generation.version_T[i]]
        again = lab.request("again", ids, max_tokens=1, seed=request.sampling.seed)
        got = naive.generate(salted(lab, version.ordinal), again, version, block_size=4)
        assert got.ids == (token,)
        assert got.logprob_T[0] == generation.logprob_T[i]
        ids.append(token)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_requests_in_progress_go_on_and_every_token_carries_its_version(lab, policy):
    async def main():
        engine = lab.engine(cache_policy=policy, max_running=3, token_budget=12)
        requests = [lab.request(f"r{i}", [i + 1] * (3 + 4 * i), max_tokens=20, seed=i) for i in range(6)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for ordinal in (1, 2, 3):
            await lab.ticks(9)
            assert (await engine.load(lab.manifest(ordinal), "")).ordinal == ordinal
        got = await asyncio.gather(*tasks)
        stats = await engine.stats()
        assert lab.idle_clean(engine)
        assert stats["swaps"] == 3
        assert stats["sampled_tokens"] == 6 * 20
        assert (stats["stale_tokens"] > 0) == (policy == "keep")
        return requests, got

    requests, got = asyncio.run(main())
    assert [g.id for g in got] == [r.id for r in requests]
    assert any(len(g.versions) > 1 for g in got)
    for request, generation in zip(requests, got, strict=True):
        assert len(generation.ids) == len(generation.version_T) == 20
        assert (np.diff(generation.version_T) >= 0).all()
        assert len({v.key for v in generation.versions}) == len(generation.versions)
        assert generation.kept_T.any() == (policy == "keep" and len(generation.versions) > 1)
        if policy == "recompute" or len(generation.versions) == 1:
            replay(lab, request, generation)


def test_kept_keys_and_values_are_those_of_the_versions_that_computed_them(lab):
    async def main():
        engine = lab.engine(cache_policy="keep")
        request = lab.request("r", list(range(9)), max_tokens=20)
        task = asyncio.create_task(engine.generate(request))
        await lab.ticks(8)
        await engine.load(lab.manifest(1), "")
        return request, await task

    request, got = asyncio.run(main())
    before = int((got.version_T == 0).sum())
    assert 0 < before < 20
    assert got.kept_T.tolist() == [False] * before + [True] * (20 - before)
    # Position 8 + i was computed by the step that sampled token i; so salt 1 starts at position 8 + before.
    salts = [0] * (8 + before) + [1] * (20 - before)
    ids = [*request.ids, *got.ids]
    state = 0
    states = []
    for p, salt in enumerate(salts):
        state += (ids[p] * 97 + p * 31 + salt * 1009 + 5) % 4093 * (p * 7 + 1)
        states.append(state % 65521)
    want = [[[(s + 3 * layer + k) % 7 for k in range(3)] for layer in range(2)] for s in states]
    assert got.routes_PTLK[:-1].tolist() == want


def test_new_requests_never_use_what_an_old_version_left_in_the_cache(lab):
    async def main():
        engine = lab.engine(cache_policy="keep")
        ids = list(range(40))
        await engine.generate(lab.request("fill", ids))
        assert (await engine.generate(lab.request("hit", ids))).cached_tokens == 36
        running = asyncio.create_task(engine.generate(lab.request("running", ids, max_tokens=30)))
        await lab.ticks(3)
        await engine.load(lab.manifest(1), "")
        request = lab.request("miss", ids, seed=5)
        missed = await engine.generate(request)
        assert missed.cached_tokens == 0
        assert lab.same(missed, naive.generate(salted(lab, 1), request, lab.version(1), block_size=4))
        assert [v.ordinal for v in (await running).versions] == [0, 1]
        after = lab.request("after", [*ids, *(await running).ids], max_tokens=5)
        found = await engine.generate(after)
        assert found.cached_tokens == 40  # blocks of "miss", none of "running"
        assert lab.same(found, naive.generate(salted(lab, 1), after, lab.version(1), block_size=4))

    asyncio.run(main())


def test_a_score_is_of_one_version_even_when_the_swap_comes_in_its_middle(lab):
    async def main():
        engine = lab.engine(token_budget=8)
        ids = [i % lab.vocab for i in range(60)]
        task = asyncio.create_task(engine.score(ids))
        await lab.ticks(4)
        await engine.load(lab.manifest(1), "")
        return ids, await task

    ids, scored = asyncio.run(main())
    twin = naive.score(salted(lab, 1), ids, lab.version(1), block_size=4)
    assert scored.version.ordinal == 1
    assert np.array_equal(scored.logprob_T, twin.logprob_T)
    assert np.array_equal(scored.routes_TLK, twin.routes_TLK)


def test_weights_that_cannot_be_applied_leave_the_old_version_serving(lab):
    def refuse(state, manifest, source):
        raise IntegrityError("payload 3 does not match its hash")

    async def main():
        engine = lab.engine()
        engine._apply = refuse
        task = asyncio.create_task(engine.generate(lab.request("r", [1, 2, 3])))
        await lab.ticks(3)
        with pytest.raises(IntegrityError, match="payload 3"):
            await engine.load(lab.manifest(1), "")
        assert (await engine.version()).ordinal == 0
        assert (await task).versions == (await engine.version(),)

    asyncio.run(main())


def test_coming_back_to_an_earlier_version_is_recorded_by_its_own_index(lab):
    async def main():
        engine = lab.engine(cache_policy="recompute")
        request = lab.request("r", [1, 2, 3], max_tokens=30)
        task = asyncio.create_task(engine.generate(request))
        for ordinal in (1, 0, 1):
            await lab.ticks(6)
            await engine.load(lab.manifest(ordinal), "")
        return request, await task

    request, got = asyncio.run(main())
    assert [v.ordinal for v in got.versions] == [0, 1]
    assert [int(v) for i, v in enumerate(got.version_T) if i == 0 or v != got.version_T[i - 1]] == [0, 1, 0, 1]
    replay(lab, request, got)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(["keep", "recompute"]),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    swaps=st.lists(st.integers(0, 12), max_size=5),
    spare=st.integers(0, 10),
)
def test_nothing_is_lost_or_duplicated_by_swaps_at_any_moment_under_tiny_memory(lab, policy, prompts, swaps, spare):
    async def main():
        engine = lab.engine(cache_policy=policy, num_blocks=16 + spare, max_running=4, token_budget=12)
        requests = [lab.request(f"r{i}", [i % 2 + 1] * n, max_tokens=15, seed=i) for i, n in enumerate(prompts)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for ordinal, wait in enumerate(swaps, 1):
            await lab.ticks(wait)
            await engine.load(lab.manifest(ordinal), "")
        got = await asyncio.gather(*tasks)
        assert lab.idle_clean(engine)
        return requests, got

    requests, got = asyncio.run(main())
    for request, generation in zip(requests, got, strict=True):
        assert len(generation.ids) == 15
        assert len(generation.routes_PTLK) == len(request.ids) + 15
        assert (np.diff(generation.version_T) >= 0).all()
        if policy == "recompute":
            replay(lab, request, generation)


SHAPE = ModelConfig(vocab_size=67, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48, max_positions=128)


def trained(seed):
    """Stands for the trainer's model after some steps."""
    model = Decoder(SHAPE, numerics="invariant").eval()
    model.init_weights(seed)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)
    return model


def test_versions_published_by_a_trainer_reach_the_engine_in_flight(lab, tmp_path):
    async def main():
        publisher = Publisher(tmp_path, lineage=0)
        trainer = trained(0)
        first = publisher.publish(trainer.state_dict(), Version(lineage=0, ordinal=0, hash=""))
        publisher.commit(first.version)
        engine = NativeEngine(trained(0), version=first.version, config=EngineConfig(num_blocks=40, cache_policy="recompute"))
        request = lab.request("r", [1, 2, 3], max_tokens=60)
        task = asyncio.create_task(engine.generate(request))
        models = {0: trained(0)}
        for ordinal in (1, 2):
            await lab.ticks(15)
            models[ordinal] = trained(ordinal)
            trainer.load_state_dict(models[ordinal].state_dict())
            canary = naive.score(trainer, range(20), first.version).logprob_T
            manifest = publisher.publish(
                trainer.state_dict(), Version(lineage=0, ordinal=ordinal, hash=""), (range(20), canary[ordinal - 1 :])
            )
            assert (await engine.load(manifest, str(tmp_path))).key == manifest.version.key
            publisher.commit(manifest.version)
        got = await task
        assert [v.ordinal for v in got.versions] == [0, 1, 2]
        ids = list(request.ids)
        for i, token in enumerate(got.ids):
            version = got.versions[got.version_T[i]]
            again = lab.request("again", ids, max_tokens=1, seed=request.sampling.seed)
            assert naive.generate(models[version.ordinal], again, version).ids == (token,)
            ids.append(token)

        wrong = publisher.publish(trained(3).state_dict(), Version(lineage=0, ordinal=3, hash=""), (range(20), canary))
        with pytest.raises(IntegrityError, match="canary"):
            await engine.load(wrong, str(tmp_path))
        assert (await engine.version()).ordinal == 2
        scored = await engine.score(range(20))
        assert np.array_equal(scored.logprob_T, canary)
        assert lab.idle_clean(engine)

    asyncio.run(main())
