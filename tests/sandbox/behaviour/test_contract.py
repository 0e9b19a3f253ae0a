"""What every backend does in the same way. Declared differences are marked by `on.backend`."""

from __future__ import annotations

import asyncio

import pytest

from etude.errors import SandboxError, UserError
from etude.protocols import Limits, Sandbox


def test_files_go_in_and_come_out(on, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        assert await host.add_image(dict(reversed(shop.items()))) == image
        sandbox = await host.create(image)
        assert isinstance(sandbox, Sandbox)
        assert await sandbox.read("README.md") == b"# shop\n"
        await sandbox.write("data/blob.bin", b"\0\xff\r\n" * 1000, mode=0o755)
        assert await sandbox.read("data/blob.bin") == b"\0\xff\r\n" * 1000
        described = await sandbox.stat("data/blob.bin")
        assert (described.kind, described.size, described.mode) == ("file", 4000, 0o755)
        assert await sandbox.stat("nothing/here") is None
        assert [(f.path, f.kind) for f in await sandbox.list()] == [
            ("README.md", "file"),
            ("data", "dir"),
            ("shop", "dir"),
            ("tests", "dir"),
        ]
        assert [f.path for f in await sandbox.list("shop")] == ["shop/__init__.py", "shop/stats.py"]
        with pytest.raises(FileNotFoundError, match="nothing"):
            await sandbox.read("nothing")
        info = await sandbox.info()
        assert info.image == image
        assert info.boundary.backend == on.backend
        assert set(info.boundary.limits) == {"memory", "pids", "disk", "cpu", "wall", "output"}

    on(scene)


def test_file_operations_answer_or_say_why_not(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image({**shop, "bin.dat": b"\xff\0", "twice.txt": b"a\na\n"}))

        async def text(op: str, **arguments: object) -> str:
            answer = await sandbox.call(op, arguments)
            assert "error" not in answer, answer
            return answer["text"]

        async def refusal(op: str, **arguments: object) -> tuple[str, str]:
            answer = await sandbox.call(op, arguments)
            return answer["error"], answer["text"]

        assert await text("read", path="README.md") == "# shop\n"
        assert await text("read", path="shop/stats.py", start="2", end="2") == "    return sum(xs) / len(xs)\n"
        assert (await text("read", path="shop/stats.py", start="5")).startswith("def double")
        assert await refusal("read", path="shop/stats.py", start="99") == ("failed", "shop/stats.py has 6 lines; there is no line 99")
        assert (await refusal("read", path="shop/stats.py", start="x"))[0] == "bad_arguments"
        assert (await refusal("read", path="shop/stats.py", start="3", end="2"))[0] == "bad_arguments"
        assert await refusal("read", path="nope.py") == ("failed", "no such file: nope.py")
        assert await refusal("read", path="shop") == ("failed", "shop is a directory")
        assert (await refusal("read", path="bin.dat"))[1] == "bin.dat is not UTF-8 text"
        assert (await refusal("read", path=""))[0] == "bad_arguments"
        assert (await refusal("read"))[0] == "bad_arguments"
        assert (await refusal("fly", path="x"))[0] == "bad_arguments"
        assert await text("edit", path="shop/stats.py", old="2 * x", new="x + x") == "edited shop/stats.py"
        assert "x + x" in await text("read", path="shop/stats.py")
        assert await refusal("edit", path="twice.txt", old="a", new="b") == (
            "failed",
            "the old text is 2 times in twice.txt; include more lines around it",
        )
        assert await refusal("edit", path="twice.txt", old="zz", new="b") == ("failed", "the old text is not in twice.txt")
        assert await text("edit", path="new/file.py", old="", new="x = 1\n") == "created new/file.py"
        assert await refusal("edit", path="new/file.py", old="", new="y") == ("failed", "new/file.py exists already")
        assert await text("read", path="new/file.py") == "x = 1\n"
        await text("write", path="crlf.txt", text="a\r\nb\r\n")
        assert await text("read", path="crlf.txt") == "a\r\nb\r\n"
        assert (await refusal("write", path="shop", text="x"))[0] == "failed"
        assert (await refusal("write", path="README.md/x", text="x"))[0] == "failed"
        assert await text("list", path="shop") == "__init__.py\nstats.py"
        assert (await text("list")).splitlines()[-1] == "twice.txt"
        assert (await refusal("list", path="README.md"))[1] == "README.md is not a directory"
        assert await text("glob", pattern="*.py") == "new/file.py\nshop/__init__.py\nshop/stats.py\ntests/test_stats.py"
        assert await text("glob", pattern="shop/*.py") == "shop/__init__.py\nshop/stats.py"
        assert await text("glob", pattern="**/test_*.py") == "tests/test_stats.py"
        assert await text("glob", pattern="*.rs") == "no files match"
        assert await text("grep", pattern=r"^def \w+", path="shop") == "shop/stats.py:1:def mean(xs):\nshop/stats.py:5:def double(x):"
        assert (await text("grep", pattern="mean", glob="test_*.py")).splitlines()[
            0
        ] == "tests/test_stats.py:1:from shop.stats import double, mean"
        assert await text("grep", pattern="nowhere_to_be_found") == "no matches"
        assert (await refusal("grep", pattern="("))[0] == "bad_arguments"
        assert (await refusal("grep", pattern="x", path="nope"))[0] == "failed"

    on(scene)


@pytest.mark.parametrize(("op", "pattern"), [("grep", "(a+)+$"), ("grep", "(a|aa)+b"), ("glob", "*a" * 12 + "*b")])
def test_a_search_that_backtracks_for_ever_is_stopped_and_blocks_nobody(on, op, pattern) -> None:
    async def scene(host) -> None:
        name = "a" * 120 + ".txt"
        sandbox = await host.create(await host.add_image({name: b"a" * 60 + b"!\n"}))
        slow = asyncio.create_task(sandbox.call(op, {"pattern": pattern, "timeout_s": 1.0}))
        await asyncio.sleep(0.05)
        assert (await sandbox.call("list", {}))["text"] == name
        assert not slow.done()
        assert (await slow)["error"] == "timeout"

    on(scene)


def test_a_very_deep_tree_is_walked_and_harms_nobody(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        made = await sandbox.exec(
            ["sh", "-c", "i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done; echo x > deep.py"]
        )
        assert made.code == 0
        assert "shop/stats.py" in (await sandbox.call("glob", {"pattern": "**/*.py"}))["text"].splitlines()
        assert (await sandbox.call("grep", {"pattern": "def mean"}))["text"].startswith("shop/stats.py:1:")

    on(scene)


def test_commands(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert (result.code, result.output, result.timed_out, result.limit) == (3, b"out\nerr\n", False, "")
        assert (await sandbox.exec(["cat"], stdin=b"\0bytes\xff")).output == b"\0bytes\xff"
        assert (await sandbox.exec(["sh", "-c", "echo $COLOUR; pwd"], env={"COLOUR": "blue"}, cwd="shop")).output.splitlines()[0] == b"blue"
        assert (await sandbox.exec(["pwd"], cwd="shop")).output.decode().strip() == (await sandbox.info()).workdir + "/shop"
        assert (await sandbox.exec(["no-such-program"])).code == 127
        assert (await sandbox.exec(["./README.md"])).code == 126
        assert (await sandbox.exec(["true"], cwd="nope")).code == 126
        assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).code == -9
        hung = await sandbox.exec(["sleep", "60"], timeout_s=0.3)
        assert (hung.timed_out, hung.limit, hung.code) == (True, "wall", -9)
        answer = await sandbox.call("exec", {"command": "printf 'a\\xffb' | tr a-z A-Z; false"})
        assert (answer["code"], answer["output"]) == (1, "A\ufffdB")
        assert (await sandbox.call("exec", {"argv": ["echo", "$HOME"]}))["output"] == "$HOME\n"
        assert (await sandbox.call("exec", {}))["error"] == "bad_arguments"
        assert (await sandbox.call("exec", {"command": "true", "timeout_s": "soon"}))["error"] == "bad_arguments"
        assert (await sandbox.call("exec", {"command": "true", "timeout_s": float("nan")}))["error"] == "bad_arguments"
        answer = await sandbox.call("exec", {"command": 'python -c "import sys; print(sys.version_info[0])"'})
        assert answer["output"] == "3\n"

    on(scene)


def test_calls_run_at_the_same_time(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        order = []

        async def command(name: str, text: str) -> None:
            answer = await sandbox.call("exec", {"command": text})
            order.append((name, answer["code"]))

        await asyncio.gather(
            command("waits", "while [ ! -e go ]; do sleep 0.01; done"),
            command("goes", "touch go"),
            *(command("other", "true") for _ in range(5)),
        )
        assert sorted(order) == [("goes", 0), *[("other", 0)] * 5, ("waits", 0)]

    on(scene)


def test_a_cancelled_call_stops_its_command(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        task = asyncio.create_task(sandbox.exec(["sh", "-c", "echo $$ > pid; exec sleep 100"]))
        while await sandbox.stat("pid") is None or not (await sandbox.read("pid")).strip():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pid = (await sandbox.read("pid")).decode().strip()
        for _ in range(200):
            if (await sandbox.exec(["sh", "-c", f"kill -0 {pid}"])).code != 0:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the command of a cancelled call goes on")

    on(scene)


def test_output_is_capped_and_counted(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=Limits(output_bytes=1000))
        result = await sandbox.exec(["sh", "-c", "printf begin; head -c 5000 /dev/zero | tr '\\0' x; printf finis"])
        assert result.output.startswith(b"begin")
        assert result.output.endswith(b"finis")
        assert result.dropped_bytes == 5010 - 1000
        assert b"[... 4010 bytes dropped ...]" in result.output
        endless = await sandbox.exec(["yes"], timeout_s=30)
        assert (endless.limit, endless.timed_out) == ("output", False)
        assert len(endless.output) < 1100

    on(scene)


def test_jobs_start_poll_and_end(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        job = (await sandbox.call("job_start", {"command": "echo started; while [ ! -e stop ]; do sleep 0.01; done; echo over; exit 7"}))[
            "job"
        ]
        while "started" not in (answer := await sandbox.call("job_poll", {"job": job}))["output"]:
            await asyncio.sleep(0.01)
        assert answer["running"] is True
        await sandbox.write("stop", b"")
        while (answer := await sandbox.call("job_poll", {"job": job}))["running"]:
            await asyncio.sleep(0.01)
        assert (answer["code"], answer["output"]) == (7, "started\nover\n")
        second = (await sandbox.call("job_start", {"command": "sleep 100"}))["job"]
        assert second != job
        killed = await sandbox.call("job_kill", {"job": second})
        assert (killed["running"], killed["code"]) == (False, -9)
        assert (await sandbox.call("job_kill", {"job": second}))["running"] is False
        assert (await sandbox.call("job_poll", {"job": "99"}))["error"] == "bad_arguments"
        assert (await sandbox.call("job_start", {}))["error"] == "bad_arguments"

    on(scene)


def test_diff_holds_exactly_what_changed(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(
            await host.add_image({**shop, "old/a.txt": b"a", "old/deep/b.txt": b"b", "same.txt": b"same", "swap": b"file"})
        )
        assert await sandbox.diff() == []
        script = """
            echo changed > README.md
            printf '\\000\\377' > blob.bin
            chmod +x shop/stats.py
            rm -r old && mkdir -p old/deep && echo new > old/deep/c.txt
            printf same > same.txt && touch tests/test_stats.py
            rm swap && mkdir swap && echo inner > swap/inner
            mkdir empty; ln -s /etc/passwd link; ln -s shop dirlink; mkfifo pipe
        """
        assert (await sandbox.call("exec", {"command": script}))["code"] == 0
        report = await sandbox.diff_report()
        changes = {change.path: (change.data, change.mode if change.data is not None else None) for change in report.changes}
        assert changes == {
            "README.md": (b"changed\n", 0o644),
            "blob.bin": (b"\0\xff", 0o644),
            "shop/stats.py": (shop["shop/stats.py"], 0o755),
            "old/a.txt": (None, None),
            "old/deep/b.txt": (None, None),
            "old/deep/c.txt": (b"new\n", 0o644),
            "swap": (None, None),
            "swap/inner": (b"inner\n", 0o644),
        }
        assert dict(report.refused) == {"link": "a link", "dirlink": "a link", "pipe": "not a regular file"}
        assert list(report.changes) == await sandbox.diff()

    on(scene)


def test_forks_share_nothing_but_their_past(on, shop) -> None:
    async def scene(host) -> None:
        parent = await host.create(await host.add_image(shop))
        await parent.write("common.txt", b"before")
        await parent.exec(["rm", "README.md"])
        one, two = await parent.fork(2)
        for child in (one, two):
            assert await child.read("common.txt") == b"before"
            assert await child.stat("README.md") is None
            assert await child.diff() == []
        await parent.write("parent.txt", b"")
        await one.write("one.txt", b"")
        await one.write("common.txt", b"one")
        await one.exec(["sh", "-c", "echo x > $TMPDIR/one"])
        assert await two.read("common.txt") == b"before"
        assert await parent.read("common.txt") == b"before"
        assert [await two.stat(name) for name in ("parent.txt", "one.txt")] == [None, None]
        assert [await parent.stat(name) for name in ("one.txt",)] == [None]
        assert (await two.exec(["sh", "-c", "test -e $TMPDIR/one"])).code == 1
        (grandchild,) = await one.fork(1)
        assert await grandchild.read("common.txt") == b"one"
        assert [change.path for change in await parent.diff()] == ["README.md", "common.txt", "parent.txt"]

    on(scene)


def test_a_snapshot_is_an_image(on, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        sandbox = await host.create(image)
        await sandbox.write("more.txt", b"1")
        snapshot = await sandbox.snapshot()
        assert await sandbox.snapshot() == snapshot
        assert (await sandbox.info()).snapshot == snapshot
        await sandbox.write("more.txt", b"2")
        assert await sandbox.snapshot() != snapshot
        await sandbox.destroy()
        again = await host.create(snapshot)
        assert await again.read("more.txt") == b"1"

    on(scene)


def test_pause_stops_every_process_and_resume_lets_them_go_on(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        await sandbox.call("job_start", {"command": "i=0; while true; do i=$((i+1)); echo $i > count; done"})
        while await sandbox.stat("count") is None:
            await asyncio.sleep(0.01)
        await sandbox.pause()
        first = await sandbox.read("count")
        await asyncio.sleep(0.1)
        assert await sandbox.read("count") == first
        await sandbox.resume()
        for _ in range(3000):
            if await sandbox.read("count") not in (first, b""):
                return
            await asyncio.sleep(0.01)
        pytest.fail("the job does not go on after resume")

    on(scene)


def test_a_destroyed_sandbox_says_so(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop))
        running = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        await asyncio.sleep(0.05)
        await sandbox.destroy()
        with pytest.raises(SandboxError, match="destroyed"):
            await running
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.diff()
        await sandbox.destroy()
        assert (await host.stats())["live"] == 0

    on(scene)


def test_a_lease_runs_out(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), ttl_s=0.8)
        with pytest.raises(SandboxError, match="lease ran out"):
            await sandbox.exec(["sleep", "30"])
        while (stats := await host.stats())["live"]:
            await asyncio.sleep(0.01)
        assert stats["expired"] >= 1

    on(scene)


def test_the_same_create_id_is_the_same_sandbox(on, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        first, second = await asyncio.gather(host.create(image, create_id="r-1"), host.create(image, create_id="r-1"))
        assert (await first.info()).id == (await second.info()).id
        await first.write("shared", b"x")
        assert await second.read("shared") == b"x"
        other = await host.create(image, create_id="r-2")
        assert (await other.info()).id != (await first.info()).id
        assert (await host.stats())["live"] == 2
        await first.destroy()
        fresh = await host.create(image, create_id="r-1")
        assert await fresh.stat("shared") is None

    on(scene)


def test_users_mistakes_are_named(on, shop) -> None:
    async def scene(host) -> None:
        with pytest.raises(UserError, match="no image or snapshot"):
            await host.create("0" * 64)
        with pytest.raises(UserError, match="no image or snapshot"):
            await host.create("../../etc")
        for bad in ("/etc/passwd", "../x", "a/../../x", ""):
            with pytest.raises(UserError, match="relative to the workspace"):
                await host.add_image({bad: b""})
        with pytest.raises(UserError, match="a file and a folder"):
            await host.add_image({"a": b"", "a/b": b""})
        with pytest.raises(UserError, match="no host"):
            await host.create(await host.add_image(shop), network=("https://pypi.org",))
        if on.backend != "namespace":
            with pytest.raises(UserError, match="network"):
                await host.create(await host.add_image(shop), network=("pypi.org",))

    on(scene)
