"""The engine over the real decoder against its naive twin: the same tokens, and in invariant mode the same bits."""

import asyncio

import numpy as np
import pytest
import torch

from etude.errors import EngineError
from etude.inference import naive
from etude.inference.engine import EngineConfig, NativeEngine
from etude.model.config import Latent, ModelConfig
from etude.model.transformer import Decoder

SHAPE = {"vocab_size": 131, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "max_positions": 256}
MOE = {"experts": 6, "experts_per_token": 2, "expert_intermediate": 24, "shared_intermediate": 16, "family": "qwen2_moe", "qkv_bias": True}
LATENT = {
    **SHAPE, "kv_heads": 4, "head_dim": 40, "intermediate": 48, "experts": 6, "experts_per_token": 2, "expert_intermediate": 24,
    "shared_intermediate": 24, "dense_layers": 1, "route_groups": 3, "route_groups_kept": 2, "route_scale": 1.5, "norm_topk": True,
    "latent": Latent(kv_rank=32, q_rank=24, nope_dim=32, rope_dim=8, value_dim=32), "family": "deepseek_v3",
}  # fmt: skip
CONFIGS = {"dense": ModelConfig(**SHAPE, intermediate=48), "moe": ModelConfig(**SHAPE, **MOE), "latent": ModelConfig(**LATENT)}


def decoder(kind, dtype, numerics):
    """Weights large enough that the distribution is far from uniform and a wrong bit would show."""
    model = Decoder(CONFIGS[kind], numerics=numerics)
    model.init_weights(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("norm.weight", "bias")):
                parameter.mul_(8.0)
    return model.to(dtype).eval()


def load(lab, *, greedy=False):
    """Requests of all lengths, half with a common prefix, and moments at which they arrive."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 131, 50).tolist()
    out = []
    for i in range(12):
        own = rng.integers(0, 131, int(rng.integers(1, 70))).tolist()
        ids = common[: int(rng.integers(20, 50))] + own if i % 2 else own
        temperature = 0.0 if greedy else (1.0, 0.7, 1.3)[i % 3]
        cut = {} if greedy or i % 4 else {"top_p": 0.9, "top_k": 50}
        out.append((int(rng.integers(0, 25)), lab.request(f"r{i}", ids, seed=i, max_tokens=22, temperature=temperature, **cut)))
    return out


async def serve(lab, model, arrivals, **config):
    engine = NativeEngine(model, version=lab.version(0), config=EngineConfig(**config), apply=lab.set_salt)

    async def one(after, request):
        await lab.ticks(after)
        return await engine.generate(request)

    got = await asyncio.gather(*(one(after, request) for after, request in arrivals))
    assert lab.idle_clean(engine)
    return got, await engine.stats(), engine


SETTINGS = {
    "roomy": {"max_running": 16, "token_budget": 256, "num_blocks": 200},
    "small chunks": {"max_running": 5, "token_budget": 7, "num_blocks": 200},
    "no prefix cache": {"max_running": 8, "token_budget": 64, "num_blocks": 200, "prefix_cache": False},
    "tiny memory": {"max_running": 8, "token_budget": 48, "num_blocks": 14},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_invariant_engine_equals_its_naive_twin_bit_for_bit(lab, kind, dtype):
    model = decoder(kind, dtype, "invariant")
    arrivals = load(lab)
    want = [naive.generate(model, request, lab.version(0)) for _, request in arrivals]
    assert len({w.ids for w in want}) == len(want)
    for name, config in SETTINGS.items():
        got, stats, _ = asyncio.run(serve(lab, model, arrivals, **config))
        assert all(lab.same(g, w) for g, w in zip(got, want, strict=True)), name
        assert (stats["preemptions"] > 0) == (name == "tiny memory")
        assert (stats["cached_tokens"] > 0) == (name != "no prefix cache")


@pytest.mark.slow  # a second thread on a busy core spins: seconds or a minute
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_number_of_threads(lab, dtype):
    model = decoder("moe", dtype, "invariant")
    arrivals = load(lab)[:6]
    want = [naive.generate(model, request, lab.version(0)) for _, request in arrivals]
    torch.set_num_threads(2)
    got, _, _ = asyncio.run(serve(lab, model, arrivals, **SETTINGS["roomy"]))
    assert all(lab.same(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_invariant_score_equals_what_generate_reported_bit_for_bit(lab, kind):
    model = decoder(kind, torch.float32, "invariant")
    arrivals = load(lab)[:5]

    async def main():
        got, _, engine = await serve(lab, model, arrivals, max_running=4, token_budget=40, num_blocks=80)
        for (_, request), generation in zip(arrivals, got, strict=True):
            ids = [*request.ids, *generation.ids]
            at_one, twin = await engine.score(ids), naive.score(model, ids, lab.version(0))
            assert np.array_equal(at_one.logprob_T[len(request.ids) :], generation.logprob_t1_T)
            assert np.array_equal(at_one.logprob_T, twin.logprob_T)
            if model.config.moe:
                assert np.array_equal(at_one.routes_TLK, twin.routes_TLK)
                assert np.array_equal(at_one.routes_TLK[:-1], generation.routes_PTLK[:-1])
            else:
                assert at_one.routes_TLK is None is generation.routes_PTLK
            if request.sampling.top_k == 0:
                scored = await engine.score(ids, temperature=request.sampling.temperature)
                assert np.array_equal(scored.logprob_T[len(request.ids) :], generation.logprob_T)

    asyncio.run(main())


@pytest.mark.parametrize("kind", CONFIGS)
def test_fast_greedy_engine_equals_its_naive_twin(lab, kind):
    model = decoder(kind, torch.float32, "fast")
    arrivals = load(lab, greedy=True)
    want = [naive.generate(model, request, lab.version(0)) for _, request in arrivals]
    got, _, _ = asyncio.run(serve(lab, model, arrivals, **SETTINGS["roomy"]))
    for g, w in zip(got, want, strict=True):
        assert g.ids == w.ids
        np.testing.assert_allclose(g.logprob_t1_T, w.logprob_t1_T, atol=1e-4)


def test_broken_weights_leave_nothing_behind_in_the_cache(lab):
    model = decoder("dense", torch.float32, "invariant")
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    request = lab.request("r", [5] * 20)

    async def main():
        engine = NativeEngine(model, version=lab.version(0), config=EngineConfig(num_blocks=8))
        with torch.no_grad():
            model.embed_tokens.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(lab.request("broken", [5] * 100))
        model.load_state_dict(good)
        return await engine.generate(request)

    assert lab.same(asyncio.run(main()), naive.generate(model, request, lab.version(0)))
