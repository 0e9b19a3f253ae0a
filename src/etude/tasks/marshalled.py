"""Marshalled bytes (what a .pyc holds) read as data: code objects with their names and constants, and every string.

`marshal.loads` is made for trusted bytes and may crash the interpreter on others. This reader builds no code object; it
is bounded in depth and in objects, and gives up with None on bytes that do not fit the format. The layout of code
objects is that of CPython 3.11 to 3.13; bytecode of other versions still shows its strings in a search of its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

_FLAG_REF = 0x80
_MAX_OBJECTS = 400_000
_MAX_DEPTH = 60
_STRING_KINDS = b"uatA"
_SHORT_KINDS = b"zZ"


@dataclass(frozen=True, kw_only=True)
class CodeInfo:
    """The signature of one code object."""

    name: str
    qualname: str
    variables: tuple[str, ...]
    """Arguments first, then locals, then cells, as the compiler orders them."""
    names: tuple[str, ...]
    """Globals and attributes that it uses."""
    strings: tuple[str, ...]
    """String constants, docstring included."""
    numbers: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Read:
    codes: list[CodeInfo] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)


class _Broken(Exception):
    pass


def looks_like(raw: bytes) -> bool:
    """Whether the first byte is that of a marshalled code object, dict, list or tuple."""
    return len(raw) > 8 and raw[0] & ~_FLAG_REF in b"c{[()" and (raw[0] & _FLAG_REF != 0 or raw[0] in b"c{") and b"\0" in raw[:64]


def read(raw: bytes) -> Read | None:
    """Codes and strings, or None where the bytes are something else."""
    reader = _Reader(raw)
    try:
        reader.value(0)
    except (_Broken, struct.error, IndexError, UnicodeError, OverflowError, TypeError, ValueError):
        return None
    return reader.found


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at, self.count = raw, 0, 0
        self.refs: list[Any] = []
        self.found = Read()

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.raw):
            raise _Broken
        self.at += n
        return self.raw[self.at - n : self.at]

    def long(self) -> int:
        return struct.unpack("<i", self.take(4))[0]

    def value(self, depth: int) -> Any:
        self.count += 1
        if depth > _MAX_DEPTH or self.count > _MAX_OBJECTS:
            raise _Broken
        kind = self.take(1)[0]
        slot = -1
        if kind & _FLAG_REF:
            kind &= ~_FLAG_REF
            slot = len(self.refs)
            self.refs.append(None)
        value = self._of(chr(kind), depth)
        if slot >= 0:
            self.refs[slot] = value
        return value

    def _of(self, kind: str, depth: int) -> Any:
        if kind in "NFT.S0":
            return {"N": None, "F": False, "T": True, ".": ..., "S": StopIteration, "0": _END}[kind]
        if kind == "i":
            return self.long()
        if kind == "I":
            return struct.unpack("<q", self.take(8))[0]
        if kind == "l":
            n = self.long()
            digits = struct.unpack(f"<{abs(n)}H", self.take(2 * abs(n)))
            return sum(d << (15 * i) for i, d in enumerate(digits)) * (-1 if n < 0 else 1)
        if kind in "gy":
            parts = struct.unpack("<d" if kind == "g" else "<dd", self.take(8 if kind == "g" else 16))
            return parts[0] if kind == "g" else complex(*parts)
        if kind == "s":
            return self.take(self.long())
        if kind in "uatAzZ":
            size = self.take(1)[0] if kind in "zZ" else self.long()
            text = self.take(size).decode("utf-8" if kind in "ut" else "latin-1", "surrogatepass" if kind in "ut" else "strict")
            if text:
                self.found.strings.append(text)
            return text
        if kind in "()[<>":
            size = self.take(1)[0] if kind == ")" else self.long()
            if not 0 <= size <= _MAX_OBJECTS:
                raise _Broken
            return tuple(self.value(depth + 1) for _ in range(size))
        if kind == "{":
            items = []
            while (key := self.value(depth + 1)) is not _END:
                items.append((key, self.value(depth + 1)))
            return tuple(items)
        if kind == "r":
            return self.refs[self.long()]
        if kind == "c":
            return self._code(depth)
        raise _Broken

    def _code(self, depth: int) -> CodeInfo:
        self.take(5 * 4)  # counts of arguments, stack size, flags
        _code, constants, names, variables, _kinds, _file, name, qualname = (self.value(depth + 1) for _ in range(8))
        self.long()
        self.value(depth + 1)
        self.value(depth + 1)
        if not isinstance(name, str) or not isinstance(constants, tuple):
            raise _Broken
        info = CodeInfo(
            name=name,
            qualname=str(qualname),
            variables=tuple(map(str, variables)),
            names=tuple(map(str, names)),
            strings=tuple(c for c in constants if isinstance(c, str)),
            numbers=tuple(repr(c) for c in constants if isinstance(c, (int, float)) and not isinstance(c, bool)),
        )
        self.found.codes.append(info)
        return info


_END = object()
