"""From a graded rollout to reward parts by name. The reward is their sum; weights are already in them.

Invariants:
* only the tests give a positive reward; every other part is zero or negative;
* the length penalty is applied only where the task was solved, so giving up early is never better than trying;
* a broken tool call costs something and is never dropped: otherwise a policy learns to emit one where it expects to
  fail (seen in live training, M17);
* an over-long rollout is graded like any other (M7); a machine's failure has no reward at all: `reward_parts` raises,
  and the rollout is masked by its caller.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from etude.config import config, live
from etude.errors import ConfigError, InfraError
from etude.records import Effort, StopReason, Task, TestReport, ToolError, Trajectory

BROKEN = frozenset({ToolError.UNKNOWN_TOOL, ToolError.BAD_CALL, ToolError.BAD_ARGUMENTS, ToolError.FORBIDDEN})
"""Errors of the call itself. A tool that ran and could not do it (FAILED, TIMEOUT) is a normal part of work."""


_OPEN = re.compile(r"\s*(?:[-*]\s*)?\[ \]")
"""An item of a to-do list that is not ticked, as the todo tool reads it."""


@config
class RewardConfig:
    """Weights of the reward parts. Zero switches a part off; it is then not logged either."""

    solved: float = live(1.0)
    """For a task whose every expected test passed."""
    tests: float = live(0.0)
    """For the share of fail_to_pass tests that passed, where the task was not solved. Off: partial credit pays for
    special-casing one test."""
    tool_error: float = live(0.02)
    """Cost of each broken tool call (unknown tool, not parsable, bad or forbidden arguments)."""
    tool_error_most: float = live(0.2)
    """Most that broken calls can cost one rollout."""
    failed_call: float = live(0.0)
    """Cost of each call that ran and failed."""
    open_todo: float = live(0.02)
    """Cost of each item of the last to-do list left open."""
    open_todo_most: float = live(0.1)
    comments: float = live(0.0)
    """Cost per unit of comment-to-code ratio above `comment_ratio`; a switch for when reasoning moves into comments (M12)."""
    comment_ratio: float = live(0.5)
    length: float = live(1e-4)
    """Weight of the length penalty C_{k,q}(x)."""
    length_k: float = live(1e-3)
    length_q: float = live(1.0)
    """Curvature: 0 linear, 1 logarithmic, above 1 bounded by 1 / (k (q - 1))."""
    thinking_tokens: float = live(1.0)
    """Weights of the six counts in x (M13)."""
    call_tokens: float = live(1.0)
    output_tokens: float = live(0.25)
    final_tokens: float = live(1.0)
    calls: float = live(5.0)
    turns: float = live(20.0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"rewards.{name} is {value!r}; it should be zero or a positive number")


def reward_parts(task: Task, trajectory: Trajectory, report: TestReport | None, config: RewardConfig) -> dict[str, float]:
    """Weighted parts by name. Raises InfraError for a rollout that a machine broke.

    Example:
        reward_parts(task, trajectory, report, RewardConfig())   # {"solved": 1.0, "length": -0.03}
    """
    if trajectory.failure is not None or trajectory.stop is StopReason.INFRA:
        cause = trajectory.failure.message if trajectory.failure is not None else "no cause recorded"
        raise InfraError(f"rollout {trajectory.id} was broken by a machine ({cause}); mask it, it has no reward")
    if report is None:
        raise InfraError(f"rollout {trajectory.id} of task {task.id} was not graded; mask it, it has no reward")
    parts = {"solved": config.solved if report.solved else 0.0}
    if config.tests and not report.solved:
        parts["tests"] = config.tests * share_passed(task, report)
    broken, failed = tool_errors(trajectory)
    if config.tool_error and broken:
        parts["tool_errors"] = -min(config.tool_error * broken, config.tool_error_most)
    if config.failed_call and failed:
        parts["failed_calls"] = -config.failed_call * failed
    left = open_todos(trajectory)
    if config.open_todo and left:
        parts["open_todos"] = -min(config.open_todo * left, config.open_todo_most)
    if config.comments:
        excess = comment_ratio(trajectory.diff) - config.comment_ratio
        if excess > 0:
            parts["comments"] = -config.comments * excess
    if config.length and report.solved:
        parts["length"] = -config.length * length_cost(effort_sum(trajectory.effort, config), config.length_k, config.length_q)
    return parts


def share_passed(task: Task, report: TestReport) -> float:
    """Share of the fail_to_pass tests that passed; 0 when a test that passed before fails now."""
    passed = set(report.passed)
    if not all(test in passed for test in task.grader.pass_to_pass):
        return 0.0
    return sum(test in passed for test in task.grader.fail_to_pass) / max(len(task.grader.fail_to_pass), 1)


def tool_errors(trajectory: Trajectory) -> tuple[int, int]:
    """(broken calls, calls that ran and failed)."""
    errors = [r.error for m in trajectory.messages for r in m.results if r.error is not None]
    broken = sum(error in BROKEN for error in errors)
    return broken, len(errors) - broken


def open_todos(trajectory: Trajectory) -> int:
    """Items of the last accepted to-do list that are not ticked."""
    refused = {r.call_id for m in trajectory.messages for r in m.results if r.error is not None}
    calls = [c for m in trajectory.messages for c in m.calls if c.name == "todo" and c.error is None and c.id not in refused]
    if not calls:
        return 0
    return sum(bool(_OPEN.match(line)) for line in calls[-1].arguments.get("items", "").splitlines())


def comment_ratio(diff: str) -> float:
    """Characters of comments over characters of code in the added lines of Python files of a unified diff."""
    code = comments = 0
    python = False
    for line in diff.splitlines():
        if line.startswith("+++ "):
            python = line.split("\t")[0].rstrip().endswith(".py")
        elif python and line.startswith("+"):
            before, mark, after = line[1:].partition("#")
            code += len(before.strip())
            comments += len(after.strip()) if mark else 0
    return comments / code if code else float(comments > 0)


def effort_sum(effort: Effort, config: RewardConfig) -> float:
    """x of the length penalty: the weighted sum of the six effort counts."""
    return (
        config.thinking_tokens * effort.thinking_tokens
        + config.call_tokens * effort.call_tokens
        + config.output_tokens * effort.output_tokens
        + config.final_tokens * effort.final_tokens
        + config.calls * effort.calls
        + config.turns * effort.turns
    )


def length_cost(x: float, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)), for x, k, q >= 0: increasing, concave, slope 1 at 0.

    Written as x * [log1p(kx) / kx] * [expm1(z) / z] with z = (1-q) log1p(kx): both brackets go to 1 where the textbook
    form divides zero by zero, so q -> 1 gives ln(1 + kx) / k and k -> 0 gives x without cancellation.
    """
    if x < 0 or k < 0 or q < 0:
        raise ValueError(f"length_cost needs x, k, q >= 0, got x={x!r}, k={k!r}, q={q!r}")
    kx = k * x
    growth = math.log1p(kx)
    first = growth / kx if kx else 1.0
    z = (1.0 - q) * growth
    second = math.expm1(z) / z if z else 1.0
    return x * first * second


def tool_mix_entropy(names: Iterable[str]) -> float:
    """Entropy in bits of which tools were called: falls to 0 when a policy collapses to one tool (M12)."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values()) if total else 0.0
