"""DeepSeek-V3 and what is built like it (Kimi-K2): latent attention, sigmoid router with groups: `DeepseekV3ForCausalLM`.

Layers for predicting several tokens (mtp.py) that a checkpoint carries and its config.json does not count are left out: a folder saved
again has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etude.errors import CheckpointError
from etude.model.config import Latent, ModelConfig
from etude.model.families.experts import expert_names
from etude.model.families.fields import common_from_hf, common_to_hf, refuse, required

SHARED = (".mlp.shared_expert.", ".mlp.shared_experts.")
"""In memory and on disk: the shared experts of a layer lie side by side in one."""
PREDICTS = ".eh_proj.weight"
"""Only layers for predicting several tokens have it."""


def from_hf(data: Mapping[str, Any]) -> ModelConfig:
    refuse(data, "attention_bias", False)
    refuse(data, "moe_layer_freq", 1)
    refuse(data, "scoring_func", "sigmoid")
    refuse(data, "topk_method", "noaux_tc")
    data.get("num_mtp_layers")
    latent = Latent(
        kv_rank=required(data, "kv_lora_rank"),
        q_rank=data.get("q_lora_rank") or 0,
        nope_dim=required(data, "qk_nope_head_dim"),
        rope_dim=required(data, "qk_rope_head_dim"),
        value_dim=required(data, "v_head_dim"),
        interleaved=bool(data.get("rope_interleave", True)),
    )
    refuse(data, "head_dim", latent.rope_dim)
    refuse(data, "qk_head_dim", latent.nope_dim + latent.rope_dim)
    wide = required(data, "moe_intermediate_size")
    return ModelConfig(
        family="deepseek_v3",
        latent=latent,
        intermediate=int(data.get("intermediate_size") or 0),
        experts=required(data, "n_routed_experts", "num_local_experts"),
        experts_per_token=required(data, "num_experts_per_tok"),
        expert_intermediate=wide,
        shared_intermediate=wide * required(data, "n_shared_experts"),
        dense_layers=required(data, "first_k_dense_replace"),
        route_groups=data.get("n_group") or 1,
        route_groups_kept=data.get("topk_group") or 1,
        route_scale=float(required(data, "routed_scaling_factor")),
        norm_topk=bool(data.get("norm_topk_prob", True)),
        balance_weight=float(data.get("aux_loss_alpha", 0.001)),
        **{**common_from_hf(data), "head_dim": latent.nope_dim + latent.rope_dim},
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    if latent is None:
        raise CheckpointError("a deepseek_v3 model without model.latent cannot be written; give the shape of its latents")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        **common_to_hf(config),
        "head_dim": latent.rope_dim,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
        "intermediate_size": config.intermediate,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate,
        "n_shared_experts": config.shared_intermediate // config.expert_intermediate,
        "first_k_dense_replace": config.dense_layers,
        "n_group": config.route_groups,
        "topk_group": config.route_groups_kept,
        "routed_scaling_factor": config.route_scale,
        "norm_topk_prob": config.norm_topk,
        "aux_loss_alpha": config.balance_weight,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": config.mtp_layers,
        "attention_bias": False,
    }


def disk_names(name: str, config: ModelConfig) -> list[str]:
    return expert_names(name.replace(*SHARED), config)


def unused(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Tensors of the layers behind the last one that say by their own tensors what they are for."""
    extra = {name.removesuffix(PREDICTS) for name in names if name.endswith(PREDICTS)}
    behind = {prefix for prefix in extra if int(prefix.rpartition(".")[2]) >= config.layers + config.mtp_layers}
    return {name for name in names if any(name.startswith(f"{prefix}.") for prefix in behind)}
