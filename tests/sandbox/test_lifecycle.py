"""Leases, adoption, and what is left after things are killed: nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.protocols import Limits
from etude.sandbox.cgroups import Cgroups, places, reap_root
from etude.sandbox.client import NamespaceHost, connect_daemon, start_daemon
from etude.sandbox.daemon import reap_siblings, root_key


def groups_of(root: Path) -> list[Path]:
    folders = [place / f"etude-{root_key(root)}" for _, _, place in places()]
    return [group for folder in folders if folder.is_dir() for group in folder.iterdir() if group.is_dir()]


def running_below(pid: int) -> set[int]:
    """Every process whose ancestors include `pid`."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {pid}


def gone(pids: set[int], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def own_daemon(machine, tmp_path: Path):
    if not machine.works:
        pytest.skip(machine.explain())
    handle = start_daemon(tmp_path / "root", warm=1)
    yield handle
    handle.close()


def churn(on_namespace, shop, count: int) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        before = await host.stats()

        async def one(i: int) -> None:
            sandbox = await host.create(image)
            answer = await sandbox.call("exec", {"command": f"setsid sleep 1000 > /dev/null 2>&1 & echo {i} > mine; cat mine"})
            assert answer["output"] == f"{i}\n"
            await sandbox.destroy()

        async def worker(first: int) -> None:
            for i in range(first, count, 4):
                await one(i)

        descriptors = len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(worker(first) for first in range(4)))
        for _ in range(100):
            stats = await host.stats()
            root = host.store._layers.parent
            if len(groups_of(root)) <= stats["warm"] * 2 and stats["dying"] == 0:
                break
            await asyncio.sleep(0.05)
        assert stats["created"] - before["created"] == count
        assert stats["destroyed"] - before["destroyed"] == count
        assert (stats["live"], stats["orphans"], stats["dying"]) == (0, 0, 0)
        assert len(groups_of(root)) <= stats["warm"] * 2
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
        link = await host.link()
        answer, _ = await link.request("hello")
        daemon = answer["pid"]
        assert len(os.listdir(f"/proc/{daemon}/fd")) < 60
        assert len(running_below(daemon)) <= 2 + stats["warm"]

    on_namespace(scene)


def test_two_hundred_sandboxes_leave_nothing(on_namespace, shop) -> None:
    churn(on_namespace, shop, 200)


@pytest.mark.slow
def test_a_thousand_sandboxes_leave_nothing(on_namespace, shop) -> None:
    churn(on_namespace, shop, 1000)


