import asyncio
import gc
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.compaction import ASK
from etude.agent.loop import Agent, AgentConfig, run_agent
from etude.agent.tools.registry import schema_hash, tool_schema
from etude.config import build
from etude.errors import ConfigError, EngineError, SandboxError
from etude.fakes import ScriptedChat
from etude.records import Message, StopReason, ToolError, ToolPolicy
from etude.text.calls import format_call

BARE = AgentConfig(prompt="none", instructions=False)
READ = format_call("read_file", {"path": "README.md"})
TEST = format_call("run_terminal", {"command": "pytest"})
FIX = format_call("edit_file", {"path": "shop/stats.py", "old": "    raise NotImplementedError", "new": "    return 2"})


def config(**changes):
    return build(AgentConfig, {"prompt": "none", "instructions": False, **changes})


@pytest.fixture
def play(workspace, run):
    """Run an agent on scripted texts (or a chat); returns its AgentRun."""

    def go(replies, config=BARE, policy=None, files=None, commands=None, prompt="fix mean"):
        async def main():
            sandbox = await workspace(files, commands)
            chat = ScriptedChat(replies) if isinstance(replies, list) or callable(replies) else replies
            return await run_agent(prompt, chat, sandbox, config, policy)

        return run(main())

    return go


def test_a_message_without_a_call_is_the_end(play):
    result = play([f"I look.\n{READ}", f"{FIX}\n{TEST}", "mean is fixed."])
    assert result.stop is StopReason.DONE
    assert [m.role for m in result.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [[r.text for r in m.results] for m in result.messages if m.role == "tool"] == [
        ["# shop\n"],
        ["edited shop/stats.py", "1 passed in 0.02s"],
    ]
    assert result.touched == ("shop/stats.py",)
    assert (result.effort.calls, result.effort.turns) == (3, 3)
    assert set(result.timings) == {"generate", "tools"}


def test_a_broken_call_is_answered_and_the_loop_goes_on(play):
    result = play(['<call name="read_file">\n<path>x\n</call>', "sorry"])
    assert result.stop is StopReason.DONE
    assert result.messages[2].results[0].error is ToolError.BAD_CALL
    assert result.effort.calls == 1


# ---------------------------------------------------------------------------------------------------
# Every way of ending


def test_out_of_turns(play):
    result = play([READ] * 9, config(max_turns=3))
    assert (result.stop, result.effort.turns) == (StopReason.OUT_OF_TURNS, 3)


def test_out_of_tokens_between_turns_and_inside_one(play, engine_chat):
    chat = engine_chat([READ] * 9)
    result = play(chat, config(max_tokens=2 * len(READ)))
    assert result.stop is StopReason.OUT_OF_TOKENS
    assert sum(int(s.sampled_T.sum()) for s in result.segments) == 2 * len(READ)
    assert result.messages[-1].role == "tool"
    chat = engine_chat(["x" * 100])
    result = play(chat, config(max_tokens=30))
    assert (result.stop, result.messages[-1].text) == (StopReason.OUT_OF_TOKENS, "x" * 30)
    chat = engine_chat(["x" * 100])
    assert play(chat, config(max_turn_tokens=30)).stop is StopReason.OUT_OF_TOKENS


def test_a_call_cut_short_is_a_broken_call(play, engine_chat):
    result = play(engine_chat([READ, "ok"]), config(max_turn_tokens=len(READ) - 3))
    assert result.stop is StopReason.DONE
    assert result.messages[2].results[0].error is ToolError.BAD_CALL


@pytest.mark.parametrize("window", [60, 90, 200, 300])
def test_out_of_context_never_goes_beyond_the_window(play, engine_chat, window):
    result = play(engine_chat(lambda context: READ if "<result>" not in context else READ + "x" * 500), config(window=window))
    assert result.stop is StopReason.OUT_OF_CONTEXT
    assert all(len(s.ids_T) <= window for s in result.segments)


def test_out_of_context_before_anything_was_sampled(play, engine_chat):
    result = play(engine_chat([]), config(window=8))
    assert (result.stop, result.segments) == (StopReason.OUT_OF_CONTEXT, ())
    assert result.messages[0].span is None


def test_out_of_time_in_the_engine_and_in_a_tool(play, engine_chat):
    chat = engine_chat([READ])
    chat.engine.hold = asyncio.Event()
    result = play(chat, config(time_limit_s=0.02))
    assert result.stop is StopReason.OUT_OF_TIME
    killed = []

    async def hang(files):
        try:
            await asyncio.sleep(3600)
        finally:
            killed.append(True)

    result = play([format_call("run_terminal", {"command": "hang"})], config(time_limit_s=0.05), commands={"hang": hang})
    assert (result.stop, killed) == (StopReason.OUT_OF_TIME, [True])
    assert result.messages[-1].role == "assistant"


def test_out_of_time_when_a_chat_ignores_the_deadline(play):
    class Deaf(ScriptedChat):
        async def reply(self, messages, *, max_tokens):
            await asyncio.Event().wait()

    result = play(Deaf([]), config(time_limit_s=0.01, reply_grace_s=0.01))
    assert (result.stop, len(result.messages)) == (StopReason.OUT_OF_TIME, 1)


def test_out_of_time_between_turns(play):
    async def rest(files):
        await asyncio.sleep(0.03)
        return ""

    result = play([format_call("run_terminal", {"command": "rest"})] * 99, config(time_limit_s=0.1, max_turns=99), commands={"rest": rest})
    assert result.stop is StopReason.OUT_OF_TIME


def test_cancelled_by_the_engine(play, engine_chat, run, workspace):
    chat = engine_chat([READ])

    async def main():
        chat.engine.hold = asyncio.Event()
        running = asyncio.create_task(run_agent("u", chat, await workspace(), BARE))
        while not (await chat.engine.stats())["running"]:
            await asyncio.sleep(0)
        await chat.engine.cancel("chat.0")
        return await running

    assert run(main()).stop is StopReason.CANCELLED


def test_cancelled_by_its_owner_gives_what_there_is(run, workspace):
    async def main(when):
        sandbox = await workspace(commands={"hang": lambda files: asyncio.Event().wait()})
        hang, job = format_call("run_terminal", {"command": "hang"}), format_call("run_terminal", {"command": "hang", "background": "true"})
        agent = Agent("u", ScriptedChat([job, hang]), sandbox, BARE)
        if when == "before":
            agent.cancel()
        running = asyncio.create_task(agent.run())
        while when == "during" and not any(op == "exec" for op, _ in sandbox.calls):
            await asyncio.sleep(0)
        if when == "during":
            agent.cancel()
        result = await running
        assert sandbox.running_jobs() == []
        return result

    assert run(main("before")).effort.turns == 0
    result = run(main("during"))
    assert (result.stop, result.effort.turns) == (StopReason.CANCELLED, 2)


def test_cancelling_the_task_is_cancellation_and_kills_jobs(run, workspace):
    async def main():
        sandbox = await workspace(commands={"hang": lambda files: asyncio.Event().wait()})
        calls = [format_call("run_terminal", {"command": "hang", "background": "true"}), format_call("run_terminal", {"command": "hang"})]
        running = asyncio.create_task(run_agent("u", ScriptedChat(calls), sandbox, BARE))
        while not any(op == "exec" for op, _ in sandbox.calls):
            await asyncio.sleep(0)
        assert sandbox.running_jobs() == ["1"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sandbox.running_jobs() == []
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_infrastructure_trouble_passes_through_with_a_partial_record(run, workspace):
    async def main(chat, commands=None):
        sandbox = await workspace(commands=commands)
        agent = Agent("u", chat, sandbox, BARE)
        with pytest.raises((EngineError, SandboxError), match="broke"):
            await agent.run()
        return agent.result(StopReason.INFRA)

    result = run(main(ScriptedChat([READ, EngineError("the engine broke")])))
    assert (result.stop, [m.role for m in result.messages]) == (StopReason.INFRA, ["user", "assistant", "tool"])

    def breaks(files):
        raise SandboxError("the sandbox broke")

    result = run(main(ScriptedChat([format_call("run_terminal", {"command": "x"})]), {"x": breaks}))
    assert [m.role for m in result.messages] == ["user", "assistant"]


def test_every_stop_reason_is_reached_by_a_test_above():
    import pathlib

    text = pathlib.Path(__file__).read_text()
    assert [s for s in StopReason if f"StopReason.{s.name}" not in text] == []


# ---------------------------------------------------------------------------------------------------
# Prompt, instructions, policy


def test_the_system_message(play):
    files = {"AGENTS.md": "Use tabs.\n" + "x" * 100}
    full = play(["done"], AgentConfig(instructions_chars=20), files=files)
    system = full.messages[0]
    assert system.role == "system"
    assert tool_schema(ToolPolicy()) in system.text
    assert system.text.endswith(
        "Instructions of this repository (AGENTS.md):\nUse tabs.\nxxxxxxxxxx\n[... 90 more characters in AGENTS.md]"
    )
    names = play(["done"], AgentConfig(prompt="names"))
    assert names.messages[0].text == tool_schema(ToolPolicy(), "names")
    bare = play(["done"], AgentConfig(prompt="none"), files={"AGENTS.md": "Use tabs."})
    assert bare.messages[0].text == "Instructions of this repository (AGENTS.md):\nUse tabs."
    assert [m.role for m in play(["done"], AgentConfig(prompt="none")).messages] == ["user", "assistant"]
    assert [m.role for m in play(["done"], config(), files={"AGENTS.md": "x"}).messages] == ["user", "assistant"]
    assert len({r.hashes["system"] for r in (full, names, bare)}) == 3
    assert full.hashes["tools"] == names.hashes["tools"] == schema_hash(ToolPolicy())


def test_messages_as_a_prompt_keep_their_own_system_text(play):
    prompt = [Message(role="system", text="Be brief."), Message(role="user", text="u")]
    assert play(["done"], prompt=prompt).messages[0].text == "Be brief."
    assert (
        play(["done"], AgentConfig(prompt="names"), prompt=prompt).messages[0].text == tool_schema(ToolPolicy(), "names") + "\n\nBe brief."
    )


def test_a_policy_reaches_prompt_and_calls(play):
    result = play([READ, "ok"], AgentConfig(prompt="names"), ToolPolicy(removed=("read_file",)))
    assert "read_file" not in result.messages[0].text
    assert result.messages[3].results[0].error is ToolError.FORBIDDEN


def test_todos_left_open_are_reported(play):
    result = play([format_call("todo", {"items": "[x] a\n[ ] b"}), "done"])
    assert result.todos_open == ("b",)


def test_scrubbed_runs_are_the_same_twice(play):
    first, second = (play([TEST, "done"], config(scrub=True)) for _ in range(2))
    assert first.messages[2].results[0].text == "E   NotImplementedError\n1 failed in 0.00s\n[exit 1]"
    assert first.messages[2].results[0].seconds == second.messages[2].results[0].seconds == 0.0


@pytest.mark.parametrize("bad", [{"max_turns": 0}, {"time_limit_s": -1}, {"command_timeout_s": 0}, {"compact_at": 8192}, {"prompt": "all"}])
def test_configs_that_make_no_sense_are_refused(bad):
    with pytest.raises(ConfigError):
        config(**bad)


# ---------------------------------------------------------------------------------------------------
# Effort and compaction


def test_effort_counts_every_sampled_token_once(play, engine_chat):
    replies = [f"<|think|>plan<|/think|>look\n{READ}", TEST, "<|think|>so<|/think|>done"]
    result = play(engine_chat(replies))
    effort = result.effort
    assert effort.thinking_tokens == len("plan") + 2 + len("so") + 2
    assert effort.call_tokens == len("look\n" + READ) + 1 + len(TEST) + 1
    assert effort.final_tokens == len("done") + 1
    assert effort.output_tokens == sum(m.span.end - m.span.start for m in result.messages if m.role == "tool")
    assert (effort.calls, effort.turns) == (2, 3)
    assert effort.thinking_tokens + effort.call_tokens + effort.final_tokens == sum(int(s.sampled_T.sum()) for s in result.segments)


def test_a_compaction_chain_is_one_trajectory(play, engine_chat):
    plan = format_call("todo", {"items": "[x] look\n[ ] test"})

    def policy(context):
        if context.endswith(f"{ASK}<|end|><|assistant|>"):
            return f"seen {context.count('<|tool|>')} results, {context.count('Your summary')} summaries"
        if "(1 before it)" in context:
            return "done"
        return f"{plan}\n{FIX}\n{READ}"

    result = play(engine_chat(policy), config(compact_at=700, window=2000))
    assert result.stop is StopReason.DONE
    assert len(result.summaries) == 2
    assert [s.parent for s in result.segments] == [None, 0, 1]
    asks = [i for i, m in enumerate(result.messages) if m.text == ASK]
    assert [i + 1 for i in asks] == list(result.summaries)
    carried = [result.messages[i + 1].text for i in result.summaries]
    assert carried[0] == (
        "Your summary of the work so far (0 before it):\nseen 2 results, 0 summaries\n\n"
        "Your todo list:\n[x] look\n[ ] test\n\nFiles you edited: shop/stats.py"
    )
    assert carried[1].startswith("Your summary of the work so far (1 before it):\nseen 2 results, 1 summaries")
    decoded = [engine_chat([]).tokenizer.decode(s.ids_T.tolist()) for s in result.segments]
    assert decoded[0].endswith(f"{ASK}<|end|><|assistant|>seen 2 results, 0 summaries<|end|>")
    assert decoded[1].startswith(f"<|user|>fix mean<|end|><|user|>{carried[0]}<|end|><|assistant|>")
    assert decoded[2] == f"<|user|>fix mean<|end|><|user|>{carried[1]}<|end|><|assistant|>done<|end|>"
    sampled = sum(int(s.sampled_T.sum()) for s in result.segments)
    effort = result.effort
    assert effort.thinking_tokens == sum(len(result.messages[i].text) + 1 for i in result.summaries)
    assert effort.thinking_tokens + effort.call_tokens + effort.final_tokens == sampled
    for segment in result.segments:
        assert set(segment.message_T[segment.sampled_T].tolist()) <= {i for i, m in enumerate(result.messages) if m.role == "assistant"}


def test_a_summary_may_end_the_rollout(play, engine_chat):
    big = {"README.md": "x" * 3000}
    assert play(engine_chat([READ]), config(compact_at=700, window=1000), files=big).stop is StopReason.OUT_OF_CONTEXT
    result = play(engine_chat(lambda context: READ), config(compact_at=200, window=1500, max_turns=4), files={"README.md": "x" * 300})
    assert result.stop is StopReason.OUT_OF_TURNS
    assert result.summaries == (4, 9)
    assert all(not result.messages[i].results for i in range(len(result.messages)) if i - 1 in result.summaries)  # its calls are not run


def test_compaction_works_for_chats_without_tokens(play):
    def policy(messages):
        if messages[-1].text == ASK:
            return "short"
        return "done" if any("Your summary" in m.text for m in messages) else READ

    result = play(policy, config(compact_at=100, window=2000), files={"README.md": "x" * 600})
    assert (result.stop, len(result.summaries)) == (StopReason.DONE, 1)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    replies=st.lists(
        st.sampled_from([READ, TEST, FIX, "<|think|>t<|/think|>" + READ, READ + "\n" + TEST, '<call name="x">', "<|think|>endless", ASK]),
        max_size=8,
    ),
    compact_at=st.sampled_from([0, 150, 400]),
    max_turn_tokens=st.sampled_from([5, 60, 500]),
)
def test_whatever_is_sampled_the_record_adds_up(play, engine_chat, replies, compact_at, max_turn_tokens):
    chat = engine_chat([*replies, *["done"] * 30])
    result = play(chat, config(compact_at=compact_at, max_turn_tokens=max_turn_tokens, max_tokens=900, window=700, max_turns=12))
    effort = result.effort
    sampled = sum(int(s.sampled_T.sum()) for s in result.segments)
    assert effort.thinking_tokens + effort.call_tokens + effort.final_tokens == sampled <= 900
    assert all(len(s.ids_T) <= 700 for s in result.segments)
    assert all(s.sampled_T.any() for s in result.segments)
    for before, after in zip(result.messages, result.messages[1:], strict=False):
        if after.role == "tool":
            assert [r.call_id for r in after.results] == [c.id for c in before.calls]


# ---------------------------------------------------------------------------------------------------
# Size


def test_500_calls_keep_memory_bounded(play, engine_chat):
    """Each call reads 200 kB and keeps 150 characters of it: 100 MB pass through, a few stay."""
    files = {"README.md": "x" * 200_000}
    chat = engine_chat([READ] * 500 + ["done"])
    limits = config(max_turns=600, max_tokens=10**6, window=10**6)
    gc.collect()
    tracemalloc.start()
    try:
        result = play(chat, limits, ToolPolicy(max_result_chars=150), files=files)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.stop, result.effort.calls, result.effort.turns) == (StopReason.DONE, 500, 501)
    assert len(result.segments[0].ids_T) > 100_000
    assert peak < 40 * 2**20
