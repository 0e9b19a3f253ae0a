"""ruff and mypy as tests, so that `./etude test` is the one check there is."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [name for name in ("src", "tests", "benchmarks", "recipes") if (ROOT / name).is_dir()]


def check(module: str, *arguments: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; `pip install 'etude[test]'` brings it")
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_ruff_check():
    check("ruff", "check", *FOLDERS)


def test_ruff_format():
    check("ruff", "format", "--check", *FOLDERS)


def test_ruff_on_the_launcher():
    check("ruff", "check", "--target-version", "py37", "etude")
    check("ruff", "format", "--check", "--target-version", "py37", "etude")


def test_an_old_python_can_read_the_launcher():
    ast.parse((ROOT / "etude").read_text(), feature_version=(3, 6))


def test_mypy():
    check("mypy")
