"""glob and grep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import TEXT, Desk, Tool
from etude.protocols import ToolSpec


async def glob(desk: Desk, arguments: Mapping[str, Any]) -> str:
    return await desk.ask_text("glob", {"pattern": arguments["pattern"]})


async def grep(desk: Desk, arguments: Mapping[str, Any]) -> str:
    request = {"pattern": arguments["pattern"], "path": arguments.get("path", "."), "glob": arguments.get("glob", "")}
    return await desk.ask_text("grep", request)


GLOB = Tool(
    spec=ToolSpec(name="glob", description="Find files by name.", parameters={"pattern": (TEXT, True, "such as **/test_*.py")}),
    run=glob,
)
GREP = Tool(
    spec=ToolSpec(
        name="grep",
        description="Search file contents; answers path:line:text.",
        parameters={
            "pattern": (TEXT, True, "regular expression"),
            "path": (TEXT, False, "file or folder, default the workspace"),
            "glob": (TEXT, False, "only files with such names, such as *.py"),
        },
    ),
    run=grep,
)
