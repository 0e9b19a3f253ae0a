"""AdamW in float32 over a dictionary of named tensors (Loshchilov and Hutter, arXiv 1711.05101).

    p <- p * (1 - lr * weight_decay)
    m <- b1 * m + (1 - b1) * g            v <- b2 * v + (1 - b2) * g * g
    p <- p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Invariants: the order of operations is fixed, so the same gradients give the same bits; parameters without a
gradient count as having a zero gradient (an expert nobody was routed to decays like all others). Only tensors of two
or more dimensions decay: norms and biases do not. State lives in float32 whatever the parameter's type.
The slow twin is `reference.adamw` (float64); the tests also hold it against `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.errors import CheckpointError


class AdamW:
    """One group of tensors, one step size given at each step."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.params = dict(params)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.steps = 0
        self.mean = {n: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for n, p in self.params.items()}
        self.square = {n: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for n, p in self.params.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients that lie in `.grad`."""
        if not self.params:
            return
        self.steps += 1
        b1, b2 = self.betas
        params = list(self.params.values())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        grads = [g if g.dtype == torch.float32 else g.float() for g in grads]
        means, squares = list(self.mean.values()), list(self.square.values())
        decayed = [p for p in params if p.ndim >= 2]
        if self.weight_decay and decayed:
            torch._foreach_mul_(decayed, 1 - lr * self.weight_decay)
        torch._foreach_lerp_(means, grads, 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - b2**self.steps) ** 0.5)
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_addcdiv_(params, means, denominators, -lr / (1 - b1**self.steps))

    def state_dict(self) -> dict[str, Tensor]:
        """Flat {key: tensor}; what a distributed checkpoint stores."""
        out: dict[str, Tensor] = {"adamw.steps": torch.tensor(self.steps)}
        out |= {f"adamw.mean.{n}": t for n, t in self.mean.items()}
        out |= {f"adamw.square.{n}": t for n, t in self.square.items()}
        return out

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(take(state, "adamw.steps"))
        for name in self.params:
            self.mean[name].copy_(take(state, f"adamw.mean.{name}"))
            self.square[name].copy_(take(state, f"adamw.square.{name}"))


def take(state: Mapping[str, Tensor], key: str) -> Tensor:
    """A tensor of an optimizer's stored state, or an error that names what is missing."""
    if key not in state:
        raise CheckpointError(f"the optimizer state has no {key!r}; the checkpoint is of another model or another optimizer")
    return state[key]
