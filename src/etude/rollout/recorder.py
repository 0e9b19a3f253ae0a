"""Writes what happens as it happens: events, trajectories, and where the wall clock went.

The ledger (`timed`) is kept by the one coroutine that decides the pace, so its parts never overlap and sum to the wall
clock; what it did not name is "other".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.events import EventLog
from etude.records import Graded, Group, Manifest, StepReport, Task, Version
from etude.rollout.shards import ShardWriter

PART_NAMES = {
    "wait_groups": "waiting for rollouts",
    "wait_drained": "waiting for the last rollouts (lockstep)",
    "train": "training steps",
    "publish": "publishing weights",
    "swap": "swapping weights in the engine",
    "checkpoint": "checkpoints",
    "evaluate": "held-out evaluation",
    "start": "starting",
    "showcase": "the showcase",
    "other": "everything else",
}
"""Parts of the ledger, as people read them."""


class Recorder:
    """One per run. `watch` receives every event as a dict, for live progress."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: bool = True,
        lineage: int = 0,
        watch: Callable[[dict[str, Any]], None] | None = None,
        since: float | None = None,
    ) -> None:
        self.folder = folder
        self.lineage = lineage
        self.events = EventLog(folder / "events.jsonl", clock=clock, since=since)
        self.shards = ShardWriter(folder / "trajectories")
        self.watch = watch or (lambda event: None)
        self.ledger: dict[str, float] = {} if since is None else {"start": time.monotonic() - since}
        self._last: dict[str, float] = {}

    def event(self, kind: str, **fields: Any) -> None:
        self.events.write(kind, **fields)
        self.watch({"kind": kind, **fields})

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Charge the time spent inside to a part of the ledger."""
        start = time.perf_counter()
        self.watch({"kind": "waiting", "part": "loop", "what": part, "seconds": 0.0})
        try:
            yield
        finally:
            self._last[part] = time.perf_counter() - start
            self.ledger[part] = self.ledger.get(part, 0.0) + self._last[part]

    def last(self, part: str) -> float:
        """Seconds the latest use of a part took."""
        return round(self._last.get(part, 0.0), 4)

    # -- the life of a group -----------------------------------------------------------------------

    def admitted(self, admission: int, task: Task, version: Version) -> None:
        self.event("group_admitted", admission=admission, task=task.id, version=str(version))

    def rollout_ended(self, admission: int, member: int, graded: Graded) -> None:
        self.shards.add(graded)
        self.event("rollout_ended", admission=admission, member=member, **summary(graded))
        for finding in graded.findings:
            self.event(
                "finding", trajectory=graded.trajectory.id, rule=finding.rule, action=finding.action, evidence=finding.evidence[:200]
            )

    def rollout_failed(self, admission: int, member: int, error: Exception) -> None:
        self.event("rollout_failed", admission=admission, member=member, where=type(error).__name__, error=str(error)[:300])

    def group_ready(self, group: Group) -> None:
        self.event(
            "group_ready", admission=group.admission, members=len(group.members), dropped=len(group.dropped), oldest=group.oldest_ordinal
        )

    def group_dropped(self, group: Group, step: int, reason: str) -> None:
        self.event("group_dropped", admission=group.admission, step=step, reason=reason)

    def step(self, step: int, report: StepReport, manifest: Manifest, served: Version, groups: Sequence[Group]) -> None:
        """One optimizer step is done and served. `step` is also the ordinal of the weights it started from."""
        for group in groups:
            oldest = group.oldest_ordinal
            staleness = 0 if oldest is None else step - oldest
            self.event("group_trained", admission=group.admission, step=step, lineage=self.lineage, staleness=staleness)
        self.event("step", step=step, version=str(manifest.version), metrics=report.metrics, seconds=report.seconds)
        for alarm in report.alarms:
            self.event("alarm", step=step, metric=alarm.metric, value=alarm.value, threshold=alarm.threshold, advice=alarm.advice)
        self.event(
            "published",
            step=step,
            version=str(manifest.version),
            hash=manifest.version.hash,
            bytes=manifest.bytes,
            seconds=self.last("publish"),
        )
        self.event("served", step=step, version=str(served), hash=served.hash, pause_s=self.last("swap"))

    def close(self) -> None:
        self.shards.close()
        self.events.close()


def summary(graded: Graded) -> dict[str, Any]:
    """The few numbers of a rollout that go into its event."""
    t = graded.trajectory
    errors = sum(1 for m in t.messages for r in m.results if r.error is not None)
    return {
        "trajectory": t.id,
        "task": t.task_id,
        "stop": t.stop.value,
        "reward": round(graded.reward, 6),
        "parts": graded.parts,
        "solved": bool(graded.report and graded.report.solved),
        "oldest": t.oldest_ordinal,
        "tokens": t.sampled_tokens,
        "context": sum(len(s.ids_T) for s in t.segments),
        "turns": t.effort.turns,
        "calls": t.effort.calls,
        "tool_errors": errors,
        "seconds": round(sum(t.timings.values()), 4),
    }
