"""The per-token policy loss, by name. Each is a small function over the same per-token inputs.

    M  sampled tokens of a row        logp  log pi(a|s), with gradient        old  log mu(a|s), as the engine sampled it
    A  advantage of the token         r = exp(logp - old)                     sg   stop-gradient

A function returns the loss of each token, before the token's weight; its gradient is what matters, its value is a report.
`sample_M` says which sequence of the row a token belongs to, for objectives that work on whole sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import ConfigError, nearest
from etude.trainer.config import RLConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenInputs:
    logp_M: Tensor
    old_M: Tensor
    advantage_M: Tensor
    sample_M: Tensor


def none(tokens: TokenInputs, config: RLConfig) -> Tensor:
    """-A * logp: plain REINFORCE (Williams, 1992), as if pi had sampled the token itself."""
    return -tokens.advantage_M * tokens.logp_M


def truncated(tokens: TokenInputs, config: RLConfig) -> Tensor:
    """-sg(min(r, cap)) * A * logp: truncated importance sampling (Ionides, 2008; Espeholt et al., arXiv 1802.01561).

    The weight has no gradient, so the update direction stays that of the policy gradient; tokens above the cap still
    learn, with bounded weight.
    """
    weight_M = (tokens.logp_M.detach() - tokens.old_M).exp().clamp(max=config.cap)
    return -weight_M * tokens.advantage_M * tokens.logp_M


def ppo_clip(tokens: TokenInputs, config: RLConfig) -> Tensor:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A): PPO's clipped surrogate (Schulman et al., arXiv 1707.06347)."""
    ratio_M = (tokens.logp_M - tokens.old_M).exp()
    clipped_M = ratio_M.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio_M * tokens.advantage_M, clipped_M * tokens.advantage_M)


Objective = Callable[[TokenInputs, RLConfig], Tensor]
OBJECTIVES: dict[str, Objective] = {"none": none, "truncated": truncated, "ppo_clip": ppo_clip}


def objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise ConfigError(f"unknown objective {name!r}; {nearest(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def clipped(config: RLConfig, ratio_M: Tensor, advantage_M: Tensor) -> Tensor:
    """Which tokens the objective truncated or clipped, for the report."""
    if config.objective == "truncated":
        return ratio_M > config.cap
    if config.objective == "ppo_clip":
        return torch.where(advantage_M > 0, ratio_M > 1 + config.clip_high, ratio_M < 1 - config.clip_low)
    return torch.zeros_like(ratio_M, dtype=torch.bool)


def k1_reward(logp_M: Tensor, reference_M: Tensor, sample_M: Tensor, config: RLConfig) -> Tensor:
    """-kl * k1 of each token, k1 = log pi - log ref: what KL regularisation adds to the advantage.

    As a reward (score function), k1 gives the gradient of the reverse KL(pi || ref). Differentiated in the loss its
    expected gradient is zero, and k3 in the loss would be the forward KL with a variance that explodes (facts: Composer 2
    report, section 4.1 and figure 4). With `to_go` a token answers for the k1 of all later tokens of its sequence too: the
    gradient of the whole sequence's KL, not only of each step's at fixed states.
    """
    k1_M = logp_M.detach() - reference_M
    if config.kl_credit == "to_go":
        k1_M = _sums_to_go(k1_M, sample_M)
    return -config.kl * k1_M


def _sums_to_go(values_M: Tensor, sample_M: Tensor) -> Tensor:
    """Sum of each value and all later ones of the same sample; samples lie one after the other."""
    out_M = torch.empty_like(values_M)
    starts = [0, *(torch.nonzero(sample_M.diff()).flatten() + 1).tolist(), len(values_M)]
    for start, end in itertools.pairwise(starts):
        out_M[start:end] = values_M[start:end].flip(0).cumsum(0).flip(0)
    return out_M
