"""Fakes that ship: the whole loop in a second, for tests and for learning the code.

    MemoryHost, MemorySandbox   a workspace in a dict, with the tool server's operations in plain Python; commands are scripted
    ScriptedEngine              emits given texts token by token, with made-up log-probs; weights can change in flight
    ScriptedChat                replies from a list of texts, or from a function of the messages
    InstantTrainer              a trainer whose step takes no time
    KataWorld, fake_parts       katas, a policy that solves those it is told to, and all parts of `loop.run` over them

They keep the contracts of protocols.py, and the same contract tests run over them and the real ones. Nothing here is random and nothing
reads a clock, except deadlines that a caller sets.
"""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import inspect
import posixpath
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.agent.chat import EngineChat, TextChat
from etude.agent.loop import AgentConfig
from etude.errors import BusyError, EngineError, IntegrityError, SandboxError, UserError
from etude.inference.request import check_ids, check_request, check_temperature
from etude.inference.sequence import join
from etude.loop import LoopConfig, Parts
from etude.protocols import (
    Change,
    ExecResult,
    FileStat,
    GenerateRequest,
    Generation,
    GradeBundle,
    GradedRun,
    Limits,
    Reply,
    SandboxInfo,
    Scored,
    Session,
)
from etude.records import ABSENT_ROUTE, Boundary, Finish, Group, Level, Manifest, Message, Sampling, StepReport, Task, Version, content_hash
from etude.rewards.parts import RewardConfig
from etude.rollout import checkpoint
from etude.rollout.recorder import Recorder
from etude.rollout.rollout import AgentRollout
from etude.rollout.slots import Slots
from etude.sandbox.graded import graded_run
from etude.sandbox.patch import parse, patched
from etude.sandbox.toolserver import glob_matcher
from etude.tasks.source import KataConfig, KataSource, kata_of
from etude.text.calls import assistant_message, format_call
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import ByteTokenizer, TextTokenizer

# ---------------------------------------------------------------------------------------------------
# Sandbox

Files = dict[str, bytes]
CommandResult = ExecResult | tuple[int, str] | str
Command = Callable[[Files], CommandResult | Awaitable[CommandResult]]
"""A scripted command: gets the files, which it may change, and answers output, (status, output) or a whole ExecResult."""

Judge = Callable[[Files], list[dict[str, Any]]]
"""From the files of a graded workspace to {"id", "outcome", "seconds", "message"} of every test."""

_WORKDIR = "/workspace"


