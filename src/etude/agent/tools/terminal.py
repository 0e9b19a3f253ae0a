"""run_terminal: commands, and background jobs that end with the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import FLAG, TEXT, Desk, Refused, Tool, output_text
from etude.errors import InfraError, SandboxError
from etude.protocols import ToolSpec
from etude.records import ToolError

ANSWER_ROOM_S = 10.0
"""The tool server stops a command itself; the client waits this much longer before it calls the sandbox dead."""
KILL_TIMEOUT_S = 5.0


async def run_terminal(desk: Desk, arguments: Mapping[str, Any]) -> str:
    action = arguments.get("action", "run")
    if action == "run":
        if not arguments.get("command", "").strip():
            raise Refused(ToolError.BAD_ARGUMENTS, "running needs a command; to look at a job give job and action=poll or kill")
        return await (_start if arguments.get("background") else _run)(desk, arguments["command"])
    job = arguments.get("job", "").strip()
    if not job:
        raise Refused(ToolError.BAD_ARGUMENTS, f"action={action} needs the job it is about; jobs: {', '.join(desk.jobs) or 'none'}")
    return await (_poll if action == "poll" else _kill)(desk, job)


async def _run(desk: Desk, command: str) -> str:
    limit = desk.command_timeout_s
    answer = await desk.ask("exec", {"command": command, "timeout_s": limit}, timeout_s=limit + ANSWER_ROOM_S)
    if answer.get("timed_out"):
        raise Refused(ToolError.TIMEOUT, _with_notes(answer, [f"stopped after {limit:g} s"]))
    return _with_notes(answer, _ending(answer))


async def _start(desk: Desk, command: str) -> str:
    """The start is finished even when the rollout is cancelled meanwhile, so that the job is known and can be killed."""
    start = asyncio.ensure_future(desk.ask("job_start", {"command": command}))
    desk.starting.add(start)
    answer = await asyncio.shield(start)
    desk.starting.discard(start)
    job = _job_of(answer)
    desk.jobs[job] = None
    return f"started job {job}; action=poll shows its output, action=kill ends it"


async def _poll(desk: Desk, job: str) -> str:
    answer = await desk.ask("job_poll", {"job": job})
    if answer.get("running"):
        return _with_notes(answer, ["still running"])
    desk.jobs.pop(job, None)
    return _with_notes(answer, _ending(answer) or ["exit 0"])


async def _kill(desk: Desk, job: str) -> str:
    answer = await desk.ask("job_kill", {"job": job})
    desk.jobs.pop(job, None)
    return _with_notes(answer, [f"killed job {job}"])


async def end_jobs(desk: Desk) -> None:
    """Kill every job of the rollout. A sandbox that cannot answer takes its jobs with it when it is destroyed."""
    for answer in await asyncio.gather(*desk.starting, return_exceptions=True):
        if isinstance(answer, dict):
            desk.jobs[_job_of(answer)] = None
    desk.starting.clear()
    for job in list(desk.jobs):
        try:
            await desk.sandbox.call("job_kill", {"job": job}, timeout_s=KILL_TIMEOUT_S)
        except InfraError:
            pass
    desk.jobs.clear()


def _job_of(answer: Mapping[str, Any]) -> str:
    if "job" not in answer:
        raise SandboxError("the tool server answered 'job_start' without a job; its version does not fit this harness")
    return str(answer["job"])


def _ending(answer: Mapping[str, Any]) -> list[str]:
    notes = []
    if answer.get("limit"):
        notes.append(f"stopped by the {answer['limit']} limit")
    if answer.get("code"):
        notes.append(f"exit {answer['code']}")
    return notes


def _with_notes(answer: Mapping[str, Any], notes: list[str]) -> str:
    """Output, then what there is to say about it in brackets. A silent success says so."""
    text = output_text(answer)
    if answer.get("dropped_bytes"):
        notes = [f"{answer['dropped_bytes']} bytes of output dropped", *notes]
    lines = [text] if text else []
    lines += [f"[{note}]" for note in notes]
    return "\n".join(lines) or "[no output]"


RUN_TERMINAL = Tool(
    spec=ToolSpec(
        name="run_terminal",
        description="Run a shell command in the workspace, or look after a background job.",
        parameters={
            "command": (TEXT, False, "command line; needed unless action is poll or kill"),
            "background": (FLAG, False, "true starts a job and answers its id at once"),
            "job": (TEXT, False, "job id for poll and kill"),
            "action": ("run|poll|kill", False, "default run"),
        },
    ),
    run=run_terminal,
    from_commands=True,
)
