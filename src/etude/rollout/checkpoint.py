"""One atomic checkpoint of the whole run: policy, optimizer, curriculum, counters and unfinished groups.

    checkpoints/step-N/  model/  optim/  groups/  state.json

Everything is written into `step-N.tmp`, flushed, and committed by one rename, so a checkpoint that can be seen is
whole. Groups that were ready are inside; groups in flight are inside as tasks, and are rolled again under the same
admission numbers and seeds.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.disk import flush
from etude.errors import CheckpointError
from etude.events import read_events
from etude.protocols import TaskSource, Trainer
from etude.records import Group, Task, from_dict, to_dict
from etude.rollout.shards import read_groups, write_groups
from etude.rollout.slots import Slots

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What `state.json` and `groups/` hold."""

    step: int
    lineage: int
    next_admission: int
    trained: int
    dropped: int
    again: list[tuple[int, Task]]
    ready: list[Group]
    curriculum: dict[str, Any]
    seed: int

    def restore(self, slots: Slots, tasks: TaskSource) -> None:
        slots.restore(self.next_admission, self.trained, self.dropped, self.again, self.ready)
        tasks.restore(self.curriculum)


async def save(run: Path, step: int, *, lineage: int, seed: int, trainer: Trainer, tasks: TaskSource, slots: Slots, keep: int = 2) -> Path:
    """Write and commit `checkpoints/step-N`; older ones beyond `keep` are removed afterwards."""
    final = run / "checkpoints" / f"step-{step}"
    tmp = final.with_suffix(".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    await trainer.save(tmp)
    write_groups(tmp / "groups", slots.ready)
    counters = slots.state()
    state = {
        "format": FORMAT,
        "step": step,
        "lineage": lineage,
        "seed": seed,
        "next_admission": counters["next"],
        "trained": counters["trained"],
        "dropped": counters["dropped"],
        "again": [[admission, to_dict(task)] for admission, task in counters["rolling"]],
        "curriculum": tasks.state(),
    }
    path = tmp / "state.json"
    path.write_text(json.dumps(state))
    for each in (*tmp.rglob("*"), tmp):
        flush(each)
    if final.exists():
        shutil.rmtree(final)
    os.rename(tmp, final)
    flush(final.parent)
    for old in _steps(run)[:-keep]:
        shutil.rmtree(run / "checkpoints" / f"step-{old}")
    return final


def next_lineage(run: Path) -> int:
    """The lineage a run's next process works in: 0 at the start, then one above all that its log knows, so that two resumes from
    one checkpoint never share a lineage."""
    log = run / "events.jsonl"
    events = read_events(log) if log.exists() else ()
    return max((e["lineage"] for e in events if e["kind"] in ("run_started", "run_resumed")), default=-1) + 1


def exists(run: Path) -> bool:
    """Whether there is one to resume from."""
    return bool(_steps(run))


def latest(run: Path) -> Path:
    """The newest whole checkpoint of a run."""
    steps = _steps(run)
    if not steps:
        raise CheckpointError(f"{run} has no checkpoint to resume from; start the run again under another name")
    return run / "checkpoints" / f"step-{steps[-1]}"


def read(folder: Path) -> RunState:
    """The loop's part of a checkpoint."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an older checkpoint beside it") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}, the only one this etude reads; resume with the version that wrote it")
    try:
        return RunState(
            step=state["step"],
            lineage=state["lineage"],
            seed=state["seed"],
            next_admission=state["next_admission"],
            trained=state["trained"],
            dropped=state["dropped"],
            again=[(admission, from_dict(task, Task)) for admission, task in state["again"]],
            ready=read_groups(folder / "groups"),
            curriculum=state["curriculum"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed ({error!r}); use an older checkpoint beside it") from error


def _steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    names = (p.name.removeprefix("step-") for p in folder.iterdir() if p.name.startswith("step-"))
    return sorted(int(n) for n in names if n.isdigit())
