"""Sandboxes: starts and forks per second, latency of a tool call, graded test runs per second.

Peers are what one would do without them, measured in the same run and in turns: a process of a copied folder
(`python -c pass`, `cp` and `python -m pytest` by `subprocess`). Two workers, the knee on two cores. A graded run is
the whole of it: a fresh workspace, ten tests, the outcome of each, and the removal of the workspace.

`processor time` rows are what the machine spent (sandboxd and everything below it, and the client), which a busy
machine changes less than the wall clock.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.bench import Row
from etude.errors import UserError
from etude.sandbox.client import NamespaceHost, start_daemon
from etude.sandbox.probe import probe

MODULES = ("money", "text", "dates", "trees")
WORKERS = 2


def package() -> dict[str, bytes]:
    """A package of four modules with ten tests, the size of the first tasks."""
    files = {"shop/__init__.py": b"", "README.md": b"# shop\n", "pyproject.toml": b'[tool.pytest.ini_options]\npythonpath = ["."]\n'}
    for n, name in enumerate(MODULES):
        body = f'"""Helpers for {name}."""\n\n\ndef scale(x, by={n + 1}):\n    """Return x times by."""\n    return x * by\n'
        files[f"shop/{name}.py"] = body.encode()
        tests = "".join(f"def test_{i}():\n    assert scale({i}) == {i * (n + 1)}\n\n\n" for i in range(3 if n < 2 else 2))
        files[f"tests/test_{name}.py"] = f"from shop.{name} import scale\n\n\n{tests}".encode()
    return files


async def rate(action: Callable[[], Awaitable[None]], count: int) -> float:
    """Actions per second with WORKERS at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await action()

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(WORKERS)))
    return count / (time.perf_counter() - begun)


async def latency_ms(action: Callable[[], Awaitable[object]], count: int) -> float:
    """Median of single calls, one after the other."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        await action()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


class Cold:
    """The peer: copy the folder, start a process in it, remove it."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self._source, self._scratch = source, scratch
        self._environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}

    def _run(self, argv: list[str]) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            shutil.copytree(self._source, folder / "repo")
            subprocess.run(argv, cwd=folder / "repo", env=self._environment, check=True, capture_output=True)
        finally:
            shutil.rmtree(folder)

    async def start(self) -> None:
        await asyncio.to_thread(self._run, [sys.executable, "-c", "pass"])

    async def graded(self) -> None:
        report = "--junitxml=../report.xml"
        await asyncio.to_thread(self._run, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", report])

    async def call(self) -> None:
        """No copy here: a process for the command alone."""
        await asyncio.to_thread(subprocess.run, ["cat", "shop/money.py"], cwd=self._source, check=True, capture_output=True)


def processor_seconds(pid: int) -> float:
    """Time spent so far by `pid` and every process below it, and by those of them that ended."""
    parents, spent = {}, {}
    tick = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            spent[int(name)] = sum(int(field) for field in fields[11:15]) / tick
    below = {pid}
    while grown := {child for child, parent in parents.items() if parent in below} - below:
        below |= grown
    return sum(spent.get(each, 0.0) for each in below)


async def measure(host: NamespaceHost, cold: Cold, daemon: int, scale: int) -> list[Row]:
    image = await host.add_image(package())

    async def start() -> None:
        await (await host.create(image)).destroy()

    async def graded() -> None:
        sandbox = await host.create(image)
        answer = await sandbox.call("pytest", {"args": ["-q"], "report": True})
        await sandbox.destroy()
        outcomes = [test["outcome"] for test in answer["tests"]]
        if outcomes != ["passed"] * 10:
            raise RuntimeError(f"the ten tests of the benchmark ended {outcomes}: {answer['output']}")

    parent = await host.create(image)
    await parent.write("shop/more.py", b"x = 1\n")

    async def fork() -> None:
        (child,) = await parent.fork(1)
        await child.destroy()

    await graded()
    await cold.graded()
    rows = []
    for name, ours, peer, count, unit in (
        ("starts", start, cold.start, 20 * scale, "1/s"),
        ("forks", fork, cold.start, 20 * scale, "1/s"),
        ("graded pytest runs", graded, cold.graded, 8 * scale, "1/s"),
    ):
        spent, client = processor_seconds(daemon), time.process_time()
        ours_rate = await rate(ours, count)
        spent = processor_seconds(daemon) - spent + time.process_time() - client
        peer_rate = await rate(peer, max(count // 4, 4))
        rows.append(Row(name=name, unit=unit, ours=ours_rate, peer=peer_rate, peer_name="cold subprocess", higher_is_better=True))
        rows.append(Row(name=f"processor time, {name}", unit="ms each", ours=1e3 * spent / count, higher_is_better=False))
    call = await latency_ms(lambda: parent.call("read", {"path": "shop/money.py"}), 50 * scale)
    shell = await latency_ms(lambda: parent.call("exec", {"command": "cat shop/money.py"}), 10 * scale)
    cold_call = await latency_ms(cold.call, 5 * scale)
    rows.append(Row(name="tool call", unit="ms", ours=call, peer=cold_call, peer_name="subprocess of the host", higher_is_better=False))
    rows.append(
        Row(name="shell command", unit="ms", ours=shell, peer=cold_call, peer_name="subprocess of the host", higher_is_better=False)
    )
    await parent.destroy()
    orphans = (await host.stats())["orphans"]
    rows.append(Row(name="orphans left", unit="count", ours=orphans, higher_is_better=False))
    return rows


def run(device: str, quick: bool) -> list[Row]:
    """Rows of the namespace backend on this machine. `device` changes nothing: sandboxes use processors only."""
    found = probe()
    if not found.works:
        raise UserError(f"nothing to measure: {found.explain()}")
    scratch = Path(tempfile.mkdtemp(prefix="etude-bench-"))
    source = scratch / "source"
    for path, data in package().items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    handle = start_daemon()

    async def main() -> list[Row]:
        host = NamespaceHost(handle, own_daemon=False)
        try:
            return await measure(host, Cold(source, scratch), handle.pid, 2 if quick else 20)
        finally:
            await host.close()

    try:
        return asyncio.run(main())
    finally:
        handle.close()
        shutil.rmtree(scratch)
