"""The decoder against its slow twin, and every way of feeding it against every other."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from etude.errors import ConfigError, UserError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.config import ModelConfig, RopeScaling
from etude.model.moe import balance
from etude.model.reference import reference_logits
from etude.records import ABSENT_ROUTE

CLOSE = {"rtol": 0, "atol": 2e-5}
"""float32 logits of size 1 to 10; the worst seen is 4e-6, from another order of additions."""


def tokens(*lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=generator) for n in lengths]


def packed(model, seqs, routes=None):
    """Logits of each sequence under autograd, as the trainer computes them, and the whole output."""
    lengths = [len(s) for s in seqs]
    cache = PagedCache(model.config, blocks_for(lengths), dtype=model.dtype, functional=True)
    out = model(torch.cat(seqs), Plan.packed(lengths), cache, routes_NLK=routes)
    return model.logits(out.hidden_ND).split(lengths), out


@pytest.mark.parametrize("numerics", ["fast", "matched", "invariant"])
def test_logits_equal_the_reference(config, make_model, numerics):
    model = make_model(config, numerics)
    seqs = tokens(1, 2, 15, 16, 17, 50, 200)
    for ids, logits in zip(seqs, packed(model, seqs)[0], strict=True):
        torch.testing.assert_close(logits, reference_logits(model, ids), **CLOSE)
        assert logits.dtype == torch.float32


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_prefill_chunks_and_decode_agree(config, make_model, driver, random_pieces, numerics):
    model = make_model(config, numerics)
    lengths = [1, 9, 30, 64, 150]
    seqs = tokens(*lengths)
    for seed in range(3):
        run = driver(model, seqs, seed=seed, block_size=(4, 16, 64)[seed] if numerics == "fast" else 16)
        with torch.inference_mode():
            for pieces in random_pieces(random.Random(seed), lengths):
                run.feed(pieces)
            for s, ids in enumerate(seqs):
                torch.testing.assert_close(run.logits(s), reference_logits(model, ids), **CLOSE)


def test_a_rescaled_model_is_the_model_of_the_new_config(config, make_model):
    scaling = RopeScaling(kind="yarn", factor=8.0, original_positions=32, mscale=0.5, mscale_all_dim=1.3)
    changed = dataclasses.replace(config, rope_theta=77_000.0, rope_scaling=scaling, max_positions=5000)
    model, fresh = make_model(config), make_model(changed)
    seqs = tokens(60, 5)
    before = torch.cat(packed(model, seqs)[0])
    model.rescale(rope_theta=77_000.0, rope_scaling=scaling, max_positions=5000)
    assert model.config == changed
    after = torch.cat(packed(model, seqs)[0])
    assert torch.equal(after, torch.cat(packed(fresh, seqs)[0]))
    assert not torch.allclose(before, after, atol=1e-3)


def test_bfloat16_stays_near_float32(config, make_model, driver):
    """Same weights rounded to bfloat16 on both sides; 8 bits of mantissa through two layers leave a few per cent."""
    model = make_model(config, dtype=torch.bfloat16)
    exact = make_model(config, dtype=torch.bfloat16).float()
    ids = tokens(60)[0]
    routes = packed(exact, [ids])[1].routes_NLK  # replayed, so that a flipped expert does not hide the comparison
    expected = packed(exact, [ids])[0][0]
    got = packed(model, [ids], routes)[0][0]
    assert (got - expected).norm() / expected.norm() < 0.03


LENGTHS = [5, 33, 150]


def gradients(model, forward):
    """Gradient of every parameter for the summed cross entropy of a batch; `forward` gives each sequence's logits."""
    model.zero_grad()
    seqs = tokens(*LENGTHS)
    logits_S = forward(model, seqs)
    sum(F.cross_entropy(logits[:-1], ids[1:], reduction="sum") for logits, ids in zip(logits_S, seqs, strict=True)).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}


def twin_forward(routes_NLK):
    routes_S = routes_NLK.split(LENGTHS) if routes_NLK is not None else [None] * len(LENGTHS)
    return lambda model, seqs: [reference_logits(model, ids, routes) for ids, routes in zip(seqs, routes_S, strict=True)]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_gradients_equal_the_reference(config, make_model, numerics):
    """Of every parameter, to 1e-5 of the gradient's norm."""
    model = make_model(config, numerics)
    routes = packed(model, tokens(*LENGTHS))[1].routes_NLK
    ours = gradients(model, lambda m, seqs: packed(m, seqs)[0])
    twin = gradients(model, twin_forward(routes))
    for name in twin:
        assert (ours[name] - twin[name]).norm() <= 1e-5 * twin[name].norm() + 1e-7, name


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_bfloat16_gradients_are_as_good_as_the_references(config, make_model, numerics):
    """Both round differently at every step, so each is held against the float32 gradient of the same weights and routes:
    the reference in bfloat16 is off by up to 4 % of the norm, and ours may be off by twice its error."""
    model, exact_model = make_model(config, numerics, torch.bfloat16), make_model(config, numerics, torch.bfloat16).float()
    routes = packed(model, tokens(*LENGTHS))[1].routes_NLK
    ours = gradients(model, lambda m, seqs: packed(m, seqs)[0])
    twin = gradients(model, twin_forward(routes))
    exact = gradients(exact_model, twin_forward(routes))
    for name in exact:
        allowed = 2 * (twin[name] - exact[name]).norm()
        assert allowed < 0.1 * exact[name].norm(), name
        assert (ours[name] - exact[name]).norm() <= allowed, name


