"""A sampled turn taken apart while it is sampled: reasoning, text, calls, stop strings.

Fed with ids in pieces of any size, the concatenation of what comes out is what the renderer's parser says about all of them
(tests/serve/test_turn.py, random cuts). So text is only given out when no later token can take it back: a line break or the beginning of a
call's mark at the end is held, as is whatever could become a stop string, and a call is given out when its closing mark is there.
Once a call began, text behind it waits for the end of the turn.

A stop string ends the turn at its first occurrence in the text (not in reasoning or in calls); it is cut off, with all that follows.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from etude.records import Message, ToolCall
from etude.text.tokenizer import TextTokenizer

_HELD = re.compile(r"\n?(?:<|<c|<ca|<cal|<call)?\Z")
_CALL = re.compile(r"\n?<call(?=[\s>/])")
_THINK, _UNTHINK = b"<think>", b"</think>"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one feeding brought."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Parser(Protocol):
    """What a turn needs of a renderer."""

    name: str
    stop_ids: tuple[int, ...]

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]: ...


class Turn:
    """One assistant turn. `calls`: whether calls are taken out of the text; without tools they are text like any other."""

    def __init__(self, renderer: Parser, tokenizer: TextTokenizer, *, calls: bool, stops: Sequence[str] = ()) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._calls, self._stops = calls, tuple(stops)
        self.ids: list[int] = []
        self.stopped: str | None = None
        """The stop string that ended it."""
        self._body = -1
        """Index of the first id behind the reasoning; -1 while that is open."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        """Text behind the reasoning, all of it."""
        self._in_calls = False
        self._given_text = self._given_reasoning = self._given_calls = 0

    @property
    def watches(self) -> bool:
        """Whether what is sampled may end it before the engine does."""
        return bool(self._stops)

    def feed(self, ids: Sequence[int]) -> Delta:
        """Take sampled ids; what can be given out now."""
        if self.stopped is not None:
            return Delta()
        self.ids.extend(ids)
        reasoning = ""
        if self._body < 0:
            reasoning = self._open_body()
            if self._body < 0:
                return Delta(reasoning=reasoning)
            new = self._behind_reasoning()
        else:
            new = self._bytes(ids)
        self._text += self._decoder.decode(new)
        return Delta(text=self._settled(), reasoning=reasoning, calls=self._complete_calls())

    def finish(self) -> Delta:
        """The rest. Feed nothing afterwards."""
        message, thinking = self._renderer.parse(self.ids)
        reasoning = message.reasoning[self._given_reasoning :]
        if self.stopped is not None:
            return Delta(reasoning=reasoning)
        whole, calls = self._whole(message, thinking)
        at = self._stop_in(whole)
        if at is not None:
            whole, calls = whole[:at], ()
        return Delta(text=whole[self._given_text :], reasoning=reasoning, calls=calls[self._given_calls :])

    def _whole(self, message: Message, thinking: Sequence[bool]) -> tuple[str, tuple[ToolCall, ...]]:
        """All text and all good calls of the turn; a broken call is text as it was written."""
        if not self._calls:
            if not all(thinking):
                self._body = thinking.index(False)
            return self._stripped(self._behind_reasoning().decode("utf-8", "replace")), ()
        broken = [call.raw for call in message.calls if call.error is not None]
        text = "\n".join([message.text, *broken] if message.text else broken)
        return text, tuple(call for call in message.calls if call.error is None)

    def _open_body(self) -> str:
        """Look whether the reasoning, if there is one, has ended; new text of it."""
        start = b"".join(self._tokenizer.pieces(self.ids[: len(_THINK)]))
        if len(start) < len(_THINK) and _THINK.startswith(start):
            return ""
        message, thinking = self._renderer.parse(self.ids)
        if thinking and not thinking[-1]:
            self._body = thinking.index(False)
        settled = message.reasoning
        if self._body < 0:  # what may be the beginning of the closing mark, or half a character, is held
            settled = settled[: len(settled) - _overlap(settled, _UNTHINK.decode())].rstrip("\n\N{REPLACEMENT CHARACTER}")
        new = settled[self._given_reasoning :]
        self._given_reasoning += len(new)
        return new

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._tokenizer.pieces([i for i in ids if i not in self._renderer.stop_ids]))

    def _behind_reasoning(self) -> bytes:
        """A token may hold the end of the reasoning's mark and what follows it; special tokens of the etude format never do."""
        if self._body < 0:
            return b""
        if self._body == 0 or self._renderer.name == "etude":
            return self._bytes(self.ids[self._body :])
        return self._bytes(self.ids).partition(_UNTHINK)[2]

    def _stripped(self, text: str) -> str:
        """Line breaks between reasoning and text belong to the form, where reasoning is marked in text."""
        return text.lstrip("\n") if self._body > 0 and self._renderer.name != "etude" else text

    def _settled(self) -> str:
        """Text that nothing can take back any more."""
        if self._in_calls:
            return ""
        text = self._stripped(self._text)
        end = len(text)
        if self._calls and (call := _CALL.search(text)) is not None:
            self._in_calls, end = True, call.start()
        elif self._calls:
            end = _held_from(text)
        found = self._stop_in(text[:end] if self._in_calls else text)
        if found is not None:
            end = found
        elif not self._in_calls:
            end = min(end, len(text) - max((_overlap(text, stop) for stop in self._stops), default=0))
        new = text[self._given_text : end]
        self._given_text += len(new)
        return new

    def _stop_in(self, text: str) -> int | None:
        """Where the first stop string stands; it is then what ended the turn."""
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not places:
            return None
        at, self.stopped = min(places)
        return at

    def _complete_calls(self) -> tuple[ToolCall, ...]:
        """Calls that are whole now, up to the first broken one, which more text may still mend."""
        if not self._in_calls or self.stopped is not None or not self._text.rstrip().endswith("</call>"):
            return ()
        message, _ = self._renderer.parse(self.ids)
        good: list[ToolCall] = []
        for call in message.calls:
            if call.error is not None:
                break
            good.append(call)
        new = tuple(good[self._given_calls :])
        self._given_calls += len(new)
        return new


def _held_from(text: str) -> int:
    """Where a line break or a mark that may become a call begins, at the text's end."""
    match = _HELD.search(text)
    assert match is not None, "the empty text at the end matches"
    return match.start()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
