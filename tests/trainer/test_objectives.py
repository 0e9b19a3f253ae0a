"""Off-policy corrections against independent formulas and finite differences, and k1 as a reward (facts M5, M6, M8).

Every surrogate is written a second time in numpy, with what carries a stop-gradient as an argument of its own that is held fixed.
Central differences in float64 with a step of 1e-6 are good to about 1e-9; 1e-7 is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.trainer.config import AlarmConfig, Correction, RLConfig
from etude.trainer.objectives import OBJECTIVES, TokenInputs, k1_reward, objective


def inputs(logp, old, advantage, sample=None, mask=None):
    logp_M = torch.tensor(np.asarray(logp), dtype=torch.float64, requires_grad=True)
    return TokenInputs(
        logp_M=logp_M,
        old_M=torch.tensor(np.asarray(old), dtype=torch.float64),
        advantage_M=torch.tensor(np.asarray(advantage), dtype=torch.float64),
        sample_M=torch.tensor(np.zeros(len(logp), dtype=np.int64) if sample is None else np.asarray(sample)),
        mask_M=torch.tensor(np.ones(len(logp), dtype=bool) if mask is None else np.asarray(mask)),
    )


def corrected(name, tokens, **options):
    return objective(name)(tokens, RLConfig(objective=name, **options))


def gradient(name, tokens, **options):
    corrected(name, tokens, **options).loss_M.sum().backward()
    return tokens.logp_M.grad.tolist()


def test_truncated_weight_is_capped_and_has_no_gradient():
    """d/dlogp of -w A logp is -w A only if w is constant; a weight with gradient would add -w A logp."""
    tokens = inputs([-1.0, -1.0, -1.0], [-1.0, -1.5, -4.0], [2.0, 2.0, -1.0])
    got = gradient("truncated", tokens)
    assert got == pytest.approx([-2.0, -2.0 * np.exp(0.5), 2.0])
    assert corrected("truncated", tokens).cut_M.tolist() == [False, False, True]


def test_none_ignores_the_engine():
    assert gradient("none", inputs([-1.0, -2.0], [-9.0, 0.0], [0.5, -0.5])) == [-0.5, 0.5]


def test_ppo_clip_stops_the_gradient_where_the_ratio_left_the_range_in_the_rewarded_direction():
    tokens = inputs([0.5, 0.5, -0.5, -0.5, 0.0], [0.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    up, down = np.exp(0.5), np.exp(-0.5)
    assert gradient("ppo_clip", tokens) == pytest.approx([0.0, up, -down, 0.0, -1.0])
    assert corrected("ppo_clip", tokens).cut_M.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_all_objectives_have_the_policy_gradient(name):
    """Exactly: at ratio 1 every weight is 1.0, so the gradient is -A to the last bit."""
    advantage = [0.75, -0.25, 0.0, 1 / 3]
    tokens = inputs([-1.0, -2.0, -0.1, -7.0], [-1.0, -2.0, -0.1, -7.0], advantage, [0, 0, 1, 1])
    out = corrected(name, tokens)
    assert out.weight_M.tolist() == [1.0] * 4
    assert not out.cut_M.any()
    assert gradient(name, tokens) == [-a for a in advantage]


def test_the_config_knows_every_correction():
    assert set(get_args(Correction)) == set(OBJECTIVES)
    assert RLConfig().objective == "truncated"


def test_the_page_about_corrections_names_every_one_with_the_defaults_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text()
    rows = {line.split("|")[1].strip().split(" (")[0] for line in text.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in OBJECTIVES} <= rows
    for field, value in re.findall(r"`((?:cap|mask|clip|gspo|cispo)\w*)` \(([\d.e-]+)\)", text):
        assert float(value) == getattr(RLConfig(), field), field
    for field in dataclasses.fields(AlarmConfig):
        assert f"`{field.name}`" in text


# ---------------------------------------------------------------------------------------------------
# Finite differences


def over_sequences(values, tokens, mean):
    """Sum or mean of `values` over the masked tokens of each token's sequence."""
    sample, mask = tokens.sample_M.numpy(), tokens.mask_M.numpy()
    reduce = np.mean if mean else np.sum
    return np.array([reduce(values[(sample == s) & mask]) if ((sample == s) & mask).any() else 0.0 for s in sample])


