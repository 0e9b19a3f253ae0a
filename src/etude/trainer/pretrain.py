"""Pretraining in phases: bulk, longer context, supervised fine-tuning, one pipeline from one TOML.

Each step takes packed documents, adds the cross-entropy of the tokens their masks ask for (the `ce` stream, a mean over those
tokens) and the experts' load-balancing loss, and moves the weights with the phase's optimizer and schedule. The loss on held-out
documents is recorded against the operations spent, and a line is fitted to it over log compute (Composer 2 report, section 3.1:
it falls log-linearly).

A phase may train the model, the heads that predict further tokens on top of it (mtp.py), or both side by side.

Invariants: everything follows from the config and the seed; a run that is killed and resumed from its last checkpoint gives the
same weights, bit for bit, as one that was not; a checkpoint exists under its final name only when it is whole; a loss or
gradient that is not finite stops the run before any weight changes. Optimizer state is carried into the next phase when both use the
same kind of optimizer.

Folder layout: <out>/checkpoints/step-N/{model/, optim/} and <out>/curve.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from etude.config import resolved
from etude.errors import CheckpointError, UserError
from etude.model.config import ModelConfig
from etude.model.families import PREFIX
from etude.model.shelf import model_folder
from etude.model.transformer import KEPT, Decoder, rounded
from etude.model.weights import from_config, load_model
from etude.optim.build import Optimizer, build_optimizer, clip_gradients
from etude.optim.schedules import factor
from etude.records import Batch, content_hash, seed_for
from etude.sync.chain import weights_hash
from etude.trainer import provenance
from etude.trainer.checkpoint import read_state, restore_tensors, save_checkpoint
from etude.trainer.config import PhaseConfig, PretrainConfig
from etude.trainer.documents import Documents, Rows, rows_of
from etude.trainer.flops import TRAIN_FACTOR, forward_flops, head_flops
from etude.trainer.losses import ce_loss, load_entropy, require_finite, run_row
from etude.trainer.mtp import acceptance, head_loss
from etude.trainer.ranks import Ranks, crew

Progress = Callable[[dict[str, Any]], None]
KEEP = 2
"""Checkpoints kept; older ones are removed after a newer one was committed."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One held-out evaluation."""

    phase: str
    step: int
    tokens: int
    flops: float
    loss: float
    """Nats per predicted token."""
    accept: tuple[float, ...] = ()
    """Share of each head's drafts that speculative sampling would accept; of phases that train heads."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One phase's probe, read at the end of some phase."""

    after: str
    """Phase that had just ended; empty at the start of the run."""
    probe: str
    """Phase it belongs to."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    model: Path
    """Hugging Face folder of the last checkpoint."""
    steps: int
    tokens: int
    flops: float
    curve: tuple[Point, ...]
    probes: tuple[Probe, ...]
    weights: str
    """Content hash of the weights as saved."""


def pretrain(config: PretrainConfig, out: str | Path, *, progress: Progress | None = None, resume: bool = True) -> PretrainResult:
    """Run all phases, or go on where `out`'s last checkpoint stopped. `progress` gets one dictionary a step."""
    last = latest_checkpoint(Path(out))
    if last is not None and not resume:
        raise CheckpointError(f"{out} already holds {last.name}; resume it, or give another folder")
    with crew(config.processes, _follow, config, Path(out), last) as ranks:
        return _started(config, Path(out), progress, last, ranks).run()


def _started(config: PretrainConfig, out: Path, progress: Progress | None, last: Path | None, ranks: Ranks) -> _Run:
    run = _Run(config, out, progress or (lambda line: None), ranks)
    if last is not None:
        run.restore(last)
    return run


def _follow(ranks: Ranks, config: PretrainConfig, out: Path, last: Path | None) -> None:
    _started(config, out, None, last, ranks).train()


