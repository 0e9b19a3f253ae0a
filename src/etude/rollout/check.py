"""`etude check RUN`: replays the event log of a run and says whether it kept its promises.

    lost         an admitted group was neither trained nor dropped, or an admission number is missing
    twice        a group was trained twice in one lineage, or twice in the history that counts
    stale        a group was trained with tokens older than the staleness limit, or its age was reported too low
    hash         a version was served with another hash than it was published (and trained) with
    accounting   the members of a group are not the rollouts that ended for it
    order        something happened that cannot follow from what happened before

The history that counts: a resume takes the run back to a checkpoint and starts a new lineage. What earlier lineages did
after that checkpoint (by position in the log; where the checkpoint's own event is missing, by step: `from_step` steps
were done, numbered from 0) is void. Groups trained there may be trained again; admissions made there count again only
if the new lineage admits or trains them.

    admitted --rollouts end--> ready --> trained
        |                                   ^ void after a resume from before it: back to admitted, or never admitted
        `--> dropped, with the reason

Everything is proved from the log alone; nothing is taken from the code that wrote it, except that staleness = step -
oldest, where step is the ordinal of the weights that were trained.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import RecordError
from etude.events import read_events

Event = dict[str, Any]


class Violation(enum.StrEnum):
    LOST = "lost"
    TWICE = "twice"
    STALE = "stale"
    HASH = "hash"
    ACCOUNTING = "accounting"
    ORDER = "order"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    kind: Violation
    text: str
    admission: int | None = None
    event: int | None = None
    """n of the log line that showed it; None for what is only known at the end."""

    def __str__(self) -> str:
        where = "" if self.event is None else f" (event {self.event})"
        return f"{self.kind.value}: {self.text}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    folder: str
    problems: tuple[Problem, ...]
    counts: dict[str, int]
    """admitted, trained, dropped, in_flight, rollouts, failed, resumes, served, void (trainings undone by a resume)"""
    max_staleness: int
    """Limit of the run, at its loosest."""
    staleness: dict[int, int]
    """staleness -> groups trained with it."""
    outcome: str
    """Of the last run_ended; empty while the run goes on, or when it was killed."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        problems = [{"kind": p.kind.value, "text": p.text, "admission": p.admission, "event": p.event} for p in self.problems]
        return {
            "folder": self.folder,
            "ok": self.ok,
            "problems": problems,
            "counts": self.counts,
            "max_staleness": self.max_staleness,
            "staleness": {str(k): v for k, v in sorted(self.staleness.items())},
            "outcome": self.outcome,
        }

    def text(self) -> str:
        """For people."""
        c = self.counts
        ages = ", ".join(f"{age}: {n}" for age, n in sorted(self.staleness.items())) or "none"
        lines = [
            f"{self.folder}: {c['admitted']} groups admitted, {c['trained']} trained, {c['dropped']} dropped, {c['in_flight']} in flight; "
            f"{c['rollouts']} rollouts ended, {c['failed']} failed; {c['resumes']} resumes; {c['served']} versions served",
            f"groups by staleness (limit {self.max_staleness}): {ages}",
        ]
        if self.ok:
            return "\n".join([*lines, "nothing lost, nothing twice, nothing too stale, every served hash as published"])
        return "\n".join([*lines, *(str(p) for p in self.problems), f"{len(self.problems)} problems"])


def check_run(folder: str | Path) -> CheckReport:
    """Replay the log of a run folder. Raises RecordError when log or config are missing or unreadable."""
    folder = Path(folder)
    return check_events(read_events(folder / "events.jsonl"), staleness_limit(folder / "config.json"), str(folder))


def check_events(events: Iterable[Event], max_staleness: int, name: str = "events") -> CheckReport:
    """The same over events in memory."""
    replay = _Replay(max_staleness)
    for event in events:
        replay.see(event)
    return replay.report(name)


def staleness_limit(path: Path) -> int:
    """`loop.max_staleness` of a run's resolved config."""
    try:
        config = json.loads(path.read_text())
        limit = config["loop"]["max_staleness"]
    except FileNotFoundError:
        raise RecordError(f"no config at {path}; give a run folder that has config.json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} has no loop.max_staleness ({type(error).__name__}: {error}); it is not the config of a run") from error
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise RecordError(f"{path}: loop.max_staleness is {limit!r}, expected a whole number of versions")
    return limit


