"""Byte-level BPE over the `tokenizers` library, and a plain byte tokenizer for tests and fakes.

Invariants, for every tokenizer here:
- `decode(encode(text)) == text` for every text (a lone surrogate is not text: it becomes U+FFFD). To keep this, the Unicode
  normaliser and the added leading space some checkpoints ask for are switched off: an agent that edits a file by exact match must be
  able to write the bytes it read.
- `encode` never yields a special token, whatever the text spells. Special tokens come from `token_id`, or from `encode_markup`, which
  is meant for trusted template text only. "Special" means every added token of the checkpoint, also those not flagged special
  (`<think>` of Qwen3): what a user types must never become one.
- `decode` is total: unknown ids and broken UTF-8 become U+FFFD; `decode_bytes` gives the bytes themselves.

`train_tokenizer` is deterministic (tests/text/test_tokenizer.py trains in two processes and compares hashes). Its pre-tokeniser keeps
tags such as `<call name="grep">` and `</path>` in one piece, so that each becomes one token, splits digits, and separates line breaks
from indentation: a line then has the same tokens at the start of a value as in the middle of a file, and copying it is copying tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from etude.errors import CheckpointError, UserError
from etude.records import content_hash
from etude.text.template import END, ETUDE_SPECIALS, ETUDE_TEMPLATE, PAD

LOST = "\N{REPLACEMENT CHARACTER}"
PIECES = r"""</?[a-z_]+(?: name="[a-z_]+")?>|[ _]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"""
"""A tag; a word with the space or underscore before it; one digit; punctuation; line breaks; indentation but its last space."""

T = TypeVar("T", bound="_Specials")


class TextTokenizer(Protocol):
    """`protocols.Tokenizer` plus what renderers need: bytes, and template text in which special tokens are meant."""

    hash: str
    vocab_size: int

    @property
    def specials(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, special: str) -> int | None: ...

    def encode_markup(self, text: str, drop: str = "") -> list[int]: ...

    def pieces(self, ids: Sequence[int]) -> list[bytes]: ...


class _Specials:
    """What both tokenizers share: special tokens, markup and decoding. Subclasses give `encode` and `_token_bytes`."""

    specials: dict[str, int]
    _stripping: dict[str, tuple[bool, bool]]

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _token_bytes(self, id: int) -> bytes:
        raise NotImplementedError

    def token_id(self, special: str) -> int | None:
        """Id of a special token, or None when the tokenizer has no such token."""
        return self.specials.get(special)

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        names = sorted((n for n in self.specials if len(n) > 1), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def encode_markup(self, text: str, drop: str = "") -> list[int]:
        """Tokens of trusted template text: special tokens are recognised. Never call it with text from outside, unless their names are
        broken there by the character `drop`, which is taken out of what lies between special tokens.
        """
        parts = self._special_pattern.split(text) if self._special_pattern else [text]
        ids: list[int] = []
        for index, part in enumerate(parts):  # odd parts are the special tokens
            if index % 2:
                ids.append(self.specials[part])
                continue
            if index > 0 and self._stripping.get(parts[index - 1], (False, False))[1]:
                part = part.lstrip()
            if index + 1 < len(parts) and self._stripping.get(parts[index + 1], (False, False))[0]:
                part = part.rstrip()
            part = part.replace(drop, "") if drop else part
            ids.extend(self.encode(part) if part else [])
        return ids

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        return [self._token_bytes(i) for i in ids]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.pieces(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


class ByteTokenizer(_Specials):
    """Ids 0..255 are bytes; special tokens follow. For tests and fakes."""

    def __init__(self, specials: Sequence[str] = ETUDE_SPECIALS) -> None:
        self.specials = {name: 256 + i for i, name in enumerate(specials)}
        self._names = {id: name.encode() for name, id in self.specials.items()}
        self._stripping = {}
        self.vocab_size = 256 + len(self.specials)
        self.hash = content_hash("bytes", list(specials))

    def encode(self, text: str) -> list[int]:
        return list(_whole(text).encode())

    def _token_bytes(self, id: int) -> bytes:
        return bytes((id,)) if 0 <= id < 256 else self._names.get(id, LOST.encode())


class Tokenizer(_Specials):
    """A byte-level BPE read from the content of a tokenizer.json."""

    def __init__(self, spec: Mapping[str, Any], config: Mapping[str, Any] | None = None, *, where: str = "tokenizer.json") -> None:
        _check_byte_level(spec, where)
        self.spec = dict(spec)
        self.config = dict(config or {})
        self.hash = content_hash("tokenizer", spec)
        added = spec.get("added_tokens") or []
        self.specials = {t["content"]: t["id"] for t in added}
        self._stripping = {t["content"]: (bool(t.get("lstrip")), bool(t.get("rstrip"))) for t in added}
        vocab: dict[str, int] = {k: i for k, i in spec["model"]["vocab"].items() if k not in self.specials}
        self.vocab_size = max([*vocab.values(), *self.specials.values()]) + 1
        self._bytes_of = {i: _spelled(k) for k, i in vocab.items()} | {i: k.encode() for k, i in self.specials.items()}
        self._missing = bytes(b for b in _TEXT_BYTES if _CHAR_OF[b] not in vocab)
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(_plain(spec, vocab)))

    def encode(self, text: str) -> list[int]:
        text = _whole(text)
        if self._missing:
            text = self._replaceable(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def _replaceable(self, text: str) -> str:
        """Some checkpoints have no token for rare bytes, and the library drops those silently; put U+FFFD (or ?) instead."""
        missing = set(self._missing)
        if missing.isdisjoint(text.encode()):
            return text
        substitute = "?" if not missing.isdisjoint(LOST.encode()) else LOST
        return "".join(c if missing.isdisjoint(c.encode()) else substitute for c in text)

    def _token_bytes(self, id: int) -> bytes:
        return self._bytes_of.get(id, LOST.encode())

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as `transformers` reads them, chat template included."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(self.spec, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        config = self.config or _etude_config(self.specials)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder (or of a tokenizer.json)."""
    path = Path(folder)
    path = path if path.suffix == ".json" else path / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"no tokenizer at {path}; give a model folder that holds tokenizer.json")
    return Tokenizer(_read_json(path), tokenizer_config(path.parent), where=str(path))


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, with chat_template.jinja (where newer checkpoints keep it) folded in; {} without either."""
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


def train_tokenizer(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ETUDE_SPECIALS) -> Tokenizer:
    """Train a byte-level BPE. Special tokens get the first ids, then the 256 bytes, then merges.

    The texts should hold messages as they will be tokenised: one text a message, no special tokens in it.
    """
    if vocab_size < 256 + len(specials):
        raise UserError(
            f"vocab_size is {vocab_size}; it needs at least {256 + len(specials)} (256 bytes and {len(specials)} special tokens)"
        )
    library = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator((_whole(t) for t in texts), trainer)
    return Tokenizer(json.loads(library.to_str()))


def _etude_config(specials: Mapping[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if END in specials:
        config["eos_token"] = END
    if PAD in specials:
        config["pad_token"] = PAD
    if set(ETUDE_SPECIALS) <= set(specials):
        config["chat_template"] = ETUDE_TEMPLATE
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__} where an object was expected; fetch the checkpoint again")
    return data


def _whole(text: str) -> str:
    """The text with lone surrogates, which no encoding can carry, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(LOST if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    return text


# ---------------------------------------------------------------------------------------------------
# The byte alphabet of byte-level BPE, and what is switched off in a checkpoint's pipeline


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's table: printable latin-1 bytes stand for themselves, the rest for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_CHAR_OF = _byte_alphabet()
_BYTE_OF = {c: b for b, c in _CHAR_OF.items()}
_TEXT_BYTES = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]
"""Bytes that occur in UTF-8."""


def _spelled(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode()


def _check_byte_level(spec: Mapping[str, Any], where: str) -> None:
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE" or not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        raise CheckpointError(
            f"{where} holds a {kind or 'broken'} tokenizer; only byte-level BPE is supported (GPT-2, Llama 3, Qwen, SmolLM ...)"
        )
    if "ByteLevel" not in json.dumps(spec.get("pre_tokenizer")):
        raise CheckpointError(
            f"{where} is a BPE without a ByteLevel pre-tokenizer, so it cannot carry every text; use a byte-level checkpoint"
        )


def _plain(spec: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any]:
    """The pipeline that encodes ordinary text: no added tokens, no normaliser, no template, no truncation, no dropout."""
    model = {**spec["model"], "vocab": vocab, "dropout": None, "unk_token": None}
    off = dict.fromkeys(("normalizer", "post_processor", "truncation", "padding"))
    return {**spec, **off, "added_tokens": [], "pre_tokenizer": _without_prefix_space(spec["pre_tokenizer"]), "model": model}


def _without_prefix_space(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_prefix_space(n) for n in node]
    if isinstance(node, dict):
        return {k: False if k == "add_prefix_space" else _without_prefix_space(v) for k, v in node.items()}
    return node
