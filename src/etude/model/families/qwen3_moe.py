"""Qwen3 mixtures of experts: a softmax router, no shared expert, normed queries and keys: `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.model.config import ModelConfig
from etude.model.families.experts import expert_names
from etude.model.families.fields import common_from_hf, common_to_hf, no_unused, refuse, required

disk_names, unused = expert_names, no_unused


def from_hf(data: Mapping[str, Any]) -> ModelConfig:
    refuse(data, "attention_bias", False)
    refuse(data, "use_sliding_window", False)
    refuse(data, "decoder_sparse_step", 1)
    refuse(data, "mlp_only_layers", [])
    return ModelConfig(
        family="qwen3_moe",
        intermediate=int(data.get("intermediate_size") or 0),
        experts=required(data, "num_experts", "num_local_experts"),
        experts_per_token=required(data, "num_experts_per_tok"),
        expert_intermediate=required(data, "moe_intermediate_size"),
        norm_topk=bool(data.get("norm_topk_prob", False)),
        balance_weight=float(data.get("router_aux_loss_coef", 0.001)),
        **common_from_hf(data),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **common_to_hf(config),
        "intermediate_size": config.intermediate,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate,
        "norm_topk_prob": config.norm_topk,
        "router_aux_loss_coef": config.balance_weight,
        "output_router_logits": False,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }
