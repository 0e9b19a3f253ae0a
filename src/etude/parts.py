"""From a config to implementations: the only file that picks them.

RunConfig      everything one RL run is told (recipes/<rung>/run.toml)
make_engine, make_trainer    build the two heavy parts; called in their own processes by `local.py`, or here
Run            a run folder with all parts wired, from start or from a checkpoint
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import etude
from etude.agent.chat import EngineChat
from etude.agent.loop import AgentConfig
from etude.config import config, write_resolved
from etude.errors import IntegrityError, UserError
from etude.evals.suite import Result, Suite, evaluate
from etude.inference.config import EngineConfig
from etude.loop import LoopConfig, Parts
from etude.model.config import Numerics
from etude.model.shelf import model_folder
from etude.protocols import Engine, SandboxHost, Trainer
from etude.records import Sampling, Version
from etude.rewards.parts import RewardConfig
from etude.rollout import checkpoint
from etude.rollout.recorder import Recorder
from etude.rollout.rollout import AgentRollout
from etude.rollout.slots import Slots
from etude.tasks.source import KataConfig, KataSource, heldout_tasks, unseen_tasks
from etude.text.renderer import choose_renderer
from etude.text.tokenizer import load_tokenizer
from etude.trainer.config import RLConfig

UNSEEN_SLICES = 8
"""Runs of this many consecutive seeds are evaluated on different tasks of unseen families."""


@config
class EvalConfig:
    heldout: int = 200
    """Tasks of train families with constants and names never used in training."""
    unseen: int = 70
    """Tasks of families never met in reinforcement."""
    seed: int = 0
    """Of the held-out tasks, the same for every run. Sampling seeds of a suite follow from it, so two versions see the same dice.
    Unseen tasks are a slice of one such list, chosen by the run's seed: runs of different seeds can be pooled."""


@config
class SandboxConfig:
    backend: Literal["auto", "namespace", "plain", "remote"] = "auto"
    """remote: the environment service at ETUDE_ENV_URL, with the token ETUDE_ENV_TOKEN."""
    unsafe: bool = False
    """Needed for the plain backend, which protects nothing."""


@config
class RunConfig:
    """One run of simulated RL."""

    recipe: str = "run"
    name: str = ""
    """Folder under runs/; the recipe's name and a number when empty."""
    seed: int = 0
    model: str = "nano"
    """A model's name (`etude model ls`), or a Hugging Face folder."""
    renderer: str = ""
    """Renderer by name; empty chooses it by the checkpoint's chat template."""
    processes: Literal["many", "one"] = "many"
    """many: engine and trainer in processes of their own. one: everything in this process (tests, debugging)."""
    threads: int = 1
    """CPU threads of each heavy process."""
    numerics: Numerics = "fast"
    """Of engine and trainer alike."""
    temperature: float = 1.0
    max_running: int = 32
    """Rollouts that run at once."""
    loop: LoopConfig = LoopConfig()
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    trainer: RLConfig = RLConfig()
    rewards: RewardConfig = RewardConfig()
    tasks: KataConfig = KataConfig()
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self) -> None:
        """Lockstep means bit-reproducible, so it settles what that needs: numerics that do not depend on the batch, one
        call at a time, no clock, and no durations or paths in what the policy sees."""
        if self.loop.schedule == "lockstep":
            agent = dataclasses.replace(self.agent, max_parallel_calls=1, scrub=True, time_limit_s=0.0)
            for name, value in (("numerics", "invariant"), ("agent", agent)):
                object.__setattr__(self, name, value)


def trainer_of(config: RunConfig) -> RLConfig:
    """The trainer's config with what the run settles: numerics, and how long a schedule that ends is."""
    ends = config.trainer.schedule.kind != "constant"
    steps = config.trainer.schedule_steps or (config.loop.steps if ends else 0)
    return dataclasses.replace(config.trainer, numerics=config.numerics, schedule_steps=steps)


