"""Trajectories on disk: sharded columnar blobs with an index. No torch.

    <folder>/shard-00000.bin    blocks, one after another
    <folder>/index.jsonl        one line a block, written after it: where it is, its crc, which records it holds

A block holds whole records of any kind. Their arrays are taken out and concatenated per field (ids, log-probs,
versions, routes ...); what remains is JSON, compressed. A column is made small by what it is: booleans become bits,
integers are shifted to start at 0 and narrowed to the smallest unsigned type, everything is split into byte planes, and
rows of several values (routes: layers x experts) are stored value by value, so that all choices of one layer stand
together. A column equal to another (the two log-probs at temperature 1) is stored once.

Crash safety: a block counts when its index line ends in a newline. A torn block or line is ignored on reading and cut
off by the next writer. Every block carries a crc32, checked whenever it is read.

An id may occur twice, when a group was rolled again after a crash: `get` gives the later one, iteration gives both.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from etude.errors import InfraError, IntegrityError, RecordError
from etude.records import Graded, Group, Record, Trajectory, from_dict, to_dict
from etude.sync.compression import codec_code, compress, decompress

MAGIC = b"EtSB"
FORMAT = 1
BLOCK = struct.Struct("<4sHxxIIQ")
"""magic, format, crc32 of header and body, header length, body length"""
INDEX = "index.jsonl"
ARRAY = "$array"
"""Marks the place of an array in a record's JSON: [column, first row, shape]."""
LEVEL = 6
"""zlib level of a block; written once, read by people and by resumes."""
CACHED_BLOCKS = 4


def record_id(record: Record) -> str:
    """The id under which a record is found: a trajectory's own, `group-<admission>` for a group."""
    if isinstance(record, Graded):
        return record.trajectory.id
    if isinstance(record, Trajectory):
        return record.id
    if isinstance(record, Group):
        return f"group-{record.admission}"
    raise RecordError(f"shards hold Trajectory, Graded and Group records, not {type(record).__name__}")


# ---------------------------------------------------------------------------------------------------
# A block


@dataclass(slots=True)
class _Column:
    """Arrays of one field, type and row shape, one under another."""

    name: str
    dtype: np.dtype
    row: tuple[int, ...]
    rows: int = 0
    parts: list[np.ndarray] = field(default_factory=list)


def encode_block(records: Sequence[Record], *, codec: str = "") -> bytes:
    """Whole records as bytes."""
    columns: dict[tuple[str, str, tuple[int, ...]], _Column] = {}
    meta = [_extract(to_dict(record), "", columns) for record in records]
    writer = _Sections(codec_code(codec))
    table = [_encode_column(column, writer) for column in columns.values()]
    text = json.dumps(meta, separators=(",", ":")).encode()
    header = {"records": len(records), "columns": table, "meta": writer.add(text)}
    head = json.dumps(header, separators=(",", ":")).encode()
    body = b"".join(writer.parts)
    crc = zlib.crc32(body, zlib.crc32(head))
    return BLOCK.pack(MAGIC, FORMAT, crc, len(head), len(body)) + head + body


