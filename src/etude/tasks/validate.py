"""The validator: what every task must survive before anyone trains on it, whatever generator it came from.

For a package and candidate deletions in it:

    suite green, R times -> for each candidate: unique -> no copy left -> after the deletion exactly the target tests
    fail and all others pass -> restored, all pass -> every wrong body fails a target test -> accepted

Every candidate ends in a `Verdict` with a `Reject` reason or none, counted by a `Funnel`, so that yields can be
reported. All runs of a package share one sandbox: files are written over each other between test runs, which needs no
bytecode to be written there (sandboxes set PYTHONDONTWRITEBYTECODE).
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.errors import SandboxError, TaskError
from etude.protocols import Sandbox, SandboxHost
from etude.records import Task, TestReport
from etude.tasks.deletion import Deletion, Fingerprint, Refusal, ast_hash, delete, fingerprint, functions
from etude.tasks.grade import TestRun, expected_ids, files_of, report_of, run_pytest
from etude.tasks.leaks import Prover, find_copies


class Reject(enum.StrEnum):
    """Why a candidate is no task. The first four come from `deletion.Refusal`."""

    UNPARSABLE = "unparsable"
    UNSUPPORTED = "unsupported"
    NEEDED_ON_IMPORT = "needed_on_import"
    STILL_IMPORTED = "still_imported"
    BASELINE_RED = "baseline_red"
    """The suite is not green before the deletion."""
    FLAKY = "flaky"
    """Runs of the same files disagree."""
    DUPLICATE = "duplicate"
    LEAK = "leak"
    """A copy of the deleted code is left."""
    TARGETS_PASS = "targets_pass"
    """A test that should fail without the code passes."""
    OTHERS_FAIL = "others_fail"
    """A test that should not need the code fails, or is gone."""
    NO_TARGETS = "no_targets"
    """Fewer tests fail than a task needs."""
    RESTORE_FAILS = "restore_fails"
    WRONG_PASSES = "wrong_passes"
    """A known wrong body passes the tests."""
    UNRELATED = "unrelated"
    """Tests fail for a reason that does not name what was deleted."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    id: str
    deletion: Deletion
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Test files the agent does not see."""
    targets: tuple[str, ...] | None = None
    """Ids (visible and hidden) that must fail without the code; None takes whatever fails."""
    wrong: tuple[str, ...] = ()
    """Whole texts of the file with a wrong body in it."""
    hidden_catches_wrong: bool = True
    """A wrong body must fail a hidden test and a visible one, where there are hidden ones."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    candidate: str
    reject: Reject | None = None
    detail: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.reject is None


class Funnel:
    """Counts of verdicts by reason."""

    def __init__(self) -> None:
        self.accepted = 0
        self.tasks: list[Task] = []
        """The stored tasks that were accepted, where tasks were judged."""
        self.rejected: collections.Counter[Reject] = collections.Counter()

    def count(self, verdict: Verdict) -> Verdict:
        if verdict.reject is None:
            self.accepted += 1
        else:
            self.rejected[verdict.reject] += 1
        return verdict

    @property
    def total(self) -> int:
        return self.accepted + self.rejected.total()

    def as_dict(self) -> dict[str, int]:
        return {"accepted": self.accepted, **{reason.value: n for reason, n in sorted(self.rejected.items())}}


class Bench:
    """One sandbox that holds a package; each run writes only the files that differ from the last one.

    Example:
        async with Bench(host, files) as bench:
            report = await bench.run_tests({**files, "shop/ops.py": text}, ids)
    """

    def __init__(self, host: SandboxHost, files: Mapping[str, str], *, time_limit_s: float = 60.0) -> None:
        self._host = host
        self._now = dict(files)
        self._time_limit_s = time_limit_s
        self._sandbox: Sandbox | None = None

    async def __aenter__(self) -> Bench:
        image = await self._host.add_image({path: text.encode() for path, text in self._now.items()})
        self._sandbox = await self._host.create(image)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sandbox is not None:
            await self._sandbox.destroy()
            self._sandbox = None

    async def run(self, files: Mapping[str, str], paths: Sequence[str] = ()) -> TestRun:
        """Run test files (all of the suite by default) with the tree as given."""
        if self._sandbox is None:
            raise SandboxError("the bench has no sandbox; use it with `async with`")
        gone = [path for path in self._now if path not in files]
        if gone:
            result = await self._sandbox.exec(["rm", "-f", "--", *gone])
            if result.code != 0:
                raise SandboxError(f"could not remove {gone[0]!r} in a validation sandbox: {result.output[:200]!r}")
        for path, text in files.items():
            if self._now.get(path) != text:
                await self._sandbox.write(path, text.encode())
        self._now = dict(files)
        return await run_pytest(self._sandbox, paths, self._time_limit_s)

    async def run_tests(self, files: Mapping[str, str], ids: Sequence[str]) -> TestReport:
        return report_of(await self.run(files, files_of(ids)), ids)


