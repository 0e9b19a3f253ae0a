"""Statistics against published values, brute force, and the coverage they promise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.evals.statistics import best_of_k, bootstrap, difference, mcnemar, mean_at_k, paired, pass_at_k, wilson


@pytest.mark.parametrize(
    "successes, n, low, high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_newcombes_table(successes, n, low, high):
    interval = wilson(successes, n)
    assert interval == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_at_the_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5).low == 0.0
    assert wilson(5, 5).high == 1.0
    assert wilson(3, 10, 0.99).low < wilson(3, 10).low
    for bad in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="impossible"):
            wilson(*bad)
    with pytest.raises(ValueError, match="between 0 and 1"):
        wilson(1, 3, 95)


def test_wilson_covers_its_level():
    """Exact coverage by enumeration, averaged over rates (single rates scatter around it)."""
    n = 40
    intervals = [wilson(k, n) for k in range(n + 1)]
    covered = []
    for p in np.linspace(0.02, 0.98, 97):
        weights = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        covered.append(sum(w for w, (low, high) in zip(weights, intervals, strict=True) if low <= p <= high))
    assert 0.945 < np.mean(covered) < 0.965
    assert min(covered) > 0.90


@given(n=st.integers(1, 9), data=st.data())
@settings(deadline=None, max_examples=60)
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    attempts = [1] * correct + [0] * (n - correct)
    subsets = list(itertools.combinations(attempts, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_limits():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 5) == 0
    assert pass_at_k(200, 1, 200) == 1
    with pytest.raises(ValueError, match="best of 4"):
        pass_at_k(3, 1, 4)


def test_best_of_k_is_unbiased():
    """The mean estimate over many runs is 1 - (1 - p)^k, from 8 attempts each."""
    rng = np.random.default_rng(0)
    p, k = 0.3, 4
    estimates = [pass_at_k(8, int(rng.binomial(8, p)), k) for _ in range(20_000)]
    assert np.mean(estimates) == pytest.approx(1 - (1 - p) ** k, abs=0.005)


def test_mean_at_k_resamples_tasks_not_attempts():
    """Attempts at one task agree: eight copies of each outcome say no more than one."""
    outcomes = [1, 0, 0, 1, 1, 0, 1, 0, 1, 1] * 4
    copies = mean_at_k([[o] * 8 for o in outcomes])
    assert (copies.low, copies.high) == wilson(sum(outcomes), len(outcomes))
    mixed = mean_at_k([[1, 0], [1, 1], [0, 0], [0, 1]] * 10)
    assert mixed.value == pytest.approx(0.5)
    assert mixed.low < 0.45
    assert mixed.n == 40
    assert best_of_k([[1, 0], [1, 1], [0, 0], [0, 1]] * 10, 2).value == pytest.approx(0.75)
    assert mean_at_k([]).n == 0
    with pytest.raises(ValueError, match="without attempts"):
        mean_at_k([[1], []])


def test_bootstrap_is_repeatable_and_covers_its_level():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(300):
        values = rng.beta(2, 3, 40)
        low, high = bootstrap(list(values), resamples=400)
        hits += low <= 0.4 <= high
    assert 0.90 < hits / 300 < 0.98
    assert bootstrap([0.1, 0.5, 0.9]) == bootstrap([0.1, 0.5, 0.9])
    assert bootstrap([0.5, 0.5]) == (0.5, 0.5)


def test_difference_agrees_with_newcombes_example():
    """56/70 against 48/80, method 10 of his second paper of 1998."""
    got = difference(48, 80, 56, 70)
    assert got.value == pytest.approx(0.2)
    assert (got.low, got.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    flipped = difference(56, 70, 48, 80)
    assert (flipped.low, flipped.high) == pytest.approx((-0.3339, -0.0524), abs=5e-5)
    assert difference(0, 0, 1, 2).n == 0


def test_paired_covers_its_level():
    """Exact coverage over every table of 14 tasks, at several correlations and effects."""
    n = 14
    tables = [(e, f, g, n - e - f - g) for e in range(n + 1) for f in range(n + 1 - e) for g in range(n + 1 - e - f)]
    intervals = []
    for e, f, g, h in tables:
        before = [1] * e + [1] * f + [0] * g + [0] * h
        after = [1] * e + [0] * f + [1] * g + [0] * h
        got = paired(before, after)
        intervals.append((got.low, got.high))
    counts = np.array(tables)
    multi = np.array([math.factorial(n) / math.prod(math.factorial(c) for c in t) for t in tables])
    covered = []
    for cells in [(0.4, 0.1, 0.1, 0.4), (0.3, 0.05, 0.3, 0.35), (0.1, 0.02, 0.5, 0.38), (0.25, 0.25, 0.25, 0.25), (0.05, 0.02, 0.13, 0.8)]:
        weights = multi * np.prod(np.array(cells) ** counts, axis=1)
        truth = cells[2] - cells[1]
        inside = np.array([low - 1e-12 <= truth <= high + 1e-12 for low, high in intervals])
        assert weights.sum() == pytest.approx(1)
        covered.append(float((weights * inside).sum()))
    assert min(covered) > 0.93
    assert np.mean(covered) < 0.985


def test_pairing_helps_when_outcomes_agree():
    before = [1] * 80 + [0] * 120
    after = [1] * 120 + [0] * 80
    got = paired(before, after)
    apart = difference(80, 200, 120, 200)
    assert got.value == pytest.approx(apart.value) == pytest.approx(0.2)
    assert got.high - got.low < apart.high - apart.low
    assert got.low > 0.1
    boot = bootstrap([b - a for a, b in zip(before, after, strict=True)])
    assert (got.low, got.high) == pytest.approx(boot, abs=0.02)


def test_paired_leaves_out_tasks_unknown_on_either_side():
    got = paired([1, None, 0, 0], [1, 1, None, 1])
    assert got.n == 2
    assert got.value == pytest.approx(0.5)
    assert paired([None], [1]).n == 0
    with pytest.raises(ValueError, match="not the same tasks"):
        paired([1], [1, 0])
    fractions = paired([0.25, 0.5, 0.0] * 20, [0.5, 0.75, 0.25] * 20)
    assert (fractions.low, fractions.high) == pytest.approx((0.25, 0.25))


@given(outcomes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
@settings(deadline=None, max_examples=200)
def test_paired_contains_its_estimate_and_is_antisymmetric(outcomes):
    before, after = [a for a, _ in outcomes], [b for _, b in outcomes]
    got, back = paired(before, after), paired(after, before)
    assert -1 <= got.low <= got.value <= got.high <= 1
    assert (back.low, back.high) == pytest.approx((-got.high, -got.low))


def test_mcnemar_is_a_fair_coin_over_the_tasks_that_changed():
    before, after = [0] * 9 + [1] + [1] * 50, [1] * 9 + [0] + [1] * 50
    coin = sum(1 for flips in itertools.product([0, 1], repeat=10) if sum(flips) in (0, 1, 9, 10)) / 2**10
    assert mcnemar(before, after) == pytest.approx(coin)
    assert mcnemar([1, 0], [1, 0]) == 1.0
    assert mcnemar([1, 0], [0, 1]) == 1.0
