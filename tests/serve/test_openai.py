"""The real `openai` package against the server: chat, streaming, tools, log-probs, stops, seeds, n, and every error it knows."""

import asyncio
import json

import numpy as np
import pytest

from etude.errors import EngineError
from etude.protocols import GenerateRequest
from etude.records import Sampling

openai = pytest.importorskip("openai", reason="the package openai is not installed; `pip install 'etude[test]'` brings it")

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
GREP = {
    "type": "function",
    "function": {
        "name": "grep",
        "description": "find text",
        "parameters": {
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "description": "what to find"},
                "count": {"type": "integer"},
                "deep": {"type": "boolean"},
                "paths": {"type": "array"},
            },
            "required": ["pattern"],
        },
    },
}
CALLS = (
    'Let me look.\n<call name="grep">\n<pattern>a </b></pattern>\n<count>3</count>\n<deep>true</deep>\n<paths>["x"]</paths>\n</call>'
    '\n<call name="grep">\n<pattern>"7"</pattern>\n<count>many</count>\n</call>'
)


def run(desk, scene, replies, *, key="", engine=None, **options):
    async def main():
        async with (
            asyncio.timeout(600),
            desk.served(engine or desk.scripted(replies, **options), api_key=key) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0) as client,
        ):
            await scene(client, server)

    asyncio.run(main())


def test_chat(desk):
    async def scene(client, server):
        got = await client.chat.completions.create(model="scripted", messages=HELLO)
        assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("Hi there.", "stop")
        assert got.choices[0].message.role == "assistant"
        prompt = "<|system|>Be brief.<|end|><|user|>hello<|end|><|assistant|>"
        assert prompts == [prompt]
        n = len(server.tokenizer.encode_markup(prompt))
        assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (n, 10, n + 10)
        cut = await client.chat.completions.create(model="scripted", messages=HELLO, max_completion_tokens=2)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hi", "length")
        assert [m.id async for m in client.models.list()] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"

    prompts = []
    run(desk, scene, lambda context: prompts.append(context) or "Hi there.")


def test_a_stream_says_what_the_answer_would_and_its_usage(desk):
    async def scene(client, server):
        for extra in ({}, {"n": 3}):
            stream = await client.chat.completions.create(
                model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}, **extra
            )
            texts, ends, usage = {}, {}, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                    if choice.finish_reason:
                        ends[choice.index] = choice.finish_reason
            n = extra.get("n", 1)
            assert texts == dict.fromkeys(range(n), "one \u00e9 two")
            assert ends == dict.fromkeys(range(n), "stop")
            assert usage.completion_tokens == n * 11

    run(desk, scene, lambda context: "one \u00e9 two")


def test_tools_are_described_called_and_answered(desk):
    async def scene(client, server):
        ask = {"model": "scripted", "messages": HELLO, "tools": [GREP]}
        got = await client.chat.completions.create(**ask)
        choice = got.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        calls = choice.message.tool_calls
        assert [c.function.name for c in calls] == ["grep", "grep"]
        assert json.loads(calls[0].function.arguments) == {"pattern": "a </b>", "count": 3, "deep": True, "paths": ["x"]}
        assert json.loads(calls[1].function.arguments) == {"pattern": '"7"', "count": "many"}
        assert len({c.id for c in calls}) == 2

        streamed = {}
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                streamed[call.index] = (call.function.name, call.function.arguments)
            last = chunk.choices[0].finish_reason or None
        assert streamed == {i: (c.function.name, c.function.arguments) for i, c in enumerate(calls)}
        assert last == "tool_calls"

        results = [{"role": "tool", "tool_call_id": c.id, "content": f"result {i}"} for i, c in enumerate(calls)]
        follow = [*HELLO, choice.message.model_dump(exclude_none=True), *results]
        await client.chat.completions.create(model="scripted", messages=follow, tools=[GREP])
        assert "- grep(pattern, count?, deep?, paths?): find text" in prompts[0]
        assert "Write a call like this" in prompts[0]
        assert prompts[2] == (
            prompts[0] + CALLS + "<|end|><|tool|><result>result 0</result>\n<result>result 1</result><|end|><|assistant|>"
        )

        await client.chat.completions.create(**ask, tool_choice="none")
        assert "grep" not in prompts[3]
        plain = await client.chat.completions.create(model="scripted", messages=HELLO)
        assert plain.choices[0].message.content == CALLS  # a client that gave no tools reads the calls itself

    prompts = []
    run(desk, scene, lambda context: prompts.append(context) or CALLS)


