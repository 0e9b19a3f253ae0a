"""Reward parts: what pays, what costs, and the shape of the length penalty (M13)."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, InfraError
from etude.records import Effort, Failure, Message, StopReason, TestReport, ToolCall, ToolError, ToolResult
from etude.rewards.parts import RewardConfig, comment_ratio, length_cost, reward_parts, tool_mix_entropy
from etude.tasks.source import make_task

TASK = make_task(1)
SOLVED = TestReport(passed=(*TASK.grader.fail_to_pass, *TASK.grader.pass_to_pass), solved=True)
FAILED = TestReport(passed=TASK.grader.pass_to_pass, failed=TASK.grader.fail_to_pass)
EFFORT = Effort(thinking_tokens=10, call_tokens=100, output_tokens=200, final_tokens=20, calls=4, turns=3)

x_values = st.floats(0, 1e7)
k_values = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))
q_values = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.0 - 1e-12, 1.0 + 1e-12, 2.0]), st.floats(0, 4))


def call(name, arguments=None, *, error=None, id="c1", parse_error=None):
    """An assistant message with one call, and the tool message that answers it."""
    made = ToolCall(id=id, name=name, arguments=arguments or {}, error=parse_error)
    answer = ToolResult(call_id=id, name=name, text="x", error=error or parse_error)
    return Message(role="assistant", calls=(made,)), Message(role="tool", results=(answer,))


# --- length


@given(x_values, x_values, k_values, q_values)
def test_length_cost_is_monotone(a, b, k, q):
    low, high = sorted((a, b))
    assert length_cost(low, k, q) <= length_cost(high, k, q) * (1 + 1e-12)


@given(x_values, x_values, k_values, q_values, st.floats(0, 1))
def test_length_cost_is_concave(a, b, k, q, part):
    chord = part * length_cost(a, k, q) + (1 - part) * length_cost(b, k, q)
    assert length_cost(part * a + (1 - part) * b, k, q) >= chord - 1e-9 * max(1.0, abs(chord))


@given(x_values, k_values, q_values)
def test_length_cost_starts_at_zero_with_slope_one_and_never_exceeds_linear(x, k, q):
    assert length_cost(0.0, k, q) == 0.0
    assert 0 <= length_cost(x, k, q) <= x * (1 + 1e-12)
    assert length_cost(1e-6, k, q) == pytest.approx(1e-6, rel=1e-5)


@given(x_values, st.floats(1e-9, 1.0))
def test_q_to_one_is_the_logarithm(x, k):
    log = math.log1p(k * x) / k
    assert length_cost(x, k, 1.0) == pytest.approx(log, rel=1e-12)
    for q in (1 - 1e-9, 1 + 1e-9, 1 - 1e-14, 1 + 1e-14):
        assert length_cost(x, k, q) == pytest.approx(log, rel=1e-6)


@given(x_values, q_values)
def test_k_to_zero_is_linear(x, q):
    assert length_cost(x, 0.0, q) == x
    assert length_cost(x, 1e-18, q) == pytest.approx(x, rel=1e-9)


@given(st.floats(1, 1e5), st.floats(1e-4, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.5, 2.0, 3.0]))
def test_length_cost_is_the_textbook_formula_where_that_is_exact(x, k, q):
    textbook = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert length_cost(x, k, q) == pytest.approx(textbook, rel=1e-6)


def test_the_example_of_the_paper():
    assert [round(length_cost(1000, 0.01, q)) for q in (0, 0.5, 1, 2)] == [1000, 463, 240, 91]


def test_above_one_it_saturates():
    assert length_cost(1e15, 0.01, 2) == pytest.approx(100, rel=1e-6)


@given(x_values, st.floats(1e-6, 1.0), st.floats(1.05, 4))
def test_above_one_it_stays_below_its_bound(x, k, q):
    assert length_cost(x, k, q) <= 1 / (k * (q - 1)) * (1 + 1e-12)
    assert length_cost(1e300, k, q) == pytest.approx(1 / (k * (q - 1)), rel=1e-9), "and reaches it"


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1.0), st.floats(0, 1))
def test_up_to_one_it_has_no_bound(level, k, q):
    """The x at which C reaches a level, from the inverse of the closed form: it exists for every level."""
    z = (1 - q) * k * level
    x = math.expm1(k * level if z == 0 else math.log1p(z) / (1 - q)) / k
    assert length_cost(x, k, q) == pytest.approx(level, rel=1e-9)


@given(st.floats(1e-6, 1e9), st.floats(1e-12, 1.0), q_values)
def test_length_cost_has_twelve_digits_everywhere(x, k, q):
    """Against the closed form in 80 decimal digits, in which nothing cancels: near q = 1 and k = 0 too."""
    with decimal.localcontext(decimal.Context(prec=80)):
        dx, dk, dq = decimal.Decimal(x), decimal.Decimal(k), decimal.Decimal(q)
        growth = (1 + dk * dx).ln()
        exact = growth / dk if dq == 1 else (((1 - dq) * growth).exp() - 1) / (dk * (1 - dq))
    assert length_cost(x, k, q) == pytest.approx(float(exact), rel=1e-12)


@given(st.floats(1, 1e6), st.floats(1e-9, 1.0), st.floats(0, 4), st.floats(0.01, 2))
def test_more_curvature_costs_less(x, k, q, more):
    """What k and q are for: either one raised presses long work less, and short work hardly at all."""
    assert length_cost(x, k, q + more) <= length_cost(x, k, q) * (1 + 1e-12)
    assert length_cost(x, k * (1 + more), q) <= length_cost(x, k, q) * (1 + 1e-12)


@given(st.floats(0, 1e5), st.floats(1e-6, 1e-2), st.floats(0, 4))
def test_the_slope_is_a_power(x, k, q):
    """C'(x) = (1 + kx)^(-q), by central differences."""
    step = 1e-3 * (1 + x)
    low = max(x - step, 0.0)
    slope = (length_cost(x + step, k, q) - length_cost(low, k, q)) / (x + step - low)
    between = (1 + k * np.array([low, x + step])) ** (-q)
    assert between[1] * (1 - 1e-6) <= slope <= between[0] * (1 + 1e-6)