def _extract(value: Any, name: str, columns: dict[tuple[str, str, tuple[int, ...]], _Column]) -> Any:
    """The value with each array replaced by a reference into its column."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise RecordError(f"field {name!r} holds Python objects; records hold plain arrays")
        row = value.shape[1:]
        key = (name, value.dtype.str, row)
        column = columns.setdefault(key, _Column(name=name, dtype=value.dtype, row=row))
        reference = {ARRAY: [list(columns).index(key), column.rows, list(value.shape)]}
        part = value if value.ndim else value.reshape(1)
        column.parts.append(part)
        column.rows += len(part)
        return reference
    if isinstance(value, dict):
        return {k: _extract(v, k, columns) for k, v in value.items()}
    if isinstance(value, list):
        return [_extract(v, name, columns) for v in value]
    return value


class _Sections:
    """The body of a block: compressed pieces, equal ones stored once."""

    def __init__(self, code: int) -> None:
        self.parts: list[bytes] = []
        self._code = code
        self._offset = 0
        self._seen: dict[bytes, list[int]] = {}

    def add(self, raw: bytes) -> list[int]:
        """[codec, offset, stored length, raw length]."""
        if raw not in self._seen:
            code, stored = compress(raw, self._code, level=LEVEL)
            self._seen[raw] = [code, self._offset, len(stored), len(raw)]
            self.parts.append(stored)
            self._offset += len(stored)
        return self._seen[raw]


def _encode_column(column: _Column, writer: _Sections) -> dict[str, Any]:
    table = np.concatenate(column.parts).astype(column.dtype, copy=False).reshape(column.rows, _width(column.row))
    values: np.ndarray = np.ascontiguousarray(table.T).reshape(-1)
    entry = {"name": column.name, "dtype": column.dtype.str, "row": list(column.row), "rows": column.rows}
    if column.dtype.kind == "b":
        return {**entry, "kind": "bits", "sections": [writer.add(np.packbits(values).tobytes())]}
    kind, base = "planes", 0
    if column.dtype.kind in "iu" and values.size:
        base, narrow = _narrow(values)
        if narrow is not None:
            kind, values = "narrow", narrow
    planes = values.view(np.uint8).reshape(-1, values.dtype.itemsize) if values.size else np.empty((0, values.dtype.itemsize), np.uint8)
    sections = [writer.add(planes[:, i].tobytes()) for i in range(planes.shape[1])]
    return {**entry, "kind": kind, "base": base, "stored": values.dtype.str, "sections": sections}


def _width(row: Sequence[int]) -> int:
    return int(np.prod(row, dtype=np.int64))


def _narrow(values: np.ndarray) -> tuple[int, np.ndarray | None]:
    """(smallest value, values minus it in the smallest unsigned type), or None where that saves nothing."""
    low, high = int(values.min()), int(values.max())
    width = next(w for w in (1, 2, 4, 8) if high - low < 1 << 8 * w)
    if width >= values.dtype.itemsize or high >= 1 << 63:
        return 0, None
    return low, (values.astype(np.int64) - low).astype(f"<u{width}")


def decode_block(data: bytes, where: str) -> list[Record]:
    """The records of a block. Damage is an IntegrityError that begins with `where`."""
    header, body = _open_block(data, where)
    try:
        columns = [_decode_column(entry, body) for entry in header["columns"]]
        meta = json.loads(_section(body, header["meta"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise IntegrityError(f"{where}: cannot be decoded ({error})") from error
    return [from_dict(_restore(item, columns)) for item in meta]


def _open_block(data: bytes, where: str) -> tuple[dict[str, Any], memoryview]:
    if len(data) < BLOCK.size:
        raise IntegrityError(f"{where}: {len(data)} bytes are too short for a block")
    magic, version, crc, head_len, body_len = BLOCK.unpack_from(data)
    if magic != MAGIC or len(data) != BLOCK.size + head_len + body_len:
        raise IntegrityError(f"{where}: not a whole block")
    if version != FORMAT:
        raise RecordError(f"{where}: stored in format {version}, this etude reads {FORMAT}; read it with the etude that wrote it")
    view = memoryview(data)[BLOCK.size :]
    found = zlib.crc32(view)
    if found != crc:
        raise IntegrityError(f"{where}: crc {found:08x}, expected {crc:08x}; the disk changed it")
    return json.loads(bytes(view[:head_len])), view[head_len:]


def _section(body: memoryview, section: Sequence[int]) -> bytes:
    code, offset, stored, raw = section
    return decompress(body[offset : offset + stored], code, raw)


def _decode_column(entry: dict[str, Any], body: memoryview) -> np.ndarray:
    dtype, row, rows = np.dtype(entry["dtype"]), tuple(entry["row"]), entry["rows"]
    count = rows * _width(row)
    sections = [np.frombuffer(_section(body, s), np.uint8) for s in entry["sections"]]
    if entry["kind"] == "bits":
        values = np.unpackbits(sections[0], count=count).astype(bool)
    else:
        stored = np.dtype(entry["stored"])
        values = np.stack(sections, axis=1).reshape(-1).view(stored) if count else np.empty(0, stored)
        if entry["kind"] == "narrow":
            values = (values.astype(np.int64) + entry["base"]).astype(dtype)
    return np.ascontiguousarray(values.reshape(_width(row), rows).T).reshape(rows, *row)


def _restore(value: Any, columns: Sequence[np.ndarray]) -> Any:
    if isinstance(value, dict):
        reference = value.get(ARRAY)
        if isinstance(reference, list):
            column, start, shape = reference
            rows = shape[0] if shape else 1
            return columns[column][start : start + rows].reshape(shape)
        return {k: _restore(v, columns) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v, columns) for v in value]
    return value


# ---------------------------------------------------------------------------------------------------
# The index


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One block: where it is and what it holds."""

    shard: int
    offset: int
    length: int
    ids: tuple[str, ...]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.bin"


