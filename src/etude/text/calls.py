r"""The XML-like form in which a policy writes tool calls, and reads their results.

    <call name="edit_file">
    <path>shop/stats.py</path>
    <old>    raise NotImplementedError</old>
    <new>    return 1</new>
    </call>

A value is raw text up to the first `</param>`, never trimmed. A literal `</param>` inside it is written `<\/param>`, and where a value
already has backslashes there, one more is added: escaping is a bijection, so `parse(format(x)) == x` for every value. Results use the
same rule, so a file that contains `</result>` cannot pass for the end of its own result.

The parser is total. A call that cannot be read becomes a `ToolCall` with `error=BAD_CALL` and its text in `raw`; `why_broken(raw)` says
what is wrong with it in words for the policy. Parsing goes on behind it, so one broken call does not take the others with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.errors import UserError
from etude.records import Message, ToolCall, ToolError, ToolResult

NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_START = re.compile(r"<call(?=[\s>/]|\Z)")
_HEAD = re.compile(r'<call\s+name="([^"<>\n]+)"\s*>')
_PARAM = re.compile(rf"\s*<({NAME})>")
_CLOSE = re.compile(r"\s*</call>")
_RESULT = re.compile(r'<result(?: error="([a-z_]*)")?>(.*?)</result>', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """An assistant's text taken apart."""

    text: str
    """What stands outside the calls, without the line breaks that set calls apart."""
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class _Scan:
    end: int
    name: str
    arguments: dict[str, str]
    problem: str = ""


def parse_calls(text: str) -> Parsed:
    """Take the calls out of an assistant's text. Never raises. Ids are c0, c1 ... in order."""
    outside: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (start := _START.search(text, at)) is not None:
        outside.append(text[at : start.start()])
        scan = _scan(text, start.start())
        raw = text[start.start() : scan.end]
        error = ToolError.BAD_CALL if scan.problem else None
        calls.append(ToolCall(id=f"c{len(calls)}", name=scan.name, arguments=scan.arguments, raw=raw if error else "", error=error))
        at = scan.end
    outside.append(text[at:])
    return Parsed(text=_joined(outside), calls=tuple(calls))


def why_broken(raw: str) -> str:
    """What is wrong with the text of a call, or "" when nothing is."""
    return _scan(raw, 0).problem


def format_call(name: str, arguments: Mapping[str, str]) -> str:
    """The text of one call. Names of tools and parameters must be plain names; values may be any text."""
    for word in (name, *arguments):
        if not re.fullmatch(NAME, word):
            raise UserError(f"{word!r} cannot name a tool or a parameter; use letters, digits, '_', '-' and '.'")
    lines = [f"<{key}>{escape(value, key)}</{key}>\n" for key, value in arguments.items()]
    return f'<call name="{name}">\n{"".join(lines)}</call>'


def format_assistant(text: str, calls: Iterable[ToolCall]) -> str:
    """An assistant's text with its calls behind it; a broken call is repeated as it was written."""
    parts = [call.raw or format_call(call.name, call.arguments) for call in calls]
    return "\n".join([text, *parts] if text else parts)


def format_results(results: Iterable[ToolResult], mark: str = "result", edge: str = "") -> str:
    """The text of a tool message: results in call order. `edge` is put inside each mark, next to it."""
    return "\n".join(_result(r, mark, edge) for r in results)


def parse_results(text: str) -> list[tuple[str, str]]:
    """(text, error) of each result in a tool message's text."""
    return [(unescape(body, "result"), error or "") for error, body in _RESULT.findall(text)]


def escape(value: str, mark: str) -> str:
    r"""`value` with every `</mark>` (and `<\/mark>`, ...) given one more backslash."""
    return re.sub(rf"<(\\*)/{re.escape(mark)}>", lambda m: f"<\\{m[1]}/{mark}>", value)


def unescape(value: str, mark: str) -> str:
    return re.sub(rf"<\\(\\*)/{re.escape(mark)}>", lambda m: f"<{m[1]}/{mark}>", value)


def _result(result: ToolResult, mark: str, edge: str) -> str:
    error = f' error="{result.error.value}"' if result.error else ""
    return f"<{mark}{error}>{edge}{escape(result.text, mark)}{edge}</{mark}>"


def _scan(text: str, start: int) -> _Scan:
    """Read one call that begins at `start`."""
    head = _HEAD.match(text, start)
    if head is None:
        return _Scan(_recover(text, start + 1), "", {}, 'a call begins with <call name="tool">')
    name, at, problem = head[1], head.end(), ""
    arguments: dict[str, str] = {}
    while (close := _CLOSE.match(text, at)) is None:
        param = _PARAM.match(text, at)
        if param is None:
            return _Scan(_recover(text, at), name, arguments, problem or _stray(text, at))
        key = param[1]
        stop = text.find(f"</{key}>", param.end())
        if stop < 0:
            return _Scan(_recover(text, param.end()), name, arguments, problem or f"<{key}> is never closed with </{key}>")
        if key in arguments:
            problem = problem or f"the parameter {key!r} is given twice"
        arguments.setdefault(key, unescape(text[param.end() : stop], key))
        at = stop + len(key) + 3
    return _Scan(close.end(), name, arguments, problem)


def _stray(text: str, at: int) -> str:
    rest = text[at:].lstrip()
    if not rest:
        return "the call is never closed with </call>"
    return f"expected <parameter> or </call>, found {rest[:30]!r}"


def _recover(text: str, at: int) -> int:
    """Where a broken call ends: behind the next </call>, or before the next call, or at the end of the text."""
    start = _START.search(text, at)
    limit = start.start() if start else len(text)
    close = text.find("</call>", at, limit)
    return close + len("</call>") if close >= 0 else limit


def _joined(outside: list[str]) -> str:
    """Text outside calls. One line break before the first call, and those around later pieces, belong to the form."""
    first, *rest = outside
    if not rest:
        return first
    pieces = [first.removesuffix("\n"), *(p.strip("\n") for p in rest)]
    return "\n".join(p for i, p in enumerate(pieces) if p.strip() or (i == 0 and p))


def assistant_message(text: str, reasoning: str = "") -> Message:
    """The message an assistant's text stands for."""
    parsed = parse_calls(text)
    return Message(role="assistant", text=parsed.text, reasoning=reasoning, calls=parsed.calls)
