"""A workspace in which a package's tests run, made by rules from its own files and frozen.

    environment = make_environment(source, cache)
    environment.files       # the tree that sandboxes start from: sources, tests, .deps/, pytest.ini

Rules: metadata, pyproject.toml, setup.cfg, tox.ini and requirement files name what is needed; `pip download` of wheels
alone (it runs no code of a package) resolves it to exact versions, whose hashes are recorded; pure Python wheels are
unpacked into `.deps/`. A generated pytest.ini puts the sources and `.deps` on the path and keeps the package's own test
settings, so that the agent's `pytest` and the grader's are the same. What files of this machine, caches and built
copies there were is left out (`scrub`).

Limits: text files only; a package that needs compiled dependencies, or a pytest plug-in, is a counted rejection.
"""

from __future__ import annotations

import configparser
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.tasks.fetch import NoSource, Source, normal, project_table, unpack

DEPS = ".deps"
MAX_WORKSPACE = 6 * 2**20
_SCRUBBED_FOLDERS = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".pytype",
        ".pyre",
        ".hypothesis",
        ".tox",
        ".nox",
        ".eggs",
        "build",
        "dist",
        "htmlcov",
        ".idea",
        ".vscode",
        ".ipynb_checkpoints",
        "node_modules",
        "_build",
        ".github",
        ".gitlab",
    ]
)
_SCRUBBED_FILES = ("*.pyc", "*.pyo", "*.so", "*.pyd", "*.orig", "*.rej", "*~", ".*.sw?", ".coverage*", "tags", "TAGS", "*.egg", "*.whl")
_SCRUBBED_ROOTS = ("*.egg-info", "*.dist-info", "PKG-INFO", "etude_probe.py", DEPS, "*.gz", "*.zip")
_REQUIREMENT_FILES = (
    "requirements-test.txt",
    "requirements-tests.txt",
    "test-requirements.txt",
    "requirements_test.txt",
    "requirements/test.txt",
    "requirements/tests.txt",
    "tests/requirements.txt",
    "requirements-dev.txt",
    "requirements_dev.txt",
    "dev-requirements.txt",
    "requirements.txt",
)
_TEST_EXTRAS = ("test", "tests", "testing", "dev", "develop")
_INI_KEPT = [
    "markers",
    "filterwarnings",
    "python_files",
    "python_classes",
    "python_functions",
    "xfail_strict",
    "norecursedirs",
    "usefixtures",
    "testpaths",
    "doctest_optionflags",
    "consider_namespace_packages",
]
_ALIASES = {"pyyaml": "yaml", "python-dateutil": "dateutil", "pillow": "PIL", "beautifulsoup4": "bs4", "attrs": "attr"}
_PIP_LIMIT_S = 300.0
_TEST_FOLDERS = ("tests", "test")


@dataclass(frozen=True, kw_only=True)
class Environment:
    files: Mapping[str, str]
    tests: tuple[str, ...]
    """Test files."""
    frozen: tuple[tuple[str, str], ...]
    """(wheel file, sha256) of each dependency."""
    left_out: int
    """Files that are no text."""
    hash: str

    @property
    def sources(self) -> list[str]:
        """Python files of the package itself."""
        helpers = ("setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py")
        return [
            p
            for p in self.files
            if p.endswith(".py")
            and not is_test(p)
            and not p.startswith((f"{DEPS}/", "doc", "example", "bench"))
            and p.rsplit("/", 1)[-1] not in helpers
        ]


