"""What every engine must do, whoever wrote it. An engine that passes can stand wherever another does: see docs/engine-contract.md."""

import asyncio
import contextlib

import numpy as np
import pytest

from etude.errors import BusyError, ContextError, EngineError, EtudeError, UserError
from etude.inference.sequence import join
from etude.protocols import Engine, GenerateRequest
from etude.records import Finish, Sampling

WINDOW = 1024
LONG = 200
"""Tokens of a request that is still running when a test turns to it."""


def request(id="r", ids=(1, 2, 3), *, priority=0, deadline_s=None, routes=True, **sampling):
    settings = {"max_tokens": 12, "seed": 1} | sampling
    return GenerateRequest(id=id, ids=ids, sampling=Sampling(**settings), priority=priority, deadline_s=deadline_s, routes=routes)


def consistent(asked, got, world):
    """Every column has a value a token, and routes a row a position."""
    n = len(got.ids)
    assert got.id == asked.id
    assert {len(c) for c in (got.logprob_T, got.logprob_t1_T, got.version_T, got.kept_T)} == {n}
    assert (got.logprob_T.dtype, got.logprob_t1_T.dtype, got.version_T.dtype) == (np.float32, np.float32, np.int16)
    assert all(type(i) is int and 0 <= i < world.vocab for i in got.ids)
    assert (got.logprob_T <= 0).all()
    assert (got.logprob_t1_T <= 0).all()
    assert np.isfinite(got.logprob_t1_T).all()
    assert (got.routes_PTLK is not None) == (world.routed and asked.routes)
    if got.routes_PTLK is not None:
        assert len(got.routes_PTLK) == len(asked.ids) + n
        if n:
            assert (got.routes_PTLK[:-1] != 255).all()
            assert (got.routes_PTLK[-1] == 255).all()
    if n:
        assert int(got.version_T.max()) < len(got.versions)


async def started(world, asked):
    """The request's stream after its first piece: it is running now."""
    stream = world.engine.generate_stream(asked)
    first = await anext(stream)
    assert first.finish is None
    return stream, first


async def crowd(world):
    """Requests in the engine."""
    stats = await world.engine.stats()
    return stats["running"] + stats["waiting"]


async def calm(world):
    """Nothing is left of any request."""
    for _ in range(2000):
        stats = await world.engine.stats()
        if stats["running"] == stats["waiting"] == 0:
            break
        await asyncio.sleep(0.001)
    assert (stats["running"], stats["waiting"], stats.get("blocks_used", 0.0)) == (0, 0, 0)
    assert all(isinstance(v, float) for v in stats.values())


def test_it_is_an_engine_with_a_version(play):
    async def scene(world):
        assert isinstance(world.engine, Engine)
        assert (await world.engine.version()).ordinal == 0
        assert (await world.engine.stats())["window"] == WINDOW
        await calm(world)

    play(scene)


def test_it_samples_as_many_tokens_as_asked_and_says_where_each_is_from(play):
    async def scene(world):
        for asked in (request(max_tokens=1), request(max_tokens=30), request(ids=np.array([4, 5]), routes=False)):
            got = await world.engine.generate(asked)
            consistent(asked, got, world)
            assert (len(got.ids), got.finish) == (asked.sampling.max_tokens, Finish.LENGTH)
            assert [v.key for v in got.versions] == [(await world.engine.version()).key]
            assert not got.kept_T.any()
        await calm(world)

    play(scene)


def test_a_stop_id_ends_it_and_is_its_last_token(play):
    async def scene(world):
        whole = await world.engine.generate(request(max_tokens=40))
        stop = whole.ids[7]
        at = whole.ids.index(stop)
        got = await world.engine.generate(request(max_tokens=40, stop_ids=(stop,)))
        assert (got.ids, got.finish) == (whole.ids[: at + 1], Finish.STOP)
        consistent(request(), got, world)

    play(scene)


