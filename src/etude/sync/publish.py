"""The trainer's side of the weight chain: what changed since the last committed version, written to a store.

State of a publisher: the bytes of the committed version (the base of the next delta), and those of versions published
but not yet committed. `publish` never changes the base; `commit` does, once engines serve the version. So a version that
nobody took up costs nothing: the next delta is made from the same base again.

Example:
    publisher = Publisher("runs/demo/weights", lineage=0)
    manifest = publisher.publish(model.state_dict(), version)     # payload first, manifest last
    publisher.commit(manifest.version)                            # after the engines swapped
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from etude.errors import CheckpointError, IntegrityError, UserError
from etude.protocols import Store
from etude.records import Manifest, TensorEntry, Version
from etude.sync.chain import (
    chain_hash,
    hash_entries,
    pack_payload,
    payload_key,
    published,
    read_head,
    weights_hash,
    write_head,
    write_manifest,
)
from etude.sync.codec import Encoded, dtype_name, encode, hash_bytes, to_bytes
from etude.sync.compression import best_codec
from etude.sync.store import Objects, blocking

__all__ = ["Publisher", "sign", "weights_hash"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tensor:
    """A tensor of a published version: its own copy of the bytes, shared between versions where they are equal."""

    dtype: str
    shape: tuple[int, ...]
    width: int
    data_B: np.ndarray
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Known:
    """A version whose bytes the publisher holds."""

    version: Version
    tensors: dict[str, _Tensor]
    chain: str
    depth: int
    """Links since the anchor; 0 for an anchor."""


class Publisher:
    """One per training process. Methods block (hashing, disk); call them from a worker thread where that matters."""

    def __init__(
        self,
        folder: str | Path | Store | Objects,
        lineage: int,
        anchor_every: int = 25,
        config_hash: str = "",
        tokenizer_hash: str = "",
        *,
        codec: str = "",
        key: bytes | None = None,
    ) -> None:
        """`codec` is zstd, zlib or none (empty: the best installed). With `key`, manifests are signed (HMAC-SHA256)."""
        if anchor_every < 1:
            raise UserError(f"anchor_every must be at least 1, got {anchor_every}")
        self.store = blocking(folder)
        self.lineage = lineage
        self._anchor_every = anchor_every
        self._config_hash = config_hash
        self._tokenizer_hash = tokenizer_hash
        self._codec = codec or best_codec()
        self._key = key
        self._base: _Known | None = None
        self._pending: dict[tuple[int, int, str], _Known] = {}
        taken = [version for version in published(self.store) if version[0] >= lineage]
        if taken:
            raise CheckpointError(
                f"{self.store} already has version {taken[-1][1]} of lineage {taken[-1][0]}; resume with a lineage above {taken[-1][0]}"
            )
        head = read_head(self.store)
        self._chain = head[1] if head else ""

    @classmethod
    def resume(cls, folder: str | Path | Store | Objects, lineage: int | None = None, **options: object) -> Publisher:
        """Go on with the chain of a store in a new lineage (the next one unless given). Its first version is an anchor."""
        if lineage is None:
            lineage = max((version[0] for version in published(blocking(folder))), default=-1) + 1
        return cls(folder, lineage, **options)  # type: ignore[arg-type]

    @property
    def committed(self) -> Version | None:
        """The base of the next delta."""
        return self._base.version if self._base else None

    def publish(
        self,
        state: Mapping[str, torch.Tensor],
        version: Version,
        canary: tuple[Sequence[int], Sequence[float]] | None = None,
        *,
        anchor: bool = False,
    ) -> Manifest:
        """Write the change from the committed version to `state`; `anchor=True` writes every tensor whole.

        `version.hash` must be `weights_hash(state)`; an empty one is filled in. `canary` is token ids and the
        log-probs that these weights give them, for receivers to compare.
        """
        self._check_version(version)
        tensors = {name: self._snapshot(name, tensor) for name, tensor in state.items()}
        found = hash_entries((name, t.dtype, t.shape, t.hash) for name, t in tensors.items())
        if version.hash not in ("", found):
            raise IntegrityError(f"the weights of {version} hash to {found}, the version says {version.hash}; use weights_hash(state)")
        version = version.replace(hash=found)
        base = self._base
        if base is None or anchor or base.depth + 1 >= self._anchor_every:
            base = None
        entries, payload = self._encode(tensors, base, version)
        ids, logprobs = canary or ((), ())
        manifest = Manifest(
            lineage=self.lineage,
            base=base.version if base else None,
            version=version,
            tensors=entries,
            config_hash=self._config_hash,
            tokenizer_hash=self._tokenizer_hash,
            canary_ids=tuple(int(i) for i in ids),
            canary_logprobs=tuple(float(x) for x in logprobs),
            bytes=len(payload),
        )
        manifest = manifest.replace(chain=chain_hash(self._chain, manifest))
        if self._key is not None:
            manifest = manifest.replace(signature=sign(manifest, self._key))
        if payload:
            self.store.write(payload_key(version, payload), payload)
        write_manifest(self.store, manifest)
        self._pending[version.key] = _Known(version=version, tensors=tensors, chain=manifest.chain, depth=base.depth + 1 if base else 0)
        return manifest

    def commit(self, version: Version) -> None:
        """Engines serve `version`: it becomes the base of the next delta."""
        if self._base is not None and version.key == self._base.version.key:
            return
        known = self._pending.get(version.key)
        if known is None:
            waiting = ", ".join(str(k.version) for k in self._pending.values()) or "none"
            raise UserError(f"cannot commit {version}: not published by this publisher since {self.committed}; published: {waiting}")
        write_head(self.store, known.version, known.chain)
        self._base, self._chain = known, known.chain
        self._pending = {k: p for k, p in self._pending.items() if p.version.ordinal > version.ordinal}

    def _check_version(self, version: Version) -> None:
        if version.lineage != self.lineage:
            raise UserError(f"{version} is not of lineage {self.lineage}, which this publisher writes")
        if self._base is not None and version.ordinal <= self._base.version.ordinal:
            raise UserError(f"{version} is not after the committed {self._base.version}; versions only go up")

    def _snapshot(self, name: str, tensor: torch.Tensor) -> _Tensor:
        """The tensor as bytes of our own; those of the base when they are the same."""
        data_B = to_bytes(tensor)
        digest = hash_bytes(data_B)
        dtype, shape = dtype_name(tensor), tuple(tensor.shape)
        old = self._base.tensors.get(name) if self._base else None
        if old is not None and (old.hash, old.dtype, old.shape) == (digest, dtype, shape):
            return old
        if tensor.device.type == "cpu":
            data_B = data_B.copy()
        return _Tensor(dtype=dtype, shape=shape, width=tensor.element_size(), data_B=data_B, hash=digest)

    def _encode(self, tensors: dict[str, _Tensor], base: _Known | None, version: Version) -> tuple[tuple[TensorEntry, ...], bytes]:
        """Entries in the state's order, and the payload that holds every changed tensor (empty when none changed)."""
        encoded = {name: self._encode_one(t, base.tensors.get(name) if base else None) for name, t in tensors.items()}
        blobs = {name: e.data for name, e in encoded.items() if e.data}
        payload = pack_payload(blobs, self._codec) if blobs else b""
        key = payload_key(version, payload) if payload else ""
        entries = tuple(
            TensorEntry(
                name=name,
                shape=t.shape,
                dtype=t.dtype,
                hash=t.hash,
                payload=key if encoded[name].data else "",
                encoding=encoded[name].encoding,
                changed=encoded[name].changed,
            )
            for name, t in tensors.items()
        )
        return entries, payload

    def _encode_one(self, tensor: _Tensor, old: _Tensor | None) -> Encoded:
        if old is tensor:
            return Encoded(encoding="values", changed=0, data=b"")
        same_form = old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        return encode(old.data_B if old is not None and same_form else None, tensor.data_B, tensor.width, codec=self._codec)


def sign(manifest: Manifest, key: bytes) -> str:
    """HMAC-SHA256 over the chain hash, which covers everything else in the manifest and before it."""
    return "hmac-sha256:" + hmac.new(key, manifest.chain.encode(), hashlib.sha256).hexdigest()
