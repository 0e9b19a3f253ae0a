"""The client of an environment service: a SandboxHost and Sandboxes that live on another machine.

    host = RemoteHost("http://127.0.0.1:7711", token)
    sandbox = await host.create(await host.add_image(files))

Every operation has a number that this side chooses. When a connection is lost, or a proxy between gives up, the same number is
asked for again: the server answers with the run that goes on there, or with its result. Nothing is done twice. What
cannot be known (the server was restarted in between) is a SandboxError, and its rollout is masked. A background task beats
for all sandboxes of this host, so the server can tell a slow client from a dead one.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import hashlib
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from etude.errors import DeadlineError, SandboxError, UserError
from etude.protocols import Change, ExecResult, FileStat, GradeBundle, GradedRun, Limits, Sandbox, SandboxInfo
from etude.records import Level
from etude.sandbox import http1
from etude.sandbox.egress.policy import Network, NetworkPolicy
from etude.sandbox.images import Diff
from etude.sandbox.service import wire
from etude.sandbox.service.ledger import BEAT_S, GRADE, ROLLOUT

WAIT_S = 20.0
"""How long the server may hold an answer back before it says that the operation still runs."""
ANSWER_S = 30.0
"""How much longer than that an answer may take before the connection counts as lost."""
KNOWN_IMAGES = 1024


class Lost(Exception):
    """A connection broke. `heard`: the server may have got the request."""

    def __init__(self, why: str, heard: bool) -> None:
        super().__init__(why)
        self.heard = heard


class Connections:
    """Connections to one server, kept for reuse. Belongs to one event loop."""

    def __init__(self, url: str, token: str, ca: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is no address of an environment service; it looks like http://127.0.0.1:7711")
        self.url, self._host, self._port = url, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context(cafile=ca or None) if parts.scheme == "https" else None
        self._token = token
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, str, bytes]:
        """(status, media type, body). Lost when there is no whole answer."""
        reused = bool(self._idle)
        reader, writer = self._idle.pop() if reused else await self._open()
        whole = False
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nAuthorization: Bearer {self._token}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                raw = await http1.read_head(reader)
                if not raw:
                    raise http1.BadMessage("the server closed the connection")
                answer = http1.parse_response(raw)
                data = await http1.read_body(reader, http1.body_length(answer, answers=method), wire.MAX_BODY)
            whole = True
            if answer.keeps_alive:
                self._idle.append((reader, writer))
            else:
                writer.close()
            return answer.status, answer.one("content-type"), data
        except (OSError, TimeoutError, http1.BadMessage, ssl.SSLError) as error:
            raise Lost(str(error) or f"no answer within {timeout_s:g} s", heard=True) from None
        finally:
            if not whole:
                writer.transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(10.0):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=http1.MAX_HEAD)
        except (OSError, TimeoutError, ssl.SSLError) as error:
            raise Lost(f"cannot reach {self.url}: {error or 'no answer'}", heard=False) from None
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return reader, writer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


class RemoteHost:
    """Makes sandboxes on another machine. One per event loop."""

    def __init__(self, url: str, token: str = "", *, holder: str = "", patience_s: float = 60.0, ca: str = "") -> None:
        """`patience_s`: how long a server that cannot be reached is asked again before that is an error."""
        self.url, self._token, self._ca, self._patience_s = url, token or os.environ.get("ETUDE_ENV_TOKEN", ""), ca, patience_s
        self.holder = holder or f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(3)}"
        self._connections: Connections | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._images: dict[str, str] = {}
        self.sandboxes: dict[str, RemoteSandbox] = {}
        self.epoch = ""
        Connections(url, "")  # a wrong address is told at once

    def _link(self) -> Connections:
        loop = asyncio.get_running_loop()
        if self._connections is None or self._loop is not loop:
            self._connections, self._loop, self._beating = Connections(self.url, self._token, self._ca), loop, None
        return self._connections

    async def ask(self, method: str, path: str, value: Any = None, *, what: str, wait_s: float = 0.0) -> Any:
        """One exchange that may be repeated: asked again while the server cannot be reached. Raises what the server raised."""
        until = time.monotonic() + self._patience_s
        pause = 0.05
        body = wire.pack(value) if value is not None else b""
        while True:
            try:
                return _understood(*await self._link().ask(method, path, body, wait_s + ANSWER_S), self.url)
            except Lost as error:
                if time.monotonic() + pause > until:
                    raise SandboxError(f"{self.url} was lost during {what}, for {self._patience_s:g} s: {error}") from None
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)

    async def operate(self, name: str, op: str, args: Mapping[str, Any], seen: list[str]) -> Any:
        """Run one operation, once. Waits as long as the server says that it runs."""
        number = secrets.token_hex(8)
        path = f"/v1/envs/{name}/ops/{number}"
        told = list(seen)
        request = {"op": op, "args": args, "wait_s": WAIT_S, "epoch": "", "seen": told}
        body, epoch = wire.pack(request), self.epoch
        until, pause = time.monotonic() + self._patience_s, 0.05
        try:
            while True:
                try:
                    answer = _understood(*await self._link().ask("POST", path, body, WAIT_S + ANSWER_S), self.url)
                except Lost as error:
                    if time.monotonic() + pause > until:
                        raise SandboxError(
                            f"{self.url} was lost during {op} in environment {name}, for {self._patience_s:g} s: {error}"
                        ) from None
                    if error.heard:  # from now on only the server that may have heard it may start it
                        body = wire.pack({**request, "epoch": epoch})
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 2.0)
                    continue
                until, pause = time.monotonic() + self._patience_s, 0.05
                self.epoch = answer["epoch"]
                if "running" not in answer:
                    break
                # It is known there: what is asked again needs no arguments.
                body = wire.pack({"op": op, "wait_s": WAIT_S, "epoch": epoch})
        except asyncio.CancelledError:
            self._later(self.ask("DELETE", path, what=f"cancelling {op}"))
            raise
        del seen[: len(told)]
        seen.append(number)
        return answer["result"]

    def _later(self, work: Any) -> None:
        async def quiet() -> None:
            with contextlib.suppress(SandboxError, UserError):
                await work

        task = asyncio.get_running_loop().create_task(quiet())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- SandboxHost

    async def add_image(self, files: Mapping[str, bytes]) -> str:
        """Store a tree there. The same tree again is not sent again."""
        digest = hashlib.sha256()
        for path, data in sorted(files.items()):
            digest.update(f"{len(path)}:{path}:{len(data)}:".encode("utf-8", "surrogateescape"))
            digest.update(data)
        key = digest.hexdigest()
        if key not in self._images:
            answer = await self.ask("POST", "/v1/images", {"files": files}, what="sending an image", wait_s=240.0)
            while len(self._images) >= KNOWN_IMAGES:
                del self._images[next(iter(self._images))]
            self._images[key] = answer["image"]
        return self._images[key]

    async def create(
        self,
        image: str,
        *,
        limits: Limits = Limits(),
        network: Network = (),
        ttl_s: float = 900.0,
        create_id: str = "",
        wait_s: float = 60.0,
    ) -> RemoteSandbox:
        """The create_id makes it safe to ask again, so there always is one. `wait_s`: how long to stand in line when the host is full."""
        policy = NetworkPolicy.of(network)
        request = {
            "image": image,
            "limits": asdict(limits),
            "network": policy.to_json() if policy else {},
            "ttl_s": ttl_s,
            "create_id": create_id or f"once-{secrets.token_hex(12)}",
            "holder": self.holder,
            "wait_s": wait_s,
        }
        answer = await self.ask("POST", "/v1/envs", request, what="create", wait_s=wait_s + 60.0)
        return self._joined(answer, ttl_s)

    def _joined(self, answer: Mapping[str, Any], ttl_s: float) -> RemoteSandbox:
        self.epoch = str(answer.get("epoch", self.epoch))
        name = str(answer["id"])
        sandbox = self.sandboxes.get(name)
        if sandbox is None:
            sandbox = self.sandboxes[name] = RemoteSandbox(self, name, ttl_s)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.get_running_loop().create_task(self._beat())
        return sandbox

    async def attach(self, name: str, *, lease: str = GRADE, ttl_s: float = 600.0) -> RemoteSandbox:
        """Hold an environment that somebody else created, under a lease of its own."""
        answer = await self.ask("POST", f"/v1/envs/{name}/lease", {"kind": lease, "holder": self.holder, "ttl_s": ttl_s}, what="attach")
        return self._joined({**answer, "id": name}, ttl_s)

    def visit(self, name: str, ttl_s: float = 900.0) -> RemoteSandbox:
        """A sandbox that others hold. It is not destroyed when this host closes; `ttl_s` is for its forks."""
        return RemoteSandbox(self, name, ttl_s)

    async def envs(self) -> list[dict[str, Any]]:
        return (await self.ask("GET", "/v1/envs", what="list"))["envs"]

    async def stats(self) -> dict[str, float]:
        return await self.ask("GET", "/v1/stats", what="stats")

    async def metrics(self) -> str:
        return await self.ask("GET", "/metrics", what="metrics")

    async def drain(self, wait_s: float = 0.0) -> None:
        await self.ask("POST", "/v1/drain", {"wait_s": wait_s}, what="drain")

    async def _beat(self) -> None:
        """Tell the server that this holder lives, while it holds anything."""
        while self.sandboxes:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(SandboxError, UserError):  # the next operation will say what is wrong
                answer = await self.ask("POST", "/v1/beat", {"holder": self.holder, "envs": list(self.sandboxes)}, what="beat")
                for name, why in answer["gone"].items():
                    if name in self.sandboxes:
                        self.sandboxes.pop(name).gone = why

    async def close(self) -> None:
        """Destroy this host's sandboxes."""
        names = list(self.sandboxes.values())
        for sandbox in names:
            with contextlib.suppress(SandboxError, DeadlineError):
                await sandbox.destroy()
        for task in [*self._background, *([self._beating] if self._beating is not None else [])]:
            if task.get_loop() is asyncio.get_running_loop():
                task.cancel()
        if self._connections is not None:
            self._connections.close()
            self._connections = None


