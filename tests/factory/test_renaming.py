"""Renamed texts hang together, know nothing of the old names, and never meet the numbers that evaluation keeps for itself."""

from __future__ import annotations

import ast
import random
import re

import pytest

from etude.factory.renaming import HELD_TEXTS, renaming
from etude.tasks.katas.family import literal
from etude.tasks.katas.package import FAMILIES, make_package

PACKAGES = [make_package(seed, sorted(FAMILIES), split="pretrain") for seed in range(12)]


@pytest.mark.parametrize("inside", [0.0, 1.0])
def test_a_renamed_package_is_python_and_keeps_no_old_name(inside):
    for number, package in enumerate(PACKAGES):
        rename = renaming(package, random.Random(number), inside=inside)
        for path, text in package.files.items():
            renamed = rename(text)
            if path.endswith(".py"):
                compile(renamed, path, "exec")
            assert not re.search(rf"\b(?:from|import) {package.name}\b", renamed)


def test_arguments_and_numbers_move_together():
    for number, package in enumerate(PACKAGES):
        rename = renaming(package, random.Random(number), inside=1.0)
        for kata in package.functions:
            if kata.is_method:
                continue
            old = kata.signature.partition("(")[2].rstrip(")").split(", ")
            new = re.search(r"\((.*?)\):", rename(kata.source))[1].split(", ")
            assert len(new) == len(old)
            assert not set(new) & set(old)
            body = rename(kata.correct_body)
            for a, b in zip(old, new, strict=True):
                used = len(re.findall(rf"(?<![\w\\]){a}(?!\w)", kata.correct_body))
                assert len(re.findall(rf"\b{b}\b", body)) == used


def test_numbers_of_two_digits_become_three_and_stay_neighbours_or_become_one():
    seen = set()
    for seed in range(12):
        rename = renaming(PACKAGES[0], random.Random(seed), inside=1.0)
        shifted = rename("from 11..26, at least 40: > 39, by 92. 5 0.25 x12 123")
        numbers = [int(n) for n in re.findall(r"(?<![\w.])\d+(?!\w|\.\d)", shifted.replace("..", " "))]
        by = numbers[0] - 11
        if by > 0:
            assert numbers == [11 + by, 26 + by, 40 + by, 39 + by, 92 + by, 5, 123]
            assert 100 <= by < 900
        else:
            assert all(new in (old, old % 10) for old, new in zip([11, 26, 40, 39, 92], numbers))
            held = {v for k in PACKAGES[0].functions for a in FAMILIES[k.family].consts.values() if not a.shared for v in a.held}
            assert not {new for old, new in zip([11, 26, 40, 39, 92], numbers) if new != old} & held
        assert shifted.endswith("5 0.25 x12 123")
        seen.add(by > 0)
    assert seen == {True, False}


def test_text_constants_keep_their_length_and_are_never_those_of_evaluation():
    changed = 0
    for number, package in enumerate(PACKAGES):
        rename = renaming(package, random.Random(number), inside=1.0)
        for drawn, _ in package.drawn.values():
            for value in drawn.constants.values():
                if isinstance(value, str) and value:
                    new = ast.literal_eval(rename(literal(value)))
                    assert len(new) == len(value)
                    assert new not in HELD_TEXTS
                    assert ast.literal_eval(rename(repr(value))) == new
                    changed += new != value
    assert changed > 10


def test_classes_and_their_attributes_get_other_names():
    methods = 0
    for number, package in enumerate(PACKAGES):
        rename = renaming(package, random.Random(number), inside=1.0)
        for drawn, _ in package.drawn.values():
            if drawn.class_name:
                text = rename(package.function(f"{drawn.class_name}.{drawn.name}").source)
                assert not re.search(rf"\b{drawn.class_name}\b|self\.{drawn.words['n']}\b", text)
                compile(text, "class", "exec")
                methods += 1
    assert methods


def test_plain_renaming_is_not_changed_by_what_the_deeper_one_draws():
    """Shards of the first phases must not depend on whether later ones exist."""
    rng, same = random.Random(5), random.Random(5)
    renaming(PACKAGES[0], rng)
    renaming(PACKAGES[0], same, inside=0.0)
    assert rng.random() == same.random()
