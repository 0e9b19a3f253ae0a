"""The resolver of a sandbox. No query leaves the host, so no name can carry anything out.

An allowed name gets an address of 198.18.0.0/15, a range that is set aside for tests and routed nowhere. The address
says which name was meant when a connection comes, also where the protocol does not say it; the real address is looked
up on the host, when a connection is made. Other names do not exist. `answer` is pure; `Names` keeps the table.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable

from etude.sandbox.egress.policy import host_name

FIRST = int(ipaddress.IPv4Address("198.18.0.1"))
COUNT = 2**17 - 2
TTL_S = 30
A, IN = 1, 1
NO_ERROR, FORMAT_ERROR, NO_SUCH_NAME, NOT_IMPLEMENTED = 0, 1, 3, 4
_HEADER = struct.Struct(">HHHHHH")


class Names:
    """Which made-up address stands for which name, in one sandbox. The oldest is forgotten when the range is used up."""

    def __init__(self) -> None:
        self._of_name: dict[str, str] = {}
        self._of_address: dict[str, str] = {}
        self._next = 0

    def address(self, name: str) -> str:
        if name not in self._of_name:
            address = str(ipaddress.IPv4Address(FIRST + self._next % COUNT))
            self._next += 1
            self._of_name.pop(self._of_address.get(address, ""), None)
            self._of_name[name], self._of_address[address] = address, name
        return self._of_name[name]

    def name(self, address: str) -> str:
        """The name behind a made-up address; the address itself when it is none."""
        return self._of_address.get(address, address)


def answer(query: bytes, resolve: Callable[[str], str]) -> tuple[bytes, str, int]:
    """(response, name asked for, its type). `resolve` gives the address of a name, or "" for a name that does not exist.

    Only addresses of version 4 are told; every other question about a name that exists has an empty answer. b"" means
    that the packet deserves no response.
    """
    if len(query) < _HEADER.size:
        return b"", "", 0
    number, flags, questions, *_ = _HEADER.unpack_from(query)
    if flags & 0x8000:
        return b"", "", 0
    if flags & 0x7800:
        return _response(number, flags, NOT_IMPLEMENTED), "", 0
    name, end = _question(query) if questions == 1 else ("", 0)
    if not end:
        return _response(number, flags, FORMAT_ERROR), "", 0
    kind, group = struct.unpack_from(">HH", query, end)
    question = query[_HEADER.size : end + 4]
    known = host_name(name)
    address = resolve(known) if known and group == IN else ""
    if not address:
        return _response(number, flags, NO_SUCH_NAME, question), name, kind
    record = b""
    if kind == A:
        record = struct.pack(">HHHIH", 0xC000 | _HEADER.size, A, IN, TTL_S, 4) + ipaddress.IPv4Address(address).packed
    return _response(number, flags, NO_ERROR, question, record), name, kind


def _question(query: bytes) -> tuple[str, int]:
    """(name, where it ends) of the only question; ("", 0) when it is malformed. Compression has no place in a question."""
    labels: list[str] = []
    at = _HEADER.size
    while at < len(query):
        size = query[at]
        at += 1
        if size == 0:
            return (".".join(labels), at) if at + 4 <= len(query) and labels else ("", 0)
        if size > 63 or at + size > len(query):
            return "", 0
        labels.append(query[at : at + size].decode("latin-1"))
        at += size
    return "", 0


def _response(number: int, flags: int, code: int, question: bytes = b"", record: bytes = b"") -> bytes:
    kept = 0x8000 | (flags & 0x0100) | 0x0480 if code != FORMAT_ERROR else 0x8000 | (flags & 0x0100)
    return _HEADER.pack(number, kept | code, int(bool(question)), int(bool(record)), 0, 0) + question + record
