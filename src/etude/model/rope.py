"""Rotary position embedding (Su et al. 2021) in the half-split form of Llama checkpoints.

    N  tokens     H  heads     D  head dimension

Angles are float32 products of position and inverse frequency, as in `transformers`, so that a checkpoint means the
same in both. Cosines come from a table indexed by position: a token's bits depend on its position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def __init__(self, head_dim: int, theta: float) -> None:
        self._head_dim = head_dim
        self._theta = theta
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
        even = torch.arange(0, self._head_dim, 2, dtype=torch.float32)
        inverse = 1.0 / self._theta ** (even / self._head_dim)
        angles = torch.outer(torch.arange(size, dtype=torch.float32), inverse).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device)
