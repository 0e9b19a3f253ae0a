"""Katas: real packages, right and wrong bodies, disjoint splits. Everything here runs in this process."""

from __future__ import annotations

import statistics
import types

import pytest

from etude.errors import TaskError
from etude.tasks.katas import FAMILIES, TRAIN_FAMILIES, UNSEEN_FAMILIES, make_package
from etude.tasks.katas import family as fam


def suite_outcomes(files, hidden=None):
    """Outcome of every test function, with the modules of the package executed in this process."""
    modules = {}

    def load(name):
        if name not in modules:
            path = name.replace(".", "/")
            text = files.get(f"{path}.py", files.get(f"{path}/__init__.py"))
            module = modules[name] = types.ModuleType(name)
            module.__dict__["__builtins__"] = {**__builtins__, "__import__": importer}
            exec(compile(text, path, "exec"), module.__dict__)
        return modules[name]

    def importer(name, globals=None, locals=None, fromlist=(), level=0):
        if f"{name.split('.')[0]}/__init__.py" not in files:
            return __import__(name, globals, locals, fromlist, level)
        module = load(name)
        for item in fromlist or ():
            if f"{name}/{item}.py" in files:
                setattr(module, item, load(f"{name}.{item}"))
        return module

    out = {}
    for path, text in {**files, **(hidden or {})}.items():
        if not path.startswith("tests/"):
            continue
        scope = {"__builtins__": {**__builtins__, "__import__": importer}}
        exec(compile(text, path, "exec"), scope)
        for name, test in scope.items():
            if name.startswith("test_"):
                try:
                    test()
                    out[f"{path}::{name}"] = "passed"
                except (Exception, pytest.fail.Exception) as error:
                    out[f"{path}::{name}"] = type(error).__name__
    return out


def every_family():
    return [(name, "train" if name in TRAIN_FAMILIES else "unseen") for name in FAMILIES]


def test_there_are_enough_families_and_each_has_wrong_bodies():
    assert len(TRAIN_FAMILIES) >= 36
    assert len(UNSEEN_FAMILIES) >= 8
    assert not set(TRAIN_FAMILIES) & set(UNSEEN_FAMILIES)
    for family in FAMILIES.values():
        assert len(family.wrong) >= 3, family.name
        assert len(set(family.wrong) | set(family.body)) == len(family.wrong) + len(family.body), family.name


def test_the_unseen_families_are_spread_over_the_kinds():
    kinds = {f.kind for f in FAMILIES.values()}
    assert {FAMILIES[name].kind for name in UNSEEN_FAMILIES} == kinds


def test_unseen_families_are_neither_shorter_nor_longer():
    def lengths(names):
        bodies = [make_package(i, split="pretrain", target=(n, i)).target.correct_body for n in names for i in range(3)]
        return statistics.mean(map(len, bodies)), statistics.mean(b.count("\n") + 1 for b in bodies)

    characters, lines = zip(lengths(TRAIN_FAMILIES), lengths(UNSEEN_FAMILIES), strict=True)
    assert 0.75 < characters[1] / characters[0] < 1.33
    assert 0.75 < lines[1] / lines[0] < 1.33


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not():
    first, again, other = make_package(5), make_package(5), make_package(6)
    assert first.files == again.files
    assert first.hidden(first.functions[0]) == again.hidden(again.functions[0])
    assert first.files != other.files


def test_a_package_is_small_and_formatted():
    for seed in range(30):
        package = make_package(seed)
        modules = {k.module for k in package.functions}
        assert len(modules) == 3
        assert 6 <= len(package.functions) <= 9
        assert {p for p in package.files if p.startswith("tests/")} == {f"tests/test_{m}.py" for m in modules}
        for path, text in package.files.items():
            assert text.endswith("\n")
            assert len(text) <= 1800, (path, len(text))
            assert "$" not in text
        for kata in package.functions:
            assert f'"""{kata.doc}"""' in kata.source
            assert 1 <= kata.correct_body.count("\n") + 1 <= 8
            assert kata.correct_body in package.files[kata.path]


@pytest.mark.parametrize(("name", "split"), every_family())
def test_right_bodies_pass_and_wrong_bodies_fail_visible_and_hidden_tests(name, split):
    for index in range(2):
        package = make_package(index, split=split, target=(name, index))
        kata = package.target
        path, text, hidden_ids = package.hidden(kata)
        outcomes = suite_outcomes(package.files, {path: text})
        assert set(outcomes.values()) == {"passed"}
        assert set(hidden_ids) | set(package.test_ids(kata)) <= set(outcomes)
        for wrong in kata.wrong_bodies:
            files = {**package.files, kata.path: package.files[kata.path].replace(kata.source, kata.with_body(wrong))}
            assert files[kata.path] != package.files[kata.path]
            outcomes = suite_outcomes(files, {path: text})
            assert any(outcomes[i] != "passed" for i in package.test_ids(kata)), wrong
            assert any(outcomes[i] != "passed" for i in hidden_ids), wrong


