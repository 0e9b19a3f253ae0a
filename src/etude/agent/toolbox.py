"""Runs the calls of one assistant message and gives their results in call order.

Calls of a message run at the same time, except that a call waits for an earlier one it could not be told apart from: an edit and a
command, search or listing (what the command sees would be a race), and an edit and another touch of the same file. Two commands do
run at the same time. `max_parallel = 1` runs everything in order, which is what a reproducible run uses.

Every call gets a result. Unknown and removed tools, broken calls and bad arguments are results that say what exists. A `SandboxError`
of any call cancels the others and passes through. `close` ends the rollout's background jobs.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import time
from collections.abc import Sequence

from etude.agent.tools.base import Desk, Refused
from etude.agent.tools.registry import TOOLS, check_arguments, find
from etude.agent.tools.terminal import end_jobs
from etude.records import ToolCall, ToolError, ToolPolicy, ToolResult
from etude.text.calls import why_broken


class Toolbox:
    """The tools of one rollout."""

    def __init__(self, desk: Desk, policy: ToolPolicy, *, scrub: bool = False, max_parallel: int = 8, workdir: str = "") -> None:
        self.desk = desk
        self._policy = policy
        self._scrub = scrub
        self._workdir = workdir
        self._slots = asyncio.Semaphore(max_parallel)
        self._in_order = max_parallel == 1

    async def act(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Consumes calls, produces one result each. Waits for: the slowest call."""
        tasks: list[asyncio.Task[ToolResult]] = []
        for call in calls:
            before = [t for t, earlier in zip(tasks, calls, strict=False) if self._in_order or must_wait(call, earlier)]
            tasks.append(asyncio.create_task(self._after(before, call)))
        try:
            results = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for call, result in zip(calls, results, strict=True):
            if call.name == "edit_file" and result.error is None:
                self.desk.touched[posixpath.normpath(call.arguments["path"])] = None
        return results

    async def close(self) -> None:
        """End what the rollout left running; finishes even if the caller is cancelled again."""
        await asyncio.shield(asyncio.ensure_future(end_jobs(self.desk)))

    async def _after(self, before: Sequence[asyncio.Task[ToolResult]], call: ToolCall) -> ToolResult:
        if before:
            await asyncio.wait(before)
        async with self._slots:
            return await self._one(call)

    async def _one(self, call: ToolCall) -> ToolResult:
        start = time.perf_counter()
        error: ToolError | None = None
        try:
            text = await self._run(call)
        except Refused as refused:
            error, text = refused.error, refused.text
        if self._scrub and call.name in TOOLS and TOOLS[call.name].from_commands:
            text = scrubbed(text, self._workdir)
        text, cut = truncated(text, self._policy.max_result_chars)
        seconds = 0.0 if self._scrub else round(time.perf_counter() - start, 4)
        return ToolResult(call_id=call.id, name=call.name, text=text, error=error, truncated_chars=cut, seconds=seconds)

    async def _run(self, call: ToolCall) -> str:
        if call.error is not None:
            why = why_broken(call.raw) or "it does not have the form of a call"
            raise Refused(call.error, f'the call cannot be read: {why}; write <call name="tool">, its parameters, </call>')
        tool, spec = find(call.name, self._policy)
        arguments, notes = check_arguments(spec, call.arguments, self._policy)
        text = await tool.run(self.desk, arguments)
        return "\n".join([text, *(f"[{note}]" for note in notes)])


def must_wait(later: ToolCall, earlier: ToolCall) -> bool:
    """Whether the later of two calls of a message would race with the earlier one."""
    edits = [call for call in (later, earlier) if call.name == "edit_file"]
    if not edits:
        return False
    names = {later.name, earlier.name}
    if names <= {"edit_file", "read_file"}:
        return _path(later) == _path(earlier)
    return "todo" not in names


def _path(call: ToolCall) -> str:
    return posixpath.normpath(call.arguments.get("path", ""))


def truncated(text: str, limit: int) -> tuple[str, int]:
    """Head and tail of a long text with a note of what was cut between them, and the number of characters cut."""
    if len(text) <= limit:
        return text, 0
    note = "\n[... {} characters cut here ...]\n"
    keep = max(limit - len(note.format(len(text))), 0)
    head, tail = keep - keep // 2, keep // 2
    cut = len(text) - head - tail
    return text[:head] + note.format(cut) + text[len(text) - tail :], cut


_TEMPORARY = r"(/(?:private/)?(?:var/)?tmp|/dev/shm|/var/folders)/"
_SCRUBS = (
    (re.compile(r"\b(?:\d+m)?\d+\.\d+( ?)(s|ms|us|sec|secs|seconds)\b(?: \(\d+:\d\d:\d\d\))?"), r"0.00\1\2"),
    (re.compile(r"\b(pid|PID)([ =:#]*)\d+"), r"\1\g<2>0"),
    (re.compile(_TEMPORARY + r"[^\s'\",:;)\]}]+"), r"\1/x"),
    (re.compile(r"\b0x[0-9a-f]{6,16}\b"), "0x0"),
)


def scrubbed(text: str, workdir: str = "") -> str:
    """Command output without what differs from run to run: durations, process ids, temporary paths, addresses.

    A workspace that lies in a temporary folder is called /workspace, so that paths below it stay readable.
    """
    if re.match(_TEMPORARY, workdir):
        text = text.replace(workdir.rstrip("/"), "/workspace")
    for pattern, replacement in _SCRUBS:
        text = pattern.sub(replacement, text)
    return text
