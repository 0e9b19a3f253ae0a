import asyncio
import json
import os

import pytest

from etude.agent.chat import OpenAIChat
from etude.errors import ConfigError, EngineError, UserError
from etude.records import Finish, Message, Sampling, ToolCall, ToolResult, Version, seed_for

USER = Message(role="user", text="hello")


def test_engine_chat_keeps_what_was_sampled(engine_chat, run):
    chat = engine_chat(["<|think|>hm<|/think|>hi\n", "bye"])

    async def main():
        messages = [USER]
        first = await chat.reply(messages, max_tokens=50)
        messages += [first.message, Message(role="user", text="more")]
        assert chat.measure(messages) == len(chat.conversation.open_turn())
        messages.append((await chat.reply(messages, max_tokens=50)).message)
        return first, messages

    first, messages = run(main())
    assert (first.message.text, first.message.reasoning, first.finish) == ("hi\n", "hm", Finish.STOP)
    (segment,) = chat.segments()
    assert chat.tokenizer.decode(segment.ids_T.tolist()) == (
        "<|user|>hello<|end|><|assistant|><|think|>hm<|/think|>hi\n<|end|><|user|>more<|end|><|assistant|>bye<|end|>"
    )
    assert [(i, n, s.seed) for i, n, s in chat.engine.requests] == [
        ("chat.0", 8, seed_for(1, 0)),
        ("chat.1", len(segment.ids_T) - 4, seed_for(1, 1)),
    ]
    assert all(s.stop_ids == chat.conversation.stop_ids for _, _, s in chat.engine.requests)
    assert [m.span.start for m in chat.recorded(messages)] == [0, 7, 16, 22]


def test_the_recorded_transcript_ends_with_the_last_sampled_turn(engine_chat, run):
    chat = engine_chat(["hi"])

    async def main():
        messages = [USER]
        messages.append((await chat.reply(messages, max_tokens=50)).message)
        messages.append(Message(role="user", text="never seen"))
        chat.measure(messages)
        return messages

    messages = run(main())
    recorded = chat.recorded(messages)
    assert [m.text for m in recorded] == ["hello", "hi", "never seen"]
    assert recorded[2].span is None
    assert len(chat.segments()[0].ids_T) == recorded[1].span.end
    chat.restart([0])
    assert len(chat.segments()) == 1  # nothing was sampled in the second


def test_a_chat_refuses_a_transcript_that_changed(engine_chat, run):
    chat = engine_chat(["hi", "ho"])

    async def main():
        reply = await chat.reply([USER], max_tokens=5)
        again = [Message(role="user", text="hello"), reply.message.replace(span=None), USER]
        await chat.reply(again, max_tokens=5)  # equal by value is the same
        with pytest.raises(UserError, match="only extends"):
            chat.measure([USER])
        with pytest.raises(UserError, match="only extends"):
            chat.measure([Message(role="user", text="hullo"), *again[1:], reply.message])

    run(main())


def test_weights_that_change_in_flight_are_recorded_per_token(engine_chat, run):
    versions = [Version(lineage=0, ordinal=i, hash=f"{i:032x}") for i in (0, 1)]
    chat = engine_chat(["abcd"], version=versions[0])

    async def main():
        chat.engine.hold = asyncio.Event()
        replying = asyncio.create_task(chat.reply([USER], max_tokens=9))
        while not chat.engine.requests:
            await asyncio.sleep(0)
        chat.engine.hold.set()
        while (await chat.engine.stats())["sampled_tokens"] < 2:
            await asyncio.sleep(0)
        chat.engine.current = versions[1]
        await replying

    run(main())
    (segment,) = chat.segments()
    assert segment.versions == tuple(versions)
    assert segment.version_T[segment.sampled_T].tolist() == [0, 0, 1, 1, 1]


def test_cancelling_a_reply_cancels_its_request(engine_chat, run):
    chat = engine_chat(["abcd", "again"])

    async def main():
        chat.engine.hold = asyncio.Event()
        replying = asyncio.create_task(chat.reply([USER], max_tokens=9))
        while not (await chat.engine.stats())["running"]:
            await asyncio.sleep(0)
        replying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replying
        assert (await chat.engine.stats())["running"] == 0
        chat.engine.hold = None
        assert (await chat.reply([USER], max_tokens=9)).message.text == "again"  # the turn was not spoilt
        assert [m.text for m in chat.conversation.messages] == ["hello", "again"]

    run(main())


def test_a_deadline_ends_a_reply_with_what_it_has(engine_chat, run):
    chat = engine_chat(["abcd"])

    async def main():
        chat.deadline = asyncio.get_running_loop().time() - 1
        return await chat.reply([USER], max_tokens=9)

    assert run(main()).finish is Finish.DEADLINE


# ---------------------------------------------------------------------------------------------------
# OpenAI-compatible endpoints


