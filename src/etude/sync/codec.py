"""Lossless delta of one tensor: positions of the elements whose bits changed, and their new values.

New values, never differences: a chain of deltas cannot drift, and a delta applied twice is the same as once (PULSE,
arXiv 2602.03839, uses the same encoding). Comparison is of bit patterns, so NaN equals itself and -0.0 differs from 0.0.

Layout of a blob (little endian): a header (`HEADER`), then sections, each `codec u8, raw length u64, stored length u64,
bytes`. Sections of a "values" blob are the byte planes of the gaps between changed positions (smallest unsigned type
that holds the largest gap), then the byte planes of the new values; a "full" blob has only the latter. Byte planes
are compressed one by one because they differ: the exponent byte of a weight compresses well, its low mantissa byte not
at all, and a section that a probe finds incompressible is stored as it is, which saves the time as well.

Shape letters: B bytes, E elements of the tensor, C changed elements, W bytes per element.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from etude.errors import IntegrityError, UserError
from etude.sync.compression import codec_code, compress, decompress

MAGIC = b"EtD1"
HEADER = struct.Struct("<4sBBBxQQ")
"""magic, encoding, bytes per element, bytes per gap, elements, changed elements"""
SECTION = struct.Struct("<BQQ")
FULL, VALUES = 0, 1
ENCODINGS = ("full", "values")
BOTH_BYTES = 1 << 16
"""Tensors up to this size are encoded both ways and the smaller kept; larger ones only when DENSE of them changed."""
DENSE = 1 / 16

_GAP_TYPES: dict[int, np.dtype] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """What a blob says: new bytes of some elements, or of all of them."""

    elements: int
    index_C: np.ndarray | None
    """int64, ascending; None when every element is given."""
    values_CW: np.ndarray
    """uint8, the new bytes."""

    @property
    def encoding(self) -> str:
        return ENCODINGS[FULL if self.index_C is None else VALUES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    encoding: str
    changed: int
    data: bytes
    """Empty when nothing changed."""


# ---------------------------------------------------------------------------------------------------
# Tensors as bytes


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes in row-major order, as uint8. Shares memory with a contiguous CPU tensor."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UserError(
            f"a delta needs a plain dense tensor, got layout {tensor.layout} dtype {tensor.dtype}; convert it before publishing"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().cpu().view(-1).view(torch.uint8).numpy()


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def hash_bytes(data: Any) -> str:
    """blake2b-128 of a buffer, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_tensor(tensor: torch.Tensor) -> str:
    return hash_bytes(to_bytes(tensor))


# ---------------------------------------------------------------------------------------------------
# Encode


def encode(base_B: np.ndarray | None, new_B: np.ndarray, width: int, *, codec: str = "") -> Encoded:
    """The change from `base_B` to `new_B` (uint8, elements of `width` bytes); without a base, all of `new_B`."""
    code = codec_code(codec)
    values_EW = new_B.reshape(-1, width)
    elements = len(values_EW)
    if base_B is None:
        return Encoded(encoding="full", changed=elements, data=_encode_full(values_EW, code))
    if base_B.size != new_B.size:
        raise ValueError(f"base has {base_B.size} bytes, new has {new_B.size}; a tensor of another shape has no base")
    index_C = _changed(base_B, new_B, width)
    changed = len(index_C)
    if changed == 0:
        return Encoded(encoding="values", changed=0, data=b"")
    data = _encode_values(values_EW, index_C, code)
    if new_B.size <= BOTH_BYTES or changed >= elements * DENSE:
        full = _encode_full(values_EW, code)
        if len(full) <= len(data):
            return Encoded(encoding="full", changed=changed, data=full)
    return Encoded(encoding="values", changed=changed, data=data)


