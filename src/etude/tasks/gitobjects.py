"""Git packs read without git: every object, deltas applied, whatever refers to it. Loose objects are streams of zlib.

`git gc` keeps what a reflog names, and an amended commit leaves its blobs behind, so objects are looked at one by one
and never by walking history. Bounded: an object larger than `most` is cut off, a delta without its base is left out.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from hashlib import sha1

LOOSE = re.compile(rb"(blob|tree|commit|tag) \d+\0")
_KINDS = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
_OFFSET_DELTA, _REF_DELTA = 6, 7
_MAX_OBJECTS = 200_000
_CHUNK = 4096


def read_pack(raw: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every object of a version 2 or 3 pack; it ends where the pack is damaged."""
    if len(raw) < 12:
        return
    count = min(struct.unpack(">I", raw[8:12])[0], _MAX_OBJECTS)
    by_offset: dict[int, tuple[int, bytes]] = {}
    by_id: dict[bytes, tuple[int, bytes]] = {}
    waiting: list[tuple[int, bytes, bytes]] = []
    at = 12
    for _ in range(count):
        start = at
        try:
            kind, at = _head(raw, at)
            base, at = _base(raw, at, start, kind)
            data, at = _inflate(raw, at, most)
        except (zlib.error, IndexError):
            return
        if kind == _REF_DELTA and isinstance(base, bytes) and base not in by_id:
            waiting.append((start, base, data))
            continue
        known = by_offset.get(base) if isinstance(base, int) else by_id.get(base) if base is not None else None
        if base is not None:
            if known is None:
                continue
            kind, data = known[0], apply_delta(known[1], data, most)
        _keep(kind, data, start, by_offset, by_id)
        yield _name(kind, start), data
    for start, base, data in waiting:
        if base in by_id:
            kind, data = by_id[base][0], apply_delta(by_id[base][1], data, most)
            _keep(kind, data, start, by_offset, by_id)
            yield _name(kind, start), data


def _inflate(raw: bytes, at: int, most: int) -> tuple[bytes, int]:
    """The stream that starts here, cut off at `most` bytes, and where it ends. Fed in small parts: what follows is never copied."""
    stream, out, size = zlib.decompressobj(), [], 0
    while not stream.eof:
        part = raw[at : at + _CHUNK]
        if not part:
            raise zlib.error("the pack ends inside of an object")
        data = stream.decompress(part)
        at += len(part)
        if size < most:
            out.append(data[: most - size])
        size += len(data)
        if size > 64 * most:
            raise zlib.error("an object that unpacks to more than may be read")
    return b"".join(out), at - len(stream.unused_data)


def _keep(kind: int, data: bytes, start: int, by_offset: dict[int, tuple[int, bytes]], by_id: dict[bytes, tuple[int, bytes]]) -> None:
    by_offset[start] = (kind, data)
    by_id[sha1(_KINDS.get(kind, b"?") + f" {len(data)}\0".encode() + data).digest()] = (kind, data)


def _name(kind: int, start: int) -> str:
    return f"{_KINDS.get(kind, b'object').decode()} at {start}"


def _head(raw: bytes, at: int) -> tuple[int, int]:
    byte = raw[at]
    at += 1
    kind = byte >> 4 & 7
    while byte & 0x80:
        byte = raw[at]
        at += 1
    return kind, at


def _base(raw: bytes, at: int, start: int, kind: int) -> tuple[int | bytes | None, int]:
    """What a delta is against: an earlier offset, or the id of an object."""
    if kind == _REF_DELTA:
        return raw[at : at + 20], at + 20
    if kind != _OFFSET_DELTA:
        return None, at
    byte = raw[at]
    at += 1
    distance = byte & 0x7F
    while byte & 0x80:
        byte = raw[at]
        at += 1
        distance = (distance + 1 << 7) | byte & 0x7F
    return start - distance, at


def apply_delta(base: bytes, delta: bytes, most: int) -> bytes:
    """The object that a delta makes of its base; cut off at `most` bytes and where the delta is damaged."""
    at = _skip_size(delta, _skip_size(delta, 0))
    out = bytearray()
    while at < len(delta) and len(out) <= most:
        op = delta[at]
        at += 1
        if op & 0x80:
            offset = size = 0
            for bit in range(7):
                if op & 1 << bit:
                    byte = delta[at] if at < len(delta) else 0
                    at += 1
                    if bit < 4:
                        offset |= byte << 8 * bit
                    else:
                        size |= byte << 8 * (bit - 4)
            out += base[offset : offset + (size or 0x10000)]
        elif op:
            out += delta[at : at + op]
            at += op
        else:
            break
    return bytes(out[:most])


def _skip_size(delta: bytes, at: int) -> int:
    while at < len(delta) and delta[at] & 0x80:
        at += 1
    return at + 1
