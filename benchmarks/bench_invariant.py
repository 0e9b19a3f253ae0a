"""One prompt a thousand times at temperature 0, in batches that never look the same: how many different answers come back?

The samples arrive in waves of 1 to 48 requests, at random moments, mixed with other prompts of other lengths, in three engines that
batch differently (one forward for everything, prompts in chunks of 32 tokens, no prefix cache). An answer is its tokens; a result
is its tokens with the bits of all their log-probs. The trainer then computes the same tokens in packed rows beside other
sequences, under autograd, and its log-probs are compared with the engine's, bit by bit.

Ours is `numerics = "invariant"`, the peer is `numerics = "fast"` on the same weights, in float32 and in bfloat16, doing the same work in
the same run. The last rows are the price: tokens per second of all that sampling, and of a training step's forward and backward.
Published for a 235B model on GPUs (Thinking Machines, 2025): 80 different answers of 1,000 without, 1 with, at about 1.6 times the time.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import etude
from etude.bench import Row
from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.config import ModelConfig, Numerics
from etude.model.weights import from_config, load_model, save_model
from etude.protocols import GenerateRequest, Generation
from etude.records import Batch, Sampling, Version
from etude.trainer.config import RLConfig
from etude.trainer.losses import numpy, score
from etude.trainer.pack import Normalisers, Sample, pack_in_order
from etude.trainer.rl import Policy

VERSION = Version(lineage=0, ordinal=0, hash="benchmark")
ENGINES = (
    EngineConfig(max_running=64, token_budget=2048),
    EngineConfig(max_running=24, token_budget=32),
    EngineConfig(max_running=10, token_budget=512, prefix_cache=False),
)
DTYPES = ("float32", "bfloat16")
NUMERICS: tuple[Numerics, ...] = ("invariant", "fast")
PROMPT_TOKENS = 150
OTHERS = 2
"""One neighbour for every this many samples."""
RANDOM = ModelConfig(
    vocab_size=1024,
    hidden=192,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=48,
    experts=8,
    experts_per_token=2,
    expert_intermediate=96,
    shared_intermediate=128,
    family="qwen2_moe",
    qkv_bias=True,
)


@dataclass(kw_only=True)
class Found:
    """What came back of one numerics in one dtype."""

    answers: set[tuple[int, ...]] = field(default_factory=set)
    results: set[bytes] = field(default_factory=set)
    unequal: int = 0
    """Tokens whose log-prob has other bits in the trainer."""
    tokens: int = 0
    largest: float = 0.0
    """|log-prob of the engine - of the trainer|"""
    seconds: float = 0.0
    computed: float = 0.0


class Crowd:
    """The samples and their neighbours, and when each arrives: the same for every engine that is asked."""

    def __init__(self, samples: int, answer: int, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.prompt = np.random.default_rng(0).integers(8, vocab, PROMPT_TOKENS).tolist()
        kinds = rng.permutation([True] * samples + [False] * (samples // OTHERS))
        sizes: list[int] = []
        while sum(sizes) < len(kinds):
            sizes.append(int(rng.integers(1, 49)))
        self.waves: list[list[tuple[int, GenerateRequest]]] = []
        at = 0
        for size in sizes:
            wave = [
                (int(rng.integers(0, 30)), self._request(at + i, bool(k), answer, vocab, rng)) for i, k in enumerate(kinds[at : at + size])
            ]
            self.waves.append(wave)
            at += size

    def _request(self, number: int, sample: bool, answer: int, vocab: int, rng: np.random.Generator) -> GenerateRequest:
        if sample:
            return GenerateRequest(id=f"sample {number}", ids=self.prompt, sampling=Sampling(temperature=0.0, max_tokens=answer))
        ids = rng.integers(8, vocab, int(rng.integers(1, 2 * PROMPT_TOKENS))).tolist()
        return GenerateRequest(id=f"other {number}", ids=ids, sampling=Sampling(max_tokens=int(rng.integers(1, 2 * answer)), seed=number))

    async def wave_through(self, engine: NativeEngine, wave: list[tuple[int, GenerateRequest]]) -> list[Generation]:
        """The samples of one wave. Waits for all of it, neighbours too, so that batches grow and shrink."""

        async def one(after: int, request: GenerateRequest) -> Generation:
            for _ in range(after):
                await asyncio.sleep(0)
            return await engine.generate(request)

        out = await asyncio.gather(*(one(after, request) for after, request in wave))
        return [g for g in out if g.id.startswith("sample")]


async def ask(both: list[Found], folder: Path, device: str, dtype: str, config: EngineConfig, crowd: Crowd) -> list[list[Generation]]:
    """The samples of each numerics. Wave by wave one after the other, so that a busy minute hits both."""
    models = [load_model(folder, dtype=getattr(torch, dtype), device=device, numerics=n) for n in NUMERICS]
    engines = [NativeEngine(model, version=VERSION, config=config) for model in models]
    samples: list[list[Generation]] = [[] for _ in both]
    for wave in crowd.waves:
        for found, engine, mine in zip(both, engines, samples, strict=True):
            begin = time.perf_counter()
            mine += await crowd.wave_through(engine, wave)
            found.seconds += time.perf_counter() - begin
    for found, engine, mine in zip(both, engines, samples, strict=True):
        found.computed += (await engine.stats())["computed_tokens"]
        await engine.close()
        for sample in mine:
            found.answers.add(tuple(sample.ids))
            found.results.add(np.array(sample.ids).tobytes() + sample.logprob_t1_T.tobytes())
    return samples


def sequence(prompt: list[int], answer: tuple[int, ...]) -> Sample:
    ids_T = np.array([*prompt, *answer], np.int32)
    weight_T = (np.arange(len(ids_T)) >= len(prompt)).astype(np.float32)
    zeros_T = np.zeros(len(ids_T), np.float32)
    version_T = np.zeros(len(ids_T), np.int32)
    return Sample(ids_T=ids_T, rl_T=weight_T, hint_T=zeros_T, ce_T=zeros_T, old_logprob_T=zeros_T, version_T=version_T)


def packed(sample: Sample, rng: np.random.Generator, vocab: int) -> tuple[Batch, np.ndarray]:
    """A row with the sequence at a random place between random ones, and where the sequence's targets are."""
    lengths = rng.integers(2, 400, int(rng.integers(0, 6))).tolist()
    row: list[Sample] = [sequence(rng.integers(8, vocab, n - 1).tolist(), (9,)) for n in lengths]
    place = int(rng.integers(0, len(row) + 1))
    row.insert(place, sample)
    begin = sum(len(s) for s in row[:place])
    return pack_in_order(row, 4096, Normalisers())[0], begin + np.flatnonzero(sample.rl_T)