# ---------------------------------------------------------------------------------------------------
# The heavy parts. These functions import torch, and run in the process that needs it.


def settle() -> None:
    """Threads of this process, and memory that stays ours: glibc gives large blocks back to the kernel at once and takes the
    page faults again at the next tensor (decode of 32 sequences: 24.9 ms with its defaults, 8.7 ms without)."""
    import ctypes

    import torch

    torch.set_num_threads(int(os.environ.get("ETUDE_THREADS", "1")))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def make_engine(
    *,
    folder: str,
    engine: EngineConfig,
    numerics: Numerics,
    version: Version | None,
    published: str = "bfloat16",
    device: str = "cpu",
    dtype: str = "",
) -> Engine:
    """The native engine on a model folder. Weights arrive in their `published` type and are computed with in `dtype`: float32 on a CPU
    and bfloat16 on a GPU unless said otherwise, as the trainer does; "auto" takes bfloat16 wherever the hardware multiplies it."""
    import torch

    from etude.inference.engine import NativeEngine
    from etude.model.linear import bfloat16_is_fast
    from etude.model.transformer import rounded
    from etude.model.weights import load_model
    from etude.sync.chain import weights_hash
    from etude.sync.receive import Receiver

    settle()
    usual = "bfloat16" if device != "cpu" or (dtype == "auto" and bfloat16_is_fast()) else "float32"
    compute = getattr(torch, usual if dtype in ("", "auto") else dtype)
    model = load_model(Path(folder), dtype=compute, device=device, numerics=numerics)
    params = dict(model.named_parameters())
    wire = {name: rounded(name, p.detach(), getattr(torch, published)) for name, p in params.items()}
    found = weights_hash(wire)
    if version is not None and version.hash != found:
        raise IntegrityError(
            f"the weights in {folder} hash to {found}, the run's {version} says {version.hash}; resume from another checkpoint"
        )
    current = version or Version(lineage=0, ordinal=0, hash=found)

    @torch.no_grad()
    def serve() -> None:
        """Compute with the published weights: what the version's hash is over is what samples, from the first token on."""
        for name, tensor in wire.items():
            params[name].copy_(tensor)

    serve()

    def apply(state: dict[str, torch.Tensor], manifest: Any, source: str) -> Version:
        """Advance the published weights, then the ones computed with."""
        nonlocal current
        current = Receiver(wire, source, version=current).advance(manifest)
        serve()
        return current

    return NativeEngine(model, version=current, config=engine, apply=apply)


def make_trainer(*, folder: str, trainer: RLConfig, store: str, data: tuple[str, ...] = ()) -> Trainer:
    """The RL trainer on a model folder. A resumed run then loads its checkpoint under a new lineage."""
    from etude.trainer.rl import RLTrainer

    settle()
    return RLTrainer(trainer, Path(folder), store=store, data=data)


# ---------------------------------------------------------------------------------------------------
# One run


