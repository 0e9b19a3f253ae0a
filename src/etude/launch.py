"""What the commands do: demo, train, pretrain, eval, check, tasks, generate, model."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax

import etude
from etude import local
from etude.config import apply_overrides, build, changed_fields, flat, load, resolved, secret, write_resolved
from etude.errors import TaskError, UserError, first_cause
from etude.evals.report import as_terminal, read_facts, write_report
from etude.evals.suite import Suite
from etude.evals.suite import evaluate as run_suite
from etude.loop import run as run_loop
from etude.model import shelf
from etude.parts import Run, RunConfig, model_folder, new_run_folder, read_run_config, revisions
from etude.records import Graded, Task
from etude.rollout import checkpoint
from etude.rollout.check import check_run
from etude.studio.terminal import Progress
from etude.tasks.formats import read_task, write_task
from etude.tasks.packages import Made, MakeConfig, make_from_package, merged
from etude.tasks.source import fixed_tasks, heldout_tasks, unseen_tasks

HERE = Path(__file__).parent
SHOWN = 40
"""Held-out tasks the demo tries at the end to find one worth showing."""


def recipe_file(recipe: str, file: str) -> Path:
    """A recipe by name, folder or TOML file. Names are looked up in the repository and in the installed package."""
    path = Path(recipe)
    places = [path, path / file, HERE.parents[1] / "recipes" / recipe / file, HERE / "recipes" / recipe / file]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise UserError(f"no recipe {recipe!r}; give a .toml file, a folder with {file}, or the name of a recipe such as nano")
    return found


# ---------------------------------------------------------------------------------------------------
# train and demo


def train(*, recipe: str | None, overrides: Sequence[str] = (), resume: str | None = None, name: str | None = None) -> int:
    """Run a recipe, or go on with a run that stopped."""
    if resume:
        folder = Path(resume)
        old = build(RunConfig, read_run_config(folder))
        config = build(RunConfig, apply_overrides(resolved(old), overrides))
        changed = changed_fields(old, config)
        held = [field for field, live in changed.items() if not live]
        if held:
            raise UserError(f"{held[0]} cannot change in a running job; start a new run for it")
        _run(config, folder, checkpoint.latest(folder), changed=sorted(changed))
    else:
        config = load(RunConfig, recipe_file(recipe or "", "run.toml"), [*overrides, *([f"name={jsonlib.dumps(name)}"] if name else [])])
        folder = new_run_folder(config)
        _run(config, folder, None)
    print(f"report: {folder / 'report.md'}")
    print(folder)
    return 0


def _run(config: RunConfig, folder: Path, resume: Path | None, *, changed: Sequence[str] = (), showcase: bool = False) -> None:
    """One process's part of a run, and its report, whatever ended it. Stopped in any way, it says how to go on."""
    if changed:
        _write_revision(config, folder)
    try:
        asyncio.run(_train(config, folder, resume, changed, showcase))
    except BaseException:
        if checkpoint.exists(folder):
            write_report(folder)
            print(f"stopped; to go on: etude train --resume {folder}", file=sys.stderr)
        raise


def _write_revision(config: RunConfig, folder: Path) -> None:
    """The changed config becomes the run's; the one before it stays beside it."""
    number = revisions(folder)
    os.replace(folder / "config.json", folder / f"config.{number}.json")
    write_resolved(config, folder / "config.json")


