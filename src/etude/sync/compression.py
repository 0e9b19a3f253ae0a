"""Bytes smaller: zstd where it is installed, zlib level 1 otherwise, none on request. No torch, no numpy.

Every stored piece names the codec it was written with, so a reader does not depend on the writer's installation; where
it needs zstd and has none, the error says what to install.
"""

from __future__ import annotations

import zlib

from etude.errors import MissingExtra, UserError, nearest

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

RAW, ZLIB, ZSTD = 0, 1, 2
CODECS = {"none": RAW, "zlib": ZLIB, "zstd": ZSTD}
PROBE_BYTES = 8192
PROBE_RATIO = 0.97


def best_codec() -> str:
    return "zstd" if zstandard is not None else "zlib"


def codec_code(name: str) -> int:
    """The number of a codec; empty is the best installed."""
    name = name or best_codec()
    if name not in CODECS:
        raise UserError(f"no codec {name!r}; {nearest(name, CODECS)}")
    return CODECS[name]


def compress(raw: bytes, code: int, *, level: int = 1) -> tuple[int, bytes]:
    """(codec used, bytes). Stored as it is when a sample from the middle, or the whole, does not shrink."""
    if code != RAW and len(raw) > 4 * PROBE_BYTES:
        sample = raw[len(raw) // 2 :][:PROBE_BYTES]
        if len(_squeeze(sample, code, level)) > PROBE_RATIO * len(sample):
            return RAW, raw
    if code != RAW:
        stored = _squeeze(raw, code, level)
        if len(stored) < len(raw):
            return code, stored
    return RAW, raw


def _squeeze(raw: bytes, code: int, level: int) -> bytes:
    if code != ZSTD:
        # Uniform 4-bit values took 4.66 bits at level 6, whose matches of three cost more than they save, and 4.0 with
        # Huffman alone; text and runs are the other way round. Worth trying both where bytes matter more than time.
        whole = zlib.compress(raw, level)
        return min(whole, _huffman(raw), key=len) if level > 1 else whole
    if zstandard is None:
        raise MissingExtra("zstandard", "fast", "compressing with zstd")
    return zstandard.ZstdCompressor(level=3).compress(raw)


def _huffman(raw: bytes) -> bytes:
    stream = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return stream.compress(raw) + stream.flush()


def decompress(stored: bytes | memoryview, code: int, raw_len: int) -> bytes:
    """Exactly `raw_len` bytes, or ValueError."""
    if code == RAW:
        raw = bytes(stored)
    elif code == ZLIB:
        raw = _inflate(stored, raw_len)
    elif code == ZSTD:
        raw = _unzstd(stored, raw_len)
    else:
        raise ValueError(f"codec {code} is unknown")
    if len(raw) != raw_len:
        raise ValueError(f"{len(raw)} bytes came out, {raw_len} were expected")
    return raw


def _inflate(stored: bytes | memoryview, raw_len: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(stored, raw_len + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError(f"the stream does not end after {raw_len} bytes")
    return raw


def _unzstd(stored: bytes | memoryview, raw_len: int) -> bytes:
    if zstandard is None:
        raise MissingExtra("zstandard", "fast", "reading what was compressed with zstd")
    try:
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_len)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