class _Refusal(SandboxError):
    """An operation refused for the caller's own fault: an answer of `call`, an error of the direct methods."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.answer = {"error": kind, "text": text}


class MemorySandbox:
    """A workspace in memory. `files` is the live tree; a command without a script ends with status 127.

    Scripts are looked up by the whole command line (an argv joined by spaces), then by its first word. A script may be a coroutine
    function; as a background job it then runs until it returns or is killed.
    """

    def __init__(self, files: Mapping[str, bytes], commands: Mapping[str, Command], host: MemoryHost, image: str, id: str) -> None:
        self.files: Files = dict(files)
        self.commands = commands
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """Every operation asked for, in order."""
        self._base = dict(files)
        self._host, self._image, self._id = host, image, id
        self._origin = host.origins.get(image, image)
        self._jobs: dict[str, _Job] = {}
        self._destroyed = False

    async def info(self) -> SandboxInfo:
        boundary = Boundary(backend="memory", network="none", level=Level.FILES, limits={"memory": "nothing"})
        return SandboxInfo(id=self._id, image=self._image, snapshot="", boundary=boundary, workdir=_WORKDIR)

    async def exec(
        self, argv: Sequence[str], *, cwd: str = "", env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float = 60.0
    ) -> ExecResult:
        self._alive()
        return await self._execute(" ".join(argv), timeout_s)

    async def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        self._alive()
        self.calls.append((op, dict(arguments)))
        await asyncio.sleep(0)
        handler = getattr(self, f"_op_{op}", None)
        try:
            if handler is None:
                raise _Refusal("bad_arguments", f"no operation {op!r}")
            answer = _bound(handler, arguments)()
            return await answer if inspect.isawaitable(answer) else answer
        except _Refusal as refusal:
            return refusal.answer

    async def read(self, path: str) -> bytes:
        self._alive()
        return self._file(_relative(path))

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._alive()
        self.files[_relative(path)] = data

    async def list(self, path: str = ".") -> builtins.list[FileStat]:
        self._alive()
        top = _relative(path)
        return [self._stat(posixpath.join(top, name)) for name in self._names(top)]

    async def stat(self, path: str) -> FileStat | None:
        self._alive()
        path = _relative(path)
        return self._stat(path) if path in self.files or self._names(path) else None

    async def apply_changes(self, changes: Sequence[Change]) -> None:
        self._alive()
        for change in sorted(changes, key=lambda change: change.data is not None):
            path = _relative(change.path)
            for other in [other for other in self.files if f"{other}/".startswith(f"{path}/") or path.startswith(f"{other}/")]:
                del self.files[other]
            if change.data is not None:
                self.files[path] = bytes(change.data)

    async def apply_patch(self, patch: str) -> tuple[str, ...]:
        self._alive()
        changes = patched(parse(patch), {path: (data, 0o644) for path, data in self.files.items()})
        await self.apply_changes(changes)
        return tuple(change.path for change in changes)

    async def open_session(self, name: str = "", *, cwd: str = "", env: Mapping[str, str] | None = None) -> Session:
        raise UserError("the memory backend has no shell, so it opens no session; use another backend")

    async def grade(self, bundle: GradeBundle) -> GradedRun:
        self._alive()
        return await graded_run(self._host, dataclasses.replace(bundle, image=bundle.image or self._origin))

    async def diff(self) -> builtins.list[Change]:
        self._alive()
        paths = sorted({*self.files, *self._base})
        return [Change(path=p, data=self.files.get(p)) for p in paths if self.files.get(p) != self._base.get(p)]

    async def snapshot(self, level: Level = Level.FILES, *, require: bool = True) -> str:
        self._alive()
        _only_files(level, require)
        image = await self._host.add_image(self.files)
        self._host.origins.setdefault(image, self._origin)
        return image

    async def fork(self, n: int, level: Level = Level.FILES, *, require: bool = True) -> builtins.list[MemorySandbox]:
        image = await self.snapshot(level, require=require)
        return [await self._host.create(image) for _ in range(n)]

    async def pause(self) -> None:
        self._alive()

    async def resume(self) -> None:
        self._alive()

    async def destroy(self) -> None:
        """May be called twice. Ends every job."""
        self._destroyed = True
        for job in self._jobs.values():
            await job.kill()
        self._host.live.pop(self._id, None)

    def running_jobs(self) -> builtins.list[str]:
        return [name for name, job in self._jobs.items() if not job.task.done()]

    # -- the tool server's operations

    def _op_read(self, path: str, start: int | None = None, end: int | None = None) -> dict[str, Any]:
        text = self._text(_relative(path))
        if start is None and end is None:
            return {"text": text}
        lines = text.splitlines(keepends=True)
        chosen = lines[(start or 1) - 1 : end]
        if not chosen:
            raise _Refusal("failed", f"{path} has {len(lines)} lines; there is no line {start or 1}")
        return {"text": "".join(chosen)}

    def _op_write(self, path: str, text: str) -> dict[str, Any]:
        self.files[_relative(path)] = text.encode()
        return {"text": f"wrote {path}"}

    def _op_edit(self, path: str, old: str, new: str) -> dict[str, Any]:
        real = _relative(path)
        if not old:
            if real in self.files:
                raise _Refusal("failed", f"{path} exists already")
            self.files[real] = new.encode()
            return {"text": f"created {path}"}
        text = self._text(real)
        count = text.count(old)
        if count != 1:
            times = f"is {count} times in {path}; include more lines around it" if count else f"is not in {path}"
            raise _Refusal("failed", f"the old text {times}")
        if old == new:
            raise _Refusal("failed", "old and new are the same")
        self.files[real] = text.replace(old, new).encode()
        return {"text": f"edited {path}"}

    def _op_list(self, path: str = ".") -> dict[str, Any]:
        top = _relative(path)
        names = self._names(top)
        if top in self.files or (not names and top):
            raise _Refusal("failed", f"{path} is not a directory" if top in self.files else f"no such directory: {path}")
        return {"text": "\n".join(n + ("" if posixpath.join(top, n) in self.files else "/") for n in names) or "(empty)"}

    def _op_glob(self, pattern: str) -> dict[str, Any]:
        matches = glob_matcher(pattern.removeprefix("./"))
        return {"text": "\n".join(p for p in sorted(self.files) if matches(p)) or "no files match"}

    def _op_grep(self, pattern: str, path: str = ".", glob: str = "") -> dict[str, Any]:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise _Refusal("bad_arguments", f"the pattern is not a regular expression: {error}") from None
        top = _relative(path)
        if top and top not in self.files and not self._names(top):
            raise _Refusal("failed", f"no such path: {path}")
        matches = glob_matcher(glob) if glob else None
        lines = []
        for name in sorted(self.files):
            inside = not top or name == top or name.startswith(top + "/")
            if inside and (matches is None or matches(name)):
                text = self.files[name].decode("utf-8", "replace")
                lines += [f"{name}:{n}:{line}" for n, line in enumerate(text.splitlines(), 1) if compiled.search(line)]
        return {"text": "\n".join(lines) or "no matches"}

    async def _op_exec(
        self, command: str = "", argv: Sequence[str] = (), cwd: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        return _answer(await self._execute(command or " ".join(argv), timeout_s))

    async def _op_pytest(self, args: Sequence[str], timeout_s: float = 60.0, report: bool = False) -> dict[str, Any]:
        if report and self._host.judge is not None:
            return {"code": 0, "output": "", "timed_out": False, "limit": "", "seconds": 0.0, "tests": self._host.judge(self.files)}
        answer = _answer(await self._execute(" ".join(["pytest", *args]), timeout_s))
        return answer | ({"tests": []} if report else {})

    def _op_job_start(self, command: str) -> dict[str, Any]:
        name = str(len(self._jobs) + 1)
        self._jobs[name] = _Job(asyncio.create_task(self._execute(command, None)))
        return {"job": name}

    async def _op_job_poll(self, job: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self._job(job).answer()

    async def _op_job_kill(self, job: str) -> dict[str, Any]:
        found = self._job(job)
        await found.kill()
        return found.answer()

    # -- inside

    def _alive(self) -> None:
        if self._destroyed:
            raise SandboxError(f"sandbox {self._id} was destroyed")

    def _file(self, path: str) -> bytes:
        if path not in self.files:
            raise SandboxError(f"no such file: {path}")
        return self.files[path]

    def _text(self, path: str) -> str:
        if path not in self.files:
            raise _Refusal("failed", f"{path} is a directory" if self._names(path) else f"no such file: {path}")
        try:
            return self.files[path].decode()
        except UnicodeDecodeError:
            raise _Refusal("failed", f"{path} is not UTF-8 text") from None

    def _names(self, top: str) -> builtins.list[str]:
        prefix = top + "/" if top else ""
        return sorted({p[len(prefix) :].split("/")[0] for p in self.files if p.startswith(prefix)})

    def _stat(self, path: str) -> FileStat:
        data = self.files.get(path)
        if data is None:
            return FileStat(path=path, size=0, mode=0o755, kind="dir")
        return FileStat(path=path, size=len(data), mode=0o644, kind="file")

    def _job(self, name: str) -> _Job:
        if name not in self._jobs:
            raise _Refusal("bad_arguments", f"no job {name!r}; there are {', '.join(self._jobs) or 'none'}")
        return self._jobs[name]

    async def _execute(self, line: str, timeout_s: float | None) -> ExecResult:
        words = line.split()
        script = self.commands.get(line) or self.commands.get(words[0] if words else "")
        if script is None:
            return ExecResult(code=127, output=f"{words[0] if words else ''}: command not found\n".encode())
        try:
            async with asyncio.timeout(timeout_s):
                result = script(self.files)
                result = await result if inspect.isawaitable(result) else result
        except TimeoutError:
            return ExecResult(code=-9, output=b"", timed_out=True, limit="wall")
        if isinstance(result, ExecResult):
            return result
        code, output = (0, result) if isinstance(result, str) else result
        return ExecResult(code=code, output=output.encode())


class _Job:
    def __init__(self, task: asyncio.Task[ExecResult]) -> None:
        self.task = task

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def answer(self) -> dict[str, Any]:
        if not self.task.done():
            return {"running": True, "code": None, "output": ""}
        if self.task.cancelled():
            return {"running": False, "code": -9, "output": "", "limit": "killed"}
        return {"running": False} | _answer(self.task.result())


class MemoryHost:
    """Makes memory sandboxes. `commands` are shared by all of them; `judge` answers the reported test run of a grade."""

    def __init__(self, commands: Mapping[str, Command] | None = None, judge: Judge | None = None) -> None:
        self.commands = dict(commands or {})
        self.judge = judge
        self.images: dict[str, Files] = {}
        self.origins: dict[str, str] = {}
        """snapshot -> the image that its history began with."""
        self.live: dict[str, MemorySandbox] = {}
        self._by_create_id: dict[str, str] = {}
        self._made = 0

    async def add_image(self, files: Mapping[str, bytes]) -> str:
        key = content_hash({path: data.hex() for path, data in files.items()})
        self.images[key] = dict(files)
        return key

    async def create(
        self, image: str, *, limits: Limits = Limits(), network: Sequence[str] = (), ttl_s: float = 900.0, create_id: str = ""
    ) -> MemorySandbox:
        if image not in self.images:
            raise SandboxError(f"no image or snapshot {image!r}; add it with add_image")
        known = self._by_create_id.get(create_id)
        if known in self.live:
            return self.live[known]
        self._made += 1
        sandbox = MemorySandbox(self.images[image], self.commands, self, image, f"memory-{self._made}")
        self.live[f"memory-{self._made}"] = sandbox
        if create_id:
            self._by_create_id[create_id] = f"memory-{self._made}"
        return sandbox

    async def stats(self) -> dict[str, float]:
        return {"live": float(len(self.live)), "created": float(self._made), "images": float(len(self.images))}

    async def close(self) -> None:
        for sandbox in list(self.live.values()):
            await sandbox.destroy()


async def memory_sandbox(files: Mapping[str, str], commands: Mapping[str, Command] | None = None) -> MemorySandbox:
    """One sandbox with these text files, on a host of its own."""
    host = MemoryHost(commands)
    return await host.create(await host.add_image({path: text.encode() for path, text in files.items()}))


def _bound(handler: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        bound = inspect.signature(handler).bind(**arguments)
    except TypeError as error:
        raise _Refusal("bad_arguments", str(error)) from None
    return lambda: handler(*bound.args, **bound.kwargs)


def _relative(path: str) -> str:
    real = posixpath.normpath(posixpath.join(_WORKDIR, path))
    if real != _WORKDIR and not real.startswith(_WORKDIR + "/"):
        raise _Refusal("forbidden", f"{path} is outside of the workspace")
    return real[len(_WORKDIR) + 1 :]


def _answer(result: ExecResult) -> dict[str, Any]:
    return {
        "code": result.code,
        "output": result.output.decode("utf-8", "replace"),
        "timed_out": result.timed_out,
        "limit": result.limit,
        "dropped_bytes": result.dropped_bytes,
    }


def _only_files(level: Level, require: bool) -> None:
    if require and level is not Level.FILES:
        raise SandboxError(
            f"the memory backend keeps files only ({Level.FILES.value}), and {level.value} was asked for; use another backend"
        )


# ---------------------------------------------------------------------------------------------------
# Policy

Replies = Sequence[str] | Callable[[str], str]
"""Texts in order of the requests, or a function of the decoded context."""


class ScriptedEngine:
    """An engine that says what it is told. Special tokens in a text are meant; the stop token is added at its end.

    `current` may change, by `load` or by assignment, while a request is in flight: later tokens carry the new version. A log-prob at
    temperature 1 is a fixed function of (token, position), so `score` agrees with `generate`. It keeps the engine contract
    (tests/inference/contract), except that nothing ever waits: `limit` requests at once, and a further one is refused.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        replies: Replies,
        *,
        version: Version | None = None,
        routes_LK: tuple[int, int] | None = None,
        window: int = 1 << 20,
        limit: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._replies: Callable[[str], str] | list[str] = replies if callable(replies) else list(replies)
        self._routes_LK = routes_LK
        self._window, self._limit = window, limit
        self._cancelled: dict[str, asyncio.Event] = {}
        self._closed = False
        self._sampled = self._swaps = 0
        self.current = version or Version(lineage=0, ordinal=0, hash="0" * 32)
        self.requests: list[tuple[str, int, Sampling]] = []
        """(id, prompt tokens, sampling) of every request."""
        self.hold: asyncio.Event | None = None
        """While set to an event that is not set, requests wait before each token; they can still be cancelled."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return join([piece async for piece in self.generate_stream(request)])

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        versions: dict[tuple[int, int, str], Version] = {}
        index = 0
        tokens = self._tokens(request)
        try:
            async for token, finish in tokens:
                if token:
                    versions.setdefault(token[1].key, token[1])
                yield self._generation(request, index, [token] if token else [], versions, None if token else finish)
                index += 1
        finally:
            await tokens.aclose()

    async def _tokens(self, request: GenerateRequest) -> AsyncGenerator[tuple[tuple[int, Version] | None, Finish]]:
        """One token at a time with the version that sampled it; at the end None and how it ended."""
        self._check_open()
        check_request(request, vocab=self._tokenizer.vocab_size, window=self._window)
        if request.id in self._cancelled:
            raise UserError(f"request {request.id!r} is in flight already; give every request an id of its own")
        if self._limit and len(self._cancelled) >= self._limit:
            raise BusyError(f"{self._limit} requests are in flight, as many as the scripted engine may have; come back later")
        clock = asyncio.get_running_loop().time
        deadline = None if request.deadline_s is None else clock() + request.deadline_s
        self.requests.append((request.id, len(request.ids), request.sampling))
        cancelled = self._cancelled[request.id] = asyncio.Event()
        try:
            ids = self._script(request)
            most = min(request.sampling.max_tokens, self._window - len(request.ids))
            finish = Finish.STOP if len(ids) <= most else Finish.LENGTH
            for id in ids[:most]:
                await self._turn(cancelled, None if deadline is None else max(deadline - clock(), 0.0))
                self._check_open()
                late = deadline is not None and clock() >= deadline
                if cancelled.is_set() or late:
                    finish = Finish.DEADLINE if late else Finish.CANCELLED
                    break
                self._sampled += 1
                yield (id, self.current), finish
        finally:
            del self._cancelled[request.id]
        yield None, finish

    async def _turn(self, cancelled: asyncio.Event, left_s: float | None) -> None:
        """Let others run; while `hold` says so, until it is set, the request is cancelled or its time is up."""
        await asyncio.sleep(0)
        if self.hold is None or self.hold.is_set():
            return
        waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(cancelled.wait())]
        try:
            await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _script(self, request: GenerateRequest) -> list[int]:
        if callable(self._replies):
            text = self._replies(self._tokenizer.decode(request.ids))
        elif self._replies:
            text = self._replies.pop(0)
        else:
            raise UserError("the scripted engine has no reply left; give it more texts")
        ids = self._tokenizer.encode_markup(text)
        stops = request.sampling.stop_ids
        first = next((i for i, id in enumerate(ids) if id in stops), len(ids))
        return [*ids[: first + 1], *(stops[:1] if first == len(ids) else ())]

    def _generation(
        self,
        request: GenerateRequest,
        index: int,
        tokens: Sequence[tuple[int, Version]],
        versions: Mapping[tuple[int, int, str], Version],
        finish: Finish | None,
    ) -> Generation:
        """Tokens from `index` of the answer on, as a generation of their own. `versions`: of all its tokens so far, in order of use."""
        at = len(request.ids) + index
        at_t1 = np.array([_logprob(id, at + t) for t, (id, _) in enumerate(tokens)], np.float32)
        order = list(versions)
        routed = self._routes_LK is not None and request.routes
        return Generation(
            id=request.id,
            ids=tuple(id for id, _ in tokens),
            logprob_T=at_t1 / np.float32(max(request.sampling.temperature, 1e-3)),
            logprob_t1_T=at_t1,
            version_T=np.array([order.index(version.key) for _, version in tokens], np.int16),
            versions=tuple(versions.values()),
            routes_PTLK=self._routes(len(request.ids), index, len(tokens), last=finish is not None) if routed else None,
            finish=finish,
            kept_T=np.zeros(len(tokens), bool),
        )

    def _routes(self, prompt: int, index: int, count: int, *, last: bool) -> np.ndarray:
        """Rows of the tokens that were fed to sample these: the prompt for the first, and the token before for every other. The last
        piece also has the absent rows of what was never fed: the token sampled last, or the prompt when there was none."""
        assert self._routes_LK is not None, "only asked of an engine with routes"
        first = prompt + index - 1 if index else 0
        rows = np.arange(first, prompt + index + count - 1 if count else first)[:, None, None] % 7
        absent = np.full((prompt + index + count - first - len(rows) if last else 0, *self._routes_LK), ABSENT_ROUTE, np.uint8)
        return np.concatenate([np.broadcast_to(rows, (len(rows), *self._routes_LK)).astype(np.uint8), absent])

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> Scored:
        self._check_open()
        check_temperature(temperature)
        ids = check_ids(ids, vocab=self._tokenizer.vocab_size, window=self._window)
        logprob_T = np.array([_logprob(id, t) if t else 0.0 for t, id in enumerate(ids)], np.float32) / np.float32(temperature)
        return Scored(logprob_T=logprob_T, routes_TLK=None, version=self.current)

    async def load(self, manifest: Manifest, source: str) -> Version:
        self._check_open()
        if manifest.base is not None and manifest.base.key != self.current.key:
            raise IntegrityError(f"the delta to {manifest.version} is from {manifest.base}, and {self.current} is served; load an anchor")
        self.current = manifest.version
        self._swaps += 1
        return self.current

    async def cancel(self, request_id: str) -> None:
        if request_id in self._cancelled:
            self._cancelled[request_id].set()

    async def stats(self) -> dict[str, float]:
        return {
            "requests": float(len(self.requests)),
            "running": float(len(self._cancelled)),
            "waiting": 0.0,
            "sampled_tokens": float(self._sampled),
            "swaps": float(self._swaps),
            "window": float(self._window),
        }

    async def version(self) -> Version:
        return self.current

    async def close(self) -> None:
        self._closed = True
        for event in self._cancelled.values():
            event.set()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed; make a new one")


def _logprob(id: int, position: int) -> float:
    return -(((id * 2654435761 + position * 40503) >> 4) % 997 + 1) / 500


class ScriptedChat(TextChat):
    """Replies from a list of texts, or from a function of the context's messages. A reply may be an exception, which is raised."""

    def __init__(self, replies: Sequence[str | Message | Exception] | Callable[[Sequence[Message]], str | Message | Exception]) -> None:
        super().__init__()
        self._replies = replies if callable(replies) else list(replies)
        self.seen: list[list[Message]] = []
        """The context of every reply."""

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        await asyncio.sleep(0)
        context = self.context(messages)
        self.seen.append(context)
        if not callable(self._replies) and not self._replies:
            raise UserError("the scripted chat has no reply left; give it more texts")
        reply = self._replies(context) if callable(self._replies) else self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Reply(message=reply if isinstance(reply, Message) else assistant_message(reply), finish=Finish.STOP)


