"""Shared by the tests of rewards: trajectories made of messages."""

from __future__ import annotations

import pytest
from hypothesis import settings

from etude.records import Effort, Message, StopReason, Trajectory

settings.register_profile("etude", deadline=None)
settings.load_profile("etude")


@pytest.fixture
def trajectory():
    def make(*messages: Message, stop=StopReason.DONE, effort=None, failure=None, diff=""):
        return Trajectory(
            id="r1",
            task_id="t",
            task_hash="h",
            group=0,
            member=0,
            seed=0,
            segments=(),
            messages=messages,
            stop=stop,
            effort=effort or Effort(),
            failure=failure,
            diff=diff,
        )

    return make
