"""Where backends differ, in one table, and the proof that each difference is real: what is declared absent fails, all else works.

Everything else in this folder holds for every backend. docs/sandboxes.md shows the same table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.protocols import Limits

DIFFERENCES = {
    "loopback": {"landlock"},
    "unix sockets": {"landlock"},
    "shared memory": {"landlock"},
    "process list": {"landlock"},
    "file watches": {"landlock"},
    "same path everywhere": {"landlock", "plain"},
    "user 1000": {"landlock", "plain"},
    "only chosen packages": {"landlock", "plain"},
    "memory limit": {"plain"},
    "process limit": {"plain"},
    "disk limit of the sum": {"landlock", "plain"},
    "nothing outlives the sandbox": {"plain"},
}
"""feature -> backends that do not have it."""
DOCS = Path(__file__).resolve().parents[3] / "docs" / "sandboxes.md"
PROBES: dict[str, Callable[[Any], Awaitable[bool]]] = {}


def probe(name: str) -> Callable[[Callable[[Any], Awaitable[bool]]], Callable[[Any], Awaitable[bool]]]:
    def keep(action: Callable[[Any], Awaitable[bool]]) -> Callable[[Any], Awaitable[bool]]:
        PROBES[name] = action
        return action

    return keep


async def python(host: Any, program: str, **create: Any) -> Any:
    sandbox = await host.create(await host.add_image({"program.py": program.encode()}), **create)
    return await sandbox.exec(["python", "program.py"], timeout_s=60)


@probe("loopback")
async def loopback(host: Any) -> bool:
    return (
        await python(host, "import socket\ns = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())")
    ).code == 0


@probe("unix sockets")
async def unix_sockets(host: Any) -> bool:
    return (await python(host, "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()")).code == 0


@probe("shared memory")
async def shared_memory(host: Any) -> bool:
    return (await python(host, "import multiprocessing\nmultiprocessing.Lock()")).code == 0


@probe("process list")
async def process_list(host: Any) -> bool:
    return (await python(host, "import os\nassert str(os.getpid()) in os.listdir('/proc')")).code == 0


@probe("file watches")
async def file_watches(host: Any) -> bool:
    return (await python(host, "import ctypes\nassert ctypes.CDLL(None).inotify_init() >= 0")).code == 0


@probe("same path everywhere")
async def same_path(host: Any) -> bool:
    return (await python(host, "import os\nassert os.getcwd() == '/repo'")).code == 0


@probe("user 1000")
async def user(host: Any) -> bool:
    return (await python(host, "import os\nassert os.getuid() == 1000")).code == 0


@probe("only chosen packages")
async def packages(host: Any) -> bool:
    names = "import importlib.metadata as m; print(*sorted({d.metadata['Name'].lower() for d in m.distributions()}))"
    environment = {"PATH": os.environ["PATH"]}
    outside = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True, env=environment).stdout.split()
    if len(outside) < 12:
        pytest.skip(f"{sys.executable} itself has next to no packages, so it cannot be told whether they are hidden")
    return len((await python(host, names)).output.split()) < 10


@probe("memory limit")
async def memory(host: Any) -> bool:
    program = "x = []\nfor _ in range(60): x.append(bytearray(b'1') * (4 * 2**20)); __import__('time').sleep(0.01)"
    return (await python(host, program, limits=Limits(memory_bytes=96 * 2**20))).limit == "memory"


@probe("process limit")
async def process_limit(host: Any) -> bool:
    program = "import subprocess\np = [subprocess.Popen(['sleep', '2']) for _ in range(40)]\nfor each in p: each.wait()"
    return (await python(host, program, limits=Limits(pids=24))).code != 0


@probe("disk limit of the sum")
async def disk(host: Any) -> bool:
    program = "for i in range(4): open(f'f{i}', 'wb').write(bytes(3 * 2**20))"
    return (await python(host, program, limits=Limits(disk_bytes=8 * 2**20))).limit == "disk"


@probe("nothing outlives the sandbox")
async def survivors(host: Any) -> bool:
    sandbox = await host.create(await host.add_image({"a": b""}))
    length = f"600.{os.getpid()}"
    await sandbox.exec(["sh", "-c", f"setsid sleep {length} > /dev/null 2>&1 &"])
    while not (there := running(f"sleep\0{length}\0")):
        await asyncio.sleep(0.02)
    await sandbox.destroy()
    left = running(f"sleep\0{length}\0")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert set(left) <= set(there)
    return not left


def running(command: str) -> list[int]:
    """Processes with this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == command.encode():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_declared_difference_is_real_and_no_other_exists(on, name: str) -> None:
    assert on(PROBES[name]) == (on.backend not in DIFFERENCES[name])


def test_the_docs_show_this_table() -> None:
    rows = dict(re.findall(r"^\| ([a-z0-9 ]+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE))
    for name, absent in DIFFERENCES.items():
        cells = [cell.strip() for cell in rows[name].split("|")]
        assert cells == ["no" if backend in absent else "yes" for backend in ("namespace", "landlock", "plain")], name