# ---------------------------------------------------------------------------------------------------
# Learning: the loop of loop.py on nothing but fakes


class InstantTrainer:
    """A trainer whose step takes no time: the version rises, and `trained` remembers every group."""

    def __init__(self, lineage: int = 0) -> None:
        self._version = Version(lineage=lineage, ordinal=0, hash=content_hash("weights", 0))
        self.trained: list[Group] = []
        self.committed: list[Version] = []

    async def step(self, groups: Sequence[Group]) -> StepReport:
        await asyncio.sleep(0)
        self.trained += groups
        ordinal = self._version.ordinal + 1
        self._version = Version(lineage=self._version.lineage, ordinal=ordinal, hash=content_hash("weights", ordinal))
        return StepReport(step=ordinal, version=self._version, metrics={"loss": 0.0, "dlogp_mean": 0.0})

    async def publish(self) -> tuple[Manifest, str]:
        return Manifest(lineage=self._version.lineage, base=None, version=self._version, tensors=()), ""

    async def commit(self, version: Version) -> None:
        self.committed.append(version)

    async def save(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "ordinal").write_text(str(self._version.ordinal))

    async def load(self, folder: Path, lineage: int) -> Version:
        ordinal = int((folder / "model" / "ordinal").read_text())
        self._version = Version(lineage=lineage, ordinal=ordinal, hash=content_hash("weights", ordinal))
        return self._version

    async def version(self) -> Version:
        return self._version

    async def close(self) -> None:
        self.trained.clear()


