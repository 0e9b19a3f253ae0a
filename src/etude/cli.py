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
    etude.launch:model_add(*, source, name, dtype, force, json)
    etude.launch:model_ls(*, json)
    etude.launch:model_rm(*, name, json)
    etude.debug:mismatch(*, run, step, json, overrides)
    etude.doctor:main(*, json)
    etude.bench:main(*, name, device, quick, write)

Types: recipe, resume, name, suite, model, prompt, run, device, source, dtype: str (or None where optional); out, folder: Path;
overrides, sources: tuple of str; seed, count, max_tokens, step: int; temperature, top_p: float; json, quick, write, force: bool.

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


def _model_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="smollm2-135m, hf:OWNER/NAME[@REVISION], a Hugging Face folder, or a GGUF file")
    parser.add_argument("--name", help="what to call it (a folder or a file needs this)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="what a GGUF file's weights become (default bfloat16)")
    parser.add_argument("--force", action="store_true", help="replace a model of that name")
    _json(parser)


def _model_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a name that `etude model ls` shows")
    _json(parser)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="last line of output is one JSON object (schema in docs/schemas)")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="benchmarks/bench_NAME.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="the same things, smaller: at most a minute on two cores")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/NAME.DEVICE.json (full runs only)")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


# ---------------------------------------------------------------------------------------------------
# The table

SEE, TASKS, TRAIN, JUDGE, HERE = "See the whole loop work", "Make tasks", "Train", "Use and judge a model", "This machine, this code"

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
    "model add": Command(
        JUDGE, "SOURCE [--name N]", "put a model on the shelf, such as smollm2-135m", "etude.launch:model_add", _model_add, schema="models"
    ),
    "model ls": Command(JUDGE, "", "models that have a name here", "etude.launch:model_ls", _json, schema="models"),
    "model rm": Command(JUDGE, "NAME", "take a model off the shelf", "etude.launch:model_rm", _model_rm, schema="models"),
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
