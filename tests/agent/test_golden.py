"""Golden trajectories: whole scripted rollouts, token by token, compared with files under golden/.

A change of the tools' texts, the prompt, the renderer or the loop shows up here as a readable difference. What the policy sampled stands
between {{ and }}; everything else was written by the harness. When a change is meant, write the files anew and look at the diff:

    ETUDE_WRITE_GOLDEN=1 python -m pytest tests/agent/test_golden.py
"""

import os
from pathlib import Path

import pytest

from etude.agent.loop import AgentConfig, run_agent
from etude.records import ToolPolicy
from etude.text.calls import format_call

WRITE = bool(os.environ.get("ETUDE_WRITE_GOLDEN"))
GOLDEN = Path(__file__).parent / "golden"
FIX = format_call(
    "edit_file", {"path": "shop/stats.py", "old": "    raise NotImplementedError", "new": "    return sum(values) / len(values)"}
)
TEST = format_call("run_terminal", {"command": "pytest -q"})


def read(path, **lines):
    return format_call("read_file", {"path": path, **lines})


STORIES = {
    "repair": (
        AgentConfig(scrub=True),
        ToolPolicy(),
        [
            f"<|think|>The tests say what is wanted.<|/think|>I look first.\n{read('tests/test_stats.py')}\n{read('shop/stats.py')}",
            f"{FIX}\n{TEST}",
            "mean returns the average; tests/test_stats.py passes.",
        ],
    ),
    "mistakes": (
        AgentConfig(prompt="names", scrub=True),
        ToolPolicy(removed=("glob", "run_terminal.background"), strict_arguments=True, max_result_chars=200),
        [
            format_call("semantic_search", {"query": "mean"}),
            format_call("glob", {"pattern": "*"}) + "\n" + format_call("run_terminal", {"command": "pytest", "background": "true"}),
            read("shop/stats.py", start="one")
            + "\n"
            + read("shop/stats.py", colour="red")
            + "\n"
            + format_call("edit_file", {"path": "a"}),
            '<call name="read_file">\n<path>shop/stats.py\n</call>\n' + read("absent.py").replace("path", "file"),
            FIX.replace("NotImplementedError", "ValueError") + "\n" + read("tests/test_stats.py") + "\n" + read("long.txt"),
            "I give up.",
        ],
    ),
    "compaction": (
        AgentConfig(prompt="none", compact_at=272, window=2000, scrub=True, instructions=False),
        ToolPolicy(),
        [
            format_call("todo", {"items": "[x] read\n[ ] fix"}) + "\n" + read("shop/stats.py"),
            "<|think|>What matters?<|/think|>mean in shop/stats.py is missing; fix it and run the tests.",
            f"{FIX}\n{TEST}",
            "mean is fixed and tested.",
            "Fixed.",
        ],
    ),
    "out_of_tokens": (
        AgentConfig(prompt="none", instructions=False, max_tokens=150, scrub=True),
        ToolPolicy(),
        [TEST, read("README.md"), TEST],
    ),
}


def story(result, tokenizer):
    """A trajectory as text."""
    lines = [f"stop: {result.stop.value}", f"effort: {' '.join(f'{k}={getattr(result.effort, k)}' for k in EFFORT)}"]
    lines += [f"todos open: {list(result.todos_open)}", f"touched: {list(result.touched)}", f"summaries: {list(result.summaries)}"]
    lines += [f"{name}: {value}" for name, value in sorted(result.hashes.items())]
    for number, segment in enumerate(result.segments):
        lines += ["", f"==== segment {number}, parent {segment.parent}, {len(segment.ids_T)} tokens"]
        text, inside = "", False
        for id, sampled in zip(segment.ids_T.tolist(), segment.sampled_T.tolist(), strict=True):
            text += ("{{" if sampled and not inside else "}}" if inside and not sampled else "") + tokenizer.decode([id])
            inside = sampled
        lines.append(text + ("}}" if inside else ""))
    return "\n".join(lines) + "\n"


EFFORT = ("thinking_tokens", "call_tokens", "output_tokens", "final_tokens", "calls", "turns")


@pytest.mark.parametrize("name", sorted(STORIES))
def test_golden_trajectory(name, workspace, engine_chat, run):
    config, policy, replies = STORIES[name]
    chat = engine_chat(replies)

    async def main():
        files = {"AGENTS.md": "Tests live in tests/.\n", "long.txt": "0123456789" * 50}
        return await run_agent("Implement mean.", chat, await workspace(files), config, policy)

    text = story(run(main()), chat.tokenizer)
    path = GOLDEN / f"{name}.txt"
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_has_its_story():
    assert sorted(p.stem for p in GOLDEN.glob("*.txt")) == sorted(STORIES)
