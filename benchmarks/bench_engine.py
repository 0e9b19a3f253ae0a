"""Tokens per second of the native engine against `transformers` generate, on the same weights in the same run.

Both sample at temperature 1 over the whole vocabulary, with the same number of torch threads, from the shipped nano policy
when it is there and from a random Qwen2-MoE of its size otherwise (random weights cost the same). Only sampled tokens
are counted; the time includes the prompts. Ours and the peer take turns, so that a busy minute hits both.

    batch 1, 8, 32      prompts and answers of equal length: the best case of a static batch
    mixed lengths 32    answers of 8 to 128 tokens: a static batch waits for its longest
    shared prompt 32    four prompts of eight rollouts each, as in RL: the engine computes each prompt once
    invariant 32        our batch-invariant mode against our fast mode: what bit-equality costs
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

import etude
from etude.bench import Row
from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.config import ModelConfig, Numerics
from etude.model.weights import from_config, load_model, save_model
from etude.protocols import GenerateRequest
from etude.records import Sampling, Version

NANO_SIZED = ModelConfig(
    vocab_size=1024,
    hidden=160,
    layers=6,
    heads=5,
    kv_heads=5,
    head_dim=32,
    experts=8,
    experts_per_token=2,
    expert_intermediate=128,
    shared_intermediate=256,
    family="qwen2_moe",
    qkv_bias=True,
    max_positions=2048,
)
VERSION = Version(lineage=0, ordinal=0, hash="benchmark")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts and how many tokens to sample after each."""

    name: str
    prompts: list[list[int]]
    counts: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


def workloads(vocab: int, quick: bool) -> list[Work]:
    rng = np.random.default_rng(0)
    prompt, answer = (64, 24) if quick else (256, 96)

    def random_prompts(n: int) -> list[list[int]]:
        return rng.integers(0, vocab, (n, prompt)).tolist()

    works = [Work(name=f"batch {n}", prompts=random_prompts(n), counts=[answer] * n) for n in (1, 8, 32)]
    mixed = rng.integers(8, 33 if quick else 129, 32).tolist()
    shared = [p for p in random_prompts(4) for _ in range(8)]
    works.append(Work(name="mixed lengths 32", prompts=random_prompts(32), counts=mixed))
    works.append(Work(name="shared prompt 32", prompts=shared, counts=[answer] * 32))
    return works


class Ours:
    """The native engine; a fresh one for every measurement, so that no prompt is in the cache of the one before."""

    def __init__(self, folder: Path, device: str, numerics: Numerics) -> None:
        self._model = load_model(folder, device=device, numerics=numerics)

    def __call__(self, work: Work) -> float:
        return asyncio.run(self._serve(work))

    async def _serve(self, work: Work) -> float:
        engine = NativeEngine(self._model, version=VERSION, config=EngineConfig())
        requests = [
            GenerateRequest(id=f"{i}", ids=ids, sampling=Sampling(max_tokens=count, seed=i))
            for i, (ids, count) in enumerate(zip(work.prompts, work.counts, strict=True))
        ]
        begin = time.perf_counter()
        got = await asyncio.gather(*(engine.generate(request) for request in requests))
        elapsed = time.perf_counter() - begin
        assert [len(generation.ids) for generation in got] == work.counts
        await engine.close()
        return elapsed


class Peer:
    """`transformers` generate on one batch that runs to its longest answer."""

    def __init__(self, folder: Path, device: str) -> None:
        self._device = device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    @torch.inference_mode()
    def __call__(self, work: Work) -> float:
        ids = torch.tensor(work.prompts, device=self._device)
        longest = max(work.counts)
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
        if self._device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        assert out.shape[1] == ids.shape[1] + longest
        return elapsed


def rates(work: Work, sides: list[Callable[[Work], float]], rounds: int) -> list[float]:
    """Median tokens per second of each side, measured in turns after one round that warms up."""
    seconds = [[side(work) for side in sides] for _ in range(rounds + 1)][1:]
    return [work.tokens / statistics.median(times) for times in zip(*seconds, strict=True)]


def model_folder(scratch: Path) -> Path:
    shipped = sorted(Path(etude.__file__).parent.rglob("nano/config.json"))
    if shipped:
        return shipped[0].parent
    save_model(from_config(NANO_SIZED, seed=0), scratch)
    return scratch


def run(device: str, quick: bool) -> list[Row]:
    transformers.logging.set_verbosity_error()
    rounds = 2 if quick else 7
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        fast, invariant, peer = Ours(folder, device, "fast"), Ours(folder, device, "invariant"), Peer(folder, device)
        works = workloads(peer.model.config.vocab_size, quick)
        rows = []
        for work in works:
            ours, theirs = rates(work, [fast, peer], rounds)
            rows.append(
                Row(name=work.name, unit="tokens/s", ours=ours, peer=theirs, peer_name="transformers generate", higher_is_better=True)
            )
        exact, quickest = rates(works[2], [invariant, fast], rounds)
        rows.append(
            Row(
                name="invariant 32",
                unit="tokens/s",
                ours=exact,
                peer=quickest,
                peer_name="the same engine in fast mode",
                higher_is_better=True,
            )
        )
    return rows
