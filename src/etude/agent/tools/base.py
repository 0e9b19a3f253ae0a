"""What tools share: the desk of one rollout, and how a tool says no.

A handler takes the desk and checked arguments and returns the text of the result. Whatever is the policy's own fault it raises as
`Refused`, which becomes a tool result; trouble of the sandbox is a `SandboxError` and passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import SandboxError
from etude.protocols import Sandbox, ToolSpec
from etude.records import ToolError

TEXT, INTEGER, FLAG = "text", "integer", "true|false"
"""Types of parameters. Any other type with a bar is a choice, such as run|poll|kill."""
CALL_TIMEOUT_S = 30.0
"""For operations that only touch files."""


class Refused(Exception):
    """The call cannot be done, and the policy is told why."""

    def __init__(self, error: ToolError, text: str) -> None:
        super().__init__(text)
        self.error = error
        self.text = text


@dataclass(kw_only=True)
class Desk:
    """State of one rollout that tools read and change."""

    sandbox: Sandbox
    command_timeout_s: float = 60.0
    todos: list[tuple[bool, str]] = field(default_factory=list)
    """(done, item)"""
    touched: dict[str, None] = field(default_factory=dict)
    """Paths edited, in order of the calls."""
    jobs: dict[str, None] = field(default_factory=dict)
    """Background jobs that may be running."""
    starting: set[asyncio.Task[dict[str, Any]]] = field(default_factory=set)
    """Jobs whose start has been asked for and not answered."""
    has_ruff: bool = True
    """Until the sandbox answers that it has none."""

    async def ask(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """One operation of the tool server; its refusal becomes ours."""
        answer = await self.sandbox.call(op, arguments, timeout_s=timeout_s)
        if "error" in answer:
            kind = answer["error"] if answer["error"] in set(ToolError) else ToolError.FAILED
            raise Refused(ToolError(kind), str(answer.get("text", "")))
        return answer

    async def ask_text(self, op: str, arguments: Mapping[str, Any]) -> str:
        text = (await self.ask(op, arguments)).get("text")
        if not isinstance(text, str):
            raise SandboxError(f"the tool server answered {op!r} without a text; its version does not fit this harness")
        return text


Handler = Callable[[Desk, Mapping[str, Any]], Awaitable[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    spec: ToolSpec
    run: Handler
    from_commands: bool = False
    """The result holds output of commands, so durations, pids and temporary paths may be scrubbed from it."""


def output_text(answer: Mapping[str, Any]) -> str:
    """Output of a command as text, without its last line break."""
    output = answer.get("output", "")
    text = output.decode("utf-8", "replace") if isinstance(output, bytes) else str(output)
    return text.removesuffix("\n")
