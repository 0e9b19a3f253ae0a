"""Architectures on disk: each family module translates config.json and parameter names, and nothing else.

from_hf(data) -> ModelConfig      what config.json says, or a CheckpointError that names what is not supported
to_hf(config) -> dict             config.json fields, without token ids and dtype
disk_names(name, config) -> list  checkpoint tensors behind one parameter; several are its slices along the first axis
unused(names, config) -> set      tensors a checkpoint of the family may carry that no decoder holds

Heads that predict further tokens are layers behind the last one in every family, counted by `num_nextn_predict_layers` (so in
DeepSeek-V3 and those that followed it). Such a layer may carry copies of the embedding and of the output head.

A field that `from_hf` did not read and that is not known to be without effect is refused, so no module lists what it ignores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from etude.errors import CheckpointError, nearest
from etude.model.config import ModelConfig
from etude.model.families import deepseek_v3, llama, qwen2_moe, qwen3, qwen3_moe
from etude.model.families.fields import Fields

PREFIX = "mtp."
"""How the names of the heads' parameters begin in a decoder."""

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
}
"""Hugging Face `model_type`, which is also `ModelConfig.family` -> family module."""


def family(config: ModelConfig) -> ModuleType:
    return FAMILIES[config.family]


def disk_names(name: str, config: ModelConfig) -> list[str]:
    """Checkpoint tensors behind a parameter of the decoder: itself, or one for each of its slices."""
    if name.startswith(PREFIX):
        head, _, rest = name.removeprefix(PREFIX).partition(".")
        name = f"layers.{config.layers + int(head)}.{rest}"
    names: list[str] = family(config).disk_names(name, config)
    return names


def copies(config: ModelConfig) -> dict[str, str]:
    """Tensors a head's layer may carry twice -> the tensor each must equal."""
    out = {}
    for layer in range(config.layers, config.layers + config.mtp_layers):
        out[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        out[f"model.layers.{layer}.shared_head.head.weight"] = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return out


def without_absent_heads(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """The config of what is there: checkpoints from which the heads were taken often still count them."""
    first = f"model.layers.{config.layers}."
    if config.mtp_layers and not any(name.startswith(first) for name in names):
        return dataclasses.replace(config, mtp_layers=0)
    return config


def config_from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig a parsed config.json describes."""
    fields = Fields(data)
    model_type = str(fields.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(f"config.json has model_type {model_type!r}, which etude cannot run; {nearest(model_type, FAMILIES)}")
    config: ModelConfig = FAMILIES[model_type].from_hf(fields)
    fields.refuse_unread()
    return config