def _read_index(folder: Path) -> tuple[list[_Line], int, bool]:
    """(lines of whole blocks, their size in the index file in bytes, whether a torn tail was left out)."""
    path = folder / INDEX
    data = path.read_bytes() if path.exists() else b""
    sizes = {p.name: p.stat().st_size for p in folder.glob("shard-*.bin")}
    lines: list[_Line] = []
    good = 0
    raws = data.splitlines(keepends=True)
    for number, raw in enumerate(raws):
        last = number + 1 == len(raws)
        try:
            item = json.loads(raw)
            line = _Line(shard=item["shard"], offset=item["offset"], length=item["length"], ids=tuple(item["ids"]))
            whole = raw.endswith(b"\n")
        except (ValueError, KeyError, TypeError) as error:
            if not last:
                raise IntegrityError(f"{path} line {number + 1} is not an index line: {error}") from error
            whole = False
        if not whole:
            break
        if line.offset + line.length > sizes.get(_shard(folder, line.shard).name, 0):
            break
        lines.append(line)
        good += len(raw)
    if lines and not _intact(folder, lines[-1]):
        good -= len(raws[len(lines) - 1])
        lines.pop()
    return lines, good, good < len(data)


def _intact(folder: Path, line: _Line) -> bool:
    """Whether a block's crc fits; asked of the newest block, the only one a crash can tear."""
    try:
        _open_block(_read_block(folder, line), "")
    except (IntegrityError, ValueError):
        return False
    return True


def _read_block(folder: Path, line: _Line) -> bytes:
    with _shard(folder, line.shard).open("rb") as file:
        file.seek(line.offset)
        return file.read(line.length)


# ---------------------------------------------------------------------------------------------------
# Writing and reading