@given(st.floats(1, 1e6), st.floats(1, 1e6), k_values, q_values)
def test_long_work_costs_less_a_token_than_short_work(a, b, k, q):
    """What lets hard tasks stay long while easy ones are pressed: C(x) / x never rises."""
    short, long = sorted((a, b))
    assert length_cost(long, k, q) / long <= length_cost(short, k, q) / short * (1 + 1e-12)


@pytest.mark.parametrize("bad", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="length_cost needs"):
        length_cost(*bad)


# --- parts


def test_solved_and_failed(trajectory):
    config = RewardConfig(length=0)
    assert reward_parts(TASK, trajectory(), SOLVED, config) == {"solved": 1.0}
    assert reward_parts(TASK, trajectory(), FAILED, config) == {"solved": 0.0}


def test_length_costs_only_where_the_task_was_solved_and_little(trajectory):
    config = RewardConfig()
    solved = reward_parts(TASK, trajectory(effort=EFFORT), SOLVED, config)
    x = 10 + 100 + 0.25 * 200 + 20 + 5 * 4 + 20 * 3
    assert solved["length"] == pytest.approx(-1e-4 * math.log1p(1e-3 * x) / 1e-3)
    assert -0.05 < solved["length"] < 0
    assert "length" not in reward_parts(TASK, trajectory(effort=EFFORT), FAILED, config)
    longest = Effort(thinking_tokens=10**6)
    assert sum(reward_parts(TASK, trajectory(effort=longest), SOLVED, config).values()) > 0


def test_parallel_calls_are_cheaper_than_a_turn_each(trajectory):
    def cost(turns):
        return reward_parts(TASK, trajectory(effort=Effort(calls=6, call_tokens=60, turns=turns)), SOLVED, RewardConfig())["length"]

    assert cost(2) > cost(6)


def test_partial_credit_is_off_and_can_be_switched_on(trajectory):
    half = TASK.grader.fail_to_pass[:2]
    some = TestReport(passed=(*half, *TASK.grader.pass_to_pass))
    broke = TestReport(passed=(*half, *TASK.grader.pass_to_pass[1:]))
    assert reward_parts(TASK, trajectory(), some, RewardConfig()) == {"solved": 0.0}
    config = RewardConfig(tests=0.4)
    assert reward_parts(TASK, trajectory(), some, config)["tests"] == pytest.approx(0.4 * 2 / len(TASK.grader.fail_to_pass))
    assert reward_parts(TASK, trajectory(), broke, config)["tests"] == 0.0
    assert "tests" not in reward_parts(TASK, trajectory(), SOLVED, config)


