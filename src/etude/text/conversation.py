"""The token list of one conversation, which only ever extends, and what is recorded about each token.

What was sampled is what is trained: an assistant turn is stored as the ids the engine returned, followed by the renderer's closing
ids, and never rendered again. Messages of the harness are rendered once, when they are added.

A conversation is a chain of segments. `restart(keep)` (compaction) starts the next segment with some earlier messages rendered anew; its
`parent` is the segment before. Messages are numbered across the chain, and a message kept into a later segment keeps its number; its
span names the segment where it first stood.

Invariants (tests/text/test_conversation.py, random conversations):
- the ids of a segment at any time are a prefix of its ids at any later time;
- sampled positions carry the generation's ids, log-probs and versions, all others carry 0, 0 and -1;
- spans of a segment's messages tile it, in order.

The token at position t of a generation has its routes recorded when it is fed through the model, so the last sampled one gets its row
from the next request, if there is one. A row, once recorded, is kept: it is what the policy computed when it sampled.

T tokens, P prompt tokens, L layers, K experts per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from etude.errors import EngineError
from etude.protocols import Generation
from etude.records import ABSENT_ROUTE, ABSENT_ROUTE_16, Message, Sampling, Segment, Span, Version
from etude.text.renderer import TurnRenderer


class Conversation:
    """Example:
    conversation = Conversation(renderer)
    conversation.add(Message(role="user", text="fix it"))
    generation = await engine.generate(GenerateRequest(id="r0", ids=conversation.open_turn(), sampling=sampling))
    message = conversation.accept(generation)
    """

    def __init__(
        self,
        renderer: TurnRenderer,
        *,
        sampling: Sampling | None = None,
        engine: str = "",
        numerics: str = "fast",
        cache_policy: str = "keep",
    ) -> None:
        self._renderer = renderer
        self._facts = {"sampling": sampling or Sampling(), "engine": engine, "numerics": numerics, "cache_policy": cache_policy}
        self._tapes = [_Tape(renderer.start(), None)]
        self.messages: list[Message] = []
        """Every message of the chain, with its span."""

    def __len__(self) -> int:
        """Tokens of the present segment."""
        return len(self._tapes[-1].ids)

    @property
    def ids(self) -> list[int]:
        """Token ids of the present segment."""
        return list(self._tapes[-1].ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._renderer.stop_ids

    def add(self, message: Message) -> Message:
        """Append a message of the harness (or a turn that was not sampled here); returns it with its span."""
        tape = self._tapes[-1]
        start = len(tape.ids)
        tape.append(tape.renderer.render(message), len(self.messages))
        return self._store(message, start)

    def context_length(self) -> int:
        """Tokens of the context for the policy's turn, without making a list of them."""
        tape = self._tapes[-1]
        tape.opening = tape.renderer.open_assistant()
        return len(tape.ids) + len(tape.opening)

    def open_turn(self) -> list[int]:
        """The context for the policy's turn: everything so far and the tokens that ask for the turn. Changes nothing by itself."""
        tape = self._tapes[-1]
        tape.opening = tape.renderer.open_assistant()
        return [*tape.ids, *tape.opening]

    def accept(self, generation: Generation) -> Message:
        """Append what was sampled after `open_turn`, close the turn, and return its message."""
        tape = self._tapes[-1]
        assert tape.opening is not None, "accept without open_turn"
        _check(generation)
        index, start = len(self.messages), len(tape.ids)
        message, thinking = tape.renderer.parse(generation.ids)
        closing = tape.renderer.close_assistant(generation.ids)
        tape.append(tape.opening, index)
        tape.opening = None
        tape.append_sampled(generation, thinking, index)
        tape.append(closing, index)
        tape.seen = len(tape.ids)
        calls = tuple(call.replace(id=f"m{index}{call.id}") for call in message.calls)
        return self._store(message.replace(calls=calls), start)

    def restart(self, keep: Sequence[int]) -> None:
        """Start a new segment (after a compaction) with the kept messages, given by number."""
        tape = _Tape(self._renderer.start(), len(self._tapes) - 1)
        for index in keep:
            tape.append(tape.renderer.render(self.messages[index]), index)
        self._tapes.append(tape)

    def segment(self) -> Segment:
        """The present segment as a record. A turn that was opened and not accepted is no part of it."""
        return self._tapes[-1].segment(self._facts)

    def segments(self) -> tuple[Segment, ...]:
        """The whole chain."""
        return tuple(tape.segment(self._facts) for tape in self._tapes)

    def record(self) -> tuple[tuple[Message, ...], tuple[Segment, ...]]:
        """Messages and segments for a trajectory: each segment up to the end of its last sampled turn.

        What was added behind it was never seen by the policy and may not even fit its window; such messages have no span, and a
        segment in which nothing was sampled is left out.
        """
        messages = tuple(
            m if m.span is None or m.span.end <= self._tapes[m.span.segment].seen else m.replace(span=None) for m in self.messages
        )
        return messages, tuple(tape.segment(self._facts, tape.seen) for tape in self._tapes if tape.seen)

    def _store(self, message: Message, start: int) -> Message:
        message = message.replace(span=Span(segment=len(self._tapes) - 1, start=start, end=len(self)))
        self.messages.append(message)
        return message


