"""What the agent loop talks to.

`EngineChat` drives our engine token-exactly: it owns the `Conversation`, so nothing that was sampled is ever tokenised again.
`OpenAIChat` stands any OpenAI-compatible endpoint in for it, over the standard library alone; it gives text and no tokens.

Both see one transcript that only ever grows, also across a compaction: `restart(keep)` says that from here on the context holds the kept
messages of it and what is added afterwards. A message's number in the transcript is its number in the recorded segments.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from etude.agent.effort import estimated_tokens
from etude.config import secret
from etude.errors import EngineError, UserError
from etude.protocols import Engine, GenerateRequest, Reply
from etude.records import Finish, Message, Sampling, Segment, seed_for, to_dict
from etude.text.calls import assistant_message
from etude.text.conversation import Conversation
from etude.text.renderer import TurnRenderer, message_text, response_text

MAX_ANSWER_BYTES = 64 * 2**20


class Chat(Protocol):
    """`protocols.ChatClient` plus what compaction, limits and recording need."""

    deadline: float | None
    """Event-loop time at which a reply should end with what it has; None for no limit."""

    @property
    def hashes(self) -> Mapping[str, str]:
        """Content hashes of renderer and tokenizer, where there are such."""
        ...

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply: ...

    def measure(self, messages: Sequence[Message]) -> int:
        """Tokens of the context that the next reply would see."""
        ...

    def restart(self, keep: Sequence[int]) -> None:
        """Forget the context but for these messages of the transcript."""
        ...

    def recorded(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The transcript with the token spans of its messages, where there are tokens."""
        ...

    def segments(self) -> tuple[Segment, ...]: ...


