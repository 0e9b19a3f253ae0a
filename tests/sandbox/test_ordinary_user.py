"""The namespace backend as a user without any privilege: where root runs the tests, in a process that gave root up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
SCENE = """
import asyncio, json, os, sys
from etude.protocols import Limits
from etude.sandbox import open_host

async def scene(host):
    image = await host.add_image({"test_a.py": b"import a\\ndef test_a(): assert a.x == 1\\n", "a.py": b"x = 1\\n", "sub/b.txt": b"b"})
    sandbox = await host.create(image, limits=Limits(memory_bytes=96 * 2**20, pids=24, disk_bytes=8 * 2**20))
    said = {"boundary": (await sandbox.info()).boundary.limits}
    said["id"] = (await sandbox.exec(["id", "-u"])).output.decode().strip()
    run = await sandbox.call("pytest", {"args": ["-q"], "report": True})
    said["tests"] = [(t["id"], t["outcome"]) for t in run["tests"]]
    said["output"] = run["output"]
    await sandbox.exec(["sh", "-c", "rm -r sub; mkdir sub; echo c > sub/c.txt; rm a.py"])
    said["diff"] = [(c.path, c.data is None) for c in await sandbox.diff()]
    (child,) = await sandbox.fork(1)
    said["child"] = (await child.exec(["ls", "-R"])).output.decode().split()
    fork = (
        "import os, time\\nn = 0\\n"
        "try:\\n    while True:\\n        if os.fork() == 0: time.sleep(30); os._exit(0)\\n        n += 1\\n"
        "except OSError: print(n)"
    )
    said["forks"] = int((await sandbox.exec(["python", "-c", fork])).output)
    hog = await child.exec(["python", "-c", "x = []\\nwhile True: x.append(bytearray(b'1') * 2**20)"], timeout_s=60)
    said["hog"] = [hog.code != 0, hog.limit]
    tries = "cat /etc/shadow; ls /root; touch /usr/x; unshare -U true; mount -t tmpfs x /mnt"
    said["escape"] = (await child.exec(["sh", "-c", tries])).output.decode()
    said["stats"] = await host.stats()
    await host.close()
    return said

print(json.dumps(asyncio.run(scene(open_host()))))
"""


def interpreter() -> list[str] | None:
    """A Python that user 65534 can execute and that can import what we can."""
    candidates = [sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"]
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", "import pytest, numpy"], user=NOBODY, group=NOBODY, extra_groups=[], env=paths(), capture_output=True
            )
        except OSError:
            continue
        if done.returncode == 0:
            return [candidate]
    return None


def paths() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and "lib-dynload" not in p and "pyenv" not in p),
        "HOME": "/tmp",
    }


def test_an_ordinary_user_gets_the_same_sandbox(machine, tmp_path: Path) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    command = interpreter()
    if command is None:
        pytest.skip("no interpreter here that user 65534 may execute")
    tmp = Path("/tmp") / f"etude-test-{os.getpid()}"
    tmp.mkdir(mode=0o700)
    os.chown(tmp, NOBODY, NOBODY)
    try:
        done = subprocess.run(
            [*command, "-c", SCENE],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env={**paths(), "TMPDIR": str(tmp)},
            capture_output=True,
            text=True,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["id"] == "1000"
        assert said["tests"] == [["test_a.py::test_a", "passed"]], said["output"]
        assert said["diff"] == [["a.py", True], ["sub/b.txt", True], ["sub/c.txt", False]]
        assert said["child"] == [".:", "sub", "test_a.py", "./sub:", "c.txt"]
        assert 5 <= said["forks"] <= 24
        assert said["hog"][0]
        if said["boundary"]["memory"].startswith("polling"):
            assert said["hog"][1] in ("memory", "")
        assert (
            said["escape"].count("denied")
            + said["escape"].count("No such file")
            + said["escape"].count("Read-only")
            + said["escape"].count("not permitted")
            >= 4
        )
        assert (said["stats"]["live"], said["stats"]["orphans"]) == (2, 0)
        assert list((tmp / f"etude-{NOBODY}").iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(tmp)], check=True)
