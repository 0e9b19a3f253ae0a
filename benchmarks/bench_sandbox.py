"""Sandboxes: start, fork, exec, graded run, path-heavy work, memory, a noisy neighbour.

Peers are measured in the same run, sample by sample in turns. `bwrap by hand` is the same boundary put together from
Python: an overlay over the package (a copy where mounting is not allowed), two control groups where they can be made, all
namespaces, then `true` or `python -m pytest`. `mini-swe-agent` is its bubblewrap environment, run by the interpreter that
ETUDE_BENCH_PEERS names (one in which `minisweagent` can be imported); without it, its row has no peer. `native` is the
host without a sandbox, and `cold subprocess` a copied folder and a process.

The rates have two workers, the knee on two cores. A graded run is the whole of it: a fresh workspace, ten tests, the
outcome of each, and the removal of the workspace.

`processor time` rows are what the machine spent (sandboxd and everything below it, and the client), which a busy
machine changes less than the wall clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.bench import Row
from etude.errors import UserError
from etude.protocols import Limits
from etude.sandbox import linux
from etude.sandbox.cgroups import places
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


def below(pid: int) -> set[int]:
    """`pid` and every process below it."""
    return set(spent_by(pid))


def processor_seconds(pid: int) -> float:
    """Time spent so far by `pid` and every process below it, and by those of them that ended."""
    return sum(spent_by(pid).values())


def spent_by(pid: int) -> dict[int, float]:
    """Processor seconds of `pid` and each process below it, those of their ended children included."""
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
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return {each: spent.get(each, 0.0) for each in family}


MINI = """
import os, sys, time
os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
environment = BubblewrapEnvironment()
print("ready", flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    code = environment.execute({"command": line.strip()})["returncode"]
    print(code, time.perf_counter() - begun, flush=True)
"""


class MiniSwe:
    """mini-swe-agent's bubblewrap environment in an interpreter of its own; it times itself."""

    def __init__(self) -> None:
        python = os.environ.get("ETUDE_BENCH_PEERS", sys.executable)
        self._process = subprocess.Popen(
            [python, "-c", MINI], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.works = "ready" in self._lines()

    def _lines(self) -> list[str]:
        """What it prints up to the line that is meant for us; [] when it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if words == ["ready"] or (len(words) == 2 and words[0].lstrip("-").isdigit()):
                return words
        return []

    def run(self, command: str) -> float:
        """Seconds of one command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        code, seconds = self._lines()
        if code != "0":
            raise RuntimeError(f"mini-swe-agent's environment ended {command!r} with status {code}")
        return float(seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Bwrap:
    """The same boundary, put together by hand."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self._source, self._scratch = source, scratch
        self.works = shutil.which("bwrap") is not None
        self._groups = [place for name, version, place in places() if version == 1 and os.access(place, os.W_OK)][:2]
        self._mounts = os.geteuid() == 0
        prefix, packages = os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(pytest.__file__))
        bound = dict.fromkeys(("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", prefix, packages))
        self._bound = [word for path in bound if os.path.exists(path) for word in ("--ro-bind", path, path)]
        self._packages = packages

    def run(self, argv: list[str], report: str = "") -> float:
        """Seconds from nothing to the end of `argv` in a fresh sandbox; what is removed afterwards is not counted."""
        begun = time.perf_counter()
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        groups = [place / folder.name for place in self._groups]
        for name in ("upper", "work", "repo"):
            (folder / name).mkdir()
        for group in groups:
            group.mkdir()
        if self._mounts:
            layers = f"lowerdir={self._source},upperdir={folder}/upper,workdir={folder}/work"
            linux.mount("bench", f"{folder}/repo", "overlay", 0, layers)
        else:
            shutil.copytree(self._source, folder / "repo", dirs_exist_ok=True)

        def enter() -> None:
            for group in groups:
                (group / "cgroup.procs").write_text("0")

        command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", *self._bound]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", f"{folder}/repo", "/repo", "--chdir", "/repo"]
        command += [
            "--setenv",
            "PYTHONPATH",
            self._packages,
            "--setenv",
            "PYTHONDONTWRITEBYTECODE",
            "1",
            "--setenv",
            "PATH",
            "/usr/bin:/bin",
        ]
        command += ["--setenv", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"]
        done = subprocess.run([*command, *argv], capture_output=True, preexec_fn=enter)
        seconds = time.perf_counter() - begun
        if self._mounts:
            linux.unmount(f"{folder}/repo")
        for group in groups:
            with contextlib.suppress(OSError):  # busy for up to some milliseconds after its last process; `close` tries again
                group.rmdir()
        shutil.rmtree(folder)
        if done.returncode != 0 or report not in done.stdout.decode():
            raise RuntimeError(f"bwrap ended with status {done.returncode}: {done.stdout[-300:]!r} {done.stderr[-300:]!r}")
        return seconds

    def close(self) -> None:
        for place in self._groups:
            for group in place.glob("tmp*"):
                with contextlib.suppress(OSError):
                    group.rmdir()


async def in_turns(ours: Callable[[], Awaitable[object]], peer: Callable[[], float] | None, count: int) -> tuple[float, float | None]:
    """Medians in milliseconds, of single actions in turns."""
    mine, theirs = [], []
    for _ in range(count):
        begun = time.perf_counter()
        await ours()
        mine.append(time.perf_counter() - begun)
        if peer is not None:
            theirs.append(await asyncio.to_thread(peer))
    return 1e3 * statistics.median(mine), 1e3 * statistics.median(theirs) if theirs else None


STAT = """
import os, time
begun = time.process_time()
for _ in range({rounds}): os.stat("README.md")
for i in range({files}): open(f"f{{i}}", "w").close()
for i in range({files}): os.unlink(f"f{{i}}")
print("took", time.process_time() - begun)
"""


async def single_rows(host: NamespaceHost, image: str, source: Path, scratch: Path, scale: int) -> list[Row]:
    """The rows that compare one action with one action of a peer."""
    bwrap, mini = Bwrap(source, scratch), MiniSwe()
    by_hand = "bwrap by hand" if bwrap.works else None
    made: list[Any] = []

    async def start() -> None:
        made.append(await host.create(image))
        await made[-1].exec(["/bin/true"])

    async def graded() -> None:
        made.append(await host.create(image))
        answer = await made[-1].call("pytest", {"args": ["-q"], "report": True})
        if [test["outcome"] for test in answer["tests"]] != ["passed"] * 10:
            raise RuntimeError(f"the ten tests of the benchmark ended {answer['tests']}: {answer['output']}")

    async def clear() -> None:
        await asyncio.gather(*(each.destroy() for each in made))
        made.clear()

    async def row(name: str, action: Callable[[], Awaitable[object]], peer: Callable[[], float] | None, who: str | None, count: int) -> Row:
        await action()
        mine, theirs = await in_turns(action, peer, count)
        await clear()
        return Row(name=name, unit="ms", ours=mine, peer=theirs, peer_name=who if theirs is not None else None, higher_is_better=False)

    true = (lambda: bwrap.run(["/bin/true"])) if by_hand else None
    pytest_line = [os.path.realpath(sys.executable), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cold = (lambda: bwrap.run(pytest_line, "10 passed")) if by_hand else None
    rows = [await row("start", start, true, by_hand, 5 * scale)]
    parent = await host.create(image)
    await parent.write("shop/more.py", b"x = 1\n")

    async def fork() -> None:
        made.extend(await parent.fork(1))

    rows.append(await row("fork", fork, true, by_hand, 5 * scale))
    rows.append(await row("fork: keep the files", parent.snapshot, None, None, 5 * scale))
    rows.append(await row("exec", lambda: parent.exec(["true"]), true, by_hand, 10 * scale))
    swe = (lambda: mini.run("true")) if mini.works else None
    shell = lambda: parent.call("exec", {"command": "true && true"})  # noqa: E731
    rows.append(await row("exec: shell command", shell, swe, "mini-swe-agent", 10 * scale))
    session = await parent.open_session()
    rows.append(await row("exec: command of a session", lambda: session.run("true"), None, None, 10 * scale))
    rows.append(await row("graded run", graded, cold, by_hand, 2 * scale))
    await parent.destroy()
    bwrap.close()
    mini.close()
    return rows


async def stat_row(host: NamespaceHost, image: str, source: Path, quick: bool) -> Row:
    """Processor time of 100,000 `stat` and 2,000 files made and removed, inside and outside, in turns."""
    program = STAT.format(rounds=20_000 if quick else 100_000, files=400 if quick else 2_000)
    sandbox = await host.create(image)
    inside, outside = [], []
    for _ in range(3):
        inside.append(float((await sandbox.exec(["python", "-c", program])).output.split()[1]))
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(source / "README.md", folder)
            done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], cwd=folder, capture_output=True, check=True)
        outside.append(float(done.stdout.split()[1]))
    await sandbox.destroy()
    ours, native = 1e3 * statistics.median(inside), 1e3 * statistics.median(outside)
    return Row(name="stat", unit="ms", ours=ours, peer=native, peer_name="native", higher_is_better=False)


async def noise_row(host: NamespaceHost, image: str, scale: int) -> Row:
    """p99 of `exec` beside a sandbox that uses up its memory, processes and processor time, and alone, in turns."""
    quiet = await host.create(image)
    alone: list[float] = []
    beside: list[float] = []
    hog = "import os\nfor _ in range(40):\n    if os.fork() == 0: break\nx = []\nwhile True: x.append(bytearray(b'1') * 2**20)"
    for _ in range(3):
        for times in (alone, beside):
            noisy = await host.create(image, limits=Limits(memory_bytes=96 * 2**20, pids=24, cpu_s=60))
            if times is beside:
                await noisy.call("job_start", {"command": f"while true; do python -c {shlex.quote(hog)}; done"})
                await asyncio.sleep(0.2)
            for _ in range(12 * scale):
                begun = time.perf_counter()
                await quiet.exec(["true"])
                times.append(time.perf_counter() - begun)
            await noisy.destroy()
    await quiet.destroy()
    p99 = [1e3 * statistics.quantiles(times, n=100)[98] for times in (beside, alone)]
    return Row(name="noisy neighbour: p99 of exec", unit="ms", ours=p99[0], peer=p99[1], peer_name="alone", higher_is_better=False)


async def evidence_row(scale: int) -> Row:
    """Processor time of a chain of ten execs, of a sandboxd that collects command lines and of one that does not, in turns."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    handles = {collects: start_daemon(warm=0, options=[] if collects else ["--no-execs"]) for collects in spent}
    try:
        for _ in range(2 * scale):
            for collects, handle in handles.items():
                host = NamespaceHost(handle, own_daemon=False)
                sandbox = await host.create(await host.add_image(package()))
                before = processor_seconds(handle.pid)
                for _ in range(5):
                    await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true; done"])
                spent[collects].append((processor_seconds(handle.pid) - before) / 50)
                await host.close()
    finally:
        for handle in handles.values():
            handle.close()
    ours, without = (1e3 * statistics.fmean(spent[collects]) for collects in (True, False))
    name = "processor time, an exec with its command line collected"
    return Row(name=name, unit="ms each", ours=ours, peer=without, peer_name="not collected", higher_is_better=False)


async def memory_row(host: NamespaceHost, image: str, daemon: int) -> Row:
    """Proportional memory of one more idle sandbox, its tool server included."""

    def held() -> float:
        total = 0
        for pid in below(daemon):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Dirty:", "Private_Clean:")))
        return total / 1024

    before = held()
    made = [await host.create(image) for _ in range(8)]
    await asyncio.sleep(0.2)
    after = held()
    for each in made:
        await each.destroy()
    return Row(name="idle memory", unit="MiB each", ours=max(after - before, 0.0) / 8, higher_is_better=False)


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
            scale, image = 2 if quick else 20, await host.add_image(package())
            rows = await single_rows(host, image, source, scratch, scale)
            rows.append(await stat_row(host, image, source, quick))
            rows.append(await memory_row(host, image, handle.pid))
            rows.append(await noise_row(host, image, scale))
            rows.append(await evidence_row(scale))
            return rows + await measure(host, Cold(source, scratch), handle.pid, scale)
        finally:
            await host.close()

    try:
        return asyncio.run(main())
    finally:
        handle.close()
        shutil.rmtree(scratch)
