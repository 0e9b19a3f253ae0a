"""GGUF files in: header, metadata, quantised tensors, tokenizer. Llama architecture. Numpy only until the last copy.

The file (versions 2 and 3, little-endian): "GGUF", version u32, tensor count u64, metadata count u64; metadata as
(key, type u32, value); tensor infos as (name, dimensions u32, sizes u64 fastest first, type u32, offset u64); padding
to `general.alignment`; data. Strings are a u64 length and bytes.

llama.cpp stores the query and key projections with each head's rows permuted from the half-split order of Hugging Face
(i, i + D/2) to neighbouring pairs (2i, 2i + 1); `Source.tensor` undoes that.

    model = load_gguf(path)
    tokenizer = gguf_tokenizer(path)          # a tokenizers.Tokenizer
    GGUF(path).metadata["tokenizer.chat_template"]
    gguf_to_folder(path, folder)              # config.json, safetensors and tokenizer files, as `transformers` reads them
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from etude.errors import CheckpointError
from etude.model.config import ModelConfig, Numerics
from etude.model.transformer import Decoder
from etude.model.weights import fill, meta_model, save_model

SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
BLOCK = 32
"""Weights per block of the quantised types."""
NORMAL_TOKEN, CONTROL_TOKEN, USER_TOKEN = 1, 3, 4


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """Scale f16, 16 bytes of two 4-bit weights (low nibbles first): (q - 8) * scale."""
    scale = raw[:, :2].copy().view("<f2").astype(np.float32)
    return (_nibbles(raw[:, 2:]) - 8.0) * scale


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """Scale and minimum f16, 16 bytes of two 4-bit weights: q * scale + minimum."""
    scale, minimum = np.split(raw[:, :4].copy().view("<f2").astype(np.float32), 2, axis=1)
    return _nibbles(raw[:, 4:]) * scale + minimum


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """Scale f16, 32 signed bytes."""
    scale = raw[:, :2].copy().view("<f2").astype(np.float32)
    return raw[:, 2:].view(np.int8).astype(np.float32) * scale


def _nibbles(raw: np.ndarray) -> np.ndarray:
    return np.concatenate((raw & 15, raw >> 4), axis=1).astype(np.float32)


def _bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Kind:
    """One storage type: a block of `weights` numbers takes `size` bytes; `decode` maps [blocks, size] bytes to float32."""

    name: str
    weights: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray]


KINDS = {
    0: Kind("F32", 1, 4, lambda raw: raw.copy().view("<f4")),
    1: Kind("F16", 1, 2, lambda raw: raw.copy().view("<f2").astype(np.float32)),
    2: Kind("Q4_0", BLOCK, 18, _q4_0),
    3: Kind("Q4_1", BLOCK, 20, _q4_1),
    8: Kind("Q8_0", BLOCK, 34, _q8_0),
    30: Kind("BF16", 1, 2, _bf16),
}
"""GGML type number -> how to read it."""


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Slowest first, as in torch."""
    type: int
    offset: int


class GGUF:
    """A parsed file; tensor data stays mapped until asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"no GGUF file at {self.path}; give a path to a .gguf file")
        self._data = np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.zeros(0, np.uint8)
        self._at = 0
        if self._take(4).tobytes() != b"GGUF":
            raise CheckpointError(f"{self.path} does not start with 'GGUF'; it is another kind of file")
        version = self._scalar("<u4")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; etude reads 2 and 3")
        tensors, entries = self._scalar("<u8"), self._scalar("<u8")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<u4"))
        infos = [self._info() for _ in range(tensors)]
        self.tensors = {info.name: info for info in infos}
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as float32, dequantised."""
        info = self.tensors[name]
        kind = KINDS.get(info.type)
        if kind is None:
            known = ", ".join(k.name for k in KINDS.values())
            raise CheckpointError(f"{self.path}: tensor {name!r} has GGML type {info.type}, which etude cannot read; it reads {known}")
        blocks, rest = divmod(int(np.prod(info.shape)), kind.weights)
        if rest or info.shape[-1] % kind.weights:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of shape {list(info.shape)} does not fill {kind.name} blocks of {kind.weights}"
            )
        self._at = self._start + info.offset
        raw = self._take(blocks * kind.size).reshape(blocks, kind.size)
        return kind.decode(raw).reshape(info.shape)

    def _take(self, size: int) -> np.ndarray:
        if self._at + size > len(self._data):
            raise CheckpointError(f"{self.path} ends at byte {len(self._data)}, in the middle of something; download it again")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def _scalar(self, dtype: str) -> Any:
        return self._take(np.dtype(dtype).itemsize).view(dtype)[0].item()

    def _string(self) -> str:
        return self._take(self._scalar("<u8")).tobytes().decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._scalar("<u4"), self._scalar("<u8")
            if inner in SCALARS:
                return self._take(count * np.dtype(SCALARS[inner]).itemsize).view(SCALARS[inner]).tolist()
            return [self._value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path} holds a metadata value of type {kind}, which GGUF does not define; it is damaged")
        return self._scalar(SCALARS[kind])

    def _info(self) -> TensorInfo:
        name = self._string()
        sizes = [self._scalar("<u8") for _ in range(self._scalar("<u4"))]
        return TensorInfo(name, tuple(reversed(sizes)), self._scalar("<u4"), self._scalar("<u8"))


