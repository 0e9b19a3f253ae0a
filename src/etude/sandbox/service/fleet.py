"""Which host gets which environment: best fit on live pressure, forks beside their parents. Pure and deterministic, no clock, no dice.

    fleet = Fleet(Room(memory=256 * GIB, cpu=64_000, disk=TIB) for each host ...)
    placement = fleet.place("env-1", Room(memory=2 * GIB, cpu=250, disk=GIB))      # None: nothing has room, wait or grow
    fleet.started("env-1")                                                         # its host may start another
    fleet.report("host-7", used=Room(...), stalled=0.4)                            # what the host measures

What counts as used is what a host last measured plus what was placed on it since, and at least FLOOR of what its
environments asked for: steady use is far below what is asked for, and a burst must not believe in yesterday's calm.

Best fit: the host with the least room left that still takes the environment; "least" is the sum of what is free, as shares
of the host. Hosts are kept sorted by that sum. It falls by the same amount whichever host is taken, so the first one
from below that fits *is* the best fit: no approximation, and `fits_best` (all hosts, one by one) is its slow twin.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from etude.errors import UserError

FLOOR = 0.5
"""Share of what was asked for that counts as used, however little a host measures."""
FULL = 0.95
"""Share of a host that is given away; the rest is for what environments use beyond what they asked for."""
STARTS = 8
"""Environments of a host that may be starting at the same time."""
STALLED = 20.0
"""Per cent of time that processes wait for memory, above which a host gets nothing new."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes, thousandths of a core, bytes. Whole numbers, so that what is given and given back leaves no trace."""

    memory: int
    cpu: int
    disk: int

    def __add__(self, other: Room) -> Room:
        return Room(self.memory + other.memory, self.cpu + other.cpu, self.disk + other.disk)

    def __sub__(self, other: Room) -> Room:
        return Room(self.memory - other.memory, self.cpu - other.cpu, self.disk - other.disk)


