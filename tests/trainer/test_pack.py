"""Packing: nothing lost, nothing split, weights that know no lengths, rows in balance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.records import StopReason, Version
from etude.trainer.config import RLConfig
from etude.trainer.pack import Normalisers, document_sample, pack, pack_in_order, plan_rows, samples_from_groups

CONFIG = RLConfig(kl=0.0, row_tokens=64)
NOW = Version(lineage=0, ordinal=0, hash="0" * 32)


def quadratic(n):
    return n + n * n / 100


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_every_sample_is_in_exactly_one_row_and_rows_keep_their_size(lengths, row_tokens):
    rows = plan_rows(lengths, row_tokens, quadratic)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= row_tokens for row in rows)


def test_rows_balance_the_quadratic_cost_on_a_heavy_tail():
    """max / mean of the rows' cost at most 1.1 on a heavy-tailed mix, where balancing tokens alone does worse."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.pareto(1.2, 400) * 200 + 50, 6000).astype(int).tolist()

    def spread(cost):
        costs = [sum(quadratic(lengths[i]) for i in row) for row in plan_rows(lengths, 16_000, cost)]
        return max(costs) / np.mean(costs)

    assert spread(quadratic) <= 1.1
    assert spread(quadratic) < spread(lambda n: float(n))


def test_tokens_are_conserved_through_packing(make):
    groups = [make.group([1.0, 0.0, 0.5, 0.0], admission=a) for a in range(3)]
    samples, normalisers = samples_from_groups(groups, NOW, CONFIG)
    rows = pack(samples, 64, quadratic, normalisers)
    assert len(rows) > 1
    assert sum(len(r.ids_N) for r in rows) == sum(len(s) for s in samples)
    packed = sorted(tuple(r.ids_N[a:b].tolist()) for r in rows for a, b in r.bounds)
    assert packed == sorted(tuple(s.ids_T.tolist()) for s in samples)
    sampled = sum(m.trajectory.sampled_tokens for g in groups for m in g.members)
    assert sum(int((r.rl_weight_N > 0).sum()) for r in rows) == sampled
    assert all(r.positions_N[a:b].tolist() == list(range(b - a)) for r in rows for a, b in r.bounds)


def chain_and_short(make):
    """Member 0 is a chain of two segments with 5 and 3 sampled tokens, member 1 one segment with 2."""
    rng = np.random.default_rng(0)
    chain = [make.segment(rng, turns=((3, 1), (2, 0))), make.segment(rng, turns=((3, 0),), parent=0)]
    return make.group([1.0, 0.0], segments=lambda _, member: chain if member == 0 else [make.segment(rng, turns=((2, 0),))])


def weights_of(groups, **changes):
    """rl weight of a token by (member, segment)."""
    samples, normalisers = samples_from_groups(groups, NOW, RLConfig(kl=0.0, loss_constant=100.0, **changes))
    rows = [pack([s], 64, quadratic, normalisers)[0] for s in samples]
    found = {s.origin[1:]: set(np.unique(r.rl_weight_N[r.rl_weight_N > 0]).tolist()) for s, r in zip(samples, rows)}
    assert all(len(w) == 1 for w in found.values())
    return {origin: w.pop() for origin, w in found.items()}


def test_normalisers_by_hand(make):
    group = chain_and_short(make)
    assert weights_of([group]) == pytest.approx({(0, 0): 1 / 200, (0, 1): 1 / 200, (1, 0): 1 / 200})
    by_length = weights_of([group], normaliser="length")
    assert by_length == pytest.approx({(0, 0): 1 / (8 * 2), (0, 1): 1 / (8 * 2), (1, 0): 1 / (2 * 2)}), "a chain is one rollout"
    assert weights_of([group], normaliser="tokens") == pytest.approx({(0, 0): 0.1, (0, 1): 0.1, (1, 0): 0.1})


@pytest.mark.parametrize("normaliser", ["constant", "length", "tokens"])
def test_silent_groups_count_in_every_normaliser_unless_dropped(make, normaliser):
    group = chain_and_short(make)
    silent = make.group([1.0, 1.0], admission=1, segments=lambda rng, _: [make.segment(rng, turns=((5, 0),))])
    alone, counted = weights_of([group], normaliser=normaliser), weights_of([group, silent], normaliser=normaliser)
    assert counted == weights_of([group, silent], normaliser=normaliser, skip_silent=False) | counted
    assert {k: v / 2 for k, v in alone.items()} == pytest.approx(counted)
    assert weights_of([group, silent], normaliser=normaliser, silent="drop") == alone
    assert weights_of([silent], normaliser=normaliser, silent="drop", skip_silent=False) == {}


