"""Matmul, norm and row padding whose bits do not depend on what else is in the batch.

    N  rows (tokens)     I, O  input and output width

A matmul library picks its kernel by the number of rows, and another kernel adds in another order. Measured on
CPU (MKL float32, oneDNN bfloat16, 1 and 2 threads, 1 to 200 rows and 15 shapes, tests/model/test_invariance.py):
unpadded float32 rows differ at 1, 2, 3, 5, 6, ... rows; with the number of rows a multiple of 16 every row has the
same bits at any number of rows up to 4,096, at any place, and in a batched matmul too. The one exception found is a
bfloat16 batched matmul of 16 x 16 x 16 and less, which takes another kernel; widths of 32 and up avoid it.

So in `numerics = "invariant"` the decoder pads its token list once, here, and every tokenwise operation after it sees
a multiple of ROWS rows. Elementwise operations rely on the same padding: their vector loop and its scalar tail round
`exp` differently, and a multiple of 16 rows of at least 4 numbers leaves no tail (`sigmoid_column` is for rows of one).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16
"""Every matmul of the invariant mode has a multiple of this many rows."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows appended up to `rows`."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def sigmoid_column(x_N1: Tensor) -> Tensor:
    """Sigmoid of one number a row, taken on two columns: 16 numbers alone would all be tail, 32 are one vector loop."""
    return torch.sigmoid(x_N1.expand(-1, 2).contiguous())[:, :1]


class Linear(nn.Module):
    """x_NI @ weight_OI.T + bias_O; uninitialised until the decoder fills it."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight, self.bias)

    def float32(self, x_NI: Tensor) -> Tensor:
        """The same product in float32, for the few outputs where a rounded one changes a choice (router, gates)."""
        return F.linear(x_NI.float(), self.weight.float())


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_NI: Tensor) -> Tensor:
        x = x_NI.float()
        scale_N1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale_N1).to(x_NI.dtype) * self.weight


class MLP(nn.Module):
    """Gated feed-forward part: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x_NI: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_NI)) * self.up_proj(x_NI))
