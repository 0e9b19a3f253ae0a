"""Messages to tokens and back. Rendering one more message only ever appends tokens.

    EtudeRenderer    `<|role|>` text `<|end|>`, each message tokenised by itself
    ChatMLRenderer   `<|im_start|>role\\n` text `<|im_end|>\\n`; tool results in a user turn
    JinjaRenderer    a checkpoint's own chat template, rendered by string prefix difference

Calls and results have the form of calls.py in all three, so a policy meets one language in every harness. `parse(ids)` never raises.

A renderer may hold the state of one conversation (JinjaRenderer does): `start()` gives a fresh one. What the policy sampled is never
rendered: the conversation appends the sampled ids and then `close_assistant(ids)`. For ChatML and Jinja that also holds the
separator after the turn's end (a line break), so it is not empty when the policy stopped by itself.

    renderer = choose_renderer("checkpoints/step-20/model", tokenizer)
    ids = renderer.render(Message(role="user", text="hello")) + renderer.open_assistant()
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from etude.errors import UserError, nearest
from etude.records import Message, content_hash
from etude.text import template as etude
from etude.text.calls import assistant_message, format_assistant, format_results
from etude.text.tokenizer import TextTokenizer, tokenizer_config

_THINK, _UNTHINK = "<think>", "</think>"


class TurnRenderer(Protocol):
    """`protocols.Renderer` plus `start`: the renderer of one conversation."""

    name: str
    hash: str
    stop_ids: tuple[int, ...]

    def start(self) -> TurnRenderer: ...

    def render(self, message: Message) -> list[int]: ...

    def open_assistant(self) -> list[int]: ...

    def close_assistant(self, ids: Sequence[int]) -> list[int]: ...

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]: ...


class EtudeRenderer:
    """The format of template.py. Reasoning is marked by its own special tokens."""

    name = "etude"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._role = {role: _need(tokenizer, mark, self.name) for role, mark in etude.ROLES.items()}
        self._end, self._think, self._unthink = (_need(tokenizer, m, self.name) for m in (etude.END, etude.THINK, etude.UNTHINK))
        self.stop_ids: tuple[int, ...] = (self._end,)
        self.hash = content_hash("renderer", self.name, 1)

    def start(self) -> EtudeRenderer:
        return self

    def render(self, message: Message) -> list[int]:
        reasoning = self._tokenizer.encode(message.reasoning)
        thought = [self._think, *reasoning, self._unthink] if message.reasoning else []
        return [self._mark(message.role), *thought, *self._tokenizer.encode(message_text(message)), self._end]

    def _mark(self, role: str) -> int:
        if role not in self._role:
            raise UserError(f"a message has the role {role!r}; {nearest(role, self._role)}")
        return self._role[role]

    def open_assistant(self) -> list[int]:
        return [self._role["assistant"]]

    def close_assistant(self, ids: Sequence[int]) -> list[int]:
        return [] if ids and ids[-1] == self._end else [self._end]

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]:
        ids = list(ids)
        body = ids[:-1] if ids and ids[-1] == self._end else ids
        thinking = 0
        reasoning: list[int] = []
        if body and body[0] == self._think:
            stop = body.index(self._unthink) if self._unthink in body else len(body)
            reasoning, thinking = body[1:stop], min(stop + 1, len(body))
        message = assistant_message(self._tokenizer.decode(body[thinking:]), self._tokenizer.decode(reasoning))
        return message, [i < thinking for i in range(len(ids))]


class ChatMLRenderer:
    """ChatML, with `<think>` for reasoning and results in a user turn as `<tool_response>`."""

    name = "chatml"
    _start, _end = "<|im_start|>", "<|im_end|>"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._start_id, self._end_id = (_need(tokenizer, mark, self.name) for mark in (self._start, self._end))
        self._newline = tokenizer.encode("\n")
        other = tokenizer.token_id("<|endoftext|>")
        self.stop_ids: tuple[int, ...] = (self._end_id,) if other is None else (self._end_id, other)
        self.hash = content_hash("renderer", self.name, 1)

    def start(self) -> ChatMLRenderer:
        return self

    def render(self, message: Message) -> list[int]:
        if message.role not in etude.ROLES:
            raise UserError(f"a message has the role {message.role!r}; {nearest(message.role, etude.ROLES)}")
        role = "user" if message.role == "tool" else message.role
        head, body = self._tokenizer.encode(f"{role}\n"), response_text(message)
        if message.reasoning:
            thought = [*self._tokenizer.encode_markup(_THINK), *self._tokenizer.encode(f"\n{message.reasoning}\n")]
            rest = [*thought, *self._tokenizer.encode_markup(_UNTHINK), *self._tokenizer.encode(f"\n\n{body}")]
        else:
            head, rest = self._tokenizer.encode(f"{role}\n{body}"), []
        return [self._start_id, *head, *rest, self._end_id, *self._newline]

    def open_assistant(self) -> list[int]:
        return [self._start_id, *self._tokenizer.encode("assistant\n")]

    def close_assistant(self, ids: Sequence[int]) -> list[int]:
        return list(self._newline) if ids and ids[-1] == self._end_id else [self._end_id, *self._newline]

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]:
        return _parse_marked(self._tokenizer, ids, self.stop_ids, inside=False)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks elsewhere; here it renders what it holds."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaRenderer:
    """A checkpoint's chat template. One object serves one conversation; `start()` gives a fresh one.

    The template is rendered over the whole conversation each time, and what it added since is the new message. Two devices:

    - A turn the policy sampled is shown to the template as a one-of-a-kind sentinel in place of its text. What the template makes of the
      turn itself (such as dropping its reasoning once it is old) then does not matter, for its sampled ids stay as they are. What lies
      between the sentinels is what the harness added; it must come out the same each time, or the template is refused with both turns
      named: the one that changed, and the one whose arrival changed it.
    - Every special token's name inside a message is broken by a private-use character that is taken out again before tokenising, so
      user text never turns into a special token.
    """

    name = "jinja"

    def __init__(self, tokenizer: TextTokenizer, chat_template: str, *, config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        self._tokenizer = tokenizer
        self._variables = {k: _token_text(config.get(k)) for k in ("bos_token", "eos_token")}
        self._template = _compile(chat_template)
        self._begin()
        self.hash = content_hash("renderer", self.name, 1, chat_template, self._variables)
        self.stop_ids = self._find_stop_ids()

    def start(self) -> JinjaRenderer:
        other = copy.copy(self)
        other._begin()
        return other

    def _begin(self) -> None:
        self._messages: list[dict[str, str]] = []
        self._gaps: list[str] = [""]
        """Text before, between and after the sampled turns, as far as it was tokenised."""
        self._ends: list[list[tuple[int, int]]] = [[]]
        """For each gap: the number of each turn with text in it, and where that text ends."""
        self._openings: list[str] = [""]
        """For each gap: what opened the turn sampled after it, as far as that was tokenised."""
        self._sampled: list[int] = []
        """Numbers of the sampled turns."""
        self._roles: list[str] = []
        self._inside_think = False

    def render(self, message: Message) -> list[int]:
        shown, mark = self._shown(message)
        self._messages.append(shown)
        self._roles.append(message.role)
        try:
            pieces = self._pieces(self._named(len(self._messages)))
        except UserError:
            self._messages.pop()
            self._roles.pop()
            raise
        added = pieces[-1][len(self._gaps[-1]) :]
        self._extend(pieces[-1])
        return self._tokenizer.encode_markup(added, drop=mark)

    def open_assistant(self) -> list[int]:
        pieces = self._pieces("the opening of the assistant's turn", opening=True)
        opening = pieces[-1][len(self._gaps[-1]) :]
        self._openings[-1] = opening
        self._inside_think = opening.rstrip().endswith(_THINK)
        return self._tokenizer.encode_markup(opening)

    def close_assistant(self, ids: Sequence[int]) -> list[int]:
        self._messages.append({"role": "assistant", "content": _sentinel(len(self._sampled))})
        self._roles.append("assistant")
        self._sampled.append(len(self._messages))
        self._gaps.append("")
        self._ends.append([])
        self._openings.append("")
        closing = self._pieces(self._named(len(self._messages)))[-1]
        self._extend(closing)
        tokens = self._tokenizer.encode_markup(closing)
        return tokens[1:] if ids and tokens and tokens[0] == ids[-1] else tokens

    def parse(self, ids: Sequence[int]) -> tuple[Message, list[bool]]:
        return _parse_marked(self._tokenizer, ids, self.stop_ids, inside=self._inside_think)

    def _pieces(self, turn: str, *, opening: bool = False) -> list[str]:
        """The rendered conversation cut at the sentinels, after checking that nothing already tokenised has changed."""
        text = self._text(self._messages, turn, opening=opening)
        pieces = _SENTINEL.split(text)
        found = [int(n) for n in pieces[1::2]]
        pieces = pieces[::2]
        if found != list(range(len(self._sampled))):
            raise UserError(_REFUSED.format(turn=turn, what=self._misplaced(found)))
        for index, (piece, known, opened) in enumerate(zip(pieces, self._gaps, self._openings, strict=True)):
            rest = piece[len(known) :]
            if not piece.startswith(known):
                raise UserError(_REFUSED.format(turn=turn, what=self._changed(index, known, piece)))
            if index < len(self._sampled) and not (rest.startswith(opened) or opened.startswith(rest)):
                what = f"changes the opening of {self._named(self._sampled[index])} {_difference(opened, rest)}"
                raise UserError(_REFUSED.format(turn=turn, what=what))
        return pieces

    def _extend(self, text: str) -> None:
        """The text since the last sampled turn is now this, up to and with the newest turn."""
        self._gaps[-1] = text
        self._ends[-1].append((len(self._messages), len(text)))

    def _named(self, number: int) -> str:
        return f"turn {number} ({self._roles[number - 1]})"

    def _misplaced(self, found: Sequence[int]) -> str:
        """What became of sampled turns that are not where they were."""
        for index, number in enumerate(self._sampled):
            if found.count(index) != 1:
                return f"{'repeats' if index in found else 'drops'} {self._named(number)}"
        return "puts the assistant's turns in another order"

    def _changed(self, gap: int, known: str, text: str) -> str:
        at = _alike(known, text)
        number = next(number for number, end in self._ends[gap] if at < end)
        return f"changes {self._named(number)} {_difference(known, text)}"

    def _text(self, messages: Sequence[Mapping[str, str]], turn: str, *, opening: bool = False) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=opening, tools=None, **self._variables)
        except Exception as error:  # a template is a program from outside and may raise anything
            raise UserError(f"the chat template fails at {turn}: {error}; choose another renderer by name (etude, chatml)") from error

    def _shown(self, message: Message) -> tuple[dict[str, str], str]:
        """The message as the template sees it, and the character that shields special tokens in it."""
        body = response_text(message)
        mark = _unused(body + message.reasoning)
        shown = {"role": "user" if message.role == "tool" else message.role, "content": self._shield(body, mark)}
        if message.reasoning:
            shown["reasoning_content"] = self._shield(message.reasoning, mark)
        return shown, mark

    def _shield(self, text: str, mark: str) -> str:
        for special in sorted(self._tokenizer.specials, key=len, reverse=True):
            text = text.replace(special, special[0] + mark + special[1:])
        return text.replace(_OPEN, _OPEN + mark)

    def _find_stop_ids(self) -> tuple[int, ...]:
        """Special tokens that end an assistant turn: the one the template writes there, and the checkpoint's end of text."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _sentinel(0)}]
        closing = self._tokenizer.encode_markup(_SENTINEL.split(self._text(probe, "a probe of its stop token"))[-1])
        specials = set(self._tokenizer.specials.values())
        names = [closing[0] if closing and closing[0] in specials else None, self._tokenizer.token_id(self._variables["eos_token"])]
        stops = tuple(dict.fromkeys(i for i in names if i is not None))
        if not stops:
            raise UserError(
                "the chat template ends an assistant turn with no special token, and the checkpoint names no eos_token; set eos_token"
            )
        return stops


