"""One layer of the decoder, in every family.

N  tokens of this forward, padding rows included     I  hidden width
"""

from __future__ import annotations

from torch import Tensor, nn

from etude.model.attention import Attention, Layout
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.latent import LatentAttention
from etude.model.linear import MLP, RMSNorm
from etude.model.moe import MoE, Replay, Routing
from etude.model.rope import Turn


class Block(nn.Module):
    """One layer: attention, then the feed-forward part, each normed before and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        attention = LatentAttention if config.latent else Attention
        self.self_attn = attention(config, layer, invariant=invariant)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        routed = config.moe and layer >= config.dense_layers
        self.mlp = MoE(config, invariant=invariant) if routed else MLP(config.hidden, config.intermediate, invariant=invariant)

    def forward(
        self, x_NI: Tensor, turn: Turn, plan: Plan, layout: Layout, cache: PagedCache, replay: Replay | None
    ) -> tuple[Tensor, Routing | None]:
        x_NI = x_NI + self.self_attn(self.input_layernorm(x_NI), turn, plan, layout, cache)
        h_NI = self.post_attention_layernorm(x_NI)
        if isinstance(self.mlp, MLP):
            return x_NI + self.mlp(h_NI), None
        y_NI, routing = self.mlp(h_NI, replay)
        return x_NI + y_NI, routing
