"""The launcher `./etude`: installs once, starts at once, repairs what was cut short. With a real venv and a real pip.

The clone is a small one: a torch of three lines in a folder that PIP_FIND_LINKS names, and a project whose build
backend is thirty lines of this file, so that no network and no real torch are needed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[1] / "etude"

BACKEND = '''
"""A PEP 660 build backend: one wheel with a .pth file. It can be told to hang, to be interrupted there."""
import pathlib, time, zipfile
ROOT = pathlib.Path(__file__).resolve().parent

def build_editable(folder, config_settings=None, metadata_directory=None):
    (ROOT / "builds").open("a").write("x")
    while (ROOT / "hang").exists():
        time.sleep(0.05)
    name = "etude-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("etude.pth", str(ROOT / "src"))
        wheel.writestr("etude-0.1.0.dist-info/METADATA", METADATA)
        wheel.writestr("etude-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("etude-0.1.0.dist-info/RECORD", "")
    return name

METADATA = "Metadata-Version: 2.1\\nName: etude\\nVersion: 0.1.0\\nProvides-Extra: test\\nRequires-Dist: tiny-tester; extra == 'test'\\n"
build_wheel = build_editable
'''

PROJECT = """
[build-system]
requires = []
backend-path = ["."]
build-backend = "backend"
[project]
name = "etude"
version = "0.1.0"
"""

CLI = """
import sys
try:
    import tiny_tester
except ImportError:
    tiny_tester = None
import torch
print("ran", *sys.argv[1:], "torch", torch.__version__, "tester", tiny_tester is not None)
"""


def make_wheel(folder: Path, name: str, version: str, text: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


class Clone:
    """A small clone in a folder whose name has a space, and the launcher in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.links = folder / "links"
        (self.root / "src" / "etude").mkdir(parents=True)
        self.links.mkdir()
        shutil.copy(LAUNCHER, self.root / "etude")
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(PROJECT)
        (self.root / "src" / "etude" / "__init__.py").touch()
        (self.root / "src" / "etude" / "cli.py").write_text(CLI)
        make_wheel(self.links, "torch", "2.12.0", "__version__ = '2.12.0'\n")
        make_wheel(self.links, "torch", "2.99.0", "__version__ = '2.99.0'\n")  # too new: must not be taken
        make_wheel(self.links, "tiny_tester", "1.0", "")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "ETUDE_", "PYTHON"))}
        self.env = {**clean, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links), "PIP_CONFIG_FILE": os.devnull}

    def start(self, *words: str, python: str = sys.executable, **env: str) -> subprocess.Popen[str]:
        argv = [python, str(self.root / "etude"), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd="/", env={**self.env, **env}, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*words, **env)
        out, err = process.communicate()
        return process.returncode, out, err

    @property
    def builds(self) -> int:
        path = self.root / "builds"
        return len(path.read_text()) if path.exists() else 0

    @property
    def installing(self) -> bool:
        return (self.root / ".venv" / ".etude-installing").exists()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


RAN = "ran doctor torch 2.12.0 tester False\n"


def test_from_nothing_to_a_command_and_then_at_once(clone):
    code, out, err = clone.run("doctor")
    assert (code, out) == (0, RAN), err
    assert "making " in err
    assert "installing torch (no GPU found; from the index that pip is configured with)" in err or "GPU found" in err
    assert not clone.installing
    assert clone.run("test", "--help") == (0, "ran test --help torch 2.12.0 tester False\n", "")
    # without pip and without the links a second start still works: nothing is installed, nothing is looked up
    shutil.rmtree(clone.links)
    shutil.rmtree(next((clone.root / ".venv" / "lib").glob("python3*/site-packages/pip")))
    assert clone.run("doctor") == (0, RAN, "")
    assert clone.builds == 1


@pytest.mark.slow
def test_what_makes_it_install_again(clone):
    """A changed pyproject, the `test` command's extra, a moved clone, and an environment that was removed."""
    assert clone.run("doctor")[:2] == (0, RAN)
    (clone.root / "pyproject.toml").write_text(PROJECT + "# changed\n")
    assert clone.run("doctor")[:2] == (0, RAN)
    assert clone.builds == 2
    assert clone.run("test", "-k", "x")[:2] == (0, "ran test -k x torch 2.12.0 tester True\n")
    assert clone.builds == 3
    code, out, err = clone.run("test")
    assert (code, out, err) == (0, "ran test torch 2.12.0 tester True\n", "")
    assert clone.run("doctor")[2] == ""
    clone.root = clone.root.rename(clone.root.parent / "moved")
    code, out, err = clone.run("doctor")
    assert code == 0, err
    assert out.startswith("ran doctor")
    assert clone.builds == 4
    shutil.rmtree(clone.root / ".venv")
    assert clone.run("doctor")[:2] == (0, RAN)


def wait_until_building(clone: Clone, process: subprocess.Popen[str]) -> None:
    while not clone.builds:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_installation_is_repaired(clone, kill):
    (clone.root / "hang").touch()
    process = clone.start("doctor")
    wait_until_building(clone, process)
    os.killpg(process.pid, kill)
    _, err = process.communicate()
    assert clone.installing
    if kill == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; the next ./etude repairs" in err
    # what pip may leave when it is cut: a module without its metadata
    site = next((clone.root / ".venv" / "lib").glob("python3*/site-packages"))
    (site / "torch.py").write_text("__version__ = 'half'\n")
    (clone.root / "hang").unlink()
    code, out, err = clone.run("doctor")
    assert (code, out) == (0, RAN), err
    assert "an earlier installation was interrupted; starting it again" in err
    assert clone.run("doctor") == (0, RAN, "")


