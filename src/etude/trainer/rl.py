"""The reinforcement-learning trainer: groups in, one optimizer step, a new version of the weights out.

    groups -> advantages -> samples -> packed rows -> forward and backward, row by row -> clip -> optimizer -> version

Weights exist twice. The optimizer moves float32 masters; the model's parameters hold the masters rounded to `publish_dtype`, and
those are what the trainer's forward uses, what `publish` sends, and what the version's hash is over. So with equal numerics the
engine and the trainer compute with bit-equal weights, and a small update is not lost to rounding.

Invariants: rows are visited in a fixed order, so equal input gives equal bits; a loss or gradient that is not finite stops the step
before any weight changes; groups are consumed once, and a step without signal changes no weight and still counts.

Async: every method runs on the trainer's single worker thread, in the order of the calls; awaiting one never blocks the loop.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from etude.errors import CheckpointError, IntegrityError, UserError
from etude.model.families import PREFIX
from etude.model.transformer import Decoder, rounded
from etude.model.weights import load_model
from etude.optim.build import Optimizer, build_optimizer, clip_gradients
from etude.optim.schedules import factor
from etude.records import Batch, Group, Manifest, StepReport, Version
from etude.sync.chain import weights_hash
from etude.trainer import mismatch, provenance
from etude.trainer.advantage import kept, silent
from etude.trainer.alarms import alarms
from etude.trainer.checkpoint import read_state, restore_tensors, save_checkpoint
from etude.trainer.config import RLConfig
from etude.trainer.flops import TRAIN_FACTOR, forward_flops
from etude.trainer.losses import TokenStats, load_entropy, replay_shares, require_finite, rl_loss, score, targets
from etude.trainer.pack import pack, samples_from_groups

T = TypeVar("T")


class Publisher(Protocol):
    """What the trainer needs of `etude.sync.publish.Publisher`."""

    def publish(self, state: dict[str, Tensor], version: Version) -> Manifest: ...

    def commit(self, version: Version) -> None: ...


FINAL_NORM = "norm.weight"
"""Scales every logit: logits are linear in it."""
GAIN_STEP_MOST = 0.15
"""Most that one step moves the logarithm of the logits' scale, whatever the gradient says."""


def gain_slope(weight: Tensor) -> float:
    """Derivative of the loss by the logarithm of the logits' scale: by Euler, the gradient along the weight itself."""
    return 0.0 if weight.grad is None else float((weight.grad * weight.detach()).sum())


@torch.no_grad()
def move_gain(weight: Tensor, slope: float, lr: float) -> float:
    """One gradient step on that logarithm; returns it.

    A policy's temperature is one direction among millions, and every token of every rollout has a say in it. So its gradient is known long
    before that of any single weight, while an optimizer that steps by coordinate moves it as slowly as the rest.
    """
    step = max(-GAIN_STEP_MOST, min(GAIN_STEP_MOST, -lr * slope))
    if step:
        weight.mul_(math.exp(step))
    return step


