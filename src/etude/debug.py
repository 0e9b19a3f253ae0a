"""`etude debug mismatch RUN STEP`: where the trainer's and the engine's numbers of a step part.

    run folder -> trajectories of the step -> for each version that sampled them: its weights -> both forwards -> first difference

The trajectories are computed twice, by the trainer's path (packed rows, its weights and type) and by the engine's (one sequence at a
time), each version's tokens with that version's weights, so that learning is no part of what is found. The engine's weights come from
the weight chain, the trainer's from the version's checkpoint while it is there: if the two hold other numbers, the tensors and experts
are named. What the engine recorded (routes, log-probs) is held against both. Forwards route freely: replay would hide what is looked for.
Tokens sampled after a swap in flight by an engine that keeps its cache are left out and counted: no one version's weights give them.
Config fields can be overridden, so one can ask what another `numerics` or `trainer.compute_dtype` would do.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.config import apply_overrides, build
from etude.errors import CheckpointError, UserError
from etude.events import read_events
from etude.inference import naive
from etude.model.transformer import Decoder, rounded
from etude.model.weights import load_model
from etude.parts import RunConfig, model_folder, read_run_config
from etude.records import Batch, Graded, Segment, Version
from etude.rollout.shards import ShardReader
from etude.sync.chain import published, read_manifest, weights_hash
from etude.sync.receive import Receiver
from etude.sync.store import FolderStore
from etude.trainer.checkpoint import STATE, read_state
from etude.trainer.losses import score, targets
from etude.trainer.pack import Normalisers, Sample, pack_in_order, sample_from_segment

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest |delta hidden| over largest |hidden| of a layer that rounding in a type explains."""
REPORTED = ("dlogp_mean", "dlogp_p99", "dlogp_max", "f2", "engine_dlogp_max", "stale_dlogp_max", "route_changed", "route_replaced")
NAMED = 20
"""Differing tensors that are listed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A segment of the step, cut to what is trained on."""

    trajectory: str
    segment: int
    sample: Sample
    source: Segment


def mismatch(*, run: str, step: int, json: bool = False, overrides: Sequence[str] = ()) -> int:
    """Print where the numbers of a step part."""
    answer = find(Path(run), step, overrides)
    print(jsonlib.dumps(answer) if json else text(answer))
    return 0


