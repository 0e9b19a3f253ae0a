"""Grading: exact ids in a pristine copy. Everything an agent can do fails the task; only machines raise."""

from __future__ import annotations

import asyncio
import stat

import pytest

from etude.errors import InfraError, SandboxError, TaskError
from etude.protocols import Change
from etude.records import Grader
from etude.tasks.grade import Discard, allowed_changes, grade, parse_answer, report_of
from etude.tasks.source import kata_of, make_task


def body_of(task, body):
    """The change that writes `body` in place of the stub."""
    path, _ = task.solution[0]
    text = dict(task.files)[path]
    at = text.index("raise NotImplementedError")
    start = text.rindex("\n", 0, at) + 1
    return Change(path=path, data=(text[:start] + body + text[at + len("raise NotImplementedError") :]).encode())


def solution(task):
    return [Change(path=path, data=text.encode()) for path, text in task.solution]


TASK = make_task(21, family="sum_over", index=4)


def test_the_solution_solves_and_the_stub_does_not(host, run):
    for seed in (3, 8):
        task = make_task(seed)
        stub, solved = run(grade(task, [], host)), run(grade(task, solution(task), host))
        assert not stub.solved
        assert set(stub.failed) == set(task.grader.fail_to_pass)
        assert set(stub.passed) == set(task.grader.pass_to_pass)
        assert stub.detail
        assert solved.solved
        assert set(solved.passed) == {*task.grader.fail_to_pass, *task.grader.pass_to_pass}
        assert solved.failed == solved.missing == ()


def test_wrong_bodies_do_not_solve(host, run):
    _, kata = kata_of(TASK)
    for wrong in kata.wrong_bodies:
        report = run(grade(TASK, [body_of(TASK, wrong)], host))
        assert not report.solved
        assert report.failed


def test_special_casing_the_visible_tests_fails_the_hidden_ones(host, run):
    _, kata = kata_of(TASK)
    table = {repr(c.arguments[0]): c.expected for c in kata.visible}
    argument = kata.signature.partition("(")[2].rstrip(")")
    report = run(grade(TASK, [body_of(TASK, f"    return {table!r}[repr({argument})]")], host))
    assert not report.solved
    assert set(report.failed) == {i for i in TASK.grader.fail_to_pass if "_hidden.py" in i}


BREAKS = {
    "syntax error": "    return (",
    "exit": "    import sys\n    sys.exit(0)",
    "hard exit": "    import os\n    os._exit(0)",
    "crash": "    import os\n    os.kill(os.getpid(), 11)",
    "skip": "    import pytest\n    pytest.skip('no')",
    "expected failure": "    import pytest\n    pytest.xfail('no')",
}


@pytest.mark.parametrize("name", BREAKS)
def test_whatever_a_body_does_is_a_report_that_is_not_solved(name, host, run):
    report = run(grade(TASK, [body_of(TASK, BREAKS[name])], host))
    assert not report.solved
    assert not set(report.passed) & set(TASK.grader.fail_to_pass)
    assert report.detail


def test_an_exit_when_the_module_is_imported_is_not_a_pass(host, run):
    path, text = TASK.solution[0]
    for line in ("raise SystemExit(0)", "import os; os._exit(0)", "import pytest; pytest.skip('x', allow_module_level=True)"):
        report = run(grade(TASK, [Change(path=path, data=f"{line}\n{text}".encode())], host))
        assert not report.solved
        assert report.missing or report.failed


def test_an_exit_after_the_tests_is_not_a_pass(host, run):
    path, text = TASK.solution[0]
    sneaky = "import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(0.001), os._exit(0))).start()\n"
    report = run(grade(TASK, [Change(path=path, data=(sneaky + text).encode())], host))
    assert not report.solved


def test_the_time_limit_is_a_failure(host, run):
    task = TASK.replace(grader=TASK.grader.replace(time_limit_s=1.5))
    report = run(grade(task, [body_of(task, "    while True:\n        pass")], host))
    assert not report.solved
    assert "ran past 1.5 s" in report.detail


def test_changes_of_the_test_surface_are_not_graded(host, run):
    easy = [
        Change(path=TASK.grader.fail_to_pass[0].split("::")[0], data=b"def test_x():\n    pass\n"),
        Change(path="conftest.py", data=b"import pytest\n\n\ndef pytest_runtest_call(item):\n    pytest.skip('x')\n"),
        Change(path="pyproject.toml", data=b"[tool.pytest.ini_options]\naddopts = '--collect-only'\n"),
        Change(path="tests", data=b"not a folder"),
    ]
    assert not run(grade(TASK, easy, host)).solved
    assert run(grade(TASK, [*solution(TASK), *easy], host)).solved


def test_new_files_removed_files_and_folders_in_the_way(host, run):
    path, text = TASK.solution[0]
    package = path.split("/")[0]
    split = text.replace('"""\n', f'"""\n\nfrom {package}.extra import NOTHING\n', 1)
    good = [Change(path=f"{package}/extra.py", data=b"NOTHING = 0\n"), Change(path=path, data=split.encode())]
    assert run(grade(TASK, good, host)).solved
    assert not run(grade(TASK, [Change(path=path, data=None)], host)).solved
    files = [Change(path=p, data=None) for p, _ in TASK.files if p.startswith(package + "/")]
    assert not run(grade(TASK, [*files, Change(path=package, data=b"gone")], host)).solved