# ---------------------------------------------------------------------------------------------------
# Llama architecture

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def load_gguf(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    numerics: Numerics = "fast",
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The model in a GGUF file, dequantised. `progress` hears how many of how many tensors were read."""
    file = GGUF(path)
    model = meta_model(gguf_config(file), numerics)
    fill(model, _Source(file, model.config, progress), dtype=dtype, device=device)
    return model


def gguf_to_folder(
    path: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a GGUF file as a Hugging Face folder. The weights are the dequantised ones, rounded to `dtype`."""
    folder, metadata = Path(folder), GGUF(path).metadata
    tokenizer = gguf_tokenizer(path)
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_ROLES.items()}
    save_model(load_gguf(path, dtype=dtype, progress=progress), folder, extra={k: v for k, v in ids.items() if k != "unk_token_id"})
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(gguf_tokenizer_config(metadata), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def gguf_config(file: GGUF) -> ModelConfig:
    """The ModelConfig that the metadata of a file describes."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path} has the architecture {architecture!r}; etude reads 'llama' from GGUF, others from a folder")

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{key}", default)
        if value is None:
            raise CheckpointError(f"{file.path} has no metadata 'llama.{key}'; the file is not complete")
        return value

    if get("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
        raise CheckpointError(f"{file.path} asks for scaled rotary frequencies, which are not implemented")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'; the file is not complete")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path} turns {get('rope.dimension_count')} of {head_dim} dimensions of a head; etude turns whole heads"
        )
    return ModelConfig(
        family="llama",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=get("feed_forward_length"),
        rope_theta=_written(get("rope.freq_base", 10_000.0)),
        norm_eps=_written(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        max_positions=get("context_length"),
    )


def _written(value: float) -> float:
    """The decimal number that a float32 was written for: 1e-05, not 9.999999747378752e-06, as config.json has it."""
    return float(str(np.float32(value)))


class _Source:
    """The tensors of a file under their Hugging Face names, as `weights.fill` wants them."""

    def __init__(self, file: GGUF, config: ModelConfig, progress: Callable[[int, int], None] | None = None) -> None:
        self.where = str(file.path)
        self._file = file
        self._progress = progress
        self._read: set[str] = set()
        self._heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
        self._gguf_names = {_hf_name(name): name for name in file.tensors}

    def names(self) -> list[str]:
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def tensor(self, name: str) -> Tensor:
        gguf_name = self._gguf_names[name]
        value = self._file.tensor(gguf_name)
        self._read.add(name)
        if self._progress is not None:
            self._progress(len(self._read), len(self._gguf_names))
        for part, heads in self._heads.items():
            if gguf_name.endswith(f".{part}.weight"):
                value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        return torch.from_numpy(np.ascontiguousarray(value))


def _hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; one that has none keeps its own and is refused by name."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    if prefix != "blk" or part not in LAYER_NAMES:
        return name
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


# ---------------------------------------------------------------------------------------------------
# Tokenizer

PRE_TOKENIZERS: dict[str, list[Any]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
"""`tokenizer.ggml.pre` -> how text is cut before merges."""


def gguf_tokenizer(path: str | Path) -> Tokenizer:
    """The byte-level BPE tokenizer stored in a file; `.save(...)` writes it as tokenizer.json."""
    metadata = GGUF(path).metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"{path} has the tokenizer {model!r} / {pre!r}; etude reads 'gpt2' with one of {sorted(PRE_TOKENIZERS)}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} has a tokenizer whose merges do not fit its vocabulary: {error}; it is damaged") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL_TOKEN] * len(tokens))
    special = [
        AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL_TOKEN, USER_TOKEN)
    ]
    tokenizer.add_tokens(special)
    return tokenizer


TOKEN_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Role of a special token in Hugging Face's words -> in those of GGUF."""


def gguf_tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json that belongs to `gguf_tokenizer`: roles of special tokens, chat template, longest text.

    The class is the generic one, which takes everything from tokenizer.json; those of an architecture bring a splitting of their own.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {f"{name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_ROLES.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{name: tokens[id] for name, id in ids.items() if id is not None},
    }
    if "llama.context_length" in metadata:
        config["model_max_length"] = metadata["llama.context_length"]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
