"""Muon: singular values, granularity, equality with the float64 twin, and what stays on AdamW."""

from __future__ import annotations

import pytest
import torch

from etude.optim import reference
from etude.optim.muon import Muon, matrices, newton_schulz, update_scale, views

COUNTS = {"heads": 4, "kv_heads": 2}
SHAPES = {
    "layers.0.self_attn.q_proj.weight": (32, 24),
    "layers.0.self_attn.k_proj.weight": (16, 24),
    "layers.0.self_attn.v_proj.weight": (16, 24),
    "layers.0.self_attn.o_proj.weight": (24, 32),
    "layers.1.self_attn.q_b_proj.weight": (32, 12),
    "layers.1.self_attn.kv_b_proj.weight": (48, 12),
    "layers.1.self_attn.kv_a_proj_with_mqa.weight": (20, 24),
    "layers.0.mlp.experts.gate_proj": (3, 20, 24),
    "layers.0.mlp.experts.down_proj": (3, 24, 20),
    "layers.0.mlp.gate.weight": (3, 24),
    "layers.0.mlp.shared_expert.up_proj.weight": (20, 24),
}
MATRIX_COUNT = {
    "layers.0.self_attn.q_proj.weight": 4,
    "layers.0.self_attn.k_proj.weight": 2,
    "layers.0.self_attn.v_proj.weight": 2,
    "layers.0.self_attn.o_proj.weight": 4,
    "layers.1.self_attn.q_b_proj.weight": 4,
    "layers.1.self_attn.kv_b_proj.weight": 4,
    "layers.1.self_attn.kv_a_proj_with_mqa.weight": 1,
    "layers.0.mlp.experts.gate_proj": 3,
    "layers.0.mlp.experts.down_proj": 3,
    "layers.0.mlp.gate.weight": 1,
    "layers.0.mlp.shared_expert.up_proj.weight": 1,
}


def parameters(rng):
    return {n: (0.05 * torch.randn(s, generator=rng)).requires_grad_() for n, s in SHAPES.items()}


def gradients(params, rng):
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=rng)


def test_granularity_is_per_head_and_per_expert(rng):
    for name, param in parameters(rng).items():
        assert views(name, param, COUNTS).shape[0] == MATRIX_COUNT[name], name


def test_views_of_the_output_projection_hold_one_head_each(rng):
    w = torch.arange(24 * 32.0).view(24, 32)
    heads = views("layers.0.self_attn.o_proj.weight", w, COUNTS)
    assert torch.equal(heads[1], w[:, 8:16])
    heads[1].zero_()
    assert w[:, 8:16].eq(0).all()
    assert w[:, :8].ne(0).any()


@pytest.mark.parametrize("name", SHAPES)
def test_first_update_has_singular_values_near_one_in_every_matrix(rng, name):
    params = parameters(rng)
    before = params[name].detach().clone()
    gradients(params, rng)
    Muon(params, COUNTS, weight_decay=0.0).step(1.0)
    for matrix in views(name, before - params[name].detach(), COUNTS):
        s = torch.linalg.svdvals(matrix) / update_scale(*matrix.shape)
        assert 0.6 < float(s.min()) <= float(s.max()) < 1.25, s


def test_per_head_differs_from_the_fused_matrix(rng):
    """If the granularity were fused, one wide Newton-Schulz over all heads would give the same update; it does not."""
    name = "layers.0.self_attn.q_proj.weight"
    params = parameters(rng)
    before = params[name].detach().clone()
    gradients(params, rng)
    direction = params[name].grad * 1.95
    Muon(params, COUNTS, weight_decay=0.0).step(1.0)
    update = before - params[name].detach()
    fused = update_scale(32, 24) * newton_schulz(direction.unsqueeze(0))[0]
    assert float((update - fused).norm() / fused.norm()) > 0.1
    by_hand = torch.cat([update_scale(8, 24) * newton_schulz(h.unsqueeze(0))[0] for h in direction.split(8)])
    torch.testing.assert_close(update, by_hand, rtol=1e-4, atol=1e-5)


def test_equals_the_float64_twin_over_steps(rng):
    """Tolerance: the iteration's slope at small singular values multiplies float32 rounding by up to 3.44^5 = 480."""
    params = parameters(rng)
    muon = Muon(params, COUNTS, momentum=0.95, weight_decay=0.1)
    slow = {n: [(m.double().clone(), torch.zeros_like(m).double()) for m in views(n, p.detach(), COUNTS)] for n, p in params.items()}
    for _ in range(4):
        gradients(params, rng)
        for n, p in params.items():
            pairs = zip(slow[n], views(n, p.grad, COUNTS), strict=True)
            slow[n] = [reference.muon(w, g, m, lr=0.02, momentum=0.95, decay=0.1) for (w, m), g in pairs]
        muon.step(0.02)
    for n, p in params.items():
        for fast, (w, _) in zip(views(n, p.detach(), COUNTS), slow[n], strict=True):
            torch.testing.assert_close(fast.double(), w, rtol=1e-3, atol=1e-5)


def test_zero_gradient_moves_nothing(rng):
    params = parameters(rng)
    before = {n: p.detach().clone() for n, p in params.items()}
    for p in params.values():
        p.grad = torch.zeros_like(p)
    Muon(params, COUNTS, weight_decay=0.0).step(1.0)
    assert all(torch.equal(before[n], p) for n, p in params.items())


def test_the_update_has_the_size_of_an_adamw_update(rng):
    """Root mean square about 0.2 whatever the shape, so AdamW's learning rate carries over (arXiv 2502.16982)."""
    for rows, cols in ((16, 64), (64, 64), (64, 16)):
        x = update_scale(rows, cols) * newton_schulz(torch.randn(1, rows, cols, generator=rng))
        assert 0.12 < float(x.square().mean().sqrt()) < 0.25


def test_bfloat16_iteration_stays_close(rng):
    x = torch.randn(4, 24, 32, generator=rng)
    fast, exact = newton_schulz(x, dtype=torch.bfloat16), newton_schulz(x)
    assert fast.dtype == torch.float32
    assert float((fast - exact).norm() / exact.norm()) < 0.1


def test_embeddings_head_norms_biases_and_gates_stay_on_adamw():
    matrix, vector = torch.zeros(8, 8), torch.zeros(8)
    assert matrices("layers.0.self_attn.q_proj.weight", matrix)
    assert matrices("layers.0.mlp.experts.down_proj", torch.zeros(2, 8, 8))
    assert not matrices("embed_tokens.weight", matrix)
    assert not matrices("lm_head.weight", matrix)
    assert not matrices("norm.weight", vector)
    assert not matrices("layers.0.self_attn.q_proj.bias", vector)
    assert not matrices("layers.0.mlp.shared_expert_gate.weight", torch.zeros(1, 8))


def test_state_round_trip_continues_bit_for_bit(rng):
    params = parameters(rng)
    muon = Muon(params, COUNTS)
    gradients(params, rng)
    muon.step(0.01)
    copies = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    again = Muon(copies, COUNTS)
    again.load_state_dict({k: t.clone() for k, t in muon.state_dict().items()})
    gradients(params, rng)
    for n, p in copies.items():
        p.grad = params[n].grad.clone()
    muon.step(0.01)
    again.step(0.01)
    assert all(torch.equal(params[n], copies[n]) for n in params)
