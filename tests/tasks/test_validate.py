"""The validator: good candidates pass, and each way of being bad is rejected with its reason."""

from __future__ import annotations

import pytest

from etude.errors import TaskError
from etude.tasks.deletion import delete
from etude.tasks.katas import make_package
from etude.tasks.source import kata_of, make_task
from etude.tasks.validate import Bench, Candidate, Funnel, Reject, validate_package, validate_task, validate_tasks


def candidate(files, name="mean", **more):
    return Candidate(id=name, deletion=delete(files, "shop/stats.py", name), **more)


def verdict(run, host, files, case, **more):
    return run(validate_package(host, files, [case], repeats=2, **more))[0]


def test_a_kata_passes(host, run):
    package = make_package(4, target=("dedupe", 9))
    kata = package.target
    path, text, hidden_ids = package.hidden(kata)
    whole = package.files[kata.path]
    case = Candidate(
        id="kata",
        deletion=delete(package.files, kata.path, kata.qualname),
        hidden={path: text},
        targets=(*package.test_ids(kata), *hidden_ids),
        wrong=tuple(whole.replace(kata.source, kata.with_body(w)) for w in kata.wrong_bodies),
    )
    funnel = Funnel()
    found = verdict(run, host, package.files, case, funnel=funnel)
    assert found.accepted, found
    assert set(found.fail_to_pass) == set(case.targets)
    assert set(found.pass_to_pass) == {i for k in package.functions if k is not kata for i in package.test_ids(k)}
    assert funnel.as_dict() == {"accepted": 1}


def test_targets_are_found_when_not_given(host, run, shop):
    found = verdict(run, host, shop, candidate(shop))
    assert found.fail_to_pass == ("tests/test_stats.py::test_mean",)
    assert found.pass_to_pass == ("tests/test_stats.py::test_total", "tests/test_stats.py::test_words")


def test_a_red_suite(host, run, shop):
    shop["tests/test_stats.py"] += "\n\ndef test_no():\n    assert False\n"
    assert verdict(run, host, shop, candidate(shop)).reject is Reject.BASELINE_RED
    shop["tests/test_stats.py"] = "def broken(:\n"
    assert verdict(run, host, shop, candidate(shop)).reject is Reject.BASELINE_RED
    del shop["tests/test_stats.py"]
    assert verdict(run, host, shop, candidate(shop)).detail == "no test ran"


def test_a_flaky_suite(host, run, shop):
    shop["tests/test_stats.py"] += (
        "\n\nimport pathlib, pytest\n\n\ndef test_sometimes():\n    mark = pathlib.Path('mark')\n"
        "    if mark.exists():\n        pytest.skip('later')\n    mark.write_text('')\n"
    )
    assert verdict(run, host, shop, candidate(shop)).reject is Reject.FLAKY


def test_a_copy_left_behind(host, run, shop):
    shop["docs/old.md"] = shop["shop/stats.py"]
    found = verdict(run, host, shop, candidate(shop))
    assert found.reject is Reject.LEAK
    assert "docs/old.md" in found.detail


def test_targets_that_pass_and_others_that_fail(host, run, shop):
    tests = "tests/test_stats.py::"
    assert verdict(run, host, shop, candidate(shop, targets=(tests + "test_mean", tests + "test_total"))).reject is Reject.TARGETS_PASS
    shop["shop/stats.py"] = shop["shop/stats.py"].replace("return sum(values)\n", "return mean(values) * 0 + sum(values)\n", 1)
    assert verdict(run, host, shop, candidate(shop, targets=(tests + "test_mean",))).reject is Reject.OTHERS_FAIL


def test_nothing_fails(host, run, shop):
    shop["tests/test_stats.py"] = shop["tests/test_stats.py"].replace("stats.mean([1, 4])", "2").replace("stats.mean([])", "7")
    assert verdict(run, host, shop, candidate(shop)).reject is Reject.NO_TARGETS


def test_a_target_that_does_not_exist(host, run, shop):
    found = verdict(run, host, shop, candidate(shop, targets=("tests/test_stats.py::test_gone",)))
    assert found.reject is Reject.RESTORE_FAILS


