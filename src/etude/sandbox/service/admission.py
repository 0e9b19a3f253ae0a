"""Who may start now: by memory that was promised, by memory that is left, and by how many are starting.

A sandbox seldom uses what it is allowed to, so promises may exceed the machine by a factor; what really is left
(MemAvailable, and stalls on memory where the kernel tells) has the last word before every start. Starts are
throttled because more at once only wait for each other. Those who wait are served in the order in which they came, so that
a large request is not overtaken for ever by small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.service.wire import PolicyError

LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """What the machine says of its memory."""

    total: int
    available: int
    stalled: float = 0.0
    """Per cent of the last ten seconds in which some process waited for memory; 0 where the kernel does not tell."""


def machine_pressure() -> Pressure:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available, stalled = total, 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, IndexError):
        stalled = float(Path("/proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
    return Pressure(total=total, available=available, stalled=stalled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    memory_bytes: int = 0
    """Memory for sandboxes; 0 for four fifths of the machine."""
    overcommit: float = 4.0
    """Promised memory over real memory. Measured on test suites: most sandboxes use less than a tenth of their limit."""
    reserve_bytes: int = 512 * 2**20
    """What must stay available after a start."""
    stalled_limit: float = 20.0
    starts: int = 0
    """Started at the same time; 0 for one a core and one more (the knee was at two on two cores)."""
    sandboxes: int = 10_000


class Admission:
    """Belongs to one event loop."""

    def __init__(self, capacity: Capacity, pressure: Callable[[], Pressure] = machine_pressure) -> None:
        self._pressure, self._capacity = pressure, capacity
        self.memory_bytes = capacity.memory_bytes or pressure().total * 4 // 5
        self.starts = capacity.starts or (os.cpu_count() or 1) + 1
        self.promised = 0
        self.starting = 0
        self.held = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def start(self, need_bytes: int, wait_s: float) -> AsyncIterator[None]:
        """Wait for a place, then hold a start until the block ends. On an error the place is given back as well."""
        if need_bytes > self.memory_bytes * self._capacity.overcommit:
            raise PolicyError(
                f"a sandbox of {need_bytes} bytes can never be admitted: this service promises "
                f"{int(self.memory_bytes * self._capacity.overcommit)} in all"
            )
        await self._turn(need_bytes, wait_s)
        self.starting += 1
        self.held += 1
        self.promised += need_bytes
        try:
            yield
        except BaseException:
            self.leave(need_bytes)
            raise
        finally:
            self.starting -= 1
            self._wake()

    def leave(self, need_bytes: int) -> None:
        """A sandbox that was started is gone."""
        self.held -= 1
        self.promised -= need_bytes
        self._wake()

    async def _turn(self, need_bytes: int, wait_s: float) -> None:
        """Until this request is the first in line and there is room for it."""
        if not self._queue and not self._full(need_bytes):
            return
        loop = asyncio.get_running_loop()
        until = time.monotonic() + wait_s
        place: asyncio.Future[None] = loop.create_future()
        self._queue.append(place)
        try:
            while self._queue[0] is not place or self._full(need_bytes):
                left = until - time.monotonic()
                if left <= 0:
                    why = self._full(need_bytes) or f"{self._queue.index(place)} requests are before it"
                    raise SandboxError(f"no room for a sandbox within {wait_s:g} s: {why}")
                # Memory becomes available without anybody saying so: look again.
                await asyncio.wait({place}, timeout=min(left, LOOK_AGAIN_S))
                if place.done():
                    self._queue[self._queue.index(place)] = place = loop.create_future()
        finally:
            self._queue.remove(place)
            self._wake()

    def _full(self, need_bytes: int) -> str:
        """Why nothing of this size can start now; "" when it can."""
        limit = int(self.memory_bytes * self._capacity.overcommit)
        if self.held >= self._capacity.sandboxes:
            return f"{self.held} sandboxes live, and that is the limit"
        if self.starting >= self.starts:
            return f"{self.starting} are starting"
        if self.promised + need_bytes > limit:
            return f"{self.promised} of {limit} bytes are promised"
        now = self._pressure()
        if now.available < self._capacity.reserve_bytes:
            return f"{now.available} bytes of memory are available, and {self._capacity.reserve_bytes} are kept in reserve"
        if now.stalled > self._capacity.stalled_limit:
            return f"processes waited for memory {now.stalled:g} % of the last ten seconds"
        return ""

    def _wake(self) -> None:
        if self._queue and not self._queue[0].done():
            self._queue[0].set_result(None)
