"""From a config and a model's parameters to the optimizer that trains them.

`Optimizer` joins Muon for the matrices with AdamW for everything else (embeddings, head, norms, biases), or is AdamW alone.
Both share one learning rate: Muon's update is scaled so that AdamW's settings carry over (see `muon`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from etude.optim.adamw import AdamW
from etude.optim.config import OptimConfig
from etude.optim.muon import Muon, matrices


class Optimizer:
    """Muon and AdamW over one set of named tensors; what the trainers hold."""

    def __init__(self, params: Mapping[str, Tensor], counts: Mapping[str, int], config: OptimConfig) -> None:
        on_muon = {n: p for n, p in params.items() if config.kind == "muon" and matrices(n, p)}
        rest = {n: p for n, p in params.items() if n not in on_muon}
        self.params = dict(params)
        self.kind = config.kind
        self.adamw = AdamW(rest, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay)
        self.muon = Muon(
            on_muon,
            counts,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            dtype=getattr(torch, config.newton_schulz_dtype),
        )

    def step(self, lr: float) -> None:
        self.muon.step(lr)
        self.adamw.step(lr)

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        return self.adamw.state_dict() | self.muon.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adamw.load_state_dict(state)
        self.muon.load_state_dict(state)


def clip_gradients(params: Mapping[str, Tensor], limit: float) -> float:
    """Scale all gradients so that their global norm is at most `limit` (0: leave them); returns the norm before."""
    grads = [p.grad for p in params.values() if p.grad is not None]
    if not grads:
        return 0.0
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))).item()
    if limit and norm > limit:
        torch._foreach_mul_(grads, limit / norm)
    return norm


def build_optimizer(model: nn.Module, config: OptimConfig, params: Mapping[str, Tensor] | None = None) -> Optimizer:
    """The optimizer for `model`; `params` are its master weights where those differ from the model's own parameters.

    A model with attention says `model.config.heads` and `model.config.kv_heads`.
    """
    counts = {name: int(getattr(model.config, name)) for name in ("heads", "kv_heads")}
    return Optimizer(params if params is not None else dict(model.named_parameters()), counts, config)
