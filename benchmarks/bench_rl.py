"""Trained tokens per second of the whole loop against TRL's GRPOTrainer: generation, reward, step, new weights in the generator.

Both start from the shipped nano weights and take the same prompts, group size, length of completions (all equally long, so that
both train on the same number of tokens), reward (the share of token ids that 7 divides: free to compute), loss (Dr. GRPO, no KL),
learning rate and number of threads; single turn, one step after the other, nothing overlapped, so that both can do it. Ours goes the
way of a run: engine, records with routes, packed rows with replayed routes, float32 masters, a weight delta published, checked
by hash and swapped into the engine. The peer keeps one set of weights, so it has nothing to send.

TRL is a dependency of this benchmark alone. Where the Python that runs it has none, ETUDE_TRL_PYTHON may name one that has:

    python -m venv trl && trl/bin/pip install trl && ETUDE_TRL_PYTHON=trl/bin/python ./etude bench rl

Without either, the peer's column is empty and a line says why. Ours runs before and after the peer, and all its steps count. A table of
both time ledgers is printed above the rows.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.bench import Row
from etude.inference.config import EngineConfig
from etude.model.shelf import PACKAGED
from etude.parts import make_engine, make_trainer
from etude.protocols import Engine, GenerateRequest, Generation, Trainer
from etude.records import Graded, Group, Sampling, Segment, StopReason, Trajectory, seed_for
from etude.text.tokenizer import load_tokenizer
from etude.trainer.config import RLConfig

PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
THREADS = 1
TEXTS = (
    "def clamp(value, low, high):\n    ",
    "def words(text):\n    ",
    "class Counter:\n    def __init__(self):\n        ",
    "import math\n\ndef area(radius):\n    ",
    "def first(items, default=None):\n    ",
    "def merge(left, right):\n    ",
    "def parse(line):\n    ",
    "for name, value in sorted(rows.items()):\n    ",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    model: str
    prompts: list[str]
    prompt_ids: list[list[int]]
    group: int
    length: int
    steps: int
    lr: float = 1e-5
    modulus: int = 7
    threads: int = THREADS
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Trained in a step."""
        return len(self.prompts) * self.group * self.length


class Ledger:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps: list[float] = []
        self._began = self._last = 0.0

    def begin(self) -> None:
        self._began = self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        self.steps.append(self._last - self._began)


def segment(prompt: list[int], generation: Generation) -> Segment:
    """The whole context with what was sampled; the last token was never fed, so its route is absent."""
    known, count = len(prompt), len(generation.ids)
    zeros_T = np.zeros(known + count, np.float32)
    logprob_T, logprob_t1_T = zeros_T.copy(), zeros_T.copy()
    logprob_T[known:], logprob_t1_T[known:] = generation.logprob_T, generation.logprob_t1_T
    version_T = np.full(known + count, -1, np.int16)
    version_T[known:] = generation.version_T
    return Segment(
        ids_T=np.array([*prompt, *generation.ids], np.int32),
        sampled_T=np.arange(known + count) >= known,
        logprob_T=logprob_T,
        logprob_t1_T=logprob_t1_T,
        version_T=version_T,
        message_T=np.zeros(known + count, np.int32),
        thinking_T=np.zeros(known + count, bool),
        versions=generation.versions,
        routes_TLK=generation.routes_PTLK,
        sampling=Sampling(max_tokens=count),
    )


def graded(job: Job, number: int, member: int, made: Segment, ids: tuple[int, ...]) -> Graded:
    trajectory = Trajectory(
        id=f"{number}-{member}",
        task_id=f"prompt {number % len(job.prompts)}",
        task_hash="",
        group=number,
        member=member,
        seed=0,
        segments=(made,),
        messages=(),
        stop=StopReason.DONE,
    )
    return Graded(trajectory=trajectory, parts={"share": sum(token % job.modulus == 0 for token in ids) / len(ids)})


