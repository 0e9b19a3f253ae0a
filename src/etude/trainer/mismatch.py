"""How far the trainer's log-probs are from those the engine sampled with.

For sampled token t: delta = log pi(a_t) - log mu(a_t), r = exp(delta), pi the trainer now, mu the engine then.

    dlogp_mean, dlogp_p99, dlogp_max     of |delta|
    mismatch_kl                          mean of -delta: k1 estimate of KL(mu || pi)
    f2                                   share of tokens with max(r, 1/r) > 2 (arXiv 2510.11370; above 0.1 is a warning)
    mismatch_k3                          mean of r - 1 - log r: k3 estimate of the same, never negative
    ess                                  (sum r)^2 / (M sum r^2): effective share of the tokens after weighting (Kish, 1965)
    weight_mean, weight_std, weight_max  of r, before any correction

What the correction made of it, w the factor of each token's gradient (`objectives.Corrected.weight_M`):

    applied_ess, applied_mean, applied_std, applied_max      the same of w
    clip_share                           share of tokens that a bound of the correction touched
    mask_share                           share of tokens left without a gradient (w = 0)

Against the reference policy, when KL is on: `kl` is the mean of k1 = log pi - log ref, `kl_k3` the mean of exp(-k1) - 1 + k1.

r factors into engine discrepancy at equal weights times staleness (arXiv 2512.01374). Tokens sampled by the very version that is
being trained show the first alone (`engine_*`); tokens of older versions show both (`stale_*`). If the mismatch follows `stale_*`,
fix the lag; if `engine_*` is large, fix kernels or routing. With equal code, weights and numerics `engine_*` is exactly 0, but for
tokens sampled after a swap in flight: an engine that keeps its cache reads keys and values of older weights for them.
`alarms` says which of these numbers are out of their healthy range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.trainer.losses import TokenStats

LARGEST = 50.0
"""Log-ratios are cut here before they are exponentiated for the report, so that one impossible token cannot make it infinite."""


def report(stats: Sequence[TokenStats], ordinal: int) -> dict[str, float]:
    """Metrics over all sampled tokens of a step trained at version `ordinal`; zeros and ones where there are none."""
    logp_M = _joined([s.logp_M for s in stats]).astype(np.float64)
    old_M = _joined([s.old_M for s in stats]).astype(np.float64)
    version_M = _joined([s.version_M for s in stats]).astype(np.int64)
    delta_M = logp_M - old_M
    weight_M = _joined([s.weight_M for s in stats]).astype(np.float64)
    k1_M = _joined([s.k1_M for s in stats]).astype(np.float64)
    lag_M = ordinal - version_M
    fresh_M = lag_M == 0
    ratio_M = _exp(delta_M)
    out = _spread("dlogp", delta_M) | _weights("ess", "weight", ratio_M) | _weights("applied_ess", "applied", weight_M)
    out |= {"mismatch_kl": _mean(-delta_M), "mismatch_k3": _mean(ratio_M - 1 - delta_M), "f2": _extreme(delta_M)}
    out |= _spread("engine_dlogp", delta_M[fresh_M]) | {"engine_f2": _extreme(delta_M[fresh_M])}
    out |= _spread("stale_dlogp", delta_M[~fresh_M]) | {"stale_f2": _extreme(delta_M[~fresh_M])}
    out |= {
        "fresh_share": _mean(fresh_M),
        "lag_mean": _mean(lag_M),
        "lag_max": float(lag_M.max(initial=0)),
        "entropy": _mean(_joined([s.entropy_M for s in stats])),
        "kl": _mean(_joined([s.k1_M for s in stats])),
        "kl_k3": _mean(_exp(-k1_M) - 1 + k1_M),
        "clip_share": _mean(_joined([s.clipped_M for s in stats])),
        "mask_share": _mean(weight_M == 0),
        "sampled_tokens": float(len(delta_M)),
    }
    return out


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0


def _spread(name: str, delta_M: np.ndarray) -> dict[str, float]:
    size_M = np.abs(delta_M)
    p99 = float(np.quantile(size_M, 0.99)) if len(size_M) else 0.0
    return {f"{name}_mean": _mean(size_M), f"{name}_p99": p99, f"{name}_max": float(size_M.max(initial=0.0))}


def _extreme(delta_M: np.ndarray) -> float:
    return _mean(np.abs(delta_M) > np.log(2.0))


def _exp(values_M: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(values_M, -LARGEST, LARGEST))


def _weights(ess: str, name: str, weight_M: np.ndarray) -> dict[str, float]:
    """Effective sample size, mean, deviation and maximum of weights; all tokens at weight 0 are an effective share of 0."""
    if not len(weight_M):
        return {ess: 1.0, f"{name}_mean": 1.0, f"{name}_std": 0.0, f"{name}_max": 1.0}
    squares = np.square(weight_M).sum()
    return {
        ess: float(weight_M.sum() ** 2 / (len(weight_M) * squares)) if squares else 0.0,
        f"{name}_mean": float(weight_M.mean()),
        f"{name}_std": float(weight_M.std()),
        f"{name}_max": float(weight_M.max()),
    }
