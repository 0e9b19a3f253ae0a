"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one small vector a token, and no keys or values.

    N  tokens     H  heads     C  width of the latent     P  dimensions without position     R  rotary dimensions     V  value width

A head's key is [W_key c, r] and its value W_value c, with c the token's latent and r the rotary key all heads share. Both
matrices move to the other side of the sums:

    (W_key c) . q = c . (W_key^T q)            sum_t w_t (W_value c_t) = W_value sum_t w_t c_t

so attention runs over the cached [c, r] itself as one head that H queries read, in trainer and engine alike. Values are the
same cached vector; the R columns too many are dropped after the sum, which keeps queries, keys and values of one width.
The slow twin expands keys and values instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.model.attention import CachedAttention, Layout
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.linear import Linear, RMSNorm, pad_rows
from etude.model.rope import Turn

NORM_EPS = 1e-6
"""Of the norms of both latents, whatever the config says of the others: so the published checkpoints were trained."""


class LatentAttention(CachedAttention):
    """Projections, absorbed on both sides of attention over latents."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__(config, layer, invariant=invariant)
        assert config.latent is not None, "a latent model has the shape of its latents"
        self.shape = shape = config.latent
        queries = config.heads * config.head_dim
        if shape.q_rank:
            self.q_a_proj = Linear(config.hidden, shape.q_rank, invariant=invariant)
            self.q_a_layernorm = RMSNorm(shape.q_rank, NORM_EPS)
            self.q_b_proj = Linear(shape.q_rank, queries, invariant=invariant)
        else:
            self.q_proj = Linear(config.hidden, queries, invariant=invariant)
        self.kv_a_proj_with_mqa = Linear(config.hidden, shape.kv_rank + shape.rope_dim, invariant=invariant)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, NORM_EPS)
        self.kv_b_proj = Linear(shape.kv_rank, config.heads * (shape.nope_dim + shape.value_dim), invariant=invariant)
        self.o_proj = Linear(config.heads * shape.value_dim, config.hidden, invariant=invariant)

    def forward(self, x_NI: Tensor, turn: Turn, plan: Plan, layout: Layout, cache: PagedCache) -> Tensor:
        n, shape = layout.count, self.shape
        key_HPC, value_HVC = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([shape.nope_dim, shape.value_dim], 1)
        q_NHP, q_NHR = self._queries(x_NI).unflatten(-1, (self.heads, -1)).split([shape.nope_dim, shape.rope_dim], -1)
        latent_NC, k_NR = self.kv_a_proj_with_mqa(x_NI).split([shape.kv_rank, shape.rope_dim], -1)
        latent_NC = self.kv_a_layernorm(latent_NC.contiguous())
        q_NHC = torch.bmm(q_NHP.transpose(0, 1), key_HPC).transpose(0, 1)
        q = torch.cat((q_NHC, turn(self._halves(q_NHR))), -1)
        k = torch.cat((latent_NC, turn(self._halves(k_NR.unsqueeze(1))).squeeze(1)), -1).unsqueeze(1)
        out = pad_rows(self.attend(q[:n], k[:n], None, plan, layout, cache), x_NI.shape[0])
        out_HNC = out.unflatten(-1, (self.heads, -1))[..., : shape.kv_rank].transpose(0, 1)
        return self.o_proj(torch.bmm(out_HNC, value_HVC.mT).transpose(0, 1).flatten(1))

    def _queries(self, x_NI: Tensor) -> Tensor:
        if self.shape.q_rank:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_NI)))
        return self.q_proj(x_NI)

    def _halves(self, x_NHR: Tensor) -> Tensor:
        """Rotary pairs half a head apart. Queries and keys are reordered alike, so scores do not change."""
        if not self.shape.interleaved:
            return x_NHR.contiguous()
        return x_NHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
