"""What a turn of the agent costs beside the model: rendering, parsing, tools, the record of every token.

Ours is the whole harness (token-exact conversation over a scripted engine, real sandbox). The peer is the simplest thing
that agents do: one fresh `subprocess` per action in a working folder, and no record of tokens at all. A published
harness aims at less than 50 ms a turn.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
import tracemalloc
from pathlib import Path

from etude.agent.chat import EngineChat
from etude.agent.loop import AgentConfig, run_agent
from etude.bench import Row
from etude.fakes import ScriptedEngine, memory_sandbox
from etude.protocols import Sandbox
from etude.records import Sampling
from etude.sandbox.open import open_host
from etude.text.calls import format_call
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import ByteTokenizer

FILE = "def double(x):\n    return 2 * x\n" * 20
READ = format_call("read_file", {"path": "shop/ops.py"})
COMMAND = format_call("run_terminal", {"command": "cat shop/ops.py | head -3"})
CONFIG = AgentConfig(prompt="names", instructions=False, max_turns=10_000, max_tokens=10**9, window=10**9, max_turn_tokens=10**6)


async def seconds_per_turn(sandbox: Sandbox, call: str, turns: int) -> float:
    """Wall clock of a rollout of `turns` calls, by turn."""
    tokenizer = ByteTokenizer()
    replies = iter([call] * turns + ["Done."])
    engine = ScriptedEngine(tokenizer, lambda context: next(replies))
    chat = EngineChat(engine, EtudeRenderer(tokenizer), tokenizer, Sampling(max_tokens=10**6), seed=0)
    start = time.perf_counter()
    run = await run_agent("Read it.", chat, sandbox, CONFIG)
    elapsed = time.perf_counter() - start
    assert run.effort.calls == turns
    assert all(r.error is None for m in run.messages for r in m.results)
    return elapsed / (turns + 1)


def cold(argv: list[str], folder: Path, turns: int) -> float:
    start = time.perf_counter()
    for _ in range(turns):
        subprocess.run(argv, cwd=folder, capture_output=True, check=True)
    return (time.perf_counter() - start) / turns


async def measure(turns: int) -> dict[str, float]:
    memory = await memory_sandbox({"shop/ops.py": FILE})
    out = {"loop": await seconds_per_turn(memory, READ, turns)}
    host = open_host()
    try:
        sandbox = await host.create(await host.add_image({"shop/ops.py": FILE.encode()}))
        await seconds_per_turn(sandbox, READ, 5)
        out["read"] = await seconds_per_turn(sandbox, READ, turns)
        out["command"] = await seconds_per_turn(sandbox, COMMAND, turns)
        await sandbox.destroy()
    finally:
        await host.close()
    return out


def run(device: str, quick: bool) -> list[Row]:
    turns = 40 if quick else 500
    ours = asyncio.run(measure(turns))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shop").mkdir()
        (folder / "shop" / "ops.py").write_text(FILE)
        read, command = cold(["cat", "shop/ops.py"], folder, turns), cold(["bash", "-c", "cat shop/ops.py | head -3"], folder, turns)
    tracemalloc.start()
    asyncio.run(seconds_per_turn_in_memory(turns))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def row(name: str, seconds: float, peer: float, peer_name: str) -> Row:
        return Row(name=name, unit="ms", ours=1e3 * seconds, peer=1e3 * peer, peer_name=peer_name, higher_is_better=False)

    return [
        Row(name="overhead per turn, tools in memory", unit="ms", ours=1e3 * ours["loop"], higher_is_better=False),
        row("turn that reads a file", ours["read"], read, "subprocess cat, unsandboxed"),
        row("turn that runs a command", ours["command"], command, "subprocess bash -c, unsandboxed"),
        Row(name=f"peak memory of a rollout of {turns} calls", unit="MiB", ours=peak / 2**20, higher_is_better=False),
    ]


async def seconds_per_turn_in_memory(turns: int) -> float:
    return await seconds_per_turn(await memory_sandbox({"shop/ops.py": FILE}), READ, turns)