def test_the_same_request_gives_the_same_tokens_and_another_seed_others(play):
    async def scene(world):
        again = [await world.engine.generate(request(max_tokens=30, seed=s)) for s in (5, 5, 6)]
        assert again[0].ids == again[1].ids
        assert np.array_equal(again[0].logprob_T, again[1].logprob_T)
        if world.queues:  # a scripted engine says the same whatever the seed
            assert again[0].ids != again[2].ids
        greedy = [await world.engine.generate(request(max_tokens=30, temperature=0.0, seed=s)) for s in (5, 6)]
        assert greedy[0].ids == greedy[1].ids
        negative = await world.engine.generate(request(seed=-3))
        assert len(negative.ids) == 12

    play(scene)


def test_the_pieces_of_a_stream_are_the_generation(play):
    async def scene(world):
        asked = request(max_tokens=25, temperature=0.7)
        whole = await world.engine.generate(asked)
        pieces = [piece async for piece in world.engine.generate_stream(asked)]
        assert len(pieces) > 1
        assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        got = join(pieces)
        consistent(asked, got, world)
        assert (got.ids, got.finish, [v.key for v in got.versions]) == (whole.ids, whole.finish, [v.key for v in whole.versions])
        assert np.array_equal(got.logprob_T, whole.logprob_T)
        assert np.array_equal(got.logprob_t1_T, whole.logprob_t1_T)
        if world.routed:
            assert np.array_equal(got.routes_PTLK, whole.routes_PTLK)
        await calm(world)

    play(scene)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_says_what_generate_said(play, temperature):
    async def scene(world):
        asked = request(ids=list(range(40)), max_tokens=150, temperature=temperature)
        got = await world.engine.generate(asked)
        ids = [*asked.ids, *got.ids]
        scored = await world.engine.score(ids, temperature=temperature)
        plain = await world.engine.score(np.array(ids))
        assert scored.logprob_T[0] == 0
        assert len(scored.logprob_T) == len(ids)
        assert scored.version.key == (await world.engine.version()).key
        assert np.array_equal(scored.logprob_T[40:], got.logprob_T)
        assert np.array_equal(plain.logprob_T[40:], got.logprob_t1_T)
        if scored.routes_TLK is not None:
            assert np.array_equal(scored.routes_TLK[:-1], got.routes_PTLK[:-1])
            assert (scored.routes_TLK != 255).all()
        assert (await world.engine.score([5])).logprob_T.tolist() == [0.0]
        await calm(world)

    play(scene)


def test_a_long_prompt_is_computed_in_chunks_and_gives_the_same_answer(play):
    async def scene(world):
        asked = request(ids=[i % world.vocab for i in range(300)], max_tokens=3)
        alone = await world.engine.generate(asked)
        stream, _ = await started(world, request("other", max_tokens=60))
        beside = await world.engine.generate(asked)
        assert beside.ids == alone.ids
        assert np.array_equal(beside.logprob_T, alone.logprob_T)
        if world.prefixes:
            assert (alone.cached_tokens, beside.cached_tokens) == (0, 288)
        await stream.aclose()

    play(scene)


def test_the_window_ends_a_generation(play):
    async def scene(world):
        got = await world.engine.generate(request(ids=[1] * (WINDOW - 5), max_tokens=100))
        assert (len(got.ids), got.finish) == (5, Finish.LENGTH)

    play(scene)


BAD = [
    ({"ids": []}, UserError, "empty"),
    ({"ids": [1, 10**6]}, UserError, "outside the vocabulary"),
    ({"ids": [-1]}, UserError, "outside the vocabulary"),
    ({"ids": [1.5]}, UserError, "integers"),
    ({"ids": ["a"]}, UserError, "integers"),
    ({"ids": [1] * WINDOW}, ContextError, "window"),
    ({"temperature": -1.0}, UserError, "temperature"),
    ({"temperature": float("nan")}, UserError, "temperature"),
    ({"top_p": 0.0}, UserError, "top_p"),
    ({"top_p": 1.1}, UserError, "top_p"),
    ({"top_k": -1}, UserError, "top_k"),
    ({"max_tokens": 0}, UserError, "max_tokens"),
    ({"stop_ids": (10**6,)}, UserError, "stop id"),
    ({"deadline_s": -1.0}, UserError, "deadline_s"),
    ({"deadline_s": float("nan")}, UserError, "deadline_s"),
    ({"priority": 0.5}, UserError, "priority"),
    ({"id": ""}, UserError, "needs an id"),
]


