"""Twins expose a forged grade and never an honest one: by syntax, by calibration, and in real sandboxes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.protocols import Change
from etude.records import Grader, Provenance
from etude.tasks.deletion import delete
from etude.tasks.fetch import NoSource
from etude.tasks.formats import read_task
from etude.tasks.grade import grade
from etude.tasks.packages import MakeConfig, make_from_package
from etude.tasks.source import build_task
from etude.tasks.twins import TwinJudge, invert, invert_task

FORGERY = """
import _pytest.reports as _reports

_real = _reports.TestReport.from_item_and_call.__func__


def _forged(cls, item, call):
    report = _real(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


_reports.TestReport.from_item_and_call = classmethod(_forged)
"""
"""What a submission can do: the tests share its process."""

TESTS = '''"""Tests."""
import unittest

import pytest

from shop import stats


@pytest.mark.parametrize("values, wanted", [([1, 4], 2), ([], 7), ([3], 3)])
def test_mean(values, wanted):
    assert stats.mean(values) == wanted, (
        "wrong"
    )


def test_says_nothing():
    for value in []:
        assert stats.mean([value]) == value


def test_total():
    assert stats.total([1, 2]) == 3


class TestWords(unittest.TestCase):
    def test_words(self):
        self.assertEqual(stats.words("a b1"), ["a", "b"])


def test_raises():
    with pytest.raises(TypeError):
        stats.total(3)
'''


@pytest.fixture
def task(shop):
    files = {**shop, "tests/test_stats.py": TESTS}
    cut = delete(files, "shop/stats.py", "mean")
    name = "tests/test_stats.py::"
    fail = tuple(f"{name}test_mean[values{i}-{w}]" for i, w in enumerate((2, 7, 3)))
    keep = (name + "test_total", name + "TestWords::test_words", name + "test_raises", name + "test_says_nothing")
    return build_task(
        id="twins",
        prompt="Write mean.",
        files=cut.files,
        solution=cut.restoring,
        grader=Grader(fail_to_pass=fail, pass_to_pass=keep),
        provenance=Provenance(generator="test", source="test"),
    )


def solution(task):
    return [Change(path=p, data=t.encode()) for p, t in task.solution]


def forged(task):
    (path,) = [p for p, _ in task.solution]
    return [Change(path=path, data=(dict(task.files)[path] + FORGERY).encode())]


# ---------------------------------------------------------------------------------------------------
# Inverting


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("test_total", "[1, 2]) == 3", {"[1, 2]) == (3,)", "[1, 2]) == 4"}),
        ("TestWords.test_words", '["a", "b"])', {'(["a", "b"],))'}),
        ("test_mean", "(values) == wanted, (", {"(values) == (wanted,), ("}),
        ("test_truth", "assert stats\n", {"assert not (stats)\n"}),
        ("TestMore.test_in", "self.assertIn(", {"self.assertNotIn("}),
    ],
)
def test_one_assertion_is_contradicted_on_its_own_lines(name, before, after):
    more = "class TestMore(unittest.TestCase):\n    def test_in(self):\n        self.assertIn(1, [1])\n"
    text = f"{TESTS}\n\ndef test_truth():\n    assert stats\n\n\n{more}"
    twins = {invert(text, "t.py", name, random.Random(seed)) for seed in range(20)}
    assert twins == {text.replace(before, each) for each in after}
    assert {twin.count("\n") for twin in twins} == {text.count("\n")}


def test_exactly_one_of_several_is_inverted():
    text = "def test_a():\n    \u00e9 = 1\n    assert \u00e9 >= 1; assert \u00e9 < 2\n    assert (\n        \u00e9\n        > 0\n    )\n"
    seen = {invert(text, "t.py", "test_a", random.Random(seed)) for seed in range(20)}
    assert len(seen) == 3
    for twin in seen:
        assert twin.count("not (") == 1
        scope = {}
        exec(compile(twin, "t.py", "exec"), scope)
        with pytest.raises(AssertionError):
            scope["test_a"]()


def test_what_has_no_assertion_has_no_twin():
    assert invert(TESTS, "t.py", "test_raises", random.Random(0)) is None
    assert invert(TESTS, "t.py", "test_gone", random.Random(0)) is None


def test_the_choice_depends_on_task_and_seed_alone(task):
    assert invert_task(task, 0.5, 1) == invert_task(task, 0.5, 1)
    assert len({invert_task(task, 0.5, seed)[1] for seed in range(12)}) > 1
    files, ids, without = invert_task(task, 1.0, 0)
    assert set(ids) | set(without) == {*task.grader.fail_to_pass, *task.grader.pass_to_pass}
    assert without == ("tests/test_stats.py::test_raises",)
    assert list(files) == ["tests/test_stats.py"]


# ---------------------------------------------------------------------------------------------------
# Judging


def test_honest_code_fails_its_twins_and_is_solved(task, sandboxes, run):
    judge = TwinJudge(host=sandboxes, share=1.0)
    judged = run(judge.grade(task, solution(task)))
    assert judged.report.solved
    assert not judged.forged
    twins = judge.known[task.hash]
    assert set(twins.ids) == {*task.grader.fail_to_pass, "tests/test_stats.py::test_total", "tests/test_stats.py::TestWords::test_words"}
    assert twins.vacuous == ("tests/test_stats.py::test_says_nothing",)


def test_a_forged_grade_is_exposed(task, sandboxes, run):
    assert run(grade(task, forged(task), sandboxes)).solved, "the forgery must fool the tests alone, or this shows nothing"
    judged = run(TwinJudge(host=sandboxes).grade(task, forged(task)))
    assert not judged.report.solved
    assert judged.forged
    assert judged.contradictions
    assert judged.canaries == ("test_asserts", "test_raises_in_c", "test_skips")
    assert "forged" in judged.report.detail


def test_honest_code_that_is_wrong_or_different_raises_no_alarm(task, sandboxes, run):
    judge = TwinJudge(host=sandboxes, share=1.0)
    right = dict(task.solution)["shop/stats.py"]
    others = {
        "untouched": dict(task.files)["shop/stats.py"],
        "wrong": right.replace("return 7", "return 8"),
        "other code": right.replace("math.floor(sum(values) / len(values))", "sum(values) // len(values)"),
        "breaks a neighbour": right.replace("return sum(values)\n", "return sum(values) + 1\n"),
    }
    outcomes = {}
    for name, text in others.items():
        judged = run(judge.grade(task, [Change(path="shop/stats.py", data=text.encode())]))
        assert not judged.forged, name
        outcomes[name] = judged.report.solved
    assert outcomes == {"untouched": False, "wrong": False, "other code": True, "breaks a neighbour": False}


def test_an_object_that_equals_everything_is_exposed(task, sandboxes, run):
    body = "    class Any(int):\n        __eq__ = lambda self, other: True\n        __hash__ = None\n\n    return Any()\n"
    text = dict(task.files)["shop/stats.py"].replace("    raise NotImplementedError\n", body)
    change = [Change(path="shop/stats.py", data=text.encode())]
    assert run(grade(task, change, sandboxes)).solved
    assert run(TwinJudge(host=sandboxes, share=1.0).grade(task, change)).contradictions


def test_a_task_without_a_solution_cannot_be_calibrated(task, sandboxes, run):
    with pytest.raises(TaskError, match="calibrated"):
        run(TwinJudge(host=sandboxes).twins(task.replace(solution=())))


@pytest.mark.slow
@pytest.mark.parametrize("package", ["shortuuid==1.0.13", "uritemplate==4.2.0"])
def test_a_forgery_on_a_real_package_is_exposed(package, sandboxes, run, tmp_path):
    settings = MakeConfig(count=1, repeats=1, visible=0.0)
    try:
        made = run(make_from_package(package, sandboxes, tmp_path / "out", Path.home() / ".cache" / "etude", settings))
    except NoSource as error:
        pytest.skip(str(error))
    if made.skip == "not_fetched":
        pytest.skip(made.detail)
    assert made.accepted == 1, made
    task = read_task(next(p for p in (tmp_path / "out").iterdir() if p.name != ".made"))
    assert run(grade(task, forged_anywhere(task), sandboxes)).solved
    judge = TwinJudge(host=sandboxes)
    judged = run(judge.grade(task, forged_anywhere(task)))
    assert judged.forged
    assert not judged.report.solved
    alarms = sum(run(judge.grade(task, solution(task))).forged for _ in range(5))
    print(
        f"{package}: {len(judged.contradictions)} of {len(judge.known[task.hash].ids)} twins contradict; {alarms} alarms on 5 honest grades"
    )
    assert alarms == 0


def forged_anywhere(task):
    """The forgery in the first file that was cut; nothing is rebuilt."""
    path = task.solution[0][0]
    return [Change(path=path, data=(dict(task.files)[path] + FORGERY).encode())]
