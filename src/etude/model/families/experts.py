"""What the families with experts have in common on disk: every expert's projection is a tensor of its own, stacked in memory."""

from __future__ import annotations

from etude.model.config import ModelConfig
from etude.model.families.fields import plain_name

STACKED = ".mlp.experts."


def expert_names(name: str, config: ModelConfig) -> list[str]:
    """Checkpoint tensors behind a parameter: one, or one an expert."""
    if STACKED not in name:
        return [plain_name(name)]
    layer, projection = name.split(STACKED)
    return [f"model.{layer}{STACKED}{expert}.{projection}.weight" for expert in range(config.experts)]