class ShardWriter:
    """Appends blocks of records. Opening a folder cuts off what a crash left half-written, and goes on."""

    def __init__(self, folder: str | Path, *, block_records: int = 1, shard_bytes: int = 64 * 2**20, codec: str = "") -> None:
        """`add` writes a block every `block_records` records. 1 loses nothing in a crash; more compresses better."""
        self.folder = Path(folder)
        self._block_records = block_records
        self._shard_bytes = shard_bytes
        self._codec = codec
        self._waiting: list[Record] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        lines, good, _ = _read_index(self.folder)
        self._number = lines[-1].shard if lines else 0
        self._offset = lines[-1].offset + lines[-1].length if lines else 0
        for path in self.folder.glob("shard-*.bin"):
            if path.name > _shard(self.folder, self._number).name:
                path.unlink()
        self._shard = self._open(_shard(self.folder, self._number), self._offset)
        self._index = self._open(self.folder / INDEX, good)

    @staticmethod
    def _open(path: Path, size: int) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(descriptor, size)
        return descriptor

    def add(self, record: Record) -> None:
        """Append one record, now or with the block it completes."""
        record_id(record)
        self._waiting.append(record)
        if len(self._waiting) >= self._block_records:
            self.flush()

    def append(self, records: Sequence[Record]) -> None:
        """Append records as one block, now."""
        self.flush()
        self._waiting = list(records)
        self.flush()

    def flush(self) -> None:
        """Write what waits for its block to fill."""
        if not self._waiting:
            return
        data = encode_block(self._waiting, codec=self._codec)
        ids = [record_id(record) for record in self._waiting]
        if self._offset and self._offset + len(data) > self._shard_bytes:
            self._next_shard()
        line = {"shard": self._number, "offset": self._offset, "length": len(data), "ids": ids}
        self._write(self._shard, data, self._offset)
        end = os.fstat(self._index).st_size
        self._write(self._index, json.dumps(line, separators=(",", ":")).encode() + b"\n", end)
        self._offset += len(data)
        self._waiting = []

    def _next_shard(self) -> None:
        os.close(self._shard)
        self._number, self._offset = self._number + 1, 0
        self._shard = self._open(_shard(self.folder, self._number), 0)

    def _write(self, descriptor: int, data: bytes, end: int) -> None:
        """All of it or nothing: on a full disk the file is cut back."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise InfraError(f"cannot append {len(data)} bytes to {self.folder}: {error}; free space, then resume") from error

    def sync(self) -> None:
        """Force everything to the disk."""
        self.flush()
        os.fsync(self._shard)
        os.fsync(self._index)

    def close(self) -> None:
        if self._shard < 0:
            return
        self.flush()
        os.close(self._shard)
        os.close(self._index)
        self._shard = self._index = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ShardReader(Sequence[Record]):
    """Records in the order they were written: by position, by id, or one after another. Reads what was there on opening."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise RecordError(f"no trajectories at {self.folder}; give a folder that a run wrote")
        self._lines, _, self.torn = _read_index(self.folder)
        """`torn`: the last write was cut short and is left out."""
        self._places = [(block, row) for block, line in enumerate(self._lines) for row in range(len(line.ids))]
        self._by_id = {self._lines[block].ids[row]: n for n, (block, row) in enumerate(self._places)}
        self._cache: OrderedDict[int, list[Record]] = OrderedDict()

    @property
    def ids(self) -> list[str]:
        """Ids in order, repeats included."""
        return [self._lines[block].ids[row] for block, row in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        block, row = self._places[index]
        return self._block(block)[row]

    def __iter__(self) -> Iterator[Record]:
        for block in range(len(self._lines)):
            yield from self._block(block)

    def get(self, record: str) -> Record:
        """The newest record of an id."""
        if record not in self._by_id:
            raise RecordError(f"no record {record!r} in {self.folder}; it holds {len(self)} records")
        return self[self._by_id[record]]

    def __contains__(self, record: object) -> bool:
        """Whether there is a record of this id."""
        return record in self._by_id

    def column_bytes(self) -> dict[str, int]:
        """Stored bytes by column name, the JSON of everything else as "meta". Columns stored once count once."""
        out: dict[str, int] = {}
        for line in self._lines:
            header, _ = _open_block(_read_block(self.folder, line), self._where(line))
            seen: set[int] = set()
            named = [(c["name"], s) for c in header["columns"] for s in c["sections"]]
            for name, (_, offset, stored, _) in [*named, ("meta", header["meta"])]:
                out[name] = out.get(name, 0) + (0 if offset in seen else stored)
                seen.add(offset)
        return out

    def _block(self, block: int) -> list[Record]:
        if block not in self._cache:
            line = self._lines[block]
            self._cache[block] = decode_block(_read_block(self.folder, line), self._where(line))
            while len(self._cache) > CACHED_BLOCKS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(block)
        return self._cache[block]

    def _where(self, line: _Line) -> str:
        return f"block at {line.offset} of {_shard(self.folder, line.shard)}"


# ---------------------------------------------------------------------------------------------------
# Groups of a checkpoint


def write_groups(folder: str | Path, groups: Sequence[Group]) -> None:
    """Groups in a folder of their own, which appears whole or not at all."""
    folder = Path(folder)
    if folder.exists():
        raise RecordError(f"{folder} already holds groups; write them to a new folder")
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with ShardWriter(temporary) as writer:
            for group in groups:
                writer.add(group)
            writer.sync()
        os.rename(temporary, folder)
    except OSError as error:
        raise InfraError(f"cannot write groups to {folder}: {error}; free space, then go on") from error


def read_groups(folder: str | Path) -> list[Group]:
    """What `write_groups` wrote, in its order. Anything missing is an error, because it was committed whole."""
    reader = ShardReader(folder)
    if reader.torn or not (Path(folder) / INDEX).exists():
        raise IntegrityError(f"{folder} lost part of its groups; use an older checkpoint")
    groups = [record for record in reader if isinstance(record, Group)]
    if len(groups) != len(reader):
        raise RecordError(f"{folder} holds other records than groups")
    return groups
