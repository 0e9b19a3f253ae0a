"""Training the heads that predict further tokens, and how often their drafts would be accepted.

    N  tokens of the row     M  targets     V  vocabulary     k  number of a head, from 0

Head k says at position t what the token at t + k + 2 may be. With p the model's own distribution of that token (from position t + k + 1,
one token further on than the head can see) and q the head's:

    distil    sum_t w KL(p || q)      the Composer 2 report (section 3.1): a draft is accepted by p, so p is what a head should say
    labels    sum_t w -log q(token)   the baseline: what the text says next, whether or not the model would

Weights w are those of the row's `ce` stream at the predicted token, the same for both. The model never moves: hidden states,
embeddings and output head are read without gradient, so the heads may be trained beside it and leave its training bit-equal.

Acceptance by teacher forcing, over the same positions: speculative sampling accepts a draft of q with probability sum_x min(p(x), q(x))
(Leviathan et al., arXiv 2211.17192) at temperature 1; greedy decoding accepts when both have the same first choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.model.transformer import Decoder
from etude.records import Batch
from etude.trainer.losses import LOGITS_AT_ONCE, Ran, run_row, targets

HeadLoss = Literal["distil", "labels"]


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Of one head, a mean over the predicted tokens of some rows."""

    sampled: float
    """At temperature 1."""
    greedy: float
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafted:
    """One head over a row: hidden states from which model and head predict the same tokens."""

    model_MD: Tensor
    head_MD: Tensor
    ids_M: Tensor
    weight_M: Tensor


def head_loss(model: Decoder, ran: Ran, batch: Batch, kind: HeadLoss, *, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """The heads' loss of a row, summed over its tokens, mean over heads. `ran` is the row after `run_row(..., heads=True)`."""
    losses = [_one_loss(model, drafted, kind, at_once) for drafted in _drafted(model, ran, batch)]
    return torch.stack(losses).mean()


@torch.no_grad()
def acceptance(model: Decoder, rows: Iterable[Batch], *, at_once: int = LOGITS_AT_ONCE) -> list[Acceptance]:
    """How often each head's draft would be accepted, over all tokens that the rows' masks ask for."""
    sums = np.zeros((model.config.mtp_layers, 3))
    size = max(1, at_once // model.config.vocab_size)
    for row in rows:
        for k, drafted in enumerate(_drafted(model, run_row(model, row, heads=True), row)):
            for model_MD, head_MD in zip(drafted.model_MD.split(size), drafted.head_MD.split(size), strict=True):
                p_MV, q_MV = model.logits(model_MD).softmax(-1), model.logits(head_MD).softmax(-1)
                sums[k, 0] += torch.minimum(p_MV, q_MV).sum().item()
                sums[k, 1] += (p_MV.argmax(-1) == q_MV.argmax(-1)).sum().item()
            sums[k, 2] += len(drafted.ids_M)
    return [Acceptance(sampled=s / max(n, 1), greedy=g / max(n, 1), tokens=int(n)) for s, g, n in sums.tolist()]


def _drafted(model: Decoder, ran: Ran, batch: Batch) -> Iterator[Drafted]:
    """Each head in turn over the row. A head's first predicted token of a sequence is its k + 2nd after the first."""
    where_M = targets(batch)
    place_M = np.asarray(batch.positions_N)[where_M]
    stream_ND = hidden_ND = ran.output.hidden_ND.detach()
    for k in range(model.config.mtp_layers):
        # what stands behind the end of a sequence is the next one's, or the row's first token: positions there predict nothing
        draft = model.predict(stream_ND, ran.ids_N.roll(-1 - k), ran.plan, ran.cache, head=k)
        stream_ND = draft.stream_ND
        chosen_M = where_M[place_M >= k + 2]
        index_M = torch.tensor(chosen_M, device=hidden_ND.device)
        yield Drafted(
            model_MD=hidden_ND.index_select(0, index_M - 1),
            head_MD=draft.hidden_ND.index_select(0, index_M - 2 - k),
            ids_M=ran.ids_N[index_M],
            weight_M=torch.tensor(np.asarray(batch.ce_weight_N)[chosen_M], device=hidden_ND.device),
        )


def _one_loss(model: Decoder, drafted: Drafted, kind: HeadLoss, at_once: int) -> Tensor:
    def chunk(model_MD: Tensor, head_MD: Tensor, ids_M: Tensor, weight_M: Tensor) -> Tensor:
        logits_MV = model.logits(head_MD, frozen=True)
        if kind == "labels":
            return (weight_M * F.cross_entropy(logits_MV, ids_M, reduction="none")).sum()
        with torch.no_grad():
            target_MV = model.logits(model_MD, frozen=True).log_softmax(-1)
        apart_MV = F.kl_div(logits_MV.log_softmax(-1), target_MV, reduction="none", log_target=True)
        return (weight_M * apart_MV.sum(-1)).sum()

    size = max(1, at_once // model.config.vocab_size)
    tensors = (drafted.model_MD, drafted.head_MD, drafted.ids_M, drafted.weight_M)
    if len(drafted.ids_M) <= size:
        return chunk(*tensors)
    pieces = zip(*(t.split(size) for t in tensors), strict=True)
    losses = [checkpoint(chunk, *piece, use_reentrant=False) if torch.is_grad_enabled() else chunk(*piece) for piece in pieces]
    return torch.stack(losses).sum()
