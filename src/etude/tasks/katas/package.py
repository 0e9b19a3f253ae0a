"""`make_package(seed)`: a small Python package of three modules with 2 or 3 functions each, and tests of each.

Invariants (checked over hundreds of packages by tests/tasks/test_katas_slow.py):
* the suite is green; every wrong body of a function fails at least one visible and one hidden test;
* every test of a function calls it, and every test of a function that calls another one calls both;
* a package holds each family at most once, and train packages hold train families only;
* the same arguments give the same bytes.

Cases are drawn until every wrong body is told apart, by running the checked twins of `family.callable_for`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from etude.errors import TaskError, nearest
from etude.records import seed_for
from etude.tasks.katas import calls, checks, lists, numbers, parse, state, tables, text
from etude.tasks.katas import family as fam
from etude.tasks.katas.family import Drawn, Family, Gen, Raised, callable_for, fill, indent, literal, outcome
from etude.tasks.katas.names import Names

VERSION = "1"
"""Part of every seed: raise it when anything here changes what a seed gives."""

FAMILIES: dict[str, Family] = {f.name: f for module in (numbers, lists, text, parse, tables, state, checks, calls) for f in module.FAMILIES}
UNSEEN_FAMILIES: tuple[str, ...] = (
    "fee",
    "mean_kept",
    "ticks",
    "pad",
    "split_low",
    "camel",
    "ends",
    "part_at",
    "best_key",
    "account",
    "gap_ok",
    "inside",
    "best_row",
)
TRAIN_FAMILIES: tuple[str, ...] = tuple(name for name in FAMILIES if name not in UNSEEN_FAMILIES)

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"

[tool.pytest.ini_options]
addopts = "-qq --tb=line --no-header --color=no -rN -p no:cacheprovider"
console_output_style = "classic"
pythonpath = ["."]
testpaths = ["tests"]
"""
"""-qq leaves the line with the elapsed time away, so that the same code gives the same output."""

