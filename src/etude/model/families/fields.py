"""What the families' config.json have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.errors import CheckpointError
from etude.model.config import ModelConfig


def required(data: Mapping[str, Any], key: str) -> Any:
    if data.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}; it is needed to build a {data.get('model_type')!r} model")
    return data[key]


def refuse(data: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Stop at a field whose value would change the computation in a way that is not implemented."""
    if data.get(key) not in (None, *allowed):
        raise CheckpointError(f"config.json has {key} = {data[key]!r}, which is not implemented; etude runs {allowed[0]!r}")


def rope_theta(data: Mapping[str, Any]) -> float:
    """The rotary base, from `rope_theta` (transformers 4) or `rope_parameters` (transformers 5). Scaled variants are refused."""
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"config.json asks for rotary scaling {kind!r}, which is not implemented; etude runs 'default'")
    if parameters.get("partial_rotary_factor", data.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise CheckpointError("config.json asks for a partial rotary embedding, which is not implemented; etude turns whole heads")
    return float(parameters.get("rope_theta") or data.get("rope_theta") or 10_000.0)


def common_from_hf(data: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig fields that every family names alike."""
    refuse(data, "hidden_act", "silu")
    heads = required(data, "num_attention_heads")
    hidden = required(data, "hidden_size")
    return {
        "vocab_size": required(data, "vocab_size"),
        "hidden": hidden,
        "layers": required(data, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or hidden // heads,
        "rope_theta": rope_theta(data),
        "norm_eps": float(data.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(data.get("tie_word_embeddings", False)),
        "max_positions": int(data.get("max_position_embeddings", 2048)),
    }


def common_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_dropout": 0.0,
    }


def plain_name(name: str) -> str:
    """Checkpoint name of a parameter that is stored as it is."""
    return name if name.startswith("lm_head.") else f"model.{name}"
