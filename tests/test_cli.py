"""The command line: exit statuses, messages, and that each command hands the right arguments to its function."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude import __version__, cli
from etude.errors import UserError

SRC = Path(__file__).resolve().parents[1] / "src"

EXAMPLES = {
    "demo": (["--seed", "3", "--name", "a", "loop.steps=2"], {"seed": 3, "name": "a", "overrides": ["loop.steps=2"]}),
    "tasks make": (
        ["katas", "--out", "d", "--count", "5", "--seed", "1", "--json"],
        {"sources": ["katas"], "out": Path("d"), "count": 5, "seed": 1, "json": True},
    ),
    "tasks check": (["d"], {"folder": Path("d"), "json": False}),
    "train": (
        ["recipes/nano", "trainer.lr=3e-4", "--name", "a", "seed=1"],
        {"recipe": "recipes/nano", "overrides": ("trainer.lr=3e-4", "seed=1"), "resume": None, "name": "a"},
    ),
    "pretrain": (["r.toml"], {"recipe": "r.toml", "overrides": (), "resume": None, "name": None}),
    "check": (["runs/a"], {"run": "runs/a"}),
    "debug mismatch": (
        ["runs/a", "3", "numerics=fast", "--json"],
        {"run": "runs/a", "step": 3, "overrides": ["numerics=fast"], "json": True},
    ),
    "eval": (
        ["heldout", "n=10", "--model", "nano", "--out", "d", "--json"],
        {"suite": "heldout", "model": "nano", "out": Path("d"), "json": True, "overrides": ["n=10"]},
    ),
    "generate": (
        ["hi", "--seed", "2"],
        {"prompt": "hi", "model": "nano", "max_tokens": 512, "temperature": 0.2, "top_p": 0.9, "seed": 2},
    ),
    "serve": (
        ["--model", "smollm2-135m", "--port", "0", "--api-key", "env:KEY", "engine.max_running=8"],
        {
            "model": "smollm2-135m",
            "host": "127.0.0.1",
            "port": 0,
            "api_key": "env:KEY",
            "contract": False,
            "drain": 30.0,
            "device": "cpu",
            "dtype": "auto",
            "threads": 1,
            "overrides": ["engine.max_running=8"],
        },
    ),
    "model add": (
        ["smollm2-135m", "--dtype", "float32", "--force"],
        {"source": "smollm2-135m", "name": None, "dtype": "float32", "force": True, "json": False},
    ),
    "model ls": (["--json"], {"json": True}),
    "model rm": (["mine"], {"name": "mine", "json": False}),
    "env serve": (
        ["--root", "envs", "--network", "--secret", "A", "--secret", "B", "--drain", "5"],
        {
            "root": Path("envs"),
            "listen": "127.0.0.1:7711",
            "tokens": None,
            "memory": 0.0,
            "network": True,
            "secret": ["A", "B"],
            "endpoint": [],
            "drain": 5.0,
            "tls_cert": None,
            "tls_key": None,
            "insecure": False,
        },
    ),
    "env ls": (["--server", "http://127.0.0.1:1"], {"server": "http://127.0.0.1:1", "json": False}),
    "env exec": (["e1", "ls -l; exit 3"], {"server": None, "env": "e1", "command": "ls -l; exit 3", "timeout": 60.0}),
    "env fork": (["e1", "--count", "2"], {"server": None, "env": "e1", "count": 2, "level": "L0", "ttl": 900.0, "json": False}),
    "env rm": (["e1", "e2", "--json"], {"server": None, "envs": ["e1", "e2"], "json": True}),
    "doctor": (["--json"], {"json": True}),
    "bench": (["house", "--quick"], {"name": "house", "device": "cpu", "quick": True, "model": None, "write": False}),
    "test": (["--all", "-k", "x"], {}),
}
DISPATCHED = [name for name in cli.COMMANDS if name != "test"]


def etude(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "etude.cli", *words]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def planted(body: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process whose table has one more command, `planted`, with the given body."""
    code = f"""
import sys, types
from etude import cli, errors
module = types.ModuleType("planted_module")
def go(**arguments):
    {body}
module.go = go
sys.modules["planted_module"] = module
cli.COMMANDS["planted"] = cli.COMMANDS["doctor"]._replace(target="planted_module:go")
sys.exit(cli.main(["planted", *sys.argv[1:]]))
"""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, **env}, check=False)