async def validate_package(
    host: SandboxHost,
    files: Mapping[str, str],
    candidates: Sequence[Candidate],
    *,
    repeats: int = 3,
    least_targets: int = 1,
    seen: set[str] | None = None,
    funnel: Funnel | None = None,
) -> list[Verdict]:
    """Judge the candidates of one package in one sandbox. `seen` holds code already used and is added to."""
    funnel = funnel if funnel is not None else Funnel()
    seen = seen if seen is not None else set()
    async with Bench(host, files) as bench:
        stable, trouble = await _baseline(bench, files, repeats)
        verdicts = []
        for candidate in candidates:
            if trouble is not None:
                verdict = Verdict(candidate=candidate.id, reject=trouble[0], detail=trouble[1])
            else:
                verdict = await _judge(bench, files, candidate, stable, repeats, least_targets, seen)
            verdicts.append(funnel.count(verdict))
    return verdicts


async def _baseline(bench: Bench, files: Mapping[str, str], repeats: int) -> tuple[tuple[str, ...], tuple[Reject, str] | None]:
    """Ids of the suite, and what is wrong with it."""
    runs = [await bench.run(files) for _ in range(max(repeats, 1))]
    first = runs[0]
    bad = next((i for i, outcome in first.outcomes.items() if outcome not in ("passed", "skipped", "xfailed")), None)
    if bad is not None or not first.complete or not first.outcomes:
        detail = f"{bad}: {first.messages.get(bad, '')}" if bad else first.ending or "no test ran"
        return (), (Reject.BASELINE_RED, detail)
    for other in runs[1:]:
        if other.outcomes != first.outcomes:
            changed = sorted(set(first.outcomes.items()) ^ set(other.outcomes.items()))
            return (), (Reject.FLAKY, changed[0][0])
    return tuple(i for i, outcome in first.outcomes.items() if outcome == "passed"), None


async def _judge(
    bench: Bench, files: Mapping[str, str], candidate: Candidate, stable: tuple[str, ...], repeats: int, least: int, seen: set[str]
) -> Verdict:
    cut = candidate.deletion

    def no(reason: Reject, detail: str) -> Verdict:
        return Verdict(candidate=candidate.id, reject=reason, detail=detail)

    if cut.fingerprint.ast_hash in seen:
        return no(Reject.DUPLICATE, cut.qualname)
    leaks = find_copies(cut.files, cut.fingerprint, module=cut.path.rsplit("/", 1)[-1].removesuffix(".py"))
    if leaks:
        return no(Reject.LEAK, f"{leaks[0].path} ({leaks[0].channel}): {leaks[0].what}")
    whole = {**files, **candidate.hidden}
    gold = await bench.run(whole)
    ids = tuple(gold.outcomes)
    if (bad := _not_passed(gold, [*stable, *(candidate.targets or ())])) is not None:
        return no(Reject.RESTORE_FAILS, f"{bad} does not pass with the code in place")
    runs = [await bench.run({**cut.files, **candidate.hidden}) for _ in range(max(repeats, 1))]
    if any(r.outcomes != runs[0].outcomes for r in runs[1:]):
        return no(Reject.FLAKY, "runs without the code disagree")
    failing = tuple(i for i in ids if runs[0].outcomes.get(i) != "passed" and gold.outcomes[i] == "passed")
    targets = candidate.targets if candidate.targets is not None else failing
    if passing := [i for i in targets if i not in failing]:
        return no(Reject.TARGETS_PASS, passing[0])
    if extra := [i for i in failing if i not in targets]:
        return no(Reject.OTHERS_FAIL, extra[0])
    if len(targets) < least:
        return no(Reject.NO_TARGETS, f"{len(targets)} tests fail, {least} are needed")
    restored = await bench.run({**cut.files, **cut.restoring, **candidate.hidden})
    if restored.outcomes != gold.outcomes:
        return no(Reject.RESTORE_FAILS, "outcomes differ after restoring")
    if (survivor := await _surviving_wrong(bench, whole, candidate, targets)) is not None:
        return no(Reject.WRONG_PASSES, survivor)
    seen.add(cut.fingerprint.ast_hash)
    kept = tuple(i for i in ids if gold.outcomes[i] == "passed" and i not in targets)
    return Verdict(candidate=candidate.id, fail_to_pass=tuple(targets), pass_to_pass=kept)


