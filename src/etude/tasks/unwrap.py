"""What a file holds, however it is packed: archives, databases, pickles, bytecode, version control, notebooks, text in text.

    for piece in unwrap("dist/shop.whl", data, Budget()):
        piece.path, piece.via      # "dist/shop.whl!shop/stats.py", ("zip",)

The kind of a file is taken from its content, never from its name. Invariants:
* nothing is executed or imported: pickles are read as opcodes, bytecode by a reader of its own (`marshal.loads` may
  crash on hostile bytes), databases as plain tables with no extension, view, trigger or virtual table;
* everything is bounded by one `Budget` (bytes unpacked, members, depth): what does not fit, is encrypted, or needs a
  decompressor that is missing, is yielded as a piece with `refused` set, so that it is a finding and not a gap;
* bytes that merely look like an archive and cannot be decoded are still yielded as what they are.

The channels are those by which deleted code came back in published systems: type-checker caches (JSON, today SQLite),
bytecode, git objects, built and installed copies, notebooks, coverage data, documents.
"""

from __future__ import annotations

import ast
import base64
import binascii
import bz2
import gzip
import html
import io
import json
import lzma
import pickletools
import re
import sqlite3
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from etude.tasks import gitobjects, marshalled
from etude.tasks.marshalled import CodeInfo

MAX_DEPTH = 6
MAX_MEMBER = 16 * 2**20
MAX_TOTAL = 256 * 2**20
MAX_MEMBERS = 50_000
_MAX_JSON = 4 * 2**20
_MAX_CARVED = 200
"""Pickles looked for inside of one binary file (dbm, shelve, model files)."""
_SQLITE_STEPS = 2_000_000
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{40,}={0,2}[\r\n]{0,2}){1,}")
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){40,}")
_COMMENT = re.compile(r"^[ \t]*(?:#+|//+|;+|--)(?![!:])(.*\n?)", re.MULTILINE)
_TAG = re.compile(r"<[^<>]{0,2000}>")
_STREAM = re.compile(rb"stream\r?\n(.*?)endstream", re.DOTALL)


class Refused(Exception):
    """Content that will not be unpacked; the text says why."""


