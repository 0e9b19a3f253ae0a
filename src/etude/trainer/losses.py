"""One packed row through the model: log-probs where a loss needs them, and the loss of each stream.

    N  tokens of the row        M  tokens with weight, "targets"        D  hidden width        V  vocabulary

Token t is predicted from the hidden state at t - 1 of the same sequence, so logits are computed at M positions only: the output
head and the softmax never see prompts and tool results. Log-probs are float32 whatever the model computes in.
A row's loss is a plain sum: the weights in a `Batch` are already divided by their stream's global normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from etude.errors import EtudeError
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.config import RouteFilter
from etude.model.linear import matmul, pad_rows, padded_rows
from etude.model.transformer import Decoder, Output
from etude.records import Batch
from etude.trainer.config import RLConfig
from etude.trainer.objectives import TokenInputs, k1_reward, objective

LOGITS_AT_ONCE = 2**26
"""Elements of a logits matrix computed at once (256 MiB in float32); more are computed in chunks and again in the backward."""
CE_LOGITS_AT_ONCE = 2**25
"""The same of a cross-entropy, whose chunks are never computed again: smaller ones stay nearer to the cache, and each costs one pass
over the output head's gradient."""


class Divergence(EtudeError):
    """A loss or a gradient is not finite. Raised before weights change; the trainer that raised it can still be saved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What a forward says about a row's targets."""

    logp_M: Tensor
    """float32 log-prob of each target, with gradient when the forward had one."""
    entropy_M: Tensor
    """float32, without gradient."""
    balance: Tensor
    load_LE: Tensor | None
    routes_NLK: Tensor | None
    """Experts each token of the row went to."""
    replay_L3: Tensor | None = None
    """`Routing.replay_3` of each layer, when recorded routes were replayed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStats:
    """Per-token numbers of one row on the CPU, the raw material of the step's report."""

    logp_M: np.ndarray
    old_M: np.ndarray
    entropy_M: np.ndarray
    k1_M: np.ndarray
    weight_M: np.ndarray
    """Factor the correction gave the token's gradient (see `objectives.Corrected`)."""
    clipped_M: np.ndarray
    version_M: np.ndarray


