"""What `etude demo` learns and costs: the whole demo once for each of three seeds, each from the shipped checkpoint.

Ours is pass@1 after the run, the peer the same weights before it: the same tasks, sampling seeds, harness and machine. Unseen
families (never met in reinforcement) are pooled over the seeds, whose tasks differ. A full run leaves each seed's report.json and
report.md in benchmarks/results/demo/.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.bench import Row, benchmarks_folder
from etude.evals.report import pooled, read_facts
from etude.launch import demo

SEEDS = (0, 1, 2)
QUICK = ("loop.steps=2", "loop.groups_per_step=3", "eval.heldout=24", "eval.unseen=8")


def run(device: str, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        seeds = SEEDS[:1] if quick else SEEDS
        runs = [Path(folder) / f"seed-{seed}" for seed in seeds]
        for seed, where in zip(seeds, runs, strict=True):
            demo(seed=seed, root=Path(folder), name=where.name, overrides=QUICK if quick else ())
            if not quick:
                keep(where, benchmarks_folder() / "results" / "demo" / where.name)
        return [row for seed, where in zip(seeds, runs, strict=True) for row in of_run(seed, where)] + of_all(runs)


def keep(run: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "report.md"):
        shutil.copy(run / name, to / name)


def of_run(seed: int, run: Path) -> list[Row]:
    report = json.loads((run / "report.json").read_text())
    facts = read_facts(run)
    first, last = (e for e in report["eval"] if e["suite"] == "heldout")
    name = f"seed {seed}: "
    before = f"the shipped checkpoint, same {first['n']} tasks"
    evaluated = sum(e["n"] for e in report["eval"])
    return [
        Row(
            name=name + "held-out pass@1",
            unit="share",
            ours=last["pass_at_1"],
            peer=first["pass_at_1"],
            peer_name=before,
            higher_is_better=True,
        ),
        Row(
            name=name + "low end after, high end before",
            unit="share",
            ours=last["low"],
            peer=first["high"],
            peer_name=before,
            higher_is_better=True,
        ),
        Row(name=name + "wall clock", unit="s", ours=report["wall_s"], higher_is_better=False),
        Row(name=name + "core-seconds per rollout", unit="s", ours=facts.cpu_s / (report["rollouts"] + evaluated), higher_is_better=False),
    ]


def of_all(runs: Sequence[Path]) -> list[Row]:
    gain = pooled(runs, "unseen")
    name = f"unseen families, {gain.n} tasks, paired difference"
    return [
        Row(name=name, unit="share", ours=gain.value, higher_is_better=True),
        Row(name=name + ", low end", unit="share", ours=gain.low, higher_is_better=True),
    ]
