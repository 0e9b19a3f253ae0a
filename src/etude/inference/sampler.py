"""Logits to tokens and log-probs, all rows at once.

    R  rows of one call (sequences that are due a token)     V  vocabulary

A row's result depends on nothing but its own logits, parameters and noise: every operation is elementwise, a maximum,
a sort, or a running sum along the row. `torch.sum` is avoided: with two threads and 50,000 columns its bits depended on the
number of rows (measured), those of `cumsum` did not. Sums and exponentials are float64; torch 2.13's float64 `exp` gave
the same bits at every offset (33 rows of 777, 800 and 50,000, one and two threads).

Noise of the token at absolute position p of a request = splitmix64(seed, p), so it depends on neither batch nor step,
and a sequence that is preempted and computed again samples the same tokens (inverse CDF over token ids, or over ranks when
top-k or top-p cut the distribution).

Two log-probs come back: under the distribution that was sampled from, and at temperature 1 over the whole vocabulary.
Temperature 0 is greedy: the first largest logit, whose log-prob under that one-point distribution is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from etude.errors import EngineError
from etude.records import Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_U11, _U27, _U30, _U31 = (np.uint64(n) for n in (11, 27, 30, 31))


def _splitmix64(x_R: np.ndarray) -> np.ndarray:
    """One output of Steele, Lea and Flood's SplitMix64 for each state (uint64, wraps)."""
    z_R = x_R + _GAMMA
    z_R = (z_R ^ (z_R >> _U30)) * _MIX_1
    z_R = (z_R ^ (z_R >> _U27)) * _MIX_2
    return z_R ^ (z_R >> _U31)


def uniform(seed_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) with 53 random bits for each (uint64 seed, position)."""
    bits_R = _splitmix64(_splitmix64(seed_R) ^ position_R.astype(np.uint64))
    return (bits_R >> _U11).astype(np.float64) * 2.0**-53


class Params(NamedTuple):
    """Sampling parameters of R rows."""

    seed_R: np.ndarray
    """uint64"""
    temperature_R: np.ndarray
    """float64; 0 is greedy"""
    top_p_R: np.ndarray
    """float64; 1 cuts nothing"""
    top_k_R: np.ndarray
    """int64; 0 cuts nothing"""

    @classmethod
    def empty(cls, rows: int) -> Params:
        return cls(np.zeros(rows, np.uint64), np.ones(rows), np.ones(rows), np.zeros(rows, np.int64))

    def set(self, row: int, sampling: Sampling) -> None:
        self.seed_R[row] = sampling.seed & (2**64 - 1)
        self.temperature_R[row] = sampling.temperature
        self.top_p_R[row] = sampling.top_p
        self.top_k_R[row] = sampling.top_k

    def take(self, rows_R: np.ndarray) -> Params:
        return Params(*(a[rows_R] for a in self))


class Sampled(NamedTuple):
    ids_R: Tensor
    """int64"""
    logprob_R: Tensor
    """float32, under the sampling distribution"""
    logprob_t1_R: Tensor
    """float32, at temperature 1 over the whole vocabulary"""


def sample(logits_RV: Tensor, params: Params, position_R: np.ndarray) -> Sampled:
    """One token for each row. `position_R`: absolute position the token will stand at."""
    shifted_RV = _shifted(logits_RV)
    u_R = torch.from_numpy(uniform(params.seed_R, position_R)).to(logits_RV.device)
    plain_R = (params.top_p_R == 1.0) & (params.top_k_R == 0) & (params.temperature_R > 0)
    if plain_R.all():
        return _sample_plain(shifted_RV, u_R, params.temperature_R)
    greedy_R = params.temperature_R == 0
    parts = []
    for rows_R, kind in ((plain_R, "plain"), (greedy_R, "greedy"), (~plain_R & ~greedy_R, "cut")):
        rows = torch.from_numpy(np.flatnonzero(rows_R)).to(logits_RV.device)
        if rows.numel() == 0:
            continue
        if kind == "plain":
            result = _sample_plain(shifted_RV[rows], u_R[rows], params.temperature_R[rows_R])
        elif kind == "greedy":
            result = _sample_greedy(shifted_RV[rows])
        else:
            result = _sample_cut(shifted_RV[rows], u_R[rows], params.take(np.flatnonzero(rows_R)))
        parts.append((rows, result))
    order_R = torch.cat([rows for rows, _ in parts]).argsort()
    return Sampled(*(torch.cat([result[i] for _, result in parts])[order_R] for i in range(3)))


def logprobs(logits_RV: Tensor, targets_R: Tensor, temperature: float = 1.0) -> Tensor:
    """float32 log-prob of each row's target at a temperature over the whole vocabulary: the bits that `sample` reports."""
    scaled_RV = _shifted(logits_RV)
    if temperature != 1.0:
        scaled_RV = scaled_RV / temperature
    _, log_total_R1 = _cumulate(scaled_RV)
    return (scaled_RV.gather(1, targets_R[:, None]) - log_total_R1)[:, 0].float()


