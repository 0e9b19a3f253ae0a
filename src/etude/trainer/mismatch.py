"""How far the trainer's log-probs are from those the engine sampled with.

For sampled token t: delta = log pi(a_t) - log mu(a_t), r = exp(delta), pi the trainer now, mu the engine then.

    dlogp_mean, dlogp_p99, dlogp_max     of |delta|
    mismatch_kl                          mean of -delta: k1 estimate of KL(mu || pi)
    f2                                   share of tokens with max(r, 1/r) > 2 (arXiv 2510.11370; above 0.1 is a warning)
    ess                                  (sum r)^2 / (M sum r^2): effective share of the tokens after weighting
    weight_mean, weight_std              of r, before truncation

r factors into engine discrepancy at equal weights times staleness (arXiv 2512.01374). Tokens sampled by the very version that is
being trained show the first alone (`engine_*`); tokens of older versions show both (`stale_*`). If the mismatch follows `stale_*`,
fix the lag; if `engine_*` is large, fix kernels or routing. With equal code, weights and numerics `engine_*` is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.trainer.losses import TokenStats

ALARMS: dict[str, tuple[float, float]] = {
    "weight_mean": (0.5, 2.0),
    "ess": (0.3, 1.0),
    "weight_std": (0.0, 1.0),
    "mismatch_kl": (-0.1, 0.1),
    "dlogp_mean": (0.0, 0.01),
    "f2": (0.0, 0.1),
}
"""Healthy range of each number, as published by trainers of this kind; outside it the run is off-policy or an engine is wrong."""


def report(stats: Sequence[TokenStats], ordinal: int) -> dict[str, float]:
    """Metrics over all sampled tokens of a step trained at version `ordinal`; zeros and ones where there are none."""
    logp_M = _joined([s.logp_M for s in stats]).astype(np.float64)
    old_M = _joined([s.old_M for s in stats]).astype(np.float64)
    version_M = _joined([s.version_M for s in stats]).astype(np.int64)
    delta_M = logp_M - old_M
    lag_M = ordinal - version_M
    fresh_M = lag_M == 0
    out = _spread("dlogp", delta_M) | _ratios(delta_M)
    out |= _spread("engine_dlogp", delta_M[fresh_M]) | {"engine_f2": _extreme(delta_M[fresh_M])}
    out |= _spread("stale_dlogp", delta_M[~fresh_M]) | {"stale_f2": _extreme(delta_M[~fresh_M])}
    out |= {
        "fresh_share": _mean(fresh_M),
        "lag_mean": _mean(lag_M),
        "lag_max": float(lag_M.max(initial=0)),
        "entropy": _mean(_joined([s.entropy_M for s in stats])),
        "kl": _mean(_joined([s.k1_M for s in stats])),
        "clip_share": _mean(_joined([s.clipped_M for s in stats])),
        "sampled_tokens": float(len(delta_M)),
    }
    return out


def alarms(metrics: dict[str, float]) -> list[str]:
    """Sentences for the numbers outside their healthy range."""
    return [
        f"{name} = {metrics[name]:.4g} is outside [{low:g}, {high:g}]"
        for name, (low, high) in ALARMS.items()
        if name in metrics and not low <= metrics[name] <= high
    ]


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


def _ratios(delta_M: np.ndarray) -> dict[str, float]:
    if not len(delta_M):
        return {"ess": 1.0, "weight_mean": 1.0, "weight_std": 0.0, "mismatch_kl": 0.0, "f2": 0.0}
    ratio_M = np.exp(np.clip(delta_M, -50, 50))
    return {
        "ess": float(ratio_M.sum() ** 2 / (len(ratio_M) * np.square(ratio_M).sum())),
        "weight_mean": float(ratio_M.mean()),
        "weight_std": float(ratio_M.std()),
        "mismatch_kl": float(-delta_M.mean()),
        "f2": _extreme(delta_M),
    }