def test_only_sampled_tokens_have_weight_and_the_tail_nobody_sampled_is_cut(make):
    seg = make.segment(np.random.default_rng(0), prompt=4, turns=((3, 2), (2, 5)))
    group = make.group([1.0, 0.0], segments=lambda rng, i: [seg])
    (sample, _), _ = samples_from_groups([group], NOW, CONFIG)
    assert len(sample) == 4 + 3 + 2 + 2
    assert sample.rl_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_a_tokens_weight_does_not_depend_on_its_own_length(make):
    def segments(rng, member):
        return [make.segment(rng, turns=((4 * 5**member, 2),))]

    samples, normalisers = samples_from_groups([make.group([1.0, 0.0, 1.0], segments=segments)], NOW, RLConfig(kl=0.0))
    (row,) = pack(samples, 4096, quadratic, normalisers)
    weights = set(row.rl_weight_N[row.rl_weight_N > 0].tolist())
    assert weights == {np.float32(1 / (1024 * 3))}


def test_segments_of_a_chain_share_the_advantage(make):
    def segments(rng, member):
        return [make.segment(rng), make.segment(rng, parent=0)]

    samples, normalisers = samples_from_groups([make.group([1.0, 0.0], segments=segments)], NOW, CONFIG)
    assert [(s.origin, s.advantage) for s in samples] == [((0, 0, 0), 0.5), ((0, 0, 1), 0.5), ((0, 1, 0), -0.5), ((0, 1, 1), -0.5)]
    assert normalisers.rl == 1024 * 2, "a chain is one rollout"


def test_silent_groups_are_skipped_but_counted(make):
    groups = [make.group([1.0, 0.0], admission=0), make.group([1.0, 1.0], admission=1)]
    samples, normalisers = samples_from_groups(groups, NOW, CONFIG)
    assert {s.origin[0] for s in samples} == {0}
    assert normalisers.rl == 1024 * 4
    everything, same = samples_from_groups(groups, NOW, RLConfig(kl=1e-3))
    assert {s.origin[0] for s in everything} == {0, 1}
    assert same == normalisers


def test_overlong_members_are_kept_or_masked(make):
    group = make.group([1.0, 0.0, 0.0], stops=[StopReason.DONE, StopReason.OUT_OF_TOKENS, StopReason.DONE])
    keep, _ = samples_from_groups([group], NOW, CONFIG)
    mask, _ = samples_from_groups([group], NOW, RLConfig(kl=0.0, overlong="mask"))
    assert [s.origin[1] for s in keep] == [0, 1, 2]
    assert [s.origin[1] for s in mask] == [0, 2]
    assert mask[0].advantage == keep[0].advantage, "its failing reward still counts in the mean"


def test_versions_become_ordinals_by_hash(make):
    """Mixed-version rollouts: each token carries the ordinal that sampled it; an abandoned lineage is never fresh."""
    old, now = Version(lineage=0, ordinal=4, hash="a"), Version(lineage=1, ordinal=5, hash="b")
    ghost = Version(lineage=0, ordinal=5, hash="c")
    group = make.group([1.0, 0.0], segments=lambda rng, i: [make.segment(rng, prompt=2, turns=((6, 0),), versions=(old, ghost, now))])
    (sample, _), _ = samples_from_groups([group], now, CONFIG)
    assert sample.version_T.tolist() == [-1, -1, 4, 4, 4, 4, 5, 5]


def test_streams_have_their_own_normalisers():
    sample = document_sample(np.array([1, 2, 3]), np.array([1, 1, 0]))
    (row,) = pack_in_order([sample], 8, Normalisers(rl=7.0, ce=2.0))
    assert row.ce_weight_N.tolist() == [0.0, 0.5, 0.0], "the first token has nothing to be predicted from"
    assert row.rl_weight_N.tolist() == [0.0, 0.0, 0.0]


def test_a_segment_longer_than_a_row_is_an_error_that_says_so(make):
    group = make.group([1.0, 0.0], segments=lambda rng, i: [make.segment(rng, turns=((80, 0),))])
    samples, normalisers = samples_from_groups([group], NOW, CONFIG)
    with pytest.raises(ConfigError, match=r"86 tokens.*row_tokens = 64"):
        pack(samples, 64, quadratic, normalisers)


def test_routes_are_carried_and_missing_ones_are_marked_absent(make):
    rng = np.random.default_rng(0)
    bare = make.segment(rng)
    routed = make.segment(rng).replace(routes_TLK=np.ones((18, 2, 2), dtype=np.uint8))
    group = make.group([1.0, 0.0], segments=lambda rng, i: [routed if i == 0 else bare])
    samples, normalisers = samples_from_groups([group], NOW, CONFIG)
    (row,) = pack(samples, 64, quadratic, normalisers)
    assert row.routes_NLK.shape == (36, 2, 2)
    assert (row.routes_NLK[:18] == 1).all()
    assert (row.routes_NLK[18:] == 255).all()


def test_nothing_sampled_gives_no_sample(make):
    group = make.group([1.0, 0.0], segments=lambda rng, i: [make.segment(rng, turns=())])
    assert samples_from_groups([group], NOW, CONFIG)[0] == []
    assert pack([], 64, quadratic) == []
