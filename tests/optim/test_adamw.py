"""AdamW against torch's own and against the float64 twin; its state survives a round trip bit for bit."""

from __future__ import annotations

import pytest
import torch

from etude.errors import CheckpointError
from etude.optim import reference
from etude.optim.adamw import AdamW

SHAPES = {"w": (5, 7), "stack": (2, 3, 4), "bias": (6,)}


def parameters(rng):
    return {n: torch.randn(s, generator=rng).requires_grad_() for n, s in SHAPES.items()}


def gradients(params, rng):
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=rng)


def test_equals_torch_over_twenty_steps(rng):
    params = parameters(rng)
    theirs = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    ours = AdamW(params, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    groups = [{"params": [theirs["w"], theirs["stack"]], "weight_decay": 0.1}, {"params": [theirs["bias"]], "weight_decay": 0.0}]
    torch_adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for _ in range(20):
        gradients(params, rng)
        for n, p in theirs.items():
            p.grad = params[n].grad.clone()
        ours.step(1e-2)
        torch_adamw.step()
    for n in params:  # a few float32 roundings over 20 steps
        torch.testing.assert_close(params[n], theirs[n], rtol=2e-6, atol=2e-7)


def test_equals_the_float64_twin(rng):
    params = parameters(rng)
    ours = AdamW(params, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    p, m, v = params["w"].detach().double(), torch.zeros(5, 7).double(), torch.zeros(5, 7).double()
    for t in range(1, 11):
        gradients(params, rng)
        p, m, v = reference.adamw(p, params["w"].grad, m, v, t=t, lr=1e-2, b1=0.9, b2=0.95, eps=1e-8, decay=0.1)
        ours.step(1e-2)
    torch.testing.assert_close(params["w"].detach().double(), p, rtol=1e-5, atol=1e-6)


def test_a_missing_gradient_counts_as_zero_and_is_decayed(rng):
    params = parameters(rng)
    before = params["w"].detach().clone()
    ours = AdamW(params, weight_decay=0.5)
    ours.step(0.1)
    torch.testing.assert_close(params["w"].detach(), before * 0.95)
    assert ours.steps == 1


def test_state_round_trip_continues_bit_for_bit(rng):
    params = parameters(rng)
    ours = AdamW(params)
    for _ in range(3):
        gradients(params, rng)
        ours.step(1e-2)
    copies = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    again = AdamW(copies)
    again.load_state_dict({k: t.clone() for k, t in ours.state_dict().items()})
    gradients(params, rng)
    for n, p in copies.items():
        p.grad = params[n].grad.clone()
    ours.step(1e-2)
    again.step(1e-2)
    assert all(torch.equal(params[n], copies[n]) for n in params)


def test_state_of_another_model_is_refused(rng):
    ours = AdamW(parameters(rng))
    state = ours.state_dict()
    del state["adamw.mean.w"]
    with pytest.raises(CheckpointError, match=r"adamw\.mean\.w"):
        ours.load_state_dict(state)
