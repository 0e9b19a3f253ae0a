"""Test runs forked from the warm interpreter: they see the files as they are, share nothing, and report what happened."""

from __future__ import annotations

import asyncio

import pytest

from etude.protocols import Limits

OUTCOMES = b"""
import pytest

def test_passes(): pass
def test_fails(): assert {"a": 1} == {"a": 2}
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
@pytest.mark.xfail
def test_xfails(): assert False
@pytest.mark.xfail
def test_xpasses(): pass
@pytest.fixture
def broken(): raise OSError("fixture")
def test_errors(broken): pass
@pytest.fixture
def breaks_after():
    yield
    raise OSError("teardown")
def test_errors_after(breaks_after): pass
@pytest.mark.parametrize("x", [1, 2])
def test_many(x): assert x == 1
class TestGroup:
    def test_method(self, tmp_path): assert tmp_path.is_dir()
"""


def outcomes(answer: dict) -> dict[str, str]:
    return {test["id"]: test["outcome"] for test in answer["tests"]}


async def report(sandbox, *words: str, timeout_s: float = 60.0) -> dict:
    return await sandbox.call("pytest", {"args": ["-q", *words], "report": True}, timeout_s=timeout_s)


def test_ids_and_outcomes(on) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(
            await host.add_image({"tests/test_all.py": OUTCOMES, "tests/test_bad.py": b"import nothing_of_that_name\n"})
        )
        answer = await report(sandbox, "--continue-on-collection-errors")
        base = "tests/test_all.py::"
        assert outcomes(answer) == {
            base + "test_passes": "passed",
            base + "test_fails": "failed",
            base + "test_skipped": "skipped",
            base + "test_xfails": "xfailed",
            base + "test_xpasses": "xpassed",
            base + "test_errors": "error",
            base + "test_errors_after": "error",
            base + "test_many[1]": "passed",
            base + "test_many[2]": "failed",
            base + "TestGroup::test_method": "passed",
            "tests/test_bad.py": "error",
        }
        assert (answer["code"], answer["complete"], answer["timed_out"], answer["limit"]) == (1, True, False, "")
        messages = {test["id"]: test["message"] for test in answer["tests"]}
        assert "{'a': 1} == {'a': 2}" in messages[base + "test_fails"]
        assert "nothing_of_that_name" in messages["tests/test_bad.py"]
        assert messages[base + "test_passes"] == ""
        assert "4 passed" in answer["output"] or "3 passed" in answer["output"]
        plain = await sandbox.call("pytest", {"args": ["-q", "tests/test_all.py::test_passes"]})
        assert "tests" not in plain
        assert plain["code"] == 0

    on(scene)


def test_an_edit_after_a_run_is_seen_and_runs_share_nothing(on, shop) -> None:
    async def scene(host) -> None:
        state = (
            b"import os, random, sys\nimport shop.stats\n\n"
            b"def test_fresh():\n"
            b"    assert not hasattr(shop.stats, 'mark')\n    shop.stats.mark = 1\n"
            b"    assert 'MARK' not in os.environ\n    os.environ['MARK'] = '1'\n"
            b"    assert not [name for name in sys.modules if name.partition('.')[0] == 'etude']\n"
            b"    assert sys.dont_write_bytecode\n"
            b"    with open('draws', 'a') as out: print(random.random(), os.getcwd() in sys.path, sys.argv[1:], file=out)\n"
        )
        sandbox = await host.create(await host.add_image({**shop, "tests/test_state.py": state}))
        first = await report(sandbox)
        assert set(outcomes(first).values()) == {"passed"}, first["output"]
        await sandbox.call("edit", {"path": "shop/stats.py", "old": "2 * x", "new": "3 * x"})
        second = await report(sandbox)
        assert outcomes(second)["tests/test_stats.py::test_double"] == "failed"
        assert outcomes(second)["tests/test_state.py::test_fresh"] == "passed"
        await sandbox.call("edit", {"path": "shop/stats.py", "old": "3 * x", "new": "2 * x"})
        await sandbox.call("edit", {"path": "tests/test_stats.py", "old": "double(2) == 4", "new": "double(2) == 5"})
        assert outcomes(await report(sandbox))["tests/test_stats.py::test_double"] == "failed"
        draws = (await sandbox.read("draws")).decode().splitlines()
        assert len({line.split()[0] for line in draws}) == 3
        assert {line.split(maxsplit=1)[1] for line in draws} == {"True ['-q']"}
        changed = {change.path for change in await sandbox.diff()}
        assert changed == {"tests/test_stats.py", "draws"}

    on(scene)