def compare(found: Found, policy: Policy, prompt: list[int], samples: list[Generation], rows: int, seed: int) -> None:
    """Every sample against the trainer's log-probs of the same tokens, each computed in one of `rows` different rows."""
    rng = np.random.default_rng(seed)
    vocab = policy.model.config.vocab_size
    known: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
    for number, sample in enumerate(samples):
        key = (tuple(sample.ids), number % rows)
        if key not in known:
            batch, where_M = packed(sequence(prompt, tuple(sample.ids)), rng, vocab)
            known[key] = numpy(score(policy.model, batch, where_M).logp_M)
        gap_T = np.abs(known[key] - sample.logprob_t1_T)
        found.unequal += int(np.count_nonzero(known[key].view(np.int32) != sample.logprob_t1_T.view(np.int32)))
        found.tokens += len(gap_T)
        found.largest = max(found.largest, float(gap_T.max()))


def training_rates(folder: Path, device: str, rounds: int, tokens: int) -> list[float]:
    """Tokens per second of forward and backward over one packed row, in each numerics, in turns."""
    rng = np.random.default_rng(0)
    policies = [Policy(folder, RLConfig(numerics=n, device=device)) for n in NUMERICS]
    vocab = policies[0].model.config.vocab_size
    row = [sequence(rng.integers(8, vocab, 200).tolist(), tuple(rng.integers(8, vocab, tokens // 4 - 200).tolist())) for _ in range(4)]
    batch = pack_in_order(row, tokens, Normalisers())[0]
    where_M = np.flatnonzero(batch.rl_weight_N)
    times: list[list[float]] = [[] for _ in policies]
    for _ in range(rounds + 1):
        for policy, seconds in zip(policies, times, strict=True):
            begin = time.perf_counter()
            score(policy.model, batch, where_M).logp_M.sum().backward()
            policy.collect()
            policy.zero_grad()
            seconds.append(time.perf_counter() - begin)
    return [len(batch.ids_N) / statistics.median(seconds[1:]) for seconds in times]


def model_folder(scratch: Path) -> Path:
    shipped = Path(etude.__file__).parent / "nano"
    if (shipped / "config.json").is_file():
        return shipped
    save_model(from_config(RANDOM, seed=0), scratch)
    return scratch


def measure(folder: Path, device: str, dtype: str, samples: int, answer: int, rows: int) -> list[Found]:
    """Both numerics in one dtype, on the same crowd in each engine."""
    both = [Found() for _ in NUMERICS]
    each = [samples // len(ENGINES) + (i < samples % len(ENGINES)) for i in range(len(ENGINES))]
    policies = [Policy(folder, RLConfig(numerics=n, compute_dtype=dtype, device=device)) for n in NUMERICS]  # type: ignore[arg-type]
    for seed, (config, count) in enumerate(zip(ENGINES, each, strict=True)):
        crowd = Crowd(count, answer, policies[0].model.config.vocab_size, seed)
        got = asyncio.run(ask(both, folder, device, dtype, config, crowd))
        for found, policy, samples_of in zip(both, policies, got, strict=True):
            compare(found, policy, crowd.prompt, samples_of, rows, seed)
    return both


def run(device: str, quick: bool) -> list[Row]:
    samples, answer, rows = (120, 16, 3) if quick else (1000, 32, 12)
    row = functools.partial(Row, peer_name="the same engine and trainer in fast mode")
    out, rates = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        for dtype in DTYPES:
            ours, fast = measure(folder, device, dtype, samples, answer, rows)

            def less(name: str, unit: str, mine: float, theirs: float, dtype: str = dtype) -> Row:
                return row(name=f"{name} {dtype}", unit=unit, ours=mine, peer=theirs, higher_is_better=False)

            out += [
                less(f"distinct answers of {samples}", "answers", len(ours.answers), len(fast.answers)),
                less(f"distinct results of {samples}", "results", len(ours.results), len(fast.results)),
                less("log-probs unequal to the trainer's", "of 1", ours.unequal / ours.tokens, fast.unequal / fast.tokens),
                less("largest |delta log-prob|", "nats", ours.largest, fast.largest),
            ]
            rates.append((dtype, ours.computed / ours.seconds, fast.computed / fast.seconds))
        trained = training_rates(folder, device, 2 if quick else 7, 1024 if quick else 4096)
    out += [row(name=f"engine {dtype}", unit="tokens/s", ours=mine, peer=theirs, higher_is_better=True) for dtype, mine, theirs in rates]
    out.append(row(name="trainer float32", unit="tokens/s", ours=trained[0], peer=trained[1], higher_is_better=True))
    return out
