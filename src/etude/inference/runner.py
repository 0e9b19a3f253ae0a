"""Chunks to tensors and back: builds the Plan, runs the model, keeps only the rows that need logits.

    N  tokens of this step     S  chunks of this step     R  rows of the engine (max_running)     B  blocks per table
    M  rows that need logits   V  vocabulary              Q  cache slots                          L, K  MoE layers, experts per token

Touches tensors only: which tokens to compute was decided before. Per-step Python is a pass over the chunks; everything
a token is about is computed on whole numpy arrays from per-row arrays that live as long as the engine (block
tables, sampling parameters). A sequence's row is written when it is admitted and when it gets a block, not every step.

Routes are kept beside the cache, one row a slot, so a prompt served from the prefix cache still has the routes of all its
positions, and a step stores all of them with one indexed copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from etude.inference.sampler import Params, logprobs, sample
from etude.inference.sequence import Chunk, Sequence
from etude.model.cache import PagedCache, Plan
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder, Output
from etude.records import ABSENT_ROUTE

_SCORE_ELEMENTS = 1 << 22
"""Logits held at once while scoring: 32 MiB of float64, whatever the vocabulary."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block: keys and values (or latents) and routes of its slots in all layers."""
    token = config.cache_tensors * config.layers * config.cache_heads * config.cache_width * dtype.itemsize
    if config.moe:
        token += config.moe_layers * config.experts_per_token * (1 if config.absent_route == ABSENT_ROUTE else 2)
    return token * block_size


