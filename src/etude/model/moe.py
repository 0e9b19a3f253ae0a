"""Mixture of experts: a router that returns and replays its choices, and experts stored stacked.

    N  tokens     I  hidden width (in)     E  experts     K  experts per token
    A  assignments, N * K                  C  rows of the fullest expert      G  groups of experts

Choices: the K largest router logits, ties to the lower expert, best first; the order is part of a route, since it is
the order in which outputs are added. Replay (facts M29): the recorded experts are used, their gates are recomputed
from this router, so gradients reach it; a row marked absent keeps the router's own choice. A filter (`RouteFilter`)
may refuse recorded experts that this router finds implausible: each gives its place in the route to the best of the
router's own candidates that is not in the route yet. Gates are made over the final set exactly as without replay:
gathered from all experts' scores, divided by their sum over the final set with `norm_topk` and left alone without
it, then multiplied with `route_scale`.

Sigmoid routers (DeepSeek-V3, arXiv 2412.19437): the gates are sigmoids. The choice is made by gate plus a bias that has no
gradient, among the groups of experts whose two best sum highest.

Experts: assignments are laid out by expert in one buffer and each expert multiplies its rows. Small batches pad every
expert to the fullest one and take a batched matmul over all experts; others loop over the experts that have tokens.
Outputs are gathered back per assignment and added in route order: no atomics, no order that depends on the batch. In
invariant mode each expert's rows are padded to a multiple of 16 (see linear.py; a batched matmul and a loop of plain
ones have the same bits there, measured in both dtypes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.model.config import ModelConfig, RouteFilter
from etude.model.linear import MLP, ROWS, Linear, matmul, padded_rows, round_up, sigmoid_column

BATCHED_WASTE = 2.0
"""Padded rows per real row up to which one batched matmul is taken: 8 experts of 8 rows take the same time as a loop in
float32 and a quarter of it in bfloat16; more padding than this eats the gain."""
BATCHED_ROWS = 1024
"""Assignments from which the loop is taken: its calls cost nothing against its rows, and it pads none."""


SMALLEST = 1e-20
"""Added to a sum of gates before it divides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Recorded experts of a layer's tokens, -1 in every place of a row that was not recorded, and which of them to believe."""

    experts_NK: Tensor
    filter: RouteFilter


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """What a layer's router did, padding rows included."""

    experts_NK: Tensor
    gates_NK: Tensor
    probs_NE: Tensor
    replay_3: Tensor | None = None
    """int64 counts under replay: places of a route that were recorded, those whose expert this router would not have chosen, those
    that the filter refused."""


