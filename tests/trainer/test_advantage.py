"""Group advantages (facts M5, M7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records import Failure, StopReason
from etude.trainer.advantage import advantages, centred, kept, overlong, silent

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def values(group, kind="centred"):
    return [a for _, a in advantages(group, kind)]


def test_reward_minus_mean(make):
    assert values(make.group([1.0, 0.0, 0.0, 1.0])) == [0.5, -0.5, -0.5, 0.5]


@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(reward, size):
    assert centred([reward] * size) == [0.0] * size


@given(rewards, st.floats(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(values_G, constant):
    shifted = centred([v + constant for v in values_G])
    assert shifted == pytest.approx(centred(values_G), abs=1e-9)


@given(rewards)
def test_advantages_sum_to_zero(values_G):
    assert abs(sum(centred(values_G))) < 1e-9


def test_a_small_bonus_stays_small(make):
    """+-0.01 of style in an all-correct group is an advantage of order 0.01; dividing by the deviation would make it 1."""
    group = make.group([1.01, 0.99, 1.0, 1.0])
    assert max(map(abs, values(group))) == pytest.approx(0.01)
    assert max(map(abs, values(group, "standardised"))) == pytest.approx(2**0.5, rel=1e-3)


def test_dropped_members_neither_count_nor_train(make):
    group = make.group([1.0, 0.0, 0.0, 1.0], dropped=[3])
    pairs = advantages(group)
    assert [m.trajectory.member for m, _ in pairs] == [0, 1, 2]
    assert [a for _, a in pairs] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_broken_machine_is_not_a_wrong_answer(make):
    group = make.group([1.0, 0.0, 0.0])
    broken = group.members[1]
    broken = broken.replace(trajectory=broken.trajectory.replace(stop=StopReason.INFRA, failure=Failure(where="s", error="e", message="m")))
    group = group.replace(members=(group.members[0], broken, group.members[2]))
    assert len(kept(group)) == 2
    assert values(group) == [0.5, -0.5]


def test_groups_without_a_comparison_give_nothing(make):
    assert advantages(make.group([1.0])) == []
    assert advantages(make.group([1.0, 0.0], dropped=[1])) == []
    assert advantages(make.group([1.0, 0.0], dropped=[0, 1])) == []


def test_silent_means_nothing_to_compare_among_those_kept(make):
    assert silent(make.group([0.1, 0.1, 0.1]))
    assert silent(make.group([0.0, 1.0, 1.0], dropped=[0]))
    assert not silent(make.group([1.0, 1.0, 0.999]))
    assert not silent(make.group([1.0])), "a group without a comparison is not silent, it is unusable"


@given(rewards)
def test_silent_groups_are_those_whose_advantages_are_all_zero(values_G):
    assert (len(set(values_G)) == 1) == (not any(centred(values_G)))


def test_overlong_means_cut_off_by_tokens_or_context(make):
    group = make.group([0.0] * 4, stops=[StopReason.OUT_OF_TOKENS, StopReason.OUT_OF_CONTEXT, StopReason.DONE, StopReason.OUT_OF_TURNS])
    assert [overlong(m) for m in group.members] == [True, True, False, False]
