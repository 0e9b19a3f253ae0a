"""todo: the list the policy keeps of what it means to do. The harness holds it; compaction carries it on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import TEXT, Desk, Refused, Tool
from etude.protocols import ToolSpec
from etude.records import ToolError

_ITEM = re.compile(r"\s*(?:[-*]\s*)?\[([ xX])\]\s*(\S.*?)\s*")


async def todo(desk: Desk, arguments: Mapping[str, Any]) -> str:
    """Replace the list."""
    items = []
    for line in arguments["items"].splitlines():
        if not line.strip():
            continue
        match = _ITEM.fullmatch(line)
        if match is None:
            raise Refused(ToolError.BAD_ARGUMENTS, f"each line of items begins with [ ] or [x]; found {line.strip()[:60]!r}")
        items.append((match[1] != " ", match[2]))
    desk.todos[:] = items
    return f"{len(items)} items, {sum(not done for done, _ in items)} open"


def todo_lines(todos: list[tuple[bool, str]]) -> str:
    return "\n".join(f"[{'x' if done else ' '}] {item}" for done, item in todos)


TODO = Tool(
    spec=ToolSpec(
        name="todo",
        description="Write down the steps of your plan; each call replaces the list.",
        parameters={"items": (TEXT, True, "one item a line, [ ] open or [x] done")},
    ),
    run=todo,
)
