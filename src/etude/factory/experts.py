"""Expert traces fall out of deletion: the removed code is the answer.

An `Expert` stands in for the policy in the real agent loop, with the real tools in a real sandbox, and knows the right
body and the plausible wrong ones. It errs on purpose, with rates from `ExpertConfig`: a policy that copies it is mediocre
in ways that reinforcement can mend (it writes a wrong body, does not run the tests, does not mend what they show, calls
a tool that does not exist), and it also sees how each of these is recovered from.

Experts come in two habits, as people do. The careful one first searches for the function, which shows its uses and its tests,
errs less, and mostly tests and mends; the hasty one seldom does. A trace keeps one habit from its first call to its last, so a policy
learns both and which is which, and mixes them: what reinforcement can do for it is to choose.

Test runs are the cost of a trace, and depend on nothing but the files and the command. `RememberedTests` runs each such
pair once per task and answers the rest from memory, so that many traces of one task cost little more than one.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.chat import TextChat
from etude.agent.loop import AgentConfig, run_agent
from etude.config import config
from etude.protocols import Reply, Sandbox, SandboxHost
from etude.records import Finish, Message, Task, content_hash
from etude.tasks.katas.package import Kata
from etude.text.calls import assistant_message, format_call


@config
class Habit:
    """How an expert works: rates of what it does on its way from one body to the next."""

    wrong_first: float
    """The first body is a wrong one."""
    test: float
    """It runs the tests after writing a body."""
    mend: float
    """It writes another body when the tests fail, and again; otherwise it stops there."""
    mend_right: float
    """The other body is the right one."""


@config
class ExpertConfig:
    """How often the expert does what. Rates of mistakes make the policy mediocre; those of recovery make it able."""

    careful_share: float = 0.4
    """Traces of the careful habit; the others are hasty."""
    careful: Habit = Habit(wrong_first=0.55, test=0.92, mend=0.92, mend_right=0.85)
    hasty: Habit = Habit(wrong_first=0.7, test=0.25, mend=0.5, mend_right=0.5)
    skip_reading: float = 0.02
    """It edits without having read the file."""
    wrong_path: float = 0.03
    unknown_tool: float = 0.03
    missing_argument: float = 0.02
    stale_text: float = 0.03
    """An edit whose old text is not in the file."""
    give_up: float = 0.2
    """After a refused call it stops."""
    small_edits: float = 1.0
    """Another body is written by replacing the lines that differ; otherwise by replacing the whole of the one before."""
    max_bodies: int = 4


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One finished rollout of an expert."""

    task: Task
    messages: tuple[Message, ...]
    solved_by_expert: bool
    """The last body it wrote was the right one."""


class Expert(TextChat):
    """A chat client that plays one trace of one kata."""

    def __init__(self, task: Task, kata: Kata, config: ExpertConfig, rng: random.Random) -> None:
        super().__init__()
        self._task, self._kata, self._config, self._rng = task, kata, config, rng
        self._file: str | None = None
        """The file as it stands, once the expert has written a body."""
        self._careful = rng.random() < config.careful_share
        self._present = stub_of(kata)
        self.right = False
        self._script = self._play()
        self._seen: Sequence[Message] = ()

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        self._seen = messages
        return Reply(message=assistant_message(next(self._script)), finish=Finish.STOP)

    # -- the trace, one yield a turn ----------------------------------------------------------------

    def _play(self) -> Iterator[str]:
        c, rng = self._config, self._rng
        habit = c.careful if self._careful else c.hasty
        if self._careful:
            yield format_call("grep", {"pattern": self._kata.name})
        if rng.random() >= c.skip_reading:
            yield from self._read()
        right = rng.random() >= habit.wrong_first
        for _ in range(c.max_bodies):
            written = yield from self._write(self._body(right))
            if not written or rng.random() >= habit.test:
                break
            yield self._tests()
            if not self._failed() or rng.random() >= habit.mend:
                break
            right = rng.random() < habit.mend_right
        while True:
            yield self._last_words()

    def _read(self) -> Iterator[str]:
        c, rng, kata = self._config, self._rng, self._kata
        if rng.random() < c.wrong_path:
            name = kata.path.rpartition("/")[2]
            yield format_call("read_file", {"path": rng.choice((name, f"src/{kata.path}", kata.path.replace(".py", "")))})
            if rng.random() < c.give_up:
                return
        if rng.random() < c.unknown_tool:
            yield format_call(rng.choice(("open_file", "cat", "view", "search")), {"path": kata.path})
            if rng.random() < c.give_up:
                return
        yield format_call("read_file", {"path": kata.path})

    def _write(self, body: str) -> Generator[str, None, bool]:
        """Yields until the body stands in the file; returns False when it gave up."""
        c, rng, kata = self._config, self._rng, self._kata
        old, new = self._present, body
        if self._file is not None and c.small_edits and rng.random() < c.small_edits:
            old, new = changed_lines(self._file, self._present, body)
        good = {"path": kata.path, "old": old, "new": new}
        for mistake, rate in (("missing", c.missing_argument), ("stale", c.stale_text), ("tool", c.unknown_tool)):
            if rng.random() >= rate:
                continue
            if mistake == "missing":
                dropped = rng.choice(("path", "old"))
                yield format_call("edit_file", {k: v for k, v in good.items() if k != dropped})
            elif mistake == "stale":
                yield format_call("edit_file", {**good, "old": rng.choice(_stale(old, kata))})
            else:
                yield format_call(rng.choice(("write_file", "replace", "apply_patch")), good)
            if rng.random() < c.give_up:
                return False
        yield format_call("edit_file", good)
        if self._seen[-1].results[-1].error is not None:  # the old body is no longer unique in the file
            return False
        self._file = (self._file or dict(self._task.files)[kata.path]).replace(old, new)
        self._present = body
        self.right = body == kata.correct_body
        return True

    def _body(self, right: bool) -> str:
        others = [b for b in self._kata.wrong_bodies if b != self._present]
        return self._kata.correct_body if right or not others else self._rng.choice(others)

    def _tests(self) -> str:
        return format_call("run_terminal", {"command": f"pytest tests/test_{self._kata.module}.py"})

    def _failed(self) -> bool:
        """Whether the test run just seen failed: a failing command says so in brackets."""
        return "[exit" in self._seen[-1].results[-1].text

    def _last_words(self) -> str:
        return self._rng.choice(("Done.", f"`{self._kata.qualname}` is in place.", f"Implemented `{self._kata.qualname}`."))