def is_test(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    inside = any(part in _TEST_FOLDERS for part in path.split("/")[:-1])
    return (
        inside
        or name == "conftest.py"
        or fnmatch.fnmatch(name, "test_*.py")
        or fnmatch.fnmatch(name, "*_test.py")
        or name in ("tests.py", "test.py")
    )


def test_folders(files: Iterable[str]) -> list[str]:
    """Folders that hold tests and their helpers alone: nothing of the package is graded from there."""
    parts = [path.split("/")[:-1] for path in files]
    return sorted({"/".join(p[: i + 1]) for p in parts for i, name in enumerate(p) if name in _TEST_FOLDERS and DEPS not in p})


test_folders.__test__ = False  # type: ignore[attr-defined]


def make_environment(source: Source, cache: Path) -> Environment:
    files, left_out = scrub(source.files)
    tests = tuple(p for p in files if p.endswith(".py") and is_test(p) and not p.endswith(("conftest.py", "__init__.py")))
    if not tests:
        raise NoSource("no_tests", f"{source.name} {source.version} ships no test file")
    wanted = requirements(source, [files[p] for p in files if p.endswith(".py") and is_test(p)])
    frozen, packages = _dependencies(wanted, cache)
    files |= packages
    head = f"Metadata-Version: 2.1\nName: {source.name}\nVersion: {source.version}\n"
    files[f"{DEPS}/{source.name.replace('-', '_')}-{source.version}.dist-info/METADATA"] = head
    files["pytest.ini"] = pytest_ini(source.files, files)
    if (size := sum(len(text) for text in files.values())) > MAX_WORKSPACE:
        raise NoSource("too_large", f"{source.name}: the workspace has {size} characters, the limit is {MAX_WORKSPACE}")
    digest = hashlib.sha256(json.dumps([sorted(files.items()), frozen]).encode()).hexdigest()
    return Environment(files=dict(sorted(files.items())), tests=tests, frozen=frozen, left_out=left_out, hash=digest)


def scrub(files: Mapping[str, bytes]) -> tuple[dict[str, str], int]:
    """The text files that a checkout would have, and how many files are no text."""
    kept: dict[str, str] = {}
    left_out = 0
    for path, data in sorted(files.items()):
        *folders, name = path.split("/")
        scrubbed = any(folder in _SCRUBBED_FOLDERS for folder in folders) or any(fnmatch.fnmatchcase(name, p) for p in _SCRUBBED_FILES)
        if scrubbed or any(fnmatch.fnmatchcase(part, p) for part in (path.split("/")[0], *folders) for p in _SCRUBBED_ROOTS):
            continue
        try:
            kept[path] = data.decode()
            if "\0" in kept[path]:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "a zero byte")
        except UnicodeDecodeError:
            kept.pop(path, None)
            left_out += 1
    return kept, left_out


# ---------------------------------------------------------------------------------------------------
# What is needed


def requirements(source: Source, tests: Sequence[str]) -> list[str]:
    """Requirements of the package, and those of its test extras, files and groups that a test imports."""
    from packaging.requirements import InvalidRequirement, Requirement

    needed: dict[str, str] = {}
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", "\n".join(tests), re.MULTILINE))
    own = [(line, False) for line in source.requires] + [(line, True) for line in _test_requirements(source.files)]
    for line, only_if_imported in own:
        try:
            wanted = Requirement(line.split(" #")[0].strip())
        except InvalidRequirement:
            continue
        key = normal(wanted.name)
        extras = [""] if wanted.marker is None or "extra" not in str(wanted.marker) else list(_TEST_EXTRAS)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        optional = only_if_imported or extras != [""]
        if optional and _ALIASES.get(key, key.replace("-", "_")) not in imported:
            continue
        if key not in (source.name, "pytest", "setuptools", "pip", "wheel"):
            needed.setdefault(key, f"{wanted.name}{wanted.specifier}" if wanted.url is None else wanted.name)
    return sorted(needed.values())


