"""The asyncio side of a tool server's socket, and the Sandbox operations that are nothing but a conversation with it.

Requests of one sandbox run concurrently: each has an id, answers come in any order. Every request has a deadline. An
answer is data from inside a sandbox: lengths are checked before anything is allocated, and nothing in it is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.errors import DeadlineError, PatchError, SandboxError, UserError
from etude.protocols import Change, ExecResult, FileStat
from etude.records import Level
from etude.sandbox.patch import parse, patched, paths_of

HEADER = struct.Struct(">II")
MAX_HEADER, MAX_BLOB = 64 * 2**20, 256 * 2**20
GRACE_S = 15.0
"""How much longer than an operation's own limit an answer is waited for: the server ends it at the limit and says so."""
APPLY_BYTES = 32 * 2**20
"""Contents sent to a sandbox in one request."""
TIMED = ("exec", "pytest", "grep", "session_run")
"""Operations that the server itself ends at `timeout_s`."""


class Channel:
    """Frames to and from one tool server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self._reader, self._writer, self.name = reader, writer, name
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._closed, self._closed_here = "", False
        self.fate: Callable[[], Awaitable[str]] | None = None
        """Asks the host why the sandbox ended."""
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def request(self, op: str, arguments: Mapping[str, Any], *, blob: bytes = b"", timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer. The blob of an answer is a bytes value under the name it was sent with."""
        if self._closed:
            raise SandboxError(f"sandbox {self.name} cannot {op}: {await self._why()}")
        self._next += 1
        number = self._next
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        head = json.dumps({"id": number, "op": op, "args": dict(arguments)}).encode()
        try:
            self._writer.write(HEADER.pack(len(head), len(blob)) + head + blob)
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                return await future
        except TimeoutError:
            raise DeadlineError(f"{op} in sandbox {self.name}", timeout_s) from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        except (ConnectionError, EOFError):
            why = await self._why()
            raise SandboxError(f"sandbox {self.name} ended during {op}: {why}; its rollout is masked") from None
        finally:
            self._waiting.pop(number, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # it may have failed while the request was still being written

    def _cancel(self, number: int) -> None:
        """Nobody waits for this any more: let the server stop what it started."""
        if not self._closed:
            head = json.dumps({"id": 0, "op": "cancel", "args": {"target": number}}).encode()
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.write(HEADER.pack(len(head), 0) + head)

    async def _why(self) -> str:
        if self.fate is not None and not self._closed_here:
            with contextlib.suppress(Exception):  # the host may be gone too; the caller gets the bare fact
                return await self.fate()
        return self._closed or "its tool server closed the connection"

    async def _read(self) -> None:
        """Consumes answers; produces results of the futures in `_waiting`; ends with the connection."""
        try:
            while True:
                head_size, blob_size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if head_size > MAX_HEADER or blob_size > MAX_BLOB:
                    raise EOFError(f"an answer of {head_size + blob_size} bytes")
                header = json.loads(await self._reader.readexactly(head_size))
                blob = await self._reader.readexactly(blob_size)
                if not isinstance(header, dict):
                    raise EOFError("an answer that is not an object")
                name = header.pop("blob", None)
                if name:
                    header[name] = blob
                future = self._waiting.get(header.pop("id", -1))
                if future is not None and not future.done():
                    future.set_result(header)
        except (EOFError, OSError, ValueError) as error:
            self._fail("its tool server closed the connection" if isinstance(error, asyncio.IncompleteReadError) else str(error))

    def _fail(self, why: str) -> None:
        self._closed = self._closed or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EOFError(why))
        self._writer.close()

    def close(self, why: str) -> None:
        """The host ends the conversation, for a reason it knows."""
        self._closed_here = True
        self._fail(why)
        self._task.cancel()


