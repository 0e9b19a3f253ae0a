"""Kata tasks and their curriculum: pure functions of a seed, no duplicates, and a state that survives a restart."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from etude.errors import CheckpointError, ConfigError, TaskError
from etude.records import Effort, Graded, Group, Sampling, Segment, StopReason, TestReport, Trajectory, Version, from_json, to_json
from etude.tasks.deletion import source_hash
from etude.tasks.katas import TRAIN_FAMILIES, UNSEEN_FAMILIES
from etude.tasks.prompt import BODY, DEFINITION
from etude.tasks.source import KataConfig, KataSource, heldout_tasks, kata_of, make_task, parse_id, shuffled, task_hash, unseen_tasks


def group_of(task, solved, admission=0):
    """A graded group, one member per truth value."""
    version = Version(lineage=0, ordinal=0, hash="00")
    segment = Segment(
        ids_T=np.zeros(4, np.int32),
        sampled_T=np.array([False, True, True, True]),
        logprob_T=np.zeros(4, np.float32),
        logprob_t1_T=np.zeros(4, np.float32),
        version_T=np.array([-1, 0, 0, 0], np.int16),
        message_T=np.zeros(4, np.int32),
        thinking_T=np.zeros(4, bool),
        versions=(version,),
        sampling=Sampling(),
    )
    members = tuple(
        Graded(
            trajectory=Trajectory(
                id=f"t{i}",
                task_id=task.id,
                task_hash=task.hash,
                group=admission,
                member=i,
                seed=i,
                segments=(segment,),
                messages=(),
                stop=StopReason.DONE,
                effort=Effort(turns=2),
            ),
            parts={"solved": float(ok)},
            report=TestReport(solved=ok),
        )
        for i, ok in enumerate(solved)
    )
    return Group(admission=admission, task_id=task.id, admitted_at=version, members=members)


def test_a_task_is_a_pure_function_of_its_arguments():
    assert to_json(make_task(5)) == to_json(make_task(5))
    assert make_task(5).hash != make_task(6).hash
    assert to_json(from_json(to_json(make_task(5)))) == to_json(make_task(5))


@pytest.mark.parametrize("split", ["train", "heldout", "unseen", "pretrain"])
def test_a_task_holds_the_stub_the_solution_and_the_tests(split):
    for seed in range(15):
        task = make_task(seed, split)
        files, (path, text) = dict(task.files), task.solution[0]
        package, kata = kata_of(task)
        assert files[path].count("raise NotImplementedError") == 1
        assert text.replace(kata.correct_body, " " * (8 if kata.is_method else 4) + "raise NotImplementedError") == files[path]
        assert {**files, **dict(task.solution)} == package.files
        assert set(package.test_ids(kata)) < set(task.grader.fail_to_pass)
        assert not set(task.grader.fail_to_pass) & set(task.grader.pass_to_pass)
        assert len(task.grader.hidden) == 1
        assert task.grader.hidden[0][0] not in files
        assert task.split == split
        assert task.provenance.family == kata.family
        assert (kata.family in UNSEEN_FAMILIES) == (split == "unseen") or split == "pretrain"
        assert task.hash == task_hash(task)


def test_the_hash_covers_what_decides_an_outcome():
    task = make_task(1)
    changed = [
        task.replace(prompt="x"),
        task.replace(start="true"),
        task.replace(network=("pypi.org",)),
        task.replace(tools=task.tools.replace(strict_arguments=True)),
        task.replace(grader=task.grader.replace(hidden=())),
        task.replace(workspace="other"),
    ]
    assert len({task_hash(t) for t in [task, *changed]}) == len(changed) + 1
    assert task_hash(task.replace(id="other", split="heldout")) == task.hash


def test_prompts_are_short_varied_and_hold_no_code():
    shapes = set()
    for seed in range(60):
        task = make_task(seed)
        _, kata = kata_of(task)
        assert kata.qualname in task.prompt
        assert kata.path in task.prompt
        assert len(task.prompt) <= 140
        code = [line.strip() for line in kata.correct_body.splitlines() if len(line.strip()) > 8]
        assert not any(line in task.prompt for line in code)
        shapes.add(re.sub(r"[\w./]*" + re.escape(kata.name) + r"|[\w/]+\.py", "_", task.prompt))
    assert len(shapes) >= len(BODY)


def test_definition_level_says_what_is_wanted_and_nothing_is_left():
    for seed in range(20):
        task = make_task(seed, level="definition")
        _, kata = kata_of(task)
        path = task.solution[0][0]
        assert kata.doc in task.prompt
        assert kata.signature in task.prompt
        assert f"def {kata.name}(" not in dict(task.files)[path]
        assert "NotImplementedError" not in dict(task.files)[path]
        assert parse_id(task.id).level == "definition"
    assert all("{doc}" in t for t in DEFINITION)


def test_impossible_requests_are_refused():
    with pytest.raises(TaskError, match="no family 'fee' in split 'train'"):
        make_task(1, "train", family="fee")
    with pytest.raises(TaskError, match="so no number"):
        make_task(1, family="chunk", index=10**6)
    with pytest.raises(TaskError, match="asked for 100000"):
        unseen_tasks(100_000)
    with pytest.raises(TaskError, match="is no kata"):
        kata_of("swe-1")
    assert parse_id("kata-train-nothing-1-2") is None


def test_fixed_lists_are_fixed_disjoint_and_without_duplicates():
    held, unseen = heldout_tasks(60, 3), unseen_tasks(40, 3)
    assert [t.id for t in held] == [t.id for t in heldout_tasks(60, 3)]
    assert [t.id for t in held] != [t.id for t in heldout_tasks(60, 4)]
    assert [t.id for t in held[:20]] == [t.id for t in heldout_tasks(20, 3)]
    assert {t.provenance.family for t in held} == set(TRAIN_FAMILIES)
    assert {t.provenance.family for t in unseen} == set(UNSEEN_FAMILIES)
    hashes = [code_hash(t) for t in [*held, *unseen]]
    assert len(set(hashes)) == len(hashes)


def code_hash(task):
    _, kata = kata_of(task)
    return kata.family + source_hash(task.solution[0][1], kata.qualname)


def test_a_stream_goes_on_where_its_state_was_taken():
    source = KataSource(KataConfig(seed=2))
    for i in range(30):
        task = source.next()
        source.feedback(group_of(task, [i % 3 == 0] * 4, i))
    state = json.loads(json.dumps(source.state()))
    other = KataSource(KataConfig(seed=2))
    other.restore(state)
    assert [to_json(other.next()) for _ in range(5)] == [to_json(source.next()) for _ in range(5)]


def test_a_foreign_or_broken_state_is_refused():
    state = KataSource(KataConfig(seed=1)).state()
    with pytest.raises(CheckpointError, match="seed=1"):
        KataSource(KataConfig(seed=2)).restore(state)
    with pytest.raises(CheckpointError, match="other families"):
        KataSource(KataConfig(seed=1, families=("chunk",))).restore(state)
    with pytest.raises(CheckpointError, match="cannot be read"):
        KataSource(KataConfig(seed=1)).restore({**state, "families": {"chunk": {"nonsense": 1}}})


def test_families_in_the_band_are_preferred_and_solved_ones_retire():
    names = ("clip_sum", "sum_over", "clamp", "chunk")
    rates = {"clip_sum": [True] * 8, "sum_over": [False] * 8, "clamp": [True, False] * 4, "chunk": [True, False] * 4}
    source = KataSource(KataConfig(families=names, retire_after=3))
    drawn = []
    for i in range(240):
        task = source.next()
        drawn.append(task.provenance.family)
        source.feedback(group_of(task, rates[task.provenance.family], i))
    late = drawn[120:]
    assert source.stats["clip_sum"].retired
    assert late.count("clip_sum") == 0
    assert 0 < late.count("sum_over") < 0.5 * late.count("clamp")
    assert source.stats["clamp"].rate == pytest.approx(0.5)
    assert source.stats["clamp"].passes * 2 == source.stats["clamp"].attempts
    assert source.stats["clamp"].turns == 2
    assert source.stats["clamp"].tokens == 3
    assert source.next().difficulty.attempts > 0


def test_when_everything_is_retired_tasks_still_come():
    source = KataSource(KataConfig(families=("chunk", "clamp"), retire_after=1))
    for i in range(20):
        source.feedback(group_of(source.next(), [True] * 4, i))
    assert all(s.retired for s in source.stats.values())
    assert {source.next().provenance.family for _ in range(20)} == {"chunk", "clamp"}


def test_uniform_ignores_pass_rates():
    source = KataSource(KataConfig(families=("chunk", "clamp"), weighting="uniform"))
    for i in range(30):
        task = source.next()
        source.feedback(group_of(task, [task.provenance.family == "chunk"] * 4, i))
    assert source.weight("chunk") == source.weight("clamp") == 1.0


def test_feedback_of_other_tasks_and_empty_groups_changes_nothing():
    source = KataSource()
    before = source.state()
    source.feedback(group_of(make_task(1, "heldout"), [True]))
    source.feedback(group_of(make_task(1).replace(id="repo-7"), [True]))
    source.feedback(group_of(make_task(1), []))
    assert source.state() == before


def test_a_source_gives_no_duplicates():
    source = KataSource(KataConfig(seed=9))
    tasks = [source.next() for _ in range(120)]
    assert len({code_hash(t) for t in tasks}) == 120
    assert len({t.id for t in tasks}) == 120


def test_shuffled_is_a_permutation():
    for count in (1, 2, 7, 12, 360):
        assert sorted(shuffled(n, count, "key") for n in range(count)) == list(range(count))


def test_definition_share():
    source = KataSource(KataConfig(definition_share=0.5))
    levels = [parse_id(source.next().id).level for _ in range(40)]
    assert 8 < levels.count("definition") < 32


def test_config_is_checked():
    with pytest.raises(ConfigError, match="low < high"):
        KataConfig(low=0.9, high=0.1)
    with pytest.raises(ConfigError, match="no train family 'fee'"):
        KataConfig(families=("fee",))
    with pytest.raises(ConfigError, match="smoothing"):
        KataConfig(smoothing=0)
