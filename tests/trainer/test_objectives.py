"""Per-token objectives: the truncated weight has no gradient, PPO's clip, and k1 as a reward (facts M5, M6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.trainer.config import RLConfig
from etude.trainer.objectives import OBJECTIVES, TokenInputs, clipped, k1_reward, objective


def inputs(logp, old, advantage):
    logp_M = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(len(logp), dtype=torch.int64)
    return TokenInputs(logp_M=logp_M, old_M=torch.tensor(old).double(), advantage_M=torch.tensor(advantage).double(), sample_M=zeros)


def gradient(name, tokens, **options):
    objective(name)(tokens, RLConfig(objective=name, **options)).sum().backward()
    return tokens.logp_M.grad.tolist()


def test_truncated_weight_is_capped_and_has_no_gradient():
    """d/dlogp of -w A logp is -w A only if w is constant; a weight with gradient would add -w A logp."""
    tokens = inputs([-1.0, -1.0, -1.0], [-1.0, -1.5, -4.0], [2.0, 2.0, -1.0])
    got = gradient("truncated", tokens)
    assert got == pytest.approx([-2.0, -2.0 * np.exp(0.5), 2.0])
    assert clipped(RLConfig(), torch.tensor([1.0, np.exp(0.5), np.exp(3.0)]), tokens.advantage_M).tolist() == [False, False, True]


def test_none_ignores_the_engine():
    assert gradient("none", inputs([-1.0, -2.0], [-9.0, 0.0], [0.5, -0.5])) == [-0.5, 0.5]


def test_ppo_clip_stops_the_gradient_where_the_ratio_left_the_range_in_the_rewarded_direction():
    tokens = inputs([0.5, 0.5, -0.5, -0.5, 0.0], [0.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    up, down = np.exp(0.5), np.exp(-0.5)
    assert gradient("ppo_clip", tokens) == pytest.approx([0.0, up, -down, 0.0, -1.0])
    ratio_M = (tokens.logp_M - tokens.old_M).exp().detach()
    config = RLConfig(objective="ppo_clip")
    assert clipped(config, ratio_M, tokens.advantage_M).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_all_objectives_have_the_policy_gradient(name):
    tokens = inputs([-1.0, -2.0], [-1.0, -2.0], [0.75, -0.25])
    assert gradient(name, tokens) == pytest.approx([-0.75, 0.25])


def test_an_unknown_objective_names_the_nearest():
    with pytest.raises(ConfigError, match="truncated"):
        objective("truncatd")


# ---------------------------------------------------------------------------------------------------
# k1 as a reward


def expected_gradient(theta, ref, config, *, in_loss=False):
    """Exact expectation over a ~ softmax(theta) of the gradient that one sampled token contributes."""
    probs = torch.softmax(theta.detach(), -1)
    total = torch.zeros_like(theta)
    for a, p in enumerate(probs):
        logp = torch.log_softmax(theta, -1)[a : a + 1]
        if in_loss:
            loss = logp - ref[a]
        else:
            reward = k1_reward(logp, ref[a : a + 1], torch.zeros(1, dtype=torch.int64), config)
            tokens = TokenInputs(logp_M=logp, old_M=logp.detach(), advantage_M=reward, sample_M=torch.zeros(1, dtype=torch.int64))
            loss = objective("truncated")(tokens, config)
        (g,) = torch.autograd.grad(loss.sum(), theta)
        total += p * g
    return total


def categorical():
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    return theta, ref


def test_k1_as_reward_gives_the_gradient_of_the_reverse_kl():
    theta, ref = categorical()
    logp = torch.log_softmax(theta, -1)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta)
    got = expected_gradient(theta, ref, RLConfig(kl=1.0))
    torch.testing.assert_close(got, reverse)
    assert float(got.norm()) > 0.1, "the zero-gradient trap is not hit"


def test_k1_in_the_loss_would_have_a_zero_gradient():
    """The trap itself: what differentiating the sampled k1 would give."""
    theta, ref = categorical()
    assert float(expected_gradient(theta, ref, RLConfig(kl=1.0), in_loss=True).abs().max()) < 1e-12


@pytest.mark.parametrize("credit", ["token", "to_go"])
def test_kl_over_two_steps(credit):
    """Two tokens, the second's distribution depending on the first. `to_go` is the gradient of the whole sequence's KL; `token`
    leaves out what the first token does to the second's KL."""
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(4, 3, generator=generator, dtype=torch.float64), -1)
    config = RLConfig(kl=1.0, kl_credit=credit)
    logp = torch.log_softmax(theta, -1)
    kl_row = (logp.exp() * (logp - ref)).sum(-1)
    first = logp[0].exp()
    if credit == "token":
        first = first.detach()
    (expected,) = torch.autograd.grad(kl_row[0] + (first * kl_row[1:]).sum(), theta)
    got = torch.zeros_like(theta)
    for a in range(3):
        for b in range(3):
            rows = torch.log_softmax(theta, -1)
            logp_M = torch.stack([rows[0, a], rows[1 + a, b]])
            sample_M = torch.zeros(2, dtype=torch.int64)
            reward = k1_reward(logp_M, torch.stack([ref[0, a], ref[1 + a, b]]), sample_M, config)
            tokens = TokenInputs(logp_M=logp_M, old_M=logp_M.detach(), advantage_M=reward, sample_M=sample_M)
            (g,) = torch.autograd.grad(objective("truncated")(tokens, config).sum(), theta)
            got += float(logp_M.detach().sum().exp()) * g
    torch.testing.assert_close(got, expected)


