"""The engine's side of the weight chain: apply a version in place, or refuse it and heal.

Order of an application, so that nothing is ever half-applied:

    1. every payload of every link is fetched and checked against its hash
    2. the model has exactly the manifest's tensors; whole tensors and unchanged ones are checked against their hashes
    3. changed values are written, each result is hashed, and the old values are kept until all are right
    4. whole tensors (checked in 2) are written; the canary is asked

A failure before 4 leaves the old bytes in place, a refused canary too. What is detected (corrupted, missing,
out-of-order, wrong base, a model whose bytes drifted) is healed by rebuilding from the last anchor; when that is
impossible too, IntegrityError says which tensor and which hashes.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from etude.errors import CheckpointError, IntegrityError
from etude.protocols import Store
from etude.records import Manifest, TensorEntry, Version
from etude.sync.chain import chain_hash, check_manifest, entries_by_name, published, read_manifest, read_payload
from etude.sync.codec import Change, decode, dtype_name, hash_bytes, hash_tensor, write
from etude.sync.publish import sign
from etude.sync.store import Objects, blocking

CANARY_TOLERANCE = 0.05
"""Largest difference of a canary log-prob, in nats. Numerics of two bfloat16 engines differ by hundredths; weights of
another version move the canary by more, and weights with a flipped bit are caught by the hashes anyway."""


class CanaryRefused(IntegrityError):
    """The bytes are right and the answer is not: the model code here differs from the publisher's. No rebuild heals it."""


Canary = Callable[[tuple[int, ...]], Sequence[float]]
Undo = list[tuple[torch.Tensor, Change]]


