"""The report of a run, made from its config and events alone, so that it can be made again at any time.

    report.json    the fixed interface (design: fixed interfaces): recipe, seed, wall_s, eval, rollouts, failures, time, versions
    report.md      for people: pass@1 before and after with intervals, behaviour, cost, where the wall clock went, staleness
    plot.svg       pass@1 over steps, with its intervals

Rules: what a resume made void is not counted twice (the last event of a step and suite stands). Differences are paired,
over the tasks that both evaluations know. The parts of `time` sum to `wall_s`; what no part claims is "other".
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import InfraError, RecordError
from etude.evals.plot import Point, Series, braille, svg
from etude.evals.statistics import Estimate, best_of_k, mcnemar, mean_at_k, paired
from etude.events import read_events
from etude.rollout.recorder import PART_NAMES

Event = dict[str, Any]

SWEEP = ("train", "publish", "swap", "checkpoint", "evaluate", "wait_groups")
"""Where two things went on at once, the first of these is charged: it is what the loop was doing."""
METRICS = ("dlogp_mean", "dlogp_p99", "dlogp_max", "engine_dlogp_max", "mismatch_kl", "ess", "clip_share", "kl", "grad_norm", "entropy")
"""Mismatch between engine and trainer, and what tells whether learning is healthy, where a step reports them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    step: int
    suite: str
    n: int
    pass_at_1: float
    low: float
    high: float
    detail: dict[str, Any]

    @property
    def solved(self) -> list[float | None]:
        return list(self.detail.get("solved") or [])

    @property
    def attempts(self) -> list[list[float]]:
        """Several attempts a task, when the evaluation made them."""
        return [list(a) for a in self.detail.get("attempts") or [] if a]


@dataclass(slots=True)
class Life:
    """One process of a run, from its start or resume to its end or death."""

    start: float = 0.0
    ledger: Counter[str] = field(default_factory=Counter)
    """seconds by part as the loop measured them; a killed process may not have come to write it"""
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """(start, end, part) of everything that took time, for a life without a ledger"""
    first_work: float | None = None


@dataclass(slots=True)
class Facts:
    """What the events of a run say, voided history left out where it matters."""

    recipe: str = ""
    name: str = ""
    seed: int = 0
    versions: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""
    cores: int = 0
    last_t: float = 0.0
    outcome: str = ""
    resumes: int = 0
    evaluations: dict[tuple[int, str], Evaluation] = field(default_factory=dict)
    steps: dict[int, Event] = field(default_factory=dict)
    alarms: dict[tuple[int, str], Event] = field(default_factory=dict)
    """(step, metric) -> the alarm it raised"""
    staleness: dict[int, int] = field(default_factory=dict)
    """admission -> staleness it was trained with"""
    rollouts: Counter[str] = field(default_factory=Counter)
    """sums over rollouts: count, tokens, turns, calls, tool_errors, seconds, solved"""
    stops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    lives: list[Life] = field(default_factory=lambda: [Life()])
    cpu_s: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    """"part waits for what" -> seconds, of every part but the loop"""
    published_bytes: int = 0
    published: int = 0
    pauses: list[float] = field(default_factory=list)


def write_report(run_folder: str | Path) -> dict[str, Any]:
    """Write report.json, report.md and plot.svg into the run folder; returns what report.json says."""
    folder = Path(run_folder)
    facts = read_facts(folder)
    report = as_json(facts)
    files = {"report.json": json.dumps(report, indent=2, sort_keys=True) + "\n", "report.md": as_markdown(facts, report)}
    if facts.evaluations:
        files["plot.svg"] = as_svg(facts)
    try:
        for name, text in files.items():
            temporary = folder / f".{name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, folder / name)
    except OSError as error:
        raise InfraError(f"cannot write the report into {folder}: {error}; free space, then make it again") from error
    return report


# ---------------------------------------------------------------------------------------------------
# Reading


def read_facts(folder: str | Path) -> Facts:
    """Everything the report needs, in one pass over the events."""
    folder = Path(folder)
    facts = Facts()
    for event in read_events(folder / "events.jsonl"):
        facts.last_t = max(facts.last_t, float(event.get("t", 0.0)))
        reader = _READERS.get(event["kind"])
        if reader is not None:
            reader(facts, event)
    _read_config(facts, folder / "config.json")
    return facts


def _read_config(facts: Facts, path: Path) -> None:
    """Recipe and seed, where the run had no time to say them."""
    if not path.exists():
        return
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}; a run writes it at its start") from error
    facts.recipe = facts.recipe or str(config.get("recipe") or config.get("name") or "")
    if isinstance(config.get("seed"), int):
        facts.seed = facts.seed or config["seed"]


