"""What an optimizer is told. Apart from the optimizers so that reading a recipe does not import torch."""

from __future__ import annotations

from typing import Literal

from etude.config import config, live
from etude.errors import ConfigError


@config
class OptimConfig:
    kind: Literal["adamw", "muon"] = "adamw"
    """adamw | muon (matrices on Muon, the rest on AdamW)."""
    beta1: float = 0.9
    beta2: float = 0.95
    """Lower than the textbook 0.999: runs here are tens to thousands of steps, and the second moment must follow."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled decay of tensors of two or more dimensions; 0 for reinforcement learning, 0.1 is usual in pretraining."""
    momentum: float = 0.95
    """Muon's momentum."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of Muon's iteration; bfloat16 is what large runs use on GPUs."""
    clip_norm: float = live(1.0)
    """Gradients of a larger global norm are scaled down to it; 0 switches clipping off."""

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.momentum < 1):
            raise ConfigError(f"optim: beta1, beta2 and momentum lie in [0, 1), got {self.beta1}, {self.beta2}, {self.momentum}")
        if self.eps <= 0 or self.weight_decay < 0 or self.clip_norm < 0:
            raise ConfigError(f"optim: eps > 0, weight_decay >= 0 and clip_norm >= 0 are needed, got {self}")