async def _train(config: RunConfig, folder: Path, resume: Path | None, changed: Sequence[str], showcase: bool) -> None:
    console = Console()
    with Progress(f"etude {config.recipe} -> {folder}", config.loop.steps, console) as progress:
        run, usage = await local.open_run(config, folder, resume=resume, watch=progress.see, evaluating=progress.evaluation)
        outcome, detail, shown = "failed", "", None
        try:
            _begin(run, resume, changed)
            await run_loop(config.loop, run.parts())
            if showcase:
                shown = await _showcase(run)
            outcome = "done"
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome, detail = "interrupted", f"continue with: etude train --resume {folder}"
            raise
        except BaseException as error:
            cause = first_cause(error)
            detail = f"{type(cause).__name__}: {cause}"[:500]
            raise
        finally:
            try:
                run.recorder.event("run_ended", outcome=outcome, detail=detail, time=run.recorder.ledger, cpu_s=usage.cpu_s())
            finally:
                await local.close_run(run)
    write_report(folder)
    if showcase:
        _print_showcase(console, shown)


def _begin(run: Run, resume: Path | None, changed: Sequence[str]) -> None:
    if resume:
        run.recorder.event("run_resumed", from_step=run.start_step, lineage=run.lineage)
        if changed:
            values = flat(resolved(run.config))
            run.recorder.event("config_revision", revision=run.revision, changed={name: values[name] for name in changed})
        return
    config = run.config
    run.recorder.event(
        "run_started",
        name=run.folder.name,
        recipe=config.recipe,
        seed=config.seed,
        schedule=config.loop.schedule,
        lineage=run.lineage,
        versions=versions(),
        cores=os.cpu_count() or 1,
    )


def versions() -> dict[str, str]:
    """Of everything whose version can change a number."""
    import platform
    from importlib import metadata

    names = ("torch", "numpy", "tokenizers", "safetensors")
    return {"etude": etude.__version__, "python": platform.python_version(), **{n: metadata.version(n) for n in names}}


def demo(*, name: str | None = None, seed: int = 0, overrides: Sequence[str] = (), root: Path = Path("runs")) -> int:
    """Reinforcement learning on nano from the shipped checkpoint, measured before and after."""
    words = [f"seed={seed}", f"tasks.seed={seed}", *overrides, *([f"name={jsonlib.dumps(name)}"] if name else [])]
    config = load(RunConfig, recipe_file("nano", "run.toml"), words)
    folder = new_run_folder(config, root)
    console = Console()
    console.print(f"Training the nano policy with reinforcement in real sandboxes; run folder {folder}", highlight=False)
    _run(config, folder, None, showcase=True)
    console.rule("what it learned")
    console.print(Markdown((folder / "report.md").read_text()))
    console.print(as_terminal(read_facts(folder)), highlight=False, markup=False)
    console.print(
        f"plot: {folder / 'plot.svg'}   report: {folder / 'report.md'}   any trajectory: {folder / 'trajectories'}", highlight=False
    )
    print(folder)
    return 0


async def _showcase(run: Run) -> tuple[Task, Graded] | None:
    """The first of some held-out tasks, none of them in the suites, that the trained policy solves in at least three turns."""
    tasks = heldout_tasks(SHOWN, seed=run.config.eval.seed + 1)
    with run.recorder.timed("showcase"):
        rollout = run.rollout("-show-")
        for index, task in enumerate(tasks):
            graded = await rollout(task, group=index, member=0, seed=index)
            if graded.report and graded.report.solved and graded.trajectory.effort.turns >= 3:
                return task, graded
    return None


def _print_showcase(console: Console, shown: tuple[Task, Graded] | None) -> None:
    if shown is None:
        console.print(
            f"none of {SHOWN} further held-out tasks was solved in three turns or more, so there is none to show", highlight=False
        )
        return
    task, graded = shown
    console.rule(f"one held-out task: {task.id}")
    for message in graded.trajectory.messages:
        for call in message.calls:
            console.print(f"[bold]-> {call.name}[/bold]", highlight=False)
            console.print("\n".join(f"   {k}: {v}" for k, v in call.arguments.items()), highlight=False, markup=False)
        for result in message.results:
            console.print("   " + result.text[:600].replace("\n", "\n   "), style="dim", highlight=False, markup=False)
        if message.role == "user" or (message.role == "assistant" and message.text):
            console.print(f"{message.role}: {message.text}", highlight=False, markup=False)
    console.print(Syntax(graded.trajectory.diff, "diff", background_color="default"))
    report = graded.report
    assert report is not None
    console.print(
        f"graded in a fresh sandbox: {len(report.passed)} of {len(report.passed) + len(report.failed)} tests pass, hidden ones included"
    )