def test_reports_are_the_same_on_both_hosts(cold_host, sandboxes, run):
    _, kata = kata_of(TASK)
    for changes in (solution(TASK), [body_of(TASK, kata.wrong_bodies[0])]):
        cold, warm = run(grade(TASK, changes, cold_host)), run(grade(TASK, changes, sandboxes))
        assert (cold.passed, cold.failed, cold.missing, cold.solved) == (warm.passed, warm.failed, warm.missing, warm.solved)
    crash = [body_of(TASK, BREAKS["hard exit"])]
    assert not run(grade(TASK, crash, cold_host)).solved
    assert not run(grade(TASK, crash, sandboxes)).solved


def test_one_sandbox_per_grade_and_none_is_left(cold_host, run):
    run(grade(TASK, solution(TASK), cold_host))
    assert (cold_host.made, cold_host.live) == (1, 0)


# --- which changes are graded


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests/test_new.py", Discard.PROTECTED),
        ("./tests/../tests/test_new.py", Discard.PROTECTED),
        ("shop/conftest.py", Discard.PROTECTED),
        ("pytest.ini", Discard.PROTECTED),
        ("sitecustomize.py", Discard.PROTECTED),
        ("shop/__pycache__/a.cpython-311.pyc", Discard.PROTECTED),
        ("x.pth", Discard.PROTECTED),
        ("/etc/passwd", Discard.OUTSIDE),
        ("../up.py", Discard.OUTSIDE),
        ("a/../../up.py", Discard.OUTSIDE),
        ("", Discard.OUTSIDE),
        ("json.py", Discard.SHADOWS),
        ("pytest/__init__.py", Discard.SHADOWS),
        ("_pytest/runner.py", Discard.SHADOWS),
    ],
)
def test_discarded_paths(path, reason):
    allowed = allowed_changes(TASK, [Change(path=path, data=b"x = 1\n")])
    assert allowed.changes == ()
    assert allowed.discarded == {reason: (path,)}
    assert allowed.discarded_count == 1


def test_links_and_large_files_are_refused():
    allowed = allowed_changes(
        TASK, [Change(path="a", data=b"/etc/passwd", mode=stat.S_IFLNK | 0o777), Change(path="b", data=b"x" * (9 << 20))]
    )
    assert allowed.discarded == {Discard.LINK: ("a",), Discard.TOO_LARGE: ("b",)}


def test_allowed_paths_are_kept_in_plain_form():
    allowed = allowed_changes(TASK, [Change(path="./shop//new.py", data=b""), Change(path="notes/json.py", data=b"")])
    assert [c.path for c in allowed.changes] == ["shop/new.py", "notes/json.py"]


# --- what a report means


def answer(*tests, **more):
    return {"code": 0, "tests": [{"id": i, "outcome": o, "seconds": 0.0, "message": ""} for i, o in tests], "complete": True, **more}


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped", "xfailed", "xpassed", "deselected", ""])
def test_only_passed_is_passed(outcome):
    report = report_of(parse_answer(answer(("a", "passed"), ("b", outcome)), 1), ["a", "b"])
    assert (report.passed, report.failed, report.solved) == (("a",), ("b",), False)


def test_missing_ids_and_unfinished_runs_are_not_solved():
    assert report_of(parse_answer(answer(("a", "passed")), 1), ["a", "b"]).missing == ("b",)
    assert report_of(parse_answer(answer(("a", "passed")), 1), ["a"]).solved
    assert not report_of(parse_answer(answer(("a", "passed"), complete=False), 1), ["a"]).solved
    assert not report_of(parse_answer(answer(("a", "passed"), timed_out=True), 1), ["a"]).solved
    assert not report_of(parse_answer(answer(("a", "passed"), limit="memory"), 1), ["a"]).solved


def test_an_id_reported_twice_counts_as_its_worse_outcome():
    for order in (("passed", "failed"), ("failed", "passed")):
        assert not report_of(parse_answer(answer(*(("a", o) for o in order)), 1), ["a"]).solved


def test_an_answer_without_a_report_is_trouble_of_the_sandbox():
    for bad in ({"error": "failed", "text": "no pytest"}, {"code": 0, "output": ""}):
        with pytest.raises(SandboxError, match="gave no report"):
            parse_answer(bad, 1)
    assert not parse_answer({"error": "timeout", "text": ""}, 1).complete


class BrokenHost:
    """A host whose sandboxes die in the way asked for."""

    def __init__(self, at):
        self.at, self.destroyed = at, 0

    async def add_image(self, files):
        return "image"

    async def create(self, image, **_options):
        if self.at == "create":
            raise SandboxError("no room for another sandbox")
        return self

    async def apply_changes(self, changes):
        if self.at == "write":
            raise SandboxError("the sandbox died")

    async def call(self, op, arguments, *, timeout_s=60.0):
        raise SandboxError("the sandbox died")

    async def destroy(self):
        self.destroyed += 1


def test_changes_that_do_not_fit_fail_the_task_and_break_no_machine():
    """An agent that leaves more than a grading sandbox holds must not have its rollout masked, nor stop the run."""

    class Full(BrokenHost):
        async def apply_changes(self, changes):
            raise OSError(28, "No space left on device", changes[0].path)

    host = Full("nowhere")
    report = asyncio.run(grade(TASK, solution(TASK), host))
    assert not report.solved
    assert "No space left" in report.detail
    assert host.destroyed == 1


@pytest.mark.parametrize("at", ["create", "write", "call"])
def test_sandbox_trouble_is_an_infra_error_and_nothing_is_left(at):
    host = BrokenHost(at)
    with pytest.raises(InfraError):
        asyncio.run(grade(TASK, solution(TASK), host))
    assert host.destroyed == (at != "create")


def test_a_task_without_deciding_tests_is_refused(cold_host, run):
    with pytest.raises(TaskError, match="no fail_to_pass"):
        run(grade(TASK.replace(grader=Grader(fail_to_pass=(), pass_to_pass=())), [], cold_host))