class KataWorld:
    """Katas, a scripted policy that solves those it is told to, and the judge that can tell.

    The policy edits the stub in one turn, right when `solves(task)` says so, and ends. The judge compares the target file with
    the solution. So the real agent loop, tools, tokens, grading and groups run, and a group takes a millisecond.
    """

    def __init__(self, solves: Callable[[Task], bool], config: KataConfig | None = None) -> None:
        self.source = KataSource(config)
        self._solves = solves
        self._tasks: dict[str, Task] = {}
        self.tokenizer = ByteTokenizer()
        self.renderer = EtudeRenderer(self.tokenizer)
        self.engine = ScriptedEngine(self.tokenizer, self._reply)
        self.host = MemoryHost(judge=self._judge)

    def next(self) -> Task:
        """A task of the curriculum; the world remembers it by its prompt, which is made unique."""
        task = self.source.next()
        task = task.replace(prompt=f"{task.prompt} ({task.id})")
        self._tasks[task.prompt] = task
        return task

    def chat(self, *, id: str, seed: int) -> EngineChat:
        return EngineChat(self.engine, self.renderer, self.tokenizer, Sampling(), seed=seed, id=id)

    def _reply(self, context: str) -> str:
        if "<result" in context:
            return "Done."
        task = next(t for prompt, t in self._tasks.items() if prompt in context)
        kata = kata_of(task)[1]
        body = kata.correct_body if self._solves(task) else kata.wrong_bodies[0]
        stub = next(line for line in dict(task.files)[kata.path].splitlines() if line.strip() == "raise NotImplementedError")
        return format_call("edit_file", {"path": kata.path, "old": stub, "new": body})

    def _judge(self, files: Files) -> list[dict[str, Any]]:
        task = next(t for t in self._tasks.values() if all(files.get(p, b"").decode() == text for p, text in t.grader.hidden))
        right = all(files.get(p, b"").decode() == text for p, text in task.solution)
        outcomes = [(i, "passed" if right else "failed") for i in task.grader.fail_to_pass]
        outcomes += [(i, "passed") for i in task.grader.pass_to_pass]
        return [{"id": i, "outcome": outcome, "seconds": 0.0, "message": ""} for i, outcome in outcomes]