def _changed(base_B: np.ndarray, new_B: np.ndarray, width: int) -> np.ndarray:
    """Ascending positions of the elements that differ in any bit."""
    word = next(w for w in (8, 4, 2, 1) if width % w == 0)
    differs = base_B.view(_GAP_TYPES[word]) != new_B.view(_GAP_TYPES[word])
    if word != width:
        differs = differs.reshape(-1, width // word).any(axis=1)
    return np.flatnonzero(differs)


def _encode_full(values_EW: np.ndarray, code: int) -> bytes:
    elements, width = values_EW.shape
    return HEADER.pack(MAGIC, FULL, width, 0, elements, elements) + _planes(values_EW, code)


def _encode_values(values_EW: np.ndarray, index_C: np.ndarray, code: int) -> bytes:
    elements, width = values_EW.shape
    gaps_C = np.diff(index_C, prepend=-1) - 1
    largest = int(gaps_C.max())
    gap_width = next(w for w in (1, 2, 4, 8) if largest < 1 << 8 * w)
    gaps_CW = gaps_C.astype(_GAP_TYPES[gap_width]).view(np.uint8).reshape(-1, gap_width)
    header = HEADER.pack(MAGIC, VALUES, width, gap_width, elements, len(index_C))
    return header + _planes(gaps_CW, code) + _planes(values_EW[index_C], code)


def _planes(rows_CW: np.ndarray, code: int) -> bytes:
    return b"".join(_pack(rows_CW[:, plane].tobytes(), code) for plane in range(rows_CW.shape[1]))


def _pack(raw: bytes, code: int) -> bytes:
    """One section."""
    code, stored = compress(raw, code)
    return SECTION.pack(code, len(raw), len(stored)) + stored


# ---------------------------------------------------------------------------------------------------
# Decode


def decode(data: bytes | memoryview, where: str = "delta") -> Change:
    """Parse a blob. Anything that does not add up is an IntegrityError that begins with `where`."""
    view = memoryview(data)
    if len(view) < HEADER.size:
        raise IntegrityError(f"{where}: {len(view)} bytes are too short for a delta; fetch it again")
    magic, encoding, width, gap_width, elements, changed = HEADER.unpack_from(view)
    if magic != MAGIC or encoding >= len(ENCODINGS) or width == 0 or (encoding == VALUES and gap_width not in _GAP_TYPES):
        raise IntegrityError(f"{where}: not a delta this etude reads (header {bytes(view[: HEADER.size]).hex()}); fetch it again")
    if changed > elements or (encoding == FULL and changed != elements):
        raise IntegrityError(f"{where}: says {changed} of {elements} elements; fetch it again")
    offset, index_C = HEADER.size, None
    if encoding == VALUES:
        gaps_CW, offset = _read_planes(view, offset, changed, gap_width, where)
        gaps_C = np.ascontiguousarray(gaps_CW).view(_GAP_TYPES[gap_width]).reshape(-1)
        index_C = np.cumsum(gaps_C.astype(np.int64) + 1) - 1
        if changed and not 0 <= int(index_C[-1]) < elements:
            raise IntegrityError(f"{where}: changes element {int(index_C[-1])} of {elements}; fetch it again")
    values_CW, offset = _read_planes(view, offset, changed, width, where)
    if offset != len(view):
        raise IntegrityError(f"{where}: {len(view) - offset} bytes too many; fetch it again")
    return Change(elements=elements, index_C=index_C, values_CW=values_CW)


def _read_planes(view: memoryview, offset: int, rows: int, width: int, where: str) -> tuple[np.ndarray, int]:
    out_CW = np.empty((rows, width), np.uint8)
    for plane in range(width):
        raw, offset = _read_section(view, offset, rows, where)
        out_CW[:, plane] = np.frombuffer(raw, np.uint8)
    return out_CW, offset


def _read_section(view: memoryview, offset: int, expected: int, where: str) -> tuple[bytes, int]:
    start = offset + SECTION.size
    if start > len(view):
        raise IntegrityError(f"{where}: ends inside a section; fetch it again")
    code, raw_len, stored_len = SECTION.unpack_from(view, offset)
    stored = view[start : start + stored_len]
    if len(stored) != stored_len or raw_len != expected:
        raise IntegrityError(
            f"{where}: a section has {len(stored)} of {stored_len} bytes for {raw_len}, expected {expected}; fetch it again"
        )
    try:
        return decompress(stored, code, raw_len), start + stored_len
    except ValueError as error:
        raise IntegrityError(f"{where}: a section does not decompress ({error}); fetch it again") from error


# ---------------------------------------------------------------------------------------------------
# Apply


def write(tensor: torch.Tensor, change: Change) -> Change:
    """Put the new bytes into the tensor, in place, and return the change that takes them back."""
    if change.elements != tensor.numel() or change.values_CW.shape[1] != tensor.element_size():
        raise ValueError(
            f"the change is for {change.elements} elements of {change.values_CW.shape[1]} bytes, "
            f"the tensor has {tensor.numel()} of {tensor.element_size()}"
        )
    if change.values_CW.size == 0:
        return change
    target = tensor.detach()
    if not target.is_contiguous():
        whole = target.contiguous()
        undo = write(whole, change)
        target.copy_(whole)
        return undo
    with torch.no_grad():
        return _write_words(target.view(-1), change)


def _write_words(flat_E: torch.Tensor, change: Change) -> Change:
    """Scatter as integers of the element's width, so that no float conversion can touch the bits."""
    size = flat_E.element_size()
    word = next(w for w in (8, 4, 2, 1) if size % w == 0)
    words_EK = flat_E.view(_WORDS[word]).view(-1, size // word)
    new_CK = torch.from_numpy(_writable(change.values_CW)).view(-1).view(_WORDS[word]).view(-1, size // word).to(flat_E.device)
    if change.index_C is None:
        old_CK = words_EK.clone()
        words_EK.copy_(new_CK)
    else:
        index_C = torch.from_numpy(_writable(change.index_C)).to(flat_E.device)
        old_CK = words_EK[index_C]
        words_EK[index_C] = new_CK
    return replace(change, values_CW=to_bytes(old_CK).reshape(-1, size))


def _writable(array: np.ndarray) -> np.ndarray:
    """torch warns about read-only arrays, even where it only reads them."""
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()


def apply(tensor: torch.Tensor, data: bytes | memoryview, where: str = "delta") -> Change:
    """Decode a blob and write it into the tensor; returns the change that undoes it."""
    change = decode(data, where)
    if change.elements != tensor.numel() or change.values_CW.shape[1] != tensor.element_size():
        raise IntegrityError(
            f"{where}: is for {change.elements} elements of {change.values_CW.shape[1]} bytes, "
            f"the tensor has {tensor.numel()} of {tensor.element_size()}"
        )
    return write(tensor, change)
