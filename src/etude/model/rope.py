"""Rotary position embedding (Su et al. 2021) in the half-split form of Llama checkpoints.

    N  tokens     H  heads     D  head dimension

Angles are float32 products of position and inverse frequency, as in `transformers`, so that a checkpoint means the
same in both. Cosines come from a table indexed by position: a token's bits depend on its position alone.

Scaled variants change the frequencies only: linear divides all of them by the factor; llama3 the slow ones, by how many waves
fit the context of pretraining, with a linear passage; yarn (Peng et al. 2023) likewise, with the passage linear in the
dimension, and multiplies cosines and sines with an amplitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.config import RopeScaling

FIRST_TABLE = 256
"""Positions of the first table; it doubles as contexts grow."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """The rotation of N tokens: cosines, and sines with the sign of the half they are multiplied into."""

    cos_N1D: Tensor
    sin_N1D: Tensor

    def __call__(self, x_NHD: Tensor) -> Tensor:
        x = x_NHD.float()
        turned = torch.addcmul(x * self.cos_N1D, x.roll(x.shape[-1] // 2, -1), self.sin_N1D)
        return turned.to(x_NHD.dtype)


class Rope:
    """Tables of cosines and sines, grown on demand."""

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self._dim, self._theta, self._scaling = dim, theta, scaling
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def at(self, positions_N: Tensor, longest: int) -> Turn:
        """The rotation at these positions, all below `longest`."""
        tables = self._tables.get(positions_N.device)
        if tables is None or tables[0].shape[0] < longest:
            size = max(FIRST_TABLE, 1 << (longest - 1).bit_length())
            tables = self._tables[positions_N.device] = self._build(size, positions_N.device)
        cos, sin = (table.index_select(0, positions_N).unsqueeze(1) for table in tables)
        return Turn(cos_N1D=cos, sin_N1D=sin)

    @torch.inference_mode(False)
    def _build(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        inverse = frequencies(self._dim, self._theta, self._scaling)
        amplitude = self._scaling.amplitude if self._scaling else 1.0
        angles = torch.outer(torch.arange(size, dtype=torch.float32), inverse).double()
        cos, sin = (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()
        return torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device)


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """float32 [dim / 2] angle a position turns each pair by."""
    period = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / period
    if scaling is None:
        return plain
    stretched = 1.0 / (scaling.factor * period)
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "llama3":
        waves = scaling.original_positions / (2 * math.pi * period)
        kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = _yarn_range(dim, theta, scaling)
        kept = 1.0 - (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    return torch.lerp(stretched, plain, kept.clamp(0.0, 1.0))


def _yarn_range(dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Between which pairs the passage lies: where frequencies turn beta_fast and beta_slow times in the original context."""

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return first, last if last != first else first + 0.001