SPLITS = ("train", "heldout", "unseen", "pretrain")
"""train: train families, train constants and names. heldout: train families, held constants and names. unseen: unseen
families, held constants and names. pretrain: every family with train constants and names, for a policy that should
know how to write all of them a little, before the train families alone are practised."""
_MAX_DRAWS = 400
_MAX_ATTEMPTS = 30
"""A function that calls another cannot always be told from its wrong bodies (rounding up to 20 does nothing to multiples of
40); the package is then drawn anew."""
_PATIENCE = 40
"""Draws after which a hidden case may repeat a visible one, where only that input tells a wrong body apart (often [])."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call and what it gives."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, kw_only=True)
class Kata:
    """One function of a package, or one method of a small class."""

    family: str
    index: int
    """Number of its constants, see `family.decode`."""
    name: str
    qualname: str
    module: str
    """Module name without the package, e.g. "ops"."""
    path: str
    signature: str
    """E.g. "clip_sum(xs)"."""
    doc: str
    source: str
    """The whole definition: the function, or the class with its method."""
    correct_body: str
    """Indented as it stands in the file, without a final newline."""
    wrong_bodies: tuple[str, ...]
    calls: str = ""
    """Import line of the function it calls, or empty."""
    visible: tuple[Case, ...] = ()

    @property
    def is_method(self) -> bool:
        return "." in self.qualname

    def with_body(self, body: str) -> str:
        """The definition with another body."""
        head = self.source[: len(self.source) - len(self.correct_body)]
        return head + body


@dataclass(frozen=True, kw_only=True)
class Package:
    seed: int
    split: str
    name: str
    functions: tuple[Kata, ...]
    files: Mapping[str, str]
    target: Kata | None
    """The function asked for by `make_package(target=...)`."""
    drawn: Mapping[str, tuple[Drawn, Callable[..., Any]]]
    """Qualified name -> the choices behind the function, and its checked twin."""

    def function(self, qualname: str) -> Kata:
        found = next((f for f in self.functions if f.qualname == qualname), None)
        if found is None:
            raise TaskError(f"package {self.name} has no function {qualname!r}; {nearest(qualname, [f.qualname for f in self.functions])}")
        return found

    def callers(self, kata: Kata) -> tuple[Kata, ...]:
        """Functions whose tests run `kata` too."""
        line = f"from {self.name}.{kata.module} import {kata.name}"
        return tuple(f for f in self.functions if f.calls == line)

    def test_ids(self, kata: Kata) -> tuple[str, ...]:
        """Ids of the visible tests of one function."""
        return tuple(f"tests/test_{kata.module}.py::{name}" for name, _ in _split_cases(kata.name, kata.visible))

    def hidden(self, kata: Kata) -> tuple[str, str, tuple[str, ...]]:
        """(path, text, ids) of a test file with other cases than the visible ones."""
        drawn, g = self.drawn[kata.qualname]
        rng = random.Random(seed_for("kata-hidden", VERSION, self.seed, kata.family, kata.index))
        shown = {repr(c.arguments) for c in kata.visible}
        cases = _choose(drawn, g, rng, count=5, avoid=shown)
        path = f"tests/test_{kata.module}_hidden.py"
        named = _split_cases(kata.name, cases)
        return path, _test_file(self.name, kata.module, [(kata, named)]), tuple(f"{path}::{name}" for name, _ in named)


def make_package(
    seed: int, families: Sequence[str] | None = None, *, split: str = "train", target: tuple[str, int] | None = None
) -> Package:
    """The package of a seed. `families` are the ones its functions come from (all train families by default);
    `target` asks for one function: (family, number of its constants).

    Example:
        package = make_package(7, target=("clip_sum", 12))
        package.files["shop/ops.py"], package.target.wrong_bodies
    """
    part = part_of(split)
    pool = list(families) if families is not None else list(FAMILIES if split == "pretrain" else TRAIN_FAMILIES)
    for name in [*pool, *([target[0]] if target else [])]:
        if name not in FAMILIES:
            raise TaskError(f"no kata family {name!r}; {nearest(name, FAMILIES)}")
    key = ("kata-package", VERSION, seed, split, pool if families is not None else None, target)
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return _make(random.Random(seed_for(*key, attempt)), seed, split, part, pool, target)
        except _Indistinct as error:
            trouble = error
    raise TaskError(f"no package for seed {seed}, split {split!r}, target {target}: {trouble}")


def _make(rng: random.Random, seed: int, split: str, part: str, pool: list[str], target: tuple[str, int] | None) -> Package:
    names = Names(rng, split)
    package = names.draw(fam.PACKAGES[part])
    modules = names.sample(fam.MODULES[part], 3, taken={package})
    katas: list[Kata] = []
    drawn: dict[str, tuple[Drawn, Callable[..., Any]]] = {}
    aim: Kata | None = None
    for module, layout in zip(modules, _layout(rng, pool, target), strict=True):
        for name, is_target in layout:
            index = target[1] if is_target and target else rng.randrange(fam.size(FAMILIES[name], part))
            kata, choice, g = _draw(rng, names, FAMILIES[name], part, index, package, module, katas, drawn)
            katas.append(kata)
            drawn[kata.qualname] = (choice, g)
            aim = kata if is_target else aim
    files = _files(package, modules, katas)
    return Package(seed=seed, split=split, name=package, functions=tuple(katas), files=files, target=aim, drawn=drawn)


def part_of(split: str) -> str:
    """Which part of constants and names a split draws from."""
    if split not in SPLITS:
        raise TaskError(f"unknown split {split!r}; {nearest(split, SPLITS)}")
    return "train" if split in ("train", "pretrain") else "held"


def families_of(split: str) -> tuple[str, ...]:
    """Families a task of this split may ask for."""
    part_of(split)
    return {"unseen": UNSEEN_FAMILIES, "pretrain": tuple(FAMILIES)}.get(split, TRAIN_FAMILIES)


# ---------------------------------------------------------------------------------------------------
# Which families go where


def _layout(rng: random.Random, pool: list[str], target: tuple[str, int] | None) -> list[list[tuple[str, bool]]]:
    """Per module, (family, is the target). A family that calls another stands in a later module than its callee."""
    slots: list[list[tuple[str, bool]]] = [[], [], []]
    aim = target[0] if target else ""
    pair = _calling_pair(rng, pool, aim)
    if pair is not None:
        last = rng.randint(1, 2)
        slots[rng.randrange(last)].append((pair[0], pair[0] == aim))
        slots[last].append((pair[1], pair[1] == aim))
    if aim and (pair is None or aim not in pair):
        slots[rng.randrange(3)].append((aim, True))
    used = {name for slot in slots for name, _ in slot}
    plain = [n for n in pool if n not in used and not FAMILIES[n].calls]
    rest = [n for n in TRAIN_FAMILIES if n not in used and n not in plain and not FAMILIES[n].calls]
    rng.shuffle(plain)
    rng.shuffle(rest)
    plain = rest + plain
    for slot in slots:
        for _ in range((3 if rng.random() < 0.35 else 2) - len(slot)):
            slot.append((plain.pop(), False))
        rng.shuffle(slot)
    return slots


def _calling_pair(rng: random.Random, pool: list[str], aim: str) -> tuple[str, str] | None:
    """(callee, caller), always when the target calls another function and else for three packages in ten."""
    sig = FAMILIES[aim].sig if aim else ""
    if aim and FAMILIES[aim].calls:
        caller = aim
    else:
        callers = [n for n in pool if FAMILIES[n].calls and (not sig or FAMILIES[n].calls == sig)]
        if rng.random() >= 0.3 or not callers:
            return None
        caller = rng.choice(callers)
    wanted = FAMILIES[caller].calls
    if sig == wanted:
        return aim, caller
    callees = [n for n in pool if FAMILIES[n].sig == wanted] or [n for n in TRAIN_FAMILIES if FAMILIES[n].sig == wanted]
    return rng.choice(callees), caller


# ---------------------------------------------------------------------------------------------------
# One function


def _draw(
    rng: random.Random,
    names: Names,
    family: Family,
    part: str,
    index: int,
    package: str,
    module: str,
    katas: list[Kata],
    drawn: dict[str, tuple[Drawn, Callable[..., Any]]],
) -> tuple[Kata, Drawn, Callable[..., Any]]:
    constants = fam.with_neighbours(fam.decode(family, part, index))
    words = {k: literal(v) for k, v in constants.items()} | _variables(rng, names, family, part)
    taken = {k.name for k in katas} | set(words.values())
    name = _function_name(rng, names, family, part, taken)
    line = ""
    if family.calls:
        partner = next(k for k in katas if FAMILIES[k.family].sig == family.calls and k.module != module)
        words["g"] = partner.name
        line = f"from {package}.{partner.module} import {partner.name}"
        constants["g"] = drawn[partner.qualname][1]
    class_name = ""
    if family.frame:
        class_name = names.draw_class(fam.CLASSES[part], {k.qualname.split(".")[0] for k in katas if k.is_method})
        words["C"] = class_name
    choice = Drawn(family=family, index=index, constants=constants, words=words, name=name, class_name=class_name)
    kata = _write(rng, choice, module, f"{package}/{module}.py", line)
    right = callable_for(family, family.body[0], constants)
    visible = _choose(choice, right, rng, count=5 if rng.random() < 0.5 else 4, avoid=set())
    return _with_cases(kata, visible), choice, right


def _variables(rng: random.Random, names: Names, family: Family, part: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for placeholder, kind in family.args:
        words[placeholder] = names.draw(fam.ARGUMENTS[kind][part], words.values())
    for placeholder, pool in fam.LOCALS.items():
        words[placeholder] = rng.choice([w for w in pool if w not in words.values()])
    words["n"] = names.draw(fam.ATTRIBUTES[part])
    return words


def _function_name(rng: random.Random, names: Names, family: Family, part: str, taken: set[str]) -> str:
    for _ in range(100):
        base = rng.choice(family.names)
        noun = names.draw(fam.NOUNS[part])
        name = base if family.frame or (part == "train" and rng.random() < 0.4) else f"{base}_{noun}"
        if name not in taken:
            return name
    raise AssertionError(f"no free name for {family.name}")


def _write(rng: random.Random, choice: Drawn, module: str, path: str, line: str) -> Kata:
    family, words, name = choice.family, choice.words, choice.name
    depth = 8 if family.frame else 4
    said = dict(words) | {k: repr(v) for k, v in choice.constants.items() if not callable(v)}
    doc = fill(rng.choice(family.docs), said)
    arguments = [words[a] for a, _ in family.args]
    body = indent(fill(rng.choice(family.body), words), depth)
    pad = " " * (depth - 4)
    own = ["self", *arguments] if family.frame else arguments
    head = f'{pad}def {name}({", ".join(own)}):\n{pad}    """{doc}"""\n'
    if family.frame:
        head = fill(family.frame, words) + "\n\n" + head
    wrong = tuple(indent(fill(w, words), depth) for w in family.wrong)
    return Kata(
        family=family.name,
        index=choice.index,
        name=name,
        qualname=f"{choice.class_name}.{name}" if family.frame else name,
        module=module,
        path=path,
        signature=f"{name}({', '.join(arguments)})",
        doc=doc,
        source=head + body,
        correct_body=body,
        wrong_bodies=wrong,
        calls=line,
    )


def _with_cases(kata: Kata, visible: tuple[Case, ...]) -> Kata:
    return Kata(**{**kata.__dict__, "visible": visible})


# ---------------------------------------------------------------------------------------------------
# Cases


class _Indistinct(Exception):
    """No cases tell every wrong body from the right one."""


def _choose(choice: Drawn, right: Callable[..., Any], rng: random.Random, *, count: int, avoid: set[str]) -> tuple[Case, ...]:
    """At least `count` calls that tell every wrong body from the right one, with at least two different outcomes."""
    family = choice.family
    wrongs = [callable_for(family, w, choice.constants) for w in family.wrong]
    gen, constants = Gen(rng), SimpleNamespace(**choice.constants)
    everything = (1 << len(wrongs)) - 1
    seen: set[str] = set()
    pool: list[_Trial] = []
    shown: list[_Trial] = []
    covered = shown_bits = 0
    for draw in range(_MAX_DRAWS):
        arguments = family.cases(gen, constants)
        key = repr(arguments)
        if key in seen:
            continue
        seen.add(key)
        expected = outcome(right, arguments)
        kills = sum(1 << i for i, w in enumerate(wrongs) if outcome(w, arguments) != expected)
        if key in avoid:
            shown.append((kills, arguments, expected))
            shown_bits |= kills
            continue
        pool.append((kills, arguments, expected))
        covered |= kills
        enough = len(pool) > count and _two_outcomes(pool)
        if enough and (covered == everything or (draw > _PATIENCE and covered | shown_bits == everything)):
            break
    needed = [p for p in shown if p[0] & ~covered] if covered != everything else []
    covered |= shown_bits
    if covered != everything or len(pool) < count or not _two_outcomes(pool):
        missed = [w for i, w in enumerate(family.wrong) if not covered >> i & 1]
        raise _Indistinct(f"family {family.name} with {dict(choice.constants)} has {len(pool)} cases and cannot tell apart {missed}")
    return _cover(pool, needed, everything, count)


_Trial: TypeAlias = tuple[int, tuple[Any, ...], Any]
"""(bits of the wrong bodies it tells apart, arguments, outcome)"""


def _two_outcomes(pool: Sequence[_Trial]) -> bool:
    return any(p[2] != pool[0][2] for p in pool)


def _cover(fresh: list[_Trial], repeated: list[_Trial], everything: int, count: int) -> tuple[Case, ...]:
    """Greedy cover of all wrong bodies, then fresh calls with outcomes not seen yet. The fresh ones alone have at least
    two outcomes, so that no table of the repeated ones with one answer for the rest fits."""
    chosen: list[_Trial] = []
    rest = [*fresh, *repeated]
    open_bits = everything
    while open_bits:
        best = max(rest, key=lambda p: (p[0] & open_bits).bit_count())
        chosen.append(best)
        rest.remove(best)
        open_bits &= ~best[0]
    rest = [p for p in rest if p not in repeated]
    new = [p for p in chosen if p not in repeated]
    while rest and (len(chosen) < count or not (new and _two_outcomes(new))):
        best = min(rest, key=lambda p: any(p[2] == c[2] for c in new))
        rest.remove(best)
        new.append(best)
        chosen.append(best)
    return tuple(Case(arguments=a, expected=e) for _, a, e in chosen)


# ---------------------------------------------------------------------------------------------------
# Files


def _split_cases(name: str, cases: Sequence[Case]) -> list[tuple[str, Sequence[Case]]]:
    """Test functions of 2 or 3 asserts each."""
    half = (len(cases) + 1) // 2
    return [(f"test_{name}", cases[:half]), (f"test_{name}_more", cases[half:])]


def _test_file(package: str, module: str, parts: Sequence[tuple[Kata, Sequence[tuple[str, Sequence[Case]]]]]) -> str:
    out: list[str] = []
    raises = False
    for kata, tests in parts:
        for test, cases in tests:
            lines = [f"def {test}():"]
            for case in cases:
                lines += _assertion(kata, module, case)
                raises = raises or isinstance(case.expected, Raised)
            out.append("\n".join(lines))
    head = ["import pytest\n"] if raises else []
    head.append(f"from {package} import {module}")
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join(out) + "\n"


def _assertion(kata: Kata, module: str, case: Case) -> list[str]:
    if kata.is_method:
        owner = kata.qualname.split(".")[0]
        values = ", ".join(map(literal, case.arguments[0]))
        return [f"    it = {module}.{owner}()", f"    assert [it.{kata.name}(x) for x in [{values}]] == {literal(case.expected)}"]
    call = f"{module}.{kata.name}({', '.join(map(literal, case.arguments))})"
    if isinstance(case.expected, Raised):
        return [f"    with pytest.raises({case.expected.name}):", f"        {call}"]
    if isinstance(case.expected, bool):
        return [f"    assert {call} is {case.expected}"]
    return [f"    assert {call} == {literal(case.expected)}"]


def _files(package: str, modules: Sequence[str], katas: Sequence[Kata]) -> dict[str, str]:
    files = {f"{package}/__init__.py": f'"""The {package} package."""\n', "pyproject.toml": _pyproject(package)}
    for module in modules:
        own = [k for k in katas if k.module == module]
        imports = [k.calls for k in own if k.calls]
        head = f'"""Helpers of the {package}: {module}."""\n'
        if imports:
            head += "\n" + "\n".join(sorted(set(imports))) + "\n"
        files[f"{package}/{module}.py"] = head + "\n\n" + "\n\n\n".join(k.source for k in own) + "\n"
        parts = [(k, _split_cases(k.name, k.visible)) for k in own]
        files[f"tests/test_{module}.py"] = _test_file(package, module, parts)
    return dict(sorted(files.items()))


@functools.lru_cache(maxsize=64)
def _pyproject(package: str) -> str:
    return PYPROJECT.format(name=package)