def choose_renderer(source: str | Path | Mapping[str, Any], tokenizer: TextTokenizer, name: str | None = None) -> TurnRenderer:
    """The renderer of a checkpoint (a folder, or the content of its tokenizer_config.json), by name or by its chat template.

    A template that writes the same text as one of our own renderers on a probe conversation gets that renderer, which is faster.
    """
    config = dict(source) if isinstance(source, Mapping) else tokenizer_config(Path(source))
    chat_template = _default_template(config.get("chat_template"))
    if name is not None:
        return _by_name(name, tokenizer, chat_template, config)
    if chat_template is None:
        raise UserError(f"{_named(source)} has no chat template; name a renderer: etude, chatml or jinja")
    own = EtudeRenderer if set(etude.ETUDE_SPECIALS) <= set(tokenizer.specials) else ChatMLRenderer
    if own is EtudeRenderer or tokenizer.token_id("<|im_start|>") is not None:
        renderer = own(tokenizer)
        if _agrees(renderer, tokenizer, chat_template, config):
            return renderer
    return JinjaRenderer(tokenizer, chat_template, config=config)


def message_text(message: Message) -> str:
    """The text of a message's body in the etude format: results for a tool message, text and calls for an assistant's."""
    if message.role == "tool":
        return format_results(message.results)
    return format_assistant(message.text, message.calls)


