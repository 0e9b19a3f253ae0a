"""Broken machines and hostile workspaces: every failure is classified, the host stays clean, the neighbour does not notice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from etude.errors import InfraError, SandboxError
from etude.protocols import Change, Limits
from etude.sandbox.cgroups import places
from etude.sandbox.client import DaemonHandle, NamespaceHost, start_daemon
from etude.sandbox.daemon import root_key
from etude.sandbox.images import ImageStore

NAMESPACES = ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup")


def below(pid: int) -> dict[int, str]:
    """Processes below `pid` with their names."""
    parents, names = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                before, _, after = Path(f"/proc/{name}/stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(name)], names[int(name)] = int(after.split()[1]), before.partition("(")[2]
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return {each: names[each] for each in family - {pid}}


def held_namespaces() -> list[str]:
    """Namespaces that something else than a process keeps: a mount, or a descriptor of this process."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " nsfs " in line]
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return mounts + [link for link in links if link.partition(":[")[0] in NAMESPACES]


class Seen:
    """What the sandboxes of a test ever were on the host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held = held_namespaces()
        self.pids: set[int] = set()

    def look(self, daemon: int) -> dict[int, str]:
        family = below(daemon)
        self.pids |= set(family)
        return family

    def left(self) -> dict[str, list[str]]:
        """What of it is there now; nothing, once the last process had time to end."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in self.pids):
            time.sleep(0.02)
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.root) in line]
        groups = [str(place / f"etude-{root_key(self.root)}") for _, _, place in places()]
        return {
            "processes": [str(pid) for pid in self.pids if os.path.exists(f"/proc/{pid}")],
            "namespaces": [each for each in held_namespaces() if each not in self.held],
            "mounts": mounts,
            "groups": [group for group in groups if os.path.exists(group)],
            "files": sorted(str(path) for path in self.root.rglob(".tmp-*")),
        }


async def cycle(host: NamespaceHost, image: str, number: int) -> str:
    """One sandbox's life. A machine that breaks under it is an InfraError and nothing else."""
    try:
        sandbox = await host.create(image)
        answer = await sandbox.call("exec", {"command": f"setsid sleep 1000 > /dev/null 2>&1 & echo {number} > mine; cat mine"})
        async with asyncio.timeout(60):
            while "Function not implemented" in answer.get("output", ""):  # the fork server is dead: the end of this sandbox is near
                answer = await sandbox.call("exec", {"command": "cat mine"})
        assert answer["output"] == f"{number}\n" or answer["limit"] or answer["code"] == -9, answer
        if number % 3 == 0:
            (child,) = await sandbox.fork(1)
            await child.destroy()
        await sandbox.destroy()
    except InfraError as error:
        return type(error).__name__
    return "done"


def kill_one(rng: random.Random, family: dict[int, str], daemon: int) -> str:
    """A tool server, a process of an agent, the fork server, or sandboxd itself."""
    kinds = {
        "tool server": [pid for pid, name in family.items() if name == "sandbox"],
        "child": [pid for pid, name in family.items() if name in ("sleep", "bash", "sh")],
        "fork server": sorted(pid for pid, name in family.items() if name.startswith("python"))[1:2],
        "sandboxd": [daemon],
    }
    kind = rng.choices(list(kinds), weights=(6, 6, 2, 1))[0]
    for pid in kinds[kind][:1]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return "missed"
        return kind
    return "nobody"


def churn(root: Path, shop: dict[str, bytes], count: int, seed: int) -> dict[str, int]:
    rng, seen, tally = random.Random(seed), Seen(root), {"done": 0}
    handle: DaemonHandle | None = None
    number = 0

    async def lives(handle: DaemonHandle, until: int) -> None:
        nonlocal number
        host = NamespaceHost(handle, own_daemon=False)
        image = await host.add_image(shop)
        while number < until and handle.pid and os.path.exists(f"/proc/{handle.pid}/ns/mnt"):
            batch = [asyncio.create_task(cycle(host, image, number + i)) for i in range(3)]
            number += len(batch)
            await asyncio.sleep(rng.random() * 0.05)
            family = seen.look(handle.pid)
            if rng.random() < 0.3:
                kind = kill_one(rng, family, handle.pid)
                tally[kind] = tally.get(kind, 0) + 1
            for ended in await asyncio.gather(*batch):
                tally[ended] = tally.get(ended, 0) + 1
            if "SandboxError" in tally and host._link is not None and host._link.closed:
                break
        await host.close()

    try:
        while number < count:
            if handle is not None:
                handle.close()
            handle = start_daemon(root, warm=1)
            asyncio.run(lives(handle, count))
    finally:
        if handle is not None:
            handle.close()
    assert seen.left() == {"processes": [], "namespaces": [], "mounts": [], "groups": [], "files": []}
    return tally