def _not_passed(run: TestRun, ids: Sequence[str]) -> str | None:
    return next((i for i in ids if run.outcomes.get(i) != "passed"), None)


async def _surviving_wrong(bench: Bench, whole: Mapping[str, str], candidate: Candidate, targets: Sequence[str]) -> str | None:
    """A wrong body that the tests let pass, or None."""
    cut = candidate.deletion
    groups = [[i for i in targets if i.split("::")[0] not in candidate.hidden]]
    if candidate.hidden and candidate.hidden_catches_wrong:
        groups.append([i for i in targets if i.split("::")[0] in candidate.hidden])
    for number, text in enumerate(candidate.wrong):
        if text == whole[cut.path]:
            raise TaskError(f"wrong body {number} of {cut.qualname} is the right one")
        run = await bench.run({**whole, cut.path: text}, files_of(targets))
        for group in groups:
            if group and _not_passed(run, group) is None:
                return f"wrong body {number} of {cut.qualname} passes {', '.join(group)}"
    return None


# ---------------------------------------------------------------------------------------------------
# Finished tasks


async def validate_tasks(
    tasks: Sequence[Task], host: SandboxHost, *, repeats: int = 1, seen: set[str] | None = None, funnel: Funnel | None = None
) -> Funnel:
    """Judge tasks as they are stored, each in a sandbox of its own: unique, no copy left, the recorded tests fail and
    pass as recorded, and the recorded solution passes all."""
    funnel = funnel if funnel is not None else Funnel()
    seen = seen if seen is not None else set()
    for task in tasks:
        if funnel.count(await validate_task(task, host, repeats=repeats, seen=seen)).accepted:
            funnel.tasks.append(task)
    return funnel


async def validate_task(task: Task, host: SandboxHost, *, repeats: int = 1, seen: set[str] | None = None) -> Verdict:
    """The verdict on one stored task. `seen` holds code already used and is added to."""
    seen = seen if seen is not None else set()
    prover = Prover()

    def no(reason: Reject, detail: str) -> Verdict:
        return Verdict(candidate=task.id, reject=reason, detail=detail)

    expected, files = expected_ids(task), dict(task.files)
    try:
        gone = _deleted_functions(task)
    except Refusal as error:
        return no(Reject.UNPARSABLE, str(error))
    if not gone:
        return no(Reject.RESTORE_FAILS, "the solution brings back no function")
    key = "+".join(sorted(f.ast_hash for _, f in gone))
    if key in seen:
        return no(Reject.DUPLICATE, ", ".join(f.name for _, f in gone))
    stems = [path.rsplit("/", 1)[-1].removesuffix(".py") for path, _ in gone]
    if leaks := prover.find(files, [mark for _, mark in gone], modules=stems, given=task.prompt):
        return no(Reject.LEAK, f"{leaks[0].path} ({leaks[0].channel}): {leaks[0].what}")
    before = {**files, **dict(task.grader.hidden)}
    async with Bench(host, before, time_limit_s=task.grader.time_limit_s) as bench:
        for _ in range(max(repeats, 1)):
            stub = await bench.run(before, files_of(expected))
            if passing := [i for i in task.grader.fail_to_pass if stub.outcomes.get(i) == "passed"]:
                return no(Reject.TARGETS_PASS, passing[0])
            if (bad := _not_passed(stub, task.grader.pass_to_pass)) is not None:
                return no(Reject.OTHERS_FAIL, bad)
            solved = report_of(await bench.run({**before, **dict(task.solution)}, files_of(expected)), expected)
            if not solved.solved:
                return no(Reject.RESTORE_FAILS, solved.detail)
    seen.add(key)
    return Verdict(candidate=task.id, fail_to_pass=task.grader.fail_to_pass, pass_to_pass=task.grader.pass_to_pass)


def _deleted_functions(task: Task) -> list[tuple[str, Fingerprint]]:
    """(path, fingerprint) of the functions that the solution has and the workspace does not."""
    files = dict(task.files)
    out: list[tuple[str, Fingerprint]] = []
    for path, text in task.solution:
        if not path.endswith(".py"):
            continue
        left = {name: ast_hash(node) for name, node in functions(files.get(path, ""), path)}
        whole = dict(functions(text, path))
        for name, node in whole.items():
            if left.get(name) != ast_hash(node):
                body = delete({path: text}, path, name).body
                out.append((path, fingerprint(node, body, gone=name not in left)))
    return out
