"""Shared by the sandbox tests: one sandboxd for the session, a host per test, and the account that must balance at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.cgroups import places
from etude.sandbox.client import DaemonHandle, NamespaceHost, start_daemon
from etude.sandbox.daemon import root_key
from etude.sandbox.landlock import LandlockHost
from etude.sandbox.plain import PlainHost
from etude.sandbox.probe import Probe, probe, probe_landlock
from etude.sandbox.service.remote import RemoteHost

ROOT = Path(__file__).resolve().parents[2]
SHOP = {
    "shop/__init__.py": b"",
    "shop/stats.py": b"def mean(xs):\n    return sum(xs) / len(xs)\n\n\ndef double(x):\n    return 2 * x\n",
    "tests/test_stats.py": (
        b"from shop.stats import double, mean\n\n\n"
        b"def test_mean():\n    assert mean([1, 3]) == 2\n\n\n"
        b"def test_double():\n    assert double(2) == 4\n"
    ),
    "README.md": b"# shop\n",
}
"""The workspace most tests start from."""


@pytest.fixture
def shop() -> dict[str, bytes]:
    return dict(SHOP)


Scene = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="session")
def machine() -> Probe:
    return probe()


def audited(root: Path, **settings: Any) -> Iterator[DaemonHandle]:
    """A sandboxd of which nothing may be left when it ends."""
    mounts_before = mount_count()
    handle = start_daemon(root, **settings)
    yield handle

    async def account(host: NamespaceHost) -> dict[str, float]:
        return await host.stats()

    stats = play(handle, account)
    handle.close()
    assert stats["orphans"] == 0
    assert stats["live"] == 0
    assert stats["errors"] == 0, (handle.root / "daemon.log").read_text()
    assert leftovers(handle.root) == []
    assert mount_count() == mounts_before


@pytest.fixture(scope="session")
def daemon(machine: Probe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonHandle]:
    """One sandboxd for all tests."""
    if not machine.works:
        pytest.skip(machine.explain())
    yield from audited(tmp_path_factory.mktemp("sandboxd"))


@pytest.fixture(scope="session")
def frugal_daemon(machine: Probe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonHandle]:
    """One that does without overlay and control groups, as on an older kernel and without privileges."""
    if not machine.works:
        pytest.skip(machine.explain())
    yield from audited(tmp_path_factory.mktemp("frugal"), options=VARIANTS["frugal"])


@pytest.fixture(scope="session")
def copying_daemon(machine: Probe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonHandle]:
    if not machine.works:
        pytest.skip(machine.explain())
    yield from audited(tmp_path_factory.mktemp("copying"), options=VARIANTS["no overlay"])


@pytest.fixture(scope="session")
def polling_daemon(machine: Probe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonHandle]:
    if not machine.works:
        pytest.skip(machine.explain())
    yield from audited(tmp_path_factory.mktemp("polling"), options=VARIANTS["no cgroups"])


def mount_count() -> int:
    return len(Path("/proc/self/mounts").read_text().splitlines())


def leftovers(root: Path) -> list[str]:
    """Control groups and processes of the sandboxd of `root`, and sandbox processes anywhere."""
    key = root_key(root)
    found = [str(place / f"etude-{key}") for _, _, place in places() if (place / f"etude-{key}").exists()]
    return found + [line for line in processes() if str(root) in line]


def processes() -> list[str]:
    """`pid command line` of every process this user can see."""
    lines = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            lines.append(f"{name} {command}")
    return lines


def play(handle: DaemonHandle, scene: Scene) -> Any:
    """Run an async scene against a host on `handle`'s sandboxd."""

    async def main() -> Any:
        host = NamespaceHost(handle, own_daemon=False)
        try:
            return await asyncio.wait_for(scene(host), 120)
        finally:
            await host.close()

    return asyncio.run(main())


@pytest.fixture
def on_frugal(frugal_daemon: DaemonHandle) -> Callable[[Scene], Any]:
    return lambda scene: play(frugal_daemon, scene)


@pytest.fixture
def on_namespace(daemon: DaemonHandle) -> Callable[[Scene], Any]:
    return lambda scene: play(daemon, scene)


class ServedElsewhere:
    """An `etude env serve` process, and what it takes to reach it."""

    def __init__(self, root: Path, *options: str, address: str = "127.0.0.1:0", prefix: tuple[str, ...] = ()) -> None:
        self.root, self._options, self._address, self._prefix = root, options, address, prefix
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "etude.cli", "env", "serve", "--root", str(self.root), "--listen", self._address, *self._options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "serve.log", "ab") as log:
            self.process = subprocess.Popen([*self._prefix, *command], stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline(), self.process.stdout.readline()]
        assert "serving" in self.said[0], (self.root / "serve.log").read_text()
        self.url = self.said[0].split()[-1]
        self.token = (self.root / "tokens").read_text().strip().partition(":")[2]

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def play(self, scene: Scene, **options: Any) -> Any:
        async def main() -> Any:
            host = RemoteHost(self.url, self.token, **options)
            try:
                return await asyncio.wait_for(scene(host), 120)
            finally:
                await host.close()

        return asyncio.run(main())


@contextlib.contextmanager
def network_namespace() -> Iterator[tuple[tuple[str, ...], str, Callable[..., None]]]:
    """(prefix of commands that run in it, its address, `ip`) of a network namespace that one cable joins to this one. For root."""
    name, device, net = f"etude-{os.getpid()}", f"ve{os.getpid()}", f"10.213.{os.getpid() % 250}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{net}.1/24", "dev", device)
        ip("link", "set", device, "up")
        for words in (("addr", "add", f"{net}.2/24", "dev", "eth0"), ("link", "set", "eth0", "up"), ("link", "set", "lo", "up")):
            ip("-n", name, *words)
        yield ("ip", "netns", "exec", name), f"{net}.2", lambda state: ip("link", "set", device, state)
    finally:
        ip("netns", "del", name)


