"""The system message: short, since a policy trained in this harness needs no manual (M19).

What it holds: who the agent is and how calls are written (mode "full"), or one line of tool names ("names"), or nothing ("none");
then the workspace's own AGENTS.md, bounded. With nothing to say there is no system message at all.
"""

from __future__ import annotations

from etude.agent.tools.registry import tool_schema
from etude.records import ToolPolicy, content_hash

SYSTEM = """You are a coding agent. You work in a repository through tools, and your working folder is its root.
Look before you edit, make the change that was asked for, run the tests that cover it, and finish with a short message that says what
you did and what you checked. Do not claim what you have not seen."""
INSTRUCTIONS = "Instructions of this repository (AGENTS.md):\n"


def system_text(policy: ToolPolicy, mode: str, instructions: str = "") -> str:
    """The text of the system message; empty when there is nothing to say."""
    parts = [SYSTEM if mode == "full" else "", tool_schema(policy, mode), INSTRUCTIONS + instructions if instructions else ""]
    return "\n\n".join(p for p in parts if p)


def bounded(instructions: str, limit: int) -> str:
    """The head of a long instructions file, with a note of the rest."""
    text = instructions.strip()
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[... {len(text) - limit} more characters in AGENTS.md]"


def prompt_hash(text: str) -> str:
    return content_hash("system", text)
