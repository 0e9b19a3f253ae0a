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
    cache_bytes: int = 0
    """Memory for keys, values and routes; gives the number of blocks. 0 derives it from the device: see budget.py."""
    memory_share: float = 0.0
    """Share of the device's free memory that derived cache_bytes may take. 0: 0.1 of a CPU's, which trainer and sandboxes live in too,
    0.8 of a GPU's."""
    num_blocks: int = 0
    """Number of blocks, one of them reserved; 0 derives it from cache_bytes."""
    max_running: int = 64
    """Sequences computed in one step at most."""
    token_budget: int = 512
    """Tokens computed in one step at most, so that a long prompt does not stall those who decode."""
    prefix_cache: bool = True
    cache_policy: Literal["keep", "recompute"] = "keep"
    """Keys and values of running requests at a weight swap. keep: no pause, a little off-policy (PipelineRL keeps them)."""
    max_waiting: int = 0
    """Requests in the queue at most; a further one is refused at once (BusyError, HTTP 429). 0: no limit, as a training run wants."""
    speculation: Literal["off", "ngram"] = "off"
    """Guess tokens by what followed the same tokens before, and confirm several in one step; the distribution does not change."""
    draft_max: int = 8
    """Tokens guessed at most for one sequence in one step."""
    draft_rows: int = 16
    """No guesses beyond this many tokens in a step, those who decode included: a row more is almost free while reading the weights
    bounds the step, and costs a row once arithmetic does."""
    ageing_steps: int = 256
    """A request overtakes those one priority class better that arrive this many steps after it."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "token_budget", "ageing_steps", "draft_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"engine.token_budget = {self.token_budget} is below engine.max_running = {self.max_running}; every running "
                "sequence needs a token a step: raise the first or lower the second"
            )
        for name in ("num_blocks", "cache_bytes", "max_waiting", "draft_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it cannot be negative")
        if not 0.0 <= self.memory_share <= 1.0:
            raise ConfigError(f"engine.memory_share is {self.memory_share}; it must be between 0 (the default share) and 1")
