"""Tiny models with weights large enough to matter, and a small engine-like driver of the paged cache."""

import os
import random
import warnings
from collections.abc import Callable, Iterator

import pytest

# Before torch loads its thread pool: with two threads on a busy machine, threads that spin while waiting for one another
# made these tests twenty times slower (530 s against 26 s).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from etude.model.cache import PagedCache, Plan
from etude.model.config import Latent, ModelConfig, RopeScaling
from etude.model.transformer import Decoder, Output
from etude.model.weights import from_config

MOE = ModelConfig(
    vocab_size=96, hidden=64, layers=2, heads=6, kv_heads=2, head_dim=16, experts=4, experts_per_token=2, expert_intermediate=32,
    shared_intermediate=48, norm_topk=True, qkv_bias=True, family="qwen2_moe",
)  # fmt: skip
DENSE = ModelConfig(vocab_size=96, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=32, intermediate=96, tie_embeddings=False)
LATENT = ModelConfig(
    vocab_size=96, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=48, intermediate=80, experts=6, experts_per_token=2,
    expert_intermediate=32, shared_intermediate=64, dense_layers=1, route_groups=3, route_groups_kept=2, route_scale=1.7, norm_topk=True,
    latent=Latent(kv_rank=48, q_rank=32, nope_dim=32, rope_dim=16, value_dim=32), tie_embeddings=False, family="deepseek_v3",
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=64, mscale=0.7, mscale_all_dim=1.0),
)  # fmt: skip
NORMED = ModelConfig(
    vocab_size=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, experts=5, experts_per_token=2, expert_intermediate=32,
    norm_topk=True, family="qwen3_moe", rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=64),
)  # fmt: skip
CONFIGS = {"moe": MOE, "dense": DENSE, "latent": LATENT, "normed": NORMED}


@pytest.fixture(params=["moe", "dense", "latent", "normed"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.fixture
def moe_config() -> ModelConfig:
    return MOE


@pytest.fixture
def dense_config() -> ModelConfig:
    return DENSE


@pytest.fixture
def make_model() -> Callable[..., Decoder]:
    """(config, numerics, dtype, seed) -> a model whose norms, biases and experts all matter."""

    def make(config: ModelConfig, numerics: str = "fast", dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
        model = from_config(config, seed=seed, numerics=numerics)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise)
        return model.to(dtype)

    return make


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Driver:
    """Feeds sequences to a model in any pieces, through scattered blocks of one cache, as an engine would."""

    def __init__(self, model: Decoder, sequences: list[Tensor], *, seed: int = 0, block_size: int = 16, functional: bool = False) -> None:
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.done = [0] * len(sequences)
        self.hidden: list[list[Tensor]] = [[] for _ in sequences]
        self.routes: list[list[Tensor]] = [[] for _ in sequences]
        needed = [-(-len(s) // block_size) for s in sequences]
        free = list(range(1, 1 + sum(needed) + 3))
        random.Random(seed).shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        self.cache = PagedCache(model.config, 1 + sum(needed) + 3, block_size, model.dtype, functional=functional)
        for layer in (*self.cache.keys_L, *self.cache.values_L):
            layer.fill_(7.0)  # what an earlier owner of the block left behind

    def feed(self, pieces: list[tuple[int, int]]) -> Output:
        """One forward over (sequence, number of its next tokens), in this order."""
        P, ids, positions, slots, starts = self.block_size, [], [], [], [0]
        width = max(len(self.tables[s]) for s, _ in pieces)
        tables = torch.zeros(len(pieces), width, dtype=torch.int64)
        lengths = []
        for row, (s, n) in enumerate(pieces):
            at = torch.arange(self.done[s], self.done[s] + n)
            table = torch.tensor(self.tables[s])
            ids.append(self.sequences[s][at])
            positions.append(at)
            slots.append(table[at // P] * P + at % P)
            starts.append(starts[-1] + n)
            tables[row, : len(table)] = table
            self.done[s] += n
            lengths.append(self.done[s])
        plan = Plan(
            positions_N=torch.cat(positions), slots_N=torch.cat(slots), tables_SB=tables, starts_S1=starts, lengths_S=lengths
        )  # fmt: skip
        out = self.model(torch.cat(ids), plan, self.cache)
        for row, (s, _) in enumerate(pieces):
            self.hidden[s].append(out.hidden_ND[starts[row] : starts[row + 1]])
            if out.routes_NLK is not None:
                self.routes[s].append(out.routes_NLK[starts[row] : starts[row + 1]])
        return out

    def logits(self, s: int) -> Tensor:
        return self.model.logits(torch.cat(self.hidden[s]))


@pytest.fixture
def driver() -> type[Driver]:
    return Driver


@pytest.fixture
def random_pieces() -> Callable[[random.Random, list[int]], list[list[tuple[int, int]]]]:
    """A random schedule: forwards that mix whole prompts, chunks and single tokens of sequences of these lengths."""

    def schedule(rng: random.Random, lengths: list[int]) -> list[list[tuple[int, int]]]:
        left = dict(enumerate(lengths))
        forwards = []
        while left:
            chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
            pieces = [(s, min(left[s], rng.choice([1, 1, 1, 2, 5, 17, 40, 300]))) for s in chosen]
            for s, n in pieces:
                left[s] -= n
                if not left[s]:
                    del left[s]
            forwards.append(pieces)
        return forwards

    return schedule


@pytest.fixture(scope="session")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("transformers")
        module.AutoModelForCausalLM  # noqa: B018  its imports warn, here and not later
    module.logging.disable_progress_bar()
    return module
