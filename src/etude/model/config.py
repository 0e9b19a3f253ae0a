"""The shape of a model. Families translate a Hugging Face config.json to this and back (`families/`)."""

from __future__ import annotations

import math
from typing import Literal

from etude.config import config
from etude.errors import ConfigError
from etude.records import ABSENT_ROUTE, ABSENT_ROUTE_16

Numerics = Literal["fast", "matched", "invariant"]
"""How floats are added.

fast: the quickest kernels; on a CPU the engine lays its weights out for oneDNN (linear.Packed), which the trainer does not. matched: the
same kernels in trainer and engine. invariant: a sequence's bits depend neither on its batch nor on how its tokens were split over forwards.
"""


Family = Literal["llama", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v3"]
"""Architecture on disk. It also says what no number does: see the properties at the end of ModelConfig."""


RouteRule = Literal["none", "ratio", "margin", "rank"]
"""Which recorded experts a router takes for plausible; see `RouteFilter`."""


@config
class RouteFilter:
    """When a recorded expert e is replayed (facts M29), against the router's own K choices for that token.

    none: always. ratio: gate of e >= alpha * the smallest gate of the K. margin: score of e >= the smallest score of the K - margin.
    rank: fewer than `slack` of the experts that the router did not choose score higher (e is among its first K + slack).

    Gates are softmax probabilities or sigmoids. Scores are what the router chooses by: the same, plus the bias of a sigmoid router,
    which can be negative and so bounds no ratio. An expert in a group that the router left out is judged by its own score all the
    same: a near tie between two groups flips all of a token's experts at once. Every rule passes what the router itself would choose.
    """

    rule: RouteRule = "none"
    alpha: float = 0.5
    margin: float = 0.05
    slack: int = 2
    """Reasons for these numbers stand beside the trainer's fields of the same names."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha of the route filter is {self.alpha}; it should be between 0 and 1, or the router's own choices fail")
        if not self.margin >= 0 or self.slack < 0:
            raise ConfigError(f"margin and slack of the route filter must not be negative, got {self.margin} and {self.slack}")


@config
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was pretrained on (rope.py has the formulas)."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    """Longest context over `original_positions`."""
    original_positions: int = 0
    """Context of pretraining; unused by linear."""
    low_freq_factor: float = 1.0
    """llama3: waves longer than original_positions / this are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original_positions / this stay as they are."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this in original_positions stay as they are."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often are stretched by the whole factor."""
    truncate: bool = True
    """yarn: round the two borders outwards to whole dimensions."""
    attention_factor: float | None = None
    """yarn: what cosines and sines are multiplied with; None derives it from the factor and the two below."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError(f"model.rope_scaling.factor is {self.factor}; contexts are stretched, so it must be at least 1")
        if self.kind != "linear" and self.original_positions < 1:
            raise ConfigError(f"model.rope_scaling.original_positions is {self.original_positions}; {self.kind!r} needs at least 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.high_freq_factor = {self.high_freq_factor} must exceed low_freq_factor = {self.low_freq_factor}"
            )

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied with (Peng et al. 2023, section 3.4)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """What latent attention multiplies its scores with (DeepSeek-V2): the rotary part alone cannot carry the amplitude there."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


@config
class Latent:
    """Shape of multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one small vector a token."""

    kv_rank: int
    """Width of that vector, which the cache holds instead of keys and values."""
    q_rank: int = 0
    """Width of the vector queries come from; 0: straight from the stream."""
    nope_dim: int
    """Dimensions of a query and key without position."""
    rope_dim: int
    """Dimensions with; the key's are one for all heads."""
    value_dim: int
    interleaved: bool = True
    """Rotary pairs lie side by side on disk, not half a head apart."""


@config
class ModelConfig:
    """Shape and constants of one decoder. Two models with equal configs can exchange weights."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and a key."""
    intermediate: int = 0
    """Width of the dense feed-forward part; unused where every layer is a mixture of experts."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    """The output head is the embedding matrix."""
    qkv_bias: bool = False
    max_positions: int = 4096
    latent: Latent | None = None
    """Latent attention instead of grouped-query attention."""
    experts: int = 0
    """Experts per layer; 0 makes the model dense."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the expert every token passes; 0: there is none."""
    norm_topk: bool = False
    """Divide the gates of the chosen experts by their sum."""
    balance_weight: float = 0.001
    """What the trainer multiplies `Output.balance` with."""
    dense_layers: int = 0
    """First layers that are dense in a mixture of experts."""
    route_groups: int = 1
    """Equal groups of experts, of which a token may use the `route_groups_kept` best."""
    route_groups_kept: int = 1
    route_scale: float = 1.0
    """What the gates are multiplied with."""
    mtp_layers: int = 0
    """Heads behind the last layer that predict further tokens (mtp.py)."""
    family: Family = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.mtp_layers < 0:
            raise ConfigError(f"model.mtp_layers is {self.mtp_layers}; it must be 0 or more")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        if (self.latent is not None) != (self.family == "deepseek_v3"):
            raise ConfigError(f"model.latent is {self.latent}; family = 'deepseek_v3' needs it, and no other has it")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.family in ("llama", "qwen3"):
            self._check_dense()
        else:
            self._check_moe()

    def _check_latent(self, latent: Latent) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(latent, name) < 1:
                raise ConfigError(f"model.latent.{name} is {getattr(latent, name)}; it must be at least 1")
        if latent.rope_dim % 2:
            raise ConfigError(f"model.latent.rope_dim = {latent.rope_dim} must be even: rotary embedding turns pairs")
        if self.head_dim != latent.nope_dim + latent.rope_dim:
            raise ConfigError(f"model.head_dim = {self.head_dim} must be nope_dim + rope_dim = {latent.nope_dim + latent.rope_dim}")
        if self.kv_heads != self.heads:
            raise ConfigError(f"model.kv_heads = {self.kv_heads} must equal model.heads = {self.heads}: every head has its own key")

    def _check_dense(self) -> None:
        if self.experts:
            raise ConfigError(f"model.family = {self.family!r} is dense, but model.experts = {self.experts}; use family = 'qwen2_moe'")
        if self.intermediate < 1:
            raise ConfigError(f"model.intermediate is {self.intermediate}; a dense model needs at least 1")

    def _check_moe(self) -> None:
        shared = () if self.family == "qwen3_moe" else ("shared_intermediate",)
        for name in ("experts", "experts_per_token", "expert_intermediate", *shared):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; family = {self.family!r} needs at least 1")
        if not shared and self.shared_intermediate:
            raise ConfigError(f"model.shared_intermediate is {self.shared_intermediate}; family = 'qwen3_moe' has no shared expert")
        if self.experts_per_token > self.experts:
            raise ConfigError(f"model.experts_per_token = {self.experts_per_token} exceeds model.experts = {self.experts}")
        if self.experts > ABSENT_ROUTE_16:
            raise ConfigError(f"model.experts = {self.experts} does not fit the 16 bits of a recorded route")
        if self.family == "deepseek_v3":
            self._check_deepseek()
        elif (self.dense_layers, self.route_groups, self.route_groups_kept, self.route_scale) != (0, 1, 1, 1.0):
            raise ConfigError(f"dense_layers, route_groups, route_groups_kept and route_scale are not for model.family = {self.family!r}")

    def _check_deepseek(self) -> None:
        if not 0 <= self.dense_layers < self.layers:
            raise ConfigError(f"model.dense_layers = {self.dense_layers} must leave one of {self.layers} layers to the experts")
        if self.dense_layers and self.intermediate < 1:
            raise ConfigError(f"model.intermediate is {self.intermediate}; {self.dense_layers} dense layers need at least 1")
        if self.shared_intermediate % self.expert_intermediate:
            raise ConfigError(
                f"model.shared_intermediate = {self.shared_intermediate} must be a multiple of expert_intermediate = "
                f"{self.expert_intermediate}: it is that many shared experts side by side"
            )
        if not 1 <= self.route_groups_kept <= self.route_groups or self.experts % self.route_groups:
            raise ConfigError(
                f"model.route_groups = {self.route_groups} must divide experts = {self.experts} and be at least "
                f"route_groups_kept = {self.route_groups_kept}"
            )
        each = self.experts // self.route_groups
        if self.route_groups > 1 and (each < 2 or each * self.route_groups_kept < self.experts_per_token):
            raise ConfigError(
                f"{self.route_groups_kept} of {self.route_groups} groups of {each} experts: groups need 2, and those kept "
                f"experts_per_token = {self.experts_per_token}"
            )

    @property
    def moe(self) -> bool:
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        """Layers with a router: the L of recorded routes."""
        return self.layers - self.dense_layers if self.moe else 0

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normed head by head."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def shared_gate(self) -> bool:
        """The shared expert's output is scaled by a sigmoid gate of its own."""
        return self.family == "qwen2_moe"

    @property
    def sigmoid_router(self) -> bool:
        """Gates are sigmoids, and a bias of the checkpoint takes part in the choice only; else a softmax does both."""
        return self.family == "deepseek_v3"

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are turned."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with before the softmax."""
        plain = self.head_dim**-0.5
        return plain * self.rope_scaling.softmax_factor if self.latent and self.rope_scaling else plain

    @property
    def cache_heads(self) -> int:
        """Heads of the cache; a latent is one that all query heads share."""
        return 1 if self.latent else self.kv_heads

    @property
    def cache_width(self) -> int:
        """Numbers a cached head holds for a token in each of the `cache_tensors`."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def cache_tensors(self) -> int:
        """Tensors a layer caches: keys and values, or one latent that is both."""
        return 1 if self.latent else 2

    @property
    def group(self) -> int:
        """Query heads that share one cached head."""
        return self.heads // self.cache_heads

    @property
    def absent_route(self) -> int:
        """Expert id meaning "not recorded", by the width routes of this model are stored in."""
        return ABSENT_ROUTE if self.experts <= ABSENT_ROUTE else ABSENT_ROUTE_16
