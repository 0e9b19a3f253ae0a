"""Counting floating-point operations of a decoder: for the packing cost model, for log-compute fits, for provenance.

A multiply-add counts as two. A training step costs three forwards (one forward, twice that for the backward).
Active parameters are those a token passes: of E experts only the K it is routed to.
"""

from __future__ import annotations

from etude.model.config import ModelConfig

TRAIN_FACTOR = 3


def active_params(config: ModelConfig) -> int:
    """Parameters in matrix products for one token, the output head included, the embedding lookup not."""
    dense = 3 * config.hidden * config.intermediate
    blocks = config.moe_layers * _routed_params(config) + (config.layers - config.moe_layers) * dense
    return config.layers * _attention_params(config) + blocks + config.hidden * config.vocab_size


def _routed_params(config: ModelConfig) -> int:
    """Of one layer with experts."""
    width = config.experts_per_token * config.expert_intermediate + config.shared_intermediate
    return 3 * config.hidden * width + config.hidden * config.experts


def _attention_params(config: ModelConfig) -> int:
    """Of one layer. The matrices that latent attention absorbs are passed by a token's query and output, once each."""
    if config.latent is None:
        return config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    shape = config.latent
    queries = config.heads * config.head_dim
    query = shape.q_rank * (config.hidden + queries) if shape.q_rank else config.hidden * queries
    absorbed = shape.kv_rank * config.heads * (shape.nope_dim + shape.value_dim)
    return query + config.hidden * config.cache_width + absorbed + config.heads * shape.value_dim * config.hidden


def forward_flops(config: ModelConfig, length: int) -> float:
    """One forward over one sequence: linear in its length, plus causal attention's quadratic term."""
    attention = 2 * config.layers * config.heads * config.cache_width * length * length
    return 2.0 * active_params(config) * length + attention


def head_flops(config: ModelConfig, length: int) -> float:
    """The same for all heads of a model together: a layer each, its projection, and the output head again."""
    block = _routed_params(config) if config.moe else 3 * config.hidden * config.intermediate
    params = _attention_params(config) + block + 2 * config.hidden * config.hidden + config.hidden * config.vocab_size
    attention = 2 * config.heads * config.cache_width * length * length
    return config.mtp_layers * (2.0 * params * length + attention)
