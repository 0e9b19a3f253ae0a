"""Kata tasks by number, and the curriculum that hands them out.

`make_task(seed, split)` is a pure function: the same arguments give the same bytes. `KataSource` adds a counter, live
pass rates per family (M9), and a state that travels in a checkpoint; after `restore` it goes on with the task it would
have given next.

Invariants:
* until a family's constants are used up, no two tasks of one source have the same normalised syntax tree: the n-th
  task of a family takes the n-th number of a permutation of `size(family)` numbers;
* tasks of different splits share no constants (where the axis has enough values), no names, and for "unseen" no family;
* a task's id says how to make it again: `kata_of(task)` gives its package with the right and the wrong bodies, which
  is what expert traces are made of.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from etude.config import config
from etude.errors import CheckpointError, ConfigError, TaskError, nearest
from etude.records import Difficulty, Grader, Group, Provenance, Task, ToolPolicy, content_hash, seed_for
from etude.tasks.deletion import DeleteLevel, delete
from etude.tasks.katas.family import size
from etude.tasks.katas.package import FAMILIES, TRAIN_FAMILIES, VERSION, Kata, Package, families_of, make_package, part_of
from etude.tasks.prompt import make_prompt

_ID = re.compile(r"kata-(?P<split>[a-z]+)-(?P<family>[a-z_]+)-(?P<index>\d+)-(?P<seed>\d+)(?P<level>-def)?\Z")
_STATE_VERSION = 1


@config
class KataConfig:
    """Which katas are handed out, and how often."""

    seed: int = 0
    """Of the stream of tasks; the held-out lists have their own."""
    weighting: Literal["band", "uniform"] = "band"
    """band: families whose pass rate lies between `low` and `high` are drawn more often."""
    low: float = 0.1
    high: float = 0.9
    floor: float = 0.15
    """Weight of a family outside the band, against 1 inside, so that its rate stays known."""
    retire_above: float = 0.95
    """A family whose pass rate stays above this is no longer drawn."""
    retire_after: int = 8
    """Groups in a row above `retire_above`."""
    smoothing: float = 0.3
    """Weight of the newest group in the running pass rate."""
    families: tuple[str, ...] = ()
    """Empty for all train families."""
    definition_share: float = 0.0
    """Share of tasks whose whole definition is deleted; the others keep signature and docstring."""
    time_limit_s: float = 20.0
    """Of the graded test run."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ConfigError(f"low={self.low:g} and high={self.high:g} should be rates with low < high")
        if not 0 < self.smoothing <= 1:
            raise ConfigError(f"smoothing={self.smoothing:g} should be above 0 and at most 1")
        if not 0 <= self.floor <= 1 or not 0 <= self.definition_share <= 1:
            raise ConfigError("floor and definition_share should be from 0 to 1")
        for name in self.families:
            if name not in TRAIN_FAMILIES:
                raise ConfigError(f"no train family {name!r}; {nearest(name, TRAIN_FAMILIES)}")


# ---------------------------------------------------------------------------------------------------
# One task


def make_task(
    seed: int,
    split: str = "train",
    *,
    family: str | None = None,
    index: int | None = None,
    level: DeleteLevel | str = DeleteLevel.BODY,
    time_limit_s: float = 20.0,
) -> Task:
    """The task of a seed. Without `family` and `index` both are drawn from the seed.

    Example:
        task = make_task(7)
        task.prompt         # "Implement `clip_sum` in `shop/ops.py`. Tests: `pytest tests/test_ops.py`"
    """
    allowed = families_of(split)
    rng = random.Random(seed_for("kata-task", VERSION, seed, split))
    family = family if family is not None else rng.choice(allowed)
    if family not in allowed:
        raise TaskError(f"no family {family!r} in split {split!r}; {nearest(family, allowed)}")
    count = size(FAMILIES[family], part_of(split))
    index = index if index is not None else rng.randrange(count)
    if not 0 <= index < count:
        raise TaskError(f"family {family} has {count} functions in split {split!r}, so no number {index}")
    level = DeleteLevel(level)
    package = _package(seed, split, family, index, level)
    return _task(package, family, index, level, rng, time_limit_s)


def _package(seed: int, split: str, family: str, index: int, level: DeleteLevel) -> Package:
    """At definition level, one where nothing imports the function by name."""
    for attempt in range(50):
        package = make_package(seed if not attempt else seed_for(seed, attempt), split=split, target=(family, index))
        assert package.target is not None
        if level is DeleteLevel.BODY or not package.callers(package.target):
            return package
    raise TaskError(f"every package for {family} {index} imports it; use level 'body'")