def test_sums_to_go_stay_within_a_sample():
    logp_M, sample_M = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 1, 2, 2])
    config = RLConfig(kl=1.0, kl_credit="to_go")
    assert k1_reward(logp_M, torch.zeros(4), sample_M, config).tolist() == [-3.0, -2.0, -7.0, -4.0]


def test_k1_reward_has_no_gradient():
    logp_M = torch.zeros(2, requires_grad=True)
    assert not k1_reward(logp_M, torch.ones(2), torch.zeros(2, dtype=torch.int64), RLConfig()).requires_grad


# ---------------------------------------------------------------------------------------------------
# Closed forms of the estimators (facts M6), for unit Gaussians with mean gap m


@pytest.mark.parametrize("kl", [0.05, 0.25, 0.5, 0.628, 1.0])
def test_closed_form_table_by_monte_carlo(kl):
    """x ~ q = N(0, 1), p = N(m, 1), KL = m^2 / 2. k1 is computed by the code under test; 2 % of 4M samples (k3 has heavy tails)."""
    m = np.sqrt(2 * kl)
    x = np.random.default_rng(int(kl * 1000)).standard_normal(4_000_000)
    log_r = m * x - m * m / 2
    zeros = torch.zeros(1, dtype=torch.int64)
    k1 = -k1_reward(torch.from_numpy(-log_r), torch.zeros(1).double(), zeros, RLConfig(kl=1.0)).numpy()
    k3 = np.exp(log_r) - 1 - log_r
    assert k1.mean() == pytest.approx(kl, rel=0.02)
    assert k1.var() == pytest.approx(m * m, rel=0.02)
    assert k3.mean() == pytest.approx(kl, rel=0.02)
    assert k3.var() == pytest.approx(np.exp(m * m) - 1 - m * m, rel=0.02 if kl < 0.6 else 0.1)
    assert (log_r**2 / 2).mean() == pytest.approx(kl + m**4 / 8, rel=0.02)


def test_k3_has_less_variance_than_k1_only_below_the_crossover():
    def variances(kl):
        m2 = 2 * kl
        return m2, np.exp(m2) - 1 - m2

    assert variances(0.627)[1] < variances(0.627)[0]
    assert variances(0.629)[1] > variances(0.629)[0]
