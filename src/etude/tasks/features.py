"""Which code makes a feature, and how a feature of several functions and files is deleted.

A unit is a function, or a method of a class. From the tests that call each unit (`probe`): a seed unit with its tests T,
grown by every unit that no test outside of T calls. Sizes run from one function over the exclusive code of a file to
that of several files. What runs while modules are imported is no candidate: deleting it breaks more than a feature.

    for feature in propose(units, stable):  cut = cut_feature(files, feature, level)

`Cut` is for a set of units what `deletion.Deletion` is for one: the tree without it, what restores it, fingerprints.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.tasks.deletion import DeleteLevel, Deletion, Fingerprint, Function, Refusal, delete, functions

MOST_SHARE = 0.4
"""Share of the suite that a feature's tests may be: what more tests call is the package itself."""
LEAST_LINES = 4
"""Lines of a body below which a lone function is no task."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One function and who calls it."""

    path: str
    qualname: str
    node: Function
    tests: frozenset[str]
    on_import: bool

    @property
    def lines(self) -> int:
        """Of the body, docstring left out."""
        body = [n for n in self.node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        return (self.node.end_lineno or self.node.lineno) - body[0].lineno + 1 if body else 0


@dataclass(frozen=True, kw_only=True)
class Feature:
    units: tuple[tuple[str, str], ...]
    """(path, qualified name), sorted."""
    tests: frozenset[str]
    """Stable tests that call any of them."""
    lines: int

    @property
    def id(self) -> str:
        return hashlib.sha256(repr(self.units).encode()).hexdigest()[:12]

    @property
    def paths(self) -> list[str]:
        return sorted({path for path, _ in self.units})


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A feature taken out of a tree."""

    feature: Feature
    level: DeleteLevel
    files: Mapping[str, str]
    restoring: Mapping[str, str]
    parts: tuple[Deletion, ...]

    @property
    def fingerprints(self) -> list[Fingerprint]:
        return [part.fingerprint for part in self.parts]

    @property
    def key(self) -> str:
        """Equal for equal code, whatever its names."""
        return "+".join(sorted(part.fingerprint.ast_hash for part in self.parts))

    @property
    def deleted_lines(self) -> int:
        return sum(part.deleted.count("\n") for part in self.parts)


def units_of(files: Mapping[str, str], paths: Sequence[str], traced: Mapping[str, Any], stable: Sequence[str]) -> list[Unit]:
    """The units of source files with the stable tests that call them. `traced` is the answer of `probe`."""
    places = [tuple(place) for place in traced["functions"]]
    callers: dict[tuple[str, int], set[str]] = {}
    imported: set[tuple[str, int]] = set()
    kept = set(stable)
    for test, numbers in traced["by_test"].items():
        for number in numbers:
            place = places[number][:2]
            if test == "":
                imported.add(place)
            elif test in kept:
                callers.setdefault(place, set()).add(test)
    out = []
    for path in paths:
        try:
            found = functions(files[path], path)
        except Refusal:
            continue
        names = [name for name, _ in found]
        for qualname, node in found:
            place = (path, min([node.lineno, *(d.lineno for d in node.decorator_list)]))
            tests = frozenset(callers.get(place, ()))
            if tests and names.count(qualname) == 1 and not _is_stub(node):
                out.append(Unit(path=path, qualname=qualname, node=node, tests=tests, on_import=place in imported))
    return out


def _is_stub(node: Function) -> bool:
    """Nothing but a docstring, pass, or an ellipsis."""
    return all(isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in node.body)


def propose(units: Sequence[Unit], stable: Sequence[str], *, least_tests: int = 1, most: int = 60) -> list[Feature]:
    """Candidate features without repeats: single functions, exclusive code of a file, of a class, of several files."""
    limit = MOST_SHARE * len(stable)
    usable = [u for u in units if not u.on_import and not u.qualname.rpartition(".")[2].startswith("__") and len(u.tests) <= limit]
    found: dict[tuple[tuple[str, str], ...], Feature] = {}

    def add(members: Sequence[Unit]) -> None:
        tests = frozenset[str]().union(*(u.tests for u in members))
        lines = sum(u.lines for u in members)
        if least_tests <= len(tests) <= limit and lines >= LEAST_LINES:
            key = tuple(sorted((u.path, u.qualname) for u in members))
            found.setdefault(key, Feature(units=key, tests=tests, lines=lines))

    for seed in usable:
        if seed.lines >= LEAST_LINES:
            add([seed])
        inside = [u for u in usable if u.tests <= seed.tests]
        add([u for u in inside if u.path == seed.path])
        add(inside)
    for owner in sorted({(u.path, u.qualname.rpartition(".")[0]) for u in usable if "." in u.qualname}):
        add([u for u in usable if (u.path, u.qualname.rpartition(".")[0]) == owner])
    for path in sorted({u.path for u in usable}):
        add([u for u in usable if u.path == path])
    ordered = sorted(found.values(), key=lambda f: (-len(f.paths), -f.lines, f.id))
    return _spread(ordered, most)


def _spread(ordered: list[Feature], most: int) -> list[Feature]:
    """At most `most`, of all sizes alike: large and small ones in turn."""
    out: list[Feature] = []
    left = list(ordered)
    while left and len(out) < most:
        out.append(left.pop(0 if len(out) % 2 == 0 else -1))
    return out


def cut_feature(files: Mapping[str, str], feature: Feature, level: DeleteLevel, tests: Sequence[str] = ()) -> Cut:
    """Delete every unit of a feature. A unit that another one needs goes after it; `tests` may name what is deleted."""
    now, parts = dict(files), []
    restoring: dict[str, str] = {}
    waiting = list(feature.units)
    while waiting:
        refusal: Refusal | None = None
        left = []
        for path, qualname in waiting:
            try:
                part = delete(now, path, qualname, level, tests=tests)
            except Refusal as error:
                refusal = error
                left.append((path, qualname))
                continue
            for changed in part.restoring:
                restoring.setdefault(changed, files[changed])
            now = dict(part.files)
            parts.append(part)
        if len(left) == len(waiting) and refusal is not None:
            raise refusal
        waiting = left
    return Cut(feature=feature, level=level, files=now, restoring=restoring, parts=tuple(parts))


def with_bodies(cut: Cut, body: str) -> dict[str, str]:
    """The deleted tree with every unit back as a stub with this one-line body: what a lazy submission would hold.

    At definition level the definitions return with their signatures; decorators stay.
    """
    changed: dict[str, str] = {}
    for path in cut.feature.paths:
        names = {q for p, q in cut.feature.units if p == path}
        text = cut.restoring.get(path, cut.files.get(path, ""))
        for name in sorted(names):
            stubbed = delete({path: text}, path, name).files[path]
            text = stubbed
        changed[path] = text.replace("raise NotImplementedError\n", body + "\n")
    return changed