def test_a_killed_daemon_takes_everything_with_it_and_the_next_one_cleans_up(machine, shop, tmp_path: Path) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    root = tmp_path / "root"
    handle = start_daemon(root)
    daemon = handle.pid

    async def scene() -> tuple[str, set[int]]:
        host = NamespaceHost(handle, own_daemon=False)
        image = await host.add_image(shop)
        (root / "layers" / ".tmp-half").mkdir()
        sandboxes = [await host.create(image) for _ in range(3)]
        for sandbox in sandboxes:
            await sandbox.exec(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        inside = running_below(daemon)
        assert len(inside) >= 6
        waiting = asyncio.create_task(sandboxes[0].exec(["sleep", "100"]))
        await asyncio.sleep(0.1)
        os.kill(daemon, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await waiting
        with pytest.raises(SandboxError):
            await sandboxes[1].call("list", {})
        with pytest.raises(SandboxError, match="sandboxd"):
            await host.create(image)
        await host.close()
        return image, inside

    image, inside = asyncio.run(scene())
    assert gone(inside)
    handle.close()
    again = start_daemon(root)
    try:
        assert not (root / "layers" / ".tmp-half").exists()

        async def after() -> None:
            host = NamespaceHost(again, own_daemon=False)
            stats = await host.stats()
            assert (stats["live"], stats["orphans"]) == (0, 0)
            assert len(groups_of(root)) <= stats["warm"] * 2
            sandbox = await host.create(image)
            assert (await sandbox.exec(["cat", "README.md"])).output == b"# shop\n"
            await host.close()

        asyncio.run(after())
    finally:
        again.close()
    assert groups_of(root) == []


def test_a_killed_fork_server_is_replaced(own_daemon, shop) -> None:
    async def scene() -> None:
        host = NamespaceHost(own_daemon, own_daemon=False)
        image = await host.add_image(shop)
        sandbox = await host.create(image)
        (outer,) = [pid for pid in running_below(own_daemon.pid) if os.getpgid(pid) == pid and _parent(pid) == own_daemon.pid]
        (zygote,) = [pid for pid in running_below(outer) if _parent(pid) == outer]
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(SandboxError, match="fork server died"):
            await sandbox.exec(["sleep", "100"])
        for _ in range(200):
            try:
                fresh = await host.create(image)
                break
            except SandboxError:
                await asyncio.sleep(0.05)
        assert (await fresh.exec(["cat", "README.md"])).output == b"# shop\n"
        stats = await host.stats()
        assert (stats["live"], stats["zygote_restarts"], stats["orphans"]) == (1, 1, 0)
        await host.close()

    asyncio.run(scene())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_a_client_leaves_is_destroyed_or_adopted(own_daemon, shop) -> None:
    async def first() -> tuple[str, str, str]:
        host = NamespaceHost(own_daemon, own_daemon=False)
        image = await host.add_image(shop)
        dropped = await host.create(image)
        kept = await host.create(image, create_id="rollout-7")
        await kept.write("state", b"kept")
        link = await host.link()
        link.close()  # as when the process is killed
        return image, dropped.id, kept.id

    async def second(image: str, dropped: str, kept: str) -> None:
        host = NamespaceHost(own_daemon, own_daemon=False)
        adopted = await host.create(image, create_id="rollout-7")
        assert adopted.id == kept
        assert await adopted.read("state") == b"kept"
        assert [change.path for change in await adopted.diff()] == ["state"]
        for _ in range(100):
            stats = await host.stats()
            if stats["live"] == 1:
                break
            await asyncio.sleep(0.02)
        assert (stats["live"], stats["orphans"]) == (1, 0)
        with pytest.raises(SandboxError, match="in use for image"):
            await host.create(await host.add_image({"other": b""}), create_id="rollout-7")
        link = await host.link()
        with pytest.raises(SandboxError, match="client went away"):
            await link.request("renew", id=dropped, ttl_s=1)
        await host.close()

    asyncio.run(second(*asyncio.run(first())))


def test_a_lease_can_be_renewed(own_daemon, shop) -> None:
    async def scene() -> None:
        host = NamespaceHost(own_daemon, own_daemon=False)
        sandbox = await host.create(await host.add_image(shop), ttl_s=1.0)
        await sandbox.renew(60)
        await asyncio.sleep(2.2)
        assert (await sandbox.exec(["echo", "here"])).output == b"here\n"
        await sandbox.destroy()
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.renew(60)
        await host.close()

    asyncio.run(scene())


def test_one_root_one_daemon_and_others_may_connect(own_daemon, shop) -> None:
    with pytest.raises(SandboxError, match="another sandboxd uses"):
        start_daemon(own_daemon.root)

    async def scene() -> None:
        host = NamespaceHost(connect_daemon(own_daemon.root))
        sandbox = await host.create(await host.add_image(shop))
        assert (await sandbox.exec(["true"])).code == 0
        await host.close()

    asyncio.run(scene())
    os.kill(own_daemon.pid, 0)


def test_the_daemon_ends_with_its_parent(machine, tmp_path: Path) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    program = (
        "import os, sys\nfrom etude.sandbox.client import start_daemon\n"
        f"handle = start_daemon({str(tmp_path / 'root')!r})\nprint(handle.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    assert gone({pid, *running_below(pid)})
    assert groups_of(tmp_path / "root") == []


def test_a_temporary_root_is_removed_also_after_a_kill(machine, shop) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    handle = start_daemon()
    os.kill(handle.pid, signal.SIGKILL)
    handle.close()
    assert handle.root.exists()
    os.utime(handle.root, (1, 1))  # only roots that are not just being made are removed
    other = start_daemon()
    assert not handle.root.exists()
    other.close()
    assert not other.root.exists()


def test_a_root_that_goes_away_while_it_is_looked_at_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    """Another sandboxd may remove its own temporary root at this moment."""
    for name in ("sandbox-own", "sandbox-dead"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "sandbox-gone", self / "sandbox-dead", self / "sandbox-own"])
    assert reap_siblings(tmp_path / "sandbox-own") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["sandbox-own"]


def test_descriptors_of_the_client_do_not_reach_a_sandbox(on_namespace, shop, tmp_path: Path) -> None:
    secret = (tmp_path / "secret").open("w+")
    os.set_inheritable(secret.fileno(), True)

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        listed = (await sandbox.exec(["ls", "-l", "/proc/self/fd"])).output
        assert b"secret" not in listed
        assert len(listed.splitlines()) <= 5

    on_namespace(scene)
    secret.close()


def test_control_groups_are_counted_and_reaped(tmp_path: Path) -> None:
    key = f"test-{os.getpid()}"
    groups = Cgroups(key)
    if not groups.enforces("memory"):
        pytest.skip("no memory control group can be written here")
    group = groups.make("box")
    groups.limit(group, memory_bytes=64 * 2**20, pids=5)
    process = subprocess.Popen(["sleep", "100"])
    folder = group.folders["memory"]
    (folder / "cgroup.procs").write_text(str(process.pid))
    assert str(process.pid) in (folder / "cgroup.procs").read_text().split()
    group.close()
    groups.record(tmp_path)
    assert reap_root(tmp_path) >= 1
    assert process.wait(5) == -signal.SIGKILL
    assert not folder.exists()
    assert not folder.parent.exists()


@pytest.mark.slow
def test_a_rollouts_worth_of_sandbox_work_is_cheap(own_daemon, shop) -> None:
    """The budget: two sandboxes, five calls and three test runs in about 0.2 core-seconds. Three times that fails, for noisy machines."""

    async def scene() -> float:
        host = NamespaceHost(own_daemon, own_daemon=False)
        image = await host.add_image(shop)
        before = resource.getrusage(resource.RUSAGE_SELF)
        rounds = 10
        for _ in range(rounds):
            sandbox = await host.create(image, limits=Limits())
            for _ in range(5):
                await sandbox.call("read", {"path": "shop/stats.py"})
            for _ in range(2):
                await sandbox.call("exec", {"command": "pytest"})
            await sandbox.destroy()
            grading = await host.create(image)
            await grading.call("pytest", {"args": ["-q"], "report": True})
            await grading.destroy()
        after = resource.getrusage(resource.RUSAGE_SELF)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        await host.close()
        return own / rounds

    def cpu(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    pids = [own_daemon.pid, *(pid for pid in running_below(own_daemon.pid))]
    before = sum(cpu(pid) for pid in pids)
    client = asyncio.run(scene())
    served = (sum(cpu(pid) for pid in pids if os.path.exists(f"/proc/{pid}")) - before) / 10
    print(f"core-seconds per rollout: client {client:.3f}, sandboxd and sandboxes {served:.3f}")
    assert client + served < 0.6