class Router(nn.Module):
    """Softmax or sigmoid over all experts in float32, then the K best."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.per_token = config.experts_per_token
        self.normalise, self.scale = config.norm_topk, config.route_scale
        self.groups, self.groups_kept = config.route_groups, config.route_groups_kept
        if config.sigmoid_router:
            self.e_score_correction_bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32), requires_grad=False)
        self.sigmoid = config.sigmoid_router

    def forward(self, x_NI: Tensor, replay: Replay | None) -> Routing:
        logits_NE = F.linear(x_NI.float(), self.weight.float())
        if self.sigmoid:
            return self._sigmoid(logits_NE.sigmoid(), replay)
        probs_NE = logits_NE.softmax(-1)
        own_NE = best(logits_NE.detach())
        experts_NK, replay_3 = self._chosen(own_NE, probs_NE.detach(), probs_NE.detach(), replay)
        gates_NK = probs_NE.gather(1, experts_NK)
        if self.normalise:
            gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
        return Routing(experts_NK=experts_NK, gates_NK=gates_NK, probs_NE=probs_NE, replay_3=replay_3)

    def _sigmoid(self, gates_NE: Tensor, replay: Replay | None) -> Routing:
        """Shares of the summed gates stand for probabilities in the load-balancing loss."""
        scores_NE = gates_NE.detach() + self.e_score_correction_bias.float()
        own_NE = best(self._in_best_groups(scores_NE))
        experts_NK, replay_3 = self._chosen(own_NE, gates_NE.detach(), scores_NE, replay)
        gates_NK = gates_NE.gather(1, experts_NK)
        if self.normalise:
            gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + SMALLEST)
        probs_NE = gates_NE / gates_NE.sum(-1, keepdim=True)
        return Routing(experts_NK=experts_NK, gates_NK=gates_NK * self.scale, probs_NE=probs_NE, replay_3=replay_3)

    def _chosen(self, own_NE: Tensor, gates_NE: Tensor, scores_NE: Tensor, replay: Replay | None) -> tuple[Tensor, Tensor | None]:
        """The experts used, and the counts of `Routing.replay_3`. `own_NE` is the router's order of experts, best first."""
        own_NK = own_NE[:, : self.per_token]
        if replay is None:
            return own_NK, None
        recorded_NK = replay.experts_NK >= 0
        kept_NK = torch.where(recorded_NK, replay.experts_NK, own_NK)
        refused_NK = recorded_NK & ~plausible(kept_NK, own_NK, gates_NE, scores_NE, replay.filter)
        changed_NK = recorded_NK & ~among(kept_NK, own_NK)
        counts_3 = torch.stack([mask_NK.sum() for mask_NK in (recorded_NK, changed_NK, refused_NK)])
        return replaced(kept_NK, refused_NK, own_NE), counts_3

    def _in_best_groups(self, order_NE: Tensor) -> Tensor:
        """The order with experts of other groups behind all that may be chosen."""
        if self.groups == 1:
            return order_NE
        order_NGE = order_NE.unflatten(1, (self.groups, -1))
        kept_NG = best(order_NGE.topk(2, -1).values.sum(-1))[:, : self.groups_kept]
        hidden_NG = torch.ones(order_NGE.shape[:2], dtype=torch.bool, device=order_NE.device).scatter_(1, kept_NG, False)
        return order_NGE.masked_fill(hidden_NG.unsqueeze(-1), -torch.inf).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves as any module does, but the bias keeps its type: see `transformer.KEPT`."""
        before = self.e_score_correction_bias.detach() if self.sigmoid else None  # moving swaps what is behind the parameter
        super()._apply(fn, recurse)
        if before is not None and self.e_score_correction_bias.dtype != before.dtype:
            device = self.weight.device
            moved = torch.empty_like(before, device=device) if before.is_meta else before.to(device)
            self.e_score_correction_bias = nn.Parameter(moved, requires_grad=False)
        return self


def best(order_NE: Tensor) -> Tensor:
    """Indices of each row from the largest to the smallest value, ties to the lower index."""
    return torch.sort(order_NE, dim=-1, descending=True, stable=True).indices


def among(experts_NK: Tensor, others_NK: Tensor) -> Tensor:
    """Which of the experts of a row are in the other row."""
    return (experts_NK.unsqueeze(2) == others_NK.unsqueeze(1)).any(2)


def plausible(experts_NK: Tensor, own_NK: Tensor, gates_NE: Tensor, scores_NE: Tensor, filter: RouteFilter) -> Tensor:
    """Which of the experts pass the filter, given the router's own choice; see `RouteFilter` for gates and scores."""
    if filter.rule == "ratio":
        return gates_NE.gather(1, experts_NK) >= filter.alpha * gates_NE.gather(1, own_NK).amin(1, keepdim=True)
    if filter.rule == "margin":
        return scores_NE.gather(1, experts_NK) >= scores_NE.gather(1, own_NK)[:, -1:] - filter.margin
    if filter.rule == "rank":
        own_place_NK = among(experts_NK, own_NK)
        places = min(filter.slack, scores_NE.shape[1] - own_NK.shape[1])
        if places == 0:
            return own_place_NK
        last_N1 = scores_NE.scatter(1, own_NK, -torch.inf).topk(places).values[:, -1:]
        return own_place_NK | (scores_NE.gather(1, experts_NK) >= last_N1)
    return torch.ones_like(experts_NK, dtype=torch.bool)