# ---------------------------------------------------------------------------------------------------
# pretrain


def pretrain(*, recipe: str | None, overrides: Sequence[str] = (), resume: str | None = None, name: str | None = None) -> int:
    """Build the corpus when the recipe describes one, then run its phases."""
    from etude.factory.pretraining import RecipeConfig, run_recipe

    if resume:
        folder = Path(resume)
        config = build(RecipeConfig, apply_overrides(read_run_config(folder), overrides))
    else:
        config = load(RecipeConfig, recipe_file(recipe or "", "pretrain.toml"), overrides)
        folder = Path("runs") / (name or f"{config.recipe}-pretrain")
        if (folder / "config.json").exists():
            raise UserError(f"{folder} exists; give another --name, or continue it with --resume {folder}")
    try:
        result = run_recipe(config, folder, Console())
    except BaseException:
        print(f"stopped; to go on: etude pretrain --resume {folder}", file=sys.stderr)
        raise
    print(f"model: {result.model}  weights: {result.weights}")
    print(folder)
    return 0


# ---------------------------------------------------------------------------------------------------
# eval, check, tasks, generate


def evaluate(*, suite: str, model: str, out: Path, json: bool = False, overrides: Sequence[str] = ()) -> int:
    """Score a checkpoint on a suite: heldout, unseen, or a folder of tasks."""
    config = load(RunConfig, recipe_file("nano", "run.toml"), [f"model={jsonlib.dumps(str(model_folder(model)))}", *overrides])
    tasks = _suite_tasks(suite, config)
    if not tasks:
        raise UserError(f"{suite} holds no task folder; make some with `etude tasks make`")
    result = asyncio.run(_evaluate(config, Suite(name=suite, tasks=tuple(tasks), seed=config.eval.seed), Path(out)))
    print(jsonlib.dumps(result) if json else _scores(result))
    return 0


def _suite_tasks(suite: str, config: RunConfig) -> list[Task]:
    if suite == "heldout":
        return heldout_tasks(config.eval.heldout, config.eval.seed)
    if suite == "unseen":
        return unseen_tasks(config.eval.unseen, config.eval.seed)
    folder = Path(suite)
    if not folder.is_dir():
        raise UserError(f"no suite {suite!r}; give heldout, unseen, or a folder of tasks")
    return [read_task(p) for p in sorted(folder.iterdir()) if p.is_dir() and p.name != ".made"]


