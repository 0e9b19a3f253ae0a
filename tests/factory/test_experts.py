"""Expert traces: played in real sandboxes, remembered test runs are the real ones, and the right ones really solve the task."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.agent.loop import AgentConfig, run_agent
from etude.factory.corpus import CorpusConfig, build_corpus, code_texts, corpus_hash, trace_document
from etude.factory.experts import Expert, ExpertConfig, RememberedTests, Trace, changed_lines, expert_traces, stub_of
from etude.records import Message, ToolError, ToolResult
from etude.sandbox.open import open_host
from etude.sandbox.probe import probe
from etude.tasks.grade import grade
from etude.tasks.source import kata_of, make_task
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import ByteTokenizer
from etude.trainer.documents import read_shard

needs_sandbox = pytest.mark.skipif(not probe().works, reason="needs user namespaces; see `etude doctor`")
AGENT = AgentConfig(prompt="none", instructions=False, max_turns=12)


def said(messages: tuple[Message, ...]) -> list[object]:
    return [[m.role, m.text, [(c.name, c.arguments) for c in m.calls], [(r.text, r.error) for r in m.results]] for m in messages]


@needs_sandbox
def test_remembered_tests_change_nothing_and_the_right_traces_solve_the_task() -> None:
    async def go() -> None:
        host = open_host()
        try:
            outcomes = set()
            for seed in (3, 8):
                task = make_task(seed, "pretrain")
                kata = kata_of(task)[1]
                remembered = await expert_traces(task, kata, host, count=5, seed=seed, config=ExpertConfig(), agent=AGENT)
                image = await host.add_image({p: t.encode() for p, t in task.files})
                for i, trace in enumerate(remembered):
                    sandbox = await host.create(image)
                    expert = Expert(task, kata, ExpertConfig(), random.Random(seed * 1_000_003 + i))
                    run = await run_agent(task.prompt, expert, sandbox, AGENT)
                    report = await grade(task, await sandbox.diff(), host)
                    await sandbox.destroy()
                    assert said(run.messages) == said(trace.messages)
                    assert report.solved == trace.solved_by_expert
                    outcomes.add(report.solved)
            assert outcomes == {True, False}
        finally:
            await host.close()

    asyncio.run(go())


@needs_sandbox
def test_a_trace_keeps_one_habit_from_its_first_call_to_its_last() -> None:
    """What a policy can learn to choose: traces that begin with a search test and mend more, and end solved more often."""

    async def go() -> list[Trace]:
        host = open_host()
        try:
            tasks = [make_task(seed, "pretrain") for seed in range(8)]
            config = ExpertConfig()
            return [
                trace
                for seed, task in enumerate(tasks)
                for trace in await expert_traces(task, kata_of(task)[1], host, count=25, seed=seed, config=config, agent=AGENT)
            ]
        finally:
            await host.close()

    traces = asyncio.run(go())
    calls = [[c.name for m in t.messages for c in m.calls] for t in traces]
    careful = [t for t, names in zip(traces, calls, strict=True) if names[0] == "grep"]
    hasty = [t for t, names in zip(traces, calls, strict=True) if names[0] != "grep"]
    assert 0.25 < len(careful) / len(traces) < 0.55
    assert all("grep" not in names[1:] for names in calls)

    def share(which: list[Trace], holds: Callable[[Trace], bool]) -> float:
        return sum(map(holds, which)) / len(which)

    def tests(trace: Trace) -> bool:
        return any(c.name == "run_terminal" for m in trace.messages for c in m.calls)

    assert share(careful, tests) > share(hasty, tests) + 0.3
    assert share(careful, lambda t: t.solved_by_expert) > share(hasty, lambda t: t.solved_by_expert) + 0.2


def test_an_edit_of_the_changed_lines_leaves_the_file_a_whole_one_would() -> None:
    shorter = 0
    for seed in range(150):
        task = make_task(seed, "pretrain")
        kata = kata_of(task)[1]
        text = dict(task.files)[kata.path]
        wrong = random.Random(seed).choice(kata.wrong_bodies)
        file = text.replace(stub_of(kata), wrong)
        old, new = changed_lines(file, wrong, kata.correct_body)
        assert file.count(old) == 1
        assert file.replace(old, new) == text.replace(stub_of(kata), kata.correct_body)
        shorter += len(old) < len(wrong)
    assert shorter > 20


@needs_sandbox
def test_remembered_tests_see_edits() -> None:
    async def go() -> None:
        host = open_host()
        try:
            files = {"a.py": "X = 1\n", "test_a.py": "from a import X\n\n\ndef test_x():\n    assert X == 1\n"}
            sandbox = await host.create(await host.add_image({p: t.encode() for p, t in files.items()}))
            front = RememberedTests(sandbox, files)
            run = {"command": "pytest -q test_a.py", "timeout_s": 20}
            good = await front.call("exec", run)
            await front.call("edit", {"path": "a.py", "old": "X = 1", "new": "X = 2"})
            bad = await front.call("exec", run)
            await front.reset()
            again = await front.call("exec", run)
            assert (good["code"], bad["code"], again["code"]) == (0, 1, 0)
            assert again is good
        finally:
            await host.close()

    asyncio.run(go())


def test_the_loss_falls_on_what_the_policy_says_and_nothing_else() -> None:
    tokenizer = ByteTokenizer()
    renderer = EtudeRenderer(tokenizer)
    messages = [("user", "do it"), ("assistant", "<call"), ("tool", [["no", "bad_call"]]), ("assistant", "Done.")]
    ids, mask = trace_document(renderer, messages)
    spoken = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(spoken) == "<call<|end|>Done.<|end|>"
    result = Message(role="tool", results=(ToolResult(call_id="", name="", text="no", error=ToolError.BAD_CALL),))
    assert tokenizer.decode(renderer.render(result)) in tokenizer.decode(ids)


@needs_sandbox
def test_a_corpus_is_the_same_bytes_again_and_resumes(tmp_path: Path) -> None:
    config = CorpusConfig(tasks=4, part_tasks=2, traces_per_task=2, function_packages=5, packages=30, heldout_tasks=2, vocab_size=400)

    async def build(out: Path) -> None:
        host = open_host()
        try:
            await build_corpus(config, out, host)
        finally:
            await host.close()

    asyncio.run(build(tmp_path / "one"))
    (tmp_path / "two" / "traces").mkdir(parents=True)
    part = "train-000000.jsonl"
    (tmp_path / "two" / "traces" / part).write_bytes((tmp_path / "one" / "traces" / part).read_bytes())
    asyncio.run(build(tmp_path / "two"))
    names = sorted(str(p.relative_to(tmp_path / "one")) for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert len(names) >= 9
    for name in names:
        if name.endswith(".npz"):
            a, b = read_shard(tmp_path / "one" / name), read_shard(tmp_path / "two" / name)
            assert (a.ids_N == b.ids_N).all(), name
            assert (a.mask_N == b.mask_N).all(), name
        else:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    about = json.loads((tmp_path / "one" / "corpus.json").read_text())
    assert about["hash"] == corpus_hash(config)
    assert about["traces"] == 12


def test_code_texts_hold_right_and_wrong_bodies() -> None:
    texts = list(code_texts(CorpusConfig(), range(40)))
    assert len(texts) > 100
    assert texts == list(code_texts(CorpusConfig(), range(40)))
    for text in texts:
        compile(text, "kata", "exec")