ELSEWHERE = "ETUDE_TEST_ELSEWHERE"
"""Set: the service of the behaviour suite runs in another network namespace."""


@pytest.fixture(scope="session")
def served(machine: Probe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedElsewhere]:
    """One environment service for all tests, of which nothing may be left when it ends."""
    if not machine.works:
        pytest.skip(machine.explain())
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("served")
        if os.environ.get(ELSEWHERE):
            prefix, address, _ = stack.enter_context(network_namespace())
            server = ServedElsewhere(folder, "--insecure", address=f"{address}:0", prefix=prefix)
        else:
            server = ServedElsewhere(folder)
        yield server
        close_account(server)


def close_account(server: ServedElsewhere) -> None:
    """Nothing of a service may be left when it ends."""
    stats = server.play(lambda host: host.stats())
    assert server.end() == 0
    assert stats["live"] == 0
    assert stats["orphans"] == 0
    assert list((server.root / "envs").iterdir()) == []
    deadline = time.monotonic() + 20.0
    while leftovers(server.root) and time.monotonic() < deadline:  # its sandboxd was told to end
        time.sleep(0.05)
    assert leftovers(server.root) == []


VARIANTS = {"namespace": [], "no overlay": ["--no-overlay"], "no cgroups": ["--no-cgroups"], "frugal": ["--no-overlay", "--no-cgroups"]}
"""Of the namespace backend: options of sandboxd that make it do without what a machine may lack."""


@pytest.fixture(scope="session")
def landlock(machine: Probe) -> Probe:
    return probe_landlock()


def play_here(make: Callable[[], Any], scene: Scene) -> Any:
    """Run an async scene against a host that makes processes of this one."""

    async def main() -> Any:
        host = make()
        try:
            return await asyncio.wait_for(scene(host), 120)
        finally:
            await host.close()

    return asyncio.run(main())


@pytest.fixture(
    params=[
        "namespace",
        "frugal",
        pytest.param("no overlay", marks=pytest.mark.slow),
        pytest.param("no cgroups", marks=pytest.mark.slow),
        "landlock",
        "plain",
        "remote",
    ]
)
def on(request: pytest.FixtureRequest) -> Callable[[Scene], Any]:
    """The contract: the same scene over every backend. `on.backend` names it, `on.variant` what it does without."""
    variant = request.param
    chosen: Any
    if variant == "plain":
        chosen = lambda scene: play_here(lambda: PlainHost(unsafe=True), scene)  # noqa: E731
    elif variant == "landlock":
        found = request.getfixturevalue("landlock")
        if not found.works:
            pytest.skip(found.explain("landlock"))
        chosen = lambda scene: play_here(lambda: LandlockHost(probe=found), scene)  # noqa: E731
    elif variant == "remote":
        server = request.getfixturevalue("served")
        chosen = lambda scene: server.play(scene)  # noqa: E731
    else:
        named = {"namespace": "daemon", "frugal": "frugal_daemon", "no overlay": "copying_daemon", "no cgroups": "polling_daemon"}
        handle = request.getfixturevalue(named[variant])
        chosen = lambda scene: play(handle, scene)  # noqa: E731
    chosen.variant = variant
    chosen.backend = "namespace" if variant in VARIANTS or variant == "remote" else variant
    return chosen


@pytest.fixture
def as_ordinary_user() -> Iterator[Callable[..., str]]:
    """Run pytest in a process that has given root up; what it printed. Skips where no interpreter can be executed then."""
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    nobody = 65534
    scratch = Path(tempfile.mkdtemp(prefix="etude-user-", dir="/tmp"))
    scratch.chmod(0o777)
    path = os.pathsep.join(p for p in sys.path if p and "lib-dynload" not in p and "pyenv" not in p)
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*arguments: str) -> str:
        for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
            command = [candidate, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider", "--basetemp", str(scratch / "t")]
            try:
                done = subprocess.run(
                    command, user=nobody, group=nobody, extra_groups=[], env=environment, capture_output=True, text=True, cwd=ROOT
                )
            except OSError:
                continue
            if "No module named" not in done.stderr and done.stdout:
                assert done.returncode == 0, done.stdout[-8000:]
                return done.stdout
        pytest.skip("no interpreter here that user 65534 may execute")

    yield run
    subprocess.run(["rm", "-rf", str(scratch)], check=True)


@pytest.fixture
def shell(on_namespace: Callable[[Scene], Any]) -> Callable[..., dict[str, Any]]:
    """One command in a fresh sandbox: shell("id") -> the answer of `exec`."""

    def run(command: str, *, files: dict[str, bytes] | None = None, timeout_s: float = 20.0, **create: Any) -> dict[str, Any]:
        async def scene(host: NamespaceHost) -> dict[str, Any]:
            sandbox = await host.create(await host.add_image(files or SHOP), **create)
            answer = await sandbox.call("exec", {"command": command}, timeout_s=timeout_s)
            assert (await sandbox.call("read", {"path": "README.md"})).get("text") is not None or files
            await sandbox.destroy()
            return answer

        return on_namespace(scene)

    return run


@pytest.fixture
def python(shell: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """One Python program in a fresh sandbox."""

    def run(program: str, **options: Any) -> dict[str, Any]:
        files = {"README.md": b"", "program.py": textwrap.dedent(program).encode()}
        return shell("python program.py", files=files, **options)

    return run