def find(run: Path, step: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The report, as docs/schemas/mismatch.json describes it."""
    config = build(RunConfig, apply_overrides(read_run_config(run), overrides))
    metrics, names = trained(run, step)
    reader = ShardReader(run / "trajectories")
    pieces = [piece for name in names for piece in pieces_of(reader.get(name))]
    versions = {v.key: v for piece in pieces for v in piece.source.versions}
    if not versions:
        raise UserError(f"nothing was sampled for step {step} of {run}; take another step")
    findings = Findings(config.trainer.compute_dtype)
    findings.left_out = sum(int(mixed(piece.source).sum()) for piece in pieces)
    for version in sorted(versions.values(), key=lambda v: v.key):
        engine, trainer = sides(run, config, version)
        findings.weights += differing(version, engine, trainer)
        # a version's pieces, in rows as the trainer packs them
        own = [piece for piece in pieces if version.key in [v.key for v in piece.source.versions]]
        rows = pack_in_order([piece.sample for piece in own], config.trainer.row_tokens, Normalisers())
        for row in rows:
            findings.see(row, [own.pop(0) for _ in row.bounds], version, engine, trainer)
    return {"run": str(run), "step": step, "versions": [str(v) for v in versions.values()], **findings.as_dict(), "reported": metrics}


# ---------------------------------------------------------------------------------------------------
# What a run folder holds of a step


def trained(run: Path, step: int) -> tuple[dict[str, float], list[str]]:
    """(metrics the step reported, ids of the trajectories it was trained on); the last time it was taken counts."""
    rollouts: dict[int, dict[int, str]] = {}
    groups: dict[int, list[str]] = {}
    lineage, metrics = -1, None
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "rollout_ended":
            rollouts.setdefault(event["admission"], {})[event["member"]] = event["trajectory"]
        elif event["kind"] == "group_trained" and event["step"] == step:
            if event["lineage"] != lineage:
                groups, lineage = {}, event["lineage"]
            groups[event["admission"]] = [rollouts[event["admission"]][m] for m in sorted(rollouts.get(event["admission"], {}))]
        elif event["kind"] == "step" and event["step"] == step:
            metrics = {name: event["metrics"][name] for name in REPORTED if name in event["metrics"]}
    if metrics is None:
        raise UserError(f"{run} has not taken step {step}; `step` events of events.jsonl name those it has")
    return metrics, [name for names in groups.values() for name in names]


def pieces_of(graded: Any) -> Iterator[Piece]:
    assert isinstance(graded, Graded)
    trajectory = graded.trajectory
    nobody = Version(lineage=0, ordinal=0, hash="")
    for index, segment in enumerate(trajectory.segments):
        sample = sample_from_segment(segment, 0.0, nobody, (trajectory.group, trajectory.member, index))
        if sample is not None:
            yield Piece(trajectory=trajectory.id, segment=index, sample=sample, source=segment)


def sides(run: Path, config: RunConfig, version: Version) -> tuple[Decoder, Decoder]:
    """(the engine's model of a version, the trainer's)."""
    wire_type = getattr(torch, config.trainer.publish_dtype)
    base = load_model(model_folder(config.model), numerics=config.numerics)
    wire = {name: rounded(name, p.detach(), wire_type) for name, p in base.named_parameters()}
    if weights_hash(wire) != version.hash:
        # by hash: a resumed run serves what an older lineage published under a name of its own
        store = FolderStore(run / "weights")
        same = [v for key in published(store) if (v := read_manifest(store, *key).version).hash == version.hash]
        if not same:
            raise CheckpointError(f"{run / 'weights'} does not hold {version}, and {config.model} is another; was the chain pruned?")
        Receiver(wire, store).catch_up(same[-1])
    fill(base, wire)
    trainer = load_model(model_folder(config.model), numerics=config.numerics)
    saved = run / "checkpoints" / f"step-{version.ordinal}"
    if (saved / "optim" / STATE).is_file() and read_state(saved)["version"]["hash"] == version.hash:
        wire = {n: p.detach() for n, p in load_model(saved / "model").named_parameters()}
    fill(trainer, wire)
    return base, trainer.to(getattr(torch, config.trainer.compute_dtype))


@torch.no_grad()
def fill(model: Decoder, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])


def differing(version: Version, engine: Decoder, trainer: Decoder) -> list[dict[str, Any]]:
    """Tensors, of stacked experts one by one, in which the two hold other numbers."""
    found: list[dict[str, Any]] = []
    theirs = dict(engine.named_parameters())
    for name, parameter in trainer.named_parameters():
        other = rounded(name, theirs[name].detach(), parameter.dtype)
        delta = (parameter.detach().float() - other.float()).abs()
        parts = list(enumerate(delta)) if ".experts." in name else [(None, delta)]
        for expert, part in parts:
            if (most := float(part.max())) > 0:
                found.append({"version": str(version), "tensor": name, "expert": expert, "max_delta": most})
    return found


# ---------------------------------------------------------------------------------------------------
# Both forwards, and what they differ in


@contextmanager
def watched(model: Decoder) -> Iterator[list[Tensor]]:
    """Collects the stream after every layer of a forward, in float32."""
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        seen.append(output[0].detach().float())

    hooks = [block.register_forward_hook(keep) for block in model.layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def made_by(segment: Segment, length: int, version: Version) -> np.ndarray:
    """Positions whose routes this version recorded: those that lead to a token it sampled, with no other sampled in between."""
    index = [v.key for v in segment.versions].index(version.key)
    mixed_T = mixed(segment)
    out = np.zeros(length, dtype=bool)
    mine = False
    for t in range(length - 1, -1, -1):
        out[t] = mine
        if segment.sampled_T[t]:
            mine = int(segment.version_T[t]) == index and not mixed_T[t]
    return out


def mixed(segment: Segment) -> np.ndarray:
    """Sampled tokens whose context an engine had in its cache from older weights: a generation is one run of sampled tokens, and its
    cache is kept over a swap."""
    out = np.zeros(len(segment.ids_T), dtype=bool)
    if segment.cache_policy != "keep":
        return out
    first = -1
    for t, sampled in enumerate(segment.sampled_T):
        if not sampled:
            first = -1
            continue
        first = int(segment.version_T[t]) if first < 0 else first
        out[t] = int(segment.version_T[t]) != first
    return out


class Findings:
    """Differences, collected row by row. `dtype` is what the trainer computes in."""

    def __init__(self, dtype: str) -> None:
        self.weights: list[dict[str, Any]] = []
        self.tokens = self.left_out = 0
        self._tolerance = TOLERANCE[dtype]
        self._delta_L = self._size_L = np.zeros(0)
        self._differ_L = np.zeros(0)
        self._rows = self._rows_differ = 0
        self._first: tuple[str, int, int, int, list[int], list[int]] | None = None
        self._dlogp: dict[str, list[np.ndarray]] = {"trainer": [], "engine": [], "between": []}

    @torch.no_grad()
    def see(self, row: Batch, pieces: Sequence[Piece], version: Version, engine: Decoder, trainer: Decoder) -> None:
        where_M = targets(row)
        with watched(trainer) as theirs:
            scores = score(trainer, row, where_M)
        logp_N = np.zeros(len(row.ids_N))
        logp_N[where_M] = scores.logp_M.numpy()
        for piece, (start, end) in zip(pieces, row.bounds, strict=True):
            with watched(engine) as ours:
                scored = naive.score(engine, row.ids_N[start:end].tolist(), version)
            self._hidden([mine[: end - start] for mine in ours], [other[start:end] for other in theirs])
            own_T = made_by(piece.source, end - start, version)
            sampled_T = (row.rl_weight_N[start:end] != 0) & np.r_[False, own_T[:-1]]
            old_T, mine_T, their_T = row.old_logprob_N[start:end], scored.logprob_T, logp_N[start:end]
            for name, delta_T in (("trainer", their_T - old_T), ("engine", mine_T - old_T), ("between", their_T - mine_T)):
                self._dlogp[name].append(np.abs(delta_T[sampled_T]))
            self.tokens += int(sampled_T.sum())
            if scores.routes_NLK is not None and piece.sample.routes_TLK is not None:
                self._routes(piece, own_T, scores.routes_NLK[start:end].numpy(), trainer)

    def _hidden(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        delta_L = np.array([float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)])
        size_L = np.array([float(a.abs().max()) for a in ours])
        self._delta_L = np.maximum(self._delta_L, delta_L) if len(self._delta_L) else delta_L
        self._size_L = np.maximum(self._size_L, size_L) if len(self._size_L) else size_L

    def _routes(self, piece: Piece, own_T: np.ndarray, used_TLK: np.ndarray, model: Decoder) -> None:
        recorded_TLK = piece.sample.routes_TLK
        assert recorded_TLK is not None
        there_T = own_T & (recorded_TLK != model.config.absent_route).all((1, 2))
        differ_TL = (np.sort(recorded_TLK, -1) != np.sort(used_TLK, -1)).any(-1) & there_T[:, None]
        self._rows += int(there_T.sum())
        self._rows_differ += int(differ_TL.any(1).sum())
        padded_L = np.concatenate((np.zeros(model.config.dense_layers), differ_TL.sum(0)))
        self._differ_L = self._differ_L + padded_L if len(self._differ_L) else padded_L
        if self._first is None and differ_TL.any():
            position, at = (int(i) for i in np.argwhere(differ_TL)[0])
            experts = (sorted(recorded_TLK[position, at].tolist()), sorted(used_TLK[position, at].tolist()))
            self._first = (piece.trajectory, piece.segment, position, at + model.config.dense_layers, *experts)

    def as_dict(self) -> dict[str, Any]:
        share_L = self._differ_L / max(self._rows, 1) if len(self._differ_L) else np.zeros(len(self._delta_L))
        layers = [
            {"layer": i, "max_delta_hidden": float(d), "max_hidden": float(s), "routes_differ": float(r)}
            for i, (d, s, r) in enumerate(zip(self._delta_L, self._size_L, share_L, strict=True))
        ]
        beyond = [i for i, (d, s) in enumerate(zip(self._delta_L, self._size_L, strict=True)) if not d <= self._tolerance * s]
        names = ("trajectory", "segment", "position", "layer", "recorded", "recomputed")
        return {
            "tokens": self.tokens,
            "left_out": self.left_out,
            "dlogp": {name: spread(np.concatenate(parts)) for name, parts in self._dlogp.items()},
            "layers": layers,
            "first_layer": beyond[0] if beyond else None,
            "positions": self._rows,
            "routes_differ": self._rows_differ / max(self._rows, 1),
            "first": dict(zip(names, self._first, strict=True)) if self._first else None,
            "weights": self.weights[:NAMED],
            "weights_differ": len(self.weights),
        }


def spread(size_M: np.ndarray) -> dict[str, float]:
    if not len(size_M):
        return {"mean": 0.0, "p99": 0.0, "max": 0.0}
    return {"mean": float(size_M.mean()), "p99": float(np.quantile(size_M, 0.99)), "max": float(size_M.max())}


# ---------------------------------------------------------------------------------------------------
# For people


WHOSE = {
    "trainer": "trainer now - engine then",
    "engine": "engine now - engine then",
    "between": "trainer now - engine now",
}


def text(answer: dict[str, Any]) -> str:
    """The report as a short table."""
    versions = ", ".join(answer["versions"])
    lines = [f"step {answer['step']} of {answer['run']}: {answer['tokens']} tokens, each under the weights that sampled it ({versions})"]
    if answer["left_out"]:
        lines.append(f"{answer['left_out']} more were sampled after a swap in flight, from a cache of older weights, and are left out")
    lines += ["", f"{'|delta log-prob|':<28}{'mean':>12}{'p99':>12}{'max':>12}"]
    lines += [f"{WHOSE[k]:<28}{d['mean']:>12.3g}{d['p99']:>12.3g}{d['max']:>12.3g}" for k, d in answer["dlogp"].items()]
    lines += ["", f"{'layer':<8}{'max |delta hidden|':>20}{'max |hidden|':>16}{'routes differ':>16}"]
    for row in answer["layers"]:
        mark = "  <- first beyond rounding" if row["layer"] == answer["first_layer"] else ""
        share = f"{row['routes_differ']:>15.2%} "
        lines.append(f"{row['layer']:<8}{row['max_delta_hidden']:>20.3g}{row['max_hidden']:>16.3g}{share}{mark}")
    lines += ["", f"routes of {answer['routes_differ']:.2%} of {answer['positions']} recorded positions differ in some layer"]
    if first := answer["first"]:
        where = f"trajectory {first['trajectory']} segment {first['segment']} position {first['position']} layer {first['layer']}"
        lines.append(f"first: {where}: recorded {first['recorded']}, recomputed {first['recomputed']}")
    for tensor in answer["weights"]:
        expert = "" if tensor["expert"] is None else f" expert {tensor['expert']}"
        lines.append(f"checkpoint and chain differ ({tensor['version']}): {tensor['tensor']}{expert} by up to {tensor['max_delta']:.3g}")
    if answer["weights_differ"] > len(answer["weights"]):
        lines.append(f"... and {answer['weights_differ'] - len(answer['weights'])} more")
    return "\n".join(lines)
