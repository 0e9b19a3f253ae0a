"""Spines stay on a screen, functions stay under 100 lines, source stays ASCII. Each check is also shown to fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPINES = ("loop.py", "live.py")
SPINE_LINES = 120
FUNCTION_LINES = 100


def python_sources(root: Path = ROOT) -> list[Path]:
    """Everything Python that is ours: package, tests, benchmarks, recipes, the launcher."""
    found = [p for folder in ("src", "tests", "benchmarks", "recipes") for p in (root / folder).rglob("*.py")]
    return sorted([*found, *(p for p in [root / "etude"] if p.is_file())])


def code_lines(path: Path) -> int:
    """Lines that hold code: not blank, not a comment, not a doc string (of a module, class, function or field)."""
    text = path.read_text()
    lines = text.splitlines()
    silent = {i for i, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines) - len(silent)


def long_functions(paths: list[Path], limit: int = FUNCTION_LINES) -> list[str]:
    """Functions longer than the limit, from `def` to their last line."""
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {limit}")
    return found


def non_ascii(paths: list[Path]) -> list[str]:
    """Lines that hold something else than ASCII."""
    return [
        f"{path}:{number}: {line.decode(errors='replace').strip()[:60]}"
        for path in paths
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if not line.isascii()
    ]


@pytest.mark.parametrize("name", [name for name in SPINES if (ROOT / "src" / "etude" / name).exists()])
def test_a_spine_stays_on_a_screen(name, capsys):
    path = ROOT / "src" / "etude" / name
    length = code_lines(path)
    with capsys.disabled():
        print(f"\n{name}: {length} lines of code, {len(path.read_text().splitlines())} in all (limit {SPINE_LINES} of code)")
    assert length <= SPINE_LINES


def test_functions_stay_short():
    sources = [p for p in python_sources() if "tests" not in p.relative_to(ROOT).parts]
    assert ROOT / "etude" in sources
    assert long_functions(sources) == []


def test_source_is_ascii():
    scripts = [p for p in [ROOT / ".ci" / "run", ROOT / "pyproject.toml", *sorted((ROOT / "recipes").rglob("*.toml"))] if p.is_file()]
    assert non_ascii([*python_sources(), *scripts]) == []


def test_a_long_spine_is_measured(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text('"""Doc\n\nstring."""\n\n# comment\nx = 1\n\ny = """text\nof two lines"""\n')
    assert code_lines(path) == 3
    path.write_text("x = 1\n" * (SPINE_LINES + 1))
    assert code_lines(path) > SPINE_LINES


def test_a_long_function_is_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("class A:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION_LINES)
    (found,) = long_functions([path])
    assert "f has 101 lines" in found
    path.write_text("def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1))
    assert long_functions([path]) == []


def test_a_letter_beyond_ascii_is_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("x = 1\n# \u00e9tude\n", encoding="utf-8")
    (found,) = non_ascii([path])
    assert found.startswith(f"{path}:2:")
