from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.optim.schedules import ScheduleConfig, factor


def test_cosine_by_hand():
    schedule = ScheduleConfig(kind="cosine", warmup=0.1, floor=0.1)
    assert factor(schedule, 0, 100) == 0.0
    assert factor(schedule, 5, 100) == 0.5
    assert factor(schedule, 10, 100) == 1.0
    assert factor(schedule, 55, 100) == pytest.approx(0.55)
    assert factor(schedule, 100, 100) == pytest.approx(0.1)
    assert factor(schedule, 120, 100) == pytest.approx(0.1)


def test_wsd_by_hand():
    schedule = ScheduleConfig(kind="wsd", warmup=0.1, decay=0.5)
    assert [factor(schedule, x, 100) for x in (5, 10, 50, 75, 100)] == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_a_run_without_an_end_warms_up_in_steps():
    schedule = ScheduleConfig(kind="constant", warmup=4)
    assert [factor(schedule, x) for x in (1, 2, 4, 1000)] == [0.25, 0.5, 1.0, 1.0]


@given(st.sampled_from(["constant", "cosine", "wsd"]), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 2))
def test_the_factor_stays_between_zero_and_one(kind, warmup, decay, floor, at):
    schedule = ScheduleConfig(kind=kind, warmup=warmup, decay=decay, floor=floor)
    assert 0.0 <= factor(schedule, at * 50, 50) <= 1.0


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match="decay"):
        ScheduleConfig(kind="wsd", decay=1.5)
