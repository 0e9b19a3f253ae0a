"""Intervals for pass rates, differences on the same tasks, and best-of-k. No torch.

Which interval answers which question:

    wilson(successes, n)               one pass rate, one attempt a task
    mean_at_k(tasks)                   mean over tasks with several attempts each: tasks are resampled, attempts are not
                                       independent evidence about other tasks
    best_of_k(tasks, k)                the same for pass@k, with the unbiased estimator
    paired(before, after)              a difference on the same tasks, in the same order: the one to claim progress with
    difference(a, n_a, b, n_b)         two rates on different tasks
    mcnemar(before, after)             exact p-value that the tasks that changed are a fair coin

Score intervals (Wilson 1927; Newcombe, Statistics in Medicine 17, 1998, both papers) are used for 0/1 outcomes because
they keep their level near 0 and 1 and never leave [-1, 1]; a bootstrap over tasks with a fixed seed is used for
everything else. The same data always give the same interval.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
RESAMPLES = 4000
"""Enough that the seed moves a 95 % limit by less than a tenth of the interval's width."""


class Interval(NamedTuple):
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval."""

    value: float
    low: float
    high: float
    n: int
    """Tasks behind it."""


def _z(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level lies between 0 and 1, got {level}")
    return stdlib_statistics.NormalDist().inv_cdf((1 + level) / 2)


def _check_counts(successes: float, n: int) -> None:
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is impossible")


# ---------------------------------------------------------------------------------------------------
# One rate


def wilson(successes: float, n: int, level: float = LEVEL) -> Interval:
    """Score interval of a proportion. Nothing observed is (0, 1).

    Example:
        wilson(81, 263)    # (0.2553, 0.3662)
    """
    _check_counts(successes, n)
    if n == 0:
        return Interval(0.0, 1.0)
    z = _z(level)
    p, z2n = successes / n, z * z / n
    centre = (p + z2n / 2) / (1 + z2n)
    half = z / (1 + z2n) * math.sqrt(p * (1 - p) / n + z2n / (4 * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k attempts passes) from n attempts with `correct` passes (arXiv 2107.03374)."""
    _check_counts(correct, n)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} cannot be estimated from {n} attempts")
    if n - correct < k:
        return 1.0
    miss = 1.0
    for i in range(n - correct + 1, n + 1):
        miss *= 1 - k / i
    return 1 - miss


def best_of_k(tasks: Sequence[Sequence[float]], k: int, level: float = LEVEL) -> Estimate:
    """Mean over tasks of the unbiased best-of-k; attempts are 0/1 lists, one a task."""
    return _over_tasks([pass_at_k(len(t), round(sum(t)), k) for t in tasks], level)


def mean_at_k(tasks: Sequence[Sequence[float]], level: float = LEVEL) -> Estimate:
    """Mean over tasks of the mean over attempts, with an interval over tasks (a cluster bootstrap by task)."""
    if any(len(t) == 0 for t in tasks):
        raise ValueError("a task without attempts has no mean; leave it out and count it")
    return _over_tasks([sum(t) / len(t) for t in tasks], level)


def _over_tasks(values: Sequence[float], level: float) -> Estimate:
    if not values:
        return Estimate(value=math.nan, low=-math.inf, high=math.inf, n=0)
    if all(v in (0, 1) for v in values):
        low, high = wilson(sum(values), len(values), level)
    else:
        low, high = bootstrap(values, level)
    return Estimate(value=sum(values) / len(values), low=low, high=high, n=len(values))


def bootstrap(values: Sequence[float], level: float = LEVEL, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Percentile interval of the mean under resampling of the values, which are independent of each other."""
    if not values:
        return Interval(-math.inf, math.inf)
    data = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = np.array([data[rng.integers(0, len(data), len(data))].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


# ---------------------------------------------------------------------------------------------------
# Differences


def difference(a: float, n_a: int, b: float, n_b: int, level: float = LEVEL) -> Estimate:
    """b/n_b - a/n_a on different tasks (Newcombe's hybrid score interval)."""
    low_a, high_a = wilson(a, n_a, level)
    low_b, high_b = wilson(b, n_b, level)
    if not n_a or not n_b:
        return Estimate(value=math.nan, low=-1.0, high=1.0, n=0)
    p_a, p_b = a / n_a, b / n_b
    gap = p_b - p_a
    low = gap - math.hypot(p_b - low_b, high_a - p_a)
    high = gap + math.hypot(high_b - p_b, p_a - low_a)
    return Estimate(value=gap, low=max(-1.0, low), high=min(1.0, high), n=n_a + n_b)


def paired(before: Sequence[float | None], after: Sequence[float | None], level: float = LEVEL) -> Estimate:
    """after - before on the same tasks in the same order. A task that is None on either side is left out of both.

    0/1 outcomes get Newcombe's paired score interval (his method 10); anything else, for example a mean over several
    attempts, a bootstrap over tasks.
    """
    pairs = _pairs(before, after)
    if not pairs:
        return Estimate(value=math.nan, low=-1.0, high=1.0, n=0)
    gaps = [b - a for a, b in pairs]
    if all(v in (0, 1) for pair in pairs for v in pair):
        low, high = _paired_score(pairs, level)
    else:
        low, high = bootstrap(gaps, level)
    return Estimate(value=sum(gaps) / len(gaps), low=low, high=high, n=len(gaps))


def _pairs(before: Sequence[float | None], after: Sequence[float | None]) -> list[tuple[float, float]]:
    if len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before and {len(after)} after are not the same tasks; use difference()")
    return [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]


def _paired_score(pairs: Sequence[tuple[float, float]], level: float) -> Interval:
    n = len(pairs)
    both = sum(a == 1 and b == 1 for a, b in pairs)
    lost = sum(a == 1 and b == 0 for a, b in pairs)
    won = sum(a == 0 and b == 1 for a, b in pairs)
    neither = n - both - lost - won
    p_a, p_b = (both + lost) / n, (both + won) / n
    low_a, high_a = wilson(both + lost, n, level)
    low_b, high_b = wilson(both + won, n, level)
    phi = _phi(both, lost, won, neither)
    down_a, up_a = p_a - low_a, high_a - p_a
    down_b, up_b = p_b - low_b, high_b - p_b
    gap = p_b - p_a
    low = gap - math.sqrt(max(0.0, down_b**2 - 2 * phi * down_b * up_a + up_a**2))
    high = gap + math.sqrt(max(0.0, up_b**2 - 2 * phi * up_b * down_a + down_a**2))
    return Interval(max(-1.0, low), min(1.0, high))


def _phi(both: int, lost: int, won: int, neither: int) -> float:
    """Correlation of the two outcomes, with Newcombe's continuity correction where it is positive."""
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    if margins == 0:
        return 0.0
    cross = float(both * neither - lost * won)
    if cross > 0:
        cross = max(cross - (both + lost + won + neither) / 2, 0.0)
    return cross / math.sqrt(margins)


def mcnemar(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Exact two-sided p-value that gained and lost tasks are equally likely; 1 when none changed."""
    pairs = _pairs(before, after)
    won = sum(b > a for a, b in pairs)
    changed = sum(b != a for a, b in pairs)
    if changed == 0:
        return 1.0
    tail = sum(math.comb(changed, i) for i in range(min(won, changed - won) + 1)) / 2**changed
    return min(1.0, 2 * tail)
