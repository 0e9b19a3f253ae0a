"""read_lints: ruff where the sandbox has it, else Python's own compile errors. The result says which it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import TEXT, Desk, Refused, Tool, output_text
from etude.protocols import ToolSpec
from etude.records import ToolError

LINT_TIMEOUT_S = 30.0
NOT_FOUND = (126, 127)
"""Exit status of a command that is not there or cannot be run."""
COMPILE = """
import os, sys
top = sys.argv[1]
if not os.path.exists(top):
    sys.exit(f"no such path: {top}")
files = [top] if os.path.isfile(top) else sorted(
    os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names if name.endswith(".py")
)
for path in files:
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
        print(f"{os.path.relpath(path)}:{line}:{column}: {getattr(error, 'msg', error)}")
"""


async def read_lints(desk: Desk, arguments: Mapping[str, Any]) -> str:
    path = arguments.get("path", ".")
    if desk.has_ruff:
        answer = await _exec(desk, ["ruff", "check", "--no-cache", "--quiet", "--output-format=concise", "--", path])
        if answer is not None:
            return _report("ruff", answer, problems=1)
        desk.has_ruff = False
    answer = await _exec(desk, ["python3", "-c", COMPILE, path])
    if answer is None:
        raise Refused(ToolError.FAILED, "this environment has neither ruff nor python3; check the code by running it")
    return _report("compile check, for ruff is not installed here", answer, problems=0)


async def _exec(desk: Desk, argv: list[str]) -> dict[str, Any] | None:
    """The answer, or None when there is no such command."""
    try:
        answer = await desk.ask("exec", {"argv": argv, "timeout_s": LINT_TIMEOUT_S}, timeout_s=LINT_TIMEOUT_S + 10.0)
    except Refused as refused:
        if refused.error is ToolError.FAILED:
            return None
        raise
    return None if answer.get("code") in NOT_FOUND else answer


def _report(checker: str, answer: Mapping[str, Any], *, problems: int) -> str:
    text = output_text(answer)
    if answer.get("timed_out"):
        raise Refused(ToolError.TIMEOUT, f"{checker}: stopped after {LINT_TIMEOUT_S:g} s; give a smaller path")
    if answer.get("code") not in (0, problems):
        raise Refused(ToolError.FAILED, f"{checker}: {text}")
    return f"{checker}:\n{text}" if text else f"{checker}: no problems"


READ_LINTS = Tool(
    spec=ToolSpec(
        name="read_lints",
        description="Problems a linter finds in Python files.",
        parameters={"path": (TEXT, False, "file or folder, default the workspace")},
    ),
    run=read_lints,
    from_commands=True,
)