class EngineChat:
    """One conversation with our engine.

    Request ids are `<id>.<turn>`, and the seed of a turn is seed_for(seed, turn): with noise that depends on (request seed, position)
    alone, a rollout samples the same tokens whatever else the engine is doing.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: TurnRenderer,
        tokenizer: Any,
        sampling: Sampling,
        *,
        seed: int,
        id: str = "chat",
        priority: int = 0,
        engine_build: str = "",
        numerics: str = "fast",
        cache_policy: str = "keep",
    ) -> None:
        self._engine = engine
        self._sampling = sampling.replace(seed=seed, stop_ids=renderer.stop_ids)
        self._seed, self._id, self._priority = seed, id, priority
        self._turn = 0
        self._given: list[Message] = []
        self.deadline: float | None = None
        self.hashes = {"renderer": renderer.hash, "tokenizer": tokenizer.hash}
        facts = {"engine": engine_build, "numerics": numerics, "cache_policy": cache_policy}
        self.conversation = Conversation(renderer, sampling=self._sampling, **facts)

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        """Waits for: the engine. Cancelling it cancels the request there too."""
        self._take(messages)
        request = self._request(max_tokens)
        try:
            generation = await self._engine.generate(request)
        except asyncio.CancelledError:
            await self._engine.cancel(request.id)
            raise
        self._turn += 1
        message = self.conversation.accept(generation)
        self._given.append(message)
        assert generation.finish is not None, "only a piece of a stream has no finish"
        return Reply(message=message, finish=generation.finish, generation=generation)

    def measure(self, messages: Sequence[Message]) -> int:
        self._take(messages)
        return self.conversation.context_length()

    def restart(self, keep: Sequence[int]) -> None:
        self.conversation.restart(keep)

    def recorded(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        self._take(messages)
        return self.conversation.record()[0]

    def segments(self) -> tuple[Segment, ...]:
        return self.conversation.record()[1]

    def _request(self, max_tokens: int) -> GenerateRequest:
        left = None if self.deadline is None else max(self.deadline - asyncio.get_running_loop().time(), 0.0)
        return GenerateRequest(
            id=f"{self._id}.{self._turn}",
            ids=self.conversation.open_turn(),
            sampling=self._sampling.replace(max_tokens=max_tokens, seed=seed_for(self._seed, self._turn)),
            priority=self._priority,
            deadline_s=left,
        )

    def _take(self, messages: Sequence[Message]) -> None:
        """Add what is new in the transcript, after checking that the old is as it was."""
        known = len(self._given)
        same = len(messages) >= known and all(_same(a, b) for a, b in zip(self._given, messages, strict=False))
        if not same:
            raise UserError(
                f"a conversation only extends, and its first {known} messages have changed since the last turn; "
                "begin a new chat to rewrite history"
            )
        for message in messages[known:]:
            self.conversation.add(message)
            self._given.append(message)


def _same(a: Message, b: Message) -> bool:
    return a is b or to_dict(a.replace(span=None)) == to_dict(b.replace(span=None))


class TextChat:
    """What chats without tokens share: the present context, and estimates in place of counts."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.hashes: Mapping[str, str] = {}
        self._kept: tuple[int, ...] = ()
        self._from = 0
        self._replied = 0

    def context(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of the transcript that are in the present context; called once for each reply."""
        self._replied = len(messages) + 1
        return self._view(messages)

    def _view(self, messages: Sequence[Message]) -> list[Message]:
        return [*(messages[i] for i in self._kept), *messages[self._from :]]

    def measure(self, messages: Sequence[Message]) -> int:
        return sum(map(estimated_tokens, self._view(messages)))

    def restart(self, keep: Sequence[int]) -> None:
        """What is added to the transcript after the last reply belongs to the new context."""
        self._kept, self._from = tuple(keep), self._replied

    def recorded(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(messages)

    def segments(self) -> tuple[Segment, ...]:
        return ()


class OpenAIChat(TextChat):
    """Any OpenAI-compatible chat endpoint. The key is a reference, env:NAME, read when it is used.

    Calls travel in our text form, which the prompt explains ("full"), so that one parser serves every model; tool results travel as a
    user turn. Timeouts, broken connections, 5xx, 408 and 429 are `EngineError`: the machine's fault. Other 4xx are `UserError`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_ref: str = "",
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"base_url is {base_url!r}; give an address such as http://localhost:8000/v1")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") + "/chat/completions"
        self._model, self._key, self._seed, self._timeout_s = model, api_key_ref, seed, timeout_s
        self._sampling = sampling or Sampling()
        self._turn = 0

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        """Waits for: the endpoint, `timeout_s` at most."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_as_openai(m) for m in self.context(messages)],
            "max_tokens": max_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
        }
        if self._seed is not None:
            body["seed"] = seed_for(self._seed, self._turn) % 2**31
        self._turn += 1
        where = f"{self._host}:{self._port}{self._path}"
        key = f"Authorization: Bearer {secret(self._key)}" if self._key else ""
        try:
            async with asyncio.timeout(self._timeout_s):
                status, data = await self._post(json.dumps(body).encode(), key)
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {self._timeout_s:g} s; raise timeout_s or look at the server") from error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise EngineError(f"{where} cannot be reached or broke off: {error or type(error).__name__}") from error
        if status != 200:
            kind = EngineError if status >= 500 or status in (408, 429) else UserError
            raise kind(f"{where} answered {status}: {data[:300].decode('utf-8', 'replace')}")
        return _reply_of(data, where)

    async def _post(self, body: bytes, key: str) -> tuple[int, bytes]:
        context = ssl.create_default_context() if self._tls else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context, limit=2**20)
        try:
            head = [
                f"POST {self._path} HTTP/1.1",
                f"Host: {self._host}:{self._port}",
                "Content-Type: application/json",
                "Connection: close",
            ]
            head.append(f"Content-Length: {len(body)}")
            head += [key] if key else []
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await writer.drain()
            return await _read_response(reader)
        finally:
            writer.close()


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an HTTP/1.1 answer: by length, in chunks, or to the end of the stream."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    if not re.match(r"HTTP/1\.[01] [0-9]{3}\b", lines[0]):
        raise ValueError(f"its answer begins with {lines[0][:60]!r} and is not HTTP")
    status = int(lines[0].split()[1])
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts, total = [], 0
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            total = _bounded(total + size)
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return status, b"".join(parts)
    if "content-length" in headers:
        return status, await reader.readexactly(_bounded(int(headers["content-length"])))
    return status, await reader.read(MAX_ANSWER_BYTES)


def _bounded(size: int) -> int:
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes is larger than {MAX_ANSWER_BYTES}")
    return size


def _as_openai(message: Message) -> dict[str, str]:
    if message.role == "tool":
        return {"role": "user", "content": response_text(message)}
    return {"role": message.role, "content": message_text(message)}


def _reply_of(data: bytes, where: str) -> Reply:
    try:
        choice = json.loads(data)["choices"][0]
        answer = choice["message"]
        text, reasoning = answer.get("content") or "", answer.get("reasoning_content") or answer.get("reasoning") or ""
        if not isinstance(text, str) or not isinstance(reasoning, str):
            raise TypeError("content is not text")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"{where} answered something that is no chat completion: {data[:200]!r}") from error
    finish = Finish.LENGTH if choice.get("finish_reason") == "length" else Finish.STOP
    if not reasoning and text.startswith("<think>") and "</think>" in text:
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    return Reply(message=assistant_message(text.lstrip("\n"), reasoning.strip("\n")), finish=finish)
