"""Heads that predict one token further: taught by the model's own distribution against taught by the text, at equal steps.

Each run puts one fresh head on the nano policy and trains it on generated functions; the policy does not move. Runs of a pair differ in
the loss alone: same head, same rows in the same order, same optimizer. Acceptance is measured by teacher forcing on functions
that no run trained on: the share of drafts that speculative sampling would take at temperature 1, and the share of equal first
choices, which is what greedy decoding takes. Rows are means over seeds (of the head and of the order of the data); `pairs won` counts
seeds. "tokens a forward" is what a decoder with this one draft would give for each forward of the model: 1 + acceptance.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path

from etude.bench import Row
from etude.factory.corpus import CorpusConfig, function_documents
from etude.model.shelf import PACKAGED
from etude.model.weights import load_model
from etude.optim.config import OptimConfig
from etude.optim.schedules import ScheduleConfig
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import load_tokenizer
from etude.trainer.config import PhaseConfig, PretrainConfig
from etude.trainer.documents import Documents, rows_of, write_documents
from etude.trainer.mtp import Acceptance, HeadLoss, acceptance
from etude.trainer.pretrain import pretrain

LENGTH = 512
BATCH_TOKENS = 4096


def write_functions(path: Path, numbers: range) -> None:
    tokenizer = load_tokenizer(PACKAGED["nano"])
    texts: Iterable[list[int]] = function_documents(CorpusConfig(), numbers, tokenizer, EtudeRenderer(tokenizer))
    write_documents(path, ((ids, None) for ids in texts if len(ids) > 2))


def train_head(data: Path, out: Path, kind: HeadLoss, steps: int, seed: int, device: str) -> Acceptance:
    phase = PhaseConfig(
        name="heads",
        data=str(data / "train.npz"),
        tokens=steps * BATCH_TOKENS,
        length=LENGTH,
        batch_tokens=BATCH_TOKENS,
        lr=4e-3,
        schedule=ScheduleConfig(kind="wsd", warmup=0.1, decay=0.5),
        optim=OptimConfig(kind="muon", weight_decay=0.1),
        trains="heads",
        head_loss=kind,
    )
    config = PretrainConfig(phases=(phase,), base="nano", add_heads=1, seed=seed, save_dtype="float32", device=device)
    model = load_model(pretrain(config, out).model, device=device)
    held_out = Documents(data / "held.npz")
    return acceptance(model, rows_of(held_out, held_out.pieces(LENGTH), 4096))[0]


def run(device: str, quick: bool) -> list[Row]:
    seeds, steps, packages = ((0,), 10, 60) if quick else ((0, 1, 2), 60, 800)
    found: dict[HeadLoss, list[Acceptance]] = {"distil": [], "labels": []}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        write_functions(data / "train.npz", range(packages))
        write_functions(data / "held.npz", range(10**6, 10**6 + (10 if quick else 60)))
        for seed in seeds:
            for kind, results in found.items():
                results.append(train_head(data, data / f"{kind}-{seed}", kind, steps, seed, device))
                print(f"seed {seed}, {kind}: {results[-1]}")

    def mean(kind: HeadLoss, of: str) -> float:
        return statistics.mean(getattr(a, of) for a in found[kind])

    def row(name: str, unit: str, ours: float, peer: float) -> Row:
        return Row(name=name, unit=unit, ours=ours, peer=peer, peer_name="the same head taught by the text", higher_is_better=True)

    won = sum(ours.sampled > peer.sampled for ours, peer in zip(found["distil"], found["labels"], strict=True))
    return [
        row("acceptance, sampled", "of 1", mean("distil", "sampled"), mean("labels", "sampled")),
        row("acceptance, greedy", "of 1", mean("distil", "greedy"), mean("labels", "greedy")),
        row("tokens a forward, sampled", "tokens", 1 + mean("distil", "sampled"), 1 + mean("labels", "sampled")),
        row("pairs won, sampled", "seeds", won, len(seeds) - won),
    ]