@pytest.mark.slow
def test_an_environment_cut_while_it_was_made_is_made_again(clone):
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    (clone.root / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    code, out, err = clone.run("doctor")
    assert (code, out) == (0, RAN), err


@pytest.mark.slow
def test_two_starts_at_once_install_once(clone):
    (clone.root / "hang").touch()
    first = clone.start("doctor")
    wait_until_building(clone, first)
    second = clone.start("doctor")
    assert second.stderr is not None
    assert "another ./etude is installing" in second.stderr.readline()
    (clone.root / "hang").unlink()
    outs = [process.communicate()[0] for process in (first, second)]
    assert outs == [RAN, RAN]
    assert (first.returncode, second.returncode, clone.builds) == (0, 0, 1)


@pytest.mark.slow
def test_the_lock_is_held_as_long_as_pip_lives(clone):
    """A launcher that dies leaves its pip behind; nobody else may install meanwhile."""
    (clone.root / "hang").touch()
    process = clone.start("doctor")
    wait_until_building(clone, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with (clone.root / ".venv" / ".etude-lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (clone.root / "hang").unlink()
    process.communicate()
    assert clone.run("doctor")[:2] == (0, RAN)


@pytest.mark.slow
def test_a_failure_shows_pips_last_lines_and_what_to_do(clone):
    for wheel in clone.links.glob("torch-*"):
        wheel.rename(wheel.with_suffix(".away"))
    code, out, err = clone.run("doctor")
    assert (code, out) == (1, "")
    assert "torch failed (exit status 1). Its last lines:" in err
    assert "No matching distribution found for torch" in err
    assert "PIP_FIND_LINKS" in err
    assert "etude-install.log" in err
    assert not clone.installing  # nothing was written: the next start goes on and does not begin anew
    for wheel in clone.links.glob("*.away"):
        wheel.rename(wheel.with_suffix(".whl"))
    code, out, err = clone.run("doctor")
    assert (code, out) == (0, RAN)
    assert "making " not in err


def fake_python(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "body, says",
    [
        ("exit 1", "does not run"),
        ("echo 3 9 /old/python", "is Python 3.9; etude needs 3.11 to 3.13"),
        ("echo 3 14 /new/python", "is Python 3.14; etude needs 3.11 to 3.13"),
        ('case "$2" in *ensurepip*) exit 1;; *) echo 3 11 "$0";; esac', "apt install python3.11-venv"),
    ],
)
def test_an_interpreter_that_does_not_fit_is_named(clone, tmp_path, body, says):
    python = fake_python(tmp_path, "mypython", body)
    code, out, err = clone.run("doctor", ETUDE_PYTHON=str(python))
    assert (code, out) == (1, "")
    assert says in err
    assert "Traceback" not in err


ASK_INDEX = """
import sys
code = compile(open(sys.argv[1]).read(), sys.argv[1], "exec")
names = {"__name__": "launcher", "__file__": sys.argv[1]}
exec(code, names)
names["PYTHON"] = sys.executable
print(names["has_own_index"](), names["has_gpu"](), *names["torch_index"]()[0])
"""


@pytest.mark.parametrize(
    "env, conf, own",
    [
        ({}, "", False),
        ({}, "[global]\ntimeout = 60\n", False),
        ({"PIP_FIND_LINKS": "/wheels"}, "", True),
        ({"PIP_INDEX_URL": "https://example.org/simple"}, "", True),
        ({"PIP_EXTRA_INDEX_URL": "https://example.org/simple"}, "", True),
        ({}, "[global]\nfind-links = /wheels\n", True),
        ({}, "[install]\nindex-url = https://example.org/simple\n", True),
    ],
)
def test_torch_comes_from_the_cpu_index_unless_pip_has_an_index_of_its_own(tmp_path, env, conf, own):
    (tmp_path / "pip.conf").write_text(conf)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    # a file named here and HOME elsewhere: the settings of whoever runs the tests do not count, those of /etc do
    env = {**clean, **env, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    if Path("/etc/pip.conf").exists() and not own:
        assert "index" not in Path("/etc/pip.conf").read_text(), "this machine's /etc/pip.conf decides the outcome"
    done = subprocess.run([sys.executable, "-c", ASK_INDEX, str(LAUNCHER)], env=env, capture_output=True, text=True, check=True)
    found, gpu, *arguments = done.stdout.split()
    assert found == str(own)
    plain = own or gpu == "True" or sys.platform != "linux"
    assert arguments == ([] if plain else ["--index-url", "https://download.pytorch.org/whl/cpu"])


def test_a_folder_that_cannot_be_written_is_a_clear_error(clone):
    (clone.root / ".venv").write_text("a file where the folder should be")
    code, _, err = clone.run("doctor")
    assert code == 1
    assert "set-up needs to write to" in err
    assert "Traceback" not in err
