"""Choosing a backend, what is imported by whom, and the filter that every process runs under."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.sandbox import linux, open_host
from etude.sandbox.probe import Probe


def imported_by(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_imports_stay_small() -> None:
    everything = imported_by("import etude.sandbox, etude.sandbox.open, etude.sandbox.client, etude.sandbox.plain")
    assert not everything & {"torch", "ray"}
    daemon = imported_by("import etude.sandbox.daemon, etude.sandbox.probe")
    assert not daemon & {"torch", "ray", "numpy", "asyncio", "pytest", "etude.records", "etude.protocols"}
    assert {name for name in daemon if name.startswith("etude")} <= {
        "etude",
        "etude.sandbox",
        *(f"etude.sandbox.{name}" for name in ("base", "cgroups", "daemon", "interpreter", "linux", "probe")),
    }


def test_auto_is_the_namespace_backend_or_an_error(machine: Probe, tmp_path: Path) -> None:
    if not machine.works:
        with pytest.raises(UserError, match="unsafe"):
            open_host()
        return
    host = open_host(root=tmp_path / "root")

    async def scene() -> None:
        sandbox = await host.create(await host.add_image({"a": b"1"}))
        assert (await sandbox.info()).boundary.backend == "namespace"
        shared = open_host(root=tmp_path / "root")
        assert (await shared.stats())["live"] == 1
        await shared.close()
        assert (await sandbox.exec(["cat", "a"])).output == b"1"
        await host.close()

    asyncio.run(scene())


def test_a_machine_that_lacks_something_is_told_what_and_how() -> None:
    lacking = Probe(works=False, failed_step="user namespace", error="Operation not permitted", remedy="Allow user namespaces: sysctl ...")
    assert "user namespace" in lacking.explain()
    assert "sysctl" in lacking.explain()


def test_plain_only_by_name_and_unsafe() -> None:
    with pytest.raises(UserError, match="protects nothing"):
        open_host("plain")
    with pytest.raises(UserError, match="protects nothing"):
        open_host("plain", unsafe=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean 'namespace'"):
        open_host("namespaces")
    host = open_host("plain", unsafe=True)
    asyncio.run(host.close())


def test_a_boundary_without_namespaces_is_said_to_be_none() -> None:
    from etude.sandbox.plain import BOUNDARY

    assert BOUNDARY.backend == "plain"
    assert BOUNDARY.network == "host"
    assert [BOUNDARY.limits[name] for name in ("memory", "pids", "disk")] == ["nothing"] * 3


class Bpf:
    """A reference interpreter of the few instructions the filter uses."""

    def __init__(self, program: bytes) -> None:
        self.code = [struct.unpack_from("HBBI", program, i) for i in range(0, len(program), 8)]

    def run(self, nr: int, arch: int, args: tuple[int, ...] = ()) -> int:
        data = struct.pack("iIQ6Q", nr, arch, 0, *(args + (0,) * 6)[:6])
        accumulator = at = 0
        while True:
            code, jump_true, jump_false, k = self.code[at]
            at += 1
            if code == 0x20:
                accumulator = struct.unpack_from("I", data, k)[0]
            elif code == 0x06:
                return k
            else:
                taken = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
                at += jump_true if taken else jump_false


@pytest.mark.parametrize(
    ("machine", "arch", "numbers"),
    [
        (
            "x86_64",
            0xC000003E,
            {"read": 0, "mount": 165, "clone": 56, "clone3": 435, "socket": 41, "ioctl": 16, "ptrace": 101, "execve": 59},
        ),
        (
            "aarch64",
            0xC00000B7,
            {"read": 63, "mount": 40, "clone": 220, "clone3": 435, "socket": 198, "ioctl": 29, "ptrace": 117, "execve": 221},
        ),
    ],
)
def test_the_filter_decides_as_it_should(machine: str, arch: int, numbers: dict[str, int]) -> None:
    bpf = Bpf(linux.deny_filter(machine))
    allow, refuse, no_call, no_family, kill = 0x7FFF0000, 0x50001, 0x50000 | 38, 0x50000 | 97, 0x80000000
    assert bpf.run(numbers["read"], arch) == allow
    assert bpf.run(numbers["execve"], arch) == allow
    assert bpf.run(numbers["mount"], arch) == refuse
    assert bpf.run(numbers["ptrace"], arch) == refuse
    assert bpf.run(425, arch) == refuse
    assert bpf.run(numbers["clone3"], arch) == no_call
    assert bpf.run(numbers["clone"], arch, (17,)) == allow
    assert bpf.run(numbers["clone"], arch, (0x10000000 | 17,)) == refuse
    assert bpf.run(numbers["clone"], arch, (0x00020000,)) == refuse
    assert [bpf.run(numbers["socket"], arch, (family,)) for family in (1, 2, 10, 16)] == [allow] * 4
    assert [bpf.run(numbers["socket"], arch, (family,)) for family in (17, 31, 38, 40, 44)] == [no_family] * 5
    assert bpf.run(numbers["ioctl"], arch, (0, 0x5412)) == refuse
    assert bpf.run(numbers["ioctl"], arch, (0, 0x541C)) == refuse
    assert bpf.run(numbers["ioctl"], arch, (0, 0x5413)) == allow
    assert bpf.run(numbers["read"], arch ^ 1) == kill
    if machine == "x86_64":
        assert bpf.run(0x40000000, arch) == no_call


def test_an_unknown_machine_has_no_filter_and_no_hash() -> None:
    assert linux.deny_filter("sparc") == b""
    assert linux.filter_hash("sparc") == ""
    assert linux.filter_hash("x86_64") != linux.filter_hash("aarch64")