def _task(package: Package, family: str, index: int, level: DeleteLevel, rng: random.Random, time_limit_s: float) -> Task:
    kata = package.target
    assert kata is not None
    cut = delete(package.files, kata.path, kata.qualname, level)
    hidden_path, hidden_text, hidden_ids = package.hidden(kata)
    touched = [kata, *package.callers(kata)]
    fail = [i for k in touched for i in package.test_ids(k)] + list(hidden_ids)
    keep = [i for k in package.functions if k not in touched for i in package.test_ids(k)]
    prompt = make_prompt(
        path=kata.path,
        qualname=kata.qualname,
        tests=[f"tests/test_{kata.module}.py"],
        level=level,
        rng=rng,
        signature=kata.signature,
        doc=kata.doc,
    )
    suffix = "-def" if level is DeleteLevel.DEFINITION else ""
    return build_task(
        id=f"kata-{package.split}-{family}-{index}-{package.seed}{suffix}",
        prompt=prompt,
        files=cut.files,
        solution=cut.restoring,
        grader=Grader(fail_to_pass=tuple(fail), pass_to_pass=tuple(keep), time_limit_s=time_limit_s, hidden=((hidden_path, hidden_text),)),
        split=package.split,
        provenance=Provenance(generator="katas", source="katas", version=VERSION, licence="Apache-2.0", seed=package.seed, family=family),
    )


def build_task(
    *,
    id: str,
    prompt: str,
    files: Mapping[str, str],
    grader: Grader,
    provenance: Provenance,
    solution: Mapping[str, str] | None = None,
    split: str = "train",
    tools: ToolPolicy | None = None,
    start: str = "",
    network: tuple[str, ...] = (),
    difficulty: Difficulty | None = None,
) -> Task:
    """A Task with its hashes, for any generator."""
    task = Task(
        id=id,
        hash="",
        prompt=prompt,
        workspace=content_hash(sorted(files.items())),
        files=tuple(sorted(files.items())),
        start=start,
        grader=grader,
        tools=tools or ToolPolicy(),
        network=network,
        split=split,
        provenance=provenance,
        difficulty=difficulty or Difficulty(),
        solution=tuple(sorted((solution or {}).items())),
    )
    return task.replace(hash=task_hash(task))


def task_hash(task: Task) -> str:
    """Content hash over everything that can change an outcome."""
    return content_hash(task.prompt, task.workspace, task.start, task.grader, task.tools, task.network)


@dataclass(frozen=True, kw_only=True)
class KataId:
    split: str
    family: str
    index: int
    seed: int
    level: DeleteLevel


def parse_id(task_id: str) -> KataId | None:
    """What a kata's id says; None for the id of another generator's task."""
    match = _ID.match(task_id)
    if match is None or match["family"] not in FAMILIES:
        return None
    level = DeleteLevel.DEFINITION if match["level"] else DeleteLevel.BODY
    return KataId(split=match["split"], family=match["family"], index=int(match["index"]), seed=int(match["seed"]), level=level)


def kata_of(task: Task | str) -> tuple[Package, Kata]:
    """The package behind a kata task and its function with `correct_body` and `wrong_bodies`."""
    task_id = task if isinstance(task, str) else task.id
    known = parse_id(task_id)
    if known is None:
        raise TaskError(f"task {task_id!r} is no kata; only katas can be made again from their id")
    package = make_package(known.seed, split=known.split, target=(known.family, known.index))
    if package.target is None:
        raise TaskError(f"kata {task_id!r} has no target function")
    return package, package.target


# ---------------------------------------------------------------------------------------------------
# The curriculum


@dataclass(kw_only=True)
class FamilyStats:
    """What is known of one family so far."""

    issued: int = 0
    groups: int = 0
    attempts: int = 0
    passes: int = 0
    rate: float = 0.5
    """Running pass rate; `smoothing` is the weight of the newest group."""
    turns: float = 0.0
    tokens: float = 0.0
    saturated: int = 0
    """Groups in a row above the retiring rate."""
    retired: bool = False