def latest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return max((p for p in (out / "checkpoints").glob("step-*") if p.suffix != ".tmp"), key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def fit_log_compute(points: tuple[Point, ...]) -> dict[str, float] | None:
    """loss = a + b * log10(flops) by least squares, with R^2; None for fewer than three points."""
    if len(points) < 3:
        return None
    x, y = np.log10([p.flops for p in points]), np.array([p.loss for p in points])
    slope, intercept = np.polyfit(x, y, 1)
    residual, spread = np.square(y - intercept - slope * x).sum(), np.square(y - y.mean()).sum()
    return {"a": float(intercept), "b": float(slope), "r2": float(1 - residual / spread) if spread else 1.0}


class _Run:
    """State of a pretraining between two steps."""

    def __init__(self, config: PretrainConfig, out: Path, progress: Progress, ranks: Ranks = Ranks()) -> None:
        self.config, self.out, self.progress, self.ranks = config, out, progress, ranks
        self.model = _starting_model(config)
        self.forward = cast(Decoder, torch.compile(self.model, dynamic=True)) if config.compile else self.model
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        self.documents = _all_documents(config, self.model)
        self.data_hashes = {path: documents.content_hash() for path, documents in self.documents.items()}
        self.held_out, self.held_out_hash = self._held_out_rows()
        self.probe_rows = {p.name: self._rows_to_read(p.probe, p.length)[0] for p in config.phases if p.probe}
        self.base = provenance.read(model_folder(config.base)) if config.base else provenance.Provenance()
        given = {n: p for n, p in self.params.items() if not (config.add_heads and n.startswith(PREFIX))}
        self.start_hash = weights_hash(given) if config.base else ""
        self.step, self.tokens, self.flops = 0, 0, 0.0
        self.saved = -1
        self.curve: tuple[Point, ...] = ()
        self.probes: tuple[Probe, ...] = ()
        self._enter(0, None)

    # -- phases -----------------------------------------------------------------------------------------

    def _enter(self, index: int, before: Optimizer | None) -> None:
        """Begin phase `index`; the state of the optimizer `before` it is carried over when its kind stays."""
        phase = self.config.phases[index]
        self.index, self.phase_tokens = index, 0
        for begun in self.config.phases[: index + 1]:
            self.model.rescale(rope_theta=begun.rope_theta, rope_scaling=begun.rope_scaling, max_positions=begun.max_positions)
        self.trained = _trained(self.params, phase)
        for name, param in self.params.items():
            param.requires_grad_(name in self.trained and not name.endswith(KEPT))
        self.optimizer = build_optimizer(self.model, phase.optim, self.trained)
        if before is not None and before.kind == self.optimizer.kind and before.params.keys() == self.trained.keys():
            self.optimizer.load_state_dict(before.state_dict())
        self.rows = Rows(
            self.documents[phase.data],
            length=phase.length,
            row_tokens=self.config.row_tokens,
            seed=seed_for(self.config.seed, "phase", phase.name),
        )

    def run(self) -> PretrainResult:
        folder = self.train()
        self._write_curve()
        weights = read_state(folder)["weights"]
        return PretrainResult(
            model=folder / "model",
            steps=self.step,
            tokens=self.tokens,
            flops=self.flops,
            curve=self.curve,
            probes=self.probes,
            weights=weights,
        )

    def train(self) -> Path:
        """All that is left of the phases; returns the last checkpoint. What a rank other than 0 runs."""
        if not self.step:
            self._probe("")
        while True:
            phase = self.config.phases[self.index]
            while self.phase_tokens < phase.tokens and not self._spent():
                self._train_step(phase)
            self._evaluate(phase)
            if self.phase_tokens >= phase.tokens:
                self._probe(phase.name)
            if self._spent() or self.index + 1 == len(self.config.phases):
                return self.save()
            self._enter(self.index + 1, self.optimizer)

    def _spent(self) -> bool:
        return bool(self.config.stop_tokens) and self.tokens >= self.config.stop_tokens

    # -- one step ---------------------------------------------------------------------------------------

    def _train_step(self, phase: PhaseConfig) -> None:
        started = time.perf_counter()
        rows = self.rows.take(phase.batch_tokens)
        tokens = sum(len(row.ids_N) for row in rows)
        where = f"phase {phase.name!r}, step {self.step + 1}"
        try:
            loss, head, balance, load_LE = self._gradients(rows, tokens)
            norms = [clip_gradients(part, phase.optim.clip_norm) for part in _parts(self.trained)]
            norm = math.hypot(*norms)
            require_finite("the loss", loss, where)
            require_finite("the gradient norm", norm, where)
            lr = phase.lr * factor(phase.schedule, self.phase_tokens + tokens / 2, phase.tokens)
            self.optimizer.step(lr)
            if load_LE is not None and self.model.config.sigmoid_router and phase.trains != "heads":
                self.model.even_out(load_LE, self.config.router_bias_speed)
        finally:
            for param in self.params.values():
                param.grad = None
        self.step += 1
        self.tokens += tokens
        self.phase_tokens += tokens
        self.flops += _step_flops(self.model.config, rows, phase)
        line: dict[str, Any] = {"phase": phase.name, "step": self.step, "tokens": self.tokens, "phase_tokens": self.phase_tokens}
        line |= {"phase_budget": phase.tokens, "loss": loss, "lr": lr, "grad_norm": norm, "flops": self.flops}
        if phase.trains != "model":
            line["head_loss"] = head
        if load_LE is not None:
            line |= {"balance": balance, "load_entropy": load_entropy(load_LE)}
        if self.step % self.config.eval_every == 0:
            line["held_out"] = self._evaluate(phase)
        line["seconds"] = time.perf_counter() - started
        self.progress(line)
        if self.step % self.config.save_every == 0:
            self.save()

    def _gradients(self, rows: list[Batch], tokens: int) -> tuple[float, float, float, Tensor | None]:
        """Backward over all rows; (cross-entropy, heads' loss, balance, load). One device synchronisation for the whole step."""
        phase = self.config.phases[self.index]
        weight = self.model.config.balance_weight if self.model.config.moe else 0.0
        device = self.config.device
        loss_sum, head_sum, balance_sum = (torch.zeros((), device=device) for _ in range(3))
        load_LE: Tensor | None = None
        for row in self.ranks.share(rows):
            with self._precision():
                with torch.set_grad_enabled(phase.trains != "heads"):
                    ran = run_row(self.forward, row, heads=phase.trains != "model")
                    loss = ce_loss(self.model, ran, row)
                head = head_loss(self.model, ran, row, phase.head_loss) if phase.trains != "model" else None
            balance = ran.output.balance * (len(row.ids_N) / tokens)
            if phase.trains != "heads":
                (loss + weight * balance if weight else loss).backward()
            if head is not None:
                head.backward()
                head_sum += head.detach()
            loss_sum += loss.detach()
            balance_sum += balance.detach()
            if ran.output.load_LE is not None:
                load_LE = ran.output.load_LE if load_LE is None else load_LE + ran.output.load_LE
        if load_LE is None and self.model.config.moe:
            load_LE = torch.zeros(self.model.config.moe_layers, self.model.config.experts, dtype=torch.int64, device=device)
        if self.ranks.count > 1:
            for p in self.params.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads = [p.grad for p in self.params.values() if p.grad is not None]
            self.ranks.sum_([*grads, loss_sum, head_sum, balance_sum, *([] if load_LE is None else [load_LE])])
        return loss_sum.item(), head_sum.item(), balance_sum.item(), load_LE

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.config.device).type, dtype=torch.bfloat16)

    # -- held-out loss ------------------------------------------------------------------------------------

    def _held_out_rows(self) -> tuple[list[Batch], str]:
        """Always the same rows, cut at the shortest phase's length, so that points of all phases compare; and the content hash."""
        if not self.config.held_out:
            return [], ""
        return self._rows_to_read(self.config.held_out, min(p.length for p in self.config.phases))

    def _rows_to_read(self, path: str, length: int) -> tuple[list[Batch], str]:
        """The first `eval_tokens` of these documents, and the content hash of all."""
        documents = _documents(path, self.model)
        pieces = documents.pieces(length)
        count = int(np.searchsorted(np.cumsum(pieces[:, 2] - pieces[:, 1]), self.config.eval_tokens)) + 1
        return rows_of(documents, pieces[:count], self.config.row_tokens), documents.content_hash()

    @torch.no_grad()
    def _evaluate(self, phase: PhaseConfig) -> float | None:
        """Held-out loss now; adds a point to the curve unless this step already has one."""
        if not self.held_out or not self.step:
            return None
        if self.curve and self.curve[-1].step == self.step:
            return self.curve[-1].loss
        loss = self._loss_of(self.held_out)
        accept = tuple(a.sampled for a in acceptance(self.model, self.held_out)) if phase.trains != "model" else ()
        point = Point(phase=phase.name, step=self.step, tokens=self.tokens, flops=self.flops, loss=loss, accept=accept)
        self.curve = (*self.curve, point)
        return loss

    @torch.no_grad()
    def _loss_of(self, rows: list[Batch]) -> float:
        """Nats per predicted token, over all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        for row in self.ranks.share(rows):
            with self._precision():
                total += ce_loss(self.model, run_row(self.forward, row), row).item()
        self.ranks.sum_([total])
        return total.item()

    def _probe(self, after: str) -> None:
        """Read every phase's probe that the model's context holds by now, unless a resume finds it read."""
        if any(p.after == after for p in self.probes):
            return
        for phase in self.config.phases:
            if phase.probe and phase.length <= self.model.config.max_positions:
                self.probes = (*self.probes, Probe(after=after, probe=phase.name, loss=self._loss_of(self.probe_rows[phase.name])))

    def _write_curve(self) -> None:
        points, probes = [asdict(p) for p in self.curve], [asdict(p) for p in self.probes]
        data = {"schema": 1, "points": points, "fit": fit_log_compute(self.curve), "probes": probes}
        (self.out / "curve.json").write_text(json.dumps(data, indent=2) + "\n")

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return {f"master.{n}": p.detach() for n, p in self.params.items()} | self.optimizer.state_dict()

    def _config_hash(self, index: int) -> str:
        """Over what decided the weights and the curve up to phase `index`: documents and base by content, not by path. Where a run
        stops, how often it saves, its device, its tokenizer and phases that have not begun may change at a resume."""
        plain = resolved(self.config)
        plain["phases"] = plain["phases"][: index + 1]
        for name in ("stop_tokens", "save_every", "device", "tokenizer", "licence", "save_dtype", "base", "held_out"):
            plain.pop(name)
        for phase in plain["phases"]:
            phase["data"] = self.data_hashes[phase["data"]]
            phase.pop("probe")
        return content_hash(plain, self.start_hash, self.held_out_hash)

    def save(self) -> Path:
        """Write step-N.tmp, commit it by rename, and remove old checkpoints."""
        final = self.out / "checkpoints" / f"step-{self.step}"
        dtype = getattr(torch, self.config.save_dtype)
        if self.saved == self.step:
            return final
        self.saved = self.step
        weights = weights_hash({n: rounded(n, p.detach(), dtype) for n, p in self.params.items()})
        self.ranks.agree(weights)
        if self.ranks.rank:
            return final
        partial = final.with_name(final.name + ".tmp")
        for left_over in self.out.glob("checkpoints/*.tmp"):
            shutil.rmtree(left_over)
        state = {
            "kind": "pretrain",
            "step": self.step,
            "tokens": self.tokens,
            "flops": self.flops,
            "phase": self.index,
            "phase_tokens": self.phase_tokens,
            "rows": self.rows.state,
            "curve": [asdict(p) for p in self.curve],
            "probes": [asdict(p) for p in self.probes],
            "config_hash": self._config_hash(self.index),
            "weights": weights,
        }
        base = model_folder(self.config.base) if self.config.base else None
        tokenizer = Path(self.config.tokenizer) if self.config.tokenizer else base
        save_checkpoint(partial, self.model, self._tensors(), state, tokenizer=tokenizer, dtype=dtype)
        self._provenance().write(partial / "model")
        partial.rename(final)
        for old in sorted(final.parent.glob("step-*"), key=_step_of)[:-KEEP]:
            shutil.rmtree(old)
        return final

    def _provenance(self) -> provenance.Provenance:
        phases = self.config.phases[: self.index + 1]
        stage = provenance.Stage(
            kind="pretrain",
            name=" + ".join(p.name for p in phases),
            ours=True,
            flops=self.flops,
            licence=self.config.licence,
            data=tuple(dict.fromkeys(p.data for p in phases)),
            weights=self.start_hash,
            detail={"steps": self.step, "tokens": self.tokens, "seed": self.config.seed},
        )
        return self.base.plus(stage)

    def restore(self, folder: Path) -> None:
        state = read_state(folder)
        if state["kind"] != "pretrain":
            raise CheckpointError(f"{folder} is a checkpoint of kind {state['kind']!r}, not of a pretraining")
        if state["config_hash"] != self._config_hash(state["phase"]):
            raise CheckpointError(
                f"{folder} was made with another config or on other documents; resume with its own, or give another folder"
            )
        self._enter(state["phase"], None)
        tensors = self._tensors()
        restore_tensors(folder, tensors, state)
        self.optimizer.load_state_dict(tensors)
        self.rows.restore(state["rows"])
        self.saved = state["step"]
        self.step, self.tokens, self.flops, self.phase_tokens = (state[k] for k in ("step", "tokens", "flops", "phase_tokens"))
        self.probes = tuple(Probe(**p) for p in state["probes"])
        self.curve = tuple(Point(**{**p, "accept": tuple(p["accept"])}) for p in state["curve"])


def _starting_model(config: PretrainConfig) -> Decoder:
    if config.base:
        model = load_model(model_folder(config.base), dtype=torch.float32, device=config.device)
        if config.add_heads:
            model.add_heads(config.add_heads, seed_for(config.seed, "heads"))
        return model
    assert config.model is not None
    return from_config(config.model, seed=seed_for(config.seed, "init"), dtype=torch.float32, device=config.device)


def _all_documents(config: PretrainConfig, model: Decoder) -> dict[str, Documents]:
    """Documents of all phases by path, each path read once; every phase's length is checked against the positions it will have."""
    positions = model.config.max_positions
    for phase in config.phases:
        positions = phase.max_positions or positions
        if phase.length > positions:
            raise UserError(
                f"phase {phase.name!r} has length {phase.length}, which exceeds the model's max_positions = {positions}; set the phase's "
                "max_positions (and a rope_theta or rope_scaling that reach as far)"
            )
    return {path: _documents(path, model) for path in dict.fromkeys(phase.data for phase in config.phases)}


