"""The commands: `etude COMMAND ...`, grouped by what a user wants to get done.

Nothing but argparse is imported before a command runs, so `etude --help` answers at once (measured by
`etude bench house`; that torch, ray, numpy and FastAPI stay out is a test). A command names the function that
does its work as text, "module:function", the way package entry points do, and hands it plain keyword arguments;
the function returns an exit status or None:

    etude.launch:demo(*, name, seed, overrides)
    etude.launch:train(*, recipe, overrides, resume, name)       recipe is None only with resume
    etude.launch:pretrain(*, recipe, overrides, resume, name)
    etude.launch:evaluate(*, suite, model, out, json, overrides)
    etude.launch:check(*, run)
    etude.launch:tasks_make(*, sources, out, count, seed, json)
    etude.launch:tasks_check(*, folder, json)
    etude.launch:generate(*, model, prompt, max_tokens, temperature, top_p, seed)
    etude.launch:serve(*, model, host, port, api_key, contract, drain, device, dtype, threads, overrides)
    etude.launch:model_add(*, source, name, dtype, force, json)
    etude.launch:model_ls(*, json)
    etude.launch:model_rm(*, name, json)
    etude.sandbox.service.commands:serve(*, root, listen, tokens, memory, network, secret, endpoint, drain, tls_cert, tls_key, insecure)
    etude.sandbox.service.commands:ls(*, server, json)
    etude.sandbox.service.commands:execute(*, server, env, command, timeout)
    etude.sandbox.service.commands:fork(*, server, env, count, level, ttl, json)
    etude.sandbox.service.commands:rm(*, server, envs, json)
    etude.debug:mismatch(*, run, step, json, overrides)
    etude.doctor:main(*, json)
    etude.bench:main(*, name, device, quick, model, write)

Types: recipe, resume, name, suite, model, prompt, run, device, source, dtype, listen, host, api_key, tls_cert, tls_key, server, env,
command, level: str (or None where optional); out, folder, root, tokens: Path; overrides, sources: tuple of str; secret, endpoint, envs:
list of str; seed, count, max_tokens, step, port, threads: int; temperature, top_p, memory, drain, timeout, ttl: float; json, quick,
write, force, network, insecure, contract: bool.

Exit status: 0 done, 1 etude failed, 2 the caller can fix it (`error: message` on stderr), 130 interrupted.
ETUDE_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from etude import __version__
from etude.errors import EtudeError, MissingExtra, UserError, first_cause, nearest

MAX_SEED = 2**63 - 1


class Command(NamedTuple):
    """One command. `schema` names the file in docs/schemas that its `--json` output satisfies."""

    group: str
    usage: str
    help: str
    target: str
    """The "module:function" that does the work."""
    configure: Callable[[argparse.ArgumentParser], None]
    arguments: Callable[[argparse.Namespace], dict[str, object]] = vars
    """From parsed words to the target's keyword arguments."""
    schema: str = ""
    epilog: str = ""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are UserErrors, so that every wrong word is reported in one way."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


# ---------------------------------------------------------------------------------------------------
# Words of each command