def _on_run_started(facts: Facts, event: Event) -> None:
    facts.name, facts.recipe, facts.seed = event["name"], event["recipe"], event["seed"]
    facts.schedule, facts.versions = event["schedule"], dict(event["versions"])
    facts.cores = int(event.get("cores") or 0)


def _on_run_resumed(facts: Facts, event: Event) -> None:
    """Steps from `from_step` on are done again; evaluations of later steps too."""
    facts.resumes += 1
    facts.outcome = ""
    facts.lives.append(Life(start=float(event["t"])))
    step = event["from_step"]
    facts.steps = {s: e for s, e in facts.steps.items() if s < step}
    facts.evaluations = {key: e for key, e in facts.evaluations.items() if key[0] <= step}


def _on_run_ended(facts: Facts, event: Event) -> None:
    facts.outcome = event["outcome"]
    facts.cpu_s += float(event.get("cpu_s") or 0.0)
    for part, seconds in (event.get("time") or {}).items():
        facts.lives[-1].ledger[part] += seconds


def _on_waiting(facts: Facts, event: Event) -> None:
    if event["part"] == "loop":
        facts.lives[-1].ledger[event["what"]] += event["seconds"]
    else:
        facts.waits[f"{event['part']} waited for {event['what']}"] += event["seconds"]


def _on_eval(facts: Facts, event: Event) -> None:
    detail = event["detail"] if isinstance(event["detail"], dict) else {}
    known = [s for s in detail.get("solved") or [] if s is not None]
    n = int(event.get("tasks") or len(known) or event["n"])
    step, suite = event["step"], event["suite"]
    facts.evaluations[step, suite] = Evaluation(
        step=step, suite=suite, n=n, pass_at_1=event["pass_at_1"], low=event["low"], high=event["high"], detail=detail
    )
    _span(facts, event, "evaluate", event.get("seconds", detail.get("seconds", 0.0)))


def _on_rollout_ended(facts: Facts, event: Event) -> None:
    facts.rollouts["count"] += 1
    facts.stops[event["stop"]] += 1
    facts.rollouts["solved"] += bool(event["solved"])
    for name in ("tokens", "turns", "calls", "tool_errors", "seconds"):
        facts.rollouts[name] += event.get(name) or 0
    _span(facts, event, "wait_groups", event["seconds"])


def _on_rollout_failed(facts: Facts, event: Event) -> None:
    facts.failures[event["where"]] += 1


def _on_group_trained(facts: Facts, event: Event) -> None:
    facts.staleness[event["admission"]] = event["staleness"] or 0


def _on_step(facts: Facts, event: Event) -> None:
    facts.steps[event["step"]] = event
    facts.alarms = {key: alarm for key, alarm in facts.alarms.items() if key[0] != event["step"]}
    seconds = event["seconds"]
    _span(facts, event, "train", sum(seconds.values()) if isinstance(seconds, dict) else seconds)


def _on_alarm(facts: Facts, event: Event) -> None:
    facts.alarms[event["step"], event["metric"]] = event


def _on_published(facts: Facts, event: Event) -> None:
    facts.published += 1
    facts.published_bytes += event["bytes"]
    _span(facts, event, "publish", event["seconds"])


def _on_served(facts: Facts, event: Event) -> None:
    facts.pauses.append(event["pause_s"])
    _span(facts, event, "swap", event["pause_s"])


def _on_checkpoint(facts: Facts, event: Event) -> None:
    _span(facts, event, "checkpoint", event.get("seconds", 0.0))


def _on_finding(facts: Facts, event: Event) -> None:
    facts.findings[f"{event['rule']} ({event['action']})"] += 1


def _on_group_admitted(facts: Facts, event: Event) -> None:
    _first_work(facts, event["t"])


def _span(facts: Facts, event: Event, part: str, seconds: Any) -> None:
    end = float(event["t"])
    if isinstance(seconds, (int, float)) and seconds > 0:
        life = facts.lives[-1]
        life.spans.append((max(life.start, end - seconds), end, part))
        _first_work(facts, max(life.start, end - seconds))


def _first_work(facts: Facts, t: float) -> None:
    life = facts.lives[-1]
    life.first_work = t if life.first_work is None else min(life.first_work, t)


_READERS = {
    "run_started": _on_run_started,
    "run_resumed": _on_run_resumed,
    "run_ended": _on_run_ended,
    "waiting": _on_waiting,
    "eval": _on_eval,
    "rollout_ended": _on_rollout_ended,
    "rollout_failed": _on_rollout_failed,
    "group_trained": _on_group_trained,
    "group_admitted": _on_group_admitted,
    "step": _on_step,
    "alarm": _on_alarm,
    "published": _on_published,
    "served": _on_served,
    "checkpoint": _on_checkpoint,
    "finding": _on_finding,
}


