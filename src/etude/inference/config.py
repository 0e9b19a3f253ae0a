"""What the native engine is told. Apart from the engine so that reading a recipe does not import torch."""

from __future__ import annotations

from typing import Literal

from etude.config import config
from etude.errors import ConfigError


@config
class EngineConfig:
    """Memory, batch and policy of the native engine."""

    block_size: int = 16
    """Tokens in a cache block; also the grain of the prefix cache. In invariant mode attention adds block by block."""
    cache_bytes: int = 256 * 2**20
    """Memory for keys, values and routes; gives the number of blocks."""
    num_blocks: int = 0
    """Number of blocks, one of them reserved; 0 derives it from cache_bytes."""
    max_running: int = 64
    """Sequences computed in one step at most."""
    token_budget: int = 512
    """Tokens computed in one step at most, so that a long prompt does not stall those who decode."""
    prefix_cache: bool = True
    cache_policy: Literal["keep", "recompute"] = "keep"
    """Keys and values of running requests at a weight swap. keep: no pause, a little off-policy (PipelineRL keeps them)."""
    ageing_steps: int = 256
    """A request overtakes those one priority class better that arrive this many steps after it."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "token_budget", "ageing_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"engine.token_budget = {self.token_budget} is below engine.max_running = {self.max_running}; every running "
                "sequence needs a token a step: raise the first or lower the second"
            )
        if self.num_blocks < 0 or self.cache_bytes < 0:
            raise ConfigError("engine.num_blocks and engine.cache_bytes cannot be negative")
