"""From a tested Python package to verified deletion tasks, with a reason for everything that is not one.

    made = await make_from_package("inflection", host, out, cache, MakeConfig(count=5))

    source -> environment -> baseline (traced, then five perturbed runs; flaky tests excluded) -> features by who calls
    what -> for each: delete -> no copy left -> exactly the feature's tests fail, all others pass -> stubs fail ->
    packed -> restored 1 and untouched 0 three times, stub 0, in new sandboxes -> accepted

Every package that gives nothing ends in a `Skip`, every candidate in a `Verdict` with a `Reject`, both counted. What is
known about a package is kept in `OUT/.made/<key>.json` after each candidate, so a killed run goes on where it stopped.
Code of the package runs in sandboxes alone.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import functools
import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.config import config
from etude.errors import ConfigError
from etude.protocols import Change, Limits, SandboxHost
from etude.records import Grader, Provenance, Task, seed_for
from etude.tasks.deletion import DeleteLevel, Refusal, delete
from etude.tasks.environment import DEPS, Environment, make_environment, test_folders
from etude.tasks.features import Cut, Feature, cut_feature, propose, units_of, with_bodies
from etude.tasks.fetch import NoSource, Source, read_source
from etude.tasks.formats import read_task, write_task
from etude.tasks.grade import PYTEST, grade
from etude.tasks.leaks import Leak, Prover
from etude.tasks.prompt import feature_prompt
from etude.tasks.source import build_task
from etude.tasks.split import split_tests
from etude.tasks.validate import Bench, Reject, Verdict

VERSION = "1"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_STUBS = ("return None", "return NotImplemented", "raise SystemExit(0)")
"""Bodies that must score 0. The last ends the test process with a good exit status."""
_TEXT_FILES = (".md", ".rst", ".txt", ".html", ".ipynb", ".pyi", ".json")


class Skip(enum.StrEnum):
    """Why a package gives no task."""

    NOT_FETCHED = "not_fetched"
    NO_SDIST = "no_sdist"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_PYTHON = "not_python"
    NO_TESTS = "no_tests"
    FEW_TESTS = "few_tests"
    """Too few to delete something and keep something."""
    NOT_INSTALLED = "not_installed"
    """No wheels for what it needs."""
    NEEDS_BINARY = "needs_binary"
    SELF_HOSTING = "self_hosting"
    """pytest itself runs on it, so deleting from it breaks the judge, and every sandbox holds a copy."""
    HANGS = "hangs"
    NOISY = "noisy"
    """The suite prints more than a sandbox keeps many times over."""
    BASELINE_RED = "baseline_red"
    NO_FEATURE = "no_feature"
    """Nothing that few enough tests call."""


@config
class MakeConfig:
    """How tasks are made from a package."""

    count: int = 20
    """Tasks wanted from one package."""
    seed: int = 0
    repeats: int = 3
    """Times that a packed task is judged in new sandboxes, restored and untouched."""
    least_targets: int = 2
    least_kept: int = 3
    """Tests that must go on passing."""
    least_stable: float = 0.8
    """Share of a suite that must pass in every run."""
    suite_limit_s: float = 120.0
    noisy_bytes: int = 8 * 2**20
    most_candidates: int = 60
    terse: float = 0.5
    """Share of tasks with a short prompt; the others say everything that can be said without the code."""
    visible: float = 0.5
    """Share of the feature's test functions that the agent sees; the others are hidden."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.repeats < 1 or self.least_targets < 1:
            raise ConfigError("count, repeats and least_targets should be at least 1")
        if not (0 < self.least_stable <= 1 and 0 <= self.terse <= 1 and 0 <= self.visible <= 1):
            raise ConfigError("least_stable, terse and visible should be shares from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the suite does when nothing is deleted."""

    stable: tuple[str, ...]
    flaky: tuple[str, ...]
    red: tuple[str, ...]
    traced: Mapping[str, Any]
    seconds: float


@dataclass(kw_only=True)
class Made:
    """What is known about one package."""

    spec: str
    name: str = ""
    version: str = ""
    licence: str = ""
    digest: str = ""
    frozen: list[str] = field(default_factory=list)
    skip: str = ""
    detail: str = ""
    tests: int = 0
    flaky: int = 0
    red: int = 0
    candidates: int = 0
    deleted_lines: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    """Reason by candidate; "" for an accepted one."""
    details: dict[str, str] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    """Code and deciding tests of the accepted ones, so that a later run knows duplicates."""
    finished: bool = False
    wall_s: float = 0.0

    @property
    def accepted(self) -> int:
        return sum(reason == "" for reason in self.verdicts.values())

    def reasons(self) -> collections.Counter[str]:
        return collections.Counter(reason for reason in self.verdicts.values() if reason)


async def make_from_package(
    spec: str,
    host: SandboxHost,
    out: Path,
    cache: Path,
    settings: MakeConfig,
    *,
    seen: set[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Made:
    """All tasks of one package as folders below `out`. `seen` holds code already used and is added to."""
    started = time.monotonic()
    made = Made(spec=spec)
    seen = seen if seen is not None else set()
    state = out / ".made" / f"{hashlib.sha256(f'{VERSION} {spec} {settings}'.encode()).hexdigest()[:24]}.json"
    if state.is_file():
        made = Made(**json.loads(state.read_text()))
        seen.update(made.keys)
        if made.finished:
            return made
    before = made.wall_s

    def keep() -> None:
        made.wall_s = before + time.monotonic() - started
        state.parent.mkdir(parents=True, exist_ok=True)
        draft = state.with_suffix(f".tmp-{os.getpid()}")
        draft.write_text(json.dumps(asdict(made)))
        os.replace(draft, state)

    try:
        source = await asyncio.to_thread(read_source, spec, cache)
        made.name, made.version, made.licence, made.digest = source.name, source.version, source.licence, source.digest
        if source.name in _hosting():
            raise NoSource(Skip.SELF_HOSTING, f"pytest needs {source.name}")
        environment = await asyncio.to_thread(make_environment, source, cache)
        made.frozen = [f"{name} sha256:{digest}" for name, digest in environment.frozen]
        say(f"{source.name} {source.version}: {len(environment.files)} files, {len(environment.frozen)} dependencies")
        base = await baseline(host, environment, settings)
        made.tests, made.flaky, made.red = len(base.stable), len(base.flaky), len(base.red)
        features = _features(environment, base, settings)
        made.candidates = len(features)
        say(f"{source.name}: {len(base.stable)} stable tests in {base.seconds:.1f} s, {made.flaky} flaky, {len(features)} candidates")
    except NoSource as error:
        made.skip, made.detail, made.finished = Skip(error.reason).value, str(error)[:500], True
        keep()
        return made
    async with Workshop(host, source, environment, base, settings, out, seen) as shop:
        shop.look_for_installed(features)
        for feature in features:
            if made.accepted >= settings.count:
                break
            for level in (DeleteLevel.DEFINITION, DeleteLevel.BODY):
                name = f"{feature.id}-{level.value}"
                if name not in made.verdicts:
                    verdict, cut = await shop.judge(feature, level)
                    made.verdicts[name] = verdict.reject.value if verdict.reject else ""
                    made.details[name] = verdict.detail[:300]
                    if verdict.accepted and cut is not None:
                        made.deleted_lines.append(cut.deleted_lines)
                        made.files.append(len(feature.paths))
                        made.keys += shop.keys
                    say(f"  {name} {'+'.join(q for _, q in feature.units)[:60]}: {verdict.reject or 'accepted'} {verdict.detail[:100]}")
                    keep()
                if made.verdicts[name] == "":
                    break
    made.finished = True
    keep()
    return made


@functools.cache
def _hosting() -> frozenset[str]:
    """Distributions that the test run itself is made of."""
    from etude.sandbox.interpreter import closure
    from etude.tasks.fetch import normal

    return frozenset(normal(each.metadata["Name"]) for each in closure(["pytest"]))


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    """What every sandbox sees beside its workspace: the standard library and the packages of the test run."""
    library = Path(os.__file__).parent
    inside = [p for p in sorted(library.iterdir()) if p.name not in ("site-packages", "dist-packages", "__pycache__", "test")]
    return tuple(p for p in inside if p.is_dir() or p.suffix == ".py")


def _features(environment: Environment, base: Baseline, settings: MakeConfig) -> list[Feature]:
    units = units_of(environment.files, environment.sources, base.traced, base.stable)
    features = propose(units, base.stable, least_tests=settings.least_targets, most=settings.most_candidates)
    if not features:
        raise NoSource(Skip.NO_FEATURE, f"{len(units)} functions are called by tests, none by few enough of them")
    return features


# ---------------------------------------------------------------------------------------------------
# The suite before anything is deleted


PERTURBED: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("plain", {"PYTHONHASHSEED": "0", "ETUDE_PROBE_TRACE": "1"}),
    ("hash seed", {"PYTHONHASHSEED": "4242"}),
    ("shuffled", {"PYTHONHASHSEED": "1", "ETUDE_PROBE_ORDER": "shuffle:7"}),
    ("reverse", {"PYTHONHASHSEED": "2", "ETUDE_PROBE_ORDER": "reverse"}),
    ("clock", {"PYTHONHASHSEED": "3", "ETUDE_PROBE_CLOCK": "34300800", "TZ": "Pacific/Kiritimati"}),
    ("parallel", {"PYTHONHASHSEED": "5"}),
)
"""The traced run and five others. All of them without network, each in a sandbox of its own; "parallel" runs two at once in one."""


async def baseline(host: SandboxHost, environment: Environment, settings: MakeConfig) -> Baseline:
    """Outcomes under changed conditions. NoSource where the suite hangs, floods its output or is not green enough."""
    files = {path: text.encode() for path, text in environment.files.items()}
    files["etude_probe.py"] = Path(__file__).with_name("probe.py").read_bytes()
    image = await host.add_image(files)
    answers: list[dict] = []
    seconds = 0.0
    for kind, variables in PERTURBED:
        sandbox = await host.create(image, limits=Limits(wall_s=settings.suite_limit_s * 3))
        try:
            runs = [_probe_run(sandbox, environment, settings, variables, n) for n in range(2 if kind == "parallel" else 1)]
            for answer, took in await asyncio.gather(*runs):
                answers.append(answer)
                seconds = seconds or took
        finally:
            await sandbox.destroy()
        if not answers[0]["tests"]:
            raise NoSource(Skip.NO_TESTS, "pytest collects no test")
    ids = dict.fromkeys(i for answer in answers for i in answer["tests"])
    ran = [i for i in ids if answers[0]["tests"].get(i) not in ("skipped", "xfailed", "xpassed")]
    stable = tuple(i for i in ran if all(a["tests"].get(i) == "passed" for a in answers))
    passed_once = {i for a in answers for i, outcome in a["tests"].items() if outcome == "passed"}
    flaky = tuple(i for i in ran if i not in stable and i in passed_once)
    red = tuple(i for i in ran if i not in passed_once)
    if not (red or flaky) and len(stable) < settings.least_targets + settings.least_kept:
        raise NoSource(
            Skip.FEW_TESTS, f"{len(stable)} tests; {settings.least_targets} must fail and {settings.least_kept} must go on passing"
        )
    if len(stable) < settings.least_stable * len(ran) or len(stable) < settings.least_targets + settings.least_kept:
        first = next(iter(red or flaky), "")
        why = answers[0]["messages"].get(first, "").strip().splitlines()[-1:] if first else []
        raise NoSource(Skip.BASELINE_RED, f"{len(stable)} of {len(ran)} tests pass in every run; {first} {' '.join(why)}"[:400])
    return Baseline(stable=stable, flaky=flaky, red=red, traced=answers[0], seconds=seconds)


async def _probe_run(
    sandbox, environment: Environment, settings: MakeConfig, variables: Mapping[str, str], number: int
) -> tuple[dict, float]:
    out = f"/tmp/etude-probe-{number}.json"
    words = ["python", "-m", "pytest", "-p", "etude_probe", *PYTEST, "--tb=line", f"--basetemp=/tmp/etude-base-{number}"]
    done = await sandbox.exec(
        [*words, *sorted(collected(environment))], env={**variables, "ETUDE_PROBE_OUT": out}, timeout_s=settings.suite_limit_s
    )
    if done.timed_out or done.limit == "wall":
        raise NoSource(Skip.HANGS, f"the suite ran past {settings.suite_limit_s:g} s")
    if done.dropped_bytes > settings.noisy_bytes:
        raise NoSource(Skip.NOISY, f"the suite printed {done.dropped_bytes + len(done.output)} bytes")
    try:
        return json.loads(await sandbox.read(out)), done.seconds
    except OSError:
        tail = done.output[-300:].decode("utf-8", "replace").strip()
        raise NoSource(Skip.BASELINE_RED, f"pytest ended with status {done.code} before its end: {tail}") from None


def collected(environment: Environment) -> list[str]:
    """Test files that hold tests."""
    return [path for path in environment.tests if re.search(r"def test|TestCase|\bTest\w*\b", environment.files[path])]


# ---------------------------------------------------------------------------------------------------
# One candidate


class Workshop:
    """Judges the candidates of one package; one sandbox is shared by the first runs, the last gate uses new ones."""

    def __init__(
        self, host: SandboxHost, source: Source, environment: Environment, base: Baseline, settings: MakeConfig, out: Path, seen: set[str]
    ) -> None:
        self.host, self.source, self.environment, self.base = host, source, environment, base
        self.settings, self.out, self.seen = settings, out, seen
        self.prover = Prover()
        self.keys: list[str] = []
        """Of the last accepted candidate: its code, and the tests that decide it."""
        self.installed: dict[tuple[str, str], list[Leak]] = {}
        self.bench = Bench(host, environment.files, time_limit_s=settings.suite_limit_s)
        self.limit_s = max(20.0, 20 * base.seconds)
        self.test_files = list(dict.fromkeys(i.split("::", 1)[0] for i in base.stable))

    async def __aenter__(self) -> Workshop:
        await self.bench.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.bench.__aexit__(*exc)

    def look_for_installed(self, features: Sequence[Feature]) -> None:
        """Which functions can be read in what every sandbox sees; one walk for all of them."""
        marks = {}
        for path, qualname in {unit for feature in features for unit in feature.units}:
            try:
                marks[path, qualname] = delete(self.environment.files, path, qualname).fingerprint
            except Refusal:
                continue  # refused again, and counted, when it is judged
        leaks = self.prover.find_installed(_installed_roots(), list(marks.values()))
        self.installed = {unit: [leak for leak in leaks if leak.what.endswith(f" {mark.name}")] for unit, mark in marks.items()}

    async def judge(self, feature: Feature, level: DeleteLevel) -> tuple[Verdict, Cut | None]:
        name = f"{feature.id}-{level.value}"

        def no(reason: Reject, detail: str) -> tuple[Verdict, None]:
            return Verdict(candidate=name, reject=reason, detail=detail), None

        try:
            cut = cut_feature(self.environment.files, feature, level, tests=self.environment.tests)
        except Refusal as error:
            return no(Reject(error.reason), str(error))
        if cut.key in self.seen:
            return no(Reject.DUPLICATE, feature.id)
        if copies := [leak for unit in feature.units for leak in self.installed.get(unit, ())]:
            return no(Reject.LEAK, f"{copies[0].path} ({copies[0].channel}): {copies[0].what}")
        failing, problem = await self._failing(cut)
        if problem is not None:
            return no(*problem)
        by_tests = hashlib.sha256("\n".join([self.source.name, *sorted(failing)]).encode()).hexdigest()
        if by_tests in self.seen:
            return no(Reject.DUPLICATE, "the same tests decide another task")
        if survivor := await self._surviving_stub(cut, failing):
            return no(Reject.WRONG_PASSES, f"stub {survivor!r} passes")
        task = self._task(cut, failing)
        task, leaks = self._proven(cut, task)
        if leaks:
            return no(Reject.LEAK, f"{leaks[0].path} ({leaks[0].channel}): {leaks[0].what}")
        draft, folder = self.out / ".made" / task.id, self.out / task.id
        for left in (draft, folder):  # by a run that was killed before this verdict was recorded
            shutil.rmtree(left, ignore_errors=True)
        write_task(task, draft)
        try:
            if (problem := await self._gate(cut, read_task(draft))) is not None:
                return no(*problem)
            os.rename(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self.keys = [cut.key, by_tests]
        self.seen.update(self.keys)
        kept = task.grader.pass_to_pass
        return Verdict(candidate=name, fail_to_pass=task.grader.fail_to_pass, pass_to_pass=kept), cut

    async def _failing(self, cut: Cut) -> tuple[tuple[str, ...], tuple[Reject, str] | None]:
        """Ids that fail without the code, once with the whole suite and once again; or what is wrong with them."""
        run = await self.bench.run(cut.files, self.test_files)
        failing = tuple(i for i in self.base.stable if run.outcomes.get(i) != "passed")
        if outside := [i for i in failing if i not in cut.feature.tests]:
            return (), (Reject.OTHERS_FAIL, f"{len(outside)} tests, such as {outside[0]}: {run.messages.get(outside[0], 'not run')[:120]}")
        if len(failing) < self.settings.least_targets:
            return (), (Reject.NO_TARGETS, f"{len(failing)} tests fail, {self.settings.least_targets} are needed")
        if len(self.base.stable) - len(failing) < self.settings.least_kept:
            return (), (Reject.NO_TARGETS, f"{len(self.base.stable) - len(failing)} tests keep passing")
        why = {i: run.messages.get(i) or run.messages.get(i.split("::", 1)[0], "not run") for i in failing}  # or its file is not collected
        named = [i for i in failing if names_feature(why[i], cut)]
        if 2 * len(named) < len(failing):
            first = next(i for i in failing if i not in named)
            return (), (Reject.UNRELATED, f"{first}: {why[first][:160]}")
        again = await self.bench.run(cut.files, list(dict.fromkeys(i.split("::", 1)[0] for i in failing)))
        if changed := [i for i in failing if again.outcomes.get(i) == "passed"]:
            return (), (Reject.FLAKY, changed[0])
        return failing, None

    async def _surviving_stub(self, cut: Cut, failing: Sequence[str]) -> str:
        for body in _STUBS[1:]:  # the gate tries the first
            changed = {**cut.files, **with_bodies(cut, body)}
            run = await self.bench.run(changed, list(dict.fromkeys(i.split("::", 1)[0] for i in failing)))
            if run.complete and all(run.outcomes.get(i) == "passed" for i in failing):
                return body
        return ""

    def _task(self, cut: Cut, failing: Sequence[str]) -> Task:
        rng = random.Random(seed_for("package-task", VERSION, self.settings.seed, self.source.name, cut.feature.id))
        visible, hidden = split_tests(cut.files, failing, self.settings.visible, rng)
        kept = tuple(i for i in self.base.stable if i not in failing)
        prompt = feature_prompt(
            cut.parts, cut.level, sorted({i.split("::", 1)[0] for i in failing}), terse=rng.random() < self.settings.terse
        )
        tops = {f"{folder}/*" for folder in test_folders(self.environment.files)}
        protected = {*Grader(fail_to_pass=(), pass_to_pass=()).protected, *tops, *self.environment.tests, f"{DEPS}/*"}
        return build_task(
            id=f"{self.source.name}-{self.source.version}-{cut.feature.id}-{cut.level.value}".replace("+", "_"),
            prompt=prompt,
            files=visible,
            solution=cut.restoring,
            grader=Grader(
                fail_to_pass=tuple(failing),
                pass_to_pass=kept,
                time_limit_s=self.limit_s,
                hidden=tuple(sorted(hidden.items())),
                protected=tuple(sorted(protected)),
            ),
            provenance=Provenance(
                generator="deletion",
                source=f"{self.source.where} sha256:{self.source.digest}",
                version=f"{self.source.version}, python {_PYTHON}, environment {self.environment.hash[:16]}",
                licence=self.source.licence,
                seed=self.settings.seed,
                family=self.source.name,
            ),
        )

    def _proven(self, cut: Cut, task: Task) -> tuple[Task, list[Leak]]:
        """The task without the documents that quote what was deleted, and the copies that are left all the same."""
        stems = [Path(part.path).stem for part in cut.parts]
        find = functools.partial(self.prover.find, deleted=cut.fingerprints, modules=stems, given=task.prompt)
        leaks = find(dict(task.files))
        quoting = {leak.path.split("!")[0] for leak in leaks if leak.path.split("!")[0].endswith(_TEXT_FILES)}
        if quoting:
            files = {path: text for path, text in task.files if path not in quoting}
            task = build_task(
                **{
                    key: getattr(task, key)
                    for key in ("id", "prompt", "grader", "provenance", "split", "tools", "start", "network", "difficulty")
                },
                files=files,
                solution=dict(task.solution),
            )
            leaks = find(files)
        return task, leaks

    async def _gate(self, cut: Cut, task: Task) -> tuple[Reject, str] | None:
        """The task as packed, in new sandboxes: restored is solved and untouched is not, each time; a stub is not."""
        restored = [Change(path=path, data=text.encode()) for path, text in task.solution]
        stub = [Change(path=path, data=text.encode()) for path, text in with_bodies(cut, _STUBS[0]).items()]
        for repeat in range(self.settings.repeats):
            for changes, wanted in ((restored, True), ([], False), *([(stub, False)] if repeat == 0 else [])):
                report = await grade(task, changes, self.host)
                if report.solved and not wanted:
                    return Reject.TARGETS_PASS, "solved without the code"
                if wanted and not report.solved:
                    return Reject.RESTORE_FAILS, report.detail
                if not changes and (lost := [i for i in (*report.failed, *report.missing) if i in task.grader.pass_to_pass]):
                    return Reject.OTHERS_FAIL, lost[0]
        return None


def names_feature(message: str, cut: Cut) -> bool:
    """Whether a failure is about the deleted code: its stub, or one of its names."""
    names = {part.qualname.rpartition(".")[2] for part in cut.parts}
    return "NotImplementedError" in message or any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)


def merged(all_made: Sequence[Made], others: Mapping[str, int]) -> dict[str, Any]:
    """What `--json` says about packages. `others` are reasons from other sources."""
    reasons = collections.Counter(others)
    for made in all_made:
        reasons += made.reasons()
        if made.skip:
            reasons[f"package: {made.skip}"] += 1
    rows = [
        {
            "source": made.spec,
            "name": made.name,
            "version": made.version,
            "licence": made.licence,
            "skip": made.skip,
            "detail": made.detail,
            "tests": made.tests,
            "flaky": made.flaky,
            "red": made.red,
            "candidates": made.candidates,
            "judged": len(made.verdicts),
            "accepted": made.accepted,
            "deleted_lines": made.deleted_lines,
            "wall_s": round(made.wall_s, 2),
        }
        for made in all_made
    ]
    return {"reasons": dict(sorted(reasons.items())), "packages": rows}