class ServedSandbox:
    """What every sandbox with a tool server can do, whatever surrounds it."""

    def __init__(self, channel: Channel, workdir: str) -> None:
        self._channel, self._workdir = channel, workdir

    async def exec(
        self, argv: Sequence[str], *, cwd: str = "", env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float = 60.0
    ) -> ExecResult:
        """Run a command. What cannot be started has status 126 or 127, as in a shell."""
        arguments = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "timeout_s": timeout_s}
        answer = await self._channel.request("exec", arguments, blob=stdin, timeout_s=timeout_s + GRACE_S)
        return _exec_result(answer)

    async def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """One operation of the tool server. Outputs come as text, with replacement characters where bytes are not UTF-8."""
        sent = dict(arguments)
        limit = timeout_s
        if op in TIMED:
            sent.setdefault("timeout_s", timeout_s)
            with contextlib.suppress(TypeError, ValueError):
                limit = float(sent["timeout_s"])
            limit += GRACE_S
        answer = await self._channel.request(op, sent, timeout_s=limit)
        return {key: value.decode("utf-8", "replace") if isinstance(value, bytes) else value for key, value in answer.items()}

    async def read(self, path: str) -> bytes:
        """The bytes of a file. FileNotFoundError, PermissionError or OSError say why not; they are not failures of the machine."""
        answer = await self._channel.request("read_bytes", {"path": path}, timeout_s=60.0)
        _raise_refusal(answer)
        return answer.get("data", b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file, with its folders. OSError when the workspace does not take it (full, a folder in the way)."""
        _raise_refusal(await self._channel.request("write_bytes", {"path": path, "mode": mode}, blob=data, timeout_s=60.0))

    async def apply_changes(self, changes: Sequence[Change]) -> None:
        """Deletions first, then contents; what stands in the way of a file is removed. OSError when the workspace does not take them."""
        batch: list[Change] = []
        size = 0
        for change in (*(each for each in changes if each.data is None), *(each for each in changes if each.data is not None)):
            more = len(change.data or b"")
            if batch and size + more > APPLY_BYTES:
                await self._apply(batch)
                batch, size = [], 0
            batch.append(change)
            size += more
        if batch:
            await self._apply(batch)

    async def _apply(self, changes: Sequence[Change]) -> None:
        described = [[change.path, -1 if change.data is None else len(change.data), change.mode] for change in changes]
        blob = b"".join(change.data or b"" for change in changes)
        _raise_refusal(await self._channel.request("apply", {"changes": described}, blob=blob, timeout_s=60.0))

    async def apply_patch(self, patch: str) -> tuple[str, ...]:
        """All of it or nothing: the new contents are worked out before the first file is written, and put back if one cannot be."""
        parts = parse(patch)
        before: dict[str, tuple[bytes, int]] = {}
        for path in paths_of(parts):
            entry = await self.stat(path)
            if entry is not None and entry.kind != "file":
                raise PatchError(f"{path} is a {entry.kind}, and only plain files can be patched")
            if entry is not None:
                before[path] = (await self.read(path), entry.mode)
        changes = patched(parts, before)
        try:
            await self.apply_changes(changes)
        except OSError:
            olds = {change.path: before.get(change.path) for change in changes}
            restored = [Change(path=path, data=old[0], mode=old[1]) if old else Change(path=path, data=None) for path, old in olds.items()]
            await self.apply_changes(restored)
            raise
        return tuple(change.path for change in changes)

    async def open_session(self, name: str = "", *, cwd: str = "", env: Mapping[str, str] | None = None) -> ShellSession:
        """A shell session; of that name, if there is one."""
        answer = await self._channel.request("session_open", {"session": name, "cwd": cwd, "env": dict(env or {})}, timeout_s=10.0)
        _raise_refusal(answer)
        return ShellSession(self._channel, str(answer["session"]))

    async def _session_state(self) -> dict[str, Any]:
        answer = await self._channel.request("session_state", {}, timeout_s=10.0)
        _raise_refusal(answer)
        return answer["state"]

    async def _restore_session(self, state: Mapping[str, Any]) -> None:
        _raise_refusal(await self._channel.request("session_restore", {"state": dict(state)}, timeout_s=10.0))

    async def list(self, path: str = ".") -> list[FileStat]:
        answer = await self._channel.request("list_stat", {"path": path}, timeout_s=60.0)
        _raise_refusal(answer)
        return [_file_stat(entry) for entry in answer["entries"]]

    async def stat(self, path: str) -> FileStat | None:
        answer = await self._channel.request("stat", {"path": path}, timeout_s=60.0)
        _raise_refusal(answer)
        return _file_stat(answer["entry"]) if answer["entry"] is not None else None

    async def pause(self) -> None:
        """Stop every process of the sandbox except its tool server, until `resume`."""
        await self._channel.request("pause", {}, timeout_s=10.0)

    async def resume(self) -> None:
        await self._channel.request("resume", {}, timeout_s=10.0)


class ShellSession:
    """A shell whose folder, umask, variables, functions, aliases and options last from one command to the next.

    Every command runs in a shell of its own that takes up what the last one left: `exit` ends the command, not the
    session, and a command that is killed (`kept` is False in its result) leaves the session as it was before. Processes
    started with `&` go on, and belong to no later shell.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self.name = channel, name

    async def run(self, command: str, *, timeout_s: float = 60.0) -> ExecResult:
        """One command line. A second at the same time is refused."""
        arguments = {"session": self.name, "command": command, "timeout_s": timeout_s}
        return _exec_result(await self._channel.request("session_run", arguments, timeout_s=timeout_s + GRACE_S))

    async def close(self) -> None:
        """Forget the session, and stop its command if one runs. Again is harmless."""
        answer = await self._channel.request("session_close", {"session": self.name}, timeout_s=10.0)
        if answer.get("error") not in (None, "bad_arguments"):
            _raise_refusal(answer)


def _exec_result(answer: Mapping[str, Any]) -> ExecResult:
    """What cannot be started has status 126."""
    if "error" in answer:
        return ExecResult(code=126, output=str(answer["text"]).encode() + b"\n", kept=False)
    return ExecResult(
        code=int(answer["code"]),
        output=answer.get("output", b""),
        dropped_bytes=int(answer["dropped_bytes"]),
        timed_out=bool(answer["timed_out"]),
        limit=str(answer["limit"]),
        seconds=float(answer["seconds"]),
        kept=bool(answer.get("kept", True)),
    )


def _file_stat(entry: Sequence[Any]) -> FileStat:
    path, size, mode, kind = entry
    return FileStat(path=str(path), size=int(size), mode=int(mode), kind=str(kind))


def check_level(backend: str, level: Level, levels: Sequence[Level], require: bool) -> Level:
    """The level that will be given. Less than what was asked for is an error, unless `require` is False."""
    if level in levels:
        return level
    if require:
        have = " and ".join(f"{each.value} ({each.name.lower()})" for each in levels)
        raise UserError(
            f"the {backend} backend keeps {have}, not {level.value} ({level.name.lower()}); pass require=False to accept "
            f"{levels[-1].value}, or use a backend that has it (docs/sandboxes.md)"
        )
    return max(each for each in levels if each < level)


def _raise_refusal(answer: Mapping[str, Any]) -> None:
    if "error" not in answer:
        return
    text = str(answer["text"])
    if text.startswith(("no such", "No such")):
        raise FileNotFoundError(text)
    raise (PermissionError if answer["error"] == "forbidden" else OSError)(text)
