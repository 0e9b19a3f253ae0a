"""The whole loop on fakes: order, staleness, masking, crash and resume, in a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import InfraError, IntegrityError, SandboxError, first_cause
from etude.events import read_events
from etude.fakes import InstantTrainer, KataWorld, fake_parts
from etude.loop import LoopConfig, run
from etude.records import Drop, Manifest, Task, Version
from etude.rollout.check import check_run
from etude.trainer.advantage import signal


def config(**changes: object) -> LoopConfig:
    return LoopConfig(**{"steps": 4, "groups_per_step": 2, "group_size": 3, "max_staleness": 1, "checkpoint_every": 1, **changes})  # type: ignore[arg-type]


def write_config(folder: Path, max_staleness: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(f'{{"loop": {{"max_staleness": {max_staleness}}}}}')


def run_fakes(c: LoopConfig, folder: Path, world: KataWorld, trainer: InstantTrainer, *, resume: bool = False) -> None:
    async def go() -> None:
        parts = fake_parts(c, folder, world, trainer, resume=resume)
        version = await trainer.load(folder / "checkpoints" / f"step-{parts.start_step}", parts.recorder.lineage) if resume else None
        if version:
            world.engine.current = version
            parts.recorder.event("run_resumed", from_step=parts.start_step, lineage=parts.recorder.lineage)
        else:
            world.engine.current = await trainer.version()
            parts.recorder.event("run_started", name="fake", recipe="fake", seed=0, schedule=c.schedule, lineage=0, versions={})
        try:
            await run(c, parts)
            parts.recorder.event("run_ended", outcome="done", detail="")
        finally:
            parts.recorder.close()

    write_config(folder, c.max_staleness)
    asyncio.run(go())


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_group_is_trained_once_in_admission_order(tmp_path: Path, schedule: str, staleness: int) -> None:
    world, trainer = KataWorld(lambda task: True), InstantTrainer()
    run_fakes(config(schedule=schedule, max_staleness=staleness), tmp_path, world, trainer)
    assert [g.admission for g in trainer.trained] == list(range(8))
    assert all(len(g.members) == 3 for g in trainer.trained)
    assert [v.ordinal for v in trainer.committed] == [1, 2, 3, 4]
    report = check_run(tmp_path)
    assert report.ok, report.problems
    assert world.host.live == {}


def test_right_and_wrong_bodies_get_their_rewards(tmp_path: Path) -> None:
    world, trainer = KataWorld(lambda task: "clamp" not in task.id and sum(map(ord, task.id)) % 2 == 0), InstantTrainer()
    run_fakes(config(), tmp_path, world, trainer)
    for group in trainer.trained:
        for graded in group.members:
            assert graded.report is not None
            assert (graded.reward > 0.5) == graded.report.solved
    solved = {bool(g.report and g.report.solved) for group in trainer.trained for g in group.members}
    assert solved == {True, False}


def test_staleness_zero_trains_only_on_the_newest_version(tmp_path: Path) -> None:
    world, trainer = KataWorld(lambda task: True), InstantTrainer()
    run_fakes(config(max_staleness=0), tmp_path, world, trainer)
    assert [g.oldest_ordinal for g in trainer.trained] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_broken_machine_is_masked_and_never_scored(tmp_path: Path) -> None:
    world, trainer = KataWorld(lambda task: True), InstantTrainer()
    create, made = world.host.create, []

    async def flaky(*args: object, **kwargs: object) -> object:
        made.append(kwargs.get("create_id", ""))
        if len(made) % 5 == 0:
            raise SandboxError("no machine")
        return await create(*args, **kwargs)  # type: ignore[arg-type]

    world.host.create = flaky  # type: ignore[method-assign,assignment]
    run_fakes(config(), tmp_path, world, trainer)
    dropped = [d for g in trainer.trained for d in g.dropped]
    assert dropped
    assert {d.reason for d in dropped} == {Drop.INFRA}
    assert all(len(g.members) + len(g.dropped) == 3 for g in trainer.trained)
    assert all(m.reward > 0.5 for g in trainer.trained for m in g.members)
    assert check_run(tmp_path).ok


def test_a_run_whose_every_machine_is_broken_stops_and_says_so(tmp_path: Path) -> None:
    world, trainer = KataWorld(lambda task: True), InstantTrainer()

    async def broken(*args: object, **kwargs: object) -> object:
        raise SandboxError("the sandbox daemon is gone")

    world.host.create = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(ExceptionGroup) as caught:
        run_fakes(config(), tmp_path, world, trainer)
    cause = first_cause(caught.value)
    assert isinstance(cause, InfraError)
    assert "the sandbox daemon is gone" in str(cause)
    assert trainer.trained == []


def test_two_deaths_between_two_checkpoints_never_share_a_lineage(tmp_path: Path) -> None:
    c = config(checkpoint_every=3)

    class Dying(InstantTrainer):
        async def step(self, groups):  # type: ignore[no-untyped-def]
            if self._version.ordinal == 2:
                raise RuntimeError("power cut")
            return await super().step(groups)

    for life in range(3):
        with pytest.raises(ExceptionGroup):
            run_fakes(c, tmp_path, KataWorld(lambda task: True), Dying(), resume=life > 0)
    run_fakes(c, tmp_path, KataWorld(lambda task: True), InstantTrainer(), resume=True)
    report = check_run(tmp_path)
    assert report.ok, report.problems
    assert report.counts["resumes"] == 3


def test_a_resumed_run_starts_with_the_evaluation_it_may_have_missed(tmp_path: Path) -> None:
    """Killed in the evaluation after the last step, it has a last checkpoint and no last score."""
    c, world, trainer = config(), KataWorld(lambda task: True), InstantTrainer()
    run_fakes(c, tmp_path, world, trainer)
    run_fakes(c, tmp_path, KataWorld(lambda task: True), InstantTrainer(), resume=True)
    notes = [e["text"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "note"]
    assert [n.rpartition(" ")[2] for n in notes] == ["0", "4", "4"]


def test_a_bug_in_a_rollout_stops_the_run(tmp_path: Path) -> None:
    world = KataWorld(lambda task: 1 // 0 == 0)
    with pytest.raises(ExceptionGroup) as caught:
        run_fakes(config(), tmp_path, world, InstantTrainer())
    assert caught.group_contains(ZeroDivisionError)
    assert world.host.live == {}


def test_an_engine_that_serves_other_weights_stops_the_run(tmp_path: Path) -> None:
    world = KataWorld(lambda task: True)

    async def lie(manifest: Manifest, source: str) -> Version:
        return manifest.version.replace(hash="0" * 32)

    world.engine.load = lie  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as caught:
        run_fakes(config(), tmp_path, world, InstantTrainer())
    assert caught.group_contains(IntegrityError)


@pytest.mark.parametrize("die_at", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_a_run_that_died_goes_on_without_losing_or_repeating(tmp_path: Path, die_at: int, schedule: str) -> None:
    c = config(schedule=schedule)

    class Dying(InstantTrainer):
        async def step(self, groups):  # type: ignore[no-untyped-def]
            if self._version.ordinal == die_at:
                raise RuntimeError("power cut")
            return await super().step(groups)

    world = KataWorld(lambda task: True)
    with pytest.raises(ExceptionGroup):
        run_fakes(c, tmp_path, world, Dying())
    again, trainer = KataWorld(lambda task: True), InstantTrainer()
    run_fakes(c, tmp_path, again, trainer, resume=True)
    assert [g.admission for g in trainer.trained] == list(range(2 * die_at, 8))
    report = check_run(tmp_path)
    assert report.ok, report.problems
    if schedule == "lockstep":
        whole = InstantTrainer()
        run_fakes(c, tmp_path / "whole", KataWorld(lambda task: True), whole)
        assert [g.task_id for g in trainer.trained] == [g.task_id for g in whole.trained[2 * die_at :]]


def mostly_silent() -> Callable[[Task], bool]:
    """Solves two tasks of three in every rollout, and the third in every other one."""
    seen: Counter[str] = Counter()

    def solves(task: Task) -> bool:
        seen[task.id] += 1
        return sum(map(ord, task.id)) % 3 > 0 or seen[task.id] % 2 == 0

    return solves


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_without_signal_are_replaced(tmp_path: Path, schedule: str, staleness: int) -> None:
    world, trainer = KataWorld(mostly_silent()), InstantTrainer()
    run_fakes(config(schedule=schedule, max_staleness=staleness, refill=50), tmp_path, world, trainer)
    assert len(trainer.trained) == 8
    assert all(signal(g) for g in trainer.trained)
    admissions = [g.admission for g in trainer.trained]
    assert admissions == sorted(admissions)
    report = check_run(tmp_path)
    assert report.ok, report.problems
    events = list(read_events(tmp_path / "events.jsonl"))
    dropped = [e["admission"] for e in events if e["kind"] == "group_dropped"]
    assert len(dropped) == report.counts["dropped"] > 0
    assert {*admissions, *dropped} == set(range(max(admissions) + 1)), "all before the last trained one are accounted for"
    assert max(e["staleness"] for e in events if e["kind"] == "group_trained") <= staleness
    assert world.host.live == {}


def test_a_step_replaces_no_more_groups_than_it_may(tmp_path: Path) -> None:
    trainer = InstantTrainer()
    run_fakes(config(refill=1), tmp_path, KataWorld(lambda task: True), trainer)
    assert [g.admission for g in trainer.trained] == [1, 2, 4, 5, 7, 8, 10, 11]
    assert check_run(tmp_path).ok
    with pytest.raises(ValueError, match=r"loop\.refill must be 0 or more, got -1"):
        config(refill=-1)


@pytest.mark.parametrize("die_at", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_a_run_that_replaces_groups_goes_on_after_it_died(tmp_path: Path, die_at: int, schedule: str) -> None:
    c = config(schedule=schedule, refill=50)

    class Dying(InstantTrainer):
        async def step(self, groups):  # type: ignore[no-untyped-def]
            if self._version.ordinal == die_at:
                raise RuntimeError("power cut")
            return await super().step(groups)

    first, second = Dying(), InstantTrainer()
    with pytest.raises(ExceptionGroup):
        run_fakes(c, tmp_path, KataWorld(mostly_silent()), first)
    before = [g.admission for g in first.trained]
    run_fakes(c, tmp_path, KataWorld(mostly_silent()), second, resume=True)
    admissions = before + [g.admission for g in second.trained]
    assert len(admissions) == len(set(admissions)) == 8
    assert admissions == sorted(admissions)
    report = check_run(tmp_path)
    assert report.ok, report.problems
    if schedule == "lockstep":
        whole = InstantTrainer()
        run_fakes(c, tmp_path / "whole", KataWorld(mostly_silent()), whole)
        assert [(g.admission, g.task_id) for g in whole.trained] == list(
            zip(admissions, [g.task_id for g in (*first.trained, *second.trained)], strict=True)
        )
