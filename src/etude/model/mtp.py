"""Heads that predict one token further: what speculative decoding drafts with (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    N  tokens     I  hidden width     V  vocabulary

A head is a whole layer behind the last one. At position t it reads the hidden state h_t and the embedding of the token that came
after, and its output goes through the model's own output head:

    x_t = W [norm(embed(token_t+1)); norm(h_t)]          logits_t = head(norm(layer(x)_t))   for token_t+2

Its attention runs over the same positions as the model's and keeps its keys and values in layers of its own behind the model's
in the cache (`PagedCache(..., heads=True)`), in the same slots: whoever has a plan for the model has one for its heads.

    out   = model(ids_N, plan, cache)
    draft = model.predict(out.hidden_ND, next_N, plan, cache)        # next_N: the token after each of ids_N
    model.logits(draft.hidden_ND)                                    # of the token after that

A drafter goes on from `draft.stream_ND`: with head 1 where there is one, or with head 0 again at the next positions. h is the model's
output, after its final norm. Heads never move the model: embeddings and output head are read without gradient, and callers pass h
detached. Trained by `trainer.mtp`; the slow twin is `reference.predicted_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etude.model.attention import Layout
from etude.model.block import Block
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.linear import Linear, RMSNorm
from etude.model.rope import Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """What a head says at each position."""

    stream_ND: Tensor
    """Before the norm: what the next head reads."""
    hidden_ND: Tensor
    """After it; `Decoder.logits` turns rows of it into logits of the token after the next."""


class Head(Block):
    """One head: norms and a projection before an ordinary layer, and a norm behind it. Names are those of DeepSeek-V3's checkpoints,
    where it is the layer behind the last one."""

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool) -> None:
        super().__init__(config, layer, invariant=invariant)
        self.enorm = RMSNorm(config.hidden, config.norm_eps)
        self.hnorm = RMSNorm(config.hidden, config.norm_eps)
        self.eh_proj = Linear(2 * config.hidden, config.hidden, invariant=invariant)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden, config.norm_eps)})

    def draft(self, hidden_NI: Tensor, embedded_NI: Tensor, turn: Turn, plan: Plan, layout: Layout, cache: PagedCache) -> Draft:
        x_NI = self.eh_proj(torch.cat((self.enorm(embedded_NI), self.hnorm(hidden_NI)), -1))
        stream_NI, _ = self(x_NI, turn, plan, layout, cache, None)
        return Draft(stream_ND=stream_NI, hidden_ND=self.shared_head["norm"](stream_NI))
