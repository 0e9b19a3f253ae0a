"""OpenAI's chat and completions, from request body to answer, over an engine that knows tokens only.

What a request may say is checked here, field by field; an unknown field is an error that names the nearest known one, because a silently
dropped parameter is an answer to another question. Fields that cannot change an answer (`user`, `metadata`, ...) are taken and not used.
Beyond OpenAI: `top_k`, `priority`, `deadline_s`, and `return_token_ids`, which adds `prompt_token_ids` to the answer and `token_ids` to
each choice, so that what was sampled can be trained on as it was sampled.

`logprob` is that of the model at temperature 1, as OpenAI's; `sampling_logprob` beside it is under the distribution that was sampled from.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etude.errors import nearest
from etude.protocols import GenerateRequest, Generation
from etude.records import Finish, Message, Sampling, ToolCall, Version, seed_for
from etude.serve.tools import BadParameter, ClientTool, read_messages, read_tools, to_openai
from etude.serve.turn import Delta, Turn
from etude.text.renderer import TurnRenderer
from etude.text.tokenizer import TextTokenizer

MAX_CHOICES = 64
MAX_STOPS = 16
_UNUSED = ("user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "echo": (False,),
    "modalities": (["text"],),
}
"""Fields that are served only at the value that changes nothing."""
_SHARED = (
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "logprobs", "priority",
    "deadline_s", "return_token_ids", *_UNUSED,
)  # fmt: skip
_CHAT = (
    *_SHARED, "messages", "tools", "tool_choice", "max_completion_tokens", "top_logprobs", "frequency_penalty", "presence_penalty",
    "logit_bias", "response_format", "modalities",
)  # fmt: skip
_COMPLETION = (*_SHARED, "prompt", "best_of", "echo", "suffix", "frequency_penalty", "presence_penalty", "logit_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """How the served model reads and writes."""

    model: str
    tokenizer: TextTokenizer
    renderer: TurnRenderer
    window: int


@dataclass(kw_only=True, slots=True)
class Choice:
    """One answer that is being sampled."""

    index: int
    request: GenerateRequest
    turn: Turn
    logprobs: list[float] = field(default_factory=list)
    logprobs_t1: list[float] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish: Finish | None = None
    cached: int = 0
    versions: tuple[Version, ...] = ()
    sent_tokens: int = 0

    def take(self, piece: Generation) -> Delta:
        """Add a piece of the engine's; what became sayable by it."""
        self.logprobs += np.asarray(piece.logprob_T).tolist()
        self.logprobs_t1 += np.asarray(piece.logprob_t1_T).tolist()
        self.cached, self.versions = piece.cached_tokens, piece.versions or self.versions
        delta = self.turn.feed(piece.ids)
        self.finish = Finish.STOP if self.turn.stopped is not None else piece.finish
        if self.finish is not None:
            rest = self.turn.finish()
            delta = Delta(delta.text + rest.text, delta.reasoning + rest.reasoning, (*delta.calls, *rest.calls))
            if self.turn.stopped is not None:
                self.finish = Finish.STOP
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.calls += delta.calls
        return delta