def response_text(message: Message) -> str:
    """The same for formats without a tool role: results become `<tool_response>` blocks of a user turn."""
    if message.role != "tool":
        return message_text(message)
    return format_results(message.results, "tool_response", "\n")


_OPEN, _SHUT = "\ue5e0", "\ue5e1"
_SENTINEL = re.compile(f"{_OPEN}turn ([0-9]+){_SHUT}")
_REFUSED = (
    "the chat template rewrites history: once {turn} is added, it {what}. Tokens that were read or sampled cannot change; "
    "choose another renderer by name (etude, chatml) or a template that only appends"
)


def _sentinel(turn: int) -> str:
    return f"{_OPEN}turn {turn}{_SHUT}"


def _unused(text: str) -> str:
    """A private-use character that the text does not hold."""
    return next(c for c in map(chr, range(0xE600, 0xF8FF)) if c not in text)


def _alike(old: str, new: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _difference(old: str, new: str) -> str:
    """Both texts around the first character that differs."""
    at = _alike(old, new)
    start = max(at - 20, 0)

    def excerpt(text: str) -> str:
        part = re.sub("[\ue5e0-\uf8ff]", "", text[start : at + 40])
        return repr(f"{'...' if start else ''}{part}{'...' if len(text) > at + 40 else ''}")

    return f"from {excerpt(old)} to {excerpt(new)}"


def _need(tokenizer: TextTokenizer, special: str, name: str) -> int:
    id = tokenizer.token_id(special)
    if id is None:
        raise UserError(f"the renderer {name!r} needs the special token {special!r}, which this tokenizer lacks; choose another renderer")
    return id


def _parse_marked(tokenizer: TextTokenizer, ids: Sequence[int], stops: Sequence[int], *, inside: bool) -> tuple[Message, list[bool]]:
    """Parse sampled ids whose reasoning is marked in the text. A token that straddles the closing mark counts as reasoning."""
    ids = list(ids)
    pieces = tokenizer.pieces(ids[:-1] if ids and ids[-1] in stops else ids)
    data = b"".join(pieces)
    start = 0 if inside else len(_THINK)
    end = 0
    if inside or data.startswith(_THINK.encode()):
        found = data.find(_UNTHINK.encode(), start)
        end = found + len(_UNTHINK) if found >= 0 else len(data)
        reasoning = data[start : found if found >= 0 else end].decode("utf-8", "replace")
        message = assistant_message(data[end:].decode("utf-8", "replace").lstrip("\n"), reasoning.removeprefix("\n").removesuffix("\n"))
    else:
        message = assistant_message(data.decode("utf-8", "replace"))
    thinking, at = [], 0
    for piece in pieces:
        thinking.append(at < end)
        at += len(piece)
    return message, thinking + [False] * (len(ids) - len(thinking))


# ---------------------------------------------------------------------------------------------------
# Templates


def _compile(chat_template: str) -> jinja2.Template:
    """Compile as `transformers` does: trimmed blocks, loop controls, a plain `tojson`; in a sandbox that allows no mutation."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is not Jinja: {error.message} (line {error.lineno}); name a renderer instead: etude or chatml"
        ) from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _token_text(value: Any) -> str:
    """A token in tokenizer_config.json is a string, or an object that holds one as `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) and value else None


def _by_name(name: str, tokenizer: TextTokenizer, chat_template: str | None, config: Mapping[str, Any]) -> TurnRenderer:
    if name == "etude":
        return EtudeRenderer(tokenizer)
    if name == "chatml":
        return ChatMLRenderer(tokenizer)
    if name != "jinja":
        raise UserError(f"unknown renderer {name!r}; {nearest(name, ['etude', 'chatml', 'jinja'])}")
    if chat_template is None:
        raise UserError("the renderer 'jinja' needs a checkpoint with a chat template, and this one has none; name etude or chatml")
    return JinjaRenderer(tokenizer, chat_template, config=config)


def _agrees(renderer: TurnRenderer, tokenizer: TextTokenizer, chat_template: str, config: Mapping[str, Any]) -> bool:
    """Whether a template writes what our renderer writes, on conversations of each role ending in a request for the next turn; one
    of them has no system message, since some templates put in their own."""
    turns = [("system", "s 1"), ("user", "u\n2 "), ("assistant", "a 3"), ("user", "u 4")]
    for probe in (turns, turns[1:]):
        ours = [id for role, text in probe for id in renderer.render(Message(role=role, text=text))] + renderer.open_assistant()
        try:
            theirs = _compile(chat_template).render(
                messages=[{"role": role, "content": text} for role, text in probe],
                add_generation_prompt=True,
                tools=None,
                **{k: _token_text(config.get(k)) for k in ("bos_token", "eos_token")},
            )
        except Exception:  # a template is a program from outside; one that fails on the probe is not ours
            return False
        if tokenizer.encode_markup(theirs) != ours:
            return False
    return True


def _named(source: Any) -> str:
    return "the tokenizer config" if isinstance(source, Mapping) else str(source)


__all__ = [
    "ChatMLRenderer",
    "EtudeRenderer",
    "JinjaRenderer",
    "TurnRenderer",
    "choose_renderer",
    "message_text",
    "response_text",
]
