"""Held-out evaluation: a fixed list of tasks and sampling seeds, through the same rollout code as training.

A task whose machine broke is tried once more and then left out of the score and counted; it is never a failure. A suite of which
nothing is left is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.errors import InfraError
from etude.evals.statistics import wilson
from etude.protocols import Rollout
from etude.records import Graded, Score, Task, content_hash, seed_for


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    tasks: tuple[Task, ...]
    seed: int = 0
    """Sampling seeds come from this and the task's place, so that two versions see the same dice."""

    @property
    def hash(self) -> str:
        return content_hash(self.name, self.seed, [t.hash for t in self.tasks])


@dataclass(frozen=True, kw_only=True)
class Result:
    """One suite on one version. Lists are in task order; None where no machine could be found."""

    suite: str
    graded: tuple[Graded | None, ...]

    @property
    def solved(self) -> list[int | None]:
        return [None if g is None else int(bool(g.report and g.report.solved)) for g in self.graded]

    @property
    def score(self) -> Score:
        known = [s for s in self.solved if s is not None]
        low, high = wilson(sum(known), len(known))
        return Score(name=self.suite, n=len(known), mean=sum(known) / max(1, len(known)), low=low, high=high)

    def detail(self) -> dict[str, Any]:
        """What the report shows beside the score."""
        trajectories = [g.trajectory for g in self.graded if g is not None]
        calls = sum(t.effort.calls for t in trajectories)
        errors = sum(1 for t in trajectories for m in t.messages for r in m.results if r.error is not None)
        n = max(1, len(trajectories))
        return {
            "solved": self.solved,
            "turns": sum(t.effort.turns for t in trajectories) / n,
            "tokens": sum(t.sampled_tokens for t in trajectories) / n,
            "tool_error_rate": errors / max(1, calls),
            "infra": sum(g is None for g in self.graded),
        }


async def evaluate(suite: Suite, rollout: Rollout, *, progress: Callable[[int, int], None] | None = None) -> Result:
    """Run every task once. The rollout limits how many run at a time."""
    done = 0
    last: InfraError | None = None

    async def one(index: int, task: Task) -> Graded | None:
        nonlocal done, last
        seed = seed_for("eval", suite.name, suite.seed, index)
        graded: Graded | None = None
        for _ in range(2):
            try:
                graded = await rollout(task, group=index, member=0, seed=seed)
                break
            except InfraError as error:
                last = error
        done += 1
        if progress:
            progress(done, len(suite.tasks))
        return graded

    async with asyncio.TaskGroup() as crew:
        running = [crew.create_task(one(i, t)) for i, t in enumerate(suite.tasks)]
    result = Result(suite=suite.name, graded=tuple(task.result() for task in running))
    if last is not None and not any(result.graded):
        raise InfraError(f"no task of suite {suite.name!r} could be run, the last one for: {last}") from last
    return result
