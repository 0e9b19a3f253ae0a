"""What the commands do: demo, train, pretrain, eval, check, tasks, generate."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

import etude
from etude import local
from etude.config import apply_overrides, build, changed_fields, load, resolved
from etude.errors import UserError
from etude.evals.report import write_report
from etude.evals.suite import Suite
from etude.evals.suite import evaluate as run_suite
from etude.loop import run as run_loop
from etude.parts import Run, RunConfig, model_folder, new_run_folder, read_run_config
from etude.records import Graded, Task
from etude.rollout import checkpoint
from etude.rollout.check import check_run
from etude.studio.terminal import Progress
from etude.tasks.formats import read_task, write_task
from etude.tasks.source import fixed_tasks, heldout_tasks, unseen_tasks

HERE = Path(__file__).parent


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
        held = [field for field, live in changed_fields(old, config).items() if not live]
        if held:
            raise UserError(f"{held[0]} cannot change in a running job; start a new run for it")
        asyncio.run(_train(config, folder, checkpoint.latest(folder)))
    else:
        config = load(RunConfig, recipe_file(recipe or "", "run.toml"), [*overrides, *([f"name={jsonlib.dumps(name)}"] if name else [])])
        folder = new_run_folder(config)
        asyncio.run(_train(config, folder, None))
    print(f"report: {folder / 'report.md'}")
    print(folder)
    return 0


async def _train(config: RunConfig, folder: Path, resume: Path | None, *, showcase: bool = False, console: Console | None = None) -> None:
    console = console or Console()
    with Progress(f"etude {config.recipe} -> {folder}", config.loop.steps, console) as progress:
        run, usage = await local.open_run(config, folder, resume=resume, watch=progress.see, evaluating=progress.evaluation)
        outcome, detail = "failed", ""
        try:
            _begin(run, resume)
            await run_loop(config.loop, run.parts())
            outcome = "done"
            shown = await _showcase(run) if showcase else None
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome, detail = "interrupted", f"continue with: etude train --resume {folder}"
            raise
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            run.recorder.event("run_ended", outcome=outcome, detail=detail, time=run.recorder.ledger, cpu_s=usage.cpu_s())
            await local.close_run(run)
    write_report(folder)
    if showcase and shown:
        _print_showcase(console, *shown)


def _begin(run: Run, resume: Path | None) -> None:
    if resume:
        run.recorder.event("run_resumed", from_step=run.start_step, lineage=run.lineage)
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


def demo(*, name: str | None = None, seed: int = 0, overrides: Sequence[str] = ()) -> int:
    """Reinforcement learning on nano from the shipped checkpoint, measured before and after."""
    words = [f"seed={seed}", f"tasks.seed={seed}", *overrides, *([f"name={jsonlib.dumps(name)}"] if name else [])]
    config = load(RunConfig, recipe_file("nano", "run.toml"), words)
    folder = new_run_folder(config)
    console = Console()
    console.print(f"Training the nano policy with reinforcement in real sandboxes; run folder {folder}", highlight=False)
    asyncio.run(_train(config, folder, None, showcase=True, console=console))
    console.print((folder / "report.md").read_text(), highlight=False, markup=False)
    print(folder)
    return 0


async def _showcase(run: Run) -> tuple[Task, Graded] | None:
    """A held-out task that the policy failed before and solves now, rolled out once more with the trained weights."""
    tasks = heldout_tasks(40, seed=1)
    with run.recorder.timed("showcase"):
        rollout = run.rollout("-show-")
        for index, task in enumerate(tasks):
            graded = await rollout(task, group=index, member=0, seed=index)
            if graded.report and graded.report.solved and graded.trajectory.effort.turns >= 3:
                return task, graded
    return None


def _print_showcase(console: Console, task: Task, graded: Graded) -> None:
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


def pretrain(*, recipe: str, overrides: Sequence[str] = (), resume: str | None = None, name: str | None = None) -> int:
    """Build the corpus when the recipe describes one, then run its phases."""
    from etude.factory.pretraining import RecipeConfig, run_recipe

    config = load(RecipeConfig, recipe_file(recipe, "pretrain.toml"), overrides)
    folder = Path(resume) if resume else Path("runs") / (name or f"{config.recipe}-pretrain")
    if not resume and (folder / "checkpoints").exists():
        raise UserError(f"{folder} exists; give another --name, or continue it with --resume {folder}")
    result = asyncio.run(run_recipe(config, folder, Console()))
    print(f"model: {result.model}  weights: {result.weights}")
    print(folder)
    return 0


# ---------------------------------------------------------------------------------------------------
# eval, check, tasks, generate


def evaluate(*, suite: str, model: str, out: Path, json: bool = False, overrides: Sequence[str] = ()) -> int:
    """Score a checkpoint on a suite: heldout, unseen, or a folder of tasks."""
    config = load(RunConfig, recipe_file("nano", "run.toml"), [f"model={jsonlib.dumps(str(model_folder(model)))}", *overrides])
    tasks = _suite_tasks(suite, config)
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
    return [read_task(p) for p in sorted(folder.iterdir()) if p.is_dir()]


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


def tasks_make(*, sources: Sequence[str], out: Path, count: int, seed: int, json: bool = False) -> int:
    """Write kata tasks as folders; other sources belong to the task factory."""
    splits = {"katas": "train", "katas:heldout": "heldout", "katas:unseen": "unseen"}
    counts = {"written": 0}
    for source in sources:
        if source not in splits:
            raise UserError(f"no task source {source!r}; known: {', '.join(splits)}")
        for task in fixed_tasks(splits[source], count, seed):
            write_task(task, Path(out) / task.id)
            counts["written"] += 1
    print(jsonlib.dumps({"counts": counts, "reasons": {}}) if json else f"{counts['written']} tasks in {out}")
    return 0


def tasks_check(*, folder: Path, json: bool = False) -> int:
    """Validate every task of a folder in real sandboxes; exit status 1 when one is rejected."""
    from etude.sandbox.open import open_host
    from etude.tasks.validate import validate_tasks

    tasks = [read_task(p) for p in sorted(Path(folder).iterdir()) if p.is_dir()]

    async def validate() -> Any:
        host = open_host()
        try:
            return await validate_tasks(tasks, host)
        finally:
            await host.close()

    funnel = asyncio.run(validate())
    accepted, reasons = funnel.accepted, {str(k): v for k, v in funnel.rejected.items()}
    answer = {"counts": {"tasks": len(tasks), "accepted": accepted, "rejected": len(tasks) - accepted}, "reasons": reasons}
    print(jsonlib.dumps(answer) if json else f"{accepted} of {len(tasks)} tasks accepted; rejected: {reasons or 'none'}")
    return 0 if accepted == len(tasks) else 1


def generate(*, model: str, prompt: str, max_tokens: int = 128, temperature: float = 1.0, seed: int = 0) -> int:
    """Continue a prompt in the checkpoint's chat format."""
    from etude.agent.chat import EngineChat
    from etude.inference.config import EngineConfig
    from etude.parts import make_engine
    from etude.records import Message, Sampling
    from etude.text.renderer import choose_renderer, message_text
    from etude.text.tokenizer import load_tokenizer

    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    renderer = choose_renderer(folder, tokenizer)

    async def reply() -> str:
        engine = make_engine(folder=str(folder), engine=EngineConfig(), numerics="fast", version=None)
        chat = EngineChat(engine, renderer, tokenizer, Sampling(temperature=temperature), seed=seed)
        answer = await chat.reply([Message(role="user", text=prompt)], max_tokens=max_tokens)
        await engine.close()
        return message_text(answer.message)

    print(asyncio.run(reply()))
    return 0