def pessimistic(ratio, a, low, high):
    return -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)


def in_range(ratio, config):
    return np.where((ratio >= config.mask_low) & (ratio <= config.mask_high), ratio, 0.0)


def surrogate(name, x, held, tokens, config):
    """The loss of each token as a function of the log-probs `x`; `held` are the log-probs inside stop-gradients."""
    old, a = tokens.old_M.numpy(), tokens.advantage_M.numpy()
    r, sg_r = np.exp(x - old), np.exp(held - old)
    match name:
        case "none":
            return -a * x
        case "truncated":
            return -np.minimum(sg_r, config.cap) * a * x
        case "cispo":
            return -np.clip(sg_r, 1 - config.cispo_low, 1 + config.cispo_high) * a * x
        case "masked_token":
            return -in_range(sg_r, config) * a * x
        case "masked_sequence":
            return -in_range(np.exp(over_sequences(held - old, tokens, mean=False)), config) * a * x
        case "masked_geometric":
            return -in_range(np.exp(over_sequences(held - old, tokens, mean=True)), config) * a * x
        case "ppo_clip" | "clip_higher":
            return pessimistic(r, a, config.clip_low, config.clip_high)
        case "gspo":
            s = np.exp(over_sequences(held - old, tokens, mean=True)) * np.exp(x - held)
            return pessimistic(s, a, config.gspo_low, config.gspo_high)
    raise AssertionError(f"{name} has no formula here")


def differences(function, x, step=1e-6):
    """Central differences of a scalar function."""
    out = np.zeros_like(x)
    for i in range(len(x)):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