async def one_step(job: Job, engine: Engine, trainer: Trainer, step: int, ledger: Ledger) -> None:
    ledger.begin()
    asked = [
        GenerateRequest(
            id=f"{step}-{p}-{g}", ids=ids, sampling=Sampling(temperature=1.0, max_tokens=job.length, seed=seed_for(0, step, p, g))
        )
        for p, ids in enumerate(job.prompt_ids)
        for g in range(job.group)
    ]
    version = await engine.version()
    got = await asyncio.gather(*(engine.generate(request) for request in asked))
    assert all(len(generation.ids) == job.length for generation in got)
    ledger.lap("generate")
    groups = []
    for p, ids in enumerate(job.prompt_ids):
        number = step * len(job.prompts) + p
        mine = got[p * job.group : (p + 1) * job.group]
        members = tuple(graded(job, number, g, segment(ids, generation), generation.ids) for g, generation in enumerate(mine))
        groups.append(Group(admission=number, task_id=members[0].trajectory.task_id, admitted_at=version, members=members))
    ledger.lap("reward and records")
    await trainer.step(groups)
    ledger.lap("training step")
    manifest, store = await trainer.publish()
    await trainer.commit(await engine.load(manifest, store))
    ledger.lap("publish and swap")
    ledger.end()


async def ours(job: Job) -> Ledger:
    """Steps of the loop after one that warms up."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as store:
        engine = make_engine(folder=job.model, engine=EngineConfig(), numerics="fast", version=None, device=job.device)
        config = RLConfig(lr=job.lr, kl=0.0, loss_constant=float(job.length), device=job.device, router_replay=True)
        trainer = make_trainer(folder=job.model, trainer=config, store=store)
        await one_step(job, engine, trainer, 0, Ledger())
        for step in range(1, job.steps):
            await one_step(job, engine, trainer, step, ledger)
        await engine.close()  # type: ignore[attr-defined]
        await trainer.close()
    return ledger


def peer_python() -> str | None:
    """A Python that has TRL."""
    if named := os.environ.get("ETUDE_TRL_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("trl") else None


def peer(job: Job) -> dict[str, Any] | None:
    python = peer_python()
    if python is None:
        print("no peer: TRL is not installed here; install it or set ETUDE_TRL_PYTHON to a Python that has it (see bench_rl.py)")
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(asdict(job)))
        env = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)
        done = subprocess.run([python, str(PEER), str(path)], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        print(f"no peer: {python} {PEER.name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["tokens"] == job.tokens
    return found


def run(device: str, quick: bool) -> list[Row]:
    prompts = list(TEXTS[: 2 if quick else 8])
    tokenizer = load_tokenizer(PACKAGED["nano"])
    ids = [tokenizer.encode(text) for text in prompts]
    shape = {"group": 4, "length": 32, "steps": 3} if quick else {"group": 8, "length": 128, "steps": 6}
    job = Job(model=str(PACKAGED["nano"]), prompts=prompts, prompt_ids=ids, device=device, **shape)
    ledgers = [asyncio.run(ours(job))]
    theirs = peer(job)
    ledgers.append(asyncio.run(ours(job)))
    steps = [seconds for ledger in ledgers for seconds in ledger.steps]
    for part in ledgers[0].seconds:
        print(f"ours  {part:32} {sum(ledger.seconds[part] for ledger in ledgers) / len(steps):.3f} s a step")
    rate = job.tokens / statistics.median(steps)
    if theirs is None:
        return [Row(name="rl tokens/s nano", unit="tokens/s", ours=rate, higher_is_better=True)]
    for part, seconds in theirs["ledger"].items():
        print(f"TRL   {part:32} {seconds / len(theirs['seconds']):.3f} s a step")
    print(f"TRL   {'step':32} {statistics.mean(theirs['seconds'][1:]):.3f} s")
    against = job.tokens / statistics.median(theirs["seconds"][1:])
    name = f"TRL {theirs['version']} GRPOTrainer"
    return [Row(name="rl tokens/s nano", unit="tokens/s", ours=rate, peer=against, peer_name=name, higher_is_better=True)]
