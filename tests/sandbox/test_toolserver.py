"""Parts of the tool server that need no sandbox."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox import toolserver
from etude.sandbox.toolserver import Capture, glob_matcher, plain_words, pytest_words, read_results


@given(st.lists(st.binary(max_size=50)), st.integers(2, 60))
def test_a_capture_keeps_both_ends_and_counts_the_rest(pieces: list[bytes], cap: int) -> None:
    capture = Capture(cap)
    for piece in pieces:
        capture.feed(piece)
    whole = b"".join(pieces)
    half = cap // 2
    assert capture.total == len(whole)
    assert capture.dropped == max(len(whole) - 2 * half, 0)
    kept = capture.bytes()
    if capture.dropped:
        assert kept == whole[:half] + b"\n[... %d bytes dropped ...]\n" % capture.dropped + whole[-half:]
    else:
        assert kept == whole


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.py", ["a.py", "x/y/a.py", ".py"], ["a.pyc", "a.py/b"]),
        ("x/*.py", ["x/a.py"], ["x/y/a.py", "a.py"]),
        ("**/a.py", ["a.py", "x/y/a.py"], ["ba.py"]),
        ("x/**", ["x/a", "x/y/z"], ["y/x"]),
        ("x/**/z.txt", ["x/z.txt", "x/a/b/z.txt"], ["z.txt"]),
        ("test_?.py", ["test_a.py"], ["test_ab.py", "test_.py"]),
        ("[ab].c", ["a.c", "q/b.c"], ["c.c"]),
        ("[!ab].c", ["c.c"], ["a.c"]),
        ("a[.py", ["a[.py"], ["a.py"]),
        ("a+b(c).txt", ["a+b(c).txt"], ["aab(c).txt"]),
    ],
)
def test_glob_patterns(pattern: str, matching: list[str], other: list[str]) -> None:
    matches = glob_matcher(pattern)
    assert [path for path in matching if not matches(path)] == []
    assert [path for path in other if matches(path)] == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest", ("script", [])),
        ("pytest -q tests/test_a.py::test_b[1-2]", ("script", ["-q", "tests/test_a.py::test_b[1-2]"])),
        ("python -m pytest -k 'a or b'", ("module", ["-k", "a or b"])),
        ("python3.11 -m pytest", ("module", [])),
        ("/opt/venv/bin/python -m pytest", ("module", [])),
        ("pytest | tail", None),
        ("pytest; echo", None),
        ("pytest && ls", None),
        ("pytest > out", None),
        ("pytest $X", None),
        ("pytest *", None),
        ("pytest 'a", None),
        ("X=1 pytest", None),
        ("python -m pytestx", None),
        ("python -W error -m pytest", None),
        ("pytest\nls", None),
        ("ls pytest", None),
        ("", None),
    ],
)
def test_which_command_lines_are_plain_test_runs(command: str, expected: tuple[str, list[str]] | None) -> None:
    words = plain_words(command)
    assert (pytest_words(words) if words else None) == expected


def test_results_survive_garbage_and_keep_the_worse_of_two() -> None:
    lines = [
        json.dumps({"n": 1, "start": "t::a"}),
        "not json",
        json.dumps({"n": 2, "test": "t::a", "outcome": "failed", "seconds": 0.1, "message": "m"}),
        json.dumps({"n": 3, "test": "t::a", "outcome": "passed", "seconds": 0.1, "message": ""}),
        json.dumps({"test": "t::b"}),
        json.dumps([1]),
        json.dumps({"n": 4, "start": "t::c"}),
        '{"n": 5, "sta',
    ]
    result = read_results("\n".join(lines).encode(), "it crashed")
    assert [(test["id"], test["outcome"], test["message"]) for test in result["tests"]] == [
        ("t::a", "failed", "m"),
        ("t::c", "failed", "it crashed"),
    ]
    assert result["complete"] is False
    assert read_results(json.dumps({"n": 1, "end": 0}).encode(), "")["complete"] is True


def test_the_tool_server_is_one_file_of_standard_library() -> None:
    tree = ast.parse(Path(toolserver.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - set(sys.stdlib_module_names) == {"pytest", "_pytest"}