def off_policy(spread, seed=0):
    """60 tokens in 12 sequences, some not sampled, ratios around 1 with the given spread on both sides of every bound."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, 60) - 0.05
    sample = np.repeat(np.arange(12), 5)
    shared = np.repeat(rng.normal(0, spread, 12), 5)
    mask = rng.random(60) > 0.2
    advantage = np.where(mask, rng.normal(0, 1, 60), 0.0)
    return inputs(logp, logp - shared - rng.normal(0, spread, 60), advantage, sample, mask)


WIDE = {"gspo_low": 0.1, "gspo_high": 0.2, "cispo_low": 0.4, "cispo_high": 0.5}


@pytest.mark.parametrize("options", [{}, WIDE], ids=["defaults", "wide"])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 1.5])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_surrogate(name, spread, options):
    """Values, gradients by finite differences, and the weight each correction says it gave."""
    config = RLConfig(objective=name, **options)
    tokens = off_policy(spread)
    held = tokens.logp_M.detach().numpy().copy()
    out = corrected(name, tokens, **options)
    np.testing.assert_allclose(out.loss_M.detach().numpy(), surrogate(name, held, held, tokens, config), rtol=1e-12, atol=1e-12)
    got = np.array(gradient(name, tokens, **options))
    expected = differences(lambda x: surrogate(name, x, held, tokens, config).sum(), held)
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-7 * max(1.0, np.abs(expected).max()))
    np.testing.assert_allclose(-out.weight_M.numpy() * tokens.advantage_M.numpy(), got, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "none"])
def test_bounds_are_met_in_these_examples(name):
    """Otherwise the test above would have compared only what no bound touched."""
    out = corrected(name, off_policy(1.5), **WIDE)
    assert 0.05 < float(out.cut_M.double().mean()) < 0.95


@pytest.mark.parametrize("low_high", [(3e-4, 4e-4), (0.1, 0.2)])
def test_gspo_is_the_gradient_of_the_sequence_objective(low_high):
    """With one advantage a sequence, the per-token form has the gradient of |y| min(s A, clip(s) A), nothing held fixed."""
    low, high = low_high
    spread = off_policy(0.3)
    a = np.repeat(np.random.default_rng(1).normal(0, 1, 12), 5)
    tokens = inputs(spread.logp_M.detach().numpy(), spread.old_M.numpy(), a, spread.sample_M.numpy())
    old = tokens.old_M.numpy()

    def objective_of_sequences(x):
        s = np.exp(over_sequences(x - old, tokens, mean=True))
        return pessimistic(s, a, low, high).sum()

    got = gradient("gspo", tokens, gspo_low=low, gspo_high=high)
    expected = differences(objective_of_sequences, tokens.logp_M.detach().numpy().copy())
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-7)
    cut = corrected("gspo", tokens, gspo_low=low, gspo_high=high).cut_M.reshape(12, 5)
    assert (cut.all(1) == cut.any(1)).all(), "tokens of a sequence are clipped together"


def test_masks_by_hand():
    """Two sequences: ratios (4, 1/4), product 1 and mean 1; ratios (1.5, 1.5), product 2.25 and geometric mean 1.5."""
    log_ratio = np.log([4.0, 0.25, 1.5, 1.5])
    tokens = inputs(log_ratio - 5, [-5.0] * 4, [1.0] * 4, [0, 0, 1, 1])
    assert corrected("masked_token", tokens).weight_M.tolist() == pytest.approx([0, 0, 1.5, 1.5])
    assert corrected("masked_sequence", tokens).weight_M.tolist() == pytest.approx([1, 1, 0, 0])
    assert corrected("masked_geometric", tokens).weight_M.tolist() == pytest.approx([1, 1, 1.5, 1.5])


def test_tokens_the_engine_did_not_sample_stay_out_of_a_sequences_ratio():
    tokens = inputs([-1.0, -1.0, -9.0], [-1.5, -1.5, 0.0], [1.0, 1.0, 0.0], mask=[True, True, False])
    assert corrected("masked_geometric", tokens).weight_M.tolist()[:2] == pytest.approx([np.exp(0.5)] * 2)
    assert corrected("masked_sequence", tokens, mask_high=3.0).weight_M.tolist()[:2] == pytest.approx([np.e] * 2)


def test_cispo_without_a_lower_bound_is_the_truncated_weight():
    for spread in (0.3, 1.5):
        tokens = off_policy(spread)
        ours, other = corrected("cispo", tokens, cispo_high=1.5), corrected("truncated", tokens, cap=2.5)
        assert torch.equal(ours.loss_M, other.loss_M)


def test_clip_higher_lets_a_rewarded_token_grow_further_than_ppo_does():
    tokens = inputs([np.log(1.25)], [0.0], [1.0])
    assert gradient("clip_higher", tokens) == pytest.approx([-1.25])
    assert gradient("ppo_clip", inputs([np.log(1.25)], [0.0], [1.0]), clip_high=0.2) == [0.0]
    with pytest.raises(ConfigError, match="clip_higher needs clip_high > clip_low"):
        RLConfig(objective="clip_higher", clip_high=0.2)


def test_an_impossible_token_cannot_make_a_bounded_weight_infinite():
    for name in ("truncated", "cispo", "masked_token", "masked_sequence", "masked_geometric"):
        out = corrected(name, inputs([-1.0, -1.0], [-2000.0, -1.0], [1.0, -1.0]))
        assert torch.isfinite(out.loss_M).all()
        assert float(out.weight_M.max()) <= 2.0


@pytest.mark.parametrize("bad", [{"mask_low": 1.5}, {"mask_high": 0.9}, {"gspo_low": 0.0}, {"gspo_high": 0.0}, {"cispo_low": 1.5}])
def test_bounds_that_make_no_sense_are_refused(bad):
    with pytest.raises(ConfigError, match="needed"):
        RLConfig(**bad)


def test_an_unknown_objective_names_the_nearest():
    with pytest.raises(ConfigError, match="truncated"):
        objective("truncatd")


# ---------------------------------------------------------------------------------------------------
# k1 as a reward


def on_policy(logp_M, advantage_M, sample_M, config):
    """The default objective's loss of tokens sampled by the policy itself."""
    mask_M = torch.ones_like(sample_M, dtype=torch.bool)
    tokens = TokenInputs(logp_M=logp_M, old_M=logp_M.detach(), advantage_M=advantage_M, sample_M=sample_M, mask_M=mask_M)
    return objective("truncated")(tokens, config).loss_M


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
            loss = on_policy(logp, reward, torch.zeros(1, dtype=torch.int64), config)
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
            (g,) = torch.autograd.grad(on_policy(logp_M, reward, sample_M, config).sum(), theta)
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
