"""Sequence: one request's tokens while the engine works on it. Chunk: what one step computes of one sequence.

State diagram:

    WAITING --admit--> RUNNING --last token / cancel / deadline / failure--> ENDED
       ^                  |
       `--preempt, swap---'      blocks are given back; sampled tokens stay, their keys and values are computed again

Invariants: `ids` only grows; `computed` positions have keys and values in `blocks`; a RUNNING sequence has
computed < len(ids), because the token sampled last has not been fed through the model yet.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from etude.protocols import Generation
from etude.records import Finish, Sampling, Version


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Mutable on purpose: the one place where the state of a request lives. Only scheduler and engine write to it."""

    __slots__ = (
        "arrived_s",
        "blocks",
        "cached",
        "client",
        "computed",
        "deadline_s",
        "draft",
        "drafting",
        "filled",
        "finish",
        "id",
        "ids",
        "kept",
        "key",
        "keys",
        "limit",
        "logprobs",
        "logprobs_t1",
        "preemptions",
        "priority",
        "prompt_len",
        "pure",
        "registered",
        "routes",
        "row",
        "sampling",
        "scoring",
        "state",
        "stop_ids",
        "token_versions",
        "versions",
        "wants_routes",
    )

    def __init__(
        self,
        *,
        id: str,
        ids: list[int],
        sampling: Sampling,
        limit: int,
        priority: int = 0,
        arrived_s: float = 0.0,
        deadline_s: float = float("inf"),
        wants_routes: bool = False,
        scoring: bool = False,
    ) -> None:
        self.id = id
        self.ids = ids
        """Prompt, then sampled tokens."""
        self.prompt_len = len(ids)
        self.sampling = sampling
        self.stop_ids = frozenset(sampling.stop_ids)
        self.limit = limit
        """Length of `ids` at which generation ends with LENGTH."""
        self.priority = priority
        self.key: tuple[int, int] = (0, 0)
        """Order of service, smaller first; fixed at arrival (see Scheduler.add)."""
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.wants_routes = wants_routes
        self.scoring = scoring
        """Teacher forcing: every position gets a log-prob, nothing is sampled."""

        self.state = State.WAITING
        self.finish: Finish | None = None
        self.client: Any = None
        """Whom the engine tells about tokens; the scheduler never looks at it."""

        self.row = -1
        """Index into the runner's arrays while RUNNING."""
        self.filled = 0
        """Blocks the runner has already copied into its table row."""
        self.blocks: list[int] = []
        self.computed = 0
        self.keys: list[bytes] = []
        """Chain hashes of the first full blocks, under the version they were looked up with."""
        self.registered = 0
        """Leading blocks that are in the prefix cache, or that another block with the same content stands for."""
        self.pure = True
        """All keys and values were computed by the version served now. False after a swap that kept them."""
        self.cached = 0
        """Prompt tokens served from the prefix cache at the first admission."""
        self.preemptions = 0
        self.draft: list[int] = []
        """Tokens that the step in progress also feeds behind `ids`, and that may turn out wrong."""
        self.drafting: Any = None
        """What the drafter remembers of this sequence."""

        self.logprobs: list[float] = []
        self.logprobs_t1: list[float] = []
        self.versions: list[Version] = []
        self.token_versions: list[int] = []
        self.kept: list[bool] = []
        """Of each sampled token: `pure` was False."""
        self.routes: np.ndarray | None = None
        """Rows recorded so far (positions 0, 1, ...): saved at a preemption, and at the end."""

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_len

    def note(self, token: int, logprob: float, logprob_t1: float, version: Version) -> None:
        """Append one sampled token and where it came from."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.logprobs_t1.append(logprob_t1)
        self.kept.append(not self.pure)
        versions = self.versions
        self.token_versions.append(len(versions) - 1 if versions and versions[-1] is version else self._index(version))

    def _index(self, version: Version) -> int:
        for i, known in enumerate(self.versions):
            if known.key == version.key:
                return i
        self.versions.append(version)
        return len(self.versions) - 1


class Chunk(NamedTuple):
    """Positions [begin, end) of one sequence, computed in one step. `end == len(ids)` means a token is due, and then
    the positions of `seq.draft` behind it are computed too."""

    seq: Sequence
    begin: int
    end: int


def join(pieces: Iterable[Generation]) -> Generation:
    """The generation that a stream's pieces are parts of."""
    parts = list(pieces)
    last = parts[-1]
    routes = [part.routes_PTLK for part in parts if part.routes_PTLK is not None]
    kept = [part.kept_T for part in parts if part.kept_T is not None]
    return Generation(
        id=last.id,
        ids=tuple(i for part in parts for i in part.ids),
        logprob_T=np.concatenate([part.logprob_T for part in parts]),
        logprob_t1_T=np.concatenate([part.logprob_t1_T for part in parts]),
        version_T=np.concatenate([part.version_T for part in parts]),
        versions=last.versions,
        routes_PTLK=np.concatenate(routes) if routes else None,
        finish=last.finish,
        cached_tokens=last.cached_tokens,
        kept_T=np.concatenate(kept) if len(kept) == len(parts) else None,
        seconds=last.seconds,
    )
