"""The agent loop: `act(query())` until a StopReason. The same in training, evaluation and use.

    query: the transcript -> one assistant message, within what the limits leave
    act:   its calls -> results in call order, as one tool message

Every way of ending is a `StopReason`. A message without a call ends the rollout (DONE); a broken call is answered and the loop goes on.
Trouble of machines is not an ending: `InfraError` passes through, and `Agent.result(StopReason.INFRA)` still gives what was recorded.
Cancelling the task that runs the agent passes through as cancellation; `Agent.cancel()` ends it as CANCELLED. Either way, and in every
other, the background jobs of the rollout are killed before `run` returns.

    agent = Agent("make the tests pass", chat, sandbox, AgentConfig(max_turns=8))
    run = await agent.run()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from etude.agent.chat import Chat
from etude.agent.compaction import ASK, carried_text
from etude.agent.effort import estimated_tokens, measure_effort
from etude.agent.prompts import bounded, prompt_hash, system_text
from etude.agent.toolbox import Toolbox
from etude.agent.tools.base import Desk
from etude.agent.tools.registry import schema_hash
from etude.config import config
from etude.protocols import Reply, Sandbox
from etude.records import Effort, Finish, Message, Segment, StopReason, ToolPolicy

CLOSING_ROOM = 4
"""Positions of the window kept for the tokens that close a turn."""


@config
class AgentConfig:
    max_turns: int = 32
    """Assistant messages, summaries included."""
    max_tokens: int = 8192
    """Sampled tokens of the whole rollout."""
    max_turn_tokens: int = 1024
    """Sampled tokens of one message."""
    window: int = 8192
    """Context length of the policy."""
    time_limit_s: float = 0.0
    """Wall clock of the rollout; 0 for none, as in lockstep, where nothing may depend on a clock."""
    reply_grace_s: float = 5.0
    """How long after the time limit the engine may take to hand over what it has sampled."""
    command_timeout_s: float = 60.0
    """Wall clock of one command."""
    max_parallel_calls: int = 8
    """Calls of one message that run at once; 1 runs them in order, which lockstep needs when commands write files."""
    prompt: Literal["full", "names", "none"] = "full"
    """How much the system message says about tools; a policy trained here needs nothing."""
    instructions: bool = True
    """Honour AGENTS.md in the root of the workspace."""
    instructions_chars: int = 8000
    """Characters of AGENTS.md that are kept."""
    compact_at: int = 0
    """Context tokens that trigger a compaction (M11; 40k and 80k in the sources, scaled to the window here); 0 turns it off."""
    max_summary_tokens: int = 512
    """Sampled tokens of one summary (about 1,000 in the sources, at a 200k window)."""
    scrub: bool = False
    """Strip durations, pids and temporary paths from results of commands, for lockstep runs."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_turn_tokens", "window", "max_parallel_calls", "max_summary_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"agent.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("time_limit_s", "reply_grace_s", "compact_at", "instructions_chars"):
            if getattr(self, name) < 0:
                raise ValueError(f"agent.{name} must be 0 or more, got {getattr(self, name)}")
        if self.command_timeout_s <= 0:
            raise ValueError(f"agent.command_timeout_s must be more than 0, got {self.command_timeout_s}")
        if self.compact_at >= self.window:
            raise ValueError(f"agent.compact_at is {self.compact_at}; it must be below the window of {self.window} tokens")


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """What a rollout's agent did; `rollout` makes a Trajectory of it."""

    messages: tuple[Message, ...]
    segments: tuple[Segment, ...]
    """Empty when a foreign endpoint gave no tokens."""
    stop: StopReason
    effort: Effort
    timings: dict[str, float]
    """Seconds: generate, tools."""
    hashes: dict[str, str]
    """Content hashes: tools, system, renderer, tokenizer."""
    todos_open: tuple[str, ...]
    touched: tuple[str, ...]
    """Files edited with edit_file."""
    summaries: tuple[int, ...] = ()
    """Numbers of the messages that are summaries."""