def test_bad_requests_are_refused_by_name_and_the_engine_goes_on(play):
    async def scene(world):
        stream, _ = await started(world, request("good", max_tokens=100))
        for bad, kind, why in BAD:
            with pytest.raises(kind, match=why):
                await world.engine.generate(request(**{"id": "bad"} | bad))
            with pytest.raises(kind, match=why):
                async for _ in world.engine.generate_stream(request(**{"id": "bad"} | bad)):
                    pass
        for ids, kind, why in [([], UserError, "empty"), ([10**6], UserError, "vocabulary"), ([1] * (WINDOW + 1), ContextError, "window")]:
            with pytest.raises(kind, match=why):
                await world.engine.score(ids)
        for temperature in (0.0, -1.0, float("nan")):
            with pytest.raises(UserError, match="temperature"):
                await world.engine.score([1, 2], temperature=temperature)
        pieces = [piece async for piece in stream]
        assert pieces[-1].finish is Finish.LENGTH
        await calm(world)

    play(scene)


def test_an_id_belongs_to_one_request_at_a_time(play):
    async def scene(world):
        stream, _ = await started(world, request("twin", max_tokens=LONG))
        with pytest.raises(UserError, match="'twin'"):
            await world.engine.generate(request("twin"))
        await stream.aclose()
        await calm(world)
        assert len((await world.engine.generate(request("twin"))).ids) == 12

    play(scene)


def test_cancel_ends_a_request_at_once_with_what_it_has(play):
    async def scene(world):
        whole = await world.engine.generate(request(max_tokens=LONG))
        stream, first = await started(world, request("c", max_tokens=LONG))
        await world.engine.cancel("c")
        got = join([first, *[piece async for piece in stream]])
        assert got.finish is Finish.CANCELLED
        assert 0 < len(got.ids) < LONG
        assert got.ids == whole.ids[: len(got.ids)]
        consistent(request("c"), got, world)
        await world.engine.cancel("c")
        await world.engine.cancel("never heard of")
        await calm(world)

    play(scene)


def test_who_goes_away_is_no_longer_worked_for(play):
    async def scene(world):
        stream, _ = await started(world, request("leaves a stream", max_tokens=LONG))
        await stream.aclose()
        await calm(world)
        task = asyncio.create_task(world.engine.generate(request("is cancelled", max_tokens=LONG)))
        while not (await world.engine.stats())["running"]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await calm(world)
        assert (await world.engine.stats())["sampled_tokens"] < 2 * LONG

    play(scene)


def test_a_deadline_ends_a_request_with_what_it_has(play):
    async def scene(world):
        late = await world.engine.generate(request("late", deadline_s=0.0))
        assert (late.finish, late.ids) == (Finish.DEADLINE, ())
        consistent(request("late"), late, world)
        in_time = await world.engine.generate(request("in time", deadline_s=1000.0))
        assert in_time.finish is Finish.LENGTH
        await calm(world)

    play(scene)


def test_every_request_is_answered_once_under_load(play):
    async def scene(world):
        sent = {}

        async def one(i):
            asked = request(f"r{i}", ids=[1 + i % 9] * (1 + i * 7 % 90), max_tokens=1 + i % 13, seed=i, priority=i % 3)
            sent[asked.id] = asked
            while True:
                try:
                    return await world.engine.generate(asked)
                except BusyError:
                    await asyncio.sleep(0.001)

        for got in await asyncio.gather(*(one(i) for i in range(40))):
            asked = sent.pop(got.id)
            assert (len(got.ids), got.finish) == (asked.sampling.max_tokens, Finish.LENGTH)
            consistent(asked, got, world)
        assert not sent
        await calm(world)

    play(scene)


