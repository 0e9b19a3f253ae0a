"""Blocks of cache memory: reference counts, and a prefix cache over full blocks.

A block is in exactly one of three states:

    free      in `_free`: content means nothing
    used      refs > 0: one or more sequences have it in their table
    idle      refs == 0 but still in the prefix cache: found by a new sequence, or evicted when memory is short

so free + used + idle == total at every moment. Block 0 is never handed out: it pads block tables.

Prefix cache: a full block is keyed by a chain hash of the version and of all token ids up to its end, so a hit means
same weights and same context. blake2b-128: no two contexts share a key in practice. `flush` forgets every entry when the
version changes; the version in the chain is the second lock on the same door.

Eviction takes the idle block that was given back longest ago; a sequence gives back its deepest block first, so a
parent is never evicted before its child (a child without its parent could never be found).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from etude.errors import ConfigError
from etude.records import Version


def root_key(version: Version) -> bytes:
    """Start of every chain under this version."""
    return hashlib.blake2b(repr(version.key).encode(), digest_size=16).digest()


def extend_keys(keys: list[bytes], root: bytes, ids: Sequence[int], block_size: int, count: int) -> None:
    """Extend `keys` in place to the chain hashes of the first `count` blocks of `ids`.

    Example:
        keys = []; extend_keys(keys, root, range(40), 16, 2)   # two keys: ids 0-15, and ids 0-31
    """
    for i in range(len(keys), count):
        text = array("q", ids[i * block_size : (i + 1) * block_size]).tobytes()
        keys.append(hashlib.blake2b(text, digest_size=16, key=keys[i - 1] if i else root).digest())


class BlockPool:
    """Hands out blocks by number. Knows nothing of tensors or sequences."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the cache has room for {num_blocks} blocks, and one is reserved; raise engine.cache_bytes or engine.num_blocks"
            )
        self.total = num_blocks - 1
        """Blocks that can hold tokens."""
        self.evictions = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, by eviction if need be."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def idle(self) -> int:
        return len(self._idle)

    def allocate(self) -> int:
        """A block with one reference. The caller has checked `available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        self._refs[block] = 1
        return block

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. Takes no reference."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of the blocks sharing would take out of `available`."""
        return sum(self._refs[b] == 0 for b in blocks)

    def register(self, block: int, key: bytes) -> None:
        """Offer a used, full block to later sequences. A second block with the same content stays private."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence, deepest first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def flush(self) -> None:
        """Forget the prefix cache: the version changed, or its content is in doubt. Used blocks stay used."""
        self._free.extend(self._idle)
        self._idle.clear()
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    def check(self) -> None:
        """Assert the invariants of the module docstring; for tests and debugging."""
        used = [b for b, n in enumerate(self._refs) if n > 0]
        assert min(self._refs) >= 0, "a block was given back more often than taken"
        assert sorted([*self._free, *self._idle, *used]) == list(range(1, self.total + 1)), "a block is lost, in two states, or block 0"
        assert all(self._key_of[b] is not None for b in self._idle), "an idle block has no key"
        assert {k: b for b, k in enumerate(self._key_of) if k is not None} == self._block_of, "cache index and blocks disagree"
