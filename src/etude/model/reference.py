"""The slow twin of the decoder: one sequence at a time, whole attention matrices, every expert on every token, no cache.

    T  tokens     H  heads     D  head dimension     E  experts     K  experts per token

It reads the weights of a `Decoder` and shares none of its code paths: tests compare logits and gradients. Written to be
checked by eye against the papers, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.model.transformer import Decoder


def reference_logits(model: Decoder, ids_T: Tensor, routes_TLK: Tensor | None = None) -> Tensor:
    """float32 logits [T, V] of one whole sequence, differentiable with respect to the model's parameters."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    x = weights["embed_tokens.weight"][ids_T]
    for layer in range(model.config.layers):
        w = {name.removeprefix(f"layers.{layer}."): p for name, p in weights.items() if name.startswith(f"layers.{layer}.")}
        x = x + _attention(model, w, _norm(model, x, w["input_layernorm.weight"]))
        h = _norm(model, x, w["post_attention_layernorm.weight"])
        routes = None if routes_TLK is None else routes_TLK[:, layer].long()
        x = x + (_moe(model, w, h, routes) if model.config.moe else _mlp(h, w, "mlp."))
    x = _norm(model, x, weights["norm.weight"])
    head = weights["embed_tokens.weight"] if model.config.tie_embeddings else weights["lm_head.weight"]
    return (x @ head.T).float()


def _norm(model: Decoder, x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True) + model.config.norm_eps).sqrt()).to(x.dtype) * weight


def _rotate(model: Decoder, x_THD: Tensor) -> Tensor:
    """Each pair (i, i + D/2) of a head turned by position * theta^(-2i/D), written as a complex product."""
    length, _, dim = x_THD.shape
    inverse = 1.0 / model.config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    first, second = x_THD.float().chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1).to(x_THD.dtype)


def _attention(model: Decoder, w: dict[str, Tensor], x: Tensor) -> Tensor:
    config, length = model.config, x.shape[0]

    def project(name: str, heads: int) -> Tensor:
        y = x @ w[f"self_attn.{name}.weight"].T + w.get(f"self_attn.{name}.bias", 0)
        return y.view(length, heads, config.head_dim)

    q = _rotate(model, project("q_proj", config.heads)).float()
    k = _rotate(model, project("k_proj", config.kv_heads)).float().repeat_interleave(config.group, 1)
    v = project("v_proj", config.kv_heads).float().repeat_interleave(config.group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(x.dtype)
    return out.reshape(length, -1) @ w["self_attn.o_proj.weight"].T


def _mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(model: Decoder, w: dict[str, Tensor], x: Tensor, routes_TK: Tensor | None) -> Tensor:
    config = model.config
    probs_TE = (x.float() @ w["mlp.gate.weight"].float().T).softmax(-1)
    chosen_TK = probs_TE.topk(config.experts_per_token, -1).indices if routes_TK is None else routes_TK
    used_TE = torch.zeros_like(probs_TE).scatter(1, chosen_TK, 1.0)
    gates_TE = probs_TE * used_TE
    if config.norm_topk:
        gates_TE = gates_TE / gates_TE.sum(-1, keepdim=True)
    shared = _mlp(x, w, "mlp.shared_expert.") * torch.sigmoid(x.float() @ w["mlp.shared_expert_gate.weight"].float().T)
    for e in range(config.experts):
        expert = {f"{n}_proj.weight": w[f"mlp.experts.{n}_proj"][e] for n in ("gate", "up", "down")}
        shared = shared + gates_TE[:, e : e + 1] * _mlp(x, expert, "")
    return shared.to(x.dtype)