def _test_requirements(files: Mapping[str, bytes]) -> list[str]:
    lines: list[str] = []
    for path in _REQUIREMENT_FILES:
        lines += [
            line for line in files.get(path, b"").decode("utf-8", "replace").splitlines() if line.strip() and line.strip()[0] not in "#-"
        ]
    for table in ("setup.cfg", "tox.ini"):
        parser = _ini(files, table)
        for section, key in (("options", "install_requires"), ("options", "tests_require"), ("testenv", "deps")):
            lines += parser.get(section, key, fallback="", raw=True).splitlines()
        for extra in _TEST_EXTRAS:
            lines += parser.get("options.extras_require", extra, fallback="", raw=True).splitlines()
    try:
        groups = tomllib.loads(files.get("pyproject.toml", b"").decode()).get("dependency-groups", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        groups = {}
    for group in _TEST_EXTRAS:
        lines += [line for line in groups.get(group, []) if isinstance(line, str)]
    return [*lines, *project_table(files).get("dependencies", ())]


def _ini(files: Mapping[str, bytes], path: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(files.get(path, b"").decode("utf-8", "replace"))
    except configparser.Error:
        return configparser.RawConfigParser()
    return parser


def pytest_ini(files: Mapping[str, bytes], workspace: Iterable[str]) -> str:
    """The package's own settings without command line options (they name plug-ins), and the path."""
    found: dict[str, object] = {}
    for path, section in (("pytest.ini", "pytest"), ("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
        parser = _ini(files, path)
        if parser.has_section(section) and not found:
            found = dict(parser.items(section))
    try:
        tool = tomllib.loads(files.get("pyproject.toml", b"").decode()).get("tool", {}).get("pytest", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        tool = {}
    found = found or dict(tool.get("ini_options", {}))
    own = found.get("pythonpath", [])
    paths = [*(own.split() if isinstance(own, str) else [str(p) for p in own] if isinstance(own, list) else []), "."]
    paths += [top for top in ("src", "lib") if any(p.startswith(f"{top}/") and p.endswith(".py") for p in workspace)]
    lines = ["[pytest]", f"pythonpath = {' '.join(dict.fromkeys([*paths, DEPS]))}"]
    for key in _INI_KEPT:
        if key in found:
            value = found[key]
            items = [str(v) for v in value] if isinstance(value, list) else str(value).strip().splitlines()
            lines += [f"{key} = {items[0]}"] if len(items) == 1 else [f"{key} =", *(f"    {item.strip()}" for item in items)]
    if "--doctest" not in str(found.get("addopts", "")) and "import-mode" in str(found.get("addopts", "")):
        lines.append("addopts = --import-mode=importlib")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------
# Frozen dependencies


def _dependencies(wanted: Sequence[str], cache: Path) -> tuple[tuple[tuple[str, str], ...], dict[str, str]]:
    """(wheel, sha256) of everything needed, and its text files below `.deps/`."""
    if not wanted:
        return (), {}
    key = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:24]
    folder = cache / "wheels" / key
    if not folder.is_dir():
        _download(wanted, folder)
    frozen, files = [], {}
    for wheel in sorted(folder.glob("*.whl")):
        if not wheel.name.endswith("-none-any.whl"):
            raise NoSource("needs_binary", f"{wheel.name} is compiled, and workspaces hold text only")
        data = wheel.read_bytes()
        frozen.append((wheel.name, hashlib.sha256(data).hexdigest()))
        for path, content in unpack(data, wheel.name).items():
            if not path.endswith((".py", "METADATA", "entry_points.txt", ".json", ".txt", "py.typed")) or ".data/" in path:
                continue
            try:
                files[f"{DEPS}/{path}"] = content.decode()
            except UnicodeDecodeError:
                continue  # data of a dependency in another encoding; what needs it fails in the baseline and is counted there
    return tuple(frozen), files


def _download(wanted: Sequence[str], folder: Path) -> None:
    draft = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", "-d", str(draft)]
    try:
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=_PIP_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoSource("not_installed", f"pip needed more than {_PIP_LIMIT_S:g} s for {', '.join(wanted)}") from error
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), done.stderr[-200:])
        raise NoSource("not_installed", f"pip finds no wheels for {', '.join(wanted)}: {last.strip()[:200]}")
    draft.mkdir(parents=True, exist_ok=True)
    os.replace(draft, folder)
