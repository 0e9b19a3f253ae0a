"""From the rewards of a group to the advantage of each member.

    A_i = R_i - mean_j R_j          over the members that were kept

No division by the group's standard deviation: with equal correctness in a group, tiny differences of behaviour would
otherwise be blown up to order 1 (Dr. GRPO, arXiv 2503.20783; Composer 2 report, section 4.1). A group of fewer than two
kept members says nothing and gives nothing. Over-long rollouts keep their (failing) reward and are trained on.

Invariants: all rewards equal gives exactly 0.0 for each member, whatever the value and the group's size; a constant added to
all rewards changes nothing. Rewards are centred on the first before averaging, which is what makes the first exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from etude.records import Graded, Group, StopReason

OVERLONG = (StopReason.OUT_OF_TOKENS, StopReason.OUT_OF_CONTEXT)
STD_FLOOR = 1e-6
"""Added to the standard deviation in the "standardised" variant, as GRPO's code does, so that equal rewards give 0."""


def kept(group: Group) -> tuple[Graded, ...]:
    """Members that are trained on: not dropped, and not the victim of a broken machine."""
    dropped = {d.member for d in group.dropped}
    return tuple(
        g
        for g in group.members
        if g.trajectory.member not in dropped and g.trajectory.failure is None and g.trajectory.stop is not StopReason.INFRA
    )


def centred(rewards_G: Sequence[float]) -> list[float]:
    """reward - mean, exactly 0 where all are equal."""
    shifted = [r - rewards_G[0] for r in rewards_G]
    mean = math.fsum(shifted) / len(shifted)
    return [s - mean for s in shifted]


def advantages(group: Group, kind: Literal["centred", "standardised"] = "centred") -> list[tuple[Graded, float]]:
    """(member, advantage) of each kept member; empty when fewer than two were kept.

    Example:
        rewards 1, 0, 0, 1  ->  +0.5, -0.5, -0.5, +0.5
    """
    members = kept(group)
    if len(members) < 2:
        return []
    values_G = centred([g.reward for g in members])
    if kind == "standardised":
        std = math.sqrt(math.fsum(v * v for v in values_G) / len(values_G))
        values_G = [v / (std + STD_FLOOR) for v in values_G]
    return list(zip(members, values_G, strict=True))


def silent(group: Group) -> bool:
    """Whether the group's kept members all have the same reward, so that no advantage differs from 0."""
    rewards = [g.reward for g in kept(group)]
    return len(rewards) >= 2 and all(r == rewards[0] for r in rewards)


def signal(group: Group) -> bool:
    """Whether some advantage of the group differs from 0."""
    return len(kept(group)) >= 2 and not silent(group)


def overlong(member: Graded) -> bool:
    """Whether the rollout was cut off by its token budget or its context window."""
    return member.trajectory.stop in OVERLONG