class Endpoint:
    """A real HTTP server that answers with what the test says, and keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.lower().split("\r\n") if line.startswith("content-length")).split(":")[1])
        self.requests.append((head, json.loads(await reader.readexactly(length))))
        try:
            answer = self.answer if isinstance(self.answer, bytes) else await self.answer()
            writer.write(answer)
            await writer.drain()
        finally:
            writer.close()


def completion(message, finish="stop"):
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


def plain(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body):
    parts = b"".join(f"{len(body[i : i + 7]):x};x=1\r\n".encode() + body[i : i + 7] + b"\r\n" for i in range(0, len(body), 7))
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


def to_end(body):
    return b"HTTP/1.0 200 OK\r\n\r\n" + body


async def ask(answer, messages=(USER,), **options):
    async with Endpoint(answer) as endpoint:
        chat = OpenAIChat(endpoint.url, "some-model", **options)
        reply = await chat.reply(list(messages), max_tokens=33)
        return reply, endpoint.requests[0]


@pytest.mark.parametrize("form", [plain, chunked, to_end])
def test_a_reply_of_an_endpoint(run, form):
    body = completion({"content": 'ok\n<call name="glob">\n<pattern>\u00e9</pattern>\n</call>', "reasoning_content": "hm"})
    reply, (head, request) = run(ask(form(body), sampling=Sampling(temperature=0.5), seed=3))
    assert (reply.message.text, reply.message.reasoning, reply.finish, reply.generation) == ("ok", "hm", Finish.STOP, None)
    assert reply.message.calls[0].arguments == {"pattern": "\u00e9"}
    assert head.startswith("POST /v1/chat/completions HTTP/1.1")
    assert request["messages"] == [{"role": "user", "content": "hello"}]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("some-model", 33, 0.5)
    assert request["seed"] == seed_for(3, 0) % 2**31


def test_calls_and_results_travel_as_text(run):
    call = ToolCall(id="a", name="glob", arguments={"pattern": "*"})
    result = ToolResult(call_id="a", name="glob", text="x.py")
    messages = [USER, Message(role="assistant", text="t", calls=(call,)), Message(role="tool", results=(result,))]
    _, (_, request) = run(ask(plain(completion({"content": "<think>\nhm\n</think>\n\nhi"}, "length")), messages))
    assert [(m["role"], m["content"]) for m in request["messages"][1:]] == [
        ("assistant", 't\n<call name="glob">\n<pattern>*</pattern>\n</call>'),
        ("user", "<tool_response>\nx.py\n</tool_response>"),
    ]


def test_reasoning_in_the_text_is_taken_out(run):
    reply, _ = run(ask(plain(completion({"content": "<think>\nhm\n</think>\n\nhi"}, "length"))))
    assert (reply.message.reasoning, reply.message.text, reply.finish) == ("hm", "hi", Finish.LENGTH)


def test_the_key_is_a_reference(run):
    os.environ["ETUDE_TEST_KEY"] = "s3cret"
    try:
        _, (head, _) = run(ask(plain(completion({"content": ""})), api_key_ref="env:ETUDE_TEST_KEY"))
    finally:
        del os.environ["ETUDE_TEST_KEY"]
    assert "Authorization: Bearer s3cret" in head
    with pytest.raises(ConfigError, match="never as its value"):
        run(ask(plain(b""), api_key_ref="s3cret"))


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (plain(b"boom", "503 Busy"), EngineError, "answered 503: boom"),
        (plain(b"slow down", "429 Too Many"), EngineError, "answered 429"),
        (plain(b"no such model", "404 Not Found"), UserError, "answered 404: no such model"),
        (plain(b"not json"), EngineError, "no chat completion"),
        (plain(b'{"choices": []}'), EngineError, "no chat completion"),
        (plain(completion({"content": 3})), EngineError, "no chat completion"),
        (b"", EngineError, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", EngineError, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", EngineError, "is larger than"),
        (b"hello\r\n\r\n", EngineError, "is not HTTP"),
    ],
)
def test_errors_of_an_endpoint(run, answer, error, words):
    with pytest.raises(error, match=words):
        run(ask(answer))


def test_an_endpoint_that_is_not_there_or_never_answers(run):
    with pytest.raises(EngineError, match="cannot be reached"):
        run(OpenAIChat("http://127.0.0.1:1/v1", "m").reply([USER], max_tokens=1))
    with pytest.raises(UserError, match="give an address"):
        OpenAIChat("localhost:8000", "m")

    async def silent():
        released = asyncio.Event()

        async def answer():
            await released.wait()
            return b""

        async with Endpoint(answer) as endpoint:
            with pytest.raises(EngineError, match=r"did not answer within 0\.05 s"):
                await OpenAIChat(endpoint.url, "m", timeout_s=0.05).reply([USER], max_tokens=1)
            released.set()

    run(silent())


def test_a_restarted_chat_sends_what_was_kept_and_what_came_after(run):
    async def main():
        async with Endpoint(plain(completion({"content": "summary"}))) as endpoint:
            chat = OpenAIChat(endpoint.url, "m")
            messages = [USER, Message(role="user", text="long")]
            messages.append((await chat.reply(messages, max_tokens=5)).message)
            before = chat.measure(messages)
            chat.restart([0])
            messages.append(Message(role="user", text="go on"))
            assert 0 < chat.measure(messages) < before
            messages.append((await chat.reply(messages, max_tokens=5)).message)
            messages.append(Message(role="user", text="on"))
            await chat.reply(messages, max_tokens=5)
            return [[m["content"] for m in body["messages"]] for _, body in endpoint.requests]

    assert run(main()) == [["hello", "long"], ["hello", "go on"], ["hello", "go on", "summary", "on"]]
