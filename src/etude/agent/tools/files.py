"""read_file, edit_file, list_dir."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import INTEGER, TEXT, Desk, Tool
from etude.protocols import ToolSpec


async def read_file(desk: Desk, arguments: Mapping[str, Any]) -> str:
    return await desk.ask_text("read", arguments)


async def edit_file(desk: Desk, arguments: Mapping[str, Any]) -> str:
    return await desk.ask_text("edit", arguments)


async def list_dir(desk: Desk, arguments: Mapping[str, Any]) -> str:
    return await desk.ask_text("list", {"path": arguments.get("path", ".")})


READ_FILE = Tool(
    spec=ToolSpec(
        name="read_file",
        description="Read a text file, or its lines start to end.",
        parameters={
            "path": (TEXT, True, "file to read"),
            "start": (INTEGER, False, "first line, from 1"),
            "end": (INTEGER, False, "last line"),
        },
    ),
    run=read_file,
)
EDIT_FILE = Tool(
    spec=ToolSpec(
        name="edit_file",
        description="Replace text in a file. An empty old creates the file. Several files: several calls.",
        parameters={
            "path": (TEXT, True, "file to change or create"),
            "old": (TEXT, True, "exact text to replace; it must occur once"),
            "new": (TEXT, True, "text to put there"),
        },
    ),
    run=edit_file,
)
LIST_DIR = Tool(
    spec=ToolSpec(name="list_dir", description="List a folder.", parameters={"path": (TEXT, False, "folder, default the workspace")}),
    run=list_dir,
)