@dataclass(kw_only=True)
class Budget:
    """What one scan may still unpack."""

    bytes_left: int = MAX_TOTAL
    members_left: int = MAX_MEMBERS
    most: int = MAX_MEMBER

    def take(self, data: bytes) -> bytes:
        self.bytes_left -= len(data)
        self.members_left -= 1
        if len(data) > self.most:
            raise Refused(f"more than {self.most} bytes when unpacked")
        if self.bytes_left < 0:
            raise Refused("the image unpacks to more bytes than a scan may read")
        if self.members_left < 0:
            raise Refused("the image holds more members than a scan may read")
        return data


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing that can be searched. Exactly one of raw, text, strings, code and refused says something."""

    path: str
    via: tuple[str, ...] = ()
    """Containers around it, outermost first."""
    raw: bytes = b""
    text: str | None = None
    strings: tuple[str, ...] = ()
    """Values of a structured container: rows, keys, pickled strings."""
    code: CodeInfo | None = None
    refused: str = ""


def unwrap(path: str, raw: bytes, budget: Budget, via: tuple[str, ...] = (), depth: int = MAX_DEPTH) -> Iterator[Piece]:
    """The file itself and everything inside of it."""
    try:
        budget.take(b"")
        if raw.startswith(_SEALED):
            raise Refused("an archive in a format that cannot be opened here")
        inside = list(_open(raw, budget)) if depth else []
        if not depth and next(_open(raw, budget), None) is not None and _is_container(raw):
            raise Refused(f"packed more than {MAX_DEPTH} levels deep")
    except Refused as error:
        yield Piece(path=path, via=via, refused=str(error))
        inside = []
    yield _itself(path, raw, via)
    for kind, name, value in inside:
        where, way = f"{path}!{name}", (*via, kind)
        if isinstance(value, bytes):
            yield from unwrap(where, value, budget, way, depth - 1)
        elif isinstance(value, str):
            yield Piece(path=where, via=way, text=value)
        elif isinstance(value, CodeInfo):
            yield Piece(path=where, via=way, code=value)
        elif isinstance(value, Refused):
            yield Piece(path=where, via=way, refused=str(value))
        else:
            yield Piece(path=where, via=way, strings=value)


Inside = tuple[str, str, "bytes | str | CodeInfo | tuple[str, ...] | Refused"]


def as_text(raw: bytes) -> str | None:
    """Text in UTF-8, or in UTF-16 or UTF-32 with a mark; None for anything else."""
    for mark, encoding in ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if raw.startswith(mark):
            try:
                return raw.decode(encoding)
            except UnicodeDecodeError:
                return None
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _itself(path: str, raw: bytes, via: tuple[str, ...]) -> Piece:
    text = as_text(raw)
    return Piece(path=path, via=via, raw=raw) if text is None else Piece(path=path, via=via, text=text)


def _is_container(raw: bytes) -> bool:
    return any(raw.startswith(magic) for magic in (b"PK\x03\x04", b"SQLite format 3\0", *(m for m, _, _ in _STREAMS)))


def _open(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """What is directly inside of a file; nothing where it holds nothing else."""
    found = False
    for reader in (_zip, _compressed, _tar, _ar, _database, _git, _inventory, _pdf, _bytecode):
        for item in reader(raw, budget):
            found = True
            yield item
    if found:
        return
    text = as_text(raw)
    if text is None:
        yield from _pickles(raw)
        yield from _wide(raw)
    else:
        yield from _inside_text(raw, text, budget)


# ---------------------------------------------------------------------------------------------------
# Archives and streams


def _zip(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """Also one that a script or a program is put in front of. Sizes in the directory are not believed."""
    if b"PK\x05\x06" not in raw[-66_000:]:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if archive.comment:
                yield "zip", "(comment)", budget.take(archive.comment)
            for info in archive.infolist():
                if not info.is_dir():
                    yield "zip", info.filename, _member(archive, info, budget)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget) -> bytes | Refused:
    try:
        with archive.open(info) as member:
            return budget.take(member.read(budget.most + 1))
    except RuntimeError as error:  # zipfile's word for "encrypted"
        return Refused(f"cannot be opened: {error}")
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        return Refused(f"a damaged member: {error}")


def _compressed(raw: bytes, budget: Budget) -> Iterator[Inside]:
    for magic, kind, opener in _STREAMS:
        if raw.startswith(magic):
            try:
                yield kind, "content", budget.take(opener(raw, budget.most + 1))
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                continue


def _inflate(raw: bytes, most: int) -> bytes:
    return zlib.decompressobj().decompress(raw, most)


def _gunzip(raw: bytes, most: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        return file.read(most)


def _bunzip(raw: bytes, most: int) -> bytes:
    with bz2.BZ2File(io.BytesIO(raw)) as file:
        return file.read(most)


def _unxz(raw: bytes, most: int) -> bytes:
    with lzma.LZMAFile(io.BytesIO(raw)) as file:
        return file.read(most)


def _unzstd(raw: bytes, most: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise Refused("compressed with zstd, and zstandard is not installed (pip install 'etude[fast]')") from error
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(io.BytesIO(raw), read_across_frames=True) as reader:
            return reader.read(most)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


_STREAMS: tuple[tuple[bytes, str, Callable[[bytes, int], bytes]], ...] = (
    (b"\x1f\x8b", "gzip", _gunzip),
    (b"BZh", "bzip2", _bunzip),
    (b"\xfd7zXZ\x00", "xz", _unxz),
    (b"\x5d\x00\x00", "lzma", _unxz),
    (b"\x28\xb5\x2f\xfd", "zstd", _unzstd),
    (b"\x78\x01", "zlib", _inflate),
    (b"\x78\x5e", "zlib", _inflate),
    (b"\x78\x9c", "zlib", _inflate),
    (b"\x78\xda", "zlib", _inflate),
)
_SEALED = (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07")


def _tar(raw: bytes, budget: Budget) -> Iterator[Inside]:
    if raw[257:262] != b"ustar":
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for info in archive:
                if info.issym() or info.islnk():
                    continue
                file = archive.extractfile(info) if info.isfile() else None
                if file is not None:
                    yield "tar", info.name, budget.take(file.read(budget.most + 1))
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return


def _ar(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """Static libraries and Debian packages."""
    at = 8 if raw.startswith(b"!<arch>\n") else len(raw)
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode("latin-1").strip().rstrip("/"), raw[at + 48 : at + 58].strip()
        if not size.isdigit():
            return
        yield "ar", name, budget.take(raw[at + 60 : at + 60 + int(size)])
        at += 60 + int(size) + int(size) % 2


def _inventory(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """Sphinx's objects.inv: four lines of text, then a compressed list."""
    if raw.startswith(b"# Sphinx inventory"):
        parts = raw.split(b"\n", 4)
        if len(parts) == 5:
            yield from (("sphinx inventory", name, data) for _, name, data in _compressed(parts[4], budget))