def _understood(status: int, kind: str, data: bytes, url: str) -> Any:
    """The value of an answer, or the error in it."""
    if status == 401:
        raise UserError(f"{url} does not know the token; set ETUDE_ENV_TOKEN to one of its token file")
    if kind == wire.KIND:
        value = wire.unpack(data)
        if "error" in value:
            raise wire.rebuilt(value["error"])
        return value
    if status != 200:
        raise UserError(f"{url} answered {status}: {data[:200].decode('utf-8', 'replace').strip()}; is it an environment service?")
    return json.loads(data) if kind == "application/json" else data.decode()


class RemoteSandbox:
    """One sandbox of another machine. See `protocols.Sandbox`."""

    def __init__(self, host: RemoteHost, name: str, ttl_s: float) -> None:
        self.id, self.gone = name, ""
        self._host, self._ttl_s = host, ttl_s
        self._seen: list[str] = []

    async def _do(self, op: str, /, **args: Any) -> Any:
        if self.gone:
            raise SandboxError(f"environment {self.id} cannot {op}: {self.gone}")
        return await self._host.operate(self.id, op, args, self._seen)

    async def info(self) -> SandboxInfo:
        return wire.info(await self._do("info"))

    async def exec(
        self, argv: Sequence[str], *, cwd: str = "", env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float = 60.0
    ) -> ExecResult:
        return wire.exec_result(await self._do("exec", argv=list(argv), cwd=cwd, env=dict(env or {}), stdin=stdin, timeout_s=timeout_s))

    async def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        return await self._do("call", op=op, arguments=dict(arguments), timeout_s=timeout_s)

    async def read(self, path: str) -> bytes:
        return await self._do("read", path=path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._do("write", path=path, data=data, mode=mode)

    async def list(self, path: str = ".") -> list[FileStat]:
        return [wire.file_stat(item) for item in await self._do("list", path=path)]

    async def stat(self, path: str) -> FileStat | None:
        found = await self._do("stat", path=path)
        return wire.file_stat(found) if found is not None else None

    async def apply_changes(self, changes: Sequence[Change]) -> None:
        await self._do("apply_changes", changes=wire.plain(list(changes)))

    async def apply_patch(self, patch: str) -> tuple[str, ...]:
        return tuple(await self._do("apply_patch", patch=patch))

    async def open_session(self, name: str = "", *, cwd: str = "", env: Mapping[str, str] | None = None) -> RemoteSession:
        return RemoteSession(self._do, await self._do("open_session", name=name, cwd=cwd, env=dict(env or {})))

    async def grade(self, bundle: GradeBundle) -> GradedRun:
        """Holds the environment under a lease of its own while it grades."""
        await self.lease(GRADE, bundle.timeout_s + 300.0)
        try:
            fields = {**wire.plain(replace(bundle, files={})), "files": dict(bundle.files)}
            return wire.graded_run(await self._do("grade", bundle=fields))
        finally:
            with contextlib.suppress(SandboxError, UserError):
                await self.lease(GRADE, 0.0)

    async def diff(self) -> builtins.list[Change]:
        return builtins.list((await self.diff_report()).changes)

    async def diff_report(self) -> Diff:
        report = await self._do("diff")
        return Diff(changes=tuple(wire.changes(report["changes"])), refused=tuple((path, why) for path, why in report["refused"]))

    async def snapshot(self, level: Level = Level.FILES, *, require: bool = True) -> str:
        return await self._do("snapshot", level=level.value, require=require)

    async def fork(self, n: int, level: Level = Level.FILES, *, require: bool = True) -> builtins.list[Sandbox]:
        made = await self._do("fork", n=n, level=level.value, require=require, holder=self._host.holder, ttl_s=self._ttl_s)
        return [self._host._joined(child, self._ttl_s) for child in made]

    async def pause(self) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")

    async def set_phase(self, phase: str) -> None:
        """Go by the network rules of another phase."""
        await self._do("set_phase", phase=phase)

    async def network_log(self, after: int = 0) -> builtins.list[dict[str, Any]]:
        """Lines of the network log from number `after` on."""
        return await self._do("network_log", after=after)

    async def execs(self) -> builtins.list[dict[str, Any]]:
        """Command lines that ran in it, as the server's backend collects them; see `boundary.coverage`."""
        return await self._do("execs")

    async def lease(self, kind: str, ttl_s: float) -> None:
        """Take, extend or (with 0) give back a lease."""
        request = {"kind": kind, "holder": self._host.holder, "ttl_s": ttl_s}
        await self._host.ask("POST", f"/v1/envs/{self.id}/lease", request, what="lease")

    async def renew(self, ttl_s: float) -> None:
        await self.lease(ROLLOUT, ttl_s)

    async def destroy(self) -> None:
        """Ends it whatever leases hold it. Again is harmless."""
        if self.gone:
            return
        self.gone = "it was destroyed"
        self._host.sandboxes.pop(self.id, None)
        await self._host.ask("DELETE", f"/v1/envs/{self.id}", what="destroy")


class RemoteSession:
    """A shell session of a remote sandbox. See `protocols.Session`."""

    def __init__(self, do: Callable[..., Any], name: str) -> None:
        self._do, self.name = do, name

    async def run(self, command: str, *, timeout_s: float = 60.0) -> ExecResult:
        return wire.exec_result(await self._do("session_run", name=self.name, command=command, timeout_s=timeout_s))

    async def close(self) -> None:
        await self._do("session_close", name=self.name)
