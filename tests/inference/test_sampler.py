import math

import numpy as np
import pytest
import torch

from etude.errors import EngineError, UserError
from etude.inference.request import check_sampling
from etude.inference.sampler import Params, logprobs, sample, uniform
from etude.records import Sampling


def params(*samplings):
    out = Params.empty(len(samplings))
    for row, sampling in enumerate(samplings):
        out.set(row, sampling)
    return out


def draws(logits_V, n, **sampling):
    """n tokens of one distribution: rows differ in position only."""
    logits_RV = torch.tensor([logits_V]).float().repeat(n, 1)
    return sample(logits_RV, params(*[Sampling(seed=11, **sampling)] * n), np.arange(n))


def chi_square(ids, probabilities):
    n = len(ids)
    counts = np.bincount(ids, minlength=len(probabilities))
    live = probabilities > 0
    assert counts[~live].sum() == 0
    expected = probabilities[live] * n
    return float(((counts[live] - expected) ** 2 / expected).sum()), int(live.sum()) - 1


def softmax(x, temperature=1.0):
    e = np.exp((np.array(x) - max(x)) / temperature)
    return e / e.sum()


LOGITS = [0.3, -1.0, 2.0, 1.9, -3.0, 0.0, 1.0, 0.5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature):
    result = draws(LOGITS, 40_000, temperature=temperature)
    statistic, dof = chi_square(result.ids_R.numpy(), softmax(LOGITS, temperature))
    assert statistic < dof + 4 * math.sqrt(2 * dof)


def test_top_k_and_top_p_draw_from_the_cut_distribution_renormalised():
    p = softmax(LOGITS, 0.8)
    order = np.argsort(-p, kind="stable")
    top_k = np.zeros_like(p)
    top_k[order[:5]] = p[order[:5]]
    top_k /= top_k.sum()
    keep = np.cumsum(top_k[order]) - top_k[order] < 0.7
    both = np.zeros_like(p)
    both[order[keep]] = top_k[order[keep]]
    both /= both.sum()
    for cut, sampling in ((top_k, {"top_k": 5}), (both, {"top_k": 5, "top_p": 0.7})):
        result = draws(LOGITS, 20_000, temperature=0.8, **sampling)
        statistic, dof = chi_square(result.ids_R.numpy(), cut)
        assert statistic < dof + 4 * math.sqrt(2 * dof)
        np.testing.assert_allclose(result.logprob_R.numpy(), np.log(cut[result.ids_R.numpy()]), rtol=1e-6, atol=1e-6)


def test_tiny_top_p_and_top_k_one_are_the_likeliest_token():
    for sampling in ({"top_p": 1e-9}, {"top_k": 1}, {"top_k": 1, "top_p": 0.5}):
        result = draws(LOGITS, 50, **sampling)
        assert set(result.ids_R.tolist()) == {2}
        assert set(result.logprob_R.tolist()) == {0.0}


def test_ties_at_the_cut_go_to_the_smaller_id():
    assert set(draws([1.0, 1.0, 1.0, 1.0], 200, top_k=2).ids_R.tolist()) == {0, 1}
    assert set(draws([0.0, 1.0, 1.0], 50, temperature=0.0).ids_R.tolist()) == {1}


def test_greedy_reports_the_one_point_distribution_and_the_full_one():
    result = draws(LOGITS, 3, temperature=0.0)
    assert result.ids_R.tolist() == [2, 2, 2]
    assert result.logprob_R.tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(result.logprob_t1_R.numpy(), math.log(softmax(LOGITS)[2]), rtol=1e-6)


def test_logprobs_agree_with_float64_softmax():
    rng = np.random.default_rng(0)
    logits_RV = torch.from_numpy(rng.normal(size=(40, 777)) * 5).float()
    result = sample(logits_RV, params(*[Sampling(temperature=0.7, seed=i) for i in range(40)]), np.full(40, 9))
    ids = result.ids_R[:, None]
    want = torch.log_softmax(logits_RV.double() / 0.7, 1).gather(1, ids)[:, 0]
    want_t1 = torch.log_softmax(logits_RV.double(), 1).gather(1, ids)[:, 0]
    torch.testing.assert_close(result.logprob_R, want.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.logprob_t1_R, want_t1.float(), rtol=1e-6, atol=1e-6)


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.5},
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [13, 777, 20_011])
def test_a_row_does_not_depend_on_the_other_rows(vocab, threads):
    torch.set_num_threads(threads)
    rng = np.random.default_rng(vocab)
    rows = 33
    logits_RV = torch.from_numpy(rng.normal(size=(rows, vocab)) * 4).float()
    samplings = [Sampling(seed=int(rng.integers(2**62)), **SETTINGS[i % len(SETTINGS)]) for i in range(rows)]
    positions = rng.integers(0, 5000, rows)
    whole = sample(logits_RV, params(*samplings), positions)
    for keep in ([5], [0, 6, 12], list(range(rows - 1, -1, -1)), [*range(7, 20)]):
        part = sample(logits_RV[keep].clone(), params(*[samplings[i] for i in keep]), positions[keep])
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[keep])


def test_scoring_gives_the_bits_that_sampling_reported():
    rng = np.random.default_rng(5)
    logits_RV = torch.from_numpy(rng.normal(size=(24, 801)) * 4).float()
    for temperature in (1.0, 0.6):
        result = sample(logits_RV, params(*[Sampling(seed=i, temperature=temperature) for i in range(24)]), np.arange(24))
        assert torch.equal(logprobs(logits_RV, result.ids_R, temperature), result.logprob_R)
        assert torch.equal(logprobs(logits_RV[:5], result.ids_R[:5]), result.logprob_t1_R[:5])


def test_noise_is_uniform_and_differs_by_seed_and_position():
    n = 100_000
    by_position = uniform(np.full(n, 3, np.uint64), np.arange(n))
    by_seed = uniform(np.arange(n, dtype=np.uint64), np.full(n, 3))
    for u in (by_position, by_seed):
        assert 0 <= u.min() < u.max() < 1
        counts = np.bincount((u * 100).astype(int), minlength=100)
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 4 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(n)
        assert len(np.unique(u)) == n
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 4 / math.sqrt(n)


def test_noise_is_the_published_splitmix64():
    # SplitMix64 from state 0 yields 0xE220A8397B1DCDAF first; the second call hashes that with position 0.
    assert uniform(np.zeros(1, np.uint64), np.zeros(1, np.int64))[0] == (_mix(_mix(0)) >> 11) * 2.0**-53
    assert _mix(0) == 0xE220A8397B1DCDAF


def _mix(x):
    mask = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_a_token_of_probability_zero_is_never_drawn():
    result = draws([float("-inf"), 0.0, -1000.0, 0.0, float("-inf")], 5000)
    assert set(result.ids_R.tolist()) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", SETTINGS)
def test_broken_logits_are_an_error_not_a_token(bad, settings):
    with pytest.raises(EngineError, match="not finite"):
        draws([0.0, bad, 1.0], 2, **settings)


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}]
)
def test_parameters_that_define_nothing_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        check_sampling(Sampling(**settings), 50)
