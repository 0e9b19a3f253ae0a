"""The wire: what a client may send, clients that leave or are slow, and a server that drains."""

import asyncio
import json
import socket

import pytest

from etude.serve.http import MAX_HEAD, HttpServer, Response, json_response

CHAT = "/v1/chat/completions"
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}


def run(scene):
    async def main():
        async with asyncio.timeout(600):
            await scene()

    asyncio.run(main())


def test_requests_share_a_connection_and_bodies_may_be_chunked(desk):
    async def scene():
        async with desk.served(desk.scripted(lambda c: "ok")) as server:
            body = json.dumps(HELLO).encode()
            chunked = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
            chunked += b"5\r\n" + body[:5] + b"\r\n" + f"{len(body) - 5:x};x=y\r\n".encode() + body[5:] + b"\r\n0\r\n\r\n"
            answer = await desk.talk(server.port, desk.post(CHAT, HELLO, close=False) + chunked)
            assert answer.count(b"HTTP/1.1 200") == 2
            assert answer.count(b'"content": "ok"') == 2
            assert server.app.statuses == {200: 2}

    run(scene)


BROKEN = [
    (b"hello\r\n\r\n", 400, "first line"),
    (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400, "not a header"),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400, "Content-Length"),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n", 413, "99999"),
    (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "hexadecimal"),
    (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400, "twice"),
    (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n", 413, "bytes"),
    (b"GET / HTTP/1.1\r\nA: " + b"x" * (MAX_HEAD + 10) + b"\r\n\r\n", 431, "larger"),
    (b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "nothing at /nowhere"),
    (b"GET /v1/completions HTTP/1.1\r\nConnection: close\r\n\r\n", 405, "takes POST"),
    (b"GET /engine/v1/stats HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "nothing at"),
    (b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: 3\r\n\r\n{x}", 400, "is not JSON"),
    (b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]", 400, "JSON object"),
]


def test_what_is_no_request_is_answered_and_ends_the_connection(desk):
    async def scene():
        async with desk.served(desk.scripted(lambda c: "ok"), max_body=1000) as server:
            for data, status, why in BROKEN:
                answer = await desk.talk(server.port, data)
                head, _, body = answer.partition(b"\r\n\r\n")
                assert int(head.split()[1]) == status, data
                assert why in json.loads(body)["error"]["message"]
            assert (await desk.ask(server.port, CHAT, HELLO))[0] == 200

    run(scene)


def test_a_client_that_sends_too_slowly_is_dropped():
    async def scene():
        async def handler(request):
            return json_response({})

        server = HttpServer(handler, refuse=lambda e: json_response(str(e), e.status), slow_s=0.05, idle_s=0.1)
        port = await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
        assert b" 408 " in await reader.readline()
        writer.close()
        silent, other = await asyncio.open_connection("127.0.0.1", port)
        assert await silent.read() == b""  # silent from the start: closed without a word
        other.close()
        await server.drain(1.0)

    run(scene)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_ends_the_work_for_it(desk, stream, how):
    async def scene():
        engine = desk.scripted(lambda c: "word " * 500)
        async with desk.served(engine) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            if not stream:
                engine.hold = asyncio.Event()
            writer.write(desk.post(CHAT, HELLO | {"stream": stream}))
            if stream:
                await reader.readuntil(b"data:")
                engine.hold = asyncio.Event()
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.001)
            if how == "reset":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.close()
            while (await engine.stats())["running"] or not server.app.statuses:
                await asyncio.sleep(0.001)
            assert server.app.statuses == {499: 1}
            engine.hold = None
            assert (await desk.ask(server.port, CHAT, HELLO))[0] == 200

    run(scene)


def test_a_drain_lets_requests_end_and_takes_no_more(desk):
    async def scene():
        engine = desk.scripted(lambda c: "done")
        async with desk.served(engine) as server:
            engine.hold = asyncio.Event()
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
            working = asyncio.create_task(desk.ask(server.port, CHAT, HELLO))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.001)
            draining = asyncio.create_task(server.app.server.drain(30.0))
            await asyncio.sleep(0.01)
            assert await idle.read() == b""
            idle_writer.close()
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", server.port)
            assert not draining.done()
            engine.hold.set()
            status, body = await working
            assert (status, body["choices"][0]["message"]["content"]) == (200, "done")
            assert await draining == 0

    run(scene)


def test_a_drain_that_runs_out_cuts_off_what_is_left_and_the_engine_is_free(desk):
    async def scene():
        engine = desk.scripted(lambda c: "never")
        async with desk.served(engine) as server:
            engine.hold = asyncio.Event()
            working = asyncio.create_task(desk.talk(server.port, desk.post(CHAT, HELLO)))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.001)
            assert await server.app.server.drain(0.05) == 1
            assert await working == b""
            assert (await engine.stats())["running"] == 0

    run(scene)


def test_a_kept_connection_is_told_that_the_server_drains():
    async def scene():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def handler(request):
            entered.set()
            await leave.wait()
            return Response(body=b"x", content_type="text/plain")

        server = HttpServer(handler, refuse=lambda e: json_response(str(e), e.status))
        port = await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await entered.wait()
        draining = asyncio.create_task(server.drain(30.0))
        await asyncio.sleep(0)
        leave.set()
        answer = await reader.read()
        assert b"Connection: close" in answer
        assert answer.endswith(b"x")
        assert await draining == 0
        writer.close()

    run(scene)