def targets(batch: Batch) -> np.ndarray:
    """Positions in the row that some stream weighs, ascending."""
    return np.flatnonzero((batch.rl_weight_N != 0) | (batch.hint_weight_N != 0) | (batch.ce_weight_N != 0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """A row that went through the model: what came out, and what its heads need to go on."""

    ids_N: Tensor
    plan: Plan
    cache: PagedCache
    output: Output


def run_row(model: Decoder, batch: Batch, *, replay: RouteFilter | None = None, block_size: int = 16, heads: bool = False) -> Ran:
    """Forward over a row. With `replay` the row's recorded routes that pass that filter are used; tokens without a record are routed
    freely. `heads` makes room in the cache for the model's heads."""
    parameter = next(model.parameters())
    device = parameter.device
    lengths = [end - start for start, end in batch.bounds]
    ids_N = torch.tensor(batch.ids_N.astype(np.int64), device=device)
    routes_NLK = torch.tensor(batch.routes_NLK, device=device) if replay and batch.routes_NLK is not None else None
    route_filter = replay or RouteFilter()
    plan = Plan.packed(lengths, block_size, device)
    cache = PagedCache(model.config, blocks_for(lengths, block_size), block_size, parameter.dtype, device, functional=True, heads=heads)
    return Ran(ids_N=ids_N, plan=plan, cache=cache, output=model(ids_N, plan, cache, routes_NLK=routes_NLK, route_filter=route_filter))


def score(model: Decoder, batch: Batch, where_M: np.ndarray, *, replay: RouteFilter | None = None, block_size: int = 16) -> Scores:
    """Forward over a row; log-probs of the tokens at `where_M` given what stands before them in their sequence."""
    ran = run_row(model, batch, replay=replay, block_size=block_size)
    index_M = torch.tensor(where_M, device=ran.ids_N.device)
    output = ran.output
    logp_M, entropy_M = log_probs(model, output.hidden_ND.index_select(0, index_M - 1), ran.ids_N[index_M])
    return Scores(
        logp_M=logp_M,
        entropy_M=entropy_M,
        balance=output.balance,
        load_LE=output.load_LE,
        routes_NLK=output.routes_NLK,
        replay_L3=output.replay_L3,
    )


def log_probs(model: Decoder, hidden_MD: Tensor, ids_M: Tensor, *, at_once: int = LOGITS_AT_ONCE) -> tuple[Tensor, Tensor]:
    """(log-prob of each id, entropy of its distribution). Large vocabularies go in chunks, each recomputed in the backward."""

    def chunk(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return TargetLogProb.apply(model.logits(hidden).float(), ids)

    rows = max(1, at_once // model.config.vocab_size)
    if len(ids_M) <= rows:
        return chunk(hidden_MD, ids_M)
    pieces = [
        checkpoint(chunk, h, i, use_reentrant=False) if torch.is_grad_enabled() else chunk(h, i)
        for h, i in zip(hidden_MD.split(rows), ids_M.split(rows))
    ]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


class TargetLogProb(torch.autograd.Function):
    """(log softmax(logits)[id], entropy) of each row; the gradient of the first is onehot - softmax, the second has none.

    The forward takes the engine's operations in the engine's order (`inference.sampler.logprobs`: shift by the maximum, float64
    exponentials, running sum, log), so that equal logits give log-probs equal to the last bit, and a mismatch report of 0 can mean 0.
    Only the float32 logits are kept for the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, ids_M: Tensor) -> tuple[Tensor, Tensor]:
        top_M1 = logits_MV.amax(1, keepdim=True)
        shifted_MV = logits_MV.double().sub_(top_M1)
        exp_MV = shifted_MV.exp()
        total_M1 = torch.cumsum(exp_MV, 1)[:, -1:]
        log_total_M1 = total_M1.log()
        logp_M = (shifted_MV.gather(1, ids_M[:, None]) - log_total_M1)[:, 0].float()
        entropy_M = (log_total_M1 - exp_MV.mul_(shifted_MV).sum(1, keepdim=True) / total_M1)[:, 0].float()
        ctx.save_for_backward(logits_MV, ids_M, (top_M1 + log_total_M1).float())
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[Tensor, None]:
        logits_MV, ids_M, normaliser_M1 = ctx.saved_tensors
        out_MV = (logits_MV - normaliser_M1).exp_().neg_()
        out_MV.scatter_add_(1, ids_M[:, None], torch.ones_like(normaliser_M1))
        return out_MV.mul_(grad_M[:, None]), None


def rl_loss(scores: Scores, batch: Batch, where_M: np.ndarray, reference_M: Tensor | None, config: RLConfig) -> tuple[Tensor, TokenStats]:
    """The `rl` stream's loss of a row, summed, and its per-token numbers.

    The advantage of a token is its member's plus the k1 reward, which needs `reference_M`.
    """
    logp_M = scores.logp_M

    def take(array_N: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(array_N[where_M], dtype=dtype, device=logp_M.device)

    starts = np.array([start for start, _ in batch.bounds])
    sample_M = torch.tensor(np.searchsorted(starts, where_M, side="right"), device=logp_M.device)
    weight_M, advantage_M, old_M = take(batch.rl_weight_N), take(batch.advantage_N), take(batch.old_logprob_N)
    k1_M = torch.zeros_like(old_M)
    if reference_M is not None:
        k1_M = logp_M.detach() - reference_M
        advantage_M = advantage_M + k1_reward(logp_M, reference_M, sample_M, config)
    inputs = TokenInputs(logp_M=logp_M, old_M=old_M, advantage_M=advantage_M, sample_M=sample_M, mask_M=weight_M != 0)
    corrected = objective(config.objective)(inputs, config)
    loss = (weight_M * corrected.loss_M).sum()
    sampled = batch.rl_weight_N[where_M] != 0
    stats = TokenStats(
        logp_M=numpy(logp_M)[sampled],
        old_M=batch.old_logprob_N[where_M][sampled],
        entropy_M=numpy(scores.entropy_M)[sampled],
        k1_M=numpy(k1_M)[sampled],
        weight_M=numpy(corrected.weight_M)[sampled],
        clipped_M=numpy(corrected.cut_M)[sampled],
        version_M=batch.version_N[where_M][sampled],
    )
    return loss, stats


def ce_loss(model: Decoder, ran: Ran, batch: Batch, *, at_once: int = CE_LOGITS_AT_ONCE) -> Tensor:
    """The `ce` stream's loss of a row, summed: -sum_t w_t log pi(x_t | x_<t)."""
    where_M = np.flatnonzero(batch.ce_weight_N)
    if not len(where_M):
        return ran.output.hidden_ND.sum() * 0.0
    index_M = torch.tensor(where_M, device=ran.ids_N.device)
    weight_M = torch.tensor(batch.ce_weight_N[where_M], dtype=torch.float32, device=ran.ids_N.device)
    head_VD = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    loss: Tensor = HeadCrossEntropy.apply(ran.output.hidden_ND.index_select(0, index_M - 1), head_VD, ran.ids_N[index_M], weight_M, at_once)
    return loss


class HeadCrossEntropy(torch.autograd.Function):
    """-sum_m w_m log softmax(h_m W^T)[id_m], with the gradients of h and W made in the forward.

    The weights are known, so a chunk of logits is turned into its part of both gradients while it is there, and thrown away: nothing is
    kept or computed again for the backward, and no more than one chunk of logits and its softmax exist at any time. Weights scale the
    rows of h, not of the logits, so a chunk is passed over twice besides its three products.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, head_VD: Tensor, ids_M: Tensor, weight_M: Tensor, at_once: int) -> Tensor:
        kind = hidden_MD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_MD.dtype
        need_hidden, need_head = ctx.needs_input_grad[:2]
        rows = padded_rows(max(1, at_once // len(head_VD)), invariant=False, device=hidden_MD.device)
        loss = torch.zeros((), device=hidden_MD.device)
        hidden_grads, head_grad = [], None
        with torch.autocast(kind, enabled=False):
            head = head_VD.to(dtype)
            for hidden, ids, weight in zip(hidden_MD.to(dtype).split(rows), ids_M.split(rows), weight_M.split(rows), strict=True):
                m = len(ids)
                full = padded_rows(m, invariant=False, device=hidden.device)
                logp = F.log_softmax(matmul(pad_rows(hidden, full), head, invariant=False).float(), -1)
                loss -= (weight * logp[:m].gather(1, ids[:, None])[:, 0]).sum()
                softmax = logp.exp_().to(dtype) if need_hidden or need_head else logp
                if need_hidden:
                    expected = matmul(softmax, head.t(), invariant=False)[:m]
                    hidden_grads.append((expected.float() - head[ids].float()) * weight[:, None])
                if need_head:
                    weighted = hidden * weight[:, None].to(dtype)
                    part = matmul(softmax.t(), pad_rows(weighted, full).t(), invariant=False).float()
                    head_grad = part if head_grad is None else head_grad.add_(part)
                    head_grad.index_add_(0, ids, weighted.float(), alpha=-1)
        hidden_grad = torch.cat(hidden_grads).to(hidden_MD.dtype) if hidden_grads else None
        ctx.save_for_backward(hidden_grad, None if head_grad is None else head_grad.to(head_VD.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_grad, head_grad = ctx.saved_tensors
        return None if hidden_grad is None else hidden_grad * grad, None if head_grad is None else head_grad * grad, None, None, None


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def load_entropy(load_LE: Tensor) -> float:
    """Evenness of expert use, mean over layers: 1 when all experts get equally many tokens, 0 when one gets all."""
    share_LE = load_LE.double() / load_LE.sum(-1, keepdim=True).clamp(min=1)
    entropy_L = -torch.xlogy(share_LE, share_LE).sum(-1)
    return float(entropy_L.mean() / np.log(max(load_LE.shape[-1], 2)))


def replay_shares(replay_L3: Tensor, places: int) -> dict[str, float]:
    """Metrics of router replay, from the summed counts of the rows and the places of all their routes."""
    recorded, changed, refused = replay_L3.sum(0).tolist()
    shares = {"route_recorded": recorded / max(places, 1)}
    return shares | {"route_changed": changed / max(recorded, 1), "route_replaced": refused / max(recorded, 1)}


def require_finite(name: str, value: float, where: str) -> None:
    if not np.isfinite(value):
        raise Divergence(f"{where}: {name} is {value}; weights were not changed. Lower the learning rate, or look at this step's data")
