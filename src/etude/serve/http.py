"""HTTP/1.1 on asyncio streams: as much of it as JSON and event streams need, and no dependency.

Why not a framework: the endpoint needs five routes, bodies in JSON, streams that end when the client goes away, and a drain. What is not
here: TLS (put a proxy in front), compression, HTTP/2, multipart.

Invariants
- A handler runs while its client listens. When the client goes away the handler's task is cancelled, so whatever it waits for (an
  engine) stops working for nobody; that is reported as status 499.
- Head and body are bounded before they are read (431, 413), and a client that sends too slowly is dropped (408).
- After `drain` began, no new request is taken; those in progress get `drain_s` seconds, then they are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

_LOG = logging.getLogger(__name__)
MAX_HEAD = 32 * 1024
CLIENT_GONE = 499


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None
    """In place of a body: pieces that are sent as they come."""


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status=status, body=json.dumps(value).encode(), headers=headers or {})


class HttpError(Exception):
    """A request that is no request; answered by `refuse` of the server, and the connection ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Request], Awaitable[Response]]
Seen = Callable[[Request, int, float], None]
"""Hears of every answered request: what it was, its status, and the seconds it took."""


class _Protocol(asyncio.StreamReaderProtocol):
    """Tells that the client hung up while nobody reads from it."""

    def __init__(self, reader: asyncio.StreamReader, serve: Callable[..., Awaitable[None]]) -> None:
        super().__init__(reader, serve)
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class HttpServer:
    """Connections of one listening socket."""

    def __init__(
        self,
        handler: Handler,
        *,
        refuse: Callable[[HttpError], Response],
        seen: Seen = lambda request, status, seconds: None,
        max_body: int = 16 * 2**20,
        slow_s: float = 30.0,
        idle_s: float = 75.0,
    ) -> None:
        """`slow_s`: a head or a body must be there this long after its first byte; `idle_s`: a connection may be silent between two."""
        self._handler, self._refuse, self._seen = handler, refuse, seen
        self._max_body, self._slow_s, self._idle_s = max_body, slow_s, idle_s
        self._server: asyncio.Server | None = None
        self._idle: set[asyncio.Task[Any]] = set()
        self._busy: set[asyncio.Task[Any]] = set()
        self.draining = False

    async def start(self, host: str, port: int) -> int:
        """Listen; the port it became (0 lets the system choose)."""
        loop = asyncio.get_running_loop()

        def connection() -> _Protocol:
            return _Protocol(asyncio.StreamReader(limit=MAX_HEAD, loop=loop), self._serve)

        self._server = await loop.create_server(connection, host, port, backlog=512)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def in_progress(self) -> int:
        return len(self._busy)

    async def drain(self, drain_s: float) -> int:
        """Stop listening, let requests in progress end, then close every connection. Returns how many had to be cut off."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for task in set(self._idle):
            task.cancel()
        if self._busy and drain_s > 0:
            await asyncio.wait(set(self._busy), timeout=drain_s)
        cut = set(self._busy)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, *self._idle, return_exceptions=True)
        return len(cut)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task"
        self._idle.add(task)
        try:
            while not self.draining and await self._one(reader, writer, task):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client hung up between two requests or inside one: there is nobody to tell
        except asyncio.CancelledError:
            if not self.draining:
                raise
        finally:
            self._idle.discard(task)
            self._busy.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[Any]) -> bool:
        """Read and answer one request; whether the connection goes on."""
        try:
            request = await self._read(reader, writer)
        except HttpError as error:
            await _write(writer, self._refuse(error), keep=False)
            return False
        if request is None:
            return False
        self._idle.discard(task)
        self._busy.add(task)
        begin = time.monotonic()
        keep = request.headers.get("connection", "").lower() != "close"
        status = await self._answer(request, writer, keep)
        self._seen(request, status, time.monotonic() - begin)
        self._busy.discard(task)
        self._idle.add(task)
        return keep and status != CLIENT_GONE

    async def _answer(self, request: Request, writer: asyncio.StreamWriter, keep: bool) -> int:
        """Handle while the client listens. The handler answers its own errors, so one that comes through is a defect."""

        async def work() -> int:
            response = await self._handler(request)
            await _write(writer, response, keep=keep and not self.draining)
            return response.status

        protocol = writer.transport.get_protocol()
        assert isinstance(protocol, _Protocol), "made in start"
        working, leaving = asyncio.ensure_future(work()), asyncio.ensure_future(protocol.gone.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            return CLIENT_GONE
        except ConnectionError:
            return CLIENT_GONE
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
        """The next request; None when the client has no more."""
        try:
            async with asyncio.timeout(self._idle_s):
                first = await reader.readexactly(1)
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        try:
            async with asyncio.timeout(self._slow_s):
                head = first + await reader.readuntil(b"\r\n\r\n")
                method, path, headers = _head(head)
                if headers.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return Request(method=method, path=path, headers=headers, body=await self._body(reader, headers))
        except TimeoutError:
            raise HttpError(408, f"the request was not complete after {self._slow_s:g} s") from None
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"the head of the request is larger than {MAX_HEAD} bytes") from None

    async def _body(self, reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
        if "transfer-encoding" in headers and "content-length" in headers:
            raise HttpError(400, "the request gives its length twice, by Content-Length and by Transfer-Encoding")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._chunks(reader)
        text = headers.get("content-length", "0")
        if not text.isdecimal():
            raise HttpError(400, f"Content-Length is {text!r}; give a number of bytes")
        return await reader.readexactly(self._bounded(int(text)))

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        parts: list[bytes] = []
        total = 0
        while True:
            line = await reader.readuntil(b"\r\n")
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError:
                raise HttpError(400, f"a chunk of the body begins with {line[:20]!r}; give its size in hexadecimal") from None
            if size < 0:
                raise HttpError(400, f"a chunk of the body has the size {size}")
            total = self._bounded(total + size)
            parts.append(await reader.readexactly(size))
            if await reader.readexactly(2) != b"\r\n":
                raise HttpError(400, f"a chunk of {size} bytes is not followed by a line break")
            if size == 0:
                return b"".join(parts)

    def _bounded(self, size: int) -> int:
        if size > self._max_body:
            raise HttpError(413, f"the body of the request has {size} bytes; this server takes {self._max_body}")
        return size


def _head(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpError(400, f"{lines[0][:80]!r} is not the first line of an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or name != name.strip() or not name:
            raise HttpError(400, f"{line[:80]!r} is not a header")
        headers[name.lower()] = value.strip()
    return words[0], words[1].partition("?")[0], headers


async def _write(writer: asyncio.StreamWriter, response: Response, *, keep: bool) -> None:
    known = HTTPStatus.__members__.values()
    phrase = next((s.phrase for s in known if s == response.status), "Client Closed Request")
    head = [f"HTTP/1.1 {response.status} {phrase}", f"Content-Type: {response.content_type}"]
    head += [f"{name}: {value}" for name, value in response.headers.items()]
    head.append("Connection: keep-alive" if keep else "Connection: close")
    if response.stream is None:
        head.append(f"Content-Length: {len(response.body)}")
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + response.body)
        await writer.drain()
        return
    head += ["Transfer-Encoding: chunked", "Cache-Control: no-cache"]
    writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
    try:
        async for piece in response.stream:
            if piece:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    finally:
        close = getattr(response.stream, "aclose", None)
        if close is not None:
            with contextlib.suppress(ConnectionError):
                await close()