def test_a_plain_command_line_is_a_forked_run_that_looks_like_a_terminal(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(
            await host.add_image(
                {
                    **shop,
                    "conftest.py": b"",
                    "test_who.py": b"def test_who(): print('FORKED', 'pytest' not in open('/proc/self/cmdline').read())\n",
                }
            )
        )

        async def run(command: str, **more: object) -> dict:
            return await sandbox.call("exec", {"command": command, **more})

        for command in ("pytest -s test_who.py", "python -m pytest -s test_who.py", "python3 -m pytest -s 'test_who.py'"):
            answer = await run(command)
            assert answer["code"] == 0
            assert "FORKED True\n" in answer["output"], command
            assert "test session starts" in answer["output"]
            assert "1 passed in" in answer["output"]
        for command in ("cd . && pytest -s test_who.py", "FOO=1 pytest -s test_who.py", "pytest -s test_who.py | cat"):
            answer = await run(command)
            assert answer["code"] == 0
            assert "FORKED False\n" in answer["output"]
            assert "1 passed in" in answer["output"]
        warm, cold = [await run(command) for command in ("pytest tests -k mean -v", "true; pytest tests -k mean -v")]
        strip = lambda text: [line for line in text.splitlines() if " in 0." not in line]  # noqa: E731
        assert strip(warm["output"]) == strip(cold["output"])
        assert (await run("pytest --no-such-flag"))["code"] == 4
        assert (await run("pytest nothing_here"))["code"] == 4
        assert (await run("pytest -q", cwd="tests", env={"PYTHONPATH": "/repo"}))["code"] == 0
        assert (await run("pytest -q", cwd="tests"))["code"] == (await run("true; pytest -q", cwd="tests"))["code"] == 2
        assert "2 passed" in (await run("pytest -q tests", env={"PYTHONPATH": "/repo", "X": "1"}))["output"]

    on_namespace(scene)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import os\ndef test_it(): os._exit(0)", 0),
        ("import os\ndef test_it(): os._exit(3)", 3),
        ("import ctypes\ndef test_it(): ctypes.string_at(0)", -11),
        ("import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os\ndef test_it(): os.abort()", -6),
    ],
)
def test_a_crash_is_a_failed_run(on_namespace, body: str, code: int) -> None:
    async def scene(host) -> None:
        files = {"test_a.py": b"def test_first(): pass\n", "test_b.py": body.encode()}
        sandbox = await host.create(await host.add_image(files))
        answer = await report(sandbox)
        assert answer["code"] == code
        assert answer["complete"] is False
        assert outcomes(answer) == {"test_a.py::test_first": "passed", "test_b.py::test_it": "failed"}
        assert str(abs(code)) in {test["id"]: test["message"] for test in answer["tests"]}["test_b.py::test_it"]
        assert outcomes(await report(sandbox, "test_a.py")) == {"test_a.py::test_first": "passed"}

    on_namespace(scene)


