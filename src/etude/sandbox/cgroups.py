"""Control groups for memory and process limits, version 1 or 2, whichever this user may write. Standard library only.

One folder `etude-<key>` per sandboxd (the key names its root folder) in each hierarchy used, one folder per sandbox
inside. sandboxd writes down where they are (RECORD in its root), because a later one may run in another group and would
not look there. What is found there when a sandboxd starts was left by one that was killed, and is removed.
Where no hierarchy can be written, `detect` finds nothing and the tool server polls instead; the boundary record says which.

A group of version 1 stays busy for up to some milliseconds after its last process has gone, so removal is tried again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLERS = ("memory", "pids")
RECORD = "cgroups.json"


@dataclass
class Group:
    """The folders of one sandbox. `attach` are descriptors to write "0" to; `counters` tell how often a limit was enforced."""

    folders: dict[str, Path]
    attach: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        for fd in (*self.attach, *self.counters.values()):
            os.close(fd)
        self.attach, self.counters = [], {}


class Cgroups:
    """Makes and removes groups below the folders found by `detect`."""

    def __init__(self, key: str, *, use: bool = True) -> None:
        self._name = f"etude-{key}"
        self._parents: dict[str, Path] = {}
        self._version: dict[str, int] = {}
        self._leaving: list[tuple[float, Path]] = []
        for controller, version, place in places() if use else ():
            if controller not in self._parents:
                self._try(controller, version, place / self._name)

    def _try(self, controller: str, version: int, parent: Path) -> None:
        """Keep `parent` for the controller if a limited group can really be made in it."""
        trial = parent / "probe"
        try:
            if version == 2:
                _enable(parent.parent)
            parent.mkdir(exist_ok=True)
            if version == 2:
                _enable(parent)
            trial.mkdir(exist_ok=True)
            (trial / _limit_file(controller, version)).write_text("67108864" if controller == "memory" else "8")
            os.close(os.open(trial / "cgroup.procs", os.O_WRONLY))
            self._parents[controller], self._version[controller] = parent, version
        except OSError:
            pass
        for folder in (trial, *([] if controller in self._parents else [parent])):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def enforces(self, controller: str) -> str:
        """What to write in a boundary record, "" when nothing does."""
        return f"cgroup v{self._version[controller]}" if controller in self._parents else ""

    def make(self, name: str) -> Group:
        group = Group(folders={})
        try:
            for controller, parent in self._parents.items():
                folder = parent / name
                folder.mkdir(exist_ok=True)
                group.folders[controller] = folder
                events = folder / _event_file(controller, self._version[controller])
                if len(group.attach) < len(set(group.folders.values())):
                    group.attach.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                group.counters[controller] = os.open(events, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.remove(group)
            raise
        return group

    def limit(self, group: Group, *, memory_bytes: int, pids: int) -> None:
        wanted = {"memory": memory_bytes, "pids": pids}
        for controller, folder in group.folders.items():
            version = self._version[controller]
            (folder / _limit_file(controller, version)).write_text(str(wanted[controller]))
            if controller == "memory":
                swap, value = ("memory.swap.max", "0") if version == 2 else ("memory.memsw.limit_in_bytes", str(memory_bytes))
                with contextlib.suppress(OSError):
                    (folder / swap).write_text(value)

    def remove(self, group: Group) -> None:
        group.close()
        now = time.monotonic()
        self._leaving += [(now, folder) for folder in set(group.folders.values())]
        self.sweep()

    def sweep(self) -> int:
        """Remove what can be removed by now. Returns how many folders have refused for more than five seconds."""
        now, left = time.monotonic(), []
        for since, folder in self._leaving:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                left.append((since, folder))
        self._leaving = left
        return sum(now - since > 5.0 for since, _ in left)

    def record(self, root: Path) -> None:
        """Write down which folders to reap if this process is killed."""
        (root / RECORD).write_text(json.dumps(sorted({str(parent) for parent in self._parents.values()})) + "\n")

    @property
    def leaving(self) -> bool:
        return bool(self._leaving)

    def close(self) -> None:
        """Remove everything, also the folder of this sandboxd."""
        self.reap()
        for parent in set(self._parents.values()):
            with contextlib.suppress(OSError):
                parent.rmdir()

    def reap(self) -> int:
        """Kill and remove what is found in the folders of this sandboxd. Returns the number of groups found."""
        return sum(_reap(parent) for parent in set(self._parents.values()))


def reap_root(root: Path) -> int:
    """Remove the groups of the sandboxd that had `root` and is gone. Returns how many there were."""
    count = 0
    try:
        recorded = json.loads((root / RECORD).read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # it was killed before it made any
        return 0
    for parent in map(Path, recorded):
        if parent.name.startswith("etude-") and parent.is_dir():
            count += _reap(parent)
            with contextlib.suppress(OSError):
                parent.rmdir()
    return count


def _reap(parent: Path) -> int:
    if not parent.is_dir():
        return 0
    folders = [folder for folder in parent.iterdir() if folder.is_dir()]
    count, deadline = len(folders), time.monotonic() + 5.0
    while folders and time.monotonic() < deadline:
        for folder in list(folders):
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            folders.remove(folder)
        if folders:
            time.sleep(0.005)
    return count


def places() -> list[tuple[str, int, Path]]:
    """(controller, version, folder of this process) for every hierarchy mounted, version 2 first."""
    mounts: dict[str, Path] = {}
    unified = None
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                unified = Path(where)
            elif kind == "cgroup":
                for controller in set(options.split(",")) & set(CONTROLLERS):
                    mounts[controller] = Path(where)
    found = []
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, names, inside = line.rstrip("\n").split(":", 2)
            if not names and unified is not None:
                own = unified / inside.lstrip("/")
                found += [(controller, 2, folder) for controller in CONTROLLERS for folder in dict.fromkeys((own, own.parent, unified))]
            for controller in set(names.split(",")) & set(mounts):
                found.append((controller, 1, mounts[controller] / inside.lstrip("/")))
    return sorted((place for place in found if place[2].is_dir()), key=lambda place: -place[1])


def _enable(folder: Path) -> None:
    """Hand the controllers down to the children of a version 2 group. Refused when the group itself holds processes."""
    have = (folder / "cgroup.subtree_control").read_text().split()
    for controller in CONTROLLERS:
        if controller not in have:
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def _limit_file(controller: str, version: int) -> str:
    if controller == "pids":
        return "pids.max"
    return "memory.max" if version == 2 else "memory.limit_in_bytes"


def _event_file(controller: str, version: int) -> str:
    if controller == "pids":
        return "pids.events"
    return "memory.events" if version == 2 else "memory.oom_control"
