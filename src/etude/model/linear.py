"""Matmul, norm and row padding whose bits do not depend on what else is in the batch.

    N  rows (tokens)     I, O  input and output width

A matmul library picks its kernel by the number of rows, and another kernel adds in another order. Measured on
CPU (MKL float32, oneDNN bfloat16, 1 and 2 threads, 15 shapes; part of it is repeated by tests/model/test_invariance.py):
of 1 to 200 unpadded float32 rows, 1, 2, 3, 5, 6, ... differ; with the number of rows a multiple of 16 every row has
the same bits at any number of rows up to 4,096, at any place, and in a batched matmul too. The one exception found is a
bfloat16 batched matmul of 16 x 16 x 16 and less, which takes another kernel; widths of 32 and up avoid it.

In fast mode, large float32 products go to oneDNN instead of MKL: on an AMD CPU with AVX-512 it ran 512 to 4,096 rows at
twice the speed of MKL, and a training step in 0.7 of the time; at 32 rows they are equal, at 8 it is slower. Where torch has no
oneDNN, or the operator is absent, `matmul` is torch's own linear.

So in `numerics = "invariant"` the decoder pads its token list once, here, and every tokenwise operation after it sees
a multiple of ROWS rows. Elementwise operations rely on the same padding: their vector loop and its scalar tail round
`exp` differently, and a multiple of 16 rows of at least 4 numbers leaves no tail (`sigmoid_column` is for rows of one).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

ROWS = 16
"""Every matmul of the invariant mode has a multiple of this many rows."""
ONEDNN_ROWS = 128
"""Rows from which a fast float32 product goes to oneDNN."""
PACKED_ROWS = 512
"""Rows that packed weights are laid out for. Other numbers use the same layout and are quick too: of layouts for 1, 32 and 512 rows, tried
at 1 to 256 rows, this was the best or within noise of it."""
SAME_ROWS = 64
"""On CPU, row counts past ONEDNN_ROWS are rounded up to a multiple of this in fast mode too: oneDNN makes code for every shape it has
not seen, about 1 ms each, and packed rows and experts would show it new ones forever (half of a bfloat16 training step)."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def padded_rows(n: int, *, invariant: bool, device: torch.device) -> int:
    """How many rows `n` of them are computed as."""
    if invariant:
        return round_up(n, ROWS)
    return round_up(n, SAME_ROWS) if n > ONEDNN_ROWS and device.type == "cpu" else n


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows appended up to `rows`."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def sigmoid_column(x_N1: Tensor) -> Tensor:
    """Sigmoid of one number a row, taken on two columns: 16 numbers alone would all be tail, 32 are one vector loop."""
    return torch.sigmoid(x_N1.expand(-1, 2).contiguous())[:, :1]


def matmul(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, invariant: bool) -> Tensor:
    """x @ weight.T + bias, by the quickest kernel or by the one whose bits do not depend on the number of rows."""
    if invariant or x_NI.shape[0] < ONEDNN_ROWS or torch.is_autocast_enabled("cpu") or not _onednn_takes(x_NI, weight_OI):
        return F.linear(x_NI, weight_OI, bias_O)
    if torch.is_grad_enabled():
        product: Tensor = _OneDNN.apply(x_NI, weight_OI, bias_O)
        return product
    return _onednn(x_NI, weight_OI, bias_O)


def _onednn_takes(x: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # a sharded or wrapped weight has kernels of its own
    return plain and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and _has_onednn()


@functools.cache
def _has_onednn() -> bool:
    """Whether torch was built with the operator; it is the one torch's own compiler emits for linear layers on CPU."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class _OneDNN(torch.autograd.Function):
    """The operator has no derivative of its own; all three products of a linear layer are products of the same form."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t()) if need_x else None,
            _onednn(grad.t(), x.t()) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


class Linear(nn.Module):
    """x_NI @ weight_OI.T + bias_O; uninitialised until the decoder fills it."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x_NI: Tensor) -> Tensor:
        return matmul(x_NI, self.weight, self.bias, invariant=self.invariant)

    def float32(self, x_NI: Tensor) -> Tensor:
        """The same product in float32, for the few outputs where a rounded one changes a choice (router, gates)."""
        return F.linear(x_NI.float(), self.weight.float())


class Packed:
    """Products with the same rows as one, its weights laid out once for oneDNN. For an engine on a CPU: no autograd, not invariant.

    Measured on one core of an AMD CPU with AVX-512 (SmolLM2's shapes; CPU time): at 32 rows 136 GFLOP/s in float32 and 250 to 300 in
    bfloat16, where torch's linear has 57 to 72 and 210 to 240; at one row, which reading the weights bounds, 21 to 25 and 20 to 27 GB/s
    instead of 16 and 12 to 15. It costs a second copy of the weights. They are laid out again when a parameter has changed in place
    since (torch counts that), and by `lay_out`, for changes that torch cannot see.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(weights)), "all have a bias, or none"
        self._weights, self._biases = list(weights), given
        self._widths = [weight.shape[0] for weight in weights]
        self.lay_out()

    def lay_out(self) -> None:
        whole = torch.cat([weight.detach() for weight in self._weights])
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole, PACKED_ROWS)
        self._bias = torch.cat([bias.detach() for bias in self._biases]) if self._biases else None
        self._made_of = self._state()

    def _state(self) -> list[tuple[int, int]]:
        return [(part.data_ptr(), part._version) for part in (*self._weights, *self._biases)]

    def __call__(self, x_NI: Tensor) -> tuple[Tensor, ...]:
        if self._state() != self._made_of:
            self.lay_out()
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias, "none", [], "")
        return product.split(self._widths, -1) if len(self._widths) > 1 else (product,)


def pack(*parts: Linear) -> Packed | None:
    """The parts as one packed product; None where they must stay as they are: not on a CPU, no oneDNN, of another type."""
    weights = [part.weight for part in parts]
    return Packed(weights, [part.bias for part in parts]) if packable(*weights) else None


def packable(*weights: Tensor) -> bool:
    return _has_onednn() and all(
        type(w) in (Tensor, nn.Parameter) and w.device.type == "cpu" and w.dtype in (torch.float32, torch.bfloat16) for w in weights
    )


def together(packed: Packed | None, parts: tuple[Linear, ...], x_NI: Tensor) -> tuple[Tensor, ...]:
    """Each part's product with the same rows: by one packed product where there is one and no gradient is wanted."""
    if packed is not None and not torch.is_grad_enabled():
        return packed(x_NI)
    return tuple(part(x_NI) for part in parts)


def bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 natively."""
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(test is not None and test() for test in tests)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32. Under autocast its output is cast here, once for all that read it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_NI: Tensor) -> Tensor:
        x = x_NI.float()
        scale_N1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        out_NI = (x * scale_N1).to(x_NI.dtype) * self.weight
        kind = x_NI.device.type
        return out_NI.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out_NI


class MLP(nn.Module):
    """Gated feed-forward part: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, invariant: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, invariant=invariant)
        self.up_proj = Linear(hidden, intermediate, invariant=invariant)
        self.down_proj = Linear(intermediate, hidden, invariant=invariant)
        self.packed: list[Packed | None] = [None, None]

    def pack(self) -> list[Packed | None]:
        self.packed = [pack(self.gate_proj, self.up_proj), pack(self.down_proj)]
        return self.packed

    def forward(self, x_NI: Tensor) -> Tensor:
        gate_NF, up_NF = together(self.packed[0], (self.gate_proj, self.up_proj), x_NI)
        return together(self.packed[1], (self.down_proj,), F.silu(gate_NF) * up_NF)[0]