def _shifted(logits_RV: Tensor) -> Tensor:
    """float64 logits minus their row maximum."""
    return logits_RV.double().sub_(logits_RV.amax(1, keepdim=True))


def _cumulate(scaled_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Running sum of exp along each row, and the log of the whole sum."""
    sums_RV = torch.cumsum(scaled_RV.exp(), 1)
    log_total_R1 = sums_RV[:, -1:].log()
    if not torch.isfinite(log_total_R1).all():
        raise EngineError("the model gave logits that are not finite; the weights served are broken, load a good version")
    return sums_RV, log_total_R1


def _invert(sums_RV: Tensor, u_R: Tensor, total_R1: Tensor) -> Tensor:
    """First column whose running sum exceeds u * total: column i with probability proportional to its share."""
    columns_R1 = torch.searchsorted(sums_RV, u_R[:, None] * total_R1, right=True)
    return columns_R1.clamp_(max=sums_RV.shape[1] - 1)


def _sample_plain(shifted_RV: Tensor, u_R: Tensor, temperature_R: np.ndarray) -> Sampled:
    if (temperature_R == 1.0).all():
        sums_RV, log_total_R1 = _cumulate(shifted_RV)
        ids_R1 = _invert(sums_RV, u_R, sums_RV[:, -1:])
        logprob_R = (shifted_RV.gather(1, ids_R1) - log_total_R1)[:, 0].float()
        return Sampled(ids_R1[:, 0], logprob_R, logprob_R)
    scaled_RV = shifted_RV / torch.from_numpy(temperature_R).to(shifted_RV.device)[:, None]
    sums_RV, log_total_R1 = _cumulate(scaled_RV)
    ids_R1 = _invert(sums_RV, u_R, sums_RV[:, -1:])
    _, log_total_t1_R1 = _cumulate(shifted_RV)
    return Sampled(
        ids_R1[:, 0],
        (scaled_RV.gather(1, ids_R1) - log_total_R1)[:, 0].float(),
        (shifted_RV.gather(1, ids_R1) - log_total_t1_R1)[:, 0].float(),
    )


def _sample_greedy(shifted_RV: Tensor) -> Sampled:
    ids_R1 = shifted_RV.argmax(1, keepdim=True)
    _, log_total_R1 = _cumulate(shifted_RV)
    logprob_t1_R = (shifted_RV.gather(1, ids_R1) - log_total_R1)[:, 0].float()
    return Sampled(ids_R1[:, 0], torch.zeros_like(logprob_t1_R), logprob_t1_R)


def _sample_cut(shifted_RV: Tensor, u_R: Tensor, params: Params) -> Sampled:
    """Temperature, then the k likeliest, then the fewest of them whose share reaches p. Ties go to the smaller id."""
    device = shifted_RV.device
    vocab = shifted_RV.shape[1]
    scaled_RV = shifted_RV / torch.from_numpy(params.temperature_R).to(device)[:, None]
    ranked_RV, order_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
    sums_RV, _ = _cumulate(ranked_RV)
    k_R1 = torch.from_numpy(np.where(params.top_k_R == 0, vocab, np.minimum(params.top_k_R, vocab))).to(device)[:, None]
    top_k_total_R1 = sums_RV.gather(1, k_R1 - 1)
    enough_R1 = top_k_total_R1 * torch.from_numpy(params.top_p_R).to(device)[:, None]
    last_R1 = torch.searchsorted(sums_RV, enough_R1)  # first rank that reaches p; below k, since p <= 1
    total_R1 = sums_RV.gather(1, last_R1)
    rank_R1 = torch.minimum(_invert(sums_RV, u_R, total_R1), last_R1)
    ids_R1 = order_RV.gather(1, rank_R1)
    _, log_total_t1_R1 = _cumulate(shifted_RV)
    return Sampled(
        ids_R1[:, 0],
        (ranked_RV.gather(1, rank_R1) - total_R1.log())[:, 0].float(),
        (shifted_RV.gather(1, ids_R1) - log_total_t1_R1)[:, 0].float(),
    )
