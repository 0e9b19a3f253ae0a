"""Compaction (M11): the policy condenses its own history and goes on from prompt + summary + state.

The question is one sentence; how to answer it well is learned, for the summary's tokens are part of the trajectory and earn its
reward. State that the harness knows for certain (todos, files touched, how many summaries came before) is carried beside the summary,
so it cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from etude.agent.tools.todo import todo_lines

ASK = "Summarise, without calling a tool, what you have learned and done and what remains, for your memory is about to be cleared."


def carried_text(summary: str, todos: list[tuple[bool, str]], touched: Iterable[str], earlier: int) -> str:
    """The message a new segment continues from."""
    parts = [f"Your summary of the work so far ({earlier} before it):\n{summary.strip() or '(empty)'}"]
    if todos:
        parts.append(f"Your todo list:\n{todo_lines(todos)}")
    files = ", ".join(touched)
    if files:
        parts.append(f"Files you edited: {files}")
    return "\n\n".join(parts)
