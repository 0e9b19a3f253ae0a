"""The layer contract: imports point down, siblings do not meet, no cycle, ray in one file, nothing called utils.

Every check is a function over a source tree that returns the violations it found, so that it can be run on a small
tree with a planted violation as well: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

CONTRACT = """
cli | doctor | bench | launch | debug
local | cluster | fakes
parts
live
loop
evals | serve | studio
rollout | factory
agent | rewards | hints | trainer | inference
tasks | search
sandbox | sync | optim | store
model
parallel
kernels
schemas
text | events | config | disk
protocols
records
errors
"""
"""A line may import only lines below it; `|` siblings do not import each other."""

LINES = [[name.strip() for name in line.split("|")] for line in CONTRACT.strip().splitlines()]
HEIGHT = {name: len(LINES) - i for i, line in enumerate(LINES) for name in line}
TOOL_SERVER = "etude/sandbox/toolserver.py"
UTILS = re.compile(r"(^|_)utils?($|_)")


# ---------------------------------------------------------------------------------------------------
# Reading a tree


def sources(tree: Path) -> list[Path]:
    """Every Python file of the package, sorted."""
    return sorted((tree / "etude").rglob("*.py"))


def module_name(tree: Path, path: Path) -> str:
    """etude/model/cache.py -> etude.model.cache; a package's __init__ has the package's name."""
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(module: str) -> str:
    """The name of the contract that a module belongs to: its first part below etude; "" for the root package."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: Path, path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, inside functions too, `if TYPE_CHECKING:` excluded.

    `from a.b import c` gives a.b.c, which may be a module or a name in one. Literal importlib calls count as imports.
    """
    module = module_name(tree, path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if alias.name != "*" else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
        waiting.extend(ast.iter_child_nodes(node))


def where(tree: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(tree)}:{line}"


# ---------------------------------------------------------------------------------------------------
# Checks


def layer_violations(tree: Path) -> list[str]:
    """Imports that point up or sideways, and components that the contract does not know."""
    found = []
    for path in sources(tree):
        ours = component(module_name(tree, path))
        if ours and ours not in HEIGHT:
            found.append(f"{path.relative_to(tree)}: {ours!r} is not in the layer contract")
            continue
        for line, name in imports(tree, path):
            if not name.startswith("etude.") or component(name) not in HEIGHT:
                continue  # not ours, or a name of the root package such as etude.__version__
            theirs = component(name)
            if theirs == ours:
                continue
            if not ours:
                found.append(f"{where(tree, path, line)}: the root package imports {theirs}; it imports nothing")
            elif HEIGHT[theirs] == HEIGHT[ours]:
                found.append(f"{where(tree, path, line)}: {ours} imports its sibling {theirs}")
            elif HEIGHT[theirs] > HEIGHT[ours]:
                found.append(f"{where(tree, path, line)}: {ours} imports {theirs}, which lies above it")
    return found


def module_graph(tree: Path) -> dict[str, set[str]]:
    """module -> modules of the tree it imports, at any depth of nesting."""
    modules = {module_name(tree, path): path for path in sources(tree)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for _, name in imports(tree, path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target not in ("etude", module):
                graph[module].add(target)
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One import cycle as a path that ends where it began, or nothing."""
    done: set[str] = set()
    for start in graph:
        trail: list[str] = []
        waiting = [(start, iter(sorted(graph[start])))] if start not in done else []
        while waiting:
            module, rest = waiting[-1]
            if not trail or trail[-1] != module:
                trail.append(module)
            following = next(rest, None)
            if following is None:
                done.add(module)
                trail.pop()
                waiting.pop()
            elif following in trail:
                return [*trail[trail.index(following) :], following]
            elif following not in done:
                waiting.append((following, iter(sorted(graph[following]))))
    return []


def ray_violations(tree: Path) -> list[str]:
    """Files that import ray and are not cluster.py."""
    return [
        where(tree, path, line)
        for path in sources(tree)
        for line, name in imports(tree, path)
        if name.split(".")[0] == "ray" and path.relative_to(tree).as_posix() != "etude/cluster.py"
    ]


def names_called_utils(root: Path) -> list[str]:
    """Files and folders under a folder that are called utils, or something_utils."""
    return [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if UTILS.search(p.stem) and "__pycache__" not in p.parts]