def test_gradients_flow_through_chunks_of_a_functional_cache(config, make_model, driver):
    """A loss on the last chunk reaches the keys and values that earlier forwards wrote."""
    model, twin = make_model(config), make_model(config)
    seqs = tokens(40, 21)
    run = driver(model, seqs, functional=True)
    for pieces in ([(0, 17), (1, 1)], [(1, 3)], [(0, 20), (1, 16)], [(0, 3), (1, 1)]):
        run.feed(pieces)
    sum(run.logits(s)[-1].logsumexp(0) for s in (0, 1)).backward()
    sum(reference_logits(twin, ids)[-1].logsumexp(0) for ids in seqs).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_gradient_of_a_sequence_does_not_depend_on_its_neighbours(config, make_model, numerics):
    seqs = tokens(30, 70, 12)
    model = make_model(config, numerics)
    packed(model, seqs)[0][0].logsumexp(-1).sum().backward()
    alone = make_model(config, numerics)
    packed(alone, seqs[:1])[0][0].logsumexp(-1).sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functional_and_in_place_caches_hold_the_same(config, make_model, driver, numerics, dtype):
    model = make_model(config, numerics, dtype)
    seqs = tokens(40, 21)
    runs = [driver(model, seqs, functional=functional) for functional in (True, False)]
    with torch.no_grad():
        for pieces in ([(0, 17), (1, 1)], [(1, 3)], [(0, 20), (1, 16)], [(0, 3), (1, 1)]):
            outs = [run.feed(pieces) for run in runs]
            assert torch.equal(outs[0].hidden_ND, outs[1].hidden_ND)
    for a, b in zip(runs[0].cache.keys_L + runs[0].cache.values_L, runs[1].cache.keys_L + runs[1].cache.values_L, strict=True):
        assert torch.equal(a, b)


def test_functional_write_leaves_the_old_blocks_alone(moe_config):
    cache = PagedCache(moe_config, 4, functional=True)
    before = cache.keys_L[0]
    keys, _ = cache.write(0, torch.ones(1, 2, 16), torch.ones(1, 2, 16), torch.tensor([17]))
    assert not before.any()
    assert keys[:, 1, 1].eq(1).all()
    assert keys.sum() == 2 * 16


def test_in_place_cache_under_autograd_is_refused(config, make_model):
    model = make_model(config)
    with pytest.raises(UserError, match="functional=True"):
        model(tokens(4)[0], Plan.packed([4]), PagedCache(config, 1))


# ---------------------------------------------------------------------------------------------------
# Routes


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_replayed_routes_are_used_and_returned(moe_config, make_model, numerics):
    model = make_model(moe_config, numerics)
    seqs = tokens(20, 50)
    own, out = packed(model, seqs)
    again, out_again = packed(model, seqs, out.routes_NLK)
    assert torch.equal(out.routes_NLK, out_again.routes_NLK)
    assert torch.equal(torch.cat(own), torch.cat(again))
    other = (out.routes_NLK + 1) % moe_config.experts
    replayed, out_other = packed(model, seqs, other)
    assert torch.equal(out_other.routes_NLK, other)
    for ids, logits, routes in zip(seqs, replayed, other.split([20, 50]), strict=True):
        torch.testing.assert_close(logits, reference_logits(model, ids, routes), **CLOSE)
    assert not torch.allclose(torch.cat(own), torch.cat(replayed), atol=1e-2)


def test_absent_rows_keep_the_routers_own_choice(moe_config, make_model):
    model = make_model(moe_config)
    seqs = tokens(24)
    _, out = packed(model, seqs)
    routes = (out.routes_NLK + 1) % moe_config.experts
    routes[::2] = ABSENT_ROUTE
    routes[1, 1] = ABSENT_ROUTE
    _, mixed = packed(model, seqs, routes)
    kept = routes != ABSENT_ROUTE
    assert torch.equal(mixed.routes_NLK[kept], routes[kept])
    assert torch.equal(mixed.routes_NLK[::2, 0], out.routes_NLK[::2, 0]), "first layer sees the same input, so chooses the same"
    _, none = packed(model, seqs, torch.full_like(routes, ABSENT_ROUTE))
    assert torch.equal(none.routes_NLK, out.routes_NLK)