class Receiver:
    """Weights in memory that follow a chain. `state` tensors are written in place, so a model can go on using them."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        store: str | Path | Store | Objects,
        *,
        version: Version | None = None,
        canary: Canary | None = None,
        canary_tolerance: float = CANARY_TOLERANCE,
        key: bytes | None = None,
    ) -> None:
        """`version` is what `state` holds now, if known. `canary` gives the log-probs of token ids under `state`."""
        self.state = state
        self.store = blocking(store)
        self.version = version
        """What `state` holds; None before the first version, after an interrupted write, and when bytes were found wrong."""
        self.healed: list[str] = []
        """Why each rebuild from an anchor happened."""
        self._chain = ""
        self._canary = canary
        self._tolerance = canary_tolerance
        self._key = key

    def advance(self, manifest: Manifest) -> Version:
        """Apply one link; a link that does not fit or is damaged is healed from the last anchor if the store allows."""
        current = self.version
        if current is not None and manifest.version.key == current.key:
            return current
        if current is not None and (manifest.version.lineage, manifest.version.ordinal) <= (current.lineage, current.ordinal):
            raise IntegrityError(f"{manifest.version} is out of order: {current} is served; use catch_up to go back on purpose")
        try:
            self._check_base(manifest)
            self._apply([manifest])
        except CanaryRefused:
            raise
        except IntegrityError as error:
            return self._heal(manifest.version, error)
        return manifest.version

    def catch_up(self, to: Version | None = None) -> Version:
        """Go to `to`, forwards or back. Without `to`: the newest version that the store can still give whole."""
        if to is not None:
            return self._go(to.lineage, to.ordinal, to)
        problems: list[IntegrityError] = []
        for lineage, ordinal in reversed(published(self.store)):
            if self.version is not None and (lineage, ordinal) < (self.version.lineage, self.version.ordinal):
                break
            try:
                return self._go(lineage, ordinal, None)
            except IntegrityError as error:
                problems.append(error)
                self.healed.append(str(error))
        if problems:
            raise problems[0]
        raise IntegrityError(f"{self.store} has no version to catch up to; publish one first")

    # -- finding the way ---------------------------------------------------------------------------

    def _heal(self, to: Version, error: IntegrityError) -> Version:
        try:
            reached = self._go(to.lineage, to.ordinal, to)
        except IntegrityError as second:
            raise IntegrityError(f"{error}; rebuilding from the last anchor failed too: {second}") from error
        self.healed.append(str(error))
        return reached

    def _go(self, lineage: int, ordinal: int, expected: Version | None) -> Version:
        target = read_manifest(self.store, lineage, ordinal)
        if expected is not None and target.version.key != expected.key:
            raise IntegrityError(f"the store has {target.version} where {expected} was asked for")
        if self.version is not None and target.version.key == self.version.key:
            return self.version
        path = self._path(target, from_anchor=False)
        try:
            self._apply(path)
        except IntegrityError as error:
            if path[0].base is None or isinstance(error, CanaryRefused):
                raise
            self._apply(self._path(target, from_anchor=True))
            self.healed.append(str(error))
        return target.version

    def _path(self, target: Manifest, *, from_anchor: bool) -> list[Manifest]:
        """Links to `target`, oldest first: from the version in memory if it is on the way, else from an anchor."""
        links = [target]
        while (base := links[0].base) is not None:
            if not from_anchor and self.version is not None and base.key == self.version.key:
                break
            manifest = read_manifest(self.store, base.lineage, base.ordinal)
            if manifest.version.key != base.key:
                raise IntegrityError(f"{links[0].version} is based on {base}, the store has {manifest.version} in its place")
            links.insert(0, manifest)
        return links

    # -- checks before the first write -------------------------------------------------------------

    def _check_base(self, manifest: Manifest) -> None:
        if manifest.base is None:
            return
        if self.version is None or manifest.base.key != self.version.key:
            raise IntegrityError(
                f"{manifest.version} is a change of {manifest.base}, but {self.version or 'nothing'} is in memory (wrong base)"
            )

    def _check_links(self, links: Sequence[Manifest]) -> None:
        chain = self._chain or self._stored_chain(links[0].base)
        for manifest in links:
            check_manifest(manifest)
            if manifest.base is not None and chain and chain_hash(chain, manifest) != manifest.chain:
                raise IntegrityError(f"manifest of {manifest.version} does not continue the chain of {manifest.base}: it was altered")
            if self._key is not None and not hmac.compare_digest(sign(manifest, self._key), manifest.signature):
                raise IntegrityError(f"manifest of {manifest.version} is not signed with the expected key; do not serve it")
            chain = manifest.chain
            self._check_model(manifest)

    def _stored_chain(self, base: Version | None) -> str:
        """Chain hash of a base that another receiver applied; empty, and unchecked, when its manifest is gone."""
        try:
            return read_manifest(self.store, base.lineage, base.ordinal).chain if base is not None else ""
        except IntegrityError:
            return ""

    def _check_model(self, manifest: Manifest) -> None:
        """The manifest describes this model, or it is the user's mistake."""
        entries = entries_by_name(manifest)
        if entries.keys() != self.state.keys():
            odd = sorted(entries.keys() ^ self.state.keys())[0]
            side = "the model lacks" if odd in entries else "the manifest lacks"
            raise CheckpointError(f"{manifest.version} is of another model: {side} tensor {odd!r}")
        for name, tensor in self.state.items():
            entry, found = entries[name], (dtype_name(tensor), tuple(tensor.shape))
            if found != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"tensor {name!r} of {manifest.version} is {entry.dtype} {entry.shape}, the model has {found[0]} {found[1]}"
                )

    # -- applying ----------------------------------------------------------------------------------

    def _apply(self, links: Sequence[Manifest]) -> None:
        self._check_links(links)
        fetched = [self._fetch(manifest) for manifest in links]
        for number, (manifest, blobs) in enumerate(zip(links, fetched, strict=True)):
            self._apply_one(manifest, blobs, ask_canary=number + 1 == len(links))

    def _fetch(self, manifest: Manifest) -> dict[str, memoryview]:
        """Blobs of every changed tensor of a link, payload hashes checked."""
        payloads = {key: read_payload(self.store, key) for key in {e.payload for e in manifest.tensors if e.payload}}
        out = {}
        for entry in manifest.tensors:
            if entry.payload:
                if entry.name not in payloads[entry.payload]:
                    raise IntegrityError(f"payload {entry.payload!r} of {manifest.version} lacks tensor {entry.name!r}")
                out[entry.name] = payloads[entry.payload][entry.name]
            elif manifest.base is None:
                raise IntegrityError(f"anchor {manifest.version} lacks tensor {entry.name!r}; catch up through an older anchor")
        return out

    def _apply_one(self, manifest: Manifest, blobs: Mapping[str, memoryview], *, ask_canary: bool) -> None:
        changes = {e.name: self._decode(manifest, e, blobs[e.name]) for e in manifest.tensors if e.name in blobs}
        ask_canary = ask_canary and self._canary is not None and bool(manifest.canary_ids)
        before, self.version = self.version, None
        undo: Undo = []
        try:
            for entry in manifest.tensors:
                if entry.name not in changes:
                    self._check_tensor(manifest, entry)
            self._write(manifest, changes, undo, keep_whole=ask_canary)
        except IntegrityError:
            _revert(undo)  # and the version stays unknown: memory was just proved not to hold `before`
            raise
        try:
            if ask_canary:
                self._check_canary(manifest)
        except BaseException:
            _revert(undo)
            self.version = before
            raise
        self.version, self._chain = manifest.version, manifest.chain

    def _write(self, manifest: Manifest, changes: Mapping[str, Change], undo: Undo, *, keep_whole: bool) -> None:
        """Partial tensors first, because only those can turn out wrong; then whole ones."""
        entries = entries_by_name(manifest)
        for name, change in changes.items():
            if change.index_C is not None:
                undo.append((self.state[name], write(self.state[name], change)))
                self._check_tensor(manifest, entries[name])
        for name, change in changes.items():
            if change.index_C is None:
                inverse = write(self.state[name], change)
                if keep_whole:
                    undo.append((self.state[name], inverse))

    def _decode(self, manifest: Manifest, entry: TensorEntry, blob: memoryview) -> Change:
        where = f"tensor {entry.name!r} of {manifest.version}"
        change = decode(blob, where)
        tensor = self.state[entry.name]
        if (change.elements, change.values_CW.shape[1]) != (tensor.numel(), tensor.element_size()):
            raise IntegrityError(f"{where}: its payload is for {change.elements} elements of {change.values_CW.shape[1]} bytes")
        if change.encoding != entry.encoding or (manifest.base is None and change.index_C is not None):
            raise IntegrityError(f"{where}: its payload is encoded as {change.encoding}, the manifest says {entry.encoding}")
        if change.index_C is None and (found := hash_bytes(change.values_CW)) != entry.hash:
            raise IntegrityError(f"{where}: its payload gives bytes of hash {found}, expected {entry.hash}")
        return change

    def _check_tensor(self, manifest: Manifest, entry: TensorEntry) -> None:
        found = hash_tensor(self.state[entry.name])
        if found != entry.hash:
            raise IntegrityError(
                f"tensor {entry.name!r} of {manifest.version} has hash {found}, expected {entry.hash}: "
                f"what is in memory was not {manifest.base or 'whole'}"
            )

    def _check_canary(self, manifest: Manifest) -> None:
        assert self._canary is not None
        found = [float(x) for x in self._canary(manifest.canary_ids)]
        expected = manifest.canary_logprobs
        gap = max((abs(a - b) for a, b in zip(found, expected, strict=False)), default=0.0)
        if len(found) != len(expected) or not gap <= self._tolerance:
            raise CanaryRefused(
                f"{manifest.version} answers the canary differently here: {len(found)} of {len(expected)} log-probs, "
                f"largest gap {gap:.4g}, allowed {self._tolerance:g}; not serving it"
            )


def _revert(undo: Undo) -> None:
    """Newest first, because tied tensors share memory."""
    for tensor, change in reversed(undo):
        write(tensor, change)


def apply(
    state: Mapping[str, torch.Tensor], manifest: Manifest, source: str | Path | Store | Objects, *, version: Version | None = None
) -> Version:
    """Bring `state` to the manifest's version in place. Without `version` it is taken to hold the manifest's base,
    which the tensor hashes then prove or refute."""
    return Receiver(state, source, version=version or manifest.base).advance(manifest)