# ---------------------------------------------------------------------------------------------------
# Where the wall clock went


def time_parts(facts: Facts) -> tuple[float, dict[str, float]]:
    """(wall seconds, seconds by part). The parts sum to the wall clock; the loop's own ledger is used where there is one,
    and the spans of events where a process was killed before it could write one."""
    parts: Counter[str] = Counter()
    for life in facts.lives:
        parts.update(life.ledger or _sweep(life))
    rounded = {part: round(seconds, 3) for part, seconds in sorted(parts.items()) if round(seconds, 3) > 0}
    claimed = math.fsum(rounded.values())
    wall = round(max(facts.last_t, claimed), 3)
    return wall, {**rounded, "other": round(wall - claimed, 3)}


def _sweep(life: Life) -> dict[str, float]:
    """Charge each moment to one part, from the spans that events tell."""
    marks: list[tuple[float, int, str]] = []
    for start, end, part in life.spans:
        marks += [(start, 1, part), (end, -1, part)]
    parts: dict[str, float] = defaultdict(float)
    active: Counter[str] = Counter()
    before = life.start
    for t, change, part in sorted(marks):
        if t > before:
            running = next((p for p in SWEEP if active[p] > 0), None)
            if running is not None:
                parts[running] += t - before
            before = t
        active[part] += change
    if life.first_work is not None:
        parts["start"] = life.first_work - life.start
    return parts


# ---------------------------------------------------------------------------------------------------
# report.json and plot.svg


def as_json(facts: Facts) -> dict[str, Any]:
    """The fixed interface."""
    wall, parts = time_parts(facts)
    rows = [{"step": e.step, "suite": e.suite, "n": e.n, "pass_at_1": e.pass_at_1, "low": e.low, "high": e.high} for e in _in_order(facts)]
    return {
        "recipe": facts.recipe,
        "seed": facts.seed,
        "wall_s": wall,
        "eval": rows,
        "rollouts": facts.rollouts["count"],
        "failures": dict(sorted(facts.failures.items())),
        "time": parts,
        "versions": facts.versions,
    }


def _in_order(facts: Facts) -> list[Evaluation]:
    return [facts.evaluations[key] for key in sorted(facts.evaluations)]


def by_suite(facts: Facts) -> dict[str, list[Evaluation]]:
    """Evaluations of each suite by step; suites in order of first appearance, unseen families last."""
    out: dict[str, list[Evaluation]] = {}
    for evaluation in _in_order(facts):
        out.setdefault(evaluation.suite, []).append(evaluation)
    return dict(sorted(out.items(), key=lambda item: ("unseen" in item[0], item[0])))


def _series(facts: Facts) -> list[Series]:
    return [
        Series(name=suite, points=tuple(Point(x=e.step, y=e.pass_at_1, low=e.low, high=e.high) for e in evaluations))
        for suite, evaluations in by_suite(facts).items()
    ]


def as_svg(facts: Facts) -> str:
    title = f"pass@1 with 95 % intervals: {facts.recipe or facts.name}, seed {facts.seed}"
    return svg(_series(facts), title=title, x_label="trainer steps", y_label="pass@1", y_range=(0.0, 1.0))


def as_terminal(facts: Facts) -> str:
    """A few lines and a plot for the end of a run."""
    lines = []
    for suite, evaluations in by_suite(facts).items():
        first, last = evaluations[0], evaluations[-1]
        lines.append(f"{suite:>10}: pass@1 {_rate(first)} -> {_rate(last)}{_gain_text(first, last)}")
    if any(len(e) > 1 for e in by_suite(facts).values()):
        lines.append(braille(_series(facts), y_range=(0.0, 1.0)))
    return "\n".join(lines)


def pooled(runs: Sequence[str | Path], suite: str) -> Estimate:
    """First against last evaluation of a suite, the tasks of several runs taken together (paired within each run)."""
    before: list[float | None] = []
    after: list[float | None] = []
    for run in runs:
        evaluations = by_suite(read_facts(run)).get(suite, [])
        if len(evaluations) < 2:
            raise RecordError(f"{run} has {len(evaluations)} evaluations of {suite!r}; a difference needs two")
        before += evaluations[0].solved
        after += evaluations[-1].solved
    return paired(before, after)


# ---------------------------------------------------------------------------------------------------
# report.md


