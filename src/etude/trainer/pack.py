"""From graded groups to packed rows.

    Group --samples--> Sample, one for each segment --pack--> Batch rows of at most `row_tokens` tokens

T tokens of a segment, N tokens of a row, L layers, K experts per token.

Invariants, each tested:
- what was sampled is what is trained: ids are copied, never re-tokenised, and only sampled tokens have weight;
- tokens are conserved: a sample's tokens appear in exactly one row, whole; a row never exceeds `row_tokens`;
- a token's weight is 1 / (C * rollouts) and does not depend on its sequence's length, on the row, or on the order of rows (two other
  normalisers, for comparison, divide by lengths);
- all segments of a chain (a trajectory with compactions) share the trajectory's advantage;
- each stream (rl, hint, ce) is divided by its own global count, so adding one does not change another.

Tokens after the last sampled one (a tool result nobody answered) are cut off: no loss can depend on them.

Rows are balanced by a cost model with attention's quadratic term: longest samples first, each into the cheapest row with room
(longest-processing-time rule). Everything is deterministic: ties go to the earlier sample and the earlier row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.errors import ConfigError, RecordError
from etude.records import ABSENT_ROUTE, ABSENT_ROUTE_16, Batch, Group, Segment, Trajectory, Version
from etude.trainer.advantage import advantages, overlong, silent
from etude.trainer.config import RLConfig

Cost = Callable[[int], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One segment ready to be packed. Weights are 0 or 1 here (1 / the rollout's tokens with `normaliser = "length"`); `pack` divides
    them by the streams' normalisers."""

    ids_T: np.ndarray
    rl_T: np.ndarray
    hint_T: np.ndarray
    ce_T: np.ndarray
    advantage: float = 0.0
    old_logprob_T: np.ndarray
    version_T: np.ndarray
    routes_TLK: np.ndarray | None = None
    origin: tuple[int, int, int] = (-1, -1, -1)
    """(admission, member, segment)"""

    def __len__(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, kw_only=True)
class Normalisers:
    """What each stream's token sum is divided by."""

    rl: float = 1.0
    hint: float = 1.0
    ce: float = 1.0


def samples_from_groups(groups: Sequence[Group], current: Version, config: RLConfig) -> tuple[list[Sample], Normalisers]:
    """Samples of all kept members, and the rl normaliser (C * rollouts by default).

    Rollouts and tokens count every kept member of a usable group, silent groups too, so that leaving silent ones out of the
    forward (`skip_silent`) changes nothing about the others. With `silent = "drop"` a silent group is no part of the step.
    """
    samples: list[Sample] = []
    rollouts = tokens = 0
    needed = config.kl > 0 or config.balance > 0 or not config.skip_silent
    for group in groups:
        if config.silent == "drop" and silent(group):
            continue
        for member, advantage in advantages(group, config.advantage):
            rollouts += 1
            own = sampled_tokens(member.trajectory)
            tokens += own
            masked = config.overlong == "mask" and overlong(member)
            if masked or (advantage == 0.0 and not needed):
                continue
            trajectory = member.trajectory
            for index, segment in enumerate(trajectory.segments):
                origin = (group.admission, trajectory.member, index)
                if (sample := sample_from_segment(segment, advantage, current, origin)) is not None:
                    if config.normaliser == "length":
                        sample = dataclasses.replace(sample, rl_T=sample.rl_T / np.float32(own))
                    samples.append(sample)
    whole = {"constant": config.loss_constant * max(rollouts, 1), "length": max(rollouts, 1), "tokens": max(tokens, 1)}
    return samples, Normalisers(rl=whole[config.normaliser])


def sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens of all segments that can be trained on: sampled, and with something before them."""
    return sum(int(np.count_nonzero(s.sampled_T[1:])) for s in trajectory.segments)


def sample_from_segment(segment: Segment, advantage: float, current: Version, origin: tuple[int, int, int]) -> Sample | None:
    """The segment up to its last sampled token; None when nothing was sampled.

    A token at position 0 has no context to be predicted from and carries no weight.
    """
    where = np.flatnonzero(segment.sampled_T[1:])
    if not len(where):
        return None
    end = int(where[-1]) + 2
    sampled_T = np.array(segment.sampled_T[:end], dtype=bool)
    sampled_T[0] = False
    zeros_T = np.zeros(end, dtype=np.float32)
    return Sample(
        ids_T=np.asarray(segment.ids_T[:end], dtype=np.int32),
        rl_T=sampled_T.astype(np.float32),
        hint_T=zeros_T,
        ce_T=zeros_T,
        advantage=advantage,
        old_logprob_T=np.where(sampled_T, segment.logprob_t1_T[:end], 0.0).astype(np.float32),
        version_T=_ordinals(segment, sampled_T, current),
        routes_TLK=None if segment.routes_TLK is None else segment.routes_TLK[:end],
        origin=origin,
    )


def _ordinals(segment: Segment, sampled_T: np.ndarray, current: Version) -> np.ndarray:
    """Ordinal that sampled each token, -1 where none did.

    Equal ordinal means equal weights only for an equal hash: tokens of an abandoned lineage (before a resume) that share the
    current ordinal count as one version old, so they are never taken for fresh.
    """
    if not segment.versions:
        return np.full(len(sampled_T), -1, dtype=np.int32)
    table = np.array(
        [current.ordinal if v.hash == current.hash else min(v.ordinal, current.ordinal - 1) for v in segment.versions], dtype=np.int32
    )
    index_T = segment.version_T[: len(sampled_T)].astype(np.int64)
    return np.where(sampled_T, table[np.maximum(index_T, 0)], -1).astype(np.int32)


def document_sample(ids_T: np.ndarray, mask_T: np.ndarray) -> Sample:
    """A document or a piece of one for the `ce` stream; `mask_T` says which tokens are to be predicted."""
    zeros_T = np.zeros(len(ids_T), dtype=np.float32)
    ce_T = mask_T.astype(np.float32)
    ce_T[:1] = 0.0
    return Sample(
        ids_T=ids_T.astype(np.int32),
        rl_T=zeros_T,
        hint_T=zeros_T,
        ce_T=ce_T,
        old_logprob_T=zeros_T,
        version_T=np.full(len(ids_T), -1, dtype=np.int32),
    )


def pack(samples: Sequence[Sample], row_tokens: int, cost: Cost, normalisers: Normalisers = Normalisers()) -> list[Batch]:
    """Rows of whole samples, balanced by `cost(length)`.

    Example:
        lengths 5, 4, 3, 2 with row_tokens 8   ->   rows (5, 2) and (4, 3)
    """
    rows = plan_rows([len(s) for s in samples], row_tokens, cost)
    return [_row([samples[i] for i in members], normalisers) for members in rows]


def plan_rows(lengths: Sequence[int], row_tokens: int, cost: Cost) -> list[list[int]]:
    """Which samples share a row, as indices in ascending order; the fewest rows the rule finds room in."""
    if not lengths:
        return []
    longest = max(lengths)
    if longest > row_tokens:
        raise ConfigError(f"a segment of {longest} tokens does not fit a row of row_tokens = {row_tokens}; raise it to the context window")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = -(-sum(lengths) // row_tokens)
    while (rows := _fill(lengths, order, count, row_tokens, cost)) is None:
        count += 1
    return sorted(sorted(row) for row in rows if row)


def _fill(lengths: Sequence[int], order: Sequence[int], count: int, row_tokens: int, cost: Cost) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for i in order:
        room = [r for r in range(count) if tokens[r] + lengths[i] <= row_tokens]
        if not room:
            return None
        best = min(room, key=lambda r: (costs[r], r))
        rows[best].append(i)
        tokens[best] += lengths[i]
        costs[best] += cost(lengths[i])
    return rows


def pack_in_order(samples: Sequence[Sample], row_tokens: int, normalisers: Normalisers) -> list[Batch]:
    """Rows filled one after the other, in the order given; for endless shuffled streams, where balance comes by itself."""
    rows: list[list[Sample]] = []
    room = 0
    for sample in samples:
        if len(sample) > row_tokens:
            raise ConfigError(f"a piece of {len(sample)} tokens does not fit a row of row_tokens = {row_tokens}")
        if len(sample) > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(sample)
        room -= len(sample)
    return [_row(row, normalisers) for row in rows]


def _row(members: Sequence[Sample], normalisers: Normalisers) -> Batch:
    starts = np.cumsum([0, *(len(s) for s in members)]).tolist()
    return Batch(
        ids_N=np.concatenate([s.ids_T for s in members]),
        positions_N=np.concatenate([np.arange(len(s), dtype=np.int32) for s in members]),
        bounds=tuple(itertools.pairwise(starts)),
        rl_weight_N=np.concatenate([s.rl_T for s in members]) / np.float32(normalisers.rl),
        hint_weight_N=np.concatenate([s.hint_T for s in members]) / np.float32(normalisers.hint),
        ce_weight_N=np.concatenate([s.ce_T for s in members]) / np.float32(normalisers.ce),
        advantage_N=np.concatenate([np.full(len(s), s.advantage, dtype=np.float32) for s in members]),
        old_logprob_N=np.concatenate([s.old_logprob_T for s in members]),
        version_N=np.concatenate([s.version_T for s in members]),
        routes_NLK=_routes(members),
    )


def _routes(members: Sequence[Sample]) -> np.ndarray | None:
    """Routes of the row; samples without any get rows marked absent."""
    known = next((s.routes_TLK for s in members if s.routes_TLK is not None), None)
    if known is None:
        return None
    kinds = {s.routes_TLK.dtype for s in members if s.routes_TLK is not None}
    if len(kinds) > 1:
        raise RecordError(f"recorded routes of one step are {' and '.join(sorted(map(str, kinds)))}; those of one model have one type")
    absent = ABSENT_ROUTE if known.dtype == np.uint8 else ABSENT_ROUTE_16
    shape = known.shape[1:]
    return np.concatenate([s.routes_TLK if s.routes_TLK is not None else np.full((len(s), *shape), absent, known.dtype) for s in members])
