"""What an engine checks at its door, the same for every engine: native, scripted, or behind HTTP. Imports no torch.

A refusal is a UserError that names the value and the remedy, before anything is computed or queued. A prompt that does not fit
is a ContextError, so that a caller can tell "compact the context" from "the request is malformed".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from etude.errors import ContextError, UserError
from etude.protocols import GenerateRequest
from etude.records import Sampling


def check_request(request: GenerateRequest, *, vocab: int, window: int, capacity: int | None = None) -> list[int]:
    """The request's ids as plain integers. `window`: positions of the model; `capacity`: tokens that fit the cache, if that is less."""
    if not isinstance(request.id, str) or not request.id:
        raise UserError(f"a request needs an id, a text that no other request in progress has; got {request.id!r}")
    check_sampling(request.sampling, vocab)
    deadline_s = request.deadline_s
    if deadline_s is not None and not deadline_s >= 0:
        raise UserError(f"deadline_s is {deadline_s}; give the seconds from now, 0 or more, or None for no deadline")
    if type(request.priority) is not int:
        raise UserError(f"priority is {request.priority!r}; give an integer, 0 for the usual, lower is served first")
    return check_ids(request.ids, vocab=vocab, window=window, capacity=capacity, room=1)


def check_sampling(sampling: Sampling, vocab: int) -> None:
    """Refuse parameters that define no distribution, and stop ids that could never come."""
    if not 0.0 <= sampling.temperature < math.inf:
        raise UserError(f"sampling.temperature is {sampling.temperature}; give 0 (greedy) or a positive number")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UserError(f"sampling.top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise UserError(f"sampling.top_k is {sampling.top_k}; give 0 (off) or a positive number")
    if sampling.max_tokens < 1:
        raise UserError(f"sampling.max_tokens is {sampling.max_tokens}; it must be at least 1")
    for stop in sampling.stop_ids:
        if not 0 <= stop < vocab:
            raise UserError(f"stop id {stop} is outside the vocabulary of {vocab}; was another tokenizer used?")


def check_temperature(temperature: float) -> None:
    """Of a score: log-probs of a one-point distribution say nothing."""
    if not 0.0 < temperature < math.inf:
        raise UserError(f"score needs a temperature above 0, got {temperature}")


def check_ids(ids: Sequence[int], *, vocab: int, window: int, capacity: int | None = None, room: int = 0) -> list[int]:
    """The given ids as plain integers. `room`: tokens of the window that must stay free."""
    try:
        known = list(map(operator.index, ids))
    except TypeError as error:
        raise UserError(f"token ids must be integers: {error}") from error
    if not known:
        raise UserError("the prompt is empty; give at least one token id")
    if min(known) < 0 or max(known) >= vocab:
        bad = next(i for i in known if not 0 <= i < vocab)
        raise UserError(f"token id {bad} is outside the vocabulary of {vocab}; was another tokenizer used?")
    if len(known) + room > window:
        raise ContextError(f"{len(known)} tokens do not fit the model's window of {window}; shorten or compact the context", limit=window)
    if capacity is not None and len(known) > capacity:
        raise ContextError(
            f"{len(known)} tokens do not fit the cache of {capacity} tokens; raise engine.cache_bytes", limit=capacity, memory=True
        )
    return known
