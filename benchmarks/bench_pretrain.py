"""Tokens per second of our training step against `transformers` with `torch.optim`, on the shapes of SmolLM2-135M.

Both sides start from the same random weights and train on the same documents: forward, cross-entropy of every token but a document's
first, backward, clipping of the global norm, AdamW with decay; float32 on CPU, bfloat16 autocast over float32 weights on a GPU. They
take turns, one step each. Before anything is timed their losses on the first row are compared: equal losses mean that both respect the
documents' borders, so that both do the same work.

    smollm2 step     the peer gets the very rows that we pack: one list of tokens, positions that start again with each document
    packed, padded   the peer gets the same documents as most people feed it: one a line, padded to the longest; real tokens count
    our forward ...  where our time goes, in seconds of the median step; no peer
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch import Tensor

from etude.bench import Row
from etude.model.config import ModelConfig
from etude.model.weights import disk_tensors, from_config
from etude.optim.build import build_optimizer, clip_gradients
from etude.optim.config import OptimConfig
from etude.records import Batch
from etude.trainer.losses import ce_loss, run_row
from etude.trainer.pack import Normalisers, document_sample, pack_in_order

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49_152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=8192,
)
LR, CLIP, DECAY, BETAS, EPS = 1e-4, 1.0, 0.1, (0.9, 0.95), 1e-8
CLOSE = {"cpu": 1e-4, "cuda": 2e-2}
"""Relative difference of the two losses: another order of additions in float32, other roundings in bfloat16."""


def documents(tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Random ids in documents of 16 tokens to a row, most of them short, as code files are; together exactly `tokens`."""
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    while (left := tokens - sum(map(len, out))) > 0:
        length = min(int(np.clip(rng.lognormal(5.3, 0.9), 16, tokens)), left)
        out.append(rng.integers(0, SMOLLM2.vocab_size, length if left - length >= 16 else left))
    return out


def precision(device: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Ours:
    def __init__(self, device: str) -> None:
        self.device = device
        self.model = from_config(SMOLLM2, seed=0, device=device)
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        config = OptimConfig(kind="adamw", beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, clip_norm=CLIP)
        self.optimizer = build_optimizer(self.model, config)
        self.parts: dict[str, list[float]] = {}

    def row(self, docs: list[np.ndarray]) -> Batch:
        targets = sum(len(d) - 1 for d in docs)
        return pack_in_order([document_sample(d, np.ones(len(d))) for d in docs], sum(map(len, docs)), Normalisers(ce=targets))[0]

    def lap(self, part: str) -> None:
        wait(self.device)
        now = time.perf_counter()
        self.parts.setdefault(part, []).append(now - self._last)
        self._last = now

    def step(self, docs: list[np.ndarray]) -> float:
        self._last = time.perf_counter()
        row = self.row(docs)
        with precision(self.device):
            ran = run_row(self.model, row)
            self.lap("forward")
            loss = ce_loss(self.model, ran, row)
        self.lap("loss")
        loss.backward()
        self.lap("backward")
        clip_gradients(self.params, CLIP)
        self.optimizer.step(LR)
        self.optimizer.zero_grad()
        self.lap("optimizer")
        return loss.item()


class Peer:
    def __init__(self, ours: Ours, device: str) -> None:
        self.device = device
        config = transformers.LlamaConfig(
            vocab_size=SMOLLM2.vocab_size,
            hidden_size=SMOLLM2.hidden,
            num_hidden_layers=SMOLLM2.layers,
            num_attention_heads=SMOLLM2.heads,
            num_key_value_heads=SMOLLM2.kv_heads,
            head_dim=SMOLLM2.head_dim,
            intermediate_size=SMOLLM2.intermediate,
            rope_parameters={"rope_type": "default", "rope_theta": SMOLLM2.rope_theta},
            rms_norm_eps=SMOLLM2.norm_eps,
            tie_word_embeddings=True,
            max_position_embeddings=SMOLLM2.max_positions,
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).train()
        self.model.load_state_dict({name: tensor.clone() for name, tensor in disk_tensors(ours.model)}, strict=False)
        self.model.tie_weights()
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=device == "cuda")

    def packed(self, docs: list[np.ndarray]) -> float:
        ids = torch.tensor(np.concatenate(docs))[None]
        labels = ids.clone()
        labels[0, np.cumsum([0, *map(len, docs[:-1])])] = -100
        positions = torch.cat([torch.arange(len(d)) for d in docs])[None]
        return self._step({"input_ids": ids, "labels": labels, "position_ids": positions})

    def padded(self, docs: list[np.ndarray]) -> float:
        longest = max(map(len, docs))
        ids, mask = torch.zeros(len(docs), longest, dtype=torch.int64), torch.zeros(len(docs), longest, dtype=torch.int64)
        for i, d in enumerate(docs):
            ids[i, : len(d)], mask[i, : len(d)] = torch.tensor(d), 1
        return self._step({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def _step(self, inputs: dict[str, Tensor]) -> float:
        with precision(self.device):
            loss = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def rates(sides: list[Callable[[list[np.ndarray]], float]], docs: list[np.ndarray], rounds: int, device: str) -> list[float]:
    """Median real tokens per second of each side, one step each in turns; the first round warms up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds + 1):
        for side, times in zip(sides, seconds, strict=True):
            wait(device)
            begin = time.perf_counter()
            side(docs)
            wait(device)
            times.append(time.perf_counter() - begin)
    tokens = sum(map(len, docs))
    return [tokens / statistics.median(times[1:]) for times in seconds]


def run(device: str, quick: bool) -> list[Row]:
    transformers.logging.set_verbosity_error()
    tokens, rounds = (256, 1) if quick else (2048 if device == "cpu" else 16_384, 3)
    ours = Ours(device)
    peer = Peer(ours, device)
    docs = documents(tokens)
    mine, theirs = ours.step(docs), peer.packed(docs)
    if abs(mine - theirs) > CLOSE[device] * abs(theirs):
        raise AssertionError(f"the two sides do not compute the same: losses {mine} and {theirs} on the same row from the same weights")
    ours.parts.clear()
    packed = rates([ours.step, peer.packed], docs, rounds, device)
    padded = rates([ours.step, peer.padded], docs, rounds, device)

    def row(name: str, pair: list[float], peer_name: str) -> Row:
        return Row(name=name, unit="tokens/s", ours=pair[0], peer=pair[1], peer_name=peer_name, higher_is_better=True)

    where = [Row(name=f"our {part}", unit="s", ours=statistics.median(times), higher_is_better=False) for part, times in ours.parts.items()]
    rows = [row("smollm2 step", packed, "transformers + torch.optim.AdamW, the same packed row")]
    return [*rows, row("packed, padded", padded, "transformers + torch.optim.AdamW, documents padded to the longest"), *where]