def replaced(experts_NK: Tensor, refused_NK: Tensor, own_NE: Tensor) -> Tensor:
    """The experts with each refused one's place given to the best of the router's order that is not among the others."""
    taken_NE = torch.zeros_like(own_NE, dtype=torch.bool).scatter(1, experts_NK, ~refused_NK)
    own_NJ = own_NE[:, : 2 * experts_NK.shape[1]]  # K to take and at most K in the way
    free_NJ = (~taken_NE).gather(1, own_NJ)
    nth_NJ = torch.where(free_NJ, free_NJ.cumsum(1), 0)
    at_NK = (nth_NJ.unsqueeze(1) == refused_NK.cumsum(1).unsqueeze(2)).int().argmax(2)  # the nth refused takes the nth free
    return torch.where(refused_NK, own_NJ.gather(1, at_NK), experts_NK)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """Where each assignment lies in a buffer of rows grouped by expert."""

    token_of_slot: Tensor
    """Row of x for every slot of the buffer; padding slots read row 0 and are never read back."""
    slot_of_A: Tensor
    """Slot of each assignment, in token order."""
    sizes_E: list[int]
    """Slots of each expert, padding included."""
    counts_E: Tensor
    """Assignments of each expert."""

    @staticmethod
    def of(experts_NK: Tensor, experts: int, *, invariant: bool) -> Dispatch:
        per_token, device = experts_NK.shape[1], experts_NK.device
        expert_A = experts_NK.reshape(-1)
        order_A = expert_A.argsort(stable=True)
        counts_E = torch.bincount(expert_A, minlength=experts)
        counts = counts_E.tolist()
        fullest = round_up(max(counts), ROWS) if invariant else max(counts)
        # a GPU batches any number of rows: its loop would be launches, not arithmetic
        if (len(expert_A) < BATCHED_ROWS or device.type == "cuda") and fullest * experts <= BATCHED_WASTE * len(expert_A):
            sizes = [fullest] * experts
        else:
            sizes = [padded_rows(count, invariant=invariant, device=device) for count in counts]
        shifts, slot, seen = [], 0, 0
        for size, count in zip(sizes, counts, strict=True):
            shifts.append(slot - seen)
            slot, seen = slot + size, seen + count
        shift_E = torch.tensor(shifts, device=device)
        slot_sorted_A = torch.arange(len(expert_A), device=device) + shift_E[expert_A[order_A]]
        return Dispatch(
            token_of_slot=expert_A.new_zeros(slot).index_copy_(0, slot_sorted_A, order_A // per_token),
            slot_of_A=torch.empty_like(expert_A).index_copy_(0, order_A, slot_sorted_A),
            sizes_E=sizes,
            counts_E=counts_E,
        )


class Experts(nn.Module):
    """The gated feed-forward parts of all experts, one tensor per projection."""

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        wide = (config.experts, config.expert_intermediate, config.hidden)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_intermediate))

    def forward(self, x_NI: Tensor, dispatch: Dispatch) -> Tensor:
        """[A, I] outputs of all assignments, in token order."""
        buffer = x_NI.index_select(0, dispatch.token_of_slot)
        sizes = dispatch.sizes_E
        if len(set(sizes)) == 1:
            out = self._batched(buffer.view(len(sizes), sizes[0], -1)).flatten(0, 1)
        else:
            out = self._looped(buffer, sizes)
        return out.index_select(0, dispatch.slot_of_A)

    def _batched(self, x_ECI: Tensor) -> Tensor:
        inner = F.silu(torch.bmm(x_ECI, self.gate_proj.mT)) * torch.bmm(x_ECI, self.up_proj.mT)
        return torch.bmm(inner, self.down_proj.mT)

    def _looped(self, buffer: Tensor, sizes: list[int]) -> Tensor:
        # unbind: its backward is one stack, where indexing expert by expert would fill a whole zero gradient each time
        weights = zip(buffer.split(sizes), self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind(), strict=True)
        return torch.cat([self._one(*expert) for expert in weights if len(expert[0])])

    def _one(self, x_CI: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = F.silu(matmul(x_CI, gate, invariant=self.invariant)) * matmul(x_CI, up, invariant=self.invariant)
        return matmul(inner, down, invariant=self.invariant)


class MoE(nn.Module):
    """Routed experts plus, where there is one, the shared expert every token passes."""

    def __init__(self, config: ModelConfig, *, invariant: bool) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, invariant=invariant)
        shared = config.shared_intermediate
        self.shared_expert = MLP(config.hidden, shared, invariant=invariant) if shared else None
        self.shared_expert_gate = Linear(config.hidden, 1, invariant=invariant) if config.shared_gate else None
        self.count = config.experts
        self.invariant = invariant

    def forward(self, x_NI: Tensor, replay: Replay | None) -> tuple[Tensor, Routing]:
        routing = self.gate(x_NI, replay)
        dispatch = Dispatch.of(routing.experts_NK, self.count, invariant=self.invariant)
        outputs_NKI = self.experts(x_NI, dispatch).unflatten(0, routing.experts_NK.shape)
        total_NI = self._shared(x_NI)
        for output_NI, gate_N in zip(outputs_NKI.unbind(1), routing.gates_NK.unbind(1), strict=True):
            total_NI = total_NI + output_NI * gate_N.unsqueeze(1)
        return total_NI.to(x_NI.dtype), routing

    def _shared(self, x_NI: Tensor) -> Tensor:
        if self.shared_expert is None:
            return torch.zeros_like(x_NI, dtype=torch.float32)
        out_NI: Tensor = self.shared_expert(x_NI)
        return out_NI if self.shared_expert_gate is None else out_NI * sigmoid_column(self.shared_expert_gate.float32(x_NI))


def balance(probs_LNE: Tensor, experts_LNK: Tensor) -> tuple[Tensor, Tensor]:
    """Switch-style load-balancing loss (Fedus et al. 2021), mean over layers, and the tokens each expert got.

    Per layer E * sum_e f_e * p_e, with f_e the share of assignments expert e got and p_e its mean probability: 1 when
    balanced, E when everything goes to one expert with certainty. (`transformers` reports K times this.)
    """
    layers, _, experts = probs_LNE.shape
    flat_LA = experts_LNK.flatten(1)
    load_LE = torch.zeros(layers, experts, dtype=torch.int64, device=flat_LA.device).scatter_add_(1, flat_LA, torch.ones_like(flat_LA))
    share_LE = load_LE / flat_LA.shape[1]
    return experts * (share_LE * probs_LNE.mean(1)).sum(-1).mean(), load_LE
