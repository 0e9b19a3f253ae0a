"""Tokenised documents on disk, and the rows that pretraining reads from them.

A shard is one file: `.bin` is memory-mapped (large corpora), `.npz` is compressed (small ones, and what a recipe ships). Both hold
all documents' token ids one after the other, a mask of the same length (1: the token is to be predicted), and the documents'
offsets. `.bin` layout, little-endian:

    magic "EtudeDO1" | u64 documents | u64 tokens | u64 bytes a token (2 or 4) | i64 offsets [documents + 1] | ids | u8 mask

`Rows` turns documents into rows of at most `row_tokens` tokens: documents longer than the phase's length are cut into pieces, pieces
are shuffled by (seed, epoch) and laid one after the other. Attention never crosses a piece, so never a document. Its position
(epoch, index) is all its state, and the same state always gives the same rows.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import RecordError, UserError
from etude.records import Batch, seed_for
from etude.trainer.pack import Normalisers, document_sample, pack_in_order

MAGIC = b"EtudeDO1"
HEADER = struct.Struct("<8sQQQ")


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    ids_N: np.ndarray
    mask_N: np.ndarray
    offsets: np.ndarray


def write_documents(path: str | Path, documents: Iterable[tuple[Sequence[int], Sequence[int] | None]]) -> int:
    """Write one shard of (ids, mask) pairs, a mask of None meaning every token; returns its number of tokens.

    Example:
        write_documents("train.npz", [([5, 6, 7], None), ([5, 8], [0, 1])])
    """
    path = Path(path)
    ids, masks, offsets = [], [], [0]
    for number, (tokens, mask) in enumerate(documents):
        array = np.asarray(tokens, dtype=np.int64)
        ones = np.ones(len(array), dtype=np.uint8) if mask is None else np.asarray(mask, dtype=np.uint8)
        if len(ones) != len(array):
            raise UserError(f"document {number} has {len(array)} tokens and a mask of {len(ones)}; they must be equally long")
        if len(array) and array.min() < 0:
            raise UserError(f"document {number} has the token id {array.min()}; ids are not negative")
        ids.append(array)
        masks.append(ones)
        offsets.append(offsets[-1] + len(array))
    ids_N = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)
    ids_N = ids_N.astype(np.uint16 if ids_N.max(initial=0) < 2**16 else np.uint32)
    shard = Shard(ids_N=ids_N, mask_N=np.concatenate(masks) if masks else np.zeros(0, np.uint8), offsets=np.array(offsets, dtype=np.int64))
    partial = path.with_name(path.name + ".tmp")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        _write(file, shard, path.suffix)
    partial.replace(path)
    return offsets[-1]


def _write(file: Any, shard: Shard, suffix: str) -> None:
    if suffix == ".npz":
        np.savez_compressed(file, ids=shard.ids_N, mask=shard.mask_N, offsets=shard.offsets)
    elif suffix == ".bin":
        file.write(HEADER.pack(MAGIC, len(shard.offsets) - 1, len(shard.ids_N), shard.ids_N.itemsize))
        for array in (shard.offsets, shard.ids_N, shard.mask_N):
            file.write(array.tobytes())
    else:
        raise UserError(f"a document shard ends in .npz or .bin, not {suffix!r}")


def read_shard(path: Path) -> Shard:
    try:
        shard = _read_npz(path) if path.suffix == ".npz" else _read_bin(path)
    except (OSError, KeyError, ValueError, struct.error) as error:
        raise RecordError(f"{path} is not a document shard: {error}; write it again with write_documents") from error
    if len(shard.ids_N) != len(shard.mask_N) or len(shard.offsets) < 1 or shard.offsets[-1] != len(shard.ids_N):
        raise RecordError(f"{path} holds {len(shard.ids_N)} tokens, its index says {shard.offsets[-1:]}; it is cut off, write it again")
    return shard


def _read_npz(path: Path) -> Shard:
    with np.load(path) as data:
        return Shard(ids_N=data["ids"], mask_N=data["mask"], offsets=data["offsets"])


def _read_bin(path: Path) -> Shard:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    magic, documents, tokens, width = HEADER.unpack(bytes(data[: HEADER.size]))
    if magic != MAGIC or width not in (2, 4):
        raise ValueError(f"starts with {magic!r}")
    first = HEADER.size + 8 * (documents + 1)
    middle = first + tokens * width
    if len(data) != middle + tokens:
        raise ValueError(f"{len(data)} bytes, expected {middle + tokens}")
    return Shard(
        offsets=data[HEADER.size : first].view(np.int64),
        ids_N=data[first:middle].view(np.uint16 if width == 2 else np.uint32),
        mask_N=data[middle:],
    )


class Documents:
    """All shards of a folder (or one file), in the order of their names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = sorted(p for p in self.path.glob("*") if p.suffix in (".npz", ".bin")) if self.path.is_dir() else [self.path]
        if not files or not all(f.is_file() for f in files):
            raise UserError(f"no document shards (*.npz, *.bin) at {self.path}; make them with write_documents")
        self.shards = [read_shard(f) for f in files]
        self.tokens = sum(len(s.ids_N) for s in self.shards)
        self.largest_id = max((int(s.ids_N.max(initial=0)) for s in self.shards), default=0)

    def __len__(self) -> int:
        return sum(len(s.offsets) - 1 for s in self.shards)

    def content_hash(self) -> str:
        """blake2b-128 over ids, masks and offsets of all shards in order; where they lie does not matter."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            for array in (shard.ids_N, shard.mask_N, shard.offsets):
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for shard in self.shards:
            for start, end in zip(shard.offsets[:-1], shard.offsets[1:]):
                yield shard.ids_N[start:end], shard.mask_N[start:end]

    def pieces(self, length: int) -> np.ndarray:
        """(shard, start, end) of each piece of at most `length` tokens that predicts something, in order."""
        out = []
        for number, shard in enumerate(self.shards):
            predicts = np.concatenate([[0], np.cumsum(shard.mask_N != 0)])
            for first, last in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist()):
                for start in range(first, last, length):
                    end = min(start + length, last)
                    if end - start > 1 and predicts[end] > predicts[start + 1]:
                        out.append((number, start, end))
        return np.array(out, dtype=np.int64).reshape(-1, 3)


class Rows:
    """An endless, seeded stream of training steps over documents; `state` is its position."""

    def __init__(self, documents: Documents, *, length: int, row_tokens: int, seed: int) -> None:
        self.documents, self.row_tokens, self.seed = documents, row_tokens, seed
        self.pieces = documents.pieces(length)
        if not len(self.pieces):
            raise UserError(f"{documents.path} has no token to predict; check the masks of its documents")
        self.epoch, self.index = 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng(seed_for(self.seed, "documents", self.epoch)).permutation(len(self.pieces))

    @property
    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self.index = state["epoch"], state["index"]
        self._order = self._shuffled()

    def take(self, tokens: int) -> list[Batch]:
        """Rows of the next step: pieces until `tokens` is reached or passed, normalised over all their predicted tokens."""
        chosen, total = [], 0
        while total < tokens:
            if self.index == len(self._order):
                self.epoch, self.index = self.epoch + 1, 0
                self._order = self._shuffled()
            piece = self.pieces[self._order[self.index]]
            chosen.append(piece)
            total += int(piece[2] - piece[1])
            self.index += 1
        return rows_of(self.documents, chosen, self.row_tokens)


def rows_of(documents: Documents, pieces: Iterable[np.ndarray], row_tokens: int) -> list[Batch]:
    """Pieces packed in order into rows whose `ce` weights sum to 1 over all rows together."""
    samples = [document_sample(documents.shards[n].ids_N[start:end], documents.shards[n].mask_N[start:end]) for n, start, end in pieces]
    count = sum(float(s.ce_T.sum()) for s in samples)
    return pack_in_order(samples, row_tokens, Normalisers(ce=max(count, 1.0)))