def test_router_gets_its_gradient_under_replay(moe_config, make_model):
    model, twin = make_model(moe_config), make_model(moe_config)
    ids = tokens(30)[0]
    routes = (packed(model, [ids])[1].routes_NLK + 1) % moe_config.experts
    packed(model, [ids], routes)[0][0].logsumexp(-1).sum().backward()
    reference_logits(twin, ids, routes).logsumexp(-1).sum().backward()
    for layer in (0, 1):
        grad = model.layers[layer].mlp.gate.weight.grad
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(grad, twin.layers[layer].mlp.gate.weight.grad, rtol=1e-3, atol=1e-5)


def test_router_ties_go_to_the_lower_expert(moe_config, make_model):
    model = make_model(moe_config)
    with torch.no_grad():
        model.layers[0].mlp.gate.weight.zero_()
    assert packed(model, tokens(9))[1].routes_NLK[:, 0].tolist() == [[0, 1]] * 9


@pytest.mark.parametrize(
    "routes, match",
    [
        (torch.zeros(4, 2, 3, dtype=torch.uint8), r"shape \(4, 2, 3\)"),
        (torch.full((4, 2, 2), 4, dtype=torch.uint8), "expert 4"),
    ],
)
def test_routes_of_another_model_are_refused(moe_config, make_model, routes, match):
    with pytest.raises(UserError, match=match):
        packed(make_model(moe_config), tokens(4), routes)


def test_many_experts_record_16_bit_routes():
    config = ModelConfig(
        vocab_size=96, hidden=64, layers=1, heads=2, kv_heads=2, head_dim=32, experts=300, experts_per_token=3, expert_intermediate=32,
        shared_intermediate=32, family="qwen2_moe",
    )  # fmt: skip
    from etude.model.weights import from_config

    model = from_config(config)
    ids = tokens(40)[0]
    logits, out = packed(model, [ids])
    assert out.routes_NLK.dtype == torch.uint16
    assert config.absent_route == 65535
    torch.testing.assert_close(logits[0], reference_logits(model, ids), **CLOSE)
    assert torch.equal(packed(model, [ids], out.routes_NLK)[0][0], logits[0])


def test_balance_and_load():
    """Closed forms: uniform probabilities give 1 whatever the load; all on one expert with certainty gives E."""
    even, load = balance(torch.full((1, 8, 4), 0.25), torch.arange(8).view(1, 8, 1) % 4)
    assert even == 1
    assert load.tolist() == [[2, 2, 2, 2]]
    sure = torch.zeros(1, 8, 4)
    sure[..., 2] = 1
    assert balance(sure, torch.full((1, 8, 1), 2))[0] == 4


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_output_balance_counts_real_tokens_only(moe_config, make_model, numerics):
    model = make_model(moe_config, numerics)
    _, out = packed(model, tokens(5, 14))
    assert out.load_LE.sum(1).tolist() == [19 * 2] * 2
    for layer in (0, 1):
        assert out.load_LE[layer].tolist() == torch.bincount(out.routes_NLK[:, layer].flatten().long(), minlength=4).tolist()
    out.balance.backward()
    assert model.layers[1].mlp.gate.weight.grad.abs().max() > 0


# ---------------------------------------------------------------------------------------------------
# Shapes, plans, config


def test_packed_plan():
    plan = Plan.packed([20, 3, 16])
    assert plan.tables_SB.tolist() == [[0, 1], [2, 0], [3, 0]]
    assert plan.slots_N.tolist() == [*range(20), 32, 33, 34, *range(48, 64)]
    assert plan.positions_N.tolist() == [*range(20), 0, 1, 2, *range(16)]
    assert plan.starts_S1 == [0, 20, 23, 39]
    assert blocks_for([20, 3, 16]) == 4


def test_context_beyond_the_model_is_refused(dense_config, make_model):
    model = make_model(dense_config)
    n = dense_config.max_positions + 1
    with pytest.raises(UserError, match=f"context of {n} tokens exceeds max_positions = 4096"):
        model(torch.zeros(n, dtype=torch.int64), Plan.packed([n]), PagedCache(dense_config, blocks_for([n]), functional=True))


def test_same_seed_same_weights(config, make_model):
    a, b, c = (make_model(config, seed=seed).state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed_tokens.weight"], c["embed_tokens.weight"])


@pytest.mark.parametrize(
    "change, match",
    [
        ({"heads": 5}, "not a multiple of model.kv_heads"),
        ({"head_dim": 7}, "must be even"),
        ({"layers": 0}, "model.layers is 0"),
        ({"experts_per_token": 9}, "exceeds model.experts"),
        ({"shared_intermediate": 0}, "model.shared_intermediate"),
        ({"family": "llama"}, "is dense"),
    ],
)
def test_impossible_shapes_are_refused(moe_config, change, match):
    fields = {name: getattr(moe_config, name) for name in moe_config.__slots__}
    with pytest.raises(ConfigError, match=match):
        ModelConfig(**{**fields, **change})
