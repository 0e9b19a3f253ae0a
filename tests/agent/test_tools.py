import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.toolbox import Toolbox, must_wait, scrubbed, truncated
from etude.agent.tools.base import Desk
from etude.agent.tools.lints import COMPILE
from etude.agent.tools.registry import TOOLS, available, schema_hash, tool_schema, usage
from etude.errors import SandboxError
from etude.fakes import memory_sandbox
from etude.protocols import ExecResult
from etude.records import ToolCall, ToolError, ToolPolicy
from etude.text.calls import format_call, parse_calls


def call(name, **arguments):
    return ToolCall(id=name, name=name, arguments=arguments)


@pytest.fixture
def use(workspace):
    """Run calls in a fresh workspace; returns (results, sandbox, toolbox)."""

    async def go(*calls, policy=None, commands=None, files=None, **options):
        sandbox = await workspace(files, commands)
        toolbox = Toolbox(Desk(sandbox=sandbox, command_timeout_s=options.pop("timeout_s", 5.0)), policy or ToolPolicy(), **options)
        results = await toolbox.act(calls)
        await toolbox.close()
        return results, sandbox, toolbox

    return lambda *calls, **options: asyncio.run(go(*calls, **options))


def one(results):
    (result,) = results
    return result


def test_files(use):
    results, sandbox, toolbox = use(
        call("list_dir"),
        call("list_dir", path="shop"),
        call("read_file", path="README.md"),
        call("read_file", path="shop/stats.py", start="1", end=" 2 "),
        call("edit_file", path="shop/stats.py", old="    raise NotImplementedError", new="    return sum(values) / len(values)"),
        call("edit_file", path="new/a.py", old="", new="x = 1\n"),
        call("read_file", path="nothing.py"),
        call("edit_file", path="README.md", old="absent", new=""),
        call("edit_file", path="README.md", old="", new="again"),
    )
    assert [r.text for r in results[:6]] == [
        "README.md\nshop/\ntests/",
        "stats.py",
        "# shop\n",
        "def mean(values):\n    raise NotImplementedError\n",
        "edited shop/stats.py",
        "created new/a.py",
    ]
    assert [r.error for r in results] == [None] * 6 + [ToolError.FAILED] * 3
    assert results[6].text == "no such file: nothing.py"
    assert sandbox.files["new/a.py"] == b"x = 1\n"
    assert list(toolbox.desk.touched) == ["shop/stats.py", "new/a.py"]


def test_search(use):
    results, *_ = use(
        call("glob", pattern="**/*.py"),
        call("grep", pattern="def .*mean"),
        call("grep", pattern="mean", path="shop", glob="*.py"),
        call("grep", pattern="("),
    )
    assert results[0].text == "shop/stats.py\ntests/test_stats.py"
    assert results[1].text == "shop/stats.py:1:def mean(values):\ntests/test_stats.py:4:def test_mean():"
    assert results[2].text == "shop/stats.py:1:def mean(values):"
    assert results[3].error is ToolError.BAD_ARGUMENTS


def test_commands(use):
    async def hang(files):
        await asyncio.sleep(3600)

    commands = {
        "ok": lambda files: "",
        "noisy": lambda files: ExecResult(code=-9, output=b"\xffhalf\n", dropped_bytes=7, limit="output"),
        "hang": hang,
    }
    results, *_ = use(
        call("run_terminal", command="pytest -q"),
        call("run_terminal", command="ok"),
        call("run_terminal", command="noisy"),
        call("run_terminal", command="hang"),
        call("run_terminal", command=" "),
        call("run_terminal", command="nonesuch -x"),
        commands=commands,
        timeout_s=0.05,
    )
    assert [r.text for r in results] == [
        "E   NotImplementedError\n1 failed in 0.03s\n[exit 1]",
        "[no output]",
        "\ufffdhalf\n[7 bytes of output dropped]\n[stopped by the output limit]\n[exit -9]",
        "[stopped after 0.05 s]",
        "running needs a command; to look at a job give job and action=poll or kill",
        "nonesuch: command not found\n[exit 127]",
    ]
    assert [r.error for r in results] == [None, None, None, ToolError.TIMEOUT, ToolError.BAD_ARGUMENTS, None]


