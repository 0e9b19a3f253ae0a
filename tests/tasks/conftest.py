"""Shared by the tests of tasks: hosts to run tests on, and small packages to delete from.

`ColdHost` is the slow twin of a sandbox: a temporary folder and a new `python -m pytest` for each run, with its own
report plugin. What is graded and validated must come out the same on it and on real sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etude.sandbox import open_host
from etude.sandbox.probe import probe

PLUGIN = """
import json, os
outcomes, messages = {}, {}
def pytest_runtest_logreport(report):
    if report.outcome == "failed":
        outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
        messages[report.nodeid] = str(report.longrepr)[-200:]
    elif report.outcome == "skipped":
        outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
    elif report.when == "call":
        outcomes[report.nodeid] = "xpassed" if hasattr(report, "wasxfail") else "passed"
def pytest_collectreport(report):
    if report.outcome == "failed":
        outcomes[report.nodeid], messages[report.nodeid] = "error", str(report.longrepr)[-200:]
def pytest_sessionfinish():
    with open(os.environ["COLD_REPORT"], "w") as file:
        json.dump([{"id": i, "outcome": o, "seconds": 0.0, "message": messages.get(i, "")} for i, o in outcomes.items()], file)
"""


class ColdHost:
    def __init__(self):
        self.images, self.live, self.made = {}, 0, 0

    async def add_image(self, files):
        name = str(sorted(files.items()))
        self.images[name] = dict(files)
        return name

    async def create(self, image, **_options):
        self.live += 1
        self.made += 1
        return ColdSandbox(self, self.images[image])

    async def close(self):
        pass


class ColdSandbox:
    def __init__(self, host, files):
        self.host = host
        self.base = Path(tempfile.mkdtemp(prefix="cold-"))
        self.root = self.base / "repo"
        (self.base / "plugin").mkdir()
        (self.base / "plugin" / "cold_report.py").write_text(PLUGIN)
        for path, data in files.items():
            self._write(path, data)

    def _write(self, path, data):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def write(self, path, data, *, mode=0o644):
        self._write(path, data)

    async def apply_changes(self, changes):
        for change in sorted(changes, key=lambda change: change.data is not None):
            target = self.root / change.path
            for place in (*reversed(target.relative_to(self.root).parents), target.relative_to(self.root)):
                if (self.root / place).is_file():
                    (self.root / place).unlink()
            if target.is_dir():
                shutil.rmtree(target)
            if change.data is not None:
                self._write(change.path, change.data)

    async def exec(self, argv, **_options):
        from etude.protocols import ExecResult

        done = subprocess.run(argv, cwd=self.root, capture_output=True, check=False)
        return ExecResult(code=done.returncode, output=done.stdout + done.stderr)

    async def call(self, op, arguments, *, timeout_s=60.0):
        assert op == "pytest"
        report = self.base / "report.json"
        report.unlink(missing_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.base / "plugin"),
            "COLD_REPORT": str(report),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        command = [sys.executable, "-m", "pytest", "-p", "cold_report", *arguments["args"]]
        try:
            done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, timeout=arguments["timeout_s"], check=False)
        except subprocess.TimeoutExpired:
            return {"code": -9, "output": "", "timed_out": True, "tests": [], "complete": False}
        tests = json.loads(report.read_text()) if report.exists() else []
        return {"code": done.returncode, "output": done.stdout.decode(), "timed_out": False, "tests": tests, "complete": report.exists()}

    async def destroy(self):
        self.host.live -= 1
        shutil.rmtree(self.base)


@pytest.fixture(scope="session")
def run():
    """Runs a coroutine on the one loop of the session, which the hosts belong to."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def sandboxes(run):
    """Real sandboxes of this machine."""
    found = probe()
    if not found.works:
        pytest.skip(found.explain())
    host = open_host("namespace")
    yield host
    run(host.close())


@pytest.fixture(scope="session")
def host(request):
    """Real sandboxes where this machine has them, else the slow twin."""
    return request.getfixturevalue("sandboxes") if probe().works else ColdHost()


@pytest.fixture
def cold_host():
    return ColdHost()


SHOP = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q -p no:cacheprovider"\npythonpath = ["."]\n',
    "shop/__init__.py": '"""A shop."""\n\nfrom shop.stats import mean, total\n\n__all__ = ["mean", "total"]\n',
    "shop/stats.py": '''"""Numbers."""

import math
import re


def total(values):
    """Sum of the values."""
    return sum(values)


def mean(values):
    """Mean of the values, rounded down; 7 when there are none."""
    # an empty list has no mean
    if not values:
        return 7
    result = math.floor(sum(values) / len(values))
    return result


def words(text):
    """Words of the text."""
    return re.findall(r"[a-z]+", text)
''',
    "tests/test_stats.py": """from shop import stats


def test_total():
    assert stats.total([1, 2]) == 3


def test_mean():
    assert stats.mean([1, 4]) == 2
    assert stats.mean([]) == 7


def test_words():
    assert stats.words("a b1") == ["a", "b"]
""",
}


@pytest.fixture
def shop():
    return dict(SHOP)
