"""The engine over exact integer arithmetic (see conftest): anything wrong in scheduling or caching changes a token."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError, EngineError, UserError
from etude.inference import naive
from etude.inference.engine import EngineConfig
from etude.inference.sequence import join
from etude.protocols import Engine
from etude.records import Finish

MODES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16]),
        "token_budget": st.integers(4, 40),
        "max_running": st.integers(1, 4),
        "prefix_cache": st.booleans(),
        "spare_blocks": st.integers(0, 12),
    }
)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "word": st.integers(0, 2),
            "prompt": st.integers(1, 40),
            "max_tokens": st.integers(1, 20),
            "seed": st.integers(0, 2**63 - 1),
            "priority": st.integers(0, 2),
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "stop_ids": st.sampled_from([(), (5, 9, 20, 33)]),
            "after": st.integers(0, 12),
        }
    ),
    min_size=1,
    max_size=8,
)


def build(lab, mode, **more):
    mode = dict(mode)
    blocks = 2 + 60 // mode["block_size"] + mode.pop("spare_blocks")
    return lab.engine(num_blocks=blocks, **mode, **more)


def asked(lab, i, r):
    ids = [(r["word"] * 7 + j * (1 + r["word"])) % lab.vocab for j in range(r["prompt"])]
    keys = ("max_tokens", "seed", "priority", "temperature", "stop_ids")
    return lab.request(f"r{i}", ids, **{k: r[k] for k in keys})


@settings(max_examples=40, deadline=None)
@given(mode=MODES, requests=REQUESTS)
def test_engine_equals_its_naive_twin_under_any_load(lab, mode, requests):
    async def main():
        engine = build(lab, mode)

        async def one(i, r):
            await lab.ticks(r["after"])
            return await engine.generate(asked(lab, i, r))

        got = await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))
        assert lab.idle_clean(engine)
        return got

    for i, generation in enumerate(asyncio.run(main())):
        assert lab.same(generation, naive.generate(lab.ToyDecoder(), asked(lab, i, requests[i]), lab.version(0), block_size=4))


@settings(max_examples=30, deadline=None)
@given(mode=MODES, requests=REQUESTS, data=st.data())
def test_cancelling_at_any_moment_loses_nothing_and_leaks_nothing(lab, mode, requests, data):
    kinds = [data.draw(st.sampled_from(["finish", "cancel", "drop", "leave stream", "deadline"])) for _ in requests]
    moments = [data.draw(st.integers(0, 25)) for _ in requests]

    async def main():
        engine = build(lab, mode)
        model = lab.ToyDecoder()

        async def one(i, r):
            await lab.ticks(r["after"])
            request = asked(lab, i, r)
            whole = naive.generate(model, request, lab.version(0), block_size=4)
            if kinds[i] == "leave stream":
                stream = engine.generate_stream(request)
                async for _ in stream:
                    break
                await stream.aclose()
                return
            task = asyncio.create_task(engine.generate(request))
            await lab.ticks(moments[i])
            if kinds[i] == "drop":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            if kinds[i] == "cancel":
                await engine.cancel(request.id)
            elif kinds[i] == "deadline" and (seq := engine._active.get(request.id)):
                engine._deadlines += 1
                seq.deadline_s = 0.0
            got = await task
            assert got.ids == whole.ids[: len(got.ids)]
            assert len(got.routes_PTLK) == len(request.ids) + len(got.ids)
            if got.finish in (Finish.STOP, Finish.LENGTH):
                assert lab.same(got, whole)
            else:
                assert got.finish is {"cancel": Finish.CANCELLED, "deadline": Finish.DEADLINE}[kinds[i]]

        await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))
        assert lab.idle_clean(engine)

    asyncio.run(main())


@settings(max_examples=20, deadline=None)
@given(mode=MODES, requests=REQUESTS)
def test_pieces_of_a_stream_concatenate_to_generate(lab, mode, requests):
    async def main():
        engine = build(lab, mode)

        async def stream(i, r):
            await lab.ticks(r["after"])
            pieces = [piece async for piece in engine.generate_stream(asked(lab, i, r))]
            assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1)
            return join(pieces)

        return await asyncio.gather(*(stream(i, r) for i, r in enumerate(requests)))

    for i, generation in enumerate(asyncio.run(main())):
        assert lab.same(generation, naive.generate(lab.ToyDecoder(), asked(lab, i, requests[i]), lab.version(0), block_size=4))


def test_it_is_an_engine(lab):
    async def main():
        assert isinstance(lab.engine(), Engine)

    asyncio.run(main())


def test_preemption_under_tiny_memory_gives_the_same_tokens_and_routes(lab):
    async def main():
        engine = lab.engine(num_blocks=13, max_running=4, token_budget=16)
        requests = [lab.request(f"r{i}", [i + 1] * 10, max_tokens=30, seed=i) for i in range(4)]
        got = await asyncio.gather(*(engine.generate(r) for r in requests))
        stats = await engine.stats()
        assert stats["preemptions"] > 0
        assert lab.idle_clean(engine)
        return requests, got

    for request, generation in zip(*asyncio.run(main()), strict=True):
        assert lab.same(generation, naive.generate(lab.ToyDecoder(), request, lab.version(0), block_size=4))


def test_a_prompt_from_the_prefix_cache_returns_the_routes_of_all_its_positions(lab):
    async def main():
        engine = lab.engine()
        ids = list(range(30))
        first = await engine.generate(lab.request("first", ids, seed=1))
        follow = [*ids, *first.ids, 7]
        second = await engine.generate(lab.request("second", follow, seed=2))
        stats = await engine.stats()
        assert (first.cached_tokens, second.cached_tokens) == (0, 40)
        assert stats["cache_hit_rate"] == pytest.approx(40 / (30 + 43))
        assert lab.same(second, naive.generate(lab.ToyDecoder(), lab.request("second", follow, seed=2), lab.version(0), block_size=4))
        assert np.array_equal(second.routes_PTLK[:41], first.routes_PTLK[:41])

    asyncio.run(main())


def test_wide_routes_survive_the_cache(lab):
    async def main():
        model = lab.ToyDecoder(experts=300)
        got = await lab.engine(model, num_blocks=13).generate(lab.request("r", [3] * 20))
        assert got.routes_PTLK.dtype == np.uint16
        assert 255 < got.routes_PTLK[:-1].max() < 300
        assert (got.routes_PTLK[-1] == 65535).all()
        assert lab.same(got, naive.generate(model, lab.request("r", [3] * 20), lab.version(0), block_size=4))

    asyncio.run(main())


def test_routes_can_be_left_out(lab):
    async def main():
        assert (await lab.engine().generate(lab.request("r", [3] * 20, routes=False))).routes_PTLK is None

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_gives_the_log_probs_that_generate_reported(lab, temperature):
    async def main():
        engine = lab.engine(token_budget=16)
        prompt = list(range(20))
        generation = await engine.generate(lab.request("r", prompt, max_tokens=20, temperature=temperature))
        ids = [*prompt, *generation.ids]
        scored, other, _ = await asyncio.gather(
            engine.score(ids, temperature=temperature), engine.score(ids), engine.generate(lab.request("x", prompt))
        )
        assert np.array_equal(scored.logprob_T[20:], generation.logprob_T)
        assert np.array_equal(other.logprob_T[20:], generation.logprob_t1_T)
        twin = naive.score(lab.ToyDecoder(), ids, lab.version(0), temperature=temperature, block_size=4)
        assert np.array_equal(scored.logprob_T, twin.logprob_T)
        assert np.array_equal(scored.routes_TLK, twin.routes_TLK)
        assert scored.version.key == lab.version(0).key
        assert (await engine.score([5])).logprob_T.tolist() == [0.0]
        assert lab.idle_clean(engine)

    asyncio.run(main())


def test_deadline_and_limits_end_a_generation_with_what_it_has(lab):
    async def main():
        engine = lab.engine()
        late = await engine.generate(lab.request("late", [1, 2], deadline_s=0.0))
        assert (late.finish, late.ids, len(late.routes_PTLK)) == (Finish.DEADLINE, (), 2)
        far = await engine.generate(lab.request("far", [1, 2], deadline_s=1000.0))
        assert (far.finish, len(far.ids)) == (Finish.LENGTH, 12)
        full = await engine.generate(lab.request("full", [1] * 90, max_tokens=1000))
        assert (full.finish, len(full.ids)) == (Finish.LENGTH, 6)  # the window of 96 ends it
        tight = lab.engine(num_blocks=6)
        cache = await tight.generate(lab.request("cache", [1] * 15, max_tokens=1000))
        assert (cache.finish, len(cache.ids)) == (Finish.LENGTH, 6)  # 20 positions, and one token more
        stats = await engine.stats()
        assert (stats["expired"], stats["requests"]) == (1, 3)
        assert lab.idle_clean(engine)
        assert lab.idle_clean(tight)

    asyncio.run(main())


BAD = [
    ({"ids": []}, "empty"),
    ({"ids": [1, 61]}, "outside the vocabulary"),
    ({"ids": [-1]}, "outside the vocabulary"),
    ({"ids": [1.5]}, "integers"),
    ({"ids": ["a"]}, "integers"),
    ({"ids": [1] * 96}, "window"),
    ({"ids": [1] * 41}, "cache"),
    ({"ids": [1], "temperature": -1.0}, "temperature"),
    ({"ids": [1], "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize("bad, why", BAD)
def test_bad_requests_are_refused_and_the_engine_goes_on(lab, bad, why):
    async def main():
        engine = lab.engine(num_blocks=11)
        good = asyncio.create_task(engine.generate(lab.request("good", [1, 2, 3])))
        await lab.ticks(2)
        with pytest.raises(UserError, match=why):
            await engine.generate(lab.request("bad", **bad))
        with pytest.raises(UserError, match=why):
            async for _ in engine.generate_stream(lab.request("bad", **bad)):
                pass
        if len(bad) == 1 and len(bad["ids"]) != 96:
            with pytest.raises(UserError, match=why):
                await engine.score(bad["ids"])
        assert len((await good).ids) == 12
        assert lab.idle_clean(engine)

    asyncio.run(main())


def test_a_second_request_with_the_same_id_is_refused_while_the_first_runs(lab):
    async def main():
        engine = lab.engine()
        first = asyncio.create_task(engine.generate(lab.request("r", [1])))
        await lab.ticks(1)
        with pytest.raises(UserError, match="'r'"):
            await engine.generate(lab.request("r", [1]))
        await first
        await engine.generate(lab.request("r", [1]))

    asyncio.run(main())


def test_score_refuses_greedy(lab):
    async def main():
        with pytest.raises(UserError, match="temperature"):
            await lab.engine().score([1, 2], temperature=0.0)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_failing_step_fails_its_requests_visibly_and_the_engine_goes_on(lab, how):
    async def main():
        model = lab.ToyDecoder()
        engine = lab.engine(model, max_running=2)
        tasks = [asyncio.create_task(engine.generate(lab.request(f"r{i}", [i + 1] * 9))) for i in range(3)]
        tasks.append(asyncio.create_task(engine.score([1] * 30)))
        stream = engine.generate_stream(lab.request("stream", [1] * 5, priority=-9))
        pieces = asyncio.create_task(_collect(stream))
        await lab.ticks(4)
        model.poison, model.fail_at = how == "not finite", 1 if how == "raises" else None
        results = await asyncio.gather(*tasks, pieces, return_exceptions=True)
        assert all(type(r) is EngineError for r in results)
        assert all(("out of memory" if how == "raises" else "not finite") in str(r) for r in results)
        assert results[0].__cause__ is not None
        model.poison, model.fail_at = False, None
        assert lab.idle_clean(engine)
        request = lab.request("after", [1] * 9)
        after = await engine.generate(request)
        assert after.cached_tokens == 0
        assert lab.same(after, naive.generate(lab.ToyDecoder(), request, lab.version(0), block_size=4))
        assert (await engine.stats())["failures"] == 1

    asyncio.run(main())


async def _collect(stream):
    return [piece async for piece in stream]


def test_closing_fails_those_who_wait_and_later_requests(lab):
    async def main():
        engine = lab.engine()
        task = asyncio.create_task(engine.generate(lab.request("r", [1])))
        await lab.ticks(3)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(lab.request("r", [1]))
        with pytest.raises(EngineError, match="closed"):
            await engine.load(lab.manifest(1), "")
        await engine.close()

    asyncio.run(main())


def test_one_engine_serves_several_event_loops_in_turn(lab):
    engine = lab.engine()
    first = asyncio.run(engine.generate(lab.request("r", [1, 2])))
    assert lab.same(first, asyncio.run(engine.generate(lab.request("r", [1, 2]))))


def test_stats_state_the_memory_budget_at_the_start(lab):
    async def main():
        stats = await lab.engine(num_blocks=33, block_size=4).stats()
        token = 2 * 2 * 2 * 4 + 2 * 3  # keys and values of 2 layers x 2 floats, routes of 2 layers x 3 experts
        assert (stats["blocks_total"], stats["block_bytes"], stats["cache_tokens"]) == (32, token * 4, 128)
        assert stats["cache_bytes"] == 33 * token * 4
        derived = await lab.engine(num_blocks=0, cache_bytes=token * 4 * 50 + 7).stats()
        assert derived["blocks_total"] == 49
        assert all(isinstance(v, float) for v in stats.values())

    asyncio.run(main())


def test_a_cache_that_holds_no_block_is_refused(lab):
    with pytest.raises(ConfigError, match="cache_bytes"):
        lab.engine(num_blocks=0, cache_bytes=100)


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"token_budget": 3, "max_running": 4}, {"num_blocks": -1}])
def test_bad_config_is_refused(bad):
    with pytest.raises(ConfigError, match=r"engine\."):
        EngineConfig(**bad)