def fake_parts(
    config: LoopConfig, folder: Path, world: KataWorld, trainer: InstantTrainer, *, seed: int = 0, resume: bool = False
) -> Parts:
    """All parts of a run on fakes, its run folder in `folder`; with `resume` it goes on from the folder's last checkpoint."""
    slots = Slots(config.groups_per_step, config.max_staleness, config.steps)
    state = checkpoint.read(checkpoint.latest(folder)) if resume else None
    lineage = checkpoint.next_lineage(folder)
    if state:
        state.restore(slots, world.source)
        for _, task in state.again:
            world._tasks[task.prompt] = task
    recorder = Recorder(folder, clock=config.schedule == "free", lineage=lineage)
    agent = AgentConfig(prompt="none", instructions=False, max_turns=4)
    rollout = AgentRollout(host=world.host, chat=world.chat, agent=agent, rewards=RewardConfig(), label=f"{lineage}-")

    async def save(step: int) -> None:
        await checkpoint.save(folder, step, lineage=lineage, seed=seed, trainer=trainer, tasks=world.source, slots=slots)
        recorder.event("checkpoint", step=step, path=f"checkpoints/step-{step}", unfinished=len(slots.ready))

    async def evaluate(step: int) -> None:
        recorder.event("note", text=f"no suite in this run; version {(await trainer.version()).ordinal} at step {step}")

    return Parts(
        seed=seed,
        tasks=_Tasks(world),
        rollout=rollout,
        trainer=trainer,
        engine=world.engine,
        slots=slots,
        recorder=recorder,
        checkpoint=save,
        evaluate=evaluate,
        start_step=state.step if state else 0,
    )


class _Tasks:
    """The world's curriculum as a TaskSource."""

    def __init__(self, world: KataWorld) -> None:
        self._world = world
        self.next = world.next
        self.feedback = world.source.feedback
        self.state = world.source.state
        self.restore = world.source.restore
