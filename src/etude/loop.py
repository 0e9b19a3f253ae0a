"""The spine of simulated RL: the whole loop on one screen.

    admit a slot -> take a task from the curriculum -> fork a sandbox -> G rollouts -> grade -> monitor -> group
    take groups in admission order, replace those without signal -> pack -> step -> publish delta -> engines swap in flight
    -> release slots
    every k steps: checkpoint -> evaluate on held-out tasks

Two coroutines meet at one buffer, `rollout.slots.Slots`; `learn` is the only finite one and ends the run.
A broken machine becomes a dropped member of a group; any other exception stops the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from etude.config import config
from etude.errors import InfraError, IntegrityError
from etude.protocols import Engine, Rollout, TaskSource, Trainer
from etude.records import Group, Task, seed_for
from etude.rollout.group import roll_group
from etude.rollout.recorder import Recorder
from etude.rollout.slots import Slots
from etude.trainer.advantage import signal


@config
class LoopConfig:
    steps: int = 16
    """Trainer steps of the run."""
    groups_per_step: int = 8
    group_size: int = 8
    """G, rollouts per task (the sources name no number; 8 is ours)."""
    refill: int = 0
    """Groups without signal (all rewards equal, or fewer than two members left) that a step replaces by further ones, at most: DAPO's
    dynamic sampling (arXiv 2503.14476). Each costs its rollouts and teaches nothing, so 0 unless such groups are many."""
    max_staleness: int = 4
    """Versions between the trainer and the oldest token it trains on. 0 is synchronous."""
    schedule: Literal["free", "lockstep"] = "free"
    """free: as fast as it goes. lockstep: admissions and swaps at logical counters, bit-reproducible."""
    checkpoint_every: int = 8
    """Steps between checkpoints; 0 keeps only the last."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step."""

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"loop.{name} must be at least 1, got {getattr(self, name)}")
        if self.refill < 0:
            raise ValueError(f"loop.refill must be 0 or more, got {self.refill}")
        if self.max_staleness < 0:
            raise ValueError(f"loop.max_staleness must be 0 or more, got {self.max_staleness}")

    def evaluates_at(self, step: int) -> bool:
        return step in (0, self.steps) or bool(self.eval_every and step % self.eval_every == 0)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of; `parts.py` picks the implementations."""

    seed: int
    tasks: TaskSource
    rollout: Rollout
    trainer: Trainer
    engine: Engine
    slots: Slots
    recorder: Recorder
    checkpoint: Callable[[int], Awaitable[None]]
    evaluate: Callable[[int], Awaitable[None]]
    start_step: int = 0


async def run(config: LoopConfig, parts: Parts) -> None:
    """Run to the last step. Ctrl-C (cancellation) leaves the last checkpoint as the place to resume from.

    A checkpoint is written before the evaluation of its step, so a resumed run starts with the evaluation it may have missed.
    """
    if parts.start_step == 0:
        await parts.checkpoint(0)
    if config.evaluates_at(parts.start_step):
        await parts.evaluate(parts.start_step)
    async with asyncio.TaskGroup() as crew:
        rolling = crew.create_task(roll_forever(config, parts))
        await learn(config, parts)
        rolling.cancel()


async def roll_forever(config: LoopConfig, parts: Parts) -> None:
    """Consumes tasks, produces groups, until it is cancelled. Waits for: a slot. Unblocked by: `learn` dropping a group or releasing
    a step."""
    async with asyncio.TaskGroup() as crew:
        while True:
            admission, task = await parts.slots.admit(parts.tasks.next)
            parts.recorder.admitted(admission, task, await parts.engine.version())
            crew.create_task(roll_one(config, parts, admission, task))


async def roll_one(config: LoopConfig, parts: Parts, admission: int, task: Task) -> None:
    """Fills one slot with G graded rollouts of one task. Waits for: the slowest of them."""
    seeds = [seed_for(parts.seed, "rollout", admission, member) for member in range(config.group_size)]
    group = await roll_group(parts.rollout, task, admission, await parts.engine.version(), seeds, parts.recorder)
    parts.slots.fill(admission, group)


async def take(config: LoopConfig, parts: Parts, step: int) -> tuple[list[Group], list[Group]]:
    """The oldest groups of a step, and those without signal that were dropped on the way. Waits for: the oldest group not yet taken."""
    groups: list[Group] = []
    dropped: list[Group] = []
    while len(groups) < config.groups_per_step:
        (group,) = await parts.slots.take(1)
        if signal(group) or len(dropped) == config.refill:
            groups.append(group)
        else:
            parts.slots.drop(group.admission)
            parts.recorder.group_dropped(group, step, "no signal")
            dropped.append(group)
    return groups, dropped


async def learn(config: LoopConfig, parts: Parts) -> None:
    """Consumes groups in admission order, produces versions. Waits for: the oldest groups of the step.

    The order at the end of a step is what makes a resumed run the same run: the curriculum hears of the groups, the
    checkpoint is written, and only then are slots released for the next admissions.
    """
    timed = parts.recorder.timed
    for step in range(parts.start_step, config.steps):
        with timed("wait_groups"):
            groups, dropped = await take(config, parts, step)
        if not any(group.members for group in groups):
            raise InfraError(f"every rollout of step {step} was broken by a machine, the last one by: {groups[-1].dropped[-1].detail}")
        with timed("train"):
            report = await parts.trainer.step(groups)
        if config.schedule == "lockstep":
            with timed("wait_drained"):
                await parts.slots.drained()
        with timed("publish"):
            manifest, store = await parts.trainer.publish()
        with timed("swap"):
            served = await parts.engine.load(manifest, store)
            if served.key != manifest.version.key:
                raise IntegrityError(
                    f"the engine serves {served}, the trainer published {manifest.version}; stopping before training on it"
                )
            await parts.trainer.commit(served)
        parts.recorder.step(step, report, manifest, served, groups)
        for group in sorted((*groups, *dropped), key=lambda group: group.admission):
            parts.tasks.feedback(group)
        parts.slots.trained(len(groups))
        last = step + 1 == config.steps
        if last or (config.checkpoint_every and (step + 1) % config.checkpoint_every == 0):
            with timed("checkpoint"):
                await parts.checkpoint(step + 1)
        parts.slots.release()
        if config.evaluates_at(step + 1):
            await parts.evaluate(step + 1)
