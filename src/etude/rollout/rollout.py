"""One rollout: sandbox -> agent -> trajectory -> grade in a pristine sandbox -> graded record.

The same code runs a training rollout, an evaluation and a showcase; only the label of its ids differs. An `InfraError`
at any point leaves here as itself, after the sandbox is gone: whoever asked for the rollout masks it. Everything the
policy did wrong is in the record instead.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from etude.agent.chat import Chat
from etude.agent.loop import AgentConfig, AgentRun, run_agent
from etude.errors import SandboxError
from etude.protocols import Change, Limits, Sandbox, SandboxHost, SandboxInfo
from etude.records import Graded, Task, Trajectory
from etude.rewards.monitors import monitor
from etude.rewards.parts import RewardConfig, reward_parts
from etude.tasks.grade import grade

DIFF_CHARS = 20_000
"""Characters of the diff kept for people; the grader reads the changes themselves."""
DIFFED_BYTES = 200_000
"""A larger file is named and not compared: the comparison is quadratic, and blocks the loop."""


class ChatFactory(Protocol):
    """A fresh conversation for one rollout."""

    def __call__(self, *, id: str, seed: int) -> Chat: ...


class AgentRollout:
    """Implements `protocols.Rollout` with the product's own agent."""

    def __init__(
        self,
        *,
        host: SandboxHost,
        chat: ChatFactory,
        agent: AgentConfig,
        rewards: RewardConfig,
        label: str = "",
        limits: Limits | None = None,
        max_running: int = 32,
        config_revision: int = 0,
        watch: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self._host, self._chat, self._agent, self._rewards = host, chat, agent, rewards
        self._label, self._limits, self._revision = label, limits or Limits(), config_revision
        self._room = asyncio.Semaphore(max_running)
        self._images: dict[str, str] = {}
        self._watch = watch

    async def __call__(self, task: Task, *, group: int, member: int, seed: int) -> Graded:
        """Waits for: room among the running rollouts, then sandbox, engine and grader in turn."""
        id = f"{self._label}{group}-{member}"
        async with self._room:
            run, changes, info, seconds = await self._roll(task, id, seed)
            start = time.perf_counter()
            report = await grade(task, changes, self._host)
            seconds["grade"] = time.perf_counter() - start
        trajectory = self._trajectory(task, id, group, member, seed, run, changes, info, seconds)
        if self._watch:
            self._watch(trajectory)
        findings = monitor(task, trajectory, changes)
        negative = next((f for f in findings if f.action == "negative"), None)
        if negative is not None:
            report = report.replace(solved=False, detail=f"not counted: {negative.rule} {negative.evidence}"[:500])
        parts = reward_parts(task, trajectory, report, self._rewards)
        return Graded(trajectory=trajectory, parts=parts, report=report, findings=findings)

    async def _roll(self, task: Task, id: str, seed: int) -> tuple[AgentRun, list[Change], SandboxInfo, dict[str, float]]:
        start = time.perf_counter()
        sandbox = await self._host.create(await self._image(task), limits=self._limits, network=task.network, create_id=id)
        try:
            await _run_start_script(task, sandbox)
            made = time.perf_counter() - start
            run = await run_agent(task.prompt, self._chat(id=id, seed=seed), sandbox, self._agent, task.tools)
            ended = time.perf_counter()
            info, changes = await sandbox.info(), await sandbox.diff()
        finally:
            await sandbox.destroy()
        return run, changes, info, {**run.timings, "sandbox": made + time.perf_counter() - ended}

    async def _image(self, task: Task) -> str:
        """The image of a task whose files travel in its record; made once per task."""
        if not task.files:
            return task.workspace
        if task.hash not in self._images:
            self._images[task.hash] = await self._host.add_image({path: text.encode() for path, text in task.files})
        return self._images[task.hash]

    def _trajectory(
        self,
        task: Task,
        id: str,
        group: int,
        member: int,
        seed: int,
        run: AgentRun,
        changes: Sequence[Change],
        info: SandboxInfo,
        seconds: dict[str, float],
    ) -> Trajectory:
        return Trajectory(
            id=id,
            task_id=task.id,
            task_hash=task.hash,
            group=group,
            member=member,
            seed=seed,
            segments=run.segments,
            messages=run.messages,
            stop=run.stop,
            effort=run.effort,
            timings={k: round(v, 4) for k, v in seconds.items()},
            hashes=run.hashes,
            config_revision=self._revision,
            boundary=info.boundary,
            image=info.image,
            snapshot=info.snapshot,
            diff=unified_diff(task, changes),
        )


async def _run_start_script(task: Task, sandbox: Sandbox) -> None:
    if task.start:
        result = await sandbox.exec(["/bin/sh", "-c", task.start], timeout_s=120.0)
        if result.code:
            raise SandboxError(
                f"task {task.id}: its start script ended with {result.code}: {result.output[-300:].decode('utf-8', 'replace')}"
            )


def unified_diff(task: Task, changes: Sequence[Change]) -> str:
    """What the agent changed, as people read it."""
    before = dict(task.files)
    parts: list[str] = []
    for change in changes:
        if change.data is not None and len(change.data) > DIFFED_BYTES:
            parts.append(f"+++ b/{change.path} ({len(change.data)} bytes)\n")
            continue
        old = before.get(change.path, "").splitlines(keepends=True)
        new = (change.data or b"").decode("utf-8", "replace").splitlines(keepends=True)
        parts += difflib.unified_diff(old, new, f"a/{change.path}", f"b/{change.path}")
    return "".join(p if p.endswith("\n") else p + "\n" for p in parts)[:DIFF_CHARS]