def test_a_full_engine_says_so_at_once(play):
    async def scene(world):
        streams = []
        for i in range(4):
            streams.append((await started(world, request(f"r{i}", max_tokens=LONG)))[0])
        tasks = [asyncio.create_task(world.engine.generate(request(f"w{i}", max_tokens=LONG))) for i in range(6)]
        while await crowd(world) < 10:
            await asyncio.sleep(0)
        with pytest.raises(BusyError, match="come back later"):
            await world.engine.generate(request("one too many"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await calm(world)
        assert len((await world.engine.generate(request("later"))).ids) == 12

    play(scene)


def test_better_priorities_go_first(play):
    async def scene(world):
        if not world.queues:
            return
        streams = []
        for i in range(4):
            streams.append((await started(world, request(f"r{i}", max_tokens=LONG)))[0])
        order = []

        async def one(id, priority):
            await world.engine.generate(request(id, priority=priority))
            order.append(id)

        tasks = []
        for i in range(3):
            tasks.append(asyncio.create_task(one(f"slow {i}", 1)))
            while (await world.engine.stats())["waiting"] < i + 1:
                await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one("fast", 0)))
        while (await world.engine.stats())["waiting"] < 4:
            await asyncio.sleep(0)
        await streams[0].aclose()  # one place becomes free, for one after the other
        await asyncio.gather(*tasks)
        assert order == ["fast", "slow 0", "slow 1", "slow 2"]
        for stream in streams:
            await stream.aclose()

    play(scene)


def test_weights_change_in_flight_and_every_token_says_which_sampled_it(play):
    async def scene(world):
        stream, first = await started(world, request("r", max_tokens=LONG))
        ahead = world.publish(1)
        begun = asyncio.create_task(world.engine.generate(request("beside", max_tokens=100)))
        assert (await world.engine.load(*ahead)).key == ahead[0].version.key
        assert (await world.engine.version()).key == ahead[0].version.key
        got = join([first, *[piece async for piece in stream]])
        consistent(request("r"), got, world)
        assert [v.ordinal for v in got.versions] == [0, 1]
        assert set(got.version_T.tolist()) == {0, 1}
        assert (np.diff(got.version_T) >= 0).all()
        assert len((await begun).ids) == 100
        after = await world.engine.generate(request("after"))
        assert [v.ordinal for v in after.versions] == [1]
        assert not after.kept_T.any()
        assert (await world.engine.score([1, 2, 3])).version.ordinal == 1
        again = world.publish(2)
        await world.engine.load(*again)
        assert (await world.engine.stats())["swaps"] == 2
        await calm(world)

    play(scene)


def test_bad_weights_are_refused_and_the_old_ones_go_on(play):
    async def scene(world):
        before = await world.engine.generate(request("before"))
        stream, first = await started(world, request("r", max_tokens=60))
        with pytest.raises(EtudeError, match=r"canary|delta"):
            await world.engine.load(*world.spoil())
        assert (await world.engine.version()).ordinal == 0
        got = join([first, *[piece async for piece in stream]])
        assert [v.ordinal for v in got.versions] == [0]
        assert (await world.engine.generate(request("after"))).ids == before.ids

    play(scene)


def test_a_closed_engine_says_so_to_those_who_wait_and_to_later_ones(play):
    async def scene(world):
        task = asyncio.create_task(world.engine.generate(request("waits", max_tokens=LONG)))
        while not (await world.engine.stats())["running"]:
            await asyncio.sleep(0)
        await world.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        for call in (world.engine.generate(request("later")), world.engine.score([1, 2]), world.engine.load(*world.publish(1))):
            with pytest.raises(EngineError, match="closed"):
                await call
        with contextlib.suppress(EngineError):
            await world.engine.close()

    play(scene)