class KataSource:
    """A TaskSource of train katas.

    Example:
        source = KataSource(KataConfig(seed=1))
        task = source.next()
        source.feedback(group)                      # graded rollouts of that task
        KataSource(KataConfig(seed=1)).restore(source.state())
    """

    def __init__(self, config: KataConfig | None = None) -> None:
        self.config = config or KataConfig()
        names = self.config.families or TRAIN_FAMILIES
        self.stats: dict[str, FamilyStats] = {name: FamilyStats() for name in names}
        self.counter = 0

    def next(self) -> Task:
        rng = random.Random(seed_for("kata-next", VERSION, self.config.seed, self.counter))
        names = list(self.stats)
        family = rng.choices(names, weights=[self.weight(n) for n in names])[0]
        stats = self.stats[family]
        index = shuffled(stats.issued, size(FAMILIES[family], "train"), self.config.seed, family)
        level = DeleteLevel.DEFINITION if rng.random() < self.config.definition_share else DeleteLevel.BODY
        seed = seed_for("kata-stream", self.config.seed, self.counter)
        task = make_task(seed, "train", family=family, index=index, level=level, time_limit_s=self.config.time_limit_s)
        self.counter += 1
        stats.issued += 1
        known = Difficulty(attempts=stats.attempts, passes=stats.passes, mean_turns=stats.turns, mean_tokens=stats.tokens)
        return task.replace(difficulty=known)

    def weight(self, family: str) -> float:
        """How often the family is drawn, against others."""
        stats = self.stats[family]
        if self.config.weighting == "uniform" or all(s.retired for s in self.stats.values()):
            return 1.0
        if stats.retired:
            return 0.0
        if stats.groups < 2 or self.config.low <= stats.rate <= self.config.high:
            return 1.0
        return self.config.floor

    def feedback(self, group: Group) -> None:
        """Learn from one graded group. Tasks of other sources are ignored."""
        known = parse_id(group.task_id)
        stats = self.stats.get(known.family) if known is not None and known.split == "train" else None
        if stats is None or not group.members:
            return
        n = len(group.members)
        passes = sum(g.report is not None and g.report.solved for g in group.members)
        turns = sum(g.trajectory.effort.turns for g in group.members) / n
        tokens = sum(g.trajectory.sampled_tokens for g in group.members) / n
        part = self.config.smoothing if stats.groups else 1.0
        stats.rate += part * (passes / n - stats.rate)
        stats.turns += part * (turns - stats.turns)
        stats.tokens += part * (tokens - stats.tokens)
        stats.groups += 1
        stats.attempts += n
        stats.passes += passes
        stats.saturated = stats.saturated + 1 if stats.rate > self.config.retire_above else 0
        stats.retired = stats.retired or stats.saturated >= self.config.retire_after

    def state(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "katas": VERSION,
            "seed": self.config.seed,
            "counter": self.counter,
            "families": {name: asdict(stats) for name, stats in self.stats.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, ours in (("version", _STATE_VERSION), ("katas", VERSION), ("seed", self.config.seed)):
            if state.get(key) != ours:
                raise CheckpointError(f"the curriculum was saved with {key}={state.get(key)!r}, this run has {ours!r}; use the same")
        try:
            saved = {name: FamilyStats(**values) for name, values in state["families"].items()}
            counter = int(state["counter"])
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the curriculum's saved state cannot be read: {error!r}") from error
        if set(saved) != set(self.stats):
            changed = sorted(set(saved) ^ set(self.stats))
            raise CheckpointError(f"the curriculum was saved with other families (e.g. {changed[0]!r}); use the same `families`")
        self.stats = {name: saved[name] for name in self.stats}
        self.counter = counter


def shuffled(n: int, count: int, *key: Any) -> int:
    """The n-th element of a fixed permutation of range(count); it repeats after `count`."""
    rng = random.Random(seed_for("kata-order", VERSION, count, *key))
    step = rng.randrange(1, count) if count > 1 else 1
    while math.gcd(step, count) != 1:
        step += 1
    return (rng.randrange(count) + n * step) % count


def heldout_tasks(n: int, seed: int = 0) -> list[Task]:
    """Train families with constants and names that training never uses: the same list for the same arguments."""
    return fixed_tasks("heldout", n, seed)


def unseen_tasks(n: int, seed: int = 0) -> list[Task]:
    """Families that no task of reinforcement comes from. Pretraining text knows them, with other constants and names."""
    return fixed_tasks("unseen", n, seed)


def fixed_tasks(split: str, n: int, seed: int = 0) -> list[Task]:
    """n tasks of a split without duplicates, its families in turn."""
    names = list(families_of(split))
    known = sum(size(FAMILIES[family], part_of(split)) for family in names)
    if n > known:
        raise TaskError(f"split {split!r} has {known} distinct katas, asked for {n}; ask for fewer")
    random.Random(seed_for("kata-fixed", VERSION, split, seed)).shuffle(names)
    taken = dict.fromkeys(names, 0)
    out: list[Task] = []
    while len(out) < n:
        for family in names:
            count = size(FAMILIES[family], part_of(split))
            if len(out) < n and taken[family] < count:
                index = shuffled(taken[family], count, seed, split, family)
                out.append(make_task(seed_for("kata-fixed-task", split, seed, len(out)), split, family=family, index=index))
                taken[family] += 1
    return out
