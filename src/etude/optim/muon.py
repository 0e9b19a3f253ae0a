"""Muon on one rank: momentum, then every matrix pulled towards the nearest semi-orthogonal one (Jordan et al., 2024).

    M <- mu * M + G                U = G + mu * M             (Nesterov)
    X = U / |U|                    five times: A = X X^T, X <- a X + (b A + c A A) X       (X wide: transposed when tall)
    W <- W * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(rows, cols)) * X

The factor 0.2 * sqrt(max(rows, cols)) gives the update the root mean square of a typical AdamW update, so AdamW's
learning rate and weight decay carry over (Liu et al., arXiv 2502.16982). The constants (a, b, c) are Jordan's: they do
not converge to 1 but keep singular values between about 0.68 and 1.13, which costs nothing and needs only five steps.

Granularity. The iteration runs on the matrices a layer really has: one for each attention head, one for each expert. `GRANULARITY`
says it once, by parameter name; `views` cuts a tensor accordingly. Embeddings, head, norms and biases are not matrices in this
sense and stay on AdamW (`matrices` decides). Matrices of one shape are stacked and run as one batch.

Shape letters: B matrices of a batch, R rows, C columns. The float64 twin is `reference.muon`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.optim.adamw import take

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a tensor whose name matches `pattern` is cut into matrices."""

    pattern: str
    axis: int | None = None
    """Axis of a 2-dimensional tensor that holds the heads one after the other; None: not cut."""
    count: str = ""
    """Name of the model's fact that says how many heads: heads | kv_heads."""


GRANULARITY: tuple[Cut, ...] = (
    Cut(pattern="*q_proj.weight", axis=0, count="heads"),
    Cut(pattern="*q_b_proj.weight", axis=0, count="heads"),
    Cut(pattern="*kv_b_proj.weight", axis=0, count="heads"),
    Cut(pattern="*k_proj.weight", axis=0, count="kv_heads"),
    Cut(pattern="*v_proj.weight", axis=0, count="kv_heads"),
    Cut(pattern="*o_proj.weight", axis=1, count="heads"),
    Cut(pattern="*"),
)
"""First match wins. Tensors of three dimensions (stacked experts) are a batch of matrices by their shape alone."""

ON_ADAMW: tuple[str, ...] = ("*embed*", "*lm_head*", "*norm*", "*bias*")
"""Names that stay on AdamW whatever their shape."""


def matrices(name: str, tensor: Tensor) -> bool:
    """Whether Muon trains this tensor. A single row or column (a gate) is a vector, which has no singular values to even out."""
    return tensor.ndim in (2, 3) and min(tensor.shape[-2:]) > 1 and not any(fnmatch.fnmatch(name, p) for p in ON_ADAMW)


def views(name: str, tensor: Tensor, counts: Mapping[str, int]) -> Tensor:
    """The matrices of a tensor as (B, R, C); a view, so writing to it writes to the tensor."""
    if tensor.ndim == 3:
        return tensor
    cut = next(c for c in GRANULARITY if fnmatch.fnmatch(name, c.pattern))
    if cut.axis is None:
        return tensor.unsqueeze(0)
    heads, (rows, cols) = counts[cut.count], tensor.shape
    if cut.axis == 0:
        return tensor.view(heads, rows // heads, cols)
    return tensor.view(rows, heads, cols // heads).transpose(0, 1)


def newton_schulz(u_BRC: Tensor, *, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Each matrix with its singular values moved to about 1; a zero matrix stays zero. The result is float32."""
    a, b, c = COEFFICIENTS
    x = u_BRC.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-12)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(torch.float32)


def update_scale(rows: int, cols: int) -> float:
    return 0.2 * max(rows, cols) ** 0.5


class Muon:
    """Muon over named matrices. `counts` holds the model's facts that `GRANULARITY` names (heads, kv_heads)."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        counts: Mapping[str, int],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.params, self.counts = dict(params), dict(counts)
        self.momentum, self.weight_decay, self.dtype = momentum, weight_decay, dtype
        self.buffers = {n: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for n, p in self.params.items()}
        self._shapes = self._by_shape()

    def _by_shape(self) -> dict[tuple[int, int], list[str]]:
        """Matrix shape -> names of the tensors that hold such matrices, in the order of the parameters."""
        out: dict[tuple[int, int], list[str]] = {}
        for name, param in self.params.items():
            _, rows, cols = views(name, param, self.counts).shape
            out.setdefault((rows, cols), []).append(name)
        return out

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients that lie in `.grad`."""
        if not self.params:
            return
        buffers, params = list(self.buffers.values()), list(self.params.values())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        grads = [g if g.dtype == torch.float32 else g.float() for g in grads]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, grads)
        if self.weight_decay:
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        directions = dict(zip(self.params, torch._foreach_add(grads, buffers, alpha=self.momentum)))
        for (rows, cols), names in self._shapes.items():
            parts = [views(n, directions[n], self.counts) for n in names]
            update_BRC = newton_schulz(torch.cat(parts), dtype=self.dtype)
            for name, piece in zip(names, update_BRC.split([p.shape[0] for p in parts])):
                views(name, self.params[name], self.counts).add_(piece, alpha=-lr * update_scale(rows, cols))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"muon.momentum.{n}": t for n, t in self.buffers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(take(state, f"muon.momentum.{name}"))