def _pdf(raw: bytes, budget: Budget) -> Iterator[Inside]:
    if raw.startswith(b"%PDF"):
        for number, match in enumerate(_STREAM.finditer(raw)):
            for _, _, data in _compressed(match[1].lstrip(b"\r\n"), budget):
                yield "pdf", f"stream {number}", data


# ---------------------------------------------------------------------------------------------------
# Databases, bytecode, pickles, version control


def _database(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """Every row of every plain table. Values of a row are kept together: a name beside its parameters is what a cache holds."""
    if not raw.startswith(b"SQLite format 3\0"):
        return
    budget.take(raw)
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(raw)
        steps = iter(range(_SQLITE_STEPS // 1000))
        connection.set_progress_handler(lambda: int(next(steps, None) is None), 1000)
        connection.execute("pragma trusted_schema = off")
        connection.execute("pragma query_only = on")
        connection.text_factory = bytes
        tables = connection.execute("select name from sqlite_master where type = 'table' and sql not like 'create virtual%'").fetchall()
        for (table,) in tables:
            name = table.decode("utf-8", "replace")
            quoted = '"' + name.replace('"', '""') + '"'
            for number, row in enumerate(connection.execute(f"select * from {quoted}")):
                cells = [budget.take(cell) for cell in row if isinstance(cell, bytes)]
                yield "sqlite", f"{name}[{number}]", tuple(cell.decode("utf-8", "replace") for cell in cells)
                for column, cell in enumerate(cells):
                    if len(cell) >= 16:
                        yield "sqlite", f"{name}[{number}].{column}", cell
    except sqlite3.Error:
        return
    finally:
        connection.close()


def _bytecode(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """A compiled module (16 bytes of head, then marshalled code), or marshalled data of another kind, such as a profile."""
    read = next(
        (found for start in (0, 16) if marshalled.looks_like(raw[start : start + 80]) and (found := marshalled.read(raw[start:]))), None
    )
    if read is None:
        return
    for code in read.codes:
        yield "bytecode", code.qualname, code
    if read.strings and not read.codes:
        yield "marshal", "values", tuple(read.strings)


def _pickles(raw: bytes) -> Iterator[Inside]:
    """Strings of pickles, at the start of a file or anywhere inside of one."""
    at, carved = 0, 0
    while carved < _MAX_CARVED and (at := _next_pickle(raw, at)) >= 0:
        strings, end = _pickled(raw[at:])
        if strings:
            carved += 1
            yield "pickle", f"at {at}", tuple(strings)
            yield from (("pickle", f"at {at}", s) for s in strings if isinstance(s, str) and "\n" in s)
        at += max(end, 2)


def _next_pickle(raw: bytes, at: int) -> int:
    found = [p for version in range(2, 6) if (p := raw.find(b"\x80" + bytes([version]), at)) >= 0]
    return min(found, default=-1)


def _pickled(raw: bytes) -> tuple[list[str], int]:
    """Strings of the pickle that starts here and its length; none when it does not reach its end."""
    strings: list[str] = []
    try:
        for _opcode, value, position in pickletools.genops(raw):
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            if isinstance(value, str) and value:
                strings.append(value)
            end = (position or 0) + 1
        return strings, end
    except (ValueError, IndexError, UnicodeError, KeyError, OverflowError, MemoryError):
        return [], 0


def _git(raw: bytes, budget: Budget) -> Iterator[Inside]:
    """Objects of a pack or a bundle. A loose object is a compressed stream whose content starts with its kind."""
    start = raw.find(b"PACK\0\0\0") if raw.startswith((b"PACK", b"# v2 git bundle", b"# v3 git bundle")) else -1
    if start >= 0:
        for name, data in gitobjects.read_pack(raw[start:], budget.most):
            yield "git pack", name, budget.take(data)
    if (header := gitobjects.LOOSE.match(raw)) is not None:
        yield "git object", header[1].decode(), raw[header.end() :]


def _wide(raw: bytes) -> Iterator[Inside]:
    """Text of two bytes a character without a mark, as Windows programs keep it."""
    text = "\n".join(match[0][::2].decode() for match in re.finditer(rb"(?:[\x20-\x7e\r\n\t]\x00){24,}", raw))
    if text:
        yield "utf-16", "strings", text


# ---------------------------------------------------------------------------------------------------
# Text in text


def _inside_text(raw: bytes, text: str, budget: Budget) -> Iterator[Inside]:
    start = text.lstrip()[:1]
    if start in ("{", "[") and len(text) <= _MAX_JSON:
        yield from _json(text)
    if start == "<":
        yield "markup", "text", html.unescape(_TAG.sub("", text))
    if (plain := _undiffed(text)) is not None:
        yield "diff", "lines", plain
    if raw[:1] in (b"(", b"]", b"}", b"c") and raw.rstrip().endswith(b"."):
        strings, _ = _pickled(raw)
        if strings:
            yield "pickle", "values", tuple(strings)
            yield from (("pickle", "values", s) for s in strings if "\n" in s)
    if len(comments := _COMMENT.findall(text)) >= 2:
        yield "comments", "lines", "".join(comments)
    if text.count("\\n") >= 3:
        yield from _literals(text)
    if len(raw) >= 40:
        yield from _encoded(raw, budget)


def _json(text: str) -> Iterator[Inside]:
    try:
        documents = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            return
    strings: list[str] = []
    waiting: list[object] = list(documents)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, dict):
            strings += value
            waiting += value.values()
        elif isinstance(value, list):
            if len(value) > 1 and all(isinstance(each, str) for each in value):
                joined = "".join(each if each.endswith("\n") else each + "\n" for each in value)  # a notebook's source, line by line
                yield "json", "lines", joined
            waiting += value
    if strings:
        yield "json", "values", tuple(strings)
    yield from (("json", "value", s) for s in strings if "\n" in s)


def _undiffed(text: str) -> str | None:
    """A patch without its first column."""
    lines = text.splitlines()
    marked = sum(line[:1] in ("+", "-") for line in lines)
    if marked < 3 or marked < len(lines) / 10:
        return None
    return "\n".join(line[1:] if line[:1] in ("+", "-", " ") else line for line in lines)


def _literals(text: str) -> Iterator[Inside]:
    """Source kept in a string of source, or of any file that writes strings as Python or C does."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield "escapes", "text", text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\'", "'")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield "string", f"line {node.lineno}", node.value


def _encoded(raw: bytes, budget: Budget) -> Iterator[Inside]:
    for match in _HEX.finditer(raw):
        yield "hex", f"at {match.start()}", budget.take(binascii.unhexlify(match[0]))
    for match in _BASE64.finditer(raw):
        word = re.sub(rb"[\r\n]", b"", match[0]).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
        if len(word) % 4 == 1 or _HEX.fullmatch(word):
            continue
        yield "base64", f"at {match.start()}", budget.take(base64.b64decode(word + b"=" * (-len(word) % 4)))