def test_a_broken_call_is_left_to_the_client(desk):
    async def scene(client, server):
        got = await client.chat.completions.create(model="scripted", messages=HELLO, tools=[GREP])
        assert got.choices[0].message.content == 'hm\n<call name="grep">\n<pattern>x'
        assert (got.choices[0].message.tool_calls, got.choices[0].finish_reason) == (None, "stop")

    run(desk, scene, lambda context: 'hm\n<call name="grep">\n<pattern>x')


def test_reasoning_comes_apart(desk):
    async def scene(client, server):
        got = await client.chat.completions.create(model="scripted", messages=HELLO)
        assert (got.choices[0].message.content, got.choices[0].message.reasoning_content) == ("yes", "why")
        said = ""
        async for chunk in await client.chat.completions.create(model="scripted", messages=HELLO, stream=True):
            said += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        assert said == "why"

    run(desk, scene, lambda context: "<|think|>why<|/think|>yes")


def test_log_probs_and_token_ids_are_those_of_the_engine(desk):
    async def scene(client, server):
        ask = {"model": "scripted", "messages": HELLO, "logprobs": True, "extra_body": {"return_token_ids": True}, "temperature": 0.5}
        got = await client.chat.completions.create(**ask)
        ids = got.choices[0].token_ids
        assert server.tokenizer.decode(ids) == "four<|end|>"
        rows = got.choices[0].logprobs.content
        assert [r.token for r in rows] == [*"four", "<|end|>"]
        assert bytes(rows[0].bytes) == b"f"
        own = await server.engine.generate(
            GenerateRequest(id="x", ids=got.prompt_token_ids, sampling=Sampling(temperature=0.5, stop_ids=(ids[-1],)))
        )
        assert tuple(ids) == own.ids
        assert np.allclose([r.logprob for r in rows], own.logprob_t1_T)
        assert np.allclose([r.sampling_logprob for r in rows], own.logprob_T)
        streamed, tokens = [], []
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                streamed += choice.logprobs.content if choice.logprobs else []
                tokens += getattr(choice, "token_ids", None) or []
        assert tokens == ids
        assert [r.logprob for r in streamed] == [r.logprob for r in rows]

    run(desk, scene, lambda context: "four")


def test_stop_strings_cut_the_text_and_end_the_work(desk):
    async def scene(client, server):
        for stream in (False, True):
            got = await client.chat.completions.create(model="scripted", messages=HELLO, stop=["\nUser:", "END"], stream=stream)
            if stream:
                text, reason = "", None
                async for chunk in got:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
            else:
                text, reason = got.choices[0].message.content, got.choices[0].finish_reason
            assert (text, reason) == ("answer", "stop")
        for _ in range(100):
            if not (await server.engine.stats())["running"]:
                break
            await asyncio.sleep(0.01)
        assert (await server.engine.stats())["running"] == 0
        assert (await server.engine.stats())["sampled_tokens"] < 100

    run(desk, scene, lambda context: "answer\nUser: next" + "x" * 3000)


def test_completions(desk):
    async def scene(client, server):
        got = await client.completions.create(model="scripted", prompt=["ab", "cde"], n=2, max_tokens=3, logprobs=0, seed=1)
        assert [c.text for c in got.choices] == ["ab+", "ab+", "cde", "cde"]
        assert [c.index for c in got.choices] == [0, 1, 2, 3]
        assert got.choices[0].logprobs.tokens == ["a", "b", "+"]
        assert got.choices[0].logprobs.text_offset == [0, 1, 2]
        assert got.usage.prompt_tokens == 5
        ids = await client.completions.create(model="scripted", prompt=[97, 98])
        assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("ab+more", "stop")
        text = ""
        async for chunk in await client.completions.create(model="scripted", prompt="ab", stream=True):
            text += chunk.choices[0].text
        assert text == "ab+more"
        seeds = [sampling.seed for _, _, sampling in server.engine.requests]
        assert len(set(seeds[:4])) == 4
        await client.completions.create(model="scripted", prompt=["ab", "cde"], n=2, max_tokens=3, seed=1)
        assert [s.seed for _, _, s in server.engine.requests][-4:] == seeds[:4]

    run(desk, scene, lambda context: context + "+more")