def test_a_wrong_body_that_passes(host, run, shop):
    text = shop["shop/stats.py"]
    survives = text.replace("math.floor(sum(values) / len(values))", "sum(values) // 2")
    caught = text.replace("return 7", "return 8")
    found = verdict(run, host, shop, candidate(shop, wrong=(caught, survives)))
    assert found.reject is Reject.WRONG_PASSES
    assert "wrong body 1" in found.detail
    with pytest.raises(TaskError, match="is the right one"):
        verdict(run, host, shop, candidate(shop, wrong=(text,)))


def test_a_wrong_body_must_fail_hidden_tests_too(host, run, shop):
    wrong = shop["shop/stats.py"].replace("return 7", "return 8")
    weak = {"tests/test_hidden.py": "from shop import stats\n\n\ndef test_h():\n    assert stats.mean([2]) == 2\n"}
    assert verdict(run, host, shop, candidate(shop, wrong=(wrong,), hidden=weak)).reject is Reject.WRONG_PASSES
    assert verdict(run, host, shop, candidate(shop, wrong=(wrong,), hidden=weak, hidden_catches_wrong=False)).accepted


def test_duplicates_by_code_not_by_name(host, run, shop):
    seen, funnel = set(), Funnel()
    assert verdict(run, host, shop, candidate(shop), seen=seen, funnel=funnel).accepted
    renamed = {p: t.replace("values", "numbers").replace("result", "got") for p, t in shop.items()}
    assert verdict(run, host, renamed, candidate(renamed), seen=seen, funnel=funnel).reject is Reject.DUPLICATE
    assert funnel.as_dict() == {"accepted": 1, "duplicate": 1}
    assert funnel.total == 2


class Counting:
    """Counts the sandboxes that a host makes."""

    def __init__(self, host):
        self.host, self.made = host, 0

    async def add_image(self, files):
        return await self.host.add_image(files)

    async def create(self, image, **options):
        self.made += 1
        return await self.host.create(image, **options)


def test_one_sandbox_serves_all_candidates_of_a_package(host, run, shop):
    counting = Counting(host)
    cases = [candidate(shop, name) for name in ("mean", "total", "words")]
    found = run(validate_package(counting, shop, cases, repeats=1))
    assert [v.accepted for v in found] == [True, True, True]
    assert counting.made == 1


def test_a_bench_sees_every_edit_even_of_the_same_size(host, run, shop):
    async def flip():
        ids = ["tests/test_stats.py::test_total"]
        wrong = {**shop, "shop/stats.py": shop["shop/stats.py"].replace("return sum(values)\n", "return max(values)\n", 1)}
        out = []
        async with Bench(host, shop) as bench:
            for files in (shop, wrong, shop, wrong):
                out.append((await bench.run_tests(files, ids)).solved)
            gone = {p: t for p, t in shop.items() if p != "shop/stats.py"}
            out.append((await bench.run_tests(gone, ids)).solved)
        return out

    assert run(flip()) == [True, False, True, False, False]


# --- stored tasks


def test_katas_as_stored_tasks_pass_and_a_second_copy_is_a_duplicate(host, run):
    tasks = [make_task(2), make_task(3, "unseen"), make_task(4, level="definition"), make_task(2)]
    funnel = run(validate_tasks(tasks, host))
    assert funnel.as_dict() == {"accepted": 3, "duplicate": 1}


def test_bad_stored_tasks_are_rejected_with_their_reason(host, run):
    task = make_task(2)
    path, text = task.solution[0]
    grader = task.grader
    bad = {
        Reject.LEAK: task.replace(files=(*task.files, ("notes.md", text))),
        Reject.TARGETS_PASS: task.replace(grader=grader.replace(fail_to_pass=(*grader.fail_to_pass, grader.pass_to_pass[0]))),
        Reject.OTHERS_FAIL: task.replace(grader=grader.replace(pass_to_pass=(*grader.pass_to_pass, "tests/test_none.py::test_a"))),
        Reject.RESTORE_FAILS: task.replace(solution=()),
        Reject.UNPARSABLE: task.replace(solution=((path, "def broken(:\n"),)),
    }
    for reason, case in bad.items():
        assert run(validate_task(case, host)).reject is reason


def test_a_solution_that_does_not_pass_is_rejected(host, run):
    task = make_task(2)
    package, kata = kata_of(task)
    wrong = package.files[kata.path].replace(kata.source, kata.with_body(kata.wrong_bodies[0]))
    found = run(validate_task(task.replace(solution=((kata.path, wrong),)), host))
    assert found.reject is Reject.RESTORE_FAILS