class Runner:
    """The model, its cache, and the per-row arrays."""

    def __init__(self, model: Decoder, *, num_blocks: int, block_size: int, max_running: int, max_blocks: int) -> None:
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.model = model
        self.cache = PagedCache(model.config, num_blocks, block_size, self.dtype, self.device)
        self._block_size = block_size
        self._tables_RB = np.zeros((max_running, max_blocks), np.int64)
        self._params = Params.empty(max_running)
        self.has_routes = model.config.moe
        self._absent_route = model.config.absent_route
        self._routes_dtype = np.uint8 if self._absent_route == ABSENT_ROUTE else np.uint16
        shape = (num_blocks * block_size, model.config.moe_layers, model.config.experts_per_token) if self.has_routes else (0, 0, 0)
        stored = torch.uint8 if self._routes_dtype is np.uint8 else torch.int16
        self._routes_QLK = torch.zeros(shape, dtype=stored, device=self.device)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> tuple[list[int], list[float], list[float]]:
        """Compute all chunks. Returns token, log-prob and log-prob at temperature 1 for each generating chunk that
        reaches the end of its sequence, and for each token of its draft, in order; scores of scoring chunks go to `seq.logprobs`."""
        ids_N, plan, rows_S = self._plan(chunks)
        output = self.model(ids_N, plan, self.cache)
        if output.routes_NLK is not None:
            self._routes_QLK.index_copy_(0, plan.slots_N, _storable(output.routes_NLK))
        due = [i for i, (seq, _, end) in enumerate(chunks) if end == len(seq.ids) and not seq.scoring]
        sampled = self._sample(output, plan, rows_S, due, [len(chunks[i].seq.draft) for i in due])
        for i, chunk in enumerate(chunks):
            if chunk.seq.scoring:
                self._score(output.hidden_ND, chunk, plan.starts_S1[i])
        return sampled

    def routes(self, seq: Sequence, begin: int, end: int) -> np.ndarray:
        """Routes of the computed positions [begin, end)."""
        positions = np.arange(begin, end)
        slots = np.array(seq.blocks, np.int64)[positions // self._block_size] * self._block_size + positions % self._block_size
        return self._routes_QLK[self._tensor(slots)].cpu().numpy().view(self._routes_dtype)

    def absent(self, count: int) -> np.ndarray:
        """Rows of positions that were not computed."""
        return np.full((count, *self._routes_QLK.shape[1:]), self._absent_route, self._routes_dtype)

    def clear(self) -> None:
        """Zero the cache. A masked slot still enters attention with weight 0, and 0 times a left-over NaN is NaN."""
        for blocks in self.cache.keys_L + self.cache.values_L:
            blocks.zero_()

    def _plan(self, chunks: list[Chunk]) -> tuple[Tensor, Plan, np.ndarray]:
        rows, begins, ends = [], [], []
        for seq, begin, end in chunks:
            if seq.filled < len(seq.blocks):
                self._fill_row(seq)
            rows.append(seq.row)
            begins.append(begin)
            ends.append(end + len(seq.draft))
        rows_S = np.array(rows)
        owners_N, positions_N, starts_S1 = rows_S, np.array(begins), list(range(len(rows) + 1))
        if sum(ends) - sum(begins) == len(rows):  # everybody decodes
            ids = [chunk.seq.ids[begin] for chunk, begin in zip(chunks, begins, strict=True)]
        else:
            ids = [token for seq, begin, end in chunks for token in (*seq.ids[begin:end], *seq.draft)]
            counts_S = np.array(ends) - positions_N
            stops_S = np.cumsum(counts_S)
            positions_N = np.arange(len(ids)) + np.repeat(positions_N - (stops_S - counts_S), counts_S)
            owners_N = np.repeat(rows_S, counts_S)
            starts_S1 = [0, *stops_S.tolist()]
        block = self._block_size
        slots_N = self._tables_RB[owners_N, positions_N // block] * block + positions_N % block
        plan = Plan(
            positions_N=self._tensor(positions_N),
            slots_N=self._tensor(slots_N),
            tables_SB=self._tensor(self._tables_RB[rows_S, : -(-max(ends) // block)]),
            starts_S1=starts_S1,
            lengths_S=ends,
        )
        return self._tensor(np.array(ids)), plan, rows_S

    def _fill_row(self, seq: Sequence) -> None:
        """Copy new blocks of a sequence into its table row; a new tenant also gets a clean row and its parameters."""
        if seq.filled == 0:
            self._tables_RB[seq.row] = 0
            self._params.set(seq.row, seq.sampling)
        self._tables_RB[seq.row, seq.filled : len(seq.blocks)] = seq.blocks[seq.filled :]
        seq.filled = len(seq.blocks)

    def _sample(
        self, output: Output, plan: Plan, rows_S: np.ndarray, due: list[int], drafts: list[int]
    ) -> tuple[list[int], list[float], list[float]]:
        """Sample behind the last known token of each due chunk, and behind each of its `drafts` guesses."""
        if not due:
            return [], [], []
        hidden_MD = output.hidden_ND
        rows_M = rows_S if len(due) == len(rows_S) else rows_S[due]
        last_M = np.array([plan.starts_S1[i + 1] - 1 for i in due])
        positions_M = np.array([plan.lengths_S[i] for i in due])
        if any(drafts):
            counts = np.array(drafts) + 1
            back_M = np.concatenate([np.arange(n, -1, -1) for n in drafts])  # guesses stand at the end of their chunk
            rows_M, last_M, positions_M = (np.repeat(a, counts) for a in (rows_M, last_M, positions_M))
            last_M, positions_M = last_M - back_M, positions_M - back_M
        if len(last_M) < hidden_MD.shape[0]:
            hidden_MD = hidden_MD[self._tensor(last_M)]
        result = sample(self.model.logits(hidden_MD), self._params.take(rows_M), positions_M)
        return result.ids_R.tolist(), result.logprob_R.tolist(), result.logprob_t1_R.tolist()

    def _score(self, hidden_ND: Tensor, chunk: Chunk, start: int) -> None:
        """Log-probs of the tokens that follow the chunk's positions, a bounded number of rows at a time."""
        seq, begin, end = chunk
        targets = self._tensor(np.array(seq.ids[begin + 1 : end + 1], np.int64))
        step = max(16, _SCORE_ELEMENTS // self.model.config.vocab_size)
        for i in range(0, len(targets), step):
            part = targets[i : i + step]
            logits_MV = self.model.logits(hidden_ND[start + i : start + i + len(part)])
            seq.logprobs += logprobs(logits_MV, part, seq.sampling.temperature).tolist()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _storable(routes_NLK: Tensor) -> Tensor:
    """uint16 as int16 of the same bits: torch 2.11-2.13 has no indexed copy of uint16."""
    return routes_NLK.view(torch.int16) if routes_NLK.dtype == torch.uint16 else routes_NLK
