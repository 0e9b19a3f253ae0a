"""The slow twin of the decoder: one sequence at a time, whole attention matrices, every expert on every token, no cache.
Latent attention expands its keys and values here.

    T  tokens     H  heads     D  head dimension     E  experts     K  experts per token

It reads the weights of a `Decoder` and shares none of its code paths but the rotary frequencies, which are held against
`transformers`: tests compare logits and gradients. Written to be checked by eye against the papers, not to be fast.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.model.latent import NORM_EPS
from etude.model.rope import frequencies
from etude.model.transformer import Decoder


def reference_logits(model: Decoder, ids_T: Tensor, routes_TLK: Tensor | None = None) -> Tensor:
    """float32 logits [T, V] of one whole sequence, differentiable with respect to the model's parameters."""
    return (_hidden(model, ids_T, routes_TLK) @ _head(model).T).float()


def predicted_logits(model: Decoder, ids_T: Tensor) -> list[Tensor]:
    """float32 logits of every head k, [T - 1 - k, V]: row t is about the token at t + k + 2, from the tokens up to t + k + 1."""
    weights = dict(model.named_parameters())
    x, out = _hidden(model, ids_T, None), []
    for k in range(model.config.mtp_layers):
        w = _of(weights, f"mtp.{k}.")
        x = x[:-1]
        embedded = weights["embed_tokens.weight"][ids_T[1 + k :]]
        both = torch.cat((_norm(model, embedded, w["enorm.weight"]), _norm(model, x, w["hnorm.weight"])), -1)
        x = _block(model, w, both @ w["eh_proj.weight"].T, None, routed=model.config.moe)
        out.append((_norm(model, x, w["shared_head.norm.weight"]) @ _head(model).T).float())
    return out


def _head(model: Decoder) -> Tensor:
    weights = dict(model.named_parameters())
    return weights["embed_tokens.weight" if model.config.tie_embeddings else "lm_head.weight"]


def _of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p for name, p in weights.items() if name.startswith(prefix)}


def _hidden(model: Decoder, ids_T: Tensor, routes_TLK: Tensor | None) -> Tensor:
    weights: dict[str, Tensor] = dict(model.named_parameters())
    x = weights["embed_tokens.weight"][ids_T]
    for layer in range(model.config.layers):
        at = layer - model.config.dense_layers
        routes = None if routes_TLK is None or at < 0 else routes_TLK[:, at].long()
        x = _block(model, _of(weights, f"layers.{layer}."), x, routes, routed=model.config.moe and at >= 0)
    return _norm(model, x, weights["norm.weight"])


def _block(model: Decoder, w: dict[str, Tensor], x: Tensor, routes: Tensor | None, *, routed: bool) -> Tensor:
    attention = _latent_attention if model.config.latent else _attention
    x = x + attention(model, w, _norm(model, x, w["input_layernorm.weight"]))
    h = _norm(model, x, w["post_attention_layernorm.weight"])
    return x + (_moe(model, w, h, routes) if routed else _mlp(h, w, "mlp."))


def _norm(model: Decoder, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True) + (eps or model.config.norm_eps)).sqrt()).to(x.dtype) * weight


def _rotate(model: Decoder, x_THD: Tensor) -> Tensor:
    """Each pair (i, i + D/2) of a head turned by position times the frequency of i, written as a complex product."""
    length, _, dim = x_THD.shape
    scaling = model.config.rope_scaling
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(dim, model.config.rope_theta, scaling))
    turn = torch.polar(torch.full_like(angles, scaling.amplitude if scaling else 1.0), angles).unsqueeze(1)
    first, second = x_THD.float().chunk(2, -1)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1).to(x_THD.dtype)


def _attention(model: Decoder, w: dict[str, Tensor], x: Tensor) -> Tensor:
    config = model.config

    def project(name: str, heads: int) -> Tensor:
        y = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
        y = y.view(len(x), heads, config.head_dim)
        return _norm(model, y, w[f"self_attn.{name}_norm.weight"]) if config.qk_norm and name != "v" else y

    q = _rotate(model, project("q", config.heads))
    k = _rotate(model, project("k", config.kv_heads)).repeat_interleave(config.group, 1)
    v = project("v", config.kv_heads).repeat_interleave(config.group, 1)
    return _attend(q, k, v, config.attention_scale) @ w["self_attn.o_proj.weight"].T


