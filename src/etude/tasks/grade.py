"""Grading: the agent's changes on a pristine copy of the task, and the exact tests that decide.

    report = await grade(task, await sandbox.diff(), host)

Walk: `allowed_changes` sorts the changes (protected paths, links and paths outside are discarded and counted) ->
`sandbox.graded` makes a new sandbox from the task's own image plus its hidden tests, never from the agent's, applies what
is allowed and runs the tests, with a report that does not travel over stdout -> `report_of` compares.

Invariants:
* `solved` needs every fail-to-pass and pass-to-pass id reported as passed by a run that reached its end. Missing,
  skipped, expected failures, errors, time-outs and crashes are not passes.
* What the agent did can fail a task, but never raises; what a machine did raises `InfraError`, and is never a report.
* Test surface cannot be changed: those changes are not applied, so there is nothing to restore.

The tests share their process with the agent's code, so a determined forgery can still pass; the monitors of
`rewards` flag the known ways.
"""

from __future__ import annotations

import enum
import fnmatch
import posixpath
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.errors import SandboxError, TaskError
from etude.protocols import Change, GradeBundle, Limits, Sandbox, SandboxHost
from etude.records import Task, TestReport
from etude.sandbox.graded import GRACE_S, graded_run

ALWAYS_PROTECTED = ("*.pth", "*.pyc", "*.pyo", "*.so", "*sitecustomize.py", "*usercustomize.py", "*__pycache__/*", ".git/*")
"""Paths that change what a test run executes without being source of the task."""
_SHADOWING = frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py"}
_MAX_CHANGED_BYTES = 8 * 2**20


class Discard(enum.StrEnum):
    """Why a change is not graded."""

    PROTECTED = "protected"
    """Tests, their configuration, and whatever else decides how they run."""
    OUTSIDE = "outside"
    LINK = "link"
    """Links, devices and other things that are no plain file."""
    TOO_LARGE = "too_large"
    SHADOWS = "shadows"
    """A new top-level module with the name of one that the test run itself imports."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Changes to apply, and the paths that are not applied by reason."""

    changes: tuple[Change, ...]
    discarded: Mapping[Discard, tuple[str, ...]] = field(default_factory=dict)

    @property
    def discarded_count(self) -> int:
        return sum(map(len, self.discarded.values()))


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """What one `pytest` operation reported: outcome by test id."""

    __test__ = False
    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    complete: bool
    """The run reached its end by itself."""
    ending: str = ""
    """How it ended when it did not."""
    seconds: float = 0.0


async def grade(task: Task, changes: Sequence[Change], host: SandboxHost, *, limits: Limits | None = None) -> TestReport:
    """Outcome of the task's tests with the agent's changes. Waits for one sandbox and one test run."""
    expected = expected_ids(task)
    return report_of(await run_changed(task, changes, host, files_of(expected), limits=limits), expected)


