"""The landlock backend: for machines, mostly hardened containers, that allow no user namespace. No root needed, no namespace used.

A tool server confines itself (confined.py) by Landlock, a system-call filter without sockets, and resource limits. It
cannot hide what it does not show: names and metadata of the host's files stay visible, and their modes and times can be
changed where the user owns them; there is no loopback network, no /dev/shm, no /proc; the disk is not bounded as a
whole. The boundary record says so, and docs/sandboxes.md lists it.
"""

from __future__ import annotations

import os
from pathlib import Path

from etude.errors import UserError
from etude.records import Boundary, Level
from etude.sandbox import confined, linux
from etude.sandbox.plain import ProcessHost
from etude.sandbox.probe import Probe, probe_landlock

SOURCE = str(Path(__file__).resolve().parents[2])
"""Where this package is imported from."""
SIGNALS_ABI = 6
"""From here on Landlock keeps signals inside."""


def boundary(abi: int) -> Boundary:
    """The record, for a version of Landlock."""
    holds = f"Landlock ABI {abi}"
    processes = f"{holds} for signals and tracing, the filter for limits and priorities; /proc is not readable"
    lacking = f"nothing for signals before Landlock ABI {SIGNALS_ABI}"
    return Boundary(
        backend="landlock",
        network="none",
        filter_hash=linux.filter_hash(alone=True),
        separates={
            "read": f"{holds}: the system's folders, this Python, its packages and the workspace are readable",
            "write": f"{holds}: the workspace and its temporary folder are writable",
            "metadata": "nothing",
            "processes": processes if abi >= SIGNALS_ABI else lacking,
            "network": "system-call filter: no sockets but pairs",
            "neighbours": f"{holds}" if abi >= SIGNALS_ABI else lacking,
            "kernel": "system-call filter, no capabilities",
            "privileges": "no_new_privs, no capabilities",
            "server": "path checks of the tool server, Landlock around it" if abi >= SIGNALS_ABI else lacking,
        },
        limits={
            "memory": "polling of resident memory every 50 ms, and RLIMIT_AS per process",
            "pids": "polling every 50 ms",
            "disk": "RLIMIT_FSIZE of each file; the sum is not bounded",
            "cpu": "RLIMIT_CPU of each process",
            "wall": "timer of the tool server",
            "output": "count of the tool server",
        },
        evidence=("workspace diff",),
        coverage={"workspace diff": "every file of the workspace at its end; nothing else but its temporary folder can be written"},
        levels=(Level.FILES, Level.SESSION),
    )


class LandlockHost(ProcessHost):
    """Makes confined processes. Refuses where Landlock or the filter do not work, whatever the kernel's version says."""

    def __init__(self, *, root: Path | str | None = None, probe: Probe | None = None) -> None:
        found = probe or probe_landlock()
        if not found.works:
            raise UserError(found.explain("landlock"))
        super().__init__(boundary(int(found.facts["abi"])), root)

    def _environment(self, folder: Path) -> dict[str, str]:
        """Without folders of PATH that cannot be read inside: a program that is nowhere should be missing, not forbidden."""
        variables = super()._environment(folder)
        tops = [os.path.realpath(path) for path in (*confined.readable(), str(self.root / "bin"))]
        kept = [path for path in variables["PATH"].split(os.pathsep) if any(_inside(path, top) for top in tops)]
        return {**variables, "PATH": os.pathsep.join(kept)}

    program = ("-P", "-c", f"import sys; sys.path.insert(0, {SOURCE!r}); from etude.sandbox.confined import main; main()")


def _inside(path: str, top: str) -> bool:
    real = os.path.realpath(path)
    return real == top or real.startswith(top + os.sep)