@pytest.mark.parametrize("error", [ToolError.UNKNOWN_TOOL, ToolError.BAD_CALL, ToolError.BAD_ARGUMENTS, ToolError.FORBIDDEN])
def test_each_broken_call_costs_up_to_a_limit(trajectory, error):
    def cost(n):
        messages = [m for i in range(n) for m in call("nonsense", error=error, id=f"c{i}")]
        return reward_parts(TASK, trajectory(*messages), FAILED, RewardConfig()).get("tool_errors", 0.0)

    assert [cost(0), cost(1), cost(2), cost(50)] == [0.0, -0.02, -0.04, -0.2]


def test_a_call_that_ran_and_failed_costs_nothing_unless_asked(trajectory):
    rollout = trajectory(*call("edit_file", error=ToolError.FAILED), *call("run_terminal", error=ToolError.TIMEOUT, id="c2"))
    assert reward_parts(TASK, rollout, FAILED, RewardConfig()) == {"solved": 0.0}
    assert reward_parts(TASK, rollout, FAILED, RewardConfig(failed_call=0.1))["failed_calls"] == pytest.approx(-0.2)


def test_open_items_of_the_last_list_cost(trajectory):
    first = call("todo", {"items": "[ ] a\n[ ] b\n[ ] c"})
    last = call("todo", {"items": "[x] a\n[ ] b\n  [ ] c"}, id="c2")
    broken = call("todo", {"items": "[ ] a"}, id="c3", parse_error=ToolError.BAD_CALL)
    parts = reward_parts(TASK, trajectory(*first, *last, *broken), SOLVED, RewardConfig(length=0, tool_error=0))
    assert parts == {"solved": 1.0, "open_todos": pytest.approx(-0.04)}
    done = call("todo", {"items": "[x] a"})
    assert "open_todos" not in reward_parts(TASK, trajectory(*first, *done), SOLVED, RewardConfig())


def test_comments_beyond_the_ratio_cost_when_switched_on(trajectory):
    diff = "--- a/x.py\n+++ b/x.py\n@@\n-old = 1  # gone\n+a = 1  # " + "w" * 50 + "\n+# " + "z" * 40 + "\n"
    rollout = trajectory(diff=diff)
    assert "comments" not in reward_parts(TASK, rollout, SOLVED, RewardConfig())
    assert reward_parts(TASK, rollout, SOLVED, RewardConfig(comments=0.01))["comments"] < 0
    assert comment_ratio(diff) == pytest.approx(90 / 5)
    assert comment_ratio(diff.replace("x.py", "x.md")) == 0.0
    assert comment_ratio("") == 0.0


@pytest.mark.parametrize("stop", [StopReason.OUT_OF_TOKENS, StopReason.OUT_OF_TURNS, StopReason.OUT_OF_CONTEXT, StopReason.OUT_OF_TIME])
def test_over_long_rollouts_are_scored_like_any_other(trajectory, stop):
    assert reward_parts(TASK, trajectory(stop=stop), FAILED, RewardConfig()) == {"solved": 0.0}
    assert reward_parts(TASK, trajectory(stop=stop), SOLVED, RewardConfig())["solved"] == 1.0


def test_what_a_machine_broke_has_no_reward(trajectory):
    broken = trajectory(stop=StopReason.INFRA, failure=Failure(where="sandbox", error="SandboxError", message="it died"))
    with pytest.raises(InfraError, match="it died"):
        reward_parts(TASK, broken, SOLVED, RewardConfig())
    with pytest.raises(InfraError, match="no cause"):
        reward_parts(TASK, trajectory(stop=StopReason.INFRA), FAILED, RewardConfig())
    with pytest.raises(InfraError, match="not graded"):
        reward_parts(TASK, trajectory(), None, RewardConfig())


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_are_checked(value):
    with pytest.raises(ConfigError, match=r"rewards\.solved"):
        RewardConfig(solved=value)


def test_tool_mix_entropy():
    assert tool_mix_entropy([]) == 0.0
    assert tool_mix_entropy(["run_terminal"] * 9) == 0.0
    assert tool_mix_entropy(["read_file", "edit_file"]) == pytest.approx(1.0)
