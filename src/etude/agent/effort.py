"""The six effort counts of M13: thinking, call, output and final tokens, calls, turns.

Counted from the recorded tokens, so that thinking + call + final tokens equal the sampled tokens (test). A turn with a call spends call
tokens, its accompanying words included; a turn without one spends final tokens; a summary is thinking, for nobody else reads it.
A foreign endpoint gives no tokens: there a token is taken for four characters, which is an estimate and only used for limits and display.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.records import Effort, Message, Segment
from etude.text.calls import format_assistant, format_results

CHARS_PER_TOKEN = 4


def measure_effort(messages: Sequence[Message], segments: Sequence[Segment], summaries: frozenset[int] = frozenset()) -> Effort:
    """`summaries` are the numbers of messages written to compact the history."""
    thinking, spoken, output = _counted(messages, segments) if segments else _estimated(messages)
    kinds = {"call": 0, "final": 0}
    for index, message in enumerate(messages):
        if index in summaries:
            thinking += spoken[index]
        elif message.role == "assistant":
            kinds["call" if message.calls else "final"] += spoken[index]
    answers = [m for i, m in enumerate(messages) if m.role == "assistant"]
    return Effort(
        thinking_tokens=thinking,
        call_tokens=kinds["call"],
        output_tokens=output,
        final_tokens=kinds["final"],
        calls=sum(len(m.calls) for i, m in enumerate(messages) if m.role == "assistant" and i not in summaries),
        turns=len(answers),
    )


def message_chars(message: Message) -> int:
    """Characters of a message as the policy sees it."""
    body = format_results(message.results) if message.role == "tool" else format_assistant(message.text, message.calls)
    return len(body) + len(message.reasoning)


def estimated_tokens(message: Message) -> int:
    return -(-message_chars(message) // CHARS_PER_TOKEN)


def _counted(messages: Sequence[Message], segments: Sequence[Segment]) -> tuple[int, list[int], int]:
    """(thinking tokens, other sampled tokens of each message, tokens of tool messages)."""
    thinking, spoken = 0, np.zeros(len(messages), np.int64)
    for segment in segments:
        thinking += int(segment.thinking_T.sum())
        said = segment.message_T[segment.sampled_T & ~segment.thinking_T]
        spoken += np.bincount(said, minlength=len(messages))[: len(messages)]
    output = sum(m.span.end - m.span.start for m in messages if m.role == "tool" and m.span is not None)
    return thinking, spoken.tolist(), output


def _estimated(messages: Sequence[Message]) -> tuple[int, list[int], int]:
    thinking = sum(-(-len(m.reasoning) // CHARS_PER_TOKEN) for m in messages)
    spoken = [estimated_tokens(m.replace(reasoning="")) for m in messages]
    return thinking, spoken, sum(s for s, m in zip(spoken, messages, strict=True) if m.role == "tool")