def as_markdown(facts: Facts, report: dict[str, Any]) -> str:
    sections = [
        _md_head(facts, report),
        _md_scores(facts),
        _md_attempts(facts),
        _md_behaviour(facts),
        _md_cost(facts, report),
        _md_time(report, facts),
        _md_staleness(facts),
        _md_versions(facts),
    ]
    return "\n\n".join(s for s in sections if s) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rate(e: Evaluation) -> str:
    return f"{e.pass_at_1:.3f} [{e.low:.3f}, {e.high:.3f}]"


def _estimate(e: Estimate, sign: str = "") -> str:
    return f"{e.value:{sign}.3f} [{e.low:{sign}.3f}, {e.high:{sign}.3f}]"


def _change(first: Evaluation, last: Evaluation) -> Estimate | None:
    """Paired difference, when both evaluations list the same tasks and are not the same one."""
    if first.step == last.step or not first.solved or len(first.solved) != len(last.solved):
        return None
    return paired(first.solved, last.solved)


def _gain_text(first: Evaluation, last: Evaluation) -> str:
    change = _change(first, last)
    return f", paired difference {_estimate(change, '+')}" if change else ""


def _md_head(facts: Facts, report: dict[str, Any]) -> str:
    state = facts.outcome or "not finished"
    resumes = f", resumed {facts.resumes} times" if facts.resumes else ""
    return (
        f"# {facts.name or facts.recipe}\n\n"
        f"Recipe `{facts.recipe}`, seed {facts.seed}, schedule {facts.schedule or 'unknown'}; {state}{resumes}. "
        f"{len(facts.steps)} trainer steps, {report['rollouts']} rollouts, {report['wall_s']:.1f} s of wall clock."
    )


def _md_scores(facts: Facts) -> str:
    if not facts.evaluations:
        return "## pass@1\n\nNo evaluation was recorded."
    rows = []
    for suite, evaluations in by_suite(facts).items():
        first, last = evaluations[0], evaluations[-1]
        change = _change(first, last)
        gained = lost = odds = "-"
        if change:
            pairs = [(a, b) for a, b in zip(first.solved, last.solved, strict=True) if a is not None and b is not None]
            gained, lost = str(sum(b > a for a, b in pairs)), str(sum(b < a for a, b in pairs))
            odds = f"{mcnemar(first.solved, last.solved):.2g}"
        after = _rate(last) if len(evaluations) > 1 else "-"
        steps = f"{first.step} -> {last.step}"
        rows.append([suite, str(last.n), steps, _rate(first), after, _estimate(change, "+") if change else "-", gained, lost, odds])
    head = ["suite", "tasks", "steps", "before", "after", "difference on the same tasks", "gained", "lost", "p"]
    note = (
        "Brackets are 95 % intervals: Wilson for a rate, Newcombe's paired score interval for a difference; "
        "p is McNemar's exact test. Unseen suites are function families that no task of reinforcement came from; the text a policy was "
        "pretrained on may know the family, never these constants and names."
    )
    return f"## pass@1\n\n{_table(head, rows)}\n\n{note}\n\n![pass@1 over steps](plot.svg)"


def _md_attempts(facts: Facts) -> str:
    """Mean over attempts and best of K, for evaluations with several attempts a task."""
    rows = []
    for evaluation in _in_order(facts):
        tasks = evaluation.attempts
        if not tasks or min(len(t) for t in tasks) < 2:
            continue
        k = min(len(t) for t in tasks)
        rows.append([str(evaluation.step), evaluation.suite, str(k), _estimate(mean_at_k(tasks)), _estimate(best_of_k(tasks, k))])
    if not rows:
        return ""
    return "## Several attempts\n\n" + _table(["step", "suite", "K", "mean@K", "best of K (unbiased)"], rows)


def _md_behaviour(facts: Facts) -> str:
    columns = {"tool_error_rate": "tool errors", "turns": "turns per task", "tokens": "tokens per task"}
    rows = []
    for suite, evaluations in by_suite(facts).items():
        first, last = evaluations[0].detail, evaluations[-1].detail
        if any(name in first or name in last for name in columns):
            rows.append([suite, *(f"{_number(first.get(n), n)} -> {_number(last.get(n), n)}" for n in columns)])
    r = facts.rollouts
    if r["count"]:
        errors = _number(r["tool_errors"] / r["calls"] if r["calls"] else None, "tool_error_rate")
        rows.append(["all rollouts", errors, _number(r["turns"] / r["count"], "turns"), _number(r["tokens"] / r["count"], "tokens")])
    if not rows:
        return ""
    return "## Behaviour, before -> after\n\n" + _table(["", *columns.values()], rows)


