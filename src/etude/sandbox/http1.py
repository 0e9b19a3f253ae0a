"""HTTP/1.1 on asyncio streams: heads, bodies, and nothing that two readers could understand differently.

Used by the egress proxy, which stands between code nobody trusts and servers on the network, and by the environment
service. So the grammar is the strict one of RFC 9112: a message that has two lengths, a length and a transfer coding,
a folded header, a space before a colon or a control character is refused, because a second reader might see
another message in it (request smuggling). Sizes are bounded before anything is kept.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

MAX_HEAD = 64 * 1024
MAX_CHUNK = 16 * 2**20
PIECE = 64 * 1024
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(r"[\x21-\x7e]+")
HOP_BY_HOP = frozenset({"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers that concern one connection and are not passed on."""


class BadMessage(ValueError):
    """Not HTTP/1.1 as it is understood here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line and the headers of a message. Names are lower case, in the order they came in."""

    method: str = ""
    target: str = ""
    status: int = 0
    reason: str = ""
    version: str = "1.1"
    headers: tuple[tuple[str, str], ...] = ()

    def all(self, name: str) -> list[str]:
        return [value for known, value in self.headers if known == name]

    def one(self, name: str) -> str:
        """The value of a header that may stand once; "" where it does not."""
        values = self.all(name)
        if len(values) > 1:
            raise BadMessage(f"{len(values)} headers {name!r}")
        return values[0] if values else ""

    def without(self, names: Iterable[str]) -> Head:
        dropped = set(names)
        return replace(self, headers=tuple((name, value) for name, value in self.headers if name not in dropped))

    def plus(self, **headers: str) -> Head:
        """With further headers; an underscore in a name stands for a dash."""
        return replace(self, headers=(*self.headers, *((name.replace("_", "-"), value) for name, value in headers.items())))

    @property
    def keeps_alive(self) -> bool:
        words = {word.strip().lower() for value in self.all("connection") for word in value.split(",")}
        return "close" not in words if self.version == "1.1" else "keep-alive" in words

    def encode(self) -> bytes:
        first = f"{self.method} {self.target} HTTP/1.1" if self.method else f"HTTP/1.1 {self.status} {self.reason}"
        return "\r\n".join([first, *(f"{name}: {value}" for name, value in self.headers), "", ""]).encode("latin-1")


def parse_request(raw: bytes) -> Head:
    first, headers = _lines(raw)
    parts = first.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise BadMessage(f"not a request line: {first[:80]!r}")
    return Head(method=parts[0], target=parts[1], version=_version(parts[2]), headers=headers)


def parse_response(raw: bytes) -> Head:
    first, headers = _lines(raw)
    version, _, rest = first.partition(" ")
    status, _, reason = rest.partition(" ")
    if not re.fullmatch(r"[1-9][0-9]{2}", status) or not _VALUE.fullmatch(reason):
        raise BadMessage(f"not a status line: {first[:80]!r}")
    return Head(status=int(status), reason=reason, version=_version(version), headers=headers)


def _version(text: str) -> str:
    if text not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadMessage(f"not HTTP/1.1: {text[:20]!r}")
    return text[5:]


def _lines(raw: bytes) -> tuple[str, tuple[tuple[str, str], ...]]:
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if not _VALUE.fullmatch(first):
        raise BadMessage("a control character in the first line")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadMessage(f"not a header: {line[:80]!r}")
        headers.append((name.lower(), value))
    return first, tuple(headers)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """The bytes of one head; b"" when the peer closed before it began."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadMessage("the connection ended within a head") from None
        return b""
    except asyncio.LimitOverrunError:
        raise BadMessage(f"a head of more than {MAX_HEAD} bytes") from None
    if len(raw) > MAX_HEAD:
        raise BadMessage(f"a head of more than {MAX_HEAD} bytes")
    return raw


CHUNKED, UNTIL_CLOSE = -1, -2
"""Lengths of bodies that do not say theirs."""


def body_length(head: Head, *, answers: str = "") -> int:
    """Bytes of the body that follows, CHUNKED or UNTIL_CLOSE. `answers` is the method that a response belongs to."""
    coding, length = head.one("transfer-encoding").lower(), head.one("content-length")
    if coding and length:
        raise BadMessage("a length and a transfer coding in one message")
    if coding and (coding != "chunked" or head.version == "1.0"):
        raise BadMessage(f"transfer coding {coding!r}; only 'chunked' is understood")
    if length and not re.fullmatch(r"[0-9]{1,15}", length):
        raise BadMessage(f"length {length[:20]!r}")
    if not head.method and (answers == "HEAD" or head.status in (204, 304) or head.status < 200):
        return 0
    if coding:
        return CHUNKED
    if length:
        return int(length)
    return 0 if head.method else UNTIL_CLOSE


async def pieces(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """The body in pieces, without its framing."""
    if length == CHUNKED:
        async for piece in _chunks(reader):
            yield piece
        return
    left = length
    while left != 0:
        piece = await reader.read(PIECE if left < 0 else min(PIECE, left))
        if not piece:
            if left > 0:
                raise BadMessage(f"the connection ended {left} bytes before the body did")
            return
        left -= len(piece) if left > 0 else 0
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        text = (await _line(reader)).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", text) or int(text, 16) > MAX_CHUNK:
            raise BadMessage(f"a chunk of size {text[:20]!r}")
        left = int(text, 16)
        if left == 0:
            break
        while left:
            piece = await reader.read(min(PIECE, left))
            if not piece:
                raise BadMessage("the connection ended within a chunk")
            left -= len(piece)
            yield piece
        if await _line(reader):
            raise BadMessage("a chunk that is longer than it says")
    total = 0
    while line := await _line(reader):  # trailers are read and dropped
        total += len(line)
        if total > MAX_HEAD:
            raise BadMessage("trailers without end")


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise BadMessage("a chunked body that ends early") from None


async def read_body(reader: asyncio.StreamReader, length: int, most: int) -> bytes:
    """The whole body, or BadMessage when it is longer than `most`."""
    if length > most:
        raise BadMessage(f"a body of {length} bytes; at most {most} are taken")
    data = bytearray()
    async for piece in pieces(reader, length):
        data += piece
        if len(data) > most:
            raise BadMessage(f"a body of more than {most} bytes")
    return bytes(data)


def response(status: int, reason: str, body: bytes = b"", kind: str = "text/plain; charset=utf-8", **headers: str) -> bytes:
    """A whole answer."""
    fields = (("content-type", kind), ("content-length", str(len(body))), *((k.replace("_", "-"), v) for k, v in headers.items()))
    return Head(status=status, reason=reason, headers=fields).encode() + body
