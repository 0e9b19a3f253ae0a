"""The shape of a model. Families translate a Hugging Face config.json to this and back (`families/`)."""

from __future__ import annotations

from typing import Literal

from etude.config import config
from etude.errors import ConfigError
from etude.records import ABSENT_ROUTE, ABSENT_ROUTE_16

Numerics = Literal["fast", "matched", "invariant"]
"""How floats are added.

fast: the quickest kernels. matched: the same kernels in trainer and engine; with one model definition that is what
fast does already, so the two are equal here and differ only for other engines. invariant: a sequence's bits depend
neither on its batch nor on how its tokens were split over forwards.
"""


@config
class ModelConfig:
    """Shape and constants of one decoder. Two models with equal configs can exchange weights."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int = 0
    """Width of the dense feed-forward part; 0 in a mixture of experts."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    """The output head is the embedding matrix."""
    qkv_bias: bool = False
    max_positions: int = 4096
    experts: int = 0
    """Experts per layer; 0 makes the model dense."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the expert every token passes; its output is scaled by a sigmoid gate."""
    norm_topk: bool = False
    """Divide the gates of the chosen experts by their sum."""
    balance_weight: float = 0.001
    """What the trainer multiplies `Output.balance` with."""
    family: Literal["llama", "qwen2_moe"] = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        if self.family == "llama":
            self._check_dense()
        else:
            self._check_moe()

    def _check_dense(self) -> None:
        if self.experts:
            raise ConfigError(f"model.family = 'llama' is dense, but model.experts = {self.experts}; use family = 'qwen2_moe'")
        if self.intermediate < 1:
            raise ConfigError(f"model.intermediate is {self.intermediate}; a dense model needs at least 1")

    def _check_moe(self) -> None:
        for name in ("experts", "experts_per_token", "expert_intermediate", "shared_intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; family = 'qwen2_moe' needs at least 1")
        if self.experts_per_token > self.experts:
            raise ConfigError(f"model.experts_per_token = {self.experts_per_token} exceeds model.experts = {self.experts}")
        if self.experts > ABSENT_ROUTE_16:
            raise ConfigError(f"model.experts = {self.experts} does not fit the 16 bits of a recorded route")

    @property
    def moe(self) -> bool:
        return self.experts > 0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def absent_route(self) -> int:
        """Expert id meaning "not recorded", by the width routes of this model are stored in."""
        return ABSENT_ROUTE if self.experts <= ABSENT_ROUTE else ABSENT_ROUTE_16
