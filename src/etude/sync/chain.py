"""What a published version looks like in the store, and the hashes that tie the chain together.

    manifests/<lineage>-<ordinal>.json      one link; written last, so a version exists when its manifest does
    payloads/<lineage>-<ordinal>-<hash>.bin the changed tensors of that version, packed; the name carries the hash
    head.json                               the last committed version (engines served it), the base of the next delta

A payload is `MAGIC, u32 header length, header JSON {"codec", "tensors": {name: [offset, length]}}, blobs`, offsets
counted from the first blob. Three hashes, all blake2b-128: of each resulting tensor, of each payload, and the chain hash
`H(chain hash of the previous committed manifest, this manifest without chain and signature)`. A version's own hash is
the hash of its tensors' names, dtypes, shapes and hashes, so a manifest is checked against its version without weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

import torch

from etude.errors import EtudeError, IntegrityError, RecordError
from etude.records import Manifest, TensorEntry, Version, content_hash, from_json, to_json
from etude.sync.codec import dtype_name, hash_bytes, hash_tensor
from etude.sync.store import Objects

MAGIC = b"EtudePL1"
LENGTH = struct.Struct("<I")
HEAD = "head.json"
MANIFESTS = "manifests/"


def manifest_key(lineage: int, ordinal: int) -> str:
    return f"{MANIFESTS}{lineage:06d}-{ordinal:09d}.json"


def payload_key(version: Version, payload: bytes) -> str:
    return f"payloads/{version.lineage:06d}-{version.ordinal:09d}-{hash_bytes(payload)}.bin"


def version_of_key(key: str) -> tuple[int, int]:
    """(lineage, ordinal) of a manifest key."""
    lineage, _, ordinal = key.removeprefix(MANIFESTS).removesuffix(".json").partition("-")
    try:
        return int(lineage), int(ordinal)
    except ValueError:
        raise IntegrityError(f"{key!r} is not a manifest's name; remove what does not belong in the weights folder") from None


# ---------------------------------------------------------------------------------------------------
# Hashes


def hash_entries(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """A version's hash from (name, dtype, shape, hash) of its tensors, in any order."""
    return content_hash(sorted([name, dtype, list(shape), digest] for name, dtype, shape, digest in entries))


def weights_hash(state: Mapping[str, torch.Tensor]) -> str:
    """Content hash of a set of weights: names, dtypes, shapes and bytes. This is `Version.hash`."""
    return hash_entries((name, dtype_name(t), tuple(t.shape), hash_tensor(t)) for name, t in state.items())


def manifest_weights_hash(manifest: Manifest) -> str:
    """The version hash that a manifest's entries promise."""
    return hash_entries((e.name, e.dtype, e.shape, e.hash) for e in manifest.tensors)


def chain_hash(previous: str, manifest: Manifest) -> str:
    return content_hash(previous, manifest.replace(chain="", signature=""))


# ---------------------------------------------------------------------------------------------------
# Payloads


def pack_payload(blobs: Mapping[str, bytes], codec: str) -> bytes:
    """All changed tensors of a version in one object."""
    table, offset = {}, 0
    for name, blob in blobs.items():
        table[name] = [offset, len(blob)]
        offset += len(blob)
    header = json.dumps({"codec": codec, "tensors": table}, separators=(",", ":")).encode()
    return b"".join([MAGIC, LENGTH.pack(len(header)), header, *blobs.values()])


def unpack_payload(payload: bytes, key: str) -> dict[str, memoryview]:
    """Blobs by tensor name, without copying."""
    start = len(MAGIC) + LENGTH.size
    try:
        if payload[: len(MAGIC)] != MAGIC:
            raise ValueError(f"starts with {payload[: len(MAGIC)]!r}")
        (length,) = LENGTH.unpack_from(payload, len(MAGIC))
        table = json.loads(payload[start : start + length])["tensors"]
        blobs = memoryview(payload)[start + length :]
        if any(offset < 0 or size < 0 or offset + size > len(blobs) for offset, size in table.values()):
            raise ValueError("its table points outside of it")
        return {name: blobs[offset : offset + size] for name, (offset, size) in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise IntegrityError(f"payload {key!r} is not readable: {error}; publish an anchor") from error


def read_payload(store: Objects, key: str) -> dict[str, memoryview]:
    """Fetch a payload and check it against the hash in its name."""
    payload = store.read(key)
    expected = key.removesuffix(".bin").rpartition("-")[2]
    found = hash_bytes(payload)
    if found != expected:
        raise IntegrityError(
            f"payload {key!r} in {store} has hash {found}, its name promises {expected}; fetch it again or publish an anchor"
        )
    return unpack_payload(payload, key)


# ---------------------------------------------------------------------------------------------------
# Manifests


def write_manifest(store: Objects, manifest: Manifest) -> None:
    store.write(manifest_key(manifest.version.lineage, manifest.version.ordinal), to_json(manifest).encode())


def read_manifest(store: Objects, lineage: int, ordinal: int) -> Manifest:
    """The stored manifest of a version, with its entries checked against its version's hash."""
    key = manifest_key(lineage, ordinal)
    data = store.read(key)
    try:
        manifest = from_json(data.decode(), Manifest)
    except (RecordError, UnicodeDecodeError) as error:
        raise IntegrityError(f"manifest {key!r} in {store} is not readable: {error}") from error
    if (manifest.version.lineage, manifest.version.ordinal) != (lineage, ordinal):
        raise IntegrityError(f"manifest {key!r} in {store} is of {manifest.version}; objects were mixed up")
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    found = manifest_weights_hash(manifest)
    if found != manifest.version.hash:
        raise IntegrityError(f"manifest of {manifest.version}: its tensors hash to {found}, the version says {manifest.version.hash}")


def published(store: Objects) -> list[tuple[int, int]]:
    """(lineage, ordinal) of every version in the store, oldest first."""
    return sorted(version_of_key(key) for key in store.names(MANIFESTS))


def entries_by_name(manifest: Manifest) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in manifest.tensors}


def verify_chain(store: Objects) -> list[Manifest]:
    """Every manifest of the store, oldest first, with each chain hash checked: the ledger of what was published.

    A delta is chained to its base. An anchor is chained to the version committed before it, which it does not name, so
    any earlier link will do, and only the first anchor of all has none.
    """
    manifests = [read_manifest(store, *key) for key in published(store)]
    chains: dict[tuple[int, int, str], str] = {}
    for manifest in manifests:
        if manifest.base is None:
            previous = ["", *chains.values()]
        else:
            previous = [chains[manifest.base.key]] if manifest.base.key in chains else []
        if not any(chain_hash(p, manifest) == manifest.chain for p in previous):
            raise IntegrityError(f"manifest of {manifest.version} in {store} does not continue the chain (chain hash {manifest.chain})")
        chains[manifest.version.key] = manifest.chain
    return manifests


def read_head(store: Objects) -> tuple[Version, str] | None:
    """(version, chain hash) last committed, or None in an empty store."""
    if not store.has(HEAD):
        return None
    try:
        data = json.loads(store.read(HEAD))
        return Version(lineage=data["lineage"], ordinal=data["ordinal"], hash=data["hash"]), data["chain"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, EtudeError):
            raise
        raise IntegrityError(f"{HEAD} in {store} is not readable: {error}; remove it to start a new chain") from error


def write_head(store: Objects, version: Version, chain: str) -> None:
    data = {"lineage": version.lineage, "ordinal": version.ordinal, "hash": version.hash, "chain": chain}
    store.write(HEAD, json.dumps(data, separators=(",", ":")).encode())