NOTHING = Room(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Placement:
    env: str
    host: str
    moved_bytes: int = 0
    """Bytes of a snapshot that must be brought to the host first; 0 where it lies there."""


@dataclass(eq=False, slots=True)
class _Host:
    name: str
    order: int
    room: Room
    asked: Room = NOTHING
    measured: Room | None = None
    since: Room = NOTHING
    """Asked for by what was placed after the last measurement."""
    envs: dict[str, Room] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """Environments that `since` counts."""
    starting: set[str] = field(default_factory=set)
    closed: bool = False
    stalled: float = 0.0
    key: tuple[float, int] = (0.0, 0)
    free: Room = NOTHING

    def update(self) -> None:
        """Work out what is free. Called after every change, and by nothing else."""
        used = self.asked
        if self.measured is not None:
            m, a, s = self.measured, self.asked, self.since
            used = Room(
                max(m.memory + s.memory, int(a.memory * FLOOR)),
                max(m.cpu + s.cpu, int(a.cpu * FLOOR)),
                max(m.disk + s.disk, int(a.disk * FLOOR)),
            )
        r = self.room
        self.free = Room(int(r.memory * FULL) - used.memory, int(r.cpu * FULL) - used.cpu, int(r.disk * FULL) - used.disk)
        self.key = (self.free.memory / r.memory + self.free.cpu / r.cpu + self.free.disk / r.disk, self.order)

    @property
    def open(self) -> bool:
        return not self.closed and len(self.starting) < STARTS and self.stalled <= STALLED

    def takes(self, need: Room) -> bool:
        free = self.free
        return need.memory <= free.memory and need.cpu <= free.cpu and need.disk <= free.disk


class Fleet:
    def __init__(self, hosts: Mapping[str, Room] | Iterable[tuple[str, Room]] = ()) -> None:
        self._hosts: dict[str, _Host] = {}
        self._where: dict[str, _Host] = {}
        self._open: list[tuple[float, int]] = []
        """Keys of the hosts that may take something, sorted."""
        self._by_order: list[_Host] = []
        self._largest = Room(1, 1, 1)
        for name, room in dict(hosts).items():
            self.add(name, room)

    def add(self, name: str, room: Room) -> None:
        if name in self._hosts:
            raise UserError(f"host {name!r} is in the fleet already")
        if min(room.memory, room.cpu, room.disk) <= 0:
            raise UserError(f"host {name!r} has no room: {room}")
        old = self._largest
        self._largest = Room(max(old.memory, room.memory), max(old.cpu, room.cpu), max(old.disk, room.disk))
        host = _Host(name, len(self._by_order), room)
        host.update()
        self._hosts[name] = host
        self._by_order.append(host)
        insort(self._open, host.key)

    # -- environments

    def place(self, env: str, need: Room, *, beside: str = "", moved_bytes: int = 0) -> Placement | None:
        """The host for an environment, reserved; None when nothing has room now. With `beside`, the host of that environment where it
        has room, else the best fit, to which `moved_bytes` of snapshot must be brought."""
        if env in self._where:
            raise UserError(f"environment {env!r} is placed already, on {self._where[env].name}")
        near = self._where.get(beside) if beside else None
        if near is not None and near.open and near.takes(need):
            self._put(near, env, need)
            return Placement(env, near.name)
        host = self._best(need)
        if host is None:
            return None
        self._put(host, env, need)
        return Placement(env, host.name, moved_bytes if host is not near else 0)

    def fork(self, parent: str, children: Iterable[str], snapshot_bytes: int) -> list[Placement] | None:
        """Places for all children of a parent, beside it first; None, and nothing is reserved, when not all fit. A snapshot is brought
        to a host once, however many children go there."""
        if parent not in self._where:
            raise UserError(f"environment {parent!r} is not placed, so nothing can be forked from it")
        home = self._where[parent]
        need = home.envs[parent]
        placed: list[Placement] = []
        has = {home.name}
        for child in children:
            placement = self.place(child, need, beside=parent, moved_bytes=snapshot_bytes)
            if placement is None:
                for each in placed:
                    self.release(each.env)
                return None
            placed.append(placement if placement.host not in has else Placement(child, placement.host))
            has.add(placement.host)
        return placed

    def started(self, env: str) -> None:
        """An environment runs: its host may start another."""
        host = self._where.get(env)
        if host is None or env not in host.starting:
            return
        if host.open:  # it stays open, and what is free there is the same: its place in the order holds
            host.starting.discard(env)
        else:
            self._change(host, lambda: host.starting.discard(env))

    def release(self, env: str) -> None:
        """An environment is gone. Unknown ones are, too."""
        host = self._where.pop(env, None)
        if host is None:
            return

        def leave() -> None:
            need = host.envs.pop(env)
            host.asked -= need
            host.starting.discard(env)
            if env in host.fresh:
                host.fresh.discard(env)
                host.since -= need

        self._change(host, leave)

    # -- hosts

    def report(self, name: str, used: Room, stalled: float = 0.0) -> None:
        """What a host measures now, with everything in it that was started. What is still starting is counted on top."""
        host = self._known(name)

        def measure() -> None:
            host.measured, host.stalled = used, stalled
            host.fresh = set(host.starting)
            host.since = sum((host.envs[env] for env in host.fresh), NOTHING)

        self._change(host, measure)

    def close(self, name: str) -> None:
        """Nothing new on this host; what it has goes on."""
        host = self._known(name)
        self._change(host, lambda: setattr(host, "closed", True))

    def lose(self, name: str) -> list[str]:
        """A host is gone. Returns the environments that went with it, for whom that is an error of the machine."""
        host = self._known(name)
        del self._hosts[name]
        lost = list(host.envs)
        self._change(host, lambda: setattr(host, "closed", True))
        for env in lost:
            del self._where[env]
        host.envs.clear()
        return lost

    def _known(self, name: str) -> _Host:
        if name not in self._hosts:
            raise UserError(f"no host {name!r} in the fleet")
        return self._hosts[name]

    def where(self, env: str) -> str:
        return self._where[env].name if env in self._where else ""

    def used_hosts(self) -> int:
        return sum(bool(host.envs) for host in self._hosts.values())

    def free(self, name: str) -> Room:
        return self._hosts[name].free

    # -- choice

    def _best(self, need: Room) -> _Host | None:
        large = self._largest
        least = need.memory / large.memory + need.cpu / large.cpu + need.disk / large.disk  # of any host's sum that could take it
        for i in range(bisect_left(self._open, (least, 0)), len(self._open)):
            host = self._by_order[self._open[i][1]]
            if host.takes(need):
                return host
        return None

    def fits_best(self, need: Room) -> str:
        """The slow twin of the choice: every host looked at."""
        fitting = [host for host in self._hosts.values() if host.open and host.takes(need)]
        return min(fitting, key=lambda host: host.key).name if fitting else ""

    def _put(self, host: _Host, env: str, need: Room) -> None:
        def enter() -> None:
            host.envs[env] = need
            host.asked += need
            host.since += need
            host.fresh.add(env)
            host.starting.add(env)

        self._change(host, enter)
        self._where[env] = host

    def _change(self, host: _Host, action: Callable[[], object]) -> None:
        """Take a host out of the order, change it, and put it back where it belongs."""
        at = bisect_left(self._open, host.key)
        if at < len(self._open) and self._open[at] == host.key:
            del self._open[at]
        action()
        host.update()
        if host.open:
            insort(self._open, host.key)