class _Tape:
    """Columns of one segment while it grows."""

    def __init__(self, renderer: TurnRenderer, parent: int | None) -> None:
        self.renderer = renderer
        self.parent = parent
        self.opening: list[int] | None = None
        self.seen = 0
        """Tokens up to the end of the last sampled turn."""
        self.ids = array("i")
        self.sampled = bytearray()
        self.thinking = bytearray()
        self.logprob = array("f")
        self.logprob_t1 = array("f")
        self.version = array("h")
        self.message = array("i")
        self.versions: dict[tuple[int, int, str], tuple[int, Version]] = {}
        self.routes: np.ndarray | None = None

    def append(self, ids: Sequence[int], message: int) -> None:
        """Append tokens that were not sampled."""
        n = len(ids)
        self.ids.extend(ids)
        self.sampled.extend(bytes(n))
        self.thinking.extend(bytes(n))
        self.logprob.extend([0.0] * n)
        self.logprob_t1.extend([0.0] * n)
        self.version.extend([-1] * n)
        self.message.extend([message] * n)

    def append_sampled(self, generation: Generation, thinking: Sequence[bool], message: int) -> None:
        prompt, n = len(self.ids), len(generation.ids)
        self.ids.extend(generation.ids)
        self.sampled.extend(b"\1" * n)
        self.thinking.extend(bytes(thinking))
        self.logprob.extend(np.asarray(generation.logprob_T, np.float32).tolist())
        self.logprob_t1.extend(np.asarray(generation.logprob_t1_T, np.float32).tolist())
        self.version.extend([self._version_index(generation.versions[int(v)]) for v in generation.version_T])
        self.message.extend([message] * n)
        if generation.routes_PTLK is not None:
            self._merge_routes(generation.routes_PTLK, prompt + n)

    def _version_index(self, version: Version) -> int:
        """Versions are numbered in order of first use; one that sampled nothing gets no number."""
        return self.versions.setdefault(version.key, (len(self.versions), version))[0]

    def _merge_routes(self, routes_PTLK: np.ndarray, total: int) -> None:
        """Fill rows that are absent so far. `routes_PTLK` begins at the segment's first token."""
        rows = min(len(routes_PTLK), total)
        if self.routes is None or len(self.routes) < total:
            grown = np.full((max(2 * total, 256), *routes_PTLK.shape[1:]), _absent(routes_PTLK.dtype), routes_PTLK.dtype)
            if self.routes is not None:
                grown[: len(self.routes)] = self.routes
            self.routes = grown
        target = self.routes[:rows]
        empty = (target == _absent(target.dtype)).all(axis=(1, 2))
        target[empty] = routes_PTLK[:rows][empty]

    def segment(self, facts: dict, n: int | None = None) -> Segment:
        """The first n tokens as a record; all of them without n."""
        n = len(self.ids) if n is None else n
        return Segment(
            ids_T=np.array(self.ids[:n], np.int32),
            sampled_T=np.frombuffer(self.sampled[:n], np.uint8).astype(bool),
            logprob_T=np.array(self.logprob[:n], np.float32),
            logprob_t1_T=np.array(self.logprob_t1[:n], np.float32),
            version_T=np.array(self.version[:n], np.int16),
            message_T=np.array(self.message[:n], np.int32),
            thinking_T=np.frombuffer(self.thinking[:n], np.uint8).astype(bool),
            versions=tuple(version for _, version in self.versions.values()),
            routes_TLK=self._routes(n),
            parent=self.parent,
            **facts,
        )

    def _routes(self, n: int) -> np.ndarray | None:
        if self.routes is None:
            return None
        out = np.full((n, *self.routes.shape[1:]), _absent(self.routes.dtype), self.routes.dtype)
        rows = min(n, len(self.routes))
        out[:rows] = self.routes[:rows]
        return out


def _absent(dtype: np.dtype) -> int:
    return ABSENT_ROUTE if dtype == np.uint8 else ABSENT_ROUTE_16


def _check(generation: Generation) -> None:
    """An engine that answers with columns of different lengths would poison training silently."""
    n = len(generation.ids)
    for name in ("logprob_T", "logprob_t1_T", "version_T"):
        if len(getattr(generation, name)) != n:
            raise EngineError(
                f"request {generation.id!r}: {n} ids but {len(getattr(generation, name))} values in {name}; the engine is broken"
            )
    if n and (int(min(generation.version_T)) < 0 or int(max(generation.version_T)) >= len(generation.versions)):
        raise EngineError(
            f"request {generation.id!r}: version_T points outside its {len(generation.versions)} versions; the engine is broken"
        )
