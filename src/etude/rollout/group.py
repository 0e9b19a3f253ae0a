"""G rollouts of one task, and what becomes of those whose machine broke.

An infrastructure failure is masked: the member is dropped with its reason, counted, and leaves the group's mean alone.
A finding of a monitor with the action "drop" does the same. Nothing else removes a member: a model's own broken tool
call is a negative and stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from etude.errors import InfraError
from etude.protocols import Rollout
from etude.records import Drop, Dropped, Graded, Group, Task, Version
from etude.rollout.recorder import Recorder


async def roll_group(rollout: Rollout, task: Task, admission: int, admitted_at: Version, seeds: Sequence[int], recorder: Recorder) -> Group:
    """Run the members at once. Waits for: the slowest member. (A TaskGroup: when cancelled, gather leaves members behind.)"""
    async with asyncio.TaskGroup() as crew:
        rolling = [crew.create_task(_member(rollout, task, admission, member, seed, recorder)) for member, seed in enumerate(seeds)]
    results = [done.result() for done in rolling]
    members = tuple(r for r in results if isinstance(r, Graded))
    dropped = tuple(r for r in results if isinstance(r, Dropped))
    group = Group(admission=admission, task_id=task.id, admitted_at=admitted_at, members=members, dropped=dropped)
    recorder.group_ready(group)
    return group


async def _member(rollout: Rollout, task: Task, admission: int, member: int, seed: int, recorder: Recorder) -> Graded | Dropped:
    try:
        graded = await rollout(task, group=admission, member=member, seed=seed)
    except InfraError as error:
        recorder.rollout_failed(admission, member, error)
        return Dropped(member=member, reason=Drop.INFRA, detail=f"{type(error).__name__}: {error}"[:300])
    recorder.rollout_ended(admission, member, graded)
    for finding in graded.findings:
        if finding.action == "drop":
            return Dropped(member=member, reason=Drop.MONITOR, detail=finding.rule)
    return graded
