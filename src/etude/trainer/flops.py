"""Counting floating-point operations of a decoder: for the packing cost model, for log-compute fits, for provenance.

A multiply-add counts as two. A training step costs three forwards (one forward, twice that for the backward).
Active parameters are those a token passes: of E experts only the K it is routed to.
"""

from __future__ import annotations

from etude.model.config import ModelConfig

TRAIN_FACTOR = 3


def active_params(config: ModelConfig) -> int:
    """Parameters in matrix products for one token, the output head included, the embedding lookup not."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    if config.moe:
        width = config.experts_per_token * config.expert_intermediate + config.shared_intermediate
        block = 3 * config.hidden * width + config.hidden * config.experts
    else:
        block = 3 * config.hidden * config.intermediate
    return config.layers * (attention + block) + config.hidden * config.vocab_size


def forward_flops(config: ModelConfig, length: int) -> float:
    """One forward over one sequence: linear in its length, plus causal attention's quadratic term."""
    attention = 2 * config.layers * config.heads * config.head_dim * length * length
    return 2.0 * active_params(config) * length + attention
