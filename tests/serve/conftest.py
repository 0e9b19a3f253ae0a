"""A server on loopback over an engine of the test's choice, and a client of raw HTTP beside the real packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from etude.fakes import ScriptedEngine
from etude.protocols import Engine
from etude.serve.app import App
from etude.serve.openai import Texts
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def scripted(replies: Any, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER, replies, **{"window": 4096} | options)


@contextlib.asynccontextmanager
async def served(engine: Engine, **options: Any) -> AsyncIterator[SimpleNamespace]:
    """The app on a port of its own; it drains at the end."""
    renderer = EtudeRenderer(TOKENIZER)
    texts = Texts(model="scripted", tokenizer=TOKENIZER, renderer=renderer, window=4096)
    app = App(engine, texts, **options)
    port = await app.server.start("127.0.0.1", 0)
    try:
        yield SimpleNamespace(app=app, engine=engine, port=port, url=f"http://127.0.0.1:{port}", tokenizer=TOKENIZER)
    finally:
        await app.server.drain(5.0)
        await engine.close()


async def talk(port: int, data: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


def post(path: str, body: Any, *, key: str = "", close: bool = True) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *(["Connection: close"] if close else [])]
    head += [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*head, "", ""]).encode() + data


async def ask(port: int, path: str, body: Any, *, key: str = "") -> tuple[int, Any]:
    """Status and JSON of one POST."""
    answer = await talk(port, post(path, body, key=key))
    head, _, data = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(data)


@pytest.fixture(scope="session")
def desk() -> SimpleNamespace:
    """The helpers above; test modules cannot import a conftest."""
    return SimpleNamespace(scripted=scripted, served=served, talk=talk, post=post, ask=ask, tokenizer=TOKENIZER)