class Agent:
    """One rollout. `prompt` is the task's text, or messages that end with the user's."""

    def __init__(
        self,
        prompt: str | Sequence[Message],
        chat: Chat,
        sandbox: Sandbox,
        config: AgentConfig | None = None,
        policy: ToolPolicy | None = None,
    ) -> None:
        self.messages: list[Message] = [Message(role="user", text=prompt)] if isinstance(prompt, str) else list(prompt)
        self._chat, self._sandbox = chat, sandbox
        self._config, self._policy = config or AgentConfig(), policy or ToolPolicy()
        self._desk = Desk(sandbox=sandbox, command_timeout_s=self._config.command_timeout_s)
        self._toolbox: Toolbox | None = None
        self._prompt_length = 0
        self._turns = self._sampled = 0
        self._summaries: list[int] = []
        self._compacted_at_turn = 0
        self._timings = {"generate": 0.0, "tools": 0.0}
        self._deadline: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._system = ""

    async def run(self) -> AgentRun:
        """Waits for: the chat and the tools, turn by turn. Ends by a limit at the latest."""
        self._task = asyncio.current_task()
        try:
            await self._begin()
            stop = None
            while stop is None:
                stop = await self._step()
            return self.result(stop)
        except asyncio.CancelledError:
            if not self._cancelled or self._task is None or self._task.uncancel():
                raise
            return self.result(StopReason.CANCELLED)
        finally:
            if self._toolbox is not None:
                await self._toolbox.close()

    async def _step(self) -> StopReason | None:
        """One turn: a message, and the results of its calls."""
        room = await self._room()
        if isinstance(room, StopReason):
            return room
        reply = await self._query(room)
        if reply is None:
            return StopReason.OUT_OF_TIME
        if reply.finish in _ENDINGS:
            return _ENDINGS[reply.finish]
        if reply.message.calls:
            return await self._act(reply.message)
        return StopReason.DONE if reply.finish is Finish.STOP else self._cut_short(reply)

    async def _query(self, max_tokens: int) -> Reply | None:
        """The next assistant message; None when the clock ran out first."""
        try:
            with self._timed("generate"):
                async with asyncio.timeout_at(None if self._deadline is None else self._deadline + self._config.reply_grace_s) as scope:
                    reply = await self._chat.reply(self.messages, max_tokens=max_tokens)
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        self.messages.append(reply.message)
        self._turns += 1
        self._sampled += estimated_tokens(reply.message) if reply.generation is None else len(reply.generation.ids)
        return reply

    async def _act(self, message: Message) -> StopReason | None:
        assert self._toolbox is not None
        try:
            with self._timed("tools"):
                async with asyncio.timeout_at(self._deadline) as scope:
                    results = await self._toolbox.act(message.calls)
        except TimeoutError:
            if not scope.expired():
                raise
            return StopReason.OUT_OF_TIME
        self.messages.append(Message(role="tool", results=results))
        return None

    async def _room(self) -> int | StopReason:
        """Tokens the next message may have, or the limit that is reached. Compacts first where it is time to."""
        c = self._config
        if self._cancelled:
            return StopReason.CANCELLED
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            return StopReason.OUT_OF_TIME
        if self._turns >= c.max_turns:
            return StopReason.OUT_OF_TURNS
        if self._sampled >= c.max_tokens:
            return StopReason.OUT_OF_TOKENS
        context = self._chat.measure(self.messages)
        if c.compact_at and context >= c.compact_at and self._turns > self._compacted_at_turn:
            stop = await self._compact()
            return stop if stop else await self._room()
        space = c.window - context - CLOSING_ROOM
        return min(space, c.max_turn_tokens, c.max_tokens - self._sampled) if space > 0 else StopReason.OUT_OF_CONTEXT

    async def _compact(self) -> StopReason | None:
        """Ask for a summary in the old context, and go on from prompt + summary + state in a new segment (M11)."""
        c = self._config
        self.messages.append(Message(role="user", text=ASK))
        space = c.window - self._chat.measure(self.messages) - CLOSING_ROOM
        if space <= 0:
            return StopReason.OUT_OF_CONTEXT
        reply = await self._query(min(space, c.max_summary_tokens, c.max_tokens - self._sampled))
        if reply is None:
            return StopReason.OUT_OF_TIME
        self._summaries.append(len(self.messages) - 1)
        if reply.finish in _ENDINGS:
            return _ENDINGS[reply.finish]
        self._compacted_at_turn = self._turns
        self._chat.restart(range(self._prompt_length))
        carried = carried_text(reply.message.text, self._desk.todos, self._desk.touched, len(self._summaries) - 1)
        self.messages.append(Message(role="user", text=carried))
        return None

    def _cut_short(self, reply: Reply) -> StopReason:
        """Which limit ended a message that has no call."""
        context = self._chat.measure(self.messages)
        if self._sampled < self._config.max_tokens and context + CLOSING_ROOM >= self._config.window:
            return StopReason.OUT_OF_CONTEXT
        return StopReason.OUT_OF_TOKENS

    async def _begin(self) -> None:
        """The deadline, the system message, the toolbox."""
        c = self._config
        if c.time_limit_s:
            self._deadline = self._chat.deadline = asyncio.get_running_loop().time() + c.time_limit_s
        workdir = (await self._sandbox.info()).workdir if c.scrub else ""
        self._toolbox = Toolbox(self._desk, self._policy, scrub=c.scrub, max_parallel=c.max_parallel_calls, workdir=workdir)
        instructions = ""
        if c.instructions:
            answer = await self._sandbox.call("read", {"path": "AGENTS.md"})
            instructions = bounded(str(answer.get("text", "")), c.instructions_chars) if "error" not in answer else ""
        self._system = system_text(self._policy, c.prompt, instructions)
        if self._system:
            own = self.messages.pop(0).text if self.messages and self.messages[0].role == "system" else ""
            self.messages.insert(0, Message(role="system", text=f"{self._system}\n\n{own}" if own else self._system))
        self._prompt_length = len(self.messages)

    def cancel(self) -> None:
        """End the rollout now, with what it has so far; `run` returns it with CANCELLED."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def result(self, stop: StopReason) -> AgentRun:
        """Everything recorded so far; also good after an InfraError."""
        messages, segments = self._chat.recorded(self.messages), self._chat.segments()
        return AgentRun(
            messages=messages,
            segments=segments,
            stop=stop,
            effort=measure_effort(messages, segments, frozenset(self._summaries)),
            timings={k: round(v, 4) for k, v in self._timings.items()},
            hashes={"tools": schema_hash(self._policy), "system": prompt_hash(self._system), **self._chat.hashes},
            todos_open=tuple(item for done, item in self._desk.todos if not done),
            touched=tuple(self._desk.touched),
            summaries=tuple(self._summaries),
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timings[part] += time.perf_counter() - start


_ENDINGS = {Finish.CANCELLED: StopReason.CANCELLED, Finish.DEADLINE: StopReason.OUT_OF_TIME}


async def run_agent(
    prompt: str | Sequence[Message], chat: Chat, sandbox: Sandbox, config: AgentConfig | None = None, policy: ToolPolicy | None = None
) -> AgentRun:
    """Run one agent to its end."""
    return await Agent(prompt, chat, sandbox, config, policy).run()
