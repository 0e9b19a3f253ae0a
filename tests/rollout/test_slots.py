"""Slots: admission order, the staleness bound, and what a checkpoint keeps, over random schedules."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from etude.records import Group, Task, Version
from etude.rollout.slots import Slots
from etude.tasks.source import make_task

TASK = make_task(1)
V0 = Version(lineage=0, ordinal=0, hash="00")


def group(admission: int) -> Group:
    return Group(admission=admission, task_id=TASK.id, admitted_at=V0, members=())


def next_task() -> Task:
    return TASK


@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 3),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 5),
    silent=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_staleness_is_bounded_and_order_kept_whatever_finishes_first(
    seed: int, per_step: int, staleness: int, steps: int, silent: float
) -> None:
    """Also when any taken group may be dropped, and the step goes on waiting for another."""
    rng = random.Random(seed)
    slots = Slots(per_step, staleness, steps)
    admitted_at: dict[int, int] = {}
    taken: list[tuple[int, int]] = []
    dropped: list[int] = []
    version = 0

    async def roll(admission: int) -> None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        slots.fill(admission, group(admission))

    async def feed(crew: asyncio.TaskGroup) -> None:
        while slots.remaining or silent:
            admission, _task = await slots.admit(next_task)
            admitted_at[admission] = version
            crew.create_task(roll(admission))

    async def go() -> None:
        nonlocal version
        async with asyncio.TaskGroup() as crew:
            feeding = crew.create_task(feed(crew))
            for step in range(steps):
                got: list[int] = []
                while len(got) < per_step:
                    (next_group,) = await slots.take(1)
                    if rng.random() < silent:
                        slots.drop(next_group.admission)
                        dropped.append(next_group.admission)
                    else:
                        got.append(next_group.admission)
                taken.extend((step, a) for a in got)
                assert sum(slots.counts[k] for k in ("rolling", "ready")) <= slots.capacity
                slots.trained(per_step)
                version += 1
                slots.release()
            feeding.cancel()

    asyncio.run(asyncio.wait_for(go(), 30))
    admissions = [a for _, a in taken]
    assert len(admissions) == per_step * steps
    assert admissions == sorted(admissions)
    assert sorted([*admissions, *dropped]) == list(range(len(admissions) + len(dropped)))
    assert all(step - admitted_at[a] <= staleness for step, a in taken)


def test_a_third_admission_waits_for_release() -> None:
    async def go() -> None:
        slots = Slots(1, 1, 9)
        await slots.admit(next_task)
        await slots.admit(next_task)
        third = asyncio.create_task(slots.admit(next_task))
        slots.fill(0, group(0))
        slots.fill(1, group(1))
        assert [g.admission for g in await slots.take(1)] == [0]
        slots.trained(1)
        await asyncio.sleep(0.01)
        assert not third.done()
        slots.release()
        assert (await third)[0] == 2

    asyncio.run(go())


def test_restored_slots_roll_what_was_in_flight_again_under_its_number() -> None:
    async def go() -> None:
        slots = Slots(2, 1, 3)
        for _ in range(4):
            await slots.admit(next_task)
        slots.fill(1, group(1))
        slots.fill(0, group(0))
        slots.fill(3, group(3))
        await slots.take(2)
        slots.trained(2)
        state, ready = slots.state(), slots.ready
        assert [a for a, _ in state["rolling"]] == [2]
        again = Slots(2, 1, 3)
        again.restore(state["next"], state["trained"], state["dropped"], state["rolling"], ready)
        assert again.remaining == 3
        assert (await again.admit(next_task))[0] == 2
        again.fill(2, group(2))
        assert [g.admission for g in await again.take(2)] == [2, 3]

    asyncio.run(go())


def test_drained_waits_until_no_group_is_rolling_and_none_can_be_admitted() -> None:
    async def go() -> None:
        slots = Slots(1, 0, 2)
        drained = asyncio.create_task(slots.drained())
        await asyncio.sleep(0.01)
        assert not drained.done()
        await slots.admit(next_task)
        await asyncio.sleep(0.01)
        assert not drained.done()
        slots.fill(0, group(0))
        await asyncio.wait_for(drained, 5)

    asyncio.run(go())