def test_help_lists_every_command_under_its_group():
    done = etude("--help")
    assert done.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} .*{re.escape(command.help)}$", done.stdout, re.MULTILINE)
        assert f"\n{command.group}\n" in done.stdout
    assert etude().stdout == etude("help").stdout == etude("-h").stdout == done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_version():
    assert etude("--version").stdout == f"etude {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_an_example_here(name):
    done = etude(*name.split(), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: etude {name} ")
    assert name in EXAMPLES


@pytest.mark.parametrize("name", DISPATCHED)
def test_words_become_the_arguments_of_the_function(name):
    words, expected = EXAMPLES[name]
    found, rest = cli.find_command([*name.split(), *words])
    assert (found, rest) == (name, words)
    parsed = cli.parser_for(name).parse_intermixed_args(words)
    got = cli.COMMANDS[name].arguments(parsed)
    assert got == expected


@pytest.mark.parametrize(
    "name", [n for n in DISPATCHED if (SRC / (cli.COMMANDS[n].target.split(":")[0].replace(".", "/") + ".py")).exists()]
)
def test_the_function_behind_a_command_takes_its_arguments(name):
    module, _, function = cli.COMMANDS[name].target.partition(":")
    target = getattr(importlib.import_module(module), function)
    inspect.signature(target).bind(**EXAMPLES[name][1])


def test_the_docstring_tells_the_signatures():
    """The list at the top of cli.py is what writers of these functions read."""
    for name in DISPATCHED:
        listed = re.search(rf"{cli.COMMANDS[name].target}\(\*, (.*)\)", cli.__doc__ or "")
        assert listed, name
        assert set(listed[1].split(", ")) == set(EXAMPLES[name][1])


@pytest.mark.parametrize(
    "words, says",
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["docter"], "did you mean 'doctor'?"),
        (["tasks"], "`etude tasks` is one of: tasks make, tasks check"),
        (["tasks", "mkae"], "`etude tasks` is one of"),
        (["zzz"], "known: "),
        (["doctor", "--jsn"], "`etude doctor` does not take '--jsn'; did you mean '--json'?"),
        (["train"], "which recipe?"),
        (["train", "a", "b"], "one recipe at a time, got 'a' and 'b'"),
        (["bench"], "the following arguments are required: NAME; see `etude bench --help`"),
        (["bench", "house", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["demo", "--seed", "-1"], "'-1' should be an integer from 0"),
        (["demo", "--seed", "x"], "'x' should be an integer from 0"),
        (["tasks", "make", "a", "--out", "d", "--count", "0"], "'0' should be an integer from 1"),
        (["eval", "heldout", "--model", "nano"], "required: --out"),
        (["bench", "no_such_benchmark"], "no benchmark 'no_such_benchmark'"),
    ],
)
def test_a_mistake_is_an_error_with_a_remedy(words, says):
    done = etude(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_resumed_run_needs_no_recipe():
    words = cli.parser_for("train").parse_intermixed_args(["--resume", "runs/a", "seed=2"])
    assert cli.COMMANDS["train"].arguments(words) == {"recipe": None, "overrides": ("seed=2",), "resume": "runs/a", "name": None}


@pytest.mark.parametrize(
    "body, status, says",
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise errors.ConfigError('lr is -1; give one above 0')", 2, "error: lr is -1; give one above 0\n"),
        ("raise errors.MissingExtra('vllm', 'vllm', 'this')", 2, "pip install 'etude[vllm]'"),
        ("raise errors.IntegrityError('weights differ')", 1, "error: weights differ\n"),
        ("raise errors.SandboxError('died')", 1, "error: died\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_how_a_command_ends_is_its_exit_status(body, status, says):
    done = planted(body)
    assert done.returncode == status
    assert done.stderr == says if says.endswith("\n") else says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_traceback_is_shown_when_asked_for_and_for_our_own_mistakes():
    done = planted("raise errors.ConfigError('x')", ETUDE_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in planted("1 / 0").stderr


def test_ctrl_c_stops_with_one_word():
    code = (
        "import sys, time, types\nfrom etude import cli\nmodule = types.ModuleType('slow')\n"
        "def go(**_):\n    print('going', flush=True)\n    time.sleep(600)\n"
        "module.go = go\nsys.modules['slow'] = module\n"
        "cli.COMMANDS['slow'] = cli.COMMANDS['doctor']._replace(target='slow:go')\nsys.exit(cli.main(['slow']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "etude.cli", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


def test_an_unknown_word_is_found_before_anything_is_imported():
    with pytest.raises(UserError, match="does not take"):
        cli.run(["demo", "--stpes", "3"])


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small clone with one fast and one slow test; its package is a copy of the real one's top modules."""
    (tmp_path / "src" / "etude").mkdir(parents=True)
    for path in (SRC / "etude").glob("*.py"):
        (tmp_path / "src" / "etude" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow: x']\naddopts = '-q -p no:cacheprovider'\n")
    text = "import pytest\ndef test_fast(): pass\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_wrong(): assert False\n"
    (tmp_path / "tests" / "test_a.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "words, status, counts",
    [
        (["-k", "not wrong"], 0, "1 passed, 2 deselected"),
        (["--all", "-k", "not wrong"], 0, "2 passed, 1 deselected"),
        ([], 1, "1 failed, 1 passed, 1 deselected"),
        (["-m", "slow"], 0, "1 passed, 2 deselected"),
        (["tests/test_a.py::test_slow", "--all"], 0, "1 passed"),
    ],
)
def test_the_test_command_runs_pytest_over_its_clone(clone, words, status, counts):
    env = {**os.environ, "PYTHONPATH": str(clone / "src")}
    argv = [sys.executable, "-P", "-m", "etude.cli", "test", *words]
    done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert counts in done.stdout, done.stdout + done.stderr
    assert done.returncode == status


def test_the_test_command_needs_a_clone(clone):
    (clone / "pyproject.toml").unlink()
    env = {**os.environ, "PYTHONPATH": str(clone / "src")}
    done = subprocess.run([sys.executable, "-m", "etude.cli", "test"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run `./etude test` in a clone" in done.stderr
