"""Slow twins of the optimizers: one tensor, one step, float64, written straight from the equations.

Nothing here is fast and nothing is shared with the fast paths except the constants; the tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.optim.muon import COEFFICIENTS, STEPS


def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, t: int, lr: float, b1: float, b2: float, eps: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after step `t` (counted from 1)."""
    p, g, m, v = (x.double() for x in (p, g, m, v))
    p = p - lr * decay * p
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return p, m, v


def orthogonal(u: Tensor, steps: int = STEPS) -> Tensor:
    """One matrix through the Newton-Schulz iteration, by its singular values: they move, the singular vectors stay."""
    a, b, c = COEFFICIENTS
    left, s, right = torch.linalg.svd(u.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return left @ torch.diag(s) @ right


def muon(w: Tensor, g: Tensor, m: Tensor, *, lr: float, momentum: float, decay: float) -> tuple[Tensor, Tensor]:
    """(w, m) of one matrix after a step."""
    w, g, m = w.double(), g.double(), m.double()
    m = momentum * m + g
    direction = orthogonal(g + momentum * m)
    scale = 0.2 * max(w.shape) ** 0.5
    return w - lr * decay * w - lr * scale * direction, m
