"""Command lines as evidence: every program that ran is in it, whoever started it, and nothing inside can keep one out."""

from __future__ import annotations

import asyncio
import os

import pytest

from etude.errors import SandboxError
from etude.protocols import Limits
from etude.sandbox import linux
from etude.sandbox.client import NamespaceHost, start_daemon


def test_every_program_is_seen_grandchildren_and_daemons_too(on_namespace, shop) -> None:
    async def scene(host) -> None:
        files = {
            **shop,
            "script.sh": b"#!/bin/sh\nls shop | cat\n",
            "test_it.py": b"import subprocess\ndef test_it(): subprocess.run(['echo', 'from a test'])\n",
            "fd.py": b"import os\nfd = os.open('/bin/echo', os.O_RDONLY)\nos.execve(fd, ['by descriptor', 'x'], {})\n",
            "thread.py": b"import subprocess, threading\n"
            b"for t in [threading.Thread(target=subprocess.run, args=(['true', f'thread {i}'],)) for i in range(4)]: t.start()\n",
        }
        sandbox = await host.create(await host.add_image(files))
        daemon = "setsid sh -c '(sleep 0.05; /bin/true daemon) &' > /dev/null 2>&1 &"
        await sandbox.call(
            "exec", {"command": f"{daemon} chmod +x script.sh; ./script.sh; ./nothing; no-such-program; env A=1 true 'sp ace'"}
        )
        for program in ("fd.py", "thread.py"):
            assert (await sandbox.exec(["python", program])).code == 0
        await (await sandbox.open_session()).run("uname -s")
        await sandbox.call("pytest", {"args": ["-q", "test_it.py"]})
        wanted = [
            ["ls", "shop"],
            ["cat"],
            ["/bin/true", "daemon"],
            ["true", "sp ace"],
            ["env", "A=1", "true", "sp ace"],
            ["./script.sh"],
            ["by descriptor", "x"],
            *(["true", f"thread {i}"] for i in range(4)),
            ["uname", "-s"],
            ["echo", "from a test"],
        ]
        for _ in range(100):
            seen = await sandbox.execs()
            lines = [entry["argv"] for entry in seen]
            if all(line in lines for line in wanted):
                break
            await asyncio.sleep(0.05)
        assert [line for line in wanted if line not in lines] == []
        assert not [line for line in lines if line and line[0] in ("./nothing", "no-such-program")]
        assert lines.count(["ls", "shop"]) == 1
        assert {entry["path"] for entry in seen if entry["argv"] == ["ls", "shop"]} <= {"/usr/bin/ls", "/bin/ls"}
        boundary = (await sandbox.info()).boundary
        assert "execs" in boundary.evidence
        await sandbox.destroy()
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.execs()

    on_namespace(scene)


def test_nothing_inside_keeps_a_program_out_of_it(on_namespace) -> None:
    """A filter of one's own that allows everything, a program without a name, odd arguments."""
    program = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("f", ctypes.c_char_p)]
assert libc.prctl(22, 2, ctypes.byref(Program(1, allow)), 0, 0) == 0
fd = os.memfd_create("hidden", 0)
os.write(fd, open("/bin/true", "rb").read())
if os.fork() == 0: os.execve(fd, ["in memory"], {})
os.wait()
if os.fork() == 0: os.execv("/bin/true", ["true", "x" * 5000, b"\\xff\\xfe", "", "line\\nbreak"] + ["many"] * 600)
os.wait()
"""

    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image({"hide.py": program.encode()}))
        assert (await sandbox.exec(["python", "hide.py"])).output == b""
        lines = [entry["argv"] for entry in await sandbox.execs()]
        assert ["in memory"] in lines
        (odd,) = [line for line in lines if line[0] == "true"]
        assert len(odd) == 512
        assert odd[1] == "x" * 4096
        assert odd[2:5] == ["\udcff\udcfe", "", "line\nbreak"]

    on_namespace(scene)


def test_execs_of_sandboxes_stay_apart_and_have_a_bound(on_namespace) -> None:
    async def scene(host) -> None:
        one, two = [await host.create(await host.add_image({"a": b""}), limits=Limits(wall_s=300)) for _ in range(2)]
        await asyncio.gather(one.exec(["true", "one"]), two.exec(["true", "two"]))
        assert ["true", "two"] not in [entry["argv"] for entry in await one.execs()]
        assert ["true", "two"] in [entry["argv"] for entry in await two.execs()]
        flood = "for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true $(yes aaaaaaaaaa | head -c 3000 | tr '\\n' b) $i; done"
        await one.call("exec", {"command": flood})
        assert len(await one.execs()) > 20
        assert (await one.exec(["true"])).code == 0

    on_namespace(scene)


def test_without_it_the_record_says_so(machine, tmp_path) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    handle = start_daemon(tmp_path / "root", warm=0, options=["--no-execs"])

    async def scene() -> None:
        host = NamespaceHost(handle, own_daemon=False)
        sandbox = await host.create(await host.add_image({"a": b""}))
        assert (await sandbox.info()).boundary.evidence == ("layer diff",)
        await sandbox.exec(["true"])
        assert await sandbox.execs() == []
        await host.close()

    try:
        asyncio.run(scene())
    finally:
        handle.close()


def test_a_listener_that_hung_up_is_told_from_one_that_waits_or_has_something() -> None:
    """The fork server's loop must let go of the first: it is readable for ever and never says anything."""
    ours, theirs = os.pipe()
    try:
        assert not linux.hung_up(ours)
        os.write(theirs, b"x")
        os.close(theirs)
        assert not linux.hung_up(ours)
        os.read(ours, 1)
        assert linux.hung_up(ours)
    finally:
        os.close(ours)
