"""An engine on the other end of HTTP: the reference client of docs/engine-contract.md. Standard library, no torch.

    engine = HttpEngine("http://10.0.0.7:8000", api_key_ref="env:ENGINE_KEY")
    generation = await engine.generate(request)

One connection a request: a request that is dropped here closes its connection, and by that the server stops working for it. What the
server refuses is raised as the error an engine in this process would raise; a server that cannot be reached, breaks off, or answers
nonsense is an EngineError naming it. Nothing is retried: sampling twice is not the same as sampling once, and who calls knows better.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from etude.config import secret
from etude.errors import EngineError, UserError
from etude.inference import wire
from etude.protocols import GenerateRequest, Generation, Scored
from etude.records import Manifest, Version, from_dict, to_dict

MAX_LINE = 2**26
"""Bytes of one piece of a stream, or of a whole answer's line; routes of a long context are the largest."""


class HttpEngine:
    """Implements `protocols.Engine` over the engine contract. `close` closes this client; the engine goes on."""

    def __init__(self, base_url: str, *, api_key_ref: str = "", connect_s: float = 10.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"base_url is {base_url!r}; give an address such as http://localhost:8000")
        self.where = base_url.rstrip("/")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") + wire.PREFIX
        self._key, self._connect_s = api_key_ref, connect_s
        self._open: set[asyncio.StreamWriter] = set()
        self._closed = False

    async def generate(self, request: GenerateRequest) -> Generation:
        return wire.generation_from_wire(await self._call("/generate", wire.request_to_wire(request, stream=False)))

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        lines = self._lines("POST", "/generate", wire.request_to_wire(request, stream=True))
        try:
            async for data in lines:
                yield wire.generation_from_wire(data)
        finally:
            await lines.aclose()

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> Scored:
        return wire.scored_from_wire(await self._call("/score", {"ids": wire.plain_ids(ids), "temperature": temperature}))

    async def load(self, manifest: Manifest, source: str) -> Version:
        answer = await self._call("/load", {"manifest": to_dict(manifest), "source": source})
        return from_dict(answer["version"], Version)

    async def cancel(self, request_id: str) -> None:
        await self._call("/cancel", {"id": request_id})

    async def stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in (await self._call("/stats")).items()}

    async def version(self) -> Version:
        return from_dict((await self._call("/version"))["version"], Version)

    async def close(self) -> None:
        self._closed = True
        for writer in set(self._open):
            writer.close()

    async def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One question, one JSON answer."""
        answers = [data async for data in self._lines("GET" if body is None else "POST", path, body)]
        if len(answers) != 1:
            raise EngineError(f"{self.where} answered {len(answers)} lines to {path}, where one was expected")
        return answers[0]

    async def _lines(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncGenerator[Any]:
        """The answer's lines as JSON. An error, also one in the middle of a stream, is raised."""
        if self._closed:
            raise EngineError(f"the client of {self.where} was closed; make a new one")
        writer = None
        try:
            async with asyncio.timeout(self._connect_s):
                context = ssl.create_default_context() if self._tls else None
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context, limit=MAX_LINE)
            self._open.add(writer)
            writer.write(self._question(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            async for line in _body_lines(reader, headers):
                data = json.loads(line)
                if status != 200 or (isinstance(data, dict) and "error" in data):
                    raise wire.error_from_wire(status, data, self.where)
                yield data
        except TimeoutError as error:
            raise EngineError(f"{self.where} did not take a connection within {self._connect_s:g} s") from error
        except (OSError, EOFError, asyncio.LimitOverrunError, json.JSONDecodeError, KeyError) as error:
            if self._closed:
                raise EngineError(f"the client of {self.where} was closed while a request waited") from error
            raise EngineError(f"{self.where} cannot be reached or broke off: {error or type(error).__name__}") from error
        finally:
            if writer is not None:
                self._open.discard(writer)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def _question(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        head += [f"Authorization: Bearer {secret(self._key)}"] if self._key else []
        return "\r\n".join([*head, "", ""]).encode() + data


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise EOFError(f"its answer begins with {lines[0][:60]!r} and is not HTTP")
    return int(words[1]), {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}


async def _body_lines(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Lines of the body, whether it comes with its length or in chunks."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        data = await reader.readexactly(int(headers["content-length"]))
        for line in data.splitlines():
            yield line
        return
    rest = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if size > MAX_LINE:
            raise EOFError(f"a chunk of {size} bytes is larger than {MAX_LINE}")
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line
    await reader.readexactly(2)
    if rest:
        yield rest