def tool_server_violations(tree: Path) -> list[str]:
    """The in-sandbox tool server is one file of standard library (and the pytest that its fork server is for)."""
    path = tree / TOOL_SERVER
    if not path.exists():
        return []
    allowed = sys.stdlib_module_names | {"pytest", "_pytest"}
    return [f"{where(tree, path, line)}: imports {name}" for line, name in imports(tree, path) if name.split(".")[0] not in allowed]


# ---------------------------------------------------------------------------------------------------
# The real tree


def test_imports_point_down():
    assert layer_violations(SRC) == []


def test_there_is_no_import_cycle():
    assert cycle(module_graph(SRC)) == []


def test_only_cluster_imports_ray():
    assert ray_violations(SRC) == []


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_nothing_is_called_utils(folder):
    assert names_called_utils(ROOT / folder) == []


def test_the_tool_server_is_standard_library():
    assert tool_server_violations(SRC) == []


def test_every_package_has_a_docstring():
    packages = [path for path in sources(SRC) if path.name == "__init__.py"]
    assert packages
    assert [str(p) for p in packages if not ast.get_docstring(ast.parse(p.read_text()))] == []


# ---------------------------------------------------------------------------------------------------
# Planted violations


def plant(tmp_path: Path, **files: str) -> Path:
    """A small etude with the given files; `a__b` in a name means the folder a, and inits are made where missing."""
    for name, text in {"__init__": "", **files}.items():
        path = tmp_path / "etude" / f"{name.replace('__', '/') if not name.startswith('__') else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in (tmp_path / "etude").rglob("*"):
        if folder.is_dir():
            (folder / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "files, says",
    [
        ({"records": "from etude.loop import run", "loop": ""}, "records imports loop, which lies above it"),
        ({"records": "def f():\n    import etude.loop", "loop": ""}, "etude/records.py:2: records imports loop"),
        ({"records": "from . import loop", "loop": ""}, "records imports loop"),
        ({"model__cache": "from ..agent import loop", "agent__loop": ""}, "model imports agent"),
        ({"trainer__step": "from etude.inference.engine import Engine", "inference__engine": ""}, "trainer imports its sibling inference"),
        ({"text__parse": "import importlib\nimportlib.import_module('etude.model')", "model__a": ""}, "text imports model"),
        ({"misc": ""}, "'misc' is not in the layer contract"),
        ({"__init__": "from etude import records", "records": ""}, "the root package imports records"),
        ({"text__a": "from etude import events", "events": ""}, "text imports its sibling events"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_found(tmp_path, files, says):
    (violation,) = layer_violations(plant(tmp_path, **files))
    assert says in violation


@pytest.mark.parametrize(
    "files",
    [
        {"loop": "from etude.records import Task\nfrom etude import __version__", "records": ""},
        {"records": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from etude.loop import run", "loop": ""},
        {"model__a": "from etude.model import b\nfrom . import c", "model__b": "", "model__c": ""},
        {"records": "import numpy\nimport json"},
    ],
)
def test_an_import_that_points_down_is_not(tmp_path, files):
    assert layer_violations(plant(tmp_path, **files)) == []


def test_a_cycle_is_found_inside_functions_too(tmp_path):
    tree = plant(tmp_path, model__a="from etude.model import b", model__b="import etude.model.c", model__c="def f():\n    from . import a")
    found = cycle(module_graph(tree))
    assert found[0] == found[-1]
    assert set(found) == {"etude.model.a", "etude.model.b", "etude.model.c"}


def test_a_diamond_is_no_cycle(tmp_path):
    tree = plant(tmp_path, model__a="from . import b, c", model__b="from . import d", model__c="from . import d", model__d="")
    assert cycle(module_graph(tree)) == []


def test_ray_outside_cluster_is_found(tmp_path):
    tree = plant(tmp_path, cluster="import ray", local="def f():\n    from ray.util import queue")
    assert ray_violations(tree) == ["etude/local.py:2"]


@pytest.mark.parametrize("name", ["utils.py", "util/x.py", "text_utils.py", "utils_text/x.py"])
def test_utils_are_found(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert names_called_utils(tmp_path) != []


def test_a_foreign_import_in_the_tool_server_is_found(tmp_path):
    tree = plant(tmp_path, sandbox__toolserver="import json\nimport pytest\ndef f():\n    import numpy\n    from etude import records")
    assert len(tool_server_violations(tree)) == 2