def test_odd_endings(on_namespace) -> None:
    async def scene(host) -> None:
        files = {
            "test_exit.py": b"import sys\nsys.exit(0)\n",
            "test_bytes.py": b"import os\ndef test_it():\n    os.write(1, bytes(range(256)) * 100)\n    print('\\udcff')\n    assert 0\n",
            "test_syntax.py": b"def test_it(:\n",
            "test_stdin.py": b"def test_it(): assert open(0).read() == ''\n",
            "test_thread.py": b"import threading, time\ndef test_it(): threading.Thread(target=time.sleep, args=(0.2,)).start()\n",
            "test_atexit.py": b"import atexit\ndef test_it(): atexit.register(lambda: open('ended', 'w').close())\n",
            "test_none.py": b"x = 1\n",
        }
        sandbox = await host.create(await host.add_image(files))

        async def ends(name: str) -> tuple[int, dict[str, str]]:
            answer = await report(sandbox, "-s", name)
            assert answer["timed_out"] is False
            return answer["code"], outcomes(answer)

        code, tests = await ends("test_exit.py")
        assert code != 0
        assert "passed" not in tests.values()
        assert await ends("test_bytes.py") == (1, {"test_bytes.py::test_it": "failed"})
        assert await ends("test_syntax.py") == (2, {"test_syntax.py": "error"})
        assert await ends("test_stdin.py") == (0, {"test_stdin.py::test_it": "passed"})
        assert await ends("test_thread.py") == (0, {"test_thread.py::test_it": "passed"})
        assert await ends("test_atexit.py") == (0, {"test_atexit.py::test_it": "passed"})
        assert await sandbox.stat("ended") is not None
        assert await ends("test_none.py") == (5, {})

    on_namespace(scene)


def test_a_hang_is_stopped_with_all_that_it_started(on_namespace) -> None:
    async def scene(host) -> None:
        hang = (
            b"import subprocess, time\ndef test_ok(): pass\n"
            b"def test_hang():\n    subprocess.Popen(['setsid', 'sleep', '7777'])\n    time.sleep(1000)\n"
        )
        sandbox = await host.create(await host.add_image({"test_hang.py": hang}))
        answer = await report(sandbox, timeout_s=1.5)
        assert (answer["timed_out"], answer["limit"], answer["complete"]) == (True, "wall", False)
        assert outcomes(answer) == {"test_hang.py::test_ok": "passed", "test_hang.py::test_hang": "failed"}
        left = (await sandbox.exec(["ps", "ax", "-o", "args"])).output
        assert b"7777" not in left

    on_namespace(scene)


def test_a_daemon_of_a_test_does_not_reach_the_next_run(on_namespace) -> None:
    async def scene(host) -> None:
        files = {
            "test_a.py": b"import subprocess\ndef test_it(): subprocess.Popen(['setsid', 'sh', '-c', 'sleep 8888 & sleep 8888'])\n",
            "test_b.py": b"import subprocess\ndef test_it(): assert b'8888' not in subprocess.check_output(['ps', 'ax', '-o', 'args'])\n",
        }
        sandbox = await host.create(await host.add_image(files))
        server = (await sandbox.call("job_start", {"command": "sleep 9999"}))["job"]
        assert outcomes(await report(sandbox, "test_a.py")) == {"test_a.py::test_it": "passed"}
        assert (await sandbox.call("job_kill", {"job": server}))["running"] is False
        assert outcomes(await report(sandbox, "test_a.py")) == {"test_a.py::test_it": "passed"}
        assert outcomes(await report(sandbox, "test_b.py")) == {"test_b.py::test_it": "passed"}

    on_namespace(scene)


def test_runs_at_the_same_time(on_namespace, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=Limits(pids=64))
        answers = await asyncio.gather(*(report(sandbox) for _ in range(4)))
        for answer in answers:
            assert outcomes(answer) == {"tests/test_stats.py::test_mean": "passed", "tests/test_stats.py::test_double": "passed"}

    on_namespace(scene)


def test_results_do_not_travel_on_stdout(on_namespace) -> None:
    """Output may be flooded and truncated; the report is complete all the same."""

    async def scene(host) -> None:
        body = "import pytest\n@pytest.mark.parametrize('i', range(200))\ndef test_it(i):\n    print('x' * 2000)\n    assert i % 2\n"
        sandbox = await host.create(await host.add_image({"test_many.py": body.encode()}), limits=Limits(output_bytes=4096))
        answer = await report(sandbox, "-s")
        assert answer["dropped_bytes"] > 0
        assert answer["complete"] is True
        found = outcomes(answer)
        assert len(found) == 200
        assert sum(outcome == "passed" for outcome in found.values()) == 100

    on_namespace(scene)
