"""The reconciler: slots that bound staleness by construction.

A slot is charged when a group is admitted and freed after the step that trained it is published:

    free --admit--> rolling --fill--> ready --take--> training --trained, release--> free
                                                         `----drop----> free

With `per_step` groups a step and a staleness limit S there are (S + 1) * per_step slots. A group is admitted only when fewer than that
are charged, so at most (S + 1) * per_step - 1 groups stand before it; each step trains the oldest per_step of them, so it is trained
at most S steps later, and its oldest token is at most S versions behind the trainer that consumes it. A group that is dropped (it
carries no signal) shortens the queue, and the group admitted in its place stands at the queue's end like any other.

Example: per_step = 2, S = 1
    admit, admit, admit, admit   # 0..3 rolling, 4/4 slots; the next admit waits
    fill(1), fill(0)             # take(2) gives groups 0, 1 whatever finished first
    trained(2), release()        # two slots free: 4 and 5 are admitted under the new version
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from etude.records import Group, Task


class Slots:
    """Groups by admission number, from admission to release. One event loop, no locks."""

    def __init__(self, per_step: int, max_staleness: int, steps: int) -> None:
        self.per_step = per_step
        self.capacity = (max_staleness + 1) * per_step
        self.total = steps * per_step
        self._next = 0
        self._taken = 0
        self._held: list[int] = []
        """Taken, and neither trained nor dropped yet."""
        self._dropped = 0
        self._trained = 0
        self._released = 0
        self._rolling: dict[int, Task] = {}
        self._ready: dict[int, Group] = {}
        self._again: list[tuple[int, Task]] = []
        self._changed = asyncio.Condition()
        self._wakeups: set[asyncio.Task[None]] = set()

    @property
    def remaining(self) -> int:
        """Admissions still to be made in this run, those to be repeated after a resume included."""
        return self.total - (self._next - self._dropped) + len(self._again)

    @property
    def _room(self) -> bool:
        return self._next - self._dropped < min(self._released + self.capacity, self.total)

    async def admit(self, next_task: Callable[[], Task]) -> tuple[int, Task]:
        """The next admission number and its task. Waits for: a free slot, for ever when the run needs no more. Unblocked by: `release`,
        `drop`."""
        if self._again:
            admission, task = self._again.pop(0)
        else:
            async with self._changed:
                await self._changed.wait_for(lambda: self._room)
            admission, task = self._next, next_task()
            self._next += 1
        self._rolling[admission] = task
        return admission, task

    def fill(self, admission: int, group: Group) -> None:
        """A group is complete; its dropped members are inside with their reasons."""
        del self._rolling[admission]
        self._ready[admission] = group
        self._wake()

    async def take(self, n: int) -> list[Group]:
        """The next n groups in admission order. Waits for: the oldest of them. Unblocked by: `fill`."""
        wanted = range(self._taken, self._taken + n)
        async with self._changed:
            await self._changed.wait_for(lambda: all(a in self._ready for a in wanted))
        self._taken += n
        self._held += wanted
        return [self._ready[a] for a in wanted]

    def drop(self, admission: int) -> None:
        """A taken group leaves the books untrained, and its slot is free at once."""
        self._held.remove(admission)
        del self._ready[admission]
        self._dropped += 1
        self._wake()

    async def drained(self) -> None:
        """Waits for: every group to be complete, with no further admission possible (lockstep's barrier)."""

        def quiet() -> bool:
            return not self._room and not self._rolling and not self._again

        async with self._changed:
            await self._changed.wait_for(quiet)

    def trained(self, n: int) -> None:
        """The oldest n taken groups are in the weights; they leave the books, their slots stay charged."""
        for admission in self._held[:n]:
            del self._ready[admission]
        del self._held[:n]
        self._trained += n

    def release(self) -> None:
        """The version that trained them serves: their slots are free."""
        self._released = self._trained
        self._wake()

    def state(self) -> dict[str, Any]:
        """Counters and the tasks in flight; ready groups are saved beside it (`ready`)."""
        return {"next": self._next, "trained": self._trained, "dropped": self._dropped, "rolling": sorted(self._rolling.items())}

    @property
    def ready(self) -> list[Group]:
        return [self._ready[a] for a in sorted(self._ready)]

    def restore(self, next_admission: int, trained: int, dropped: int, again: list[tuple[int, Task]], ready: list[Group]) -> None:
        """Take up a checkpoint: ready groups are kept, groups in flight are rolled again under the same numbers."""
        self._next, self._trained, self._released, self._dropped = next_admission, trained, trained, dropped
        self._taken, self._held = trained + dropped, []
        self._again = list(again)
        self._ready = {g.admission: g for g in ready}

    @property
    def counts(self) -> dict[str, int]:
        return {"rolling": len(self._rolling), "ready": len(self._ready), "capacity": self.capacity}

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._wakeups.add(task)
        task.add_done_callback(self._wakeups.discard)