def _number(value: Any, name: str) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{100 * value:.1f} %" if name.endswith("rate") else f"{value:.1f}"


def _md_cost(facts: Facts, report: dict[str, Any]) -> str:
    r, wall, count = facts.rollouts, report["wall_s"], report["rollouts"]
    rows = [["rollouts ended", str(count)], ["solved in training", _number(r["solved"] / count if count else None, "rate")]]
    if count and wall:
        cores = facts.cores or os.cpu_count() or 1
        played = count + sum(e.n for e in facts.evaluations.values())
        if facts.cpu_s and not facts.resumes:
            rows.append(
                ["core-seconds per rollout, all in", f"{facts.cpu_s / played:.2f} (CPU time of all processes, evaluation included)"]
            )
        else:
            rows.append(["core-seconds per rollout, all in", f"at most {wall * cores / played:.2f} (wall clock x {cores} cores)"])
        rows.append(["sampled tokens per second of wall clock", f"{r['tokens'] / wall:.0f}"])
    stops = ", ".join(f"{name} {n}" for name, n in sorted(facts.stops.items()))
    failures = ", ".join(f"{name} {n}" for name, n in sorted(facts.failures.items()))
    rows += [["how rollouts ended", stops or "-"], ["machine failures (masked)", failures or "none"]]
    if facts.findings:
        rows.append(["monitor findings", ", ".join(f"{name} {n}" for name, n in sorted(facts.findings.items()))])
    if facts.published:
        rows.append(["weights published", f"{facts.published} versions, {facts.published_bytes / facts.published / 1e6:.2f} MB each"])
    if facts.pauses:
        rows.append(["engine pause per swap", f"mean {sum(facts.pauses) / len(facts.pauses):.3f} s, longest {max(facts.pauses):.3f} s"])
    return "## Cost\n\n" + _table(["", ""], rows)


def _md_time(report: dict[str, Any], facts: Facts) -> str:
    wall = report["wall_s"]
    share = max(wall, 1e-9)
    ordered = sorted(report["time"].items(), key=lambda item: (item[0] == "other", -item[1], item[0]))
    rows = [[PART_NAMES.get(part, part), f"{seconds:.1f}", f"{100 * seconds / share:.1f} %"] for part, seconds in ordered]
    text = "## Where the wall clock went\n\n" + _table(["part", "seconds", "share"], [*rows, ["**total**", f"{wall:.1f}", "100 %"]])
    inside: Counter[str] = Counter()
    for event in facts.steps.values():
        if isinstance(event["seconds"], dict):
            inside.update(event["seconds"])
    if inside:
        text += "\n\nInside the training steps: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in inside.most_common()) + "."
    if facts.waits:
        text += "\n\nOther parts: " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in facts.waits.most_common()) + "."
    return text


def _md_staleness(facts: Facts) -> str:
    if not facts.steps:
        return ""
    lines = ["## Staleness and mismatch"]
    if facts.staleness:
        ages = Counter(facts.staleness.values())
        mean = sum(facts.staleness.values()) / len(facts.staleness)
        spread = ", ".join(f"{age}: {n}" for age, n in sorted(ages.items()))
        lines.append(
            f"Versions between the trainer and the oldest token of a group: mean {mean:.2f}, largest {max(ages)} (groups by age: {spread})."
        )
    events = [facts.steps[s] for s in sorted(facts.steps)]
    rows = []
    for name in METRICS:
        values = [float(e["metrics"][name]) for e in events if name in e["metrics"]]
        if values:
            rows.append([name, f"{values[0]:.3g}", f"{values[-1]:.3g}", f"{sum(values) / len(values):.3g}", f"{max(values):.3g}"])
    if rows:
        lines.append(_table(["metric", "first step", "last step", "mean", "largest"], rows))
    if facts.alarms:
        lines.append(_md_alarms(facts))
    return "\n\n".join(lines)


def _md_alarms(facts: Facts) -> str:
    """One line a metric: how often it left its healthy range, the last time it did, and what to do."""
    by_metric: dict[str, list[Event]] = defaultdict(list)
    for _, alarm in sorted(facts.alarms.items()):
        by_metric[alarm["metric"]].append(alarm)
    return "\n".join(
        f"- Alarm: `{metric}` crossed {last['threshold']:g} at {len(found)} of {len(facts.steps)} steps, last at step {last['step']} "
        f"with {last['value']:.3g}: {last['advice']}."
        for metric, found in by_metric.items()
        for last in found[-1:]
    )


def _md_versions(facts: Facts) -> str:
    if not facts.versions:
        return ""
    return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
