"""Sandboxes: where an agent's commands run, and what separates them from the host.

    host = await open_host()                      # the namespace backend, or an error that says what is missing
    image = await host.add_image({"shop/stats.py": b"..."})
    sandbox = await host.create(image)
    result = await sandbox.call("pytest", {"args": ["-q"], "report": True})
    await sandbox.destroy()

Parts, from the outside in:

    open.py        picks a backend; never falls back to a weaker one by itself
    client.py      asyncio side: SandboxHost and Sandbox over the daemon's socket
    patch.py       unified diffs as functions         graded.py   a test run in a pristine sandbox
    images.py      content-addressed layers on disk, snapshots as chains of them, diffs read from the host
    daemon.py      sandboxd: leases, cgroups, clean-up; single-threaded, standard library only
    base.py, interpreter.py   the file system and the Python that sandboxes see
    zygote.py      the fork server inside the base file system, and how a fork of it becomes a sandbox
    toolserver.py  process 1 of a sandbox: file operations, commands, jobs, warm pytest runs
    redirect.py    the inner side of a sandbox's network       egress/   the host's side: policy, proxy, log
    service/       sandboxes of other machines: `etude env serve`, its client, the fleet scheduler
    http1.py       strict HTTP/1.1 on asyncio streams
    linux.py       the system calls, through ctypes        probe.py   what this machine can enforce
    boundary.py    the aspects of the host that a boundary record speaks of
    landlock.py, confined.py   Landlock, filter and limits, for machines without user namespaces; only by name
    plain.py       no boundary at all; only by name and with unsafe=True

Importing this package loads nothing beyond this docstring: the daemon must stay small and free of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.sandbox.open import open_host

__all__ = ["open_host"]


def __getattr__(name: str) -> Any:
    if name == "open_host":
        from etude.sandbox.open import open_host

        return open_host
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
