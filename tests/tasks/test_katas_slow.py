"""Hundreds of packages over all families in real sandboxes, and thousands of tasks without a duplicate."""

from __future__ import annotations

import statistics
import time

import pytest

from etude.tasks.deletion import delete, source_hash
from etude.tasks.katas import FAMILIES, TRAIN_FAMILIES, make_package
from etude.tasks.katas.family import size
from etude.tasks.leaks import LEAST, SHARE, share
from etude.tasks.source import KataConfig, KataSource, heldout_tasks, kata_of, make_task, shuffled, unseen_tasks
from etude.tasks.validate import Candidate, Funnel, validate_package

PACKAGES = 305
"""Five for each of 61 families."""


def candidate(package):
    kata = package.target
    path, text, hidden_ids = package.hidden(kata)
    whole = package.files[kata.path]
    touched = [kata, *package.callers(kata)]
    return Candidate(
        id=kata.qualname,
        deletion=delete(package.files, kata.path, kata.qualname),
        hidden={path: text},
        targets=(*(i for k in touched for i in package.test_ids(k)), *hidden_ids),
        wrong=tuple(whole.replace(kata.source, kata.with_body(w)) for w in kata.wrong_bodies),
    )


@pytest.mark.slow
def test_hundreds_of_packages_survive_the_validator(sandboxes, run, capsys):
    funnel, seen, bad = Funnel(), set(), []
    names = list(FAMILIES)
    for number in range(PACKAGES):
        family = names[number % len(names)]
        split = ("train", "heldout")[number // len(names) % 2] if family in TRAIN_FAMILIES else "unseen"
        part = "train" if split == "train" else "held"
        index = shuffled(number, size(FAMILIES[family], part), "slow", family)
        package = make_package(number, split=split, target=(family, index))
        verdict = run(validate_package(sandboxes, package.files, [candidate(package)], repeats=1, seen=seen, funnel=funnel))[0]
        if not verdict.accepted:
            bad.append((family, split, index, verdict.reject, verdict.detail))
    with capsys.disabled():
        print(f"\n{funnel.total} packages: {funnel.as_dict()}")
    assert bad == []
    assert funnel.accepted == PACKAGES >= 300


@pytest.mark.slow
def test_five_thousand_tasks_have_no_duplicate(capsys):
    source = KataSource(KataConfig(seed=11, weighting="uniform"))
    hashes, sizes = set(), {"prompt": [], "module": [], "test": [], "workspace": [], "body": []}
    for _ in range(5000):
        task = source.next()
        _, kata = kata_of(task)
        hashes.add(source_hash(task.solution[0][1], kata.qualname))
        files = dict(task.files)
        sizes["prompt"].append(len(task.prompt))
        sizes["module"] += [len(t) for p, t in files.items() if p.endswith(".py") and not p.startswith("tests/") and "__init__" not in p]
        sizes["test"] += [len(t) for p, t in files.items() if p.startswith("tests/")]
        sizes["workspace"].append(sum(map(len, files.values())))
        sizes["body"].append(len(kata.correct_body))
    with capsys.disabled():
        for name, values in sizes.items():
            print(
                f"\n{name}: median {statistics.median(values):.0f}, p95 {sorted(values)[len(values) * 95 // 100]}, most {max(values)}",
                end="",
            )
        rooms = sorted((size(f, "train"), size(f, "held"), f.name) for f in FAMILIES.values())
        total = [sum(row[part] for row in rooms) for part in (0, 1)]
        print(f"\ndistinct functions (train, held): {total}; fewest {rooms[:3]}")
    assert len(hashes) == 5000
    fixed = {source_hash(t.solution[0][1], kata_of(t)[1].qualname) for t in [*heldout_tasks(400), *unseen_tasks(200)]}
    assert len(fixed) == 600
    assert not fixed & hashes


@pytest.mark.slow
def test_honest_trees_stay_far_from_the_copy_threshold(capsys):
    largest = (0.0, "")
    for seed in range(420):
        package = make_package(seed)
        for kata in package.functions:
            cut = delete(package.files, kata.path, kata.qualname)
            if len(cut.fingerprint.shingles) >= LEAST:
                largest = max([largest, *((share(text, cut.fingerprint), kata.family) for text in cut.files.values())])
    with capsys.disabled():
        print(f"\nlargest share of a deleted body in an honest file: {largest}")
    assert largest[0] < SHARE


@pytest.mark.slow
def test_making_a_task_is_cheap(capsys):
    for seed in range(100):
        make_task(seed)
    seconds = []
    for seed in range(400):
        started = time.process_time()
        make_task(1000 + seed)
        seconds.append(time.process_time() - started)
    with capsys.disabled():
        print(f"\nmake_task: median {statistics.median(seconds) * 1e3:.2f} ms of CPU")