@dataclass(kw_only=True, slots=True)
class Job:
    """One request of a client: what to sample, and how to answer."""

    id: str
    chat: bool
    model: str
    tokenizer: TextTokenizer
    prompts: list[list[int]]
    choices: list[Choice]
    tools: Mapping[str, ClientTool]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    # -- answers ---------------------------------------------------------------------------------------

    def answer(self) -> dict[str, Any]:
        """The whole answer, once every choice has ended."""
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._envelope(kind) | {"choices": [self._choice(c) for c in self.choices], "usage": self.usage()}
        if self.return_token_ids:
            body["prompt_token_ids"] = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        return body

    def chunks(self, choice: Choice, delta: Delta, *, first: bool) -> list[dict[str, Any]]:
        """The events of a stream that one piece of one choice makes."""
        out = []
        new = slice(choice.sent_tokens, len(choice.turn.ids))
        choice.sent_tokens = len(choice.turn.ids)
        extra: dict[str, Any] = {"token_ids": choice.turn.ids[new]} if self.return_token_ids else {}
        if self.logprobs:
            extra["logprobs"] = self._logprobs(choice, new)
        said = self._delta(choice, delta, first)
        if said or extra:
            out.append(self._event({"index": choice.index, **said, "finish_reason": None, **extra}))
        if choice.finish is not None:
            last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            out.append(self._event({"index": choice.index, **last, "finish_reason": self._reason(choice)}))
        if first and self.return_token_ids and out and choice.index == 0:
            out[0]["prompt_token_ids"] = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        return out

    def closing(self) -> list[dict[str, Any]]:
        """Events behind the last choice's end."""
        return [self._event(None) | {"usage": self.usage()}] if self.include_usage else []

    def usage(self) -> dict[str, Any]:
        prompt, done = sum(map(len, self.prompts)), sum(len(c.turn.ids) for c in self.choices)
        cached = sum(c.cached for c in self.choices if c.index % max(len(self.choices) // len(self.prompts), 1) == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        versions = [str(v) for c in self.choices for v in c.versions]
        fingerprint = versions[-1] if versions else None
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": fingerprint}

    def _event(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._envelope(kind) | {"choices": [choice] if choice is not None else []}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        out: dict[str, Any] = {"index": choice.index, "finish_reason": self._reason(choice), "logprobs": None}
        if self.logprobs:
            out["logprobs"] = self._logprobs(choice, slice(0, len(choice.turn.ids)))
        if self.return_token_ids:
            out["token_ids"] = choice.turn.ids
        if not self.chat:
            return out | {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text if choice.text or not choice.calls else None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [self._call(choice, i, call) for i, call in enumerate(choice.calls)]
        return out | {"message": message}

    def _delta(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        if not self.chat:
            return {"text": delta.text} if delta.text or first else {}
        said: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if delta.text:
            said["content"] = delta.text
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            at = len(choice.calls) - len(delta.calls)
            said["tool_calls"] = [{"index": at + i, **self._call(choice, at + i, c)} for i, c in enumerate(delta.calls)]
        return {"delta": said} if said else {"delta": {}} if self.return_token_ids or self.logprobs else {}

    def _call(self, choice: Choice, index: int, call: ToolCall) -> dict[str, Any]:
        id = f"call_{self.id.rpartition('-')[2]}_{choice.index}_{index}"
        return {"id": id, "type": "function", "function": to_openai(call, self.tools)}

    def _reason(self, choice: Choice) -> str:
        if choice.finish is Finish.STOP:
            return "tool_calls" if choice.calls else "stop"
        return "length"  # also at a deadline or a cancellation: the answer is cut

    def _logprobs(self, choice: Choice, part: slice) -> dict[str, Any]:
        pieces = self.tokenizer.pieces(choice.turn.ids[part])
        t1, sampled = choice.logprobs_t1[part], choice.logprobs[part]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        if not self.chat:
            ends = np.cumsum([0, *map(len, texts)]).tolist()
            return {"tokens": texts, "token_logprobs": t1, "top_logprobs": None, "text_offset": ends[:-1]}
        rows = zip(texts, pieces, t1, sampled, strict=True)
        return {
            "content": [
                {"token": text, "bytes": list(piece), "logprob": a, "sampling_logprob": b, "top_logprobs": []} for text, piece, a, b in rows
            ],
            "refusal": None,
        }


# ---------------------------------------------------------------------------------------------------
# From the body of a request to a job


def chat_job(data: Any, texts: Texts) -> Job:
    fields = Fields(data, _CHAT, texts.model)
    tools = read_tools(fields.get("tools") or [])
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadParameter("tool_choice", f"{json.dumps(choice)[:80]} is not served: this model decides by itself; use 'auto' or 'none'")
    tools = {} if choice == "none" else tools
    messages = read_messages(fields.get("messages"), tools)
    renderer = texts.renderer.start()
    ids = [id for message in messages for id in renderer.render(message)] + renderer.open_assistant()
    if fields.integer("top_logprobs", 0, 0, 20):
        raise BadParameter("top_logprobs", "this engine reports the sampled token's log-prob; ask for 0")
    most = fields.get("max_completion_tokens")
    if most is not None:
        fields.data["max_tokens"] = most
    return _job(fields, texts, [ids], chat=True, renderer=renderer, tools=tools, logprobs=fields.flag("logprobs"))


def completion_job(data: Any, texts: Texts) -> Job:
    fields = Fields(data, _COMPLETION, texts.model)
    prompts = _prompts(fields.get("prompt"), texts.tokenizer)
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    if fields.integer("best_of", n, 1, MAX_CHOICES) != n:
        raise BadParameter("best_of", f"only n ({n}) is served: every answer that is sampled is returned")
    logprobs = fields.get("logprobs")
    if logprobs not in (None, 0, 1) or logprobs is True:
        raise BadParameter("logprobs", f"{logprobs!r}: this engine reports the sampled token's log-prob; ask for 0 or 1")
    return _job(fields, texts, prompts, chat=False, renderer=texts.renderer, tools={}, logprobs=logprobs is not None)


def _job(
    fields: Fields,
    texts: Texts,
    prompts: list[list[int]],
    *,
    chat: bool,
    renderer: TurnRenderer,
    tools: Mapping[str, ClientTool],
    logprobs: bool,
) -> Job:
    id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    if n * len(prompts) > MAX_CHOICES:
        raise BadParameter("n", f"{len(prompts)} prompts with {n} answers each are more than {MAX_CHOICES}; send several requests")
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    base = secrets.randbits(63) if seed is None else seed
    stops = _stops(fields.get("stop"))
    choices = []
    for index in range(n * len(prompts)):
        ids = prompts[index // n]
        sampling = Sampling(
            temperature=fields.number("temperature", 1.0, 0.0, 10.0),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            top_k=fields.integer("top_k", 0, 0, 2**31),
            max_tokens=fields.integer("max_tokens", max(texts.window - len(ids), 1), 1, 2**31),
            seed=seed_for("choice", base, index),
            stop_ids=renderer.stop_ids,
        )
        request = GenerateRequest(
            id=f"{id}.{index}",
            ids=ids,
            sampling=sampling,
            priority=fields.integer("priority", 0, -(2**31), 2**31),
            deadline_s=fields.number("deadline_s", None, 0.0, math.inf),
            routes=False,
        )
        turn = Turn(renderer if chat else _Plain(renderer, texts.tokenizer), texts.tokenizer, calls=bool(tools), stops=stops)
        choices.append(Choice(index=index, request=request, turn=turn))
    stream = fields.flag("stream")
    return Job(
        id=id,
        chat=chat,
        model=texts.model,
        tokenizer=texts.tokenizer,
        prompts=prompts,
        choices=choices,
        tools=tools,
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        logprobs=logprobs,
        return_token_ids=fields.flag("return_token_ids"),
    )


class _Plain:
    """A renderer's stop ids without its format: the text of a completion is the text of its tokens."""

    name = "plain"

    def __init__(self, renderer: TurnRenderer, tokenizer: TextTokenizer) -> None:
        self._tokenizer, self.stop_ids = tokenizer, renderer.stop_ids

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]:
        body = [i for i in ids if i not in self.stop_ids]
        return Message(role="assistant", text=self._tokenizer.decode(body)), [False] * len(ids)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise BadParameter("stream_options", "only with stream = true")
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise BadParameter("stream_options", f"{json.dumps(value)[:80]}; its only field is include_usage")
    return bool(value.get("include_usage", False))


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise BadParameter("stop", f"{json.dumps(value)[:80]}; give a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    return tuple(stops)


def _prompts(value: Any, tokenizer: TextTokenizer) -> list[list[int]]:
    """A text, token ids, or a list of either."""

    def one(prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if isinstance(prompt, list) and all(type(i) is int for i in prompt):
            return prompt
        raise BadParameter("prompt", "give a text, a list of token ids, or a list of either")

    many = isinstance(value, list) and value and not all(type(i) is int for i in value)
    prompts = [one(p) for p in value] if many else [one(value)]
    if not all(prompts):
        raise BadParameter("prompt", "is empty; give at least one token")
    return prompts


class Fields:
    """The fields of a request, read one by one and by type."""

    def __init__(self, data: Any, known: Sequence[str], model: str) -> None:
        if not isinstance(data, dict):
            raise BadParameter("body", f"should be a JSON object, got {type(data).__name__}")
        self.data = dict(data)
        for name, value in data.items():
            if name not in known:
                raise BadParameter(name, f"is not a field of this request; {nearest(name, known)}")
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise BadParameter(name, f"{json.dumps(value)[:80]} is not served; leave it out")
        if data.get("model", model) != model:
            raise UnknownModel(str(data["model"]), model)

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def flag(self, name: str) -> bool:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadParameter(name, f"{value!r} should be true or false")
        return bool(value)

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        value = self.data.get(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise BadParameter(name, f"{value!r} should be an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any, low: float, high: float) -> Any:
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadParameter(name, f"{value!r} should be a number from {low:g} to {high:g}")
        return float(value)


class UnknownModel(BadParameter):
    """404: another model was asked for than the one that is served."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__("model", f"no model {asked!r} here; this server has {served!r}")
        self._made_from = (asked, served)

    def __reduce__(self):
        return type(self), self._made_from