def test_background_jobs_are_polled_killed_and_end_with_the_rollout(workspace):
    async def main():
        release = asyncio.Event()

        async def server(files):
            await release.wait()
            return "served\n"

        sandbox = await workspace(commands={"server": server})
        toolbox = Toolbox(Desk(sandbox=sandbox), ToolPolicy())

        async def use(**arguments):
            return one(await toolbox.act([call("run_terminal", **arguments)])).text

        assert await use(command="server 1", background="true") == "started job 1; action=poll shows its output, action=kill ends it"
        await use(command="server 2", background="TRUE")
        await use(command="server 3", background="true")
        assert await use(job="1", action="poll") == "[still running]"
        assert await use(job="2", action="kill") == "[killed job 2]"
        assert sandbox.running_jobs() == ["1", "3"]
        assert "no job '9'" in await use(job="9", action="poll")
        assert "needs the job it is about; jobs: 1, 3" in await use(action="kill")
        release.set()
        assert await use(job="1", action="poll") == "served\n[exit 0]"
        release.clear()
        await use(command="server 4", background="true")
        await toolbox.close()
        assert sandbox.running_jobs() == []
        await toolbox.close()

    asyncio.run(main())


def test_a_job_whose_start_was_cancelled_is_killed_too(workspace):
    async def main():
        sandbox = await workspace(commands={"sleep": lambda files: asyncio.Event().wait()})
        toolbox = Toolbox(Desk(sandbox=sandbox), ToolPolicy())
        acting = asyncio.create_task(toolbox.act([call("run_terminal", command="sleep 9", background="true")]))
        while not any(op == "job_start" for op, _ in sandbox.calls):
            await asyncio.sleep(0)
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting
        await toolbox.close()
        assert [op for op, _ in sandbox.calls] == ["job_start", "job_kill"]
        assert sandbox.running_jobs() == []

    asyncio.run(main())


def test_lints_say_which_checker_ran(use):
    with_ruff = {"ruff": lambda files: (1, "shop/stats.py:1:1: F401 unused\n")}
    assert one(use(call("read_lints"), commands=with_ruff)[0]).text == "ruff:\nshop/stats.py:1:1: F401 unused"
    assert one(use(call("read_lints"), commands={"ruff": lambda files: ""})[0]).text == "ruff: no problems"
    assert one(use(call("read_lints"), commands={"ruff": lambda files: (2, "bad config\n")})[0]).error is ToolError.FAILED
    results, sandbox, _ = use(call("read_lints"), call("read_lints"), commands={"python3": lambda files: "a.py:1:2: bad\n"}, max_parallel=1)
    assert results[0].text == "compile check, for ruff is not installed here:\na.py:1:2: bad"
    assert [a["argv"][0] for _, a in sandbox.calls] == ["ruff", "python3", "python3"]
    assert "neither ruff nor python3" in one(use(call("read_lints"))[0]).text


def test_the_compile_check_itself(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "null.py").write_bytes(b"x = '\0'\n")

    def check(path):
        return subprocess.run([sys.executable, "-c", COMPILE, path], cwd=tmp_path, capture_output=True, text=True)

    lines = check(".").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["bad.py", "null.py"]
    assert lines[0].startswith("bad.py:1:7: ")
    assert check("good.py").stdout == ""
    assert check("absent.py").returncode != 0
    assert not list(tmp_path.glob("**/__pycache__"))


def test_todo(use):
    results, _, toolbox = use(call("todo", items="[ ] read\n\n- [x] write  "))
    assert one(results).text == "2 items, 1 open"
    assert toolbox.desk.todos == [(False, "read"), (True, "write")]
    assert one(use(call("todo", items="read"))[0]).error is ToolError.BAD_ARGUMENTS


# ---------------------------------------------------------------------------------------------------
# Arguments and policy


@pytest.mark.parametrize(
    "bad, error, words",
    [
        (call("fly", to="the moon"), ToolError.UNKNOWN_TOOL, "there is no tool 'fly'; available: read_file, edit_file"),
        (call("read_file"), ToolError.BAD_ARGUMENTS, "the argument 'path' is missing; usage: read_file(path, start?, end?)"),
        (call("read_file", path="README.md", start="two"), ToolError.BAD_ARGUMENTS, "'two' and should be an integer; usage: read_file("),
        (call("run_terminal", action="stop"), ToolError.BAD_ARGUMENTS, "'stop' and should be one of run|poll|kill"),
        (call("run_terminal", command="x", background="maybe"), ToolError.BAD_ARGUMENTS, "should be one of true|false"),
        (parse_calls('<call name="glob">\n<pattern>x\n</call>').calls[0], ToolError.BAD_CALL, "<pattern> is never closed with </pattern>"),
    ],
)
def test_a_bad_call_gets_a_result_that_says_what_exists(use, bad, error, words):
    result = one(use(bad)[0])
    assert result.error is error
    assert words in result.text
    assert result.call_id == bad.id