async def run_changed(
    task: Task,
    changes: Sequence[Change],
    host: SandboxHost,
    paths: Sequence[str],
    *,
    hidden: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> TestRun:
    """One run of test files on a pristine copy of the task with the allowed changes; `hidden` adds to its hidden files."""
    allowed = allowed_changes(task, changes)
    files = {path: text.encode() for path, text in task.files}
    extra = {path: text.encode() for path, text in {**dict(task.grader.hidden), **(hidden or {})}.items()}
    image = await host.add_image({**files, **extra}) if files else task.workspace
    bundle = GradeBundle(
        changes=allowed.changes,
        files={} if files else extra,
        args=(*PYTEST, *paths),
        timeout_s=task.grader.time_limit_s,
        image=image,
        limits=limits,
    )
    graded = await graded_run(host, bundle)
    if graded.refused:
        return TestRun(outcomes={}, messages={}, complete=False, ending=f"the changes cannot be applied: {graded.refused}")
    return parse_answer(graded.answer, task.grader.time_limit_s)


def expected_ids(task: Task) -> tuple[str, ...]:
    if not task.grader.fail_to_pass:
        raise TaskError(f"task {task.id} has no fail_to_pass test, so nothing can decide it")
    return (*task.grader.fail_to_pass, *task.grader.pass_to_pass)


def files_of(ids: Iterable[str]) -> list[str]:
    """Files of the ids, once each. Whole files are run: one unknown id on pytest's command line would stop the others."""
    return list(dict.fromkeys(test_id.split("::", 1)[0] for test_id in ids))


def report_of(run: TestRun, expected: Sequence[str]) -> TestReport:
    """Compare what was reported with what is expected, id by id."""
    passed = tuple(i for i in expected if run.outcomes.get(i) == "passed")
    missing = tuple(i for i in expected if i not in run.outcomes)
    failed = tuple(i for i in expected if i in run.outcomes and run.outcomes[i] != "passed")
    broken = [i for i in run.outcomes if i not in expected and run.outcomes[i] == "error"]
    first = next((f"{i}: {run.outcomes[i]} {run.messages.get(i, '')}" for i in [*failed, *broken]), "")
    if not run.complete:
        first = f"{run.ending}. {first}" if first else run.ending
    elif not first and missing:
        first = f"{missing[0]}: not run"
    solved = run.complete and len(passed) == len(expected)
    return TestReport(passed=passed, failed=failed, missing=missing, seconds=run.seconds, detail=first.strip()[:500], solved=solved)


# ---------------------------------------------------------------------------------------------------
# The test run


PYTEST = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")


async def run_pytest(sandbox: Sandbox, paths: Sequence[str], time_limit_s: float) -> TestRun:
    """One run of test files; without paths, of the whole suite."""
    arguments = {"args": [*PYTEST, *paths], "timeout_s": time_limit_s, "report": True}
    answer = await sandbox.call("pytest", arguments, timeout_s=time_limit_s + GRACE_S)
    return parse_answer(answer, time_limit_s)


def parse_answer(answer: Mapping[str, Any], time_limit_s: float) -> TestRun:
    """The answer of the tool server's `pytest` operation. An answer without tests is trouble of the sandbox."""
    if answer.get("error") == "timeout":
        return TestRun(outcomes={}, messages={}, complete=False, ending=f"the tests ran past {time_limit_s:g} s", seconds=time_limit_s)
    if "error" in answer or "tests" not in answer:
        raise SandboxError(f"the test run gave no report: {answer.get('error', 'no tests field')}: {str(answer.get('text', answer))[:200]}")
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for test in answer["tests"]:
        name, outcome = str(test["id"]), str(test["outcome"])
        if outcomes.get(name, "passed") == "passed":  # reported twice: the worse outcome counts
            outcomes[name] = outcome
        if outcome != "passed":
            messages[name] = str(test.get("message", ""))
    ending = ""
    if answer.get("timed_out"):
        ending = f"the tests ran past {time_limit_s:g} s"
    elif answer.get("limit"):
        ending = f"the tests hit the {answer['limit']} limit"
    elif not answer.get("complete", True):
        ending = f"the test process ended before its tests (status {answer.get('code')})"
    seconds = float(answer.get("seconds", 0.0))
    return TestRun(outcomes=outcomes, messages=messages, complete=not ending, ending=ending, seconds=seconds)


# ---------------------------------------------------------------------------------------------------
# Which changes are graded


def allowed_changes(task: Task, changes: Iterable[Change]) -> Allowed:
    """Sort changes into those that are applied and those that are not, with the reason."""
    kept: list[Change] = []
    discarded: dict[Discard, list[str]] = {}
    known = {path for path, _ in task.files}
    for change in changes:
        path = workspace_path(change.path)
        reason = Discard.OUTSIDE if path is None else _reason(task, change, path, known)
        if reason is not None:
            discarded.setdefault(reason, []).append(change.path)
        elif path is not None:
            kept.append(Change(path=path, data=change.data, mode=change.mode & 0o777))
    return Allowed(changes=tuple(kept), discarded={k: tuple(v) for k, v in discarded.items()})


def workspace_path(path: str) -> str | None:
    """The path in its plain form, or None when it leaves the workspace."""
    if not path or path.startswith("/") or "\0" in path or "\\" in path:
        return None
    plain = posixpath.normpath(path)
    return None if plain in (".", "..") or plain.startswith("../") else plain


def is_protected(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern covers the path, or something below it (replacing `tests` by a file removes the tests)."""
    return any(fnmatch.fnmatchcase(path, p) or p.startswith(path + "/") for p in patterns)


def _reason(task: Task, change: Change, path: str, known: set[str]) -> Discard | None:
    patterns = (*task.grader.protected, *ALWAYS_PROTECTED, *(p for p, _ in task.grader.hidden))
    below = [p for p in known if p.startswith(path + "/")]
    if is_protected(path, patterns) or any(is_protected(p, patterns) for p in below):
        return Discard.PROTECTED
    if stat.S_IFMT(change.mode) not in (0, stat.S_IFREG):
        return Discard.LINK
    if change.data is not None and len(change.data) > _MAX_CHANGED_BYTES:
        return Discard.TOO_LARGE
    top = path.split("/")[0].removesuffix(".py")
    if path not in known and top in _SHADOWING and not any(p.split("/")[0].removesuffix(".py") == top for p in known):
        return Discard.SHADOWS
    return None