@pytest.mark.parametrize(("name", "split"), every_family())
def test_every_test_of_a_function_needs_it(name, split):
    package = make_package(11, split=split, target=(name, 1))
    kata = package.target
    pad = " " * (len(kata.correct_body) - len(kata.correct_body.lstrip()))
    stub = package.files[kata.path].replace(kata.source, kata.with_body(pad + "raise NotImplementedError"))
    path, text, hidden_ids = package.hidden(kata)
    outcomes = suite_outcomes({**package.files, kata.path: stub}, {path: text})
    touched = {i for k in (kata, *package.callers(kata)) for i in package.test_ids(k)} | set(hidden_ids)
    assert {i for i, outcome in outcomes.items() if outcome != "passed"} == touched


def test_hidden_cases_differ_from_the_visible_ones():
    for seed in range(20):
        package = make_package(seed, target=(TRAIN_FAMILIES[seed], 0))
        _, text, _ = package.hidden(package.target)
        hidden = {line for line in text.splitlines() if line.lstrip().startswith("assert")}
        visible = {line for line in package.files[f"tests/test_{package.target.module}.py"].splitlines() if line in hidden}
        assert len(hidden) >= 4 if not package.target.is_method else len(hidden) >= 3
        assert len(visible) <= 1  # only where one input tells a wrong body apart, such as []


def test_a_table_of_the_visible_cases_fails_the_hidden_tests():
    for name in TRAIN_FAMILIES:
        package = make_package(3, target=(name, 2))
        kata = package.target
        if kata.is_method:
            continue
        shown = {repr(c.arguments): c.expected for c in kata.visible if not isinstance(c.expected, fam.Raised)}
        args = kata.signature.partition("(")[2].rstrip(")")
        for default in [*map(repr, shown.values()), "None"]:
            body = f"    return {shown!r}.get(repr(({args},)), {default})"
            files = {**package.files, kata.path: package.files[kata.path].replace(kata.source, kata.with_body(body))}
            path, text, hidden_ids = package.hidden(kata)
            outcomes = suite_outcomes(files, {path: text})
            assert any(outcomes[i] != "passed" for i in hidden_ids), (name, default)


def test_a_function_that_calls_another_comes_with_an_import_and_is_listed_as_its_caller():
    package = make_package(1, target=("rows_each", 3))
    caller = package.target
    callee = next(k for k in package.functions if caller in package.callers(k))
    assert caller.calls == f"from {package.name}.{callee.module} import {callee.name}"
    assert caller.calls in package.files[caller.path]
    assert FAMILIES[callee.family].sig == FAMILIES[caller.family].calls


def test_train_packages_hold_train_families_only():
    for seed in range(60):
        assert not {k.family for k in make_package(seed).functions} & set(UNSEEN_FAMILIES)
    unseen = make_package(1, split="unseen", target=("fee", 0))
    assert [k.family for k in unseen.functions if k.family in UNSEEN_FAMILIES] == ["fee"]


def test_constants_of_the_parts_are_disjoint_where_the_axis_has_room():
    shared = {(f.name, axis) for f in FAMILIES.values() for axis, values in f.consts.items() if values.shared}
    assert {name for name, _ in shared} <= {"windows", "stamp", "top", "pad", "depth", "history", "rle", "all_in", "part_at"}
    for family in FAMILIES.values():
        assert any(not values.shared for values in family.consts.values()), family.name


def test_names_of_the_parts_are_disjoint():
    for pools in (fam.PACKAGES, fam.MODULES, fam.NOUNS, fam.CLASSES, fam.ATTRIBUTES, *fam.ARGUMENTS.values()):
        assert not set(pools["train"]) & set(pools["held"])
    locals_ = {n for names in fam.LOCALS.values() for n in names}
    assert not locals_ & {n for pools in fam.ARGUMENTS.values() for names in pools.values() for n in names}
    train = {k.name for seed in range(80) for k in make_package(seed).functions if not k.is_method}
    held = {k.name for seed in range(80) for k in make_package(seed, split="heldout").functions if not k.is_method}
    assert not train & held


def test_every_number_of_a_family_is_another_function():
    """So that counting gives tasks without duplicates: each constant stands in every form of the body."""
    names = {key: key for key in (*fam.LOCALS, "n", "g")}
    for family in FAMILIES.values():
        for part, least in (("train", 100), ("held", 10)):
            count = fam.size(family, part)
            assert count >= least, family.name
            for body in family.body:
                texts = set()
                for index in range(count):
                    constants = fam.with_neighbours(fam.decode(family, part, index))
                    texts.add(
                        fam.fill(body, {**names, **{a: a for a, _ in family.args}, **{k: fam.literal(v) for k, v in constants.items()}})
                    )
                assert len(texts) == count, (family.name, body)


def test_bad_requests_name_what_is_known():
    with pytest.raises(TaskError, match="did you mean 'clip_sum'"):
        make_package(1, ["clip_sun"])
    with pytest.raises(TaskError, match="unknown split 'held'"):
        make_package(1, split="held")
    with pytest.raises(TaskError, match="has no function"):
        make_package(1).function("nothing_like_it")