def test_unknown_arguments_are_ignored_with_a_note_or_refused(use):
    extra = call("read_file", path="README.md", color="red")
    assert one(use(extra)[0]).text == "# shop\n\n[ignored the unknown argument 'color'; usage: read_file(path, start?, end?)]"
    strict = one(use(extra, policy=ToolPolicy(strict_arguments=True))[0])
    assert (strict.error, strict.text) == (ToolError.BAD_ARGUMENTS, "there is no argument 'color'; usage: read_file(path, start?, end?)")


@pytest.mark.parametrize("arguments", [{"start": " 2"}, {"start": "2 "}])
def test_strict_policies_do_not_coerce(use, arguments):
    loose = call("read_file", path="shop/stats.py", **arguments)
    assert one(use(loose)[0]).error is None
    assert one(use(loose, policy=ToolPolicy(strict_arguments=True))[0]).error is ToolError.BAD_ARGUMENTS


def test_a_policy_removes_tools_and_arguments(use):
    policy = ToolPolicy(removed=("grep", "run_terminal.background"))
    results, sandbox, _ = use(
        call("grep", pattern="x"),
        call("run_terminal", command="pytest", background="true"),
        call("run_terminal", command="pytest"),
        call("fly"),
        policy=policy,
    )
    assert [r.error for r in results] == [ToolError.FORBIDDEN, ToolError.FORBIDDEN, None, ToolError.UNKNOWN_TOOL]
    assert "grep" not in results[3].text
    assert [op for op, _ in sandbox.calls] == ["exec"]
    assert "grep" not in tool_schema(policy)
    assert "run_terminal(command?, job?, action?)" in tool_schema(policy)
    assert schema_hash(policy) != schema_hash(ToolPolicy())


def test_the_schema():
    names = tool_schema(ToolPolicy(), "names")
    assert names == (
        "Tools: read_file(path, start?, end?), edit_file(path, old, new), list_dir(path?), glob(pattern), grep(pattern, path?, glob?), "
        "run_terminal(command?, background?, job?, action?), read_lints(path?), todo(items)"
    )
    full = tool_schema(ToolPolicy())
    assert all(usage(t.spec) in full and t.spec.description in full for t in TOOLS.values())
    assert tool_schema(ToolPolicy(), "none") == tool_schema(ToolPolicy(removed=tuple(TOOLS))) == ""
    assert parse_calls(full).calls[0].arguments == {"path": "src/main.py"}  # the example in it is a call
    assert list(available(ToolPolicy())) == list(TOOLS)


@given(text=st.text(max_size=300))
def test_whatever_is_sampled_gets_one_result_for_each_call(text):
    calls = parse_calls(text + '<call name="grep">\n<pattern>' + text + "</pattern>\n</call>" + text).calls

    async def main():
        return await Toolbox(Desk(sandbox=await memory_sandbox({"a": "b"})), ToolPolicy()).act(calls)

    assert [r.call_id for r in asyncio.run(main())] == [c.id for c in calls]


# ---------------------------------------------------------------------------------------------------
# Results


@given(text=st.text(max_size=400), limit=st.integers(0, 300))
def test_truncation_keeps_head_and_tail_and_counts(text, limit):
    short, cut = truncated(text, limit)
    if len(text) <= limit:
        assert (short, cut) == (text, 0)
        return
    head, note, tail = short.partition(f"\n[... {cut} characters cut here ...]\n")
    assert note
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) + cut == len(text)
    assert len(short) <= max(limit, len(note))


def test_long_results_are_cut_by_the_policy(use):
    result = one(use(call("read_file", path="big"), files={"big": "a" * 500 + "z" * 500}, policy=ToolPolicy(max_result_chars=100))[0])
    assert len(result.text) <= 100
    assert result.text[0] == "a"
    assert result.text[-1] == "z"
    assert result.truncated_chars == 1000 - (len(result.text) - len(f"\n[... {result.truncated_chars} characters cut here ...]\n"))


