"""One sandbox of the landlock backend, in a fresh interpreter with the arguments FD SETTINGS. Standard library only.

    supervisor   counts what the sandbox holds, kills what is too much, and at the end whatever is left
    `- tool server   confined: Landlock (with /proc, to see its own processes), filter, limits; subreaper
       `- commands, test runs   confined once more: no /proc, and no signal to the tool server

The supervisor is never confined and runs no foreign code. A limit it enforces is counted in a memory file that the tool
server reads as it reads a control group's events elsewhere, so that a result names the limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import sysconfig
import time
from typing import Any

from etude.sandbox import linux, toolserver

READABLE = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
PACKAGES = ("site-packages", "dist-packages")
POLL_S, IDLE_POLL_S = 0.05, 0.2


def readable() -> list[str]:
    """Folders that a sandbox may read: the system, this interpreter, its packages."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.prefix, sys.base_prefix}
    paths |= {path for path in sys.path if os.path.basename(path) in PACKAGES}
    paths.add(os.path.dirname(os.path.realpath(sys.executable)))
    return [*READABLE, *sorted(path for path in paths if path and path != "/")]


def confine(write: list[str], read: list[str]) -> None:
    """Shut the doors of this process, for good."""
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if not linux.landlock(read=[*read, "/proc"], write=write, devices=device_paths(), no_tcp=True):
        raise OSError(f"Landlock ABI {linux.landlock_abi()} is too old; {linux.LANDLOCK_NEEDED} is needed (Linux 5.19)")
    linux.install_filter(alone=True)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


def device_paths() -> list[str]:
    return [f"/dev/{name}" for name in linux.DEVICES]


def serve(fd: int, settings: dict[str, Any], counters: dict[str, int]) -> None:
    """The tool server: it returns when its client is gone."""
    limits, write, read = settings["limits"], [settings["workdir"], settings["environment"]["TMPDIR"]], readable()
    os.environ.clear()
    os.environ.update(settings["environment"])
    toolserver.warm_up(rehearse=False)
    sys.path[:] = [path for path in sys.path if os.path.basename(path) in PACKAGES or not os.path.isdir(os.path.join(path, "etude"))]
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    space = int(limits["memory_bytes"]) + 2**30
    for kind, wanted in (
        (resource.RLIMIT_FSIZE, int(limits["disk_bytes"])),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_AS, space),
    ):
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
    os.chdir(settings["workdir"])
    confine(write, read)
    server = toolserver.Server(
        workdir=settings["workdir"],
        limits=limits,
        environment=settings["environment"],
        confined=True,
        bin_dir=os.path.dirname(sys.executable),
        guard=lambda: guard(read, write),
        counters=counters,
        subreaper=True,
    )
    server.exit_without_clients = True
    server.connect(socket.socket(fileno=fd))
    server.serve()


def guard(read: list[str], write: list[str]) -> None:
    """In a child of the tool server, before foreign code: a second Landlock domain, inside of which the tool server is not."""
    linux.landlock(read=read, write=write, devices=device_paths(), no_tcp=True)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def supervise(server: int, limits: dict[str, float], counters: dict[str, int]) -> None:
    """Until the tool server ends: count its processes and their memory. Then kill what is left."""
    hits = dict.fromkeys(counters, 0)
    while not reaped(server):
        inside = toolserver.descendants(server)
        excess = ""
        if len(inside) > limits["pids"]:
            excess = "pids"
        elif toolserver.resident_bytes(inside) > limits["memory_bytes"]:
            excess = "memory"
        if excess:
            hits[excess] += 1
            write_counter(counters[excess], excess, hits[excess])
            kill(inside)
        time.sleep(POLL_S if inside else IDLE_POLL_S)
    while inside := toolserver.descendants(os.getpid()):
        kill(inside)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def reaped(server: int) -> bool:
    """Collect what ended; whether the tool server is among it."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == server:
            return True
        if pid == 0:
            return False


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def write_counter(fd: int, name: str, count: int) -> None:
    """The line that a control group's events file would have."""
    os.pwrite(fd, f"{'oom_kill' if name == 'memory' else 'max'} {count}\n".encode(), 0)


def main() -> None:
    fd, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    counters = {name: os.memfd_create(name, os.MFD_CLOEXEC) for name in ("memory", "pids")}
    for name, counter in counters.items():
        write_counter(counter, name, 0)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    server = os.fork()
    if server == 0:
        code = 1
        try:
            serve(fd, settings, counters)
            code = 0
        finally:
            os._exit(code)
    os.close(fd)
    supervise(server, settings["limits"], counters)
