"""Proof by content that a deleted function cannot be copied from what is left.

`find_copies` looks at every file of a tree, whatever its name: source with the same syntax tree (names changed or not),
text that shares most of the 5-token shingles, bytecode of the module, and, in caches and other binary files, the
function's name or a longer string of its body. Archives are opened two levels deep. Scrub lists by file name go stale
(a type checker that wrote JSON yesterday writes SQLite today), so no rule here depends on where a file lies.

Not covered, and left to the scanner for real packages: git objects, pickles, images of other packages on the machine.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.tasks.deletion import Fingerprint, ast_hash, shingles

SHARE = 0.6
"""Share of the deleted shingles in one file from which it counts as a copy. Over 2,900 kata deletions the largest share
in an honest file was 0.20 (tests/tasks/test_katas_slow.py prints it)."""
LEAST = 6
"""Shingles below which text alone proves nothing: `return self.n` is everywhere."""
_MAX_UNPACKED = 16 * 2**20
_BYTECODE = (".pyc", ".pyo")


@dataclass(frozen=True, kw_only=True)
class Leak:
    path: str
    channel: str
    """same code | text | bytecode | binary"""
    what: str


def find_copies(files: Mapping[str, str | bytes], deleted: Fingerprint, *, module: str = "") -> list[Leak]:
    """Every place where the deleted code can be read. `module` is the stem of the file it was in."""
    return [leak for path, data in files.items() for leak in _scan(path, data, deleted, module, depth=2)]


def share(text: str, deleted: Fingerprint) -> float:
    """How much of the deleted text is in `text`, by shingles."""
    return len(deleted.shingles & shingles(text)) / len(deleted.shingles) if deleted.shingles else 0.0


def _scan(path: str, data: str | bytes, deleted: Fingerprint, module: str, depth: int) -> Iterator[Leak]:
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if depth:
        for name, inner in _unpack(raw):
            yield from _scan(f"{path}!{name}", inner, deleted, module, depth - 1)
    if path.endswith(_BYTECODE) and module and path.rsplit("/", 1)[-1].split(".")[0] == module:
        yield Leak(path=path, channel="bytecode", what=f"compiled {module}")
        return
    text = _as_text(raw)
    if text is None:
        yield from _scan_binary(path, raw, deleted)
        return
    if len(deleted.shingles) < LEAST:
        return
    if deleted.ast_hash in _hashes(path, text):
        yield Leak(path=path, channel="same code", what=f"a function with the code of {deleted.name}")
    elif (found := share(text, deleted)) >= SHARE:
        yield Leak(path=path, channel="text", what=f"{found:.0%} of the text of {deleted.name}")


def _as_text(raw: bytes) -> str | None:
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _hashes(path: str, text: str) -> set[str]:
    if not path.endswith((".py", ".pyi", ".txt", ".md", ".orig", ".bak", "~")) and "def " not in text:
        return set()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {ast_hash(n) for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def _scan_binary(path: str, raw: bytes, deleted: Fingerprint) -> Iterator[Leak]:
    for word in (deleted.name, *deleted.strings):
        if len(word) >= 4 and word.encode("utf-8", "surrogatepass") in raw:
            yield Leak(path=path, channel="binary", what=repr(word))
            return


def _unpack(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Contents of a compressed file; nothing for any other."""
    if raw[:4] == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                for info in archive.infolist():
                    if info.file_size <= _MAX_UNPACKED and not info.is_dir():
                        yield info.filename, archive.read(info)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error):
            return
        return
    opener = next((o for magic, o in _OPENERS if raw.startswith(magic)), None)
    if opener is None:
        return
    try:
        yield "content", opener(raw)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return


def _inflate(raw: bytes) -> bytes:
    return zlib.decompressobj().decompress(raw, _MAX_UNPACKED)


def _gunzip(raw: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        return file.read(_MAX_UNPACKED)


def _bunzip(raw: bytes) -> bytes:
    return bz2.BZ2Decompressor().decompress(raw, _MAX_UNPACKED)


def _unxz(raw: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(raw, _MAX_UNPACKED)


_OPENERS = (
    (b"\x1f\x8b", _gunzip),
    (b"BZh", _bunzip),
    (b"\xfd7zXZ\x00", _unxz),
    (b"\x78\x01", _inflate),
    (b"\x78\x9c", _inflate),
    (b"\x78\xda", _inflate),
)