def test_lives_and_random_kills_leave_nothing(machine, shop, tmp_path: Path) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    tally = churn(tmp_path / "root", shop, 45, seed=5)
    assert tally["done"] >= 15
    assert sum(tally.get(kind, 0) for kind in ("tool server", "child", "fork server", "sandboxd")) >= 2


@pytest.mark.slow
def test_ten_thousand_lives_and_random_kills_leave_nothing(machine, shop, tmp_path: Path, capsys) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    tally = churn(tmp_path / "root", shop, 10_000, seed=6)
    with capsys.disabled():
        print(f"\n{tally}")
    assert min(tally.get(kind, 0) for kind in ("tool server", "child", "fork server", "sandboxd")) >= 20


def test_ten_gigabytes_of_output_are_cut_and_named(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=Limits(output_bytes=1 << 16))
        result = await sandbox.exec(["sh", "-c", "head -c 10000000000 /dev/zero"], timeout_s=110)
        assert result.limit == "output"
        assert len(result.output) < 1 << 17
        assert result.dropped_bytes > 2**20
        assert b"bytes dropped" in result.output
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"

    on(scene)


def test_a_workspace_full_of_links_and_odd_names_harms_nobody(on, shop, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    program = (
        "import os\n"
        "os.symlink('a', 'b'); os.symlink('b', 'a')\n"
        "for i in range(200): os.symlink('.', f'loop{i}')\n"
        f"os.symlink({str(tmp_path)!r}, 'out')\n"
        "for name in ('new\\nline', '-rf', '*', ' ', 'x' * 255, '\\u00e9', b'\\xff\\xfe'): open(name, 'w').write('odd')\n"
        "os.mkfifo('fifo')\n"
    )

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image({**shop, "make.py": program.encode()}))
        assert (await sandbox.exec(["python", "make.py"])).output == b""
        odd = {"new\nline", "-rf", "*", " ", "x" * 255, "\u00e9"}
        report = await sandbox.diff_report()
        assert {change.path for change in report.changes} == odd
        assert {"a", "b", "out", "fifo", "loop7"} <= {path for path, _ in report.refused}
        for path in ("a", "a/x", "out/secret", "loop0/" * 45 + "a", "fifo/x"):
            with pytest.raises(OSError):
                await sandbox.read(path)
        await sandbox.call("glob", {"pattern": "**/*"})
        (child,) = await sandbox.fork(1)
        assert await child.read("-rf") == b"odd"
        assert await child.stat("out") is None
        await sandbox.apply_changes([Change(path="a", data=b"plain"), Change(path="out", data=None), Change(path="-rf", data=None)])
        assert await sandbox.read("a") == b"plain"
        assert await sandbox.stat("-rf") is None

    on(scene)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "host secret"


def test_a_full_disk_of_the_host_is_an_error_of_the_machine(tmp_path: Path, shop) -> None:
    """Not of the task, and nothing half-written stays."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True).returncode != 0:
        pytest.skip("this root may not mount")
    try:
        for name in ("layers", "snapshots"):
            (small / name).mkdir()
        store = ImageStore(small)
        image = store.add(shop)
        with pytest.raises(SandboxError, match="is the disk full"):
            store.add({"big": bytes(1 << 20)})
        assert [path.name for path in (small / "layers").iterdir()] == [image]
        assert issubclass(SandboxError, InfraError)
    finally:
        subprocess.run(["umount", small], check=True)