async def _evaluate(config: RunConfig, suite: Suite, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    run, usage = await local.open_run(config, out)
    try:
        result = await run_suite(suite, run.rollout("eval-"))
        for graded in result.graded:
            if graded is not None:
                run.recorder.shards.add(graded)
        version = await run.engine.version()
    finally:
        await local.close_run(run)
    score = result.score
    answer = {
        "suite": suite.name,
        "suite_hash": suite.hash,
        "model": str(version),
        "n": score.n,
        "pass_at_1": score.mean,
        "low": score.low,
        "high": score.high,
        "core_s": round(usage.cpu_s(), 2),
        **result.detail(),
    }
    (out / "eval.json").write_text(jsonlib.dumps(answer, indent=2) + "\n")
    return answer


def _scores(answer: dict[str, Any]) -> str:
    return (
        f"{answer['suite']}: pass@1 {answer['pass_at_1']:.3f} [{answer['low']:.3f}, {answer['high']:.3f}] on {answer['n']} tasks, "
        f"{answer['turns']:.1f} turns, {answer['tokens']:.0f} sampled tokens, tool errors {answer['tool_error_rate']:.3f}"
    )


def check(*, run: str) -> int:
    """Replay the event log of a run and say whether it kept its promises."""
    report = check_run(Path(run))
    print(report.text())
    return 0 if report.ok else 1


KATA_SPLITS = {"katas": "train", "katas:heldout": "heldout", "katas:unseen": "unseen"}
MOST_OF_A_PACKAGE = 40
"""Tasks taken from one package, so that no package dominates."""


def tasks_make(*, sources: Sequence[str], out: Path, count: int, seed: int, json: bool = False) -> int:
    """Make tasks from katas and from packages, validate each in real sandboxes, and write those that pass as folders."""
    out = Path(out)
    unknown = [s for s in sources if s not in KATA_SPLITS and s.startswith("kata") and not Path(s).exists() and "==" not in s]
    if unknown:
        raise UserError(
            f"no task source {unknown[0]!r}; known: {', '.join(KATA_SPLITS)}; a package of that name is asked for as NAME==VERSION"
        )
    katas = [task for source in sources if source in KATA_SPLITS for task in fixed_tasks(KATA_SPLITS[source], count, seed)]
    accepted, reasons = _validated(katas) if katas else ([], {})
    for task in accepted:
        write_task(task, out / task.id)
    made, core_s = _packages([source for source in sources if source not in KATA_SPLITS], out, min(count, MOST_OF_A_PACKAGE), seed)
    answer = merged(made, reasons)
    written = len(accepted) + sum(each.accepted for each in made)
    rejected = len(katas) - len(accepted) + sum(len(each.verdicts) - each.accepted for each in made)
    skipped = {"packages_skipped": sum(bool(each.skip) for each in made)} if made else {}
    answer = {"counts": {"written": written, "rejected": rejected, **skipped}, **answer}
    answer["core_s"] = round(core_s, 2)
    answer["tasks_per_core_hour"] = round(sum(each.accepted for each in made) / core_s * 3600, 1) if core_s > 0 else 0.0
    print(jsonlib.dumps(answer) if json else _made_text(answer, out))
    return 0


def _packages(specs: Sequence[str], out: Path, count: int, seed: int) -> tuple[list[Made], float]:
    """What came of each package, and the processor time it took, sandboxes included. Progress goes to stderr."""
    if not specs:
        return [], 0.0
    from etude.local import Usage
    from etude.sandbox.open import open_host

    async def make() -> tuple[list[Made], float]:
        host = open_host()
        usage = Usage([os.getpid(), getattr(host, "pid", 0)])
        seen: set[str] = set()
        cache = Path(os.environ.get("ETUDE_HOME") or Path.home() / ".cache" / "etude")
        settings = MakeConfig(count=count, seed=seed)
        try:
            done = []
            for spec in specs:
                say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
                done.append(await make_from_package(spec, host, out, cache, settings, seen=seen, say=say))
                print(f"{spec}: {done[-1].accepted} tasks {done[-1].skip} {done[-1].detail[:200]}".rstrip(), file=sys.stderr, flush=True)
            return done, usage.cpu_s()
        finally:
            await host.close()

    return asyncio.run(make())


def _made_text(answer: dict[str, Any], out: Path) -> str:
    lines = [f"{answer['counts']['written']} tasks in {out}; rejected: {answer['reasons'] or 'none'}"]
    for row in answer["packages"]:
        what = (
            f"skipped: {row['skip']} ({row['detail'][:120]})"
            if row["skip"]
            else f"{row['accepted']} of {row['judged']} candidates accepted"
        )
        lines.append(f"  {row['name'] or row['source']} {row['version']}: {what}, {row['tests']} tests, {row['flaky']} flaky")
    if answer["core_s"]:
        lines.append(f"{answer['core_s']:.0f} core-seconds, {answer['tasks_per_core_hour']:.0f} tasks per core-hour")
    return "\n".join(lines)


def tasks_check(*, folder: Path, json: bool = False) -> int:
    """Validate every task of a folder in real sandboxes; exit status 1 when one is rejected."""
    if not Path(folder).is_dir():
        raise UserError(f"no folder {folder}; give one that `etude tasks make` wrote")
    tasks, unreadable = [], 0
    for path in sorted(p for p in Path(folder).iterdir() if p.is_dir() and p.name != ".made"):
        try:
            tasks.append(read_task(path))
        except TaskError as error:
            print(f"unreadable: {error}", file=sys.stderr)
            unreadable += 1
    total = len(tasks) + unreadable
    if not total:
        raise UserError(f"{folder} holds no task folder; make some with `etude tasks make`")
    accepted, reasons = _validated(tasks)
    reasons |= {"unreadable": unreadable} if unreadable else {}
    answer = {"counts": {"tasks": total, "accepted": len(accepted), "rejected": total - len(accepted)}, "reasons": reasons}
    print(jsonlib.dumps(answer) if json else f"{len(accepted)} of {total} tasks accepted; rejected: {reasons or 'none'}")
    return 0 if len(accepted) == total else 1


def _validated(tasks: Sequence[Task]) -> tuple[list[Task], dict[str, int]]:
    """The tasks that pass the validator, and how many did not, by reason."""
    from etude.sandbox.open import open_host
    from etude.tasks.validate import validate_tasks

    async def validate() -> Any:
        host = open_host()
        try:
            return await validate_tasks(tasks, host)
        finally:
            await host.close()

    funnel = asyncio.run(validate())
    return funnel.tasks, {str(reason): count for reason, count in funnel.rejected.items()}


def generate(*, model: str, prompt: str, max_tokens: int = 512, temperature: float = 0.2, top_p: float = 0.9, seed: int = 0) -> int:
    """One answer in the checkpoint's chat format."""
    from etude.agent.chat import EngineChat, Reply
    from etude.inference.config import EngineConfig
    from etude.parts import make_engine
    from etude.records import Finish, Message, Sampling
    from etude.text.renderer import choose_renderer, message_text
    from etude.text.tokenizer import load_tokenizer

    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    renderer = choose_renderer(folder, tokenizer)

    async def reply() -> Reply:
        engine = make_engine(folder=str(folder), engine=EngineConfig(), numerics="fast", version=None)
        try:
            chat = EngineChat(engine, renderer, tokenizer, Sampling(temperature=temperature, top_p=top_p), seed=seed)
            return await chat.reply([Message(role="user", text=prompt)], max_tokens=max_tokens)
        finally:
            await engine.close()

    answer = asyncio.run(reply())
    print(message_text(answer.message))
    if answer.finish is Finish.LENGTH:
        sys.stdout.flush()
        print(f"(cut at {max_tokens} tokens; --max-tokens gives more)", file=sys.stderr)
    return 0


# ---------------------------------------------------------------------------------------------------
# serve

WAITING = 256
"""Requests in a server's queue at most, unless engine.max_waiting says otherwise."""


def serve(
    *,
    model: str = "nano",
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    contract: bool = False,
    drain: float = 30.0,
    device: str = "cpu",
    dtype: str = "auto",
    threads: int = 1,
    overrides: Sequence[str] = (),
) -> int:
    """Serve a model until Ctrl-C or SIGTERM; requests in progress then get `drain` seconds, a second Ctrl-C ends them at once."""
    from etude.inference.config import EngineConfig

    config = apply_overrides({"engine": {"max_waiting": WAITING}}, overrides)
    foreign = sorted(set(config) - {"engine"})
    if foreign or not isinstance(config["engine"], dict):
        name = foreign[0] if foreign else "engine"
        raise UserError(f"{name!r} is no field that a server has; it takes engine.NAME=VALUE, such as engine.max_running=32")
    key = secret(api_key) if api_key else ""
    if contract and not key and host not in ("127.0.0.1", "::1", "localhost"):
        raise UserError(f"--contract lets clients change the weights; at {host} it needs a key: --api-key env:NAME")
    setup = {"folder": str(model_folder(model)), "engine": build(EngineConfig, config["engine"], "engine."), "numerics": "fast"}
    setup |= {"version": None, "device": device, "dtype": dtype}
    asyncio.run(_serve(model, setup, host, port, key, contract, drain, threads))
    return 0


async def _serve(model: str, setup: dict[str, Any], host: str, port: int, key: str, contract: bool, drain: float, threads: int) -> None:
    from etude.serve.app import App
    from etude.serve.openai import Texts
    from etude.text.renderer import choose_renderer
    from etude.text.tokenizer import load_tokenizer

    asked = asyncio.Event()
    at_once = asyncio.Event()

    def stop() -> None:
        (at_once if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    tokenizer = load_tokenizer(Path(setup["folder"]))
    renderer = choose_renderer(setup["folder"], tokenizer)
    engine = await local.start("engine", "etude.parts:make_engine", setup, threads=threads)
    try:
        stats = await engine.stats()
        name = Path(model).name if "/" in model else model
        texts = Texts(model=name, tokenizer=tokenizer, renderer=renderer, window=int(stats["window"]))
        app = App(engine, texts, api_key=key, contract=contract)
        bound = await app.server.start(host, port)
        print(
            f"cache: {stats['cache_tokens']:,.0f} tokens in {stats['cache_bytes'] / 2**20:,.0f} MiB of "
            f"{stats['free_bytes_at_start'] / 2**20:,.0f} MiB free; {stats['max_running']:.0f} sequences at once"
        )
        where = f"[{host}]" if ":" in host else host
        print(f"serving {name} ({await engine.version()}) at http://{where}:{bound}/v1; Ctrl-C ends it", flush=True)
        await asked.wait()
        print(f"draining {app.server.in_progress} requests; Ctrl-C again ends them now", file=sys.stderr, flush=True)
        await _drained(app, drain, at_once)
    finally:
        await engine.close()


async def _drained(app: Any, drain: float, at_once: asyncio.Event) -> None:
    """Drain, unless a second signal comes."""
    draining, hurrying = asyncio.ensure_future(app.server.drain(drain)), asyncio.ensure_future(at_once.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        draining = asyncio.ensure_future(app.server.drain(0.0))
    cut = await draining
    print(f"done{f'; {cut} requests were cut off' if cut else ''}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------
# model


def model_add(*, source: str, name: str | None = None, dtype: str | None = None, force: bool = False, json: bool = False) -> int:
    """Put a model on the shelf, with progress on stderr."""
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"adding {source}", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"adding {source}: {what}", completed=done, total=total or None)

        model, added = shelf.add(source, name=name, dtype=dtype, force=force, progress=progress)
    if json:
        print(jsonlib.dumps(shelf.as_json([model.name] if added else [], [model])))
    else:
        print(f'{"added" if added else "already there:"} {_model_line(model)}\nuse it with --model {model.name}, or model = "{model.name}"')
    return 0


def model_ls(*, json: bool = False) -> int:
    found = shelf.models()
    if json:
        print(jsonlib.dumps(shelf.as_json([], found)))
        return 0
    for model in found:
        print(_model_line(model))
    missing = [name for name in shelf.CATALOGUE if name not in {model.name for model in found}]
    if missing:
        print(f"to be had with `etude model add`: {', '.join(missing)}")
    return 0


def model_rm(*, name: str, json: bool = False) -> int:
    folder = shelf.remove(name)
    print(jsonlib.dumps(shelf.as_json([name], [])) if json else f"removed {folder}")
    return 0


def _model_line(model: shelf.Model) -> str:
    origin = f"{model.source or 'source unknown'}, {model.licence or 'licence not stated'}"
    return f"{model.name:<20} {model.bytes / 2**20:7.1f} MiB {model.dtype:<9} {origin}  {model.path}"
