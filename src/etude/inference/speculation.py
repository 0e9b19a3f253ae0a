"""Guesses of the next tokens, so that one step of the model can confirm several.

A drafter proposes tokens; the step feeds them behind the newest token and samples at every one of their positions, each under its true
context and with the noise that its position always has (sampler.py). The first proposal that differs from what was sampled, and all
behind it, is forgotten. So acceptance needs no rule of its own: what is kept IS the sample of the plain engine, token for token where the
numerics do not depend on the batch, and in distribution always. A proposal d is kept with probability p(d), which for a drafter that puts
all its weight on one token is what rejection sampling (Leviathan et al., arXiv 2211.17192) gives too: min(1, p(d) / 1).

Keys and values of forgotten proposals stay in their slots until the positions are computed again; no length covers them before that, and
their blocks are not offered to the prefix cache, which takes known tokens only.

`NGram` proposes what followed the latest earlier occurrence of the last tokens (prompt lookup): edits repeat the file they change. Heads
of the model that predict further tokens are a `Drafter` too: proposals from its `propose`, whatever it computes them from.
"""

from __future__ import annotations

from typing import Protocol

from etude.inference.config import EngineConfig
from etude.inference.sequence import Sequence


class Drafter(Protocol):
    """Who proposes. One drafter serves all sequences of an engine; what it remembers of one is in `seq.drafting`."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Tokens that may follow `seq.ids`, `most` of them at most; empty when a guess would not pay."""
        ...

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """How the last proposal did."""
        ...


def make_drafter(config: EngineConfig) -> Drafter | None:
    return NGram(longest=config.draft_max) if config.speculation == "ngram" else None


class _Memory:
    """Of one sequence."""

    __slots__ = ("failures", "known", "length", "pause", "places")

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], int] = {}
        """n-gram -> position behind its latest occurrence; n-grams of all sizes in one table."""
        self.known = 0
        """Tokens whose n-grams are in the table."""
        self.length = 4
        self.failures = 0
        self.pause = 0
        """Length of `ids` below which nothing is proposed."""


class NGram:
    """Prompt lookup with a length that follows its luck: doubled when all was right, cut to what was, and after proposals that
    were wrong from the start a pause that doubles."""

    def __init__(self, *, longest: int, sizes: tuple[int, ...] = (4, 3, 2)) -> None:
        self._longest = longest
        self._sizes = sizes
        """Sizes of n-grams, the most telling first."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        memory = seq.drafting
        if memory is None:
            memory = seq.drafting = _Memory()
        ids = seq.ids
        if most < 1 or len(ids) < memory.pause:
            return []
        self._read(memory, ids)
        for size in self._sizes:
            place = memory.places.get(tuple(ids[-size:]))
            if place is not None:
                return ids[place : place + min(memory.length, most, self._longest)]
        return []

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        memory: _Memory = seq.drafting
        if accepted:
            memory.failures = 0
            memory.length = min(2 * proposed, self._longest) if accepted == proposed else accepted + 1
            return
        memory.failures += 1
        memory.length = max(memory.length // 2, 1)
        if memory.failures > 1:
            memory.pause = len(seq.ids) + (1 << min(memory.failures, 6))

    def _read(self, memory: _Memory, ids: list[int]) -> None:
        """Note every n-gram that a known token follows; the one at the very end has none yet."""
        for end in range(max(memory.known, 1), len(ids)):
            for size in self._sizes:
                if size <= end:
                    memory.places[tuple(ids[end - size : end])] = end
        memory.known = len(ids)
