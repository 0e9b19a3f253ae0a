"""A small model that is trained a little, and its publisher."""

import pytest
import torch

from etude.records import Version
from etude.sync.publish import weights_hash


class Model:
    """A state dict with every awkward kind of tensor, changed sparsely by `step`."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.ordinal = 0
        self.state = {
            "embed.weight": torch.randn(40, 16, generator=self.generator).to(dtype),
            "layers.0.w": torch.randn(16, 48, generator=self.generator).to(dtype),
            "layers.0.norm": torch.ones(16, dtype=torch.float32),
            "scale": torch.tensor(1.0),
            "empty": torch.empty(0, 4),
            "steps": torch.tensor([0], dtype=torch.int64),
        }
        self.state["layers.0.w"][0, 0] = float("nan")

    def step(self) -> None:
        self.ordinal += 1
        self.state["steps"] += 1
        weight = self.state["layers.0.w"].view(-1)
        index = torch.randperm(weight.numel(), generator=self.generator)[:5]
        weight[index] += 0.5
        if self.ordinal % 3 == 0:
            self.state["layers.0.norm"] *= 1.01

    def version(self, lineage: int = 0) -> Version:
        return Version(lineage=lineage, ordinal=self.ordinal, hash=weights_hash(self.state))

    def blank(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(t) for name, t in self.state.items()}


@pytest.fixture
def model():
    return Model()