@pytest.mark.parametrize(
    "text, clean",
    [
        ("2 passed in 0.03s", "2 passed in 0.00s"),
        ("== 1 failed in 61.20s (0:01:01) ==", "== 1 failed in 0.00s =="),
        ("real 0m1.503s", "real 0.00s"),
        ("pid 4711, PID=12", "pid 0, PID=0"),
        ('File "/tmp/pytest-of-root/pytest-3/x.py", line 3', 'File "/tmp/x", line 3'),
        ("<object at 0x7f00deadbeef>", "<object at 0x0>"),
        ("wait 3 seconds, 5 processes, v1.2", "wait 3 seconds, 5 processes, v1.2"),
    ],
)
def test_scrubbing(text, clean):
    assert scrubbed(text) == clean


def test_scrubbing_keeps_paths_of_a_workspace_in_a_temporary_folder():
    assert scrubbed("/tmp/a1b2/shop/stats.py:3 /tmp/other", "/tmp/a1b2") == "/workspace/shop/stats.py:3 /tmp/x"
    assert scrubbed("/workspace/a.py", "/workspace") == "/workspace/a.py"


def test_only_output_of_commands_is_scrubbed(use):
    files = {"times.txt": "in 0.03s"}
    results, *_ = use(call("read_file", path="times.txt"), call("run_terminal", command="pytest"), files=files, scrub=True)
    assert results[0].text == "in 0.03s"
    assert "in 0.00s" in results[1].text
    assert [r.seconds for r in results] == [0.0, 0.0]


# ---------------------------------------------------------------------------------------------------
# Concurrency


def test_calls_of_a_message_run_at_the_same_time_and_results_come_in_call_order(use):
    finished = []

    def meet(name, turns):
        async def command(files):
            for _ in range(turns):
                await asyncio.sleep(0)
            finished.append(name)
            return name

        return command

    commands = {"slow": meet("slow", 30), "middle": meet("middle", 15), "fast": meet("fast", 0)}
    calls = [call("run_terminal", command=n) for n in ("slow", "middle", "fast")]
    assert [r.text for r in use(*calls, commands=commands)[0]] == ["slow", "middle", "fast"]
    assert finished == ["fast", "middle", "slow"]
    finished.clear()
    assert [r.text for r in use(*calls, commands=commands, max_parallel=1)[0]] == ["slow", "middle", "fast"]
    assert finished == ["slow", "middle", "fast"]


def test_no_more_calls_run_at_once_than_allowed(use):
    state = {"now": 0, "most": 0}

    async def command(files):
        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        await asyncio.sleep(0.001)
        state["now"] -= 1
        return ""

    use(*[call("run_terminal", command="x")] * 20, commands={"x": command}, max_parallel=3)
    assert state == {"now": 0, "most": 3}


def test_an_edit_and_what_looks_at_it_keep_their_order(use):
    fix = call("edit_file", path="./shop/stats.py", old="    raise NotImplementedError", new="    return 2")
    look = call("read_file", path="shop/stats.py", start="2", end="2")
    results, *_ = use(look, fix, call("run_terminal", command="pytest"), look, call("grep", pattern="return 2"))
    assert results[0].text == "    raise NotImplementedError\n"
    assert results[2].text.startswith("1 passed")
    assert results[3].text == "    return 2\n"
    assert results[4].text == "shop/stats.py:2:    return 2"


def test_which_calls_wait():
    edit, other = call("edit_file", path="a"), call("edit_file", path="b")
    assert not must_wait(edit, other)
    assert must_wait(edit, call("edit_file", path="./a"))
    assert not must_wait(call("todo"), edit)
    assert not must_wait(call("run_terminal"), call("run_terminal"))
    assert all(
        must_wait(call(name), edit) and must_wait(edit, call(name)) for name in ("run_terminal", "grep", "glob", "list_dir", "read_lints")
    )


def test_sandbox_trouble_passes_through_and_leaves_nothing_running(use):
    cleaned = []

    async def waits(files):
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    async def breaks(files):
        await asyncio.sleep(0)
        raise SandboxError("the sandbox died")

    with pytest.raises(SandboxError, match="died"):
        use(
            call("run_terminal", command="waits"),
            call("run_terminal", command="breaks"),
            commands={"waits": waits, "breaks": breaks},
        )
    assert cleaned == [True]


def test_a_call_survives_being_written_and_read(use):
    text = format_call("edit_file", {"path": "x.md", "old": "", "new": "</new>\n<call name='y'>"})
    _, sandbox, _ = use(*parse_calls(text).calls)
    assert sandbox.files["x.md"] == b"</new>\n<call name='y'>"
