"""Step sizes over a run: a factor between 0 and 1 that multiplies the configured learning rate.

`progress` and `total` are in the same unit, steps or tokens. Functions are pure, so a resumed run continues exactly.

    constant    warm-up, then 1
    cosine      warm-up, then 1 -> floor along half a cosine (Loshchilov and Hutter, arXiv 1608.03983)
    wsd         warm-up, stable at 1, then a linear fall to floor over the last `decay` of the run (Hu et al., arXiv 2404.06395)
"""

from __future__ import annotations

import math
from typing import Literal

from etude.config import config
from etude.errors import ConfigError

Kind = Literal["constant", "cosine", "wsd"]


@config
class ScheduleConfig:
    kind: Kind = "constant"
    """constant | cosine | wsd"""
    warmup: float = 0.0
    """Share of the run (0 to 1) over which the factor rises linearly from 0; for a run without an end, a number of steps."""
    decay: float = 0.2
    """wsd: share of the run spent falling."""
    floor: float = 0.0
    """Factor at the end of the run."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 0 <= self.decay <= 1 or not 0 <= self.floor <= 1:
            raise ConfigError(f"schedule: warmup >= 0, 0 <= decay <= 1 and 0 <= floor <= 1 are needed, got {self}")


def factor(schedule: ScheduleConfig, progress: float, total: float | None = None) -> float:
    """What multiplies the learning rate at `progress` of `total`; `total` None is a run without an end.

    Example:
        factor(ScheduleConfig(kind="wsd", warmup=0.1, decay=0.5), 75, 100)   # 0.5
    """
    warmup = schedule.warmup * total if total else schedule.warmup
    if progress < warmup:
        return progress / warmup
    if not total or schedule.kind == "constant":
        return 1.0
    progress = min(progress, total)
    if schedule.kind == "cosine":
        done = (progress - warmup) / max(total - warmup, 1e-12)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * done))
    start = total * (1 - schedule.decay)
    if progress <= start:
        return 1.0
    return 1.0 - (1.0 - schedule.floor) * (progress - start) / max(total - start, 1e-12)