class Policy:
    """The policy's weights: the model as published, and the float32 masters the optimizer moves."""

    def __init__(self, folder: Path, config: RLConfig) -> None:
        self.compute, self.published_dtype = getattr(torch, config.compute_dtype), getattr(torch, config.publish_dtype)
        model = load_model(folder, dtype=torch.float32, device=config.device, numerics=config.numerics)
        self.shared = self.compute == self.published_dtype == torch.float32
        """Masters are the parameters themselves: nothing is rounded."""
        self.master: dict[str, Tensor] = {n: p if self.shared else p.detach().clone() for n, p in model.named_parameters()}
        self.model = model.to(self.compute)
        self.params = dict(self.model.named_parameters())
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters, rounded to the published type, into the model."""
        if not self.shared:
            for name, param in self.params.items():
                param.copy_(rounded(name, self.master[name], self.published_dtype))

    def published(self) -> dict[str, Tensor]:
        return {n: rounded(n, p.detach(), self.published_dtype) for n, p in self.params.items()}

    def collect(self) -> None:
        """Add the model's gradients to the masters' float32 ones; after every row, so that sums do not round to bfloat16."""
        if self.shared:
            return
        for name, param in self.params.items():
            if param.grad is None:
                continue
            master, grad = self.master[name], param.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            param.grad = None

    def zero_grad(self) -> None:
        for tensor in (*self.params.values(), *self.master.values()):
            tensor.grad = None


class RLTrainer:
    """One RL stage on one device. Implements `protocols.Trainer`."""

    def __init__(
        self,
        config: RLConfig,
        model_folder: str | Path,
        *,
        store: str | Path | None = None,
        publisher: Publisher | None = None,
        lineage: int = 0,
        data: Sequence[str] = (),
        licence: str = "",
    ) -> None:
        """`store` is where a publisher is made on the first publish (in a new lineage after a resume), unless one is given.
        `data` and `licence` go to the provenance."""
        self.config, self.folder = config, Path(model_folder)
        self.data, self.licence = tuple(data), licence
        self.store, self._given, self._publisher = str(store or ""), publisher, publisher
        self.policy = Policy(self.folder, config)
        moved = {n: p for n, p in self.policy.master.items() if not n.startswith(PREFIX)}  # heads for drafts stay as they are
        self.optimizer: Optimizer = build_optimizer(self.policy.model, config.optim, moved)
        self.steps = 0
        self.flops = {"rl": 0.0, "rollouts": 0.0}
        self.base = provenance.read(self.folder)
        self._version = Version(lineage=lineage, ordinal=0, hash=weights_hash(self.policy.published()))
        self.reference_folder, self.reference_hash = self.folder, self._version.hash
        self._reference: Decoder | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    # -- the Trainer protocol ------------------------------------------------------------------------

    async def step(self, groups: Sequence[Group]) -> StepReport:
        """Waits for the worker thread; returns after the weights have changed."""
        return await self._run(self._step, list(groups))

    async def publish(self) -> tuple[Manifest, str]:
        return await self._run(self._publish)

    async def commit(self, version: Version) -> None:
        await self._run(self._commit, version)

    async def save(self, folder: Path) -> None:
        await self._run(self._save, Path(folder))

    async def load(self, folder: Path, lineage: int) -> Version:
        return await self._run(self._load, Path(folder), lineage)

    async def version(self) -> Version:
        return self._version

    async def close(self) -> None:
        self._worker.shutdown(wait=True)

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, functools.partial(call, *arguments))

    # -- one step -------------------------------------------------------------------------------------

    def _step(self, groups: list[Group]) -> StepReport:
        config, clock = self.config, _Clock()
        where = f"step {self.steps + 1}"
        samples, normalisers = samples_from_groups(groups, self._version, config)
        shape = self.policy.model.config
        rows = pack(samples, config.row_tokens, functools.partial(forward_flops, shape), normalisers)
        clock.lap("pack")
        self.policy.zero_grad()
        try:
            metrics = self._gradients(rows, where, clock)
            metrics["grad_norm"] = clip_gradients(self.policy.master, config.optim.clip_norm)
            require_finite("the gradient norm", metrics["grad_norm"], where)
            scheduled = factor(config.schedule, self.steps + 1, config.schedule_steps or None)
            lr = config.lr * scheduled
            metrics["gain_slope"] = gain_slope(self.policy.master[FINAL_NORM])
            metrics["gain_step"] = 0.0
            if rows and (config.kl > 0 or config.balance > 0 or any(s.advantage != 0.0 for s in samples)):
                self.optimizer.step(lr)
                metrics["gain_step"] = move_gain(self.policy.master[FINAL_NORM], metrics["gain_slope"], config.gain_lr * scheduled)
                self.policy.round()
        finally:
            self.policy.zero_grad()
        self.steps += 1
        self._version = Version(lineage=self._version.lineage, ordinal=self.steps, hash=weights_hash(self.policy.published()))
        self._count_flops(rows, groups)
        clock.lap("optimizer")
        metrics |= {"lr": lr, "rows": float(len(rows)), "tokens": float(sum(len(r.ids_N) for r in rows))}
        metrics |= {"groups": float(len(groups)), "rollouts": float(sum(len(kept(g)) for g in groups))}
        metrics["signal_rollouts"] = float(len({s.origin[:2] for s in samples if s.advantage != 0.0}))
        metrics["silent_groups"] = float(sum(silent(g) for g in groups))
        found = alarms(metrics, config.alarms)
        return StepReport(step=self.steps, version=self._version, metrics=metrics, seconds=clock.done(), alarms=found)

    def _gradients(self, rows: Sequence[Batch], where: str, clock: _Clock) -> dict[str, float]:
        """Forward and backward over all rows; leaves float32 gradients on the masters."""
        config, model = self.config, self.policy.model
        total = max(sum(len(r.ids_N) for r in rows), 1)
        stats: list[TokenStats] = []
        replay = config.plausible() if config.router_replay and model.config.moe else None
        loss_sum, balance_sum, load_LE = 0.0, 0.0, None
        replay_L3 = torch.zeros(model.config.moe_layers, 3, dtype=torch.int64, device=config.device)
        for index, row in enumerate(rows):
            where_M = targets(row)
            reference_M = self._reference_logp(row, where_M) if config.kl > 0 else None
            clock.lap("reference")
            scores = score(model, row, where_M, replay=replay)
            loss, row_stats = rl_loss(scores, row, where_M, reference_M, config)
            share = len(row.ids_N) / total
            if config.balance:
                loss = loss + config.balance * share * scores.balance
            clock.lap("forward")
            loss_sum += loss.item()
            here = f"{where}, row {index + 1} of {len(rows)}"
            require_finite("the loss", loss_sum, here)
            require_finite("the largest |delta log-prob|", np.abs(row_stats.logp_M - row_stats.old_M).max(initial=0.0), here)
            loss.backward()
            self.policy.collect()
            clock.lap("backward")
            stats.append(row_stats)
            balance_sum += share * scores.balance.item()
            if scores.load_LE is not None:
                load_LE = scores.load_LE if load_LE is None else load_LE + scores.load_LE
            if scores.replay_L3 is not None:
                replay_L3 += scores.replay_L3
        metrics = {"loss": loss_sum, **mismatch.report(stats, self._version.ordinal)}
        if load_LE is not None:
            metrics |= {"balance": balance_sum, "load_entropy": load_entropy(load_LE)}
        if replay is not None:
            metrics |= replay_shares(replay_L3, total * model.config.moe_layers * model.config.experts_per_token)
        return metrics

    @torch.no_grad()
    def _reference_logp(self, row: Batch, where_M: np.ndarray) -> Tensor:
        if self._reference is None:
            self._reference = self._load_reference()
        return score(self._reference, row, where_M).logp_M

    def _load_reference(self) -> Decoder:
        """The policy as it was at the start of the stage, from its folder, checked by hash."""
        for folder in dict.fromkeys((self.folder, self.reference_folder)):
            if (folder / "config.json").is_file():
                frozen = Policy(folder, self.config)
                if weights_hash(frozen.published()) == self.reference_hash:
                    return frozen.model.requires_grad_(False)
        raise CheckpointError(
            f"the reference policy {self.reference_hash} is neither in {self.folder} nor in {self.reference_folder}; "
            "bring the start-of-stage model back, or set trainer.kl = 0"
        )

    def _count_flops(self, rows: Sequence[Batch], groups: Sequence[Group]) -> None:
        shape = self.policy.model.config
        forward = sum(forward_flops(shape, end - start) for row in rows for start, end in row.bounds)
        self.flops["rl"] += forward * (TRAIN_FACTOR + (1 if self.config.kl > 0 else 0))
        segments = (s for g in groups for m in g.members for s in m.trajectory.segments)
        self.flops["rollouts"] += sum(forward_flops(shape, len(s.ids_T)) for s in segments)

    # -- publishing -------------------------------------------------------------------------------------

    def _publish(self) -> tuple[Manifest, str]:
        if self._publisher is None:
            if not self.store:
                raise UserError("publish needs a store: give RLTrainer(store=folder) or a publisher")
            from etude.sync.publish import Publisher as FolderPublisher

            self._publisher = FolderPublisher(Path(self.store), self._version.lineage)
        return self._publisher.publish(self.policy.published(), self._version), self.store

    def _commit(self, version: Version) -> None:
        if self._publisher is None:
            raise UserError(f"commit of {version} before anything was published")
        self._publisher.commit(version)

    # -- checkpoints ------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors that exact continuation needs, by name; live ones, so that a restore fills them in place."""
        out = {f"master.{n}": t.detach() for n, t in self.policy.master.items()}
        out |= self.optimizer.state_dict()
        return out | {"rng.torch": torch.get_rng_state()}

    def _save(self, folder: Path) -> None:
        state = {
            "kind": "rl",
            "step": self.steps,
            "version": {"lineage": self._version.lineage, "ordinal": self._version.ordinal, "hash": self._version.hash},
            "optimizer": self.optimizer.kind,
            "reference": {"folder": str(self.reference_folder.resolve()), "hash": self.reference_hash},
            "flops": self.flops,
            "base_stages": len(self.base.stages),
        }
        dtype = self.policy.published_dtype
        save_checkpoint(folder, self.policy.model, self._tensors(), state, tokenizer=self.folder, dtype=dtype)
        self._provenance().write(folder / "model")

    def _provenance(self) -> provenance.Provenance:
        detail = {"steps": self.steps, "objective": self.config.objective, "lr": self.config.lr, "kl": self.config.kl}
        stages = (
            provenance.Stage(
                kind=kind,
                name=kind,
                ours=True,
                flops=self.flops[kind],
                licence=self.licence,
                data=self.data,
                weights=self.reference_hash,
                detail=detail,
            )
            for kind in ("rl", "rollouts")
        )
        return self.base.plus(*stages)

    def _load(self, folder: Path, lineage: int) -> Version:
        state = read_state(folder)
        if state["kind"] != "rl" or state["optimizer"] != self.optimizer.kind:
            raise CheckpointError(
                f"{folder} is a {state['kind']} checkpoint with optimizer {state['optimizer']!r}; this trainer is rl with "
                f"{self.optimizer.kind!r}: start from its model/ folder instead of resuming"
            )
        tensors = self._tensors()
        restore_tensors(folder, tensors, state)
        self.optimizer.load_state_dict(tensors)
        torch.set_rng_state(tensors["rng.torch"])
        self.policy.round()
        stored = state["version"]
        found = weights_hash(self.policy.published())
        if found != stored["hash"]:
            raise IntegrityError(f"weights in {folder} hash to {found}, the checkpoint says {stored['hash']}; was publish_dtype changed?")
        self.steps, self.flops = state["step"], dict(state["flops"])
        self.base = provenance.Provenance(stages=provenance.read(folder / "model").stages[: state["base_stages"]])
        self.reference_folder, self.reference_hash = Path(state["reference"]["folder"]), state["reference"]["hash"]
        self._reference = None
        self._publisher = self._given
        self._version = Version(lineage=lineage, ordinal=stored["ordinal"], hash=found)
        return self._version


class _Clock:
    """Seconds by part; the parts sum to the whole."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def done(self) -> dict[str, float]:
        self.lap("report")
        return {k: round(v, 4) for k, v in self._seconds.items()}