def stub_of(kata: Kata) -> str:
    """The line that stands where the body was."""
    pad = kata.correct_body[: len(kata.correct_body) - len(kata.correct_body.lstrip(" "))]
    return f"{pad}raise NotImplementedError"


def changed_lines(file: str, before: str, after: str) -> tuple[str, str]:
    """The smallest run of whole lines of `before`, standing once in `file`, and what to put there so that `after` stands instead.

    Example:
        changed_lines(file, "    a = 1\n    return a", "    a = 2\n    return a")    # ("    a = 1", "    a = 2")
    """
    old, new = before.split("\n"), after.split("\n")
    most = min(len(old), len(new))
    head = next((i for i in range(most) if old[i] != new[i]), most)
    tail = next((i for i in range(most - head) if old[-1 - i] != new[-1 - i]), most - head)
    while True:
        part, instead = "\n".join(old[head : len(old) - tail]), "\n".join(new[head : len(new) - tail])
        if part and instead and file.count(part) == 1:
            return part, instead
        if not head and not tail:
            return before, after
        head, tail = max(head - 1, 0), tail if head else max(tail - 1, 0)


def _stale(present: str, kata: Kata) -> tuple[str, ...]:
    """Old texts that are not in the file."""
    pad = " " * (len(present) - len(present.lstrip(" ")))
    return (f"{pad}pass", f"{pad}...", f"{pad}return None", f"{pad}# {kata.name}")


class RememberedTests:
    """A sandbox in front of a sandbox: a command that was run on the same files before is answered from memory."""

    def __init__(self, sandbox: Sandbox, files: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._files = dict(files)
        self._answers: dict[str, dict[str, Any]] = {}
        self._touched: set[str] = set()
        self._key: str | None = None

    async def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        if op in ("edit", "write"):
            self._touched.add(str(arguments.get("path", "")))
            self._key = None
        if op != "exec":
            return await self._sandbox.call(op, arguments, timeout_s=timeout_s)
        key = content_hash(await self._state(), arguments["command"])
        if key not in self._answers:
            self._answers[key] = await self._sandbox.call(op, arguments, timeout_s=timeout_s)
        return self._answers[key]

    async def _state(self) -> str:
        if self._key is None:
            texts = [(p, (await self._sandbox.read(p)).decode()) for p in sorted(self._touched) if p in self._files]
            self._key = content_hash([(p, t) for p, t in texts if t != self._files[p]])
        return self._key

    async def reset(self) -> None:
        """Put edited files back as they were. Experts create none."""
        for path in self._touched & set(self._files):
            await self._sandbox.write(path, self._files[path].encode())
        self._touched.clear()
        self._key = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


async def expert_traces(
    task: Task, kata: Kata, host: SandboxHost, *, count: int, seed: int, config: ExpertConfig, agent: AgentConfig
) -> list[Trace]:
    """`count` traces of one task, in one sandbox."""
    image = await host.add_image({path: text.encode() for path, text in task.files})
    sandbox = await host.create(image)
    traces = []
    try:
        front = RememberedTests(sandbox, dict(task.files))
        for i in range(count):
            expert = Expert(task, kata, config, random.Random(seed * 1_000_003 + i))
            run = await run_agent(task.prompt, expert, front, agent, task.tools)  # type: ignore[arg-type]
            traces.append(Trace(task=task, messages=run.messages, solved_by_expert=expert.right))
            await front.reset()
    finally:
        await sandbox.destroy()
    return traces