def _integer(text: str, low: int) -> int:
    """argparse type: an integer in [low, 2**63)."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} should be an integer from {low}")
    return value


def _seed(text: str) -> int:
    return _integer(text, 0)


def _positive(text: str) -> int:
    return _integer(text, 1)


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted config overrides, such as trainer.lr=3e-4")


def _demo(parser: argparse.ArgumentParser) -> None:
    _overrides(parser)
    parser.add_argument("--seed", type=_seed, default=0, help="seed of tasks, sampling and weights (default 0)")
    parser.add_argument("--name", help="name of the run folder under runs/")


def _recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RECIPE [KEY=VALUE ...]", help="a recipe folder or TOML, then dotted config overrides")
    parser.add_argument("--resume", metavar="RUN", help="go on from the last checkpoint of this run folder")
    parser.add_argument("--name", help="name of the run folder under runs/")


def _recipe_arguments(words: argparse.Namespace) -> dict[str, object]:
    recipes = [w for w in words.words if "=" not in w]
    overrides = tuple(w for w in words.words if "=" in w)
    if len(recipes) > 1:
        raise UserError(f"one recipe at a time, got {' and '.join(map(repr, recipes))}; an override looks like trainer.lr=3e-4")
    if not recipes and not words.resume:
        raise UserError("which recipe? Give a recipe folder or a .toml file (recipes/nano), or --resume RUN")
    return {"recipe": recipes[0] if recipes else None, "overrides": overrides, "resume": words.resume, "name": words.name}


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help="name of a suite, or a task folder")
    _overrides(parser)
    parser.add_argument("--model", required=True, help="a name that `etude model ls` shows, or a model folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the trajectories and the scores")
    _json(parser)


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder (runs/<name>)")


def _debug_mismatch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder (runs/<name>)")
    parser.add_argument("step", type=_seed, metavar="STEP", help="a training step, counted from 0 as in events.jsonl")
    _overrides(parser)
    _json(parser)


def _tasks_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a project folder, an sdist or wheel, a package name (name==1.0), or katas[:heldout|:unseen]",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that the tasks are written into")
    parser.add_argument("--count", type=_positive, default=100, help="tasks wanted from each source (default 100; at most 40 of a package)")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the generator (default 0)")
    _json(parser)


def _tasks_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of tasks")
    _json(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to say to the model")
    parser.add_argument("--model", default="nano", help="a name that `etude model ls` shows, or a model folder (default nano)")
    parser.add_argument("--max-tokens", type=_positive, default=512, help="longest answer (default 512)")
    parser.add_argument("--temperature", type=float, default=0.2, help="0 always takes the likeliest token (default 0.2)")
    parser.add_argument("--top-p", type=float, default=0.9, help="sample from the likeliest tokens of this share (default 0.9)")
    parser.add_argument("--seed", type=_seed, default=0)


def _serve(parser: argparse.ArgumentParser) -> None:
    _overrides(parser)
    parser.add_argument("--model", default="nano", help="a name that `etude model ls` shows, or a model folder (default nano)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine only)")
    parser.add_argument("--port", type=_seed, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument("--api-key", metavar="env:NAME", help="clients must send the key in this environment variable")
    parser.add_argument("--contract", action="store_true", help="also serve the engine protocol under /engine/v1 (docs/engine-contract.md)")
    parser.add_argument(
        "--drain", type=float, default=30.0, metavar="S", help="seconds that requests in progress get at the end (default 30)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="what is computed with (auto: bfloat16 where it is fast)"
    )
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads of the engine (default 1)")


def _model_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="smollm2-135m, hf:OWNER/NAME[@REVISION], a Hugging Face folder, or a GGUF file")
    parser.add_argument("--name", help="what to call it (a folder or a file needs this)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="what a GGUF file's weights become (default bfloat16)")
    parser.add_argument("--force", action="store_true", help="replace a model of that name")
    _json(parser)


def _model_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a name that `etude model ls` shows")
    _json(parser)


def _env_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder for images, snapshots, leases and the token file")
    parser.add_argument("--listen", default="127.0.0.1:7711", metavar="ADDRESS:PORT", help="where to listen (default 127.0.0.1:7711)")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="lines OWNER:TOKEN (default DIR/tokens, made with one token)")
    parser.add_argument("--memory", type=float, default=0.0, metavar="GIB", help="memory for sandboxes (default 4/5 of the machine)")
    parser.add_argument("--network", action="store_true", help="let sandboxes have a network by policy; without this they have none")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME", help="environment variable that policies may inject")
    parser.add_argument("--endpoint", action="append", default=[], metavar="ADDRESS:PORT", help="place that policies may name with `at`")
    parser.add_argument("--drain", type=float, default=600.0, metavar="S", help="how long SIGTERM waits for environments (default 600)")
    parser.add_argument("--tls-cert", metavar="PEM", help="certificate; needed for addresses other than loopback")
    parser.add_argument("--tls-key", metavar="PEM")
    parser.add_argument("--insecure", action="store_true", help="send tokens in the clear on other addresses than loopback")


def _env_client(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="default ETUDE_ENV_URL; the token is ETUDE_ENV_TOKEN")


def _env_ls(parser: argparse.ArgumentParser) -> None:
    _env_client(parser)
    _json(parser)


def _env_exec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ID", help="an id that `etude env ls` shows")
    parser.add_argument("command", metavar="COMMAND", help="one shell command line, quoted")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S")
    _env_client(parser)


def _env_fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ID", help="an id that `etude env ls` shows")
    parser.add_argument("--count", type=_positive, default=1, help="forks wanted (default 1)")
    parser.add_argument("--level", choices=("L0", "L1", "L2", "L3"), default="L0", help="files, sessions, processes or the machine")
    parser.add_argument("--ttl", type=float, default=900.0, metavar="S", help="how long they live (default 900)")
    _env_client(parser)
    _json(parser)


def _env_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("envs", nargs="+", metavar="ID", help="ids that `etude env ls` shows")
    _env_client(parser)
    _json(parser)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="last line of output is one JSON object (schema in docs/schemas)")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="benchmarks/bench_NAME.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="the same things, smaller: at most a minute on two cores")
    parser.add_argument("--model", help="a model that `etude model ls` shows, for benchmarks that take one (engine)")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/NAME.DEVICE.json (full runs only)")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


# ---------------------------------------------------------------------------------------------------
# The table

SEE, TASKS, TRAIN, JUDGE = "See the whole loop work", "Make tasks", "Train", "Use and judge a model"
SANDBOXES, HERE = "Run sandboxes for other machines", "This machine, this code"

COMMANDS: dict[str, Command] = {
    "demo": Command(SEE, "", "train the shipped model on a laptop, watch it get better, see it solve a task", "etude.launch:demo", _demo),
    "tasks make": Command(
        TASKS, "SOURCE... --out DIR", "turn source code into verified tasks", "etude.launch:tasks_make", _tasks_make, schema="tasks_made"
    ),
    "tasks check": Command(TASKS, "DIR", "validate a folder of tasks again", "etude.launch:tasks_check", _tasks_check, schema="tasks"),
    "train": Command(
        TRAIN, "RECIPE [KEY=VALUE ...]", "reinforcement learning in sandboxes", "etude.launch:train", _recipe, _recipe_arguments
    ),
    "pretrain": Command(
        TRAIN, "RECIPE [KEY=VALUE ...]", "continued pretraining, in phases", "etude.launch:pretrain", _recipe, _recipe_arguments
    ),
    "check": Command(TRAIN, "RUN", "prove from a run's events that nothing was lost or trained twice", "etude.launch:check", _check),
    "debug mismatch": Command(
        TRAIN, "RUN STEP", "find where trainer and engine part", "etude.debug:mismatch", _debug_mismatch, schema="mismatch"
    ),
    "eval": Command(
        JUDGE, "SUITE --model M --out DIR", "score a model on a suite, with intervals", "etude.launch:evaluate", _eval, schema="eval"
    ),
    "generate": Command(JUDGE, "PROMPT [--model M]", "one answer from a model", "etude.launch:generate", _generate),
    "serve": Command(
        JUDGE,
        "[--model M] [KEY=VALUE ...]",
        "an OpenAI-compatible endpoint; overrides as engine.max_running=32",
        "etude.launch:serve",
        _serve,
    ),
    "model add": Command(
        JUDGE, "SOURCE [--name N]", "put a model on the shelf, such as smollm2-135m", "etude.launch:model_add", _model_add, schema="models"
    ),
    "model ls": Command(JUDGE, "", "models that have a name here", "etude.launch:model_ls", _json, schema="models"),
    "model rm": Command(JUDGE, "NAME", "take a model off the shelf", "etude.launch:model_rm", _model_rm, schema="models"),
    "env serve": Command(SANDBOXES, "--root DIR", "run sandboxes for other machines", "etude.sandbox.service.commands:serve", _env_serve),
    "env ls": Command(SANDBOXES, "", "environments that live on a server", "etude.sandbox.service.commands:ls", _env_ls, schema="envs"),
    "env exec": Command(SANDBOXES, "ID COMMAND", "run a command in one", "etude.sandbox.service.commands:execute", _env_exec),
    "env fork": Command(SANDBOXES, "ID", "copies that start from it", "etude.sandbox.service.commands:fork", _env_fork, schema="envs"),
    "env rm": Command(SANDBOXES, "ID...", "end environments", "etude.sandbox.service.commands:rm", _env_rm, schema="envs"),
    "doctor": Command(HERE, "", "what this machine can and cannot do, and how to enable it", "etude.doctor:main", _json, schema="doctor"),
    "bench": Command(HERE, "NAME", "measure one claim against a named peer", "etude.bench:main", _bench),
    "test": Command(HERE, "[--all] [pytest arguments]", "run this clone's tests (--all: the long ones too)", "etude.cli:test", _nothing),
}


def help_text() -> str:
    lines = [f"etude {__version__}: train a coding agent inside the harness it will be used in", ""]
    lines += ["usage: etude COMMAND [arguments]      (`etude COMMAND --help` says more)"]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", group]
        lines.append(f"  {f'{name} {command.usage}':<36} {command.help}")
    return "\n".join(lines)


def parser_for(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(prog=f"etude {name}", description=command.help, allow_abbrev=False)
    command.configure(parser)
    return parser


# ---------------------------------------------------------------------------------------------------
# Running one


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `etude` command; returns the exit status."""
    try:
        status = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away (`etude ... | head`); a second complaint at exit helps nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (EtudeError, OSError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if os.environ.get("ETUDE_TRACEBACK") == "1" or not isinstance(cause, (EtudeError, OSError)):
            raise
        print(f"error: {cause}", file=sys.stderr)
        return 2 if isinstance(cause, UserError) else 1


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"etude {__version__}")
        return 0
    name, rest = find_command(argv)
    if name == "test" and not {"-h", "--help"} & set(rest[:1]):
        return test(rest)
    command = COMMANDS[name]
    parser = parser_for(name)
    words, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        raise UserError(f"`etude {name}` does not take {unknown[0]!r}; {nearest(unknown[0].partition('=')[0], known)}")
    return call(command.target, **command.arguments(words))


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """The command's name (one or two words) and the words that follow it. A wrong name is told the nearest."""
    for size in (2, 1):
        name = " ".join(argv[:size])
        if name in COMMANDS and len(argv) >= size:
            return name, argv[size:]
    families = {name.split()[0] for name in COMMANDS if " " in name}
    if argv[0] in families:
        members = [name for name in COMMANDS if name.startswith(argv[0] + " ")]
        raise UserError(f"`etude {argv[0]}` is one of: {', '.join(members)}; see `etude --help`")
    raise UserError(f"no command {argv[0]!r}; {nearest(argv[0], [*COMMANDS, *families])} (`etude --help` lists them)")


def call(target: str, **arguments: object) -> int:
    module, _, function = target.partition(":")
    status = getattr(importlib.import_module(module), function)(**arguments)
    return 0 if status is None else int(status)


def test(words: Sequence[str]) -> int:
    """Run pytest over the clone this package lies in. Without --all the tests marked `slow` stay out."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests").is_dir() or not (root / "pyproject.toml").is_file():
        raise UserError(f"there are no tests beside {root}; run `./etude test` in a clone of the repository")
    if importlib.util.find_spec("pytest") is None:
        raise MissingExtra("pytest", "test", "`etude test`")
    everything = "--all" in words
    rest = [word for word in words if word != "--all"]
    selection = [] if everything else ["-m", "not slow"]
    sys.stdout.flush()
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *selection, *rest])


if __name__ == "__main__":
    sys.exit(main())