BAD = [
    ({"messages": []}, "messages", "no message"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text only"),
    ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]}, "messages[0].tool_call_id", "c9"),
    ({"temperature": -1}, "temperature", "number from 0"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"top_p": 2}, "top_p", "number from 0 to 1"),
    ({"top_p": 0}, None, "top_p"),
    ({"n": 0}, "n", "integer from 1"),
    ({"n": True}, "n", "integer"),
    ({"max_tokens": 0}, "max_tokens", "integer from 1"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"seed": "x"}, "seed", "integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "ask for 0"),
    ({"frequency_penalty": 1.0}, "frequency_penalty", "not served"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not served"),
    ({"tool_choice": "required"}, "tool_choice", "not served"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "cannot name a tool"),
    ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'"),
]


def test_what_is_wrong_with_a_request_is_named(desk):
    async def scene(client, server):
        for fields, param, why in BAD:
            for stream in (False, True):
                if stream and "stream_options" in fields:
                    continue
                with pytest.raises(openai.BadRequestError, match=why.replace("(", r"\(")) as caught:
                    await client.chat.completions.create(**({"model": "scripted", "messages": HELLO, "stream": stream} | fields))
                assert caught.value.param == param
                assert (caught.value.status_code, caught.value.type) == (400, "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as missing:
            await client.chat.completions.create(model="gpt", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="gpt"):
            await client.models.retrieve("gpt")
        with pytest.raises(openai.BadRequestError, match="window of 4096") as long:
            await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x" * 5000}])
        assert long.value.code == "context_length_exceeded"
        assert (await client.chat.completions.create(model="scripted", messages=HELLO)).choices[0].message.content == "ok"
        assert (await server.engine.stats())["running"] == 0

    run(desk, scene, lambda context: "ok")


def test_keys(desk):
    async def scene(client, server):
        assert (await client.chat.completions.create(model="scripted", messages=HELLO)).choices
        for wrong in ("other", "secret2", ""):
            status, body = await desk.ask(server.port, "/v1/chat/completions", {}, key=wrong)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.retrieve("scripted")

    run(desk, scene, lambda context: "ok", key="secret")


def test_a_full_engine_is_429_and_a_broken_one_503(desk):
    async def scene(client, server):
        server.engine.hold = asyncio.Event()
        held = asyncio.create_task(client.chat.completions.create(model="scripted", messages=HELLO))
        while not (await server.engine.stats())["running"]:
            await asyncio.sleep(0.005)
        for stream, n in ((False, 1), (True, 1), (False, 3), (True, 3)):
            with pytest.raises(openai.RateLimitError, match="come back later") as full:
                await client.chat.completions.create(model="scripted", messages=HELLO, stream=stream, n=n)
            assert full.value.response.headers["retry-after"] == "1"
        server.engine.hold.set()
        assert (await held).choices[0].message.content == "ok"
        retrying = client.with_options(max_retries=3)
        server.engine.hold = asyncio.Event()
        held = asyncio.create_task(retrying.chat.completions.create(model="scripted", messages=HELLO))
        again = asyncio.create_task(retrying.chat.completions.create(model="scripted", messages=HELLO))
        await asyncio.sleep(0.05)
        server.engine.hold.set()
        assert [c.choices[0].message.content for c in await asyncio.gather(held, again)] == ["ok", "ok"]
        await server.engine.close()
        with pytest.raises(openai.InternalServerError, match="closed") as broken:
            await client.chat.completions.create(model="scripted", messages=HELLO)
        assert (broken.value.status_code, broken.value.code) == (503, "engine_unavailable")

    run(desk, scene, lambda context: "ok", limit=1)


def test_an_engine_that_fails_in_the_middle_of_a_stream_is_an_error_event(desk):
    class Failing:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        async def generate_stream(self, request):
            async for piece in self._inner.generate_stream(request):
                yield piece
                if self._inner._sampled > 3:
                    raise EngineError("the engine lost its memory")

    async def scene(client, server):
        text = ""

        async def read():
            nonlocal text
            async for chunk in await client.chat.completions.create(model="scripted", messages=HELLO, stream=True):
                text += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="lost its memory"):
            await read()
        assert text == "long"
        assert (await server.engine.stats())["running"] == 0

    run(desk, scene, None, engine=Failing(desk.scripted(lambda context: "long story")))


def test_a_defect_is_a_500_that_does_not_end_the_server(desk, caplog):
    def defect(context):
        if "boom" in context:
            raise ZeroDivisionError
        return "ok"

    async def scene(client, server):
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as caught:
            await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "boom"}])
        assert caught.value.status_code == 500
        assert "ZeroDivisionError" in caplog.text
        assert (await client.chat.completions.create(model="scripted", messages=HELLO)).choices[0].message.content == "ok"

    run(desk, scene, defect)
