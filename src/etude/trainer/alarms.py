"""Which numbers of a step are out of their healthy range, and what to do about it. No torch: reading thresholds must stay cheap.

An alarm stops nothing. The trainer puts it into the step's report, the recorder writes it as an `alarm` event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from etude.records import Alarm
from etude.trainer.config import AlarmConfig

OFF_POLICY = "lower loop.max_staleness or the learning rate, or choose a correction with tighter bounds (docs/corrections.md)"
ENGINE = (
    "engine and trainer disagree on tokens of equal weights: set the same numerics for both, replay routes (mixture of experts), and if "
    "weights are swapped in flight, try engine.cache_policy = recompute; `etude debug mismatch RUN STEP` says where they part"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    threshold: str
    """Field of `AlarmConfig`."""
    metric: str
    side: Literal["below", "above"]
    advice: str
    size: bool = False
    """Look at the absolute value."""


RULES = (
    Rule(threshold="ess_min", metric="ess", side="below", advice=f"few tokens carry the step; {OFF_POLICY}"),
    Rule(threshold="weight_mean_min", metric="weight_mean", side="below", advice=f"the policy has left its samples; {OFF_POLICY}"),
    Rule(
        threshold="weight_mean_max", metric="weight_mean", side="above", advice=f"a few tokens are far likelier than sampled; {OFF_POLICY}"
    ),
    Rule(threshold="weight_std_max", metric="weight_std", side="above", advice=f"importance weights vary too much; {OFF_POLICY}"),
    Rule(
        threshold="mismatch_kl_max", metric="mismatch_kl", side="above", size=True, advice=f"the policy has left its samples; {OFF_POLICY}"
    ),
    Rule(
        threshold="f2_max", metric="f2", side="above", advice=f"many ratios beyond 2; compare engine_f2 with stale_f2, then: {OFF_POLICY}"
    ),
    Rule(threshold="engine_dlogp_mean_max", metric="engine_dlogp_mean", side="above", advice=ENGINE),
    Rule(
        threshold="dlogp_mean_max",
        metric="dlogp_mean",
        side="above",
        advice=f"compare engine_dlogp_mean with stale_dlogp_mean; {OFF_POLICY}",
    ),
)


def alarms(metrics: Mapping[str, float], config: AlarmConfig) -> tuple[Alarm, ...]:
    """One alarm for each threshold that was crossed; a value equal to its threshold is healthy.

    Example:
        alarms({"ess": 0.2}, AlarmConfig())   # (Alarm(metric="ess", value=0.2, threshold=0.3, advice=...),)
    """
    found = []
    for rule in RULES:
        threshold = getattr(config, rule.threshold)
        if threshold is None or rule.metric not in metrics:
            continue
        value = metrics[rule.metric]
        looked_at = abs(value) if rule.size else value
        if looked_at < threshold if rule.side == "below" else looked_at > threshold:
            found.append(Alarm(metric=rule.metric, value=value, threshold=threshold, advice=rule.advice))
    return tuple(found)
