"""Off-policy corrections: the per-token policy loss, by name. Each is a small function over the same per-token inputs.

    M  sampled tokens of a row        logp  log pi(a|s), with gradient        old  log mu(a|s), as the engine sampled it
    A  advantage of the token         r = exp(logp - old)                     sg   stop-gradient
    y  the token's sequence           R = prod_y r,  s = R^(1/|y|)            |y|  sampled tokens of the sequence

A function returns the loss of each token, before the token's weight in the batch, with the factor its gradient ended up with:
d loss / d logp = -weight * A. On-policy (r = 1) every correction has weight 1, so all of them are the plain policy gradient there.

A sequence is one segment: what a sampled token was conditioned on, from the prompt or the last compaction. Only tokens of `mask_M`
enter a sequence's ratio; the others (targets of another stream) have batch weight 0. docs/corrections.md says when to use which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
    """Which sequence of the row a token belongs to; sequences lie one after the other."""
    mask_M: Tensor
    """True where the engine sampled the token, so that `old_M` says something."""

    @property
    def log_ratio_M(self) -> Tensor:
        """log r, without gradient."""
        return self.logp_M.detach() - self.old_M


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrected:
    loss_M: Tensor
    weight_M: Tensor
    """Factor of -A in the gradient of the loss; 0 where the correction lets nothing through."""
    cut_M: Tensor
    """Tokens whose weight a bound changed: truncated, clipped or masked."""


def none(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-A * logp: plain REINFORCE (Williams, 1992), as if pi had sampled the token itself."""
    loss_M = -tokens.advantage_M * tokens.logp_M
    return Corrected(loss_M=loss_M, weight_M=torch.ones_like(tokens.old_M), cut_M=torch.zeros_like(tokens.mask_M))


def truncated(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-sg(min(r, cap)) * A * logp: truncated importance sampling (Ionides, 2008; Espeholt et al., 2018, arXiv 1802.01561).

    The weight has no gradient, so the update direction stays that of the policy gradient; tokens above the cap still
    learn, with bounded weight.
    """
    ratio_M = tokens.log_ratio_M.exp()
    return _weighted(tokens, ratio_M.clamp(max=config.cap), ratio_M > config.cap)


def cispo(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-sg(clip(r, 1 - low, 1 + high)) * A * logp: CISPO (MiniMax, 2025, arXiv 2506.13585).

    The weight is clipped, never the update, so no token loses its gradient. With low = 1, as in the paper's runs, there is no
    lower bound and this is `truncated` with cap = 1 + high.
    """
    ratio_M = tokens.log_ratio_M.exp()
    low, high = 1 - config.cispo_low, 1 + config.cispo_high
    return _weighted(tokens, ratio_M.clamp(low, high), (ratio_M < low) | (ratio_M > high))


def masked_token(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-sg(r * [low <= r <= high]) * A * logp: two-sided masking of tokens (IcePop; Ling Team, 2025, arXiv 2510.18855)."""
    return _masked(tokens, tokens.log_ratio_M.exp(), config)


def masked_sequence(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-sg(R * [low <= R <= high]) * A * logp: masked importance sampling of sequences (Liu, Li et al., 2025, "When Speed Kills
    Stability"). Unbiased but for the mask; R spreads exponentially with length, so that long sequences seldom pass."""
    return _masked(tokens, _over_sequences(tokens, mean=False).exp(), config)


def masked_geometric(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-sg(s * [low <= s <= high]) * A * logp: the same with the geometric mean of a sequence's ratios (Liu, Li et al., 2025),
    whose spread does not grow with length; the weight is biased."""
    return _masked(tokens, _over_sequences(tokens, mean=True).exp(), config)


def ppo_clip(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A): PPO's clipped surrogate (Schulman et al., 2017, arXiv 1707.06347).

    low = high is PPO; high > low is DAPO's clip-higher (Yu et al., 2025, arXiv 2503.14476, section 3.1), which leaves unlikely
    tokens more room to grow.
    """
    return _clipped(tokens, (tokens.logp_M - tokens.old_M).exp(), config.clip_low, config.clip_high)


def gspo(tokens: TokenInputs, config: RLConfig) -> Corrected:
    """-min(s_t * A, clip(s_t, 1 - low, 1 + high) * A) with s_t = sg(s) * exp(logp - sg(logp)): GSPO in its per-token form (Zheng
    et al., 2025, arXiv 2507.18071, section 4.3), which allows the per-token advantages of the k1 reward.

    Where A is the same for a whole sequence, this is the gradient of |y| * min(s * A, clip(s) * A): tokens of a sequence are
    clipped together. The paper's factor 1 / |y| is `normaliser = "length"`.
    """
    ratio_M = _over_sequences(tokens, mean=True).exp() * (tokens.logp_M - tokens.logp_M.detach()).exp()
    return _clipped(tokens, ratio_M, config.gspo_low, config.gspo_high)


Objective = Callable[[TokenInputs, RLConfig], Corrected]
OBJECTIVES: dict[str, Objective] = {
    "none": none,
    "truncated": truncated,
    "masked_token": masked_token,
    "masked_sequence": masked_sequence,
    "masked_geometric": masked_geometric,
    "ppo_clip": ppo_clip,
    "clip_higher": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
"""`clip_higher` is `ppo_clip` under a config that insists on clip_high > clip_low."""


def objective(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise ConfigError(f"unknown objective {name!r}; {nearest(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def _weighted(tokens: TokenInputs, weight_M: Tensor, cut_M: Tensor) -> Corrected:
    """The policy gradient with a weight that has no gradient."""
    return Corrected(loss_M=-weight_M * tokens.advantage_M * tokens.logp_M, weight_M=weight_M, cut_M=cut_M)


def _masked(tokens: TokenInputs, ratio_M: Tensor, config: RLConfig) -> Corrected:
    cut_M = (ratio_M < config.mask_low) | (ratio_M > config.mask_high)
    return _weighted(tokens, ratio_M.masked_fill(cut_M, 0.0), cut_M)


def _clipped(tokens: TokenInputs, ratio_M: Tensor, low: float, high: float) -> Corrected:
    """The pessimistic minimum: no gradient where the ratio has left the range in the direction the advantage pushes."""
    advantage_M = tokens.advantage_M
    loss_M = -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - low, 1 + high) * advantage_M)
    value_M = ratio_M.detach()
    cut_M = ((advantage_M > 0) & (value_M > 1 + high)) | ((advantage_M < 0) & (value_M < 1 - low))
    return Corrected(loss_M=loss_M, weight_M=value_M.masked_fill(cut_M, 0.0), cut_M=cut_M)


def _sequences(sample_M: Tensor) -> Iterator[tuple[int, int]]:
    """(start, end) of each sequence's tokens."""
    starts = [0, *(torch.nonzero(sample_M.diff()).flatten() + 1).tolist(), len(sample_M)]
    return itertools.pairwise(starts)


def _over_sequences(tokens: TokenInputs, *, mean: bool) -> Tensor:
    """Sum or mean of log r over the sampled tokens of each token's sequence, without gradient."""
    out_M = torch.zeros_like(tokens.old_M)
    for start, end in _sequences(tokens.sample_M):
        own = tokens.log_ratio_M[start:end][tokens.mask_M[start:end]]
        if len(own):
            out_M[start:end] = own.mean() if mean else own.sum()
    return out_M


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
    for start, end in _sequences(sample_M):
        out_M[start:end] = values_M[start:end].flip(0).cumsum(0).flip(0)
    return out_M
