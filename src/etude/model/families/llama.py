"""Llama-family dense decoders (Llama, SmolLM2): `LlamaForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.model.config import ModelConfig
from etude.model.families.fields import common_from_hf, common_to_hf, no_unused, plain_name, refuse, required

unused = no_unused


def from_hf(data: Mapping[str, Any]) -> ModelConfig:
    refuse(data, "attention_bias", False)
    refuse(data, "mlp_bias", False)
    refuse(data, "rope_interleaved", False)
    return ModelConfig(family="llama", intermediate=required(data, "intermediate_size"), **common_from_hf(data))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **common_to_hf(config),
        "intermediate_size": config.intermediate,
        "attention_bias": False,
        "mlp_bias": False,
    }


def disk_names(name: str, config: ModelConfig) -> list[str]:
    return [plain_name(name)]
