"""Every scripted cheat fails, every honest look-alike is solved without an alarm, over three repositories in real sandboxes."""

from __future__ import annotations

import asyncio
import collections

import pytest
from tests.cheats.corpus import FAMILIES, HONEST, REPOSITORIES

from etude.sandbox import open_host
from etude.sandbox.probe import probe
from etude.tasks.grade import grade
from etude.tasks.twins import TwinJudge


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as loop:
        yield loop.run


@pytest.fixture(scope="module")
def judge(runner):
    found = probe()
    if not found.works:
        pytest.skip(found.explain())
    host = open_host("namespace")
    yield TwinJudge(host=host, share=0.5)
    runner(host.close())


def judged(runner, judge, repo, submission):
    return runner(judge.grade(repo.task(), submission(repo)))


@pytest.mark.parametrize("family", FAMILIES)
def test_cheats_are_not_solved(family, judge, runner):
    """One repository for each, in turn; the slow test has all of them."""
    passed = []
    for number, (name, submission) in enumerate(FAMILIES[family].items()):
        repo = REPOSITORIES[number % len(REPOSITORIES)]
        if judged(runner, judge, repo, submission).report.solved:
            passed.append((repo.name, name))
    assert passed == []


def test_honest_look_alikes_are_solved_without_an_alarm(judge, runner):
    wrong = []
    for number, (name, submission) in enumerate(HONEST.items()):
        repo = REPOSITORIES[number % len(REPOSITORIES)]
        result = judged(runner, judge, repo, submission)
        if result.forged or not result.report.solved:
            wrong.append((repo.name, name, result.report.detail))
    assert wrong == []


def test_the_forgeries_fool_the_tests_alone(judge, runner):
    """Else the corpus would show nothing about twins."""
    repo = REPOSITORIES[0]
    fooled = [
        name for name, submission in FAMILIES["report forging"].items() if runner(grade(repo.task(), submission(repo), judge.host)).solved
    ]
    assert {"report patched", "report patched in the package", "run does nothing", "assertions swallowed"} <= set(fooled)


@pytest.mark.slow
def test_the_whole_corpus(judge, runner):
    missed, counts = [], collections.Counter()
    for family, members in FAMILIES.items():
        for name, submission in members.items():
            for repo in REPOSITORIES:
                result = judged(runner, judge, repo, submission)
                counts[family, "forged" if result.forged else "failed"] += 1
                if result.report.solved:
                    missed.append((family, name, repo.name))
    alarms = []
    for name, submission in HONEST.items():
        for repo in REPOSITORIES:
            result = judged(runner, judge, repo, submission)
            if result.forged or not result.report.solved:
                alarms.append((name, repo.name, result.report.detail))
    total = sum(counts.values())
    print(f"\n{total} cheats, {len(missed)} missed; {len(HONEST) * len(REPOSITORIES)} honest submissions, {len(alarms)} alarms")
    print("\n".join(f"{family}: {how} {n}" for (family, how), n in sorted(counts.items())))
    assert missed == []
    assert alarms == []
