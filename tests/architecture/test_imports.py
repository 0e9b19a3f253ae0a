"""What importing costs: packages that must not pull in torch or ray, each seen in a fresh process.

All modules of a package are imported, not only its __init__, so that a docstring-only __init__ proves nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "etude"
HEAVY = ("torch", "ray")
LIGHT_ALSO_WITHOUT = ("numpy", "fastapi")
ABOVE_THE_MODEL = ("loop", "live", "evals", "serve", "studio", "rollout", "factory", "agent", "rewards", "hints", "tasks", "search")
BESIDE_AND_BELOW = ("sandbox", "store", "text", "errors", "records", "protocols", "config", "events", "schemas")
ENTRY_POINTS = ("cli", "doctor", "bench")
WITHOUT_TORCH = (*ABOVE_THE_MODEL, *BESIDE_AND_BELOW, *ENTRY_POINTS)


def modules_of(name: str, package: Path = PACKAGE) -> list[str]:
    """Dotted names of a component's modules that exist: the file, or every file of the package."""
    if (package / f"{name}.py").is_file():
        return [f"etude.{name}"]
    files = sorted((package / name).rglob("*.py"))
    parts = [p.relative_to(package.parent).with_suffix("").parts for p in files if p.stem != "__main__"]
    return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


def loaded_after(code: str, path: Path = ROOT / "src") -> set[str]:
    """Top-level modules in sys.modules of a fresh process that ran `code`."""
    program = f"import sys, json\n{code}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", [n for n in WITHOUT_TORCH if modules_of(n)])
def test_importing_leaves_torch_and_ray_out(name):
    loaded = loaded_after("\n".join(f"import {module}" for module in modules_of(name)))
    assert "etude" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_importing_the_root_leaves_everything_heavy_out():
    loaded = loaded_after("import etude")
    assert "etude" in loaded
    assert loaded.isdisjoint({*HEAVY, *LIGHT_ALSO_WITHOUT})


def test_help_leaves_everything_heavy_out():
    loaded = loaded_after("from etude.cli import main\nassert main(['--help']) == 0")
    assert loaded.isdisjoint({*HEAVY, *LIGHT_ALSO_WITHOUT})


def test_help_of_every_command_leaves_everything_heavy_out():
    code = "from etude.cli import COMMANDS, parser_for\nassert all(parser_for(name).format_help() for name in COMMANDS)"
    assert loaded_after(code).isdisjoint({*HEAVY, *LIGHT_ALSO_WITHOUT})


def test_a_planted_import_is_seen(tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text("import fractions\n")
    assert "fractions" in loaded_after("import planted", tmp_path)
    assert "fractions" not in loaded_after("pass", tmp_path)
