"""Tokens per second of the native engine against `transformers` generate, on the same weights in the same run.

Both sample at temperature 1 over the whole vocabulary, with the same number of torch threads, from the shipped nano policy
when it is there and from a random Qwen2-MoE of its size otherwise (random weights cost the same). Only sampled tokens
are counted; the time includes the prompts. Ours and the peer take turns, so that a busy minute hits both.

    batch 1, 8, 32      prompts and answers of equal length: the best case of a static batch
    mixed lengths 32    answers of 8 to 128 tokens: a static batch waits for its longest
    shared prompt 32    four prompts of eight rollouts each, as in RL: the engine computes each prompt once
    invariant 32        our batch-invariant mode against our fast mode: what bit-equality costs

With `--model M`, tokens per second of that model as `etude serve` runs it (bfloat16 where the CPU multiplies it, float32 otherwise),
against the faster of `transformers` in float32 and in bfloat16. vLLM joins the comparison when there is an engine for it.

    decode 1, 32, 64    concurrent requests with short prompts and answers of equal length
    repeating 1, guesses   one request whose text repeats, with speculation against without: what guessing gains where it can
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
from etude.model import shelf
from etude.model.config import ModelConfig, Numerics
from etude.model.linear import bfloat16_is_fast
from etude.model.weights import from_config, load_model, save_model
from etude.parts import settle
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

    def __init__(
        self,
        folder: Path,
        device: str,
        numerics: Numerics,
        dtype: torch.dtype = torch.float32,
        config: EngineConfig = EngineConfig(),
        temperature: float = 1.0,
    ) -> None:
        self._model = load_model(folder, dtype=dtype, device=device, numerics=numerics)
        self._config, self._temperature = config, temperature

    def __call__(self, work: Work) -> float:
        return asyncio.run(self._serve(work))

    async def _serve(self, work: Work) -> float:
        engine = NativeEngine(self._model, version=VERSION, config=self._config)
        requests = [
            GenerateRequest(id=f"{i}", ids=ids, sampling=Sampling(max_tokens=count, seed=i, temperature=self._temperature))
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

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

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


def decode_rows(folder: Path, device: str, quick: bool) -> list[Row]:
    """The model as a server runs it, against `transformers` in the type it is faster in."""
    rounds, prompt, answer = (1, 16, 8) if quick else (3, 32, 64)
    served = torch.bfloat16 if device != "cpu" or bfloat16_is_fast() else torch.float32
    ours = Ours(folder, device, "fast", served)
    peers = {str(dtype).removeprefix("torch."): Peer(folder, device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    vocab = next(iter(peers.values())).model.config.vocab_size
    rng = np.random.default_rng(0)
    rows = []
    for n in (1, 32, 64):
        work = Work(name=f"decode {n}", prompts=rng.integers(0, vocab, (n, prompt)).tolist(), counts=[answer] * n)
        mine, *theirs = rates(work, [ours, *peers.values()], rounds)
        best, dtype = max(zip(theirs, peers, strict=True))
        rows.append(
            Row(
                name=work.name,
                unit="tokens/s",
                ours=mine,
                peer=best,
                peer_name=f"transformers generate, {dtype}",
                higher_is_better=True,
            )
        )
    guessing = Ours(folder, device, "fast", served, EngineConfig(speculation="ngram"), temperature=0.0)
    plain = Ours(folder, device, "fast", served, temperature=0.0)
    phrase = rng.integers(0, vocab, 8).tolist()
    work = Work(name="repeating 1, guesses", prompts=[phrase * 8], counts=[answer])
    quick_rate, plain_rate = rates(work, [guessing, plain], rounds)
    rows.append(
        Row(
            name=work.name,
            unit="tokens/s",
            ours=quick_rate,
            peer=plain_rate,
            peer_name="the same engine without speculation",
            higher_is_better=True,
        )
    )
    return rows


def run(device: str, quick: bool, model: str | None = None) -> list[Row]:
    transformers.logging.set_verbosity_error()
    if model is not None:
        settle()
        return decode_rows(shelf.model_folder(model), device, quick)
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
