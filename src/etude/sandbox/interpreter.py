"""The Python of a sandbox: this interpreter's installation and chosen packages, at paths that are the same on every machine.

By default the packages are pytest and what it requires, copied (13 MB, once per sandboxd) into /opt/venv; whatever else
is installed on the host stays out of sight. Two reasons: an installed copy of the package that a task is about is an
answer key, and the start of a cold pytest reads the metadata of every package it can see. Other packages are named;
ALL binds the host's folder as it is.

Runs in sandboxd; standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PYTHON, VENV = "/opt/python", "/opt/venv"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Where this Python lives, outside and inside."""

    base: str
    """Installation prefix on the host."""
    inside: str
    """The same, in a sandbox."""
    program: str
    """The interpreter in a sandbox, below `inside`."""
    library_path: str
    """Where its shared library is found inside; "" when no help is needed."""
    version: str
    packages: tuple[tuple[str, str], ...]
    """(folder on the host, path below it) of each file to copy; a single (folder, "") is bound as a whole."""
    covered: tuple[str, ...]
    """Package folders inside of what is visible anyway, to be hidden."""

    @classmethod
    def current(cls, packages: Iterable[str] = ("pytest",)) -> Interpreter:
        base = os.path.realpath(sys.base_prefix)
        in_place = base == "/usr" or base.startswith("/usr/")
        inside = base if in_place else PYTHON
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        program = os.path.relpath(os.path.realpath(sys._base_executable), base)  # type: ignore[attr-defined]
        shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED")) and not in_place
        everything = ALL in packages
        return cls(
            base=base,
            inside=inside,
            program=f"{inside}/{program}",
            library_path=f"{inside}/lib" if shared else "",
            version=version,
            packages=((_folder_of("pytest"), ""),) if everything else tuple(files_of(closure(packages))),
            covered=() if everything else tuple(_visible_folders(base, inside, version)),
        )

    @property
    def site(self) -> str:
        """The package folder of a sandbox."""
        return f"{VENV}/lib/python{self.version}/site-packages"

    def environment(self) -> dict[str, str]:
        """What every process of a sandbox starts with."""
        variables = {
            "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "COLUMNS": "80",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONNOUSERSITE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        }
        if self.library_path:
            variables["LD_LIBRARY_PATH"] = self.library_path
        return variables

    def make_venv(self, new: str) -> None:
        """The environment's own files below `new`, without its packages."""
        folder = f"{new}{VENV}"
        os.makedirs(f"{folder}/bin")
        os.makedirs(new + self.site)
        home = os.path.dirname(self.program)
        Path(f"{folder}/pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\nversion = {self.version}\n")
        for name in ("python", "python3", f"python{self.version}"):
            os.symlink(self.program, f"{folder}/bin/{name}")
        for name in ("pytest", "py.test"):
            script = Path(f"{folder}/bin/{name}")
            script.write_text(f"#!{VENV}/bin/python\nimport sys\nimport pytest\nsys.exit(pytest.main())\n")
            script.chmod(0o755)

    def copy_packages(self, folders: dict[str, str], target: str) -> None:
        """Copy the files; `folders` says where each package folder can be reached now. Times are kept: bytecode depends on them."""
        made: set[str] = set()
        for folder, path in self.packages:
            parent = os.path.dirname(os.path.join(target, path))
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            shutil.copy2(os.path.join(folders[folder], path), os.path.join(target, path))


def closure(names: Iterable[str]) -> list[importlib.metadata.Distribution]:
    """The distributions named and those they require, as far as they are installed. The ones named must be."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(name, True) for name in ("pytest", *names)]
    while waiting:
        name, needed = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                raise OSError(f"{name} is not installed for {sys.executable}; sandboxes need it: pip install {name}") from None
            continue
        found[key] = distribution
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append((re.match(r"[\w.-]+", requirement).group(), False))  # type: ignore[union-attr]
    return list(found.values())


def files_of(distributions: Iterable[importlib.metadata.Distribution]) -> list[tuple[str, str]]:
    """(package folder, path) of the files of distributions, with the bytecode this interpreter has of them."""
    tag = f".{sys.implementation.cache_tag}.pyc"
    wanted: dict[tuple[str, str], None] = {}
    for distribution in distributions:
        top = os.path.realpath(str(distribution.locate_file("")))
        for path in _listed(distribution, top):
            if path.endswith(".pyc"):
                continue
            wanted[(top, path)] = None
            if path.endswith(".py"):
                folder, name = os.path.split(path)
                compiled = os.path.join(folder, "__pycache__", name.removesuffix(".py") + tag)
                if os.path.isfile(os.path.join(top, compiled)):
                    wanted[(top, compiled)] = None
    return list(wanted)


def _listed(distribution: importlib.metadata.Distribution, top: str) -> list[str]:
    """Paths below `top` that belong to a distribution. Distributions of the system's packager have no list: their top-level modules."""
    if distribution.files:
        paths = [str(path) for path in distribution.files if ".." not in path.parts]
        return [path for path in paths if os.path.isfile(os.path.join(top, path))]
    name = distribution.metadata["Name"]
    modules = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
    found = []
    for entry in os.listdir(top):
        if entry.partition(".")[0] in modules or entry.lower().startswith(name.lower().replace("-", "_") + "-"):
            full = os.path.join(top, entry)
            if os.path.isfile(full):
                found.append(entry)
            for folder, _, names in os.walk(full):
                found += [os.path.relpath(os.path.join(folder, each), top) for each in names]
    return found


def _folder_of(name: str) -> str:
    return os.path.realpath(str(closure([name])[-1].locate_file("")))


def _visible_folders(base: str, inside: str, version: str) -> list[str]:
    """Package folders below the installation and below /usr, as seen inside."""
    candidates = {
        *(path for path in (*sys.path, *site.getsitepackages()) if os.path.basename(path) in ("site-packages", "dist-packages")),
        f"{base}/lib/python{version}/site-packages",
        "/usr/lib/python3/dist-packages",
        f"/usr/local/lib/python{version}/dist-packages",
    }
    found = set()
    for path in map(os.path.realpath, candidates):
        if not os.path.isdir(path):
            continue
        if path.startswith(base + os.sep):
            found.add(inside + path[len(base) :])
        elif path.startswith("/usr/"):
            found.add(path)
    return sorted(found)