# ---------------------------------------------------------------------------------------------------
# Replay


@dataclass(slots=True)
class _Group:
    """What the history that counts says of one admission number."""

    admission: int
    admitted: int | None = None
    """n of the admission that counts."""
    lineage: int = -1
    """Lineage of its latest admission."""
    ended: dict[int, dict[int, int | None]] = field(default_factory=dict)
    """lineage -> member -> oldest ordinal (None when it failed or sampled nothing)."""
    ready: int | None = None
    ready_lineage: int = -1
    oldest: int | None = None
    trained: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(n, step, lineage, staleness) of the trainings that count."""
    lineages: set[int] = field(default_factory=set)
    """Every lineage that trained it, void or not."""
    dropped: tuple[int, int] | None = None
    """(n, step)."""

    @property
    def settled(self) -> bool:
        return bool(self.trained) or self.dropped is not None


class _Replay:
    """Reads events one after another; `report` judges what is left open."""

    def __init__(self, max_staleness: int) -> None:
        self.limit = self.loosest = max_staleness
        self.problems: list[Problem] = []
        self.groups: dict[int, _Group] = {}
        self.lineage: int | None = None
        self.first_lineage = 0
        self.checkpoints: list[tuple[int, int, Any]] = []
        """(n, step, unfinished) of those that count."""
        self.published: dict[str, str] = {}
        self.steps: dict[int, Any] = {}
        """step -> version, of the current lineage."""
        self.counts: Counter[str] = Counter()
        self.outcome = ""

    def see(self, event: Event) -> None:
        if self.lineage is None and event["kind"] in _NEEDS_RUN:
            self._problem(Violation.ORDER, f"{event['kind']} before run_started", event)
            self.lineage = self.first_lineage
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def _problem(self, kind: Violation, text: str, event: Event | None = None, admission: int | None = None) -> None:
        self.problems.append(Problem(kind=kind, text=text, admission=admission, event=None if event is None else event["n"]))

    def _group(self, event: Event) -> _Group:
        """The group of an event; one that was never admitted is a problem, told once."""
        admission = event["admission"]
        if admission not in self.groups:
            self._problem(Violation.ORDER, f"{event['kind']} of group {admission}, which was never admitted", event, admission)
            self.groups[admission] = _Group(admission=admission)
        return self.groups[admission]

    # -- the run -----------------------------------------------------------------------------------

    def _on_run_started(self, event: Event) -> None:
        if self.lineage is not None:
            self._problem(Violation.ORDER, "the run was started a second time in the same log", event)
        self.lineage = self.first_lineage = event["lineage"]

    def _on_run_ended(self, event: Event) -> None:
        self.outcome = event["outcome"]

    def _on_config_revision(self, event: Event) -> None:
        """A live change of the limit, when the event carries values."""
        changed = event["changed"]
        value = changed.get("loop.max_staleness") if isinstance(changed, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            self.limit, self.loosest = value, max(value, self.loosest)

    def _on_checkpoint(self, event: Event) -> None:
        self.checkpoints.append((event["n"], event["step"], event["unfinished"]))

    def _on_run_resumed(self, event: Event) -> None:
        if self.lineage is not None and event["lineage"] <= self.lineage:
            self._problem(Violation.ORDER, f"resumed in lineage {event['lineage']} after lineage {self.lineage}; it must rise", event)
        self.counts["resumes"] += 1
        self.lineage, self.outcome = event["lineage"], ""
        self.steps = {}
        step = event["from_step"]
        at = [n for n, s, _ in self.checkpoints if s == step]
        self.checkpoints = [c for c in self.checkpoints if (c[0] <= at[-1] if at else c[1] <= step)]
        for group in self.groups.values():
            self._take_back(group, at[-1] if at else None, step)
        if at and isinstance(unfinished := self.checkpoints[-1][2], list):
            self._keep_admitted(unfinished)

    def _take_back(self, group: _Group, position: int | None, step: int) -> None:
        """Void what happened after the checkpoint: at log line `position`, or after `step` steps when that is unknown."""

        def counts(n: int, at_step: int) -> bool:
            return n < position if position is not None else at_step < step

        before = len(group.trained)
        group.trained = [t for t in group.trained if counts(t[0], t[1])]
        self.counts["void"] += before - len(group.trained)
        if group.dropped and not counts(*group.dropped):
            group.dropped = None
        if position is not None and not group.settled:
            if group.admitted is not None and group.admitted > position:
                group.admitted = None
            if group.ready is not None and group.ready > position:
                group.ready = None
        if position is None and step == 0:
            group.admitted = group.ready = None

    def _keep_admitted(self, unfinished: list[int]) -> None:
        """A checkpoint that lists its unfinished groups says exactly which admissions it knows of."""
        for group in self.groups.values():
            if not group.settled and group.admission not in unfinished:
                group.admitted = None

    # -- groups ------------------------------------------------------------------------------------

    def _on_group_admitted(self, event: Event) -> None:
        admission, lineage = event["admission"], self.lineage or 0
        expected = 1 + max((a for a, g in self.groups.items() if g.admitted is not None), default=-1)
        for skipped in range(expected, admission):
            if skipped in self.groups:
                self.groups[skipped].admitted = event["n"]
            else:
                self._problem(Violation.LOST, f"admission {skipped} is missing: {admission} follows {expected - 1}", event, skipped)
                self.groups[skipped] = _Group(admission=skipped)
        group = self.groups.setdefault(admission, _Group(admission=admission))
        if group.lineage == lineage:
            self._problem(Violation.TWICE, f"group {admission} was admitted twice in lineage {lineage}", event, admission)
        elif group.trained:
            self._problem(Violation.TWICE, f"group {admission} was admitted again after it was trained", event, admission)
        group.admitted, group.lineage = event["n"], lineage
        group.ready = group.dropped = None

    def _on_rollout_ended(self, event: Event) -> None:
        self.counts["rollouts"] += 1
        self._ended(event, event["oldest"])

    def _on_rollout_failed(self, event: Event) -> None:
        self.counts["failed"] += 1
        self._ended(event, None)

    def _ended(self, event: Event, oldest: int | None) -> None:
        group, member = self._group(event), event["member"]
        members = group.ended.setdefault(self.lineage or 0, {})
        if member in members:
            self._problem(
                Violation.ACCOUNTING,
                f"rollout {member} of group {group.admission} ended twice in lineage {self.lineage}",
                event,
                group.admission,
            )
        if group.ready is not None and group.ready_lineage == self.lineage:
            self._problem(
                Violation.ACCOUNTING, f"rollout {member} of group {group.admission} ended after the group was ready", event, group.admission
            )
        members[member] = oldest

    def _on_group_ready(self, event: Event) -> None:
        group = self._group(event)
        if group.ready is not None:
            self._problem(Violation.ORDER, f"group {group.admission} was ready twice", event, group.admission)
        group.ready, group.ready_lineage, group.oldest = event["n"], self.lineage or 0, event["oldest"]
        here = group.ended.get(self.lineage or 0, {})
        ever = {m: o for members in group.ended.values() for m, o in members.items()}
        kept, dropped = _size(event["members"]), _size(event["dropped"])
        if not len(here) <= kept + dropped <= len(ever):
            self._problem(
                Violation.ACCOUNTING,
                f"group {group.admission} has {kept} members and {dropped} dropped, but {len(here)} rollouts ended or failed",
                event,
                group.admission,
            )
        known = [o for o in here.values() if o is not None]
        if len(here) == len(ever) == kept and len(known) == kept and group.oldest != min(known, default=None):
            text = f"group {group.admission} says its oldest token is of version {group.oldest}, its rollouts say {min(known)}"
            self._problem(Violation.STALE, text, event, group.admission)

    def _on_group_trained(self, event: Event) -> None:
        group, lineage, step = self._group(event), event["lineage"], event["step"]
        admission = group.admission
        if lineage != self.lineage:
            self._problem(
                Violation.ORDER, f"group {admission} was trained in lineage {lineage} during lineage {self.lineage}", event, admission
            )
        if group.ready is None:
            self._problem(Violation.ORDER, f"group {admission} was trained before it was ready", event, admission)
        if lineage in group.lineages:
            self._problem(Violation.TWICE, f"group {admission} was trained twice in lineage {lineage}", event, admission)
        elif group.trained:
            _, earlier, other, _ = group.trained[-1]
            self._problem(
                Violation.TWICE,
                f"group {admission} was trained at step {earlier} of lineage {other} and again at step {step}",
                event,
                admission,
            )
        if group.dropped is not None:
            self._problem(Violation.ORDER, f"group {admission} was trained after it was dropped", event, admission)
        self._check_age(group, event)
        if group.admitted is None:
            group.admitted = event["n"]
        group.trained.append((event["n"], step, lineage, event["staleness"] or 0))
        group.lineages.add(lineage)

    def _check_age(self, group: _Group, event: Event) -> None:
        reported = event["staleness"] or 0
        real = reported if group.oldest is None else event["step"] - group.oldest
        if reported < real:
            text = f"group {group.admission} reports staleness {reported}, but step {event['step']} is {real} after its oldest token"
            self._problem(Violation.STALE, text, event, group.admission)
        if max(reported, real) > self.limit:
            text = f"group {group.admission} was trained {max(reported, real)} versions after its oldest token, the limit is {self.limit}"
            self._problem(Violation.STALE, text, event, group.admission)

    def _on_group_dropped(self, event: Event) -> None:
        group = self._group(event)
        if group.settled:
            done = "trained" if group.trained else "dropped"
            self._problem(Violation.ORDER, f"group {group.admission} was dropped after it was {done}", event, group.admission)
        group.dropped = (event["n"], event["step"])

    # -- weights -----------------------------------------------------------------------------------

    def _on_step(self, event: Event) -> None:
        self.steps[event["step"]] = event["version"]

    def _on_published(self, event: Event) -> None:
        version = _name(event["version"])
        if self.published.setdefault(version, event["hash"]) != event["hash"]:
            self._problem(
                Violation.HASH, f"version {version} was published with hash {self.published[version]} and with {event['hash']}", event
            )
        trained = self.steps.get(event["step"])
        if trained is not None and _name(trained) != version:
            self._problem(Violation.HASH, f"step {event['step']} made version {_name(trained)}, published was {version}", event)

    def _on_served(self, event: Event) -> None:
        self.counts["served"] += 1
        version = _name(event["version"])
        expected = self.published.get(version)
        if expected is None:
            self._problem(Violation.HASH, f"version {version} was served and never published", event)
        elif expected != event["hash"]:
            self._problem(Violation.HASH, f"version {version} was served with hash {event['hash']}, published with {expected}", event)

    # -- the end -----------------------------------------------------------------------------------

    def report(self, name: str) -> CheckReport:
        """The verdict. A run that is still going may have groups in flight, but none below the newest trained one."""
        if self.lineage is None:
            self._problem(Violation.ORDER, "the log has no run_started")
        counted = {a: g for a, g in self.groups.items() if g.admitted is not None}
        newest = max((a for a, g in counted.items() if g.trained), default=-1)
        for admission, group in sorted(counted.items()):
            if group.settled:
                continue
            if admission < newest:
                text = f"group {admission} was neither trained nor dropped, though group {newest} was trained"
                self._problem(Violation.LOST, text, admission=admission)
            elif self.outcome == "done":
                self._problem(
                    Violation.LOST, f"group {admission} was neither trained nor dropped, and the run is done", admission=admission
                )
        ages = Counter(staleness for g in counted.values() for *_, staleness in g.trained)
        counts = {key: self.counts[key] for key in ("rollouts", "failed", "resumes", "served", "void")} | {
            "admitted": len(counted),
            "trained": sum(bool(g.trained) for g in counted.values()),
            "dropped": sum(g.dropped is not None for g in counted.values()),
            "in_flight": sum(not g.settled for g in counted.values()),
        }
        return CheckReport(
            folder=name,
            problems=tuple(self.problems),
            counts=counts,
            max_staleness=self.loosest,
            staleness=dict(ages),
            outcome=self.outcome,
        )


_NEEDS_RUN = {"group_admitted", "rollout_ended", "rollout_failed", "group_ready", "group_trained", "group_dropped", "run_resumed", "step"}


def _size(value: Any) -> int:
    """`members` and `dropped` are counts, or lists of what they count."""
    return value if isinstance(value, int) else len(value)


def _name(version: Any) -> str:
    return version if isinstance(version, str) else json.dumps(version, sort_keys=True)