def _latent_attention(model: Decoder, w: dict[str, Tensor], x: Tensor) -> Tensor:
    config, shape = model.config, model.config.latent
    assert shape is not None

    def project(name: str, y: Tensor) -> Tensor:
        return y @ w[f"self_attn.{name}.weight"].T

    def positioned(y_THR: Tensor) -> Tensor:
        return _rotate(model, torch.cat((y_THR[..., 0::2], y_THR[..., 1::2]), -1) if shape.interleaved else y_THR)

    narrow = _norm(model, project("q_a_proj", x), w["self_attn.q_a_layernorm.weight"], NORM_EPS) if shape.q_rank else x
    q = project("q_b_proj" if shape.q_rank else "q_proj", narrow).view(len(x), config.heads, config.head_dim)
    latent, k_rope = project("kv_a_proj_with_mqa", x).split([shape.kv_rank, shape.rope_dim], -1)
    latent = _norm(model, latent, w["self_attn.kv_a_layernorm.weight"], NORM_EPS)
    k_plain, v = project("kv_b_proj", latent).view(len(x), config.heads, -1).split([shape.nope_dim, shape.value_dim], -1)
    k = torch.cat((k_plain, positioned(k_rope.unsqueeze(1)).expand(-1, config.heads, -1)), -1)
    q = torch.cat((q[..., : shape.nope_dim], positioned(q[..., shape.nope_dim :])), -1)
    return _attend(q, k, v, config.attention_scale) @ w["self_attn.o_proj.weight"].T


def _attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Tensor:
    length = len(q_THD)
    scores = torch.einsum("thd,shd->hts", q_THD.float(), k_THD.float()) * scale
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD.float()).to(q_THD.dtype).reshape(length, -1)


def _mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _moe(model: Decoder, w: dict[str, Tensor], x: Tensor, routes_TK: Tensor | None) -> Tensor:
    config = model.config
    logits_TE = x.float() @ w["mlp.gate.weight"].float().T
    probs_TE = logits_TE.sigmoid() if config.sigmoid_router else logits_TE.softmax(-1)
    chosen_TK = _choice(model, w, probs_TE) if routes_TK is None else routes_TK
    used_TE = torch.zeros_like(probs_TE).scatter(1, chosen_TK, 1.0)
    gates_TE = probs_TE * used_TE
    if config.norm_topk:
        gates_TE = gates_TE / gates_TE.sum(-1, keepdim=True)
    total = _mlp(x, w, "mlp.shared_expert.") if config.shared_intermediate else torch.zeros_like(x)
    if config.shared_gate:
        total = total * torch.sigmoid(x.float() @ w["mlp.shared_expert_gate.weight"].float().T)
    for e in range(config.experts):
        expert = {f"{n}_proj.weight": w[f"mlp.experts.{n}_proj"][e] for n in ("gate", "up", "down")}
        total = total + config.route_scale * gates_TE[:, e : e + 1] * _mlp(x, expert, "")
    return total.to(x.dtype)


def _choice(model: Decoder, w: dict[str, Tensor], probs_TE: Tensor) -> Tensor:
    """One token at a time, in words: rank the groups by their two best, then the experts of the groups that are left."""
    config = model.config
    if not config.sigmoid_router:
        return probs_TE.topk(config.experts_per_token, -1).indices
    order_TE = probs_TE.detach() + w["mlp.gate.e_score_correction_bias"].float()
    each, rows = config.experts // config.route_groups, []
    for order in order_TE.tolist():
        groups = [range(g * each, (g + 1) * each) for g in range(config.route_groups)]
        groups.sort(key=lambda group: -sum(sorted(order[e] for e in group)[-2:]))
        allowed = [e for group in groups[: config.route_groups_kept] for e in group]
        rows.append(sorted(allowed, key=lambda e: (-order[e], e))[: config.experts_per_token])
    return torch.tensor(rows)
