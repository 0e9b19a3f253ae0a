"""Architectures on disk: each family module translates config.json and parameter names, and nothing else.

from_hf(data) -> ModelConfig      what config.json says, or a CheckpointError that names what is not supported
to_hf(config) -> dict             config.json fields, without token ids and dtype
disk_names(name, config) -> list  checkpoint tensors behind one parameter; several are its slices along the first axis
unused(names, config) -> set      tensors a checkpoint of the family may carry that no decoder holds

A field that `from_hf` did not read and that is not known to be without effect is refused, so no module lists what it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from etude.errors import CheckpointError, nearest
from etude.model.config import ModelConfig
from etude.model.families import deepseek_v3, llama, qwen2_moe, qwen3, qwen3_moe
from etude.model.families.fields import Fields

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


def config_from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig a parsed config.json describes."""
    fields = Fields(data)
    model_type = str(fields.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(f"config.json has model_type {model_type!r}, which etude cannot run; {nearest(model_type, FAMILIES)}")
    config: ModelConfig = FAMILIES[model_type].from_hf(fields)
    fields.refuse_unread()
    return config