def _documents(path: str, model: Decoder) -> Documents:
    documents = Documents(path)
    if documents.largest_id >= model.config.vocab_size:
        raise UserError(f"{path} has the token id {documents.largest_id}, the model's vocabulary ends at {model.config.vocab_size - 1}")
    return documents


def _trained(params: dict[str, Tensor], phase: PhaseConfig) -> dict[str, Tensor]:
    """What the phase's optimizer moves."""
    parts = {"model": (False,), "heads": (True,), "all": (False, True)}[phase.trains]
    found = {n: p for n, p in params.items() if n.startswith(PREFIX) in parts}
    if True in parts and not any(n.startswith(PREFIX) for n in found):
        raise UserError(f"phase {phase.name!r} trains heads and the model has none; set add_heads, or mtp_layers of [model]")
    return found


def _parts(trained: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The model's tensors and the heads': clipped apart, so that heads trained beside a model do not shorten its steps."""
    heads = {n: p for n, p in trained.items() if n.startswith(PREFIX)}
    return [{n: p for n, p in trained.items() if n not in heads}, heads]


def _step_flops(config: ModelConfig, rows: list[Batch], phase: PhaseConfig) -> float:
    lengths = [end - start for row in rows for start, end in row.bounds]
    model = sum(forward_flops(config, n) for n in lengths) * (1 if phase.trains == "heads" else TRAIN_FACTOR)
    return model + (TRAIN_FACTOR * sum(head_flops(config, n) for n in lengths) if phase.trains != "model" else 0.0)