class Run:
    """A run folder and everything that works on it. `engine`, `trainer` and `host` are given by who starts processes."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        engine: Engine,
        trainer: Trainer,
        host: SandboxHost,
        lineage: int = 0,
        state: checkpoint.RunState | None = None,
        watch: Callable[[dict[str, Any]], None] | None = None,
        evaluating: Callable[[str, int, int], None] | None = None,
        revision: int = 0,
        since: float | None = None,
    ) -> None:
        """`since` is the monotonic time at which the run began to start its parts."""
        self.config, self.folder, self.lineage, self.revision = config, folder, lineage, revision
        self.engine, self.trainer, self.host = engine, trainer, host
        self._evaluating = evaluating
        self.recorder = Recorder(folder, clock=config.loop.schedule == "free", lineage=lineage, watch=watch, since=since)
        source = model_folder(config.model)
        self.tokenizer = load_tokenizer(source)
        self.renderer = choose_renderer(source, self.tokenizer, config.renderer or None)
        self.tasks = KataSource(config.tasks)
        self.slots = Slots(config.loop.groups_per_step, config.loop.max_staleness, config.loop.steps)
        if state:
            state.restore(self.slots, self.tasks)
        self.start_step = state.step if state else 0
        self.results: dict[int, dict[str, Result]] = {}

    def chat(self, *, id: str, seed: int) -> EngineChat:
        c = self.config
        return EngineChat(
            self.engine,
            self.renderer,
            self.tokenizer,
            Sampling(temperature=c.temperature),
            seed=seed,
            id=id,
            engine_build=f"native-{etude.__version__}",
            numerics=c.numerics,
            cache_policy=c.engine.cache_policy,
        )

    def rollout(self, label: str) -> AgentRollout:
        c = self.config
        return AgentRollout(
            host=self.host,
            chat=self.chat,
            agent=c.agent,
            rewards=c.rewards,
            label=f"{self.lineage}{label}",
            max_running=c.max_running,
            config_revision=self.revision,
        )

    def parts(self) -> Parts:
        return Parts(
            seed=self.config.seed,
            tasks=self.tasks,
            rollout=self.rollout("-"),
            trainer=self.trainer,
            engine=self.engine,
            slots=self.slots,
            recorder=self.recorder,
            checkpoint=self.checkpoint,
            evaluate=self.evaluate,
            start_step=self.start_step,
        )

    async def checkpoint(self, step: int) -> None:
        path = await checkpoint.save(
            self.folder, step, lineage=self.lineage, seed=self.config.seed, trainer=self.trainer, tasks=self.tasks, slots=self.slots
        )
        self.recorder.event("checkpoint", step=step, path=str(path.relative_to(self.folder)), unfinished=len(self.slots.ready))
        self.recorder.events.sync()

    def suites(self) -> list[Suite]:
        c = self.config.eval
        first = self.config.seed % UNSEEN_SLICES * c.unseen
        lists = {"heldout": heldout_tasks(c.heldout, c.seed), "unseen": unseen_tasks(first + c.unseen, c.seed)[first:]}
        return [Suite(name=name, tasks=tuple(tasks), seed=c.seed) for name, tasks in lists.items() if tasks]

    async def evaluate(self, step: int) -> None:
        """Score the weights now served on the fixed suites, and write the scores as events."""
        for suite in self.suites():
            with self.recorder.timed("evaluate"):
                seen = functools.partial(self._evaluating, suite.name) if self._evaluating else None
                result = await evaluate(suite, self.rollout(f"-eval-{suite.name}-{step}-"), progress=seen)
            score = result.score
            for graded in result.graded:
                if graded is not None:
                    self.recorder.shards.add(graded)
            self.results.setdefault(step, {})[suite.name] = result
            self.recorder.event(
                "eval",
                step=step,
                suite=suite.name,
                tasks=score.n,
                pass_at_1=score.mean,
                low=score.low,
                high=score.high,
                detail=result.detail(),
            )


# ---------------------------------------------------------------------------------------------------
# Run folders


def new_run_folder(config: RunConfig, root: Path = Path("runs")) -> Path:
    """Make `runs/<name>` with the resolved config inside. A given name that exists is an error; a made-up one is numbered."""
    if config.name:
        folder = root / config.name
        if folder.exists():
            raise UserError(f"{folder} exists; give another --name, or continue it with --resume {folder}")
    else:
        taken = {p.name for p in root.iterdir()} if root.is_dir() else set()
        number = next(n for n in range(1, 10**6) if f"{config.recipe}-{n}" not in taken)
        folder = root / f"{config.recipe}-{number}"
    folder.mkdir(parents=True)
    write_resolved(config, folder / "config.json")
    return folder


def revisions(folder: Path) -> int:
    """How many times the config of a run changed while it went on; the ones before lie beside it as config.N.json."""
    return len(list(folder.glob("config.*.json")))


def read_run_config(folder: Path) -> dict[str, Any]:
    """The resolved config of a run folder, as plain data for `config.build`."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} is no run folder: {path.name} cannot be read ({error})") from error
