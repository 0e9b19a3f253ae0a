"""A public agent against the server: mini-swe-agent, through its own client and its own tool calls.

It is heavy (litellm), so it need not share this environment: MINI_SWE_AGENT_PYTHON names an interpreter that has it.
The policy is scripted; what is tested is that agent and server understand each other over several turns, results of calls included.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys

import pytest

PYTHON = os.environ.get("MINI_SWE_AGENT_PYTHON") or (sys.executable if importlib.util.find_spec("minisweagent") else "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="mini-swe-agent is not installed; MINI_SWE_AGENT_PYTHON can name an interpreter that has it"),
]

AGENT = """
import json, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/scripted", model_kwargs={"api_base": sys.argv[1], "api_key": "none"}, cost_tracking="ignore_errors"
)
environment = LocalEnvironment(cwd=sys.argv[2])
agent = DefaultAgent(model, environment, system_template="You solve tasks.", instance_template="{{task}}", step_limit=5)
print(json.dumps(agent.run("write a file")))
"""
TURNS = [
    'I look first.\n<call name="bash">\n<command>ls -a && echo "<seen> & \\"quoted\\""</command>\n</call>',
    "<call name=\"bash\">\n<command>printf 'a\\nb\\n' > made.txt</command>\n</call>",
    'Done.\n<call name="bash">\n<command>echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made.txt</command>\n</call>',
]


def test_mini_swe_agent_works_through_a_task(desk, tmp_path):
    contexts = []

    def policy(context):
        contexts.append(context)
        return TURNS[len(contexts) - 1]

    async def scene():
        async with desk.served(desk.scripted(policy, window=100_000)) as server:
            env = {
                **os.environ,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "HOME": str(tmp_path),
            }
            (tmp_path / "work").mkdir()
            process = await asyncio.create_subprocess_exec(
                PYTHON, "-c", AGENT, f"{server.url}/v1", str(tmp_path / "work"),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
            )  # fmt: skip
            async with asyncio.timeout(300):
                out, err = await process.communicate()
            assert process.returncode == 0, err.decode()[-3000:]
            return out.decode(), server.app.statuses

    out, statuses = asyncio.run(scene())
    assert statuses == {200: 3}
    assert '"exit_status": "Submitted"' in out
    assert (tmp_path / "work" / "made.txt").read_text() == "a\nb\n"
    assert "- bash(command): Execute a bash command" in contexts[0]
    assert TURNS[0] in contexts[1]
    assert '<seen> & "quoted"' in contexts[1]
    assert contexts[2].startswith(contexts[1])
