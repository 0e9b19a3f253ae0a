"""The agent's tools on a real sandbox: what the in-memory twin promises, the namespace backend does."""

from __future__ import annotations

import asyncio

import pytest

from etude.agent.toolbox import Toolbox
from etude.agent.tools.base import Desk
from etude.records import ToolCall, ToolPolicy
from etude.sandbox.open import open_host
from etude.sandbox.probe import probe

pytestmark = pytest.mark.skipif(not probe().works, reason="needs user namespaces; see `etude doctor`")

FILES = {
    "shop/stats.py": b"def mean(values):\n    raise NotImplementedError\n",
    "tests/test_stats.py": b"from shop.stats import mean\n\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n",
    "shop/__init__.py": b"",
    "conftest.py": b"",
}


def test_a_task_is_read_edited_tested_and_its_background_jobs_end_with_it():
    async def main() -> None:
        host = open_host("namespace")
        try:
            sandbox = await host.create(await host.add_image(FILES))
            toolbox = Toolbox(Desk(sandbox=sandbox), ToolPolicy())

            async def use(name: str, **arguments: str) -> str:
                (result,) = await toolbox.act([ToolCall(id="c", name=name, arguments=arguments)])
                return result.text

            assert "raise NotImplementedError" in await use("read_file", path="shop/stats.py")
            assert "NotImplementedError" in await use("run_terminal", command="pytest tests/test_stats.py")
            await use("edit_file", path="shop/stats.py", old="    raise NotImplementedError", new="    return sum(values) / len(values)")
            assert "[exit" not in await use("run_terminal", command="pytest tests/test_stats.py")
            assert (await use("grep", pattern="def mean")).startswith("shop/stats.py:1:")
            assert "shop/stats.py" in await use("glob", pattern="**/*.py")

            started = await use("run_terminal", command="echo up; sleep 300", background="true")
            assert started.startswith("started job 1")
            await use("run_terminal", command="sleep 301", background="true")
            for _ in range(200):
                if "up" in (seen := await use("run_terminal", job="1", action="poll")):
                    break
                await asyncio.sleep(0.02)
            assert "up" in seen
            assert "[still running]" in seen
            assert "[killed job 1]" in await use("run_terminal", job="1", action="kill")
            await toolbox.close()
            left = (await sandbox.exec(["sh", "-c", "ps ax 2>/dev/null || cat /proc/[0-9]*/cmdline"])).output
            assert b"sleep 30" not in left.replace(b"\0", b" ")
            await sandbox.destroy()
            assert (await host.stats())["live"] == 0  # type: ignore[attr-defined]
        finally:
            await host.close()

    asyncio.run(main())
