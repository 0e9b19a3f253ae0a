"""Which tests of a feature the agent sees: test functions are taken out of the visible files, whole files are hidden.

The hidden version of a file lies at the same path and is the whole original, so that ids are the same in the visible
and in the graded run. Nothing marks the place where a test was.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence

from etude.tasks.deletion import cut_lines, parse


def split_tests(
    files: Mapping[str, str], targets: Sequence[str], share: float, rng: random.Random
) -> tuple[dict[str, str], dict[str, str]]:
    """(visible tree, hidden files). A share of the target test functions, at least one when the share is above 0, stays visible."""
    functions = sorted({test_function(i) for i in targets})
    shown = set(rng.sample(functions, max(1, round(share * len(functions))) if share > 0 else 0))
    visible, hidden = dict(files), {}
    for path in sorted({path for path, _ in functions}):
        gone = [name for p, name in functions if p == path and (p, name) not in shown]
        if gone:
            text = without_tests(files[path], path, gone)
            if text != files[path]:
                hidden[path] = files[path]
                visible[path] = text
    return visible, hidden


def test_function(test_id: str) -> tuple[str, str]:
    """(file, "name" or "Class.name") of an id, parameters left out."""
    path, *names = test_id.split("::")
    return path, ".".join(names).split("[", 1)[0]


test_function.__test__ = False  # type: ignore[attr-defined]


def without_tests(source: str, path: str, names: Sequence[str]) -> str:
    """The file without test functions; a class that is left empty goes as well. Names that are not defined there stay (inherited ones)."""
    for name in names:
        *outer, last = name.split(".")
        scope: ast.Module | ast.ClassDef | None = parse(source, path)
        chain: list[ast.ClassDef] = []
        for each in outer:
            scope = next((n for n in scope.body if isinstance(n, ast.ClassDef) and n.name == each), None) if scope is not None else None
            if scope is not None:
                chain.append(scope)
        if scope is None:
            continue
        found: ast.stmt | None = next(
            (n for n in scope.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == last), None
        )
        while found is not None and chain and all(n is found or _says_nothing(n) for n in chain[-1].body):
            found = chain.pop()
        if found is not None:
            lines = source.splitlines(True)
            start = min([found.lineno, *(d.lineno for d in getattr(found, "decorator_list", ()))]) - 1
            source = cut_lines(lines, start, found.end_lineno or found.lineno)
    return source


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
