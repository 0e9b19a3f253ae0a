import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.errors import ConfigError
from etude.inference.blocks import BlockPool, extend_keys, root_key
from etude.records import Version

ROOT = root_key(Version(lineage=0, ordinal=0, hash="a"))


def keys_of(ids, count, root=ROOT, block_size=4):
    keys = []
    extend_keys(keys, root, ids, block_size, count)
    return keys


def test_keys_depend_on_version_and_on_every_token_before():
    ids = list(range(12))
    keys = keys_of(ids, 3)
    assert len(set(keys)) == 3
    assert keys_of([9, *ids[1:]], 3)[2] != keys[2]
    assert keys_of(ids, 3, root_key(Version(lineage=0, ordinal=1, hash="a")))[0] != keys[0]
    assert keys_of(ids, 3, root_key(Version(lineage=1, ordinal=0, hash="a")))[0] != keys[0]
    assert keys_of(ids[:11], 2) == keys[:2]


def test_extending_keys_in_steps_gives_the_same_chain():
    keys = keys_of(list(range(40)), 3)
    extend_keys(keys, ROOT, list(range(40)), 4, 10)
    assert keys == keys_of(list(range(40)), 10)


def test_evicts_the_block_given_back_longest_ago_children_first():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    keys = keys_of(list(range(12)), 3)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(blocks)
    assert pool.match(keys) == blocks
    assert pool.allocate() == blocks[2]  # the deepest went first
    assert pool.match(keys) == blocks[:2]
    assert pool.evictions == 1


def test_flush_frees_idle_entries_and_leaves_used_blocks_to_their_owners():
    pool = BlockPool(5)
    idle, used = pool.allocate(), pool.allocate()
    keys = keys_of(list(range(8)), 2)
    pool.register(idle, keys[0])
    pool.register(used, keys[1])
    pool.release([idle])
    pool.flush()
    pool.check()
    assert pool.match(keys) == []
    assert (pool.used, pool.idle, pool.available) == (1, 0, 3)
    pool.release([used])
    pool.check()
    assert (pool.used, pool.idle, pool.available) == (0, 0, 4)


def test_too_small_a_cache_is_refused():
    with pytest.raises(ConfigError, match="cache_bytes"):
        BlockPool(1)


class Pool(RuleBasedStateMachine):
    """Random sequences of blocks taken, shared, registered and given back."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[list[int]] = []
        self.words = [keys_of([i] * 16, 4) for i in range(3)]

    @rule(word=st.integers(0, 2), length=st.integers(1, 4))
    def take(self, word, length):
        keys = self.words[word][:length]
        hits = self.pool.match(keys)
        if length - len(hits) + self.pool.idle_among(hits) > self.pool.available:
            return
        self.pool.share(hits)
        blocks = hits + [self.pool.allocate() for _ in range(length - len(hits))]
        assert len(set(blocks)) == length
        for block, key in zip(blocks, keys, strict=True):
            self.pool.register(block, key)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def give_back(self, which):
        self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def flush(self):
        self.pool.flush()
        assert all(self.pool.match(keys) == [] for keys in self.words)

    @invariant()
    def consistent(self):
        self.pool.check()
        assert self.pool.used == len({b for blocks in self.held for b in blocks})


TestPool = Pool.TestCase
