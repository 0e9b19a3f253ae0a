"""Hugging Face folders in and out: config.json and safetensors, in one file or sharded, with no conversion step.

A tensor is read from the mapped file straight into its parameter, converted on the way: nothing is held twice. Every
tensor of the checkpoint must be used and every parameter filled; what is missing, unexpected or of another shape is
named. Parameters of `transformer.KEPT` keep their type both ways. Files are written under a temporary name and renamed, so
a file with its final name is whole. Saving what was loaded, in the same dtype, gives the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.errors import CheckpointError
from etude.model.config import ModelConfig, Numerics
from etude.model.families import config_from_hf, copies, disk_names, family, without_absent_heads
from etude.model.transformer import KEPT, Decoder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
"""Largest file `save_model` writes unless one tensor is larger."""
IGNORED = ("rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry and nobody needs."""


def load_model(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", numerics: Numerics = "fast"
) -> Decoder:
    """The model in a Hugging Face folder."""
    folder = Path(folder)
    config = read_config(folder)
    source = Checkpoint(checkpoint_files(folder), where=str(folder))
    model = meta_model(without_absent_heads(config, source.names()), numerics)
    fill(model, source, dtype=dtype, device=device)
    return model


def check_folder(folder: str | Path) -> ModelConfig:
    """Refuse a Hugging Face folder that `load_model` would refuse, reading names and shapes only."""
    folder = Path(folder)
    config = read_config(folder)
    source = Checkpoint(checkpoint_files(folder), where=str(folder))
    model = meta_model(without_absent_heads(config, source.names()))
    _check_names(model, source)
    for name, parameter in model.named_parameters():
        _check_shapes(model, source, name, parameter)
    return model.config


def save_model(
    model: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and safetensors that `transformers` and `load_model` read.

    `extra` goes into config.json as it is: eos_token_id and the like, which belong to the tokenizer. Without it the token
    ids are null, since a default would make other programs stop at an arbitrary token. Old weight files in the folder go.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    shards = list(_shards(model, dtype, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        # clone: safetensors refuses tensors that share memory, as the slices of a stack do
        tensors = {disk: part.to(_type(disk, part, dtype), copy=True) for disk, part in shard.items()}
        _replace(folder / name, lambda path, tensors=tensors: save_file(tensors, path, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {disk: name for name, shard in zip(names, shards, strict=True) for disk in shard}
        total = sum(part.numel() * _type(disk, part, dtype).itemsize for disk, part in disk_tensors(model))
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    for old in folder.glob("model*.safetensors*"):
        if old.name not in names and not (old.name == INDEX and len(shards) > 1):
            old.unlink()
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    data = {**family(model.config).to_hf(model.config), **tokens, **(extra or {}), "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", data)


def from_config(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    numerics: Numerics = "fast",
) -> Decoder:
    """A fresh model with weights from the seed."""
    model = meta_model(config, numerics).to_empty(device=device).to(dtype)
    model.init_weights(seed)
    return model


def meta_model(config: ModelConfig, numerics: Numerics = "fast") -> Decoder:
    """A model with shapes and no memory behind them."""
    with torch.device("meta"):
        return Decoder(config, numerics=numerics)


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"no model in {str(folder)!r}: it has no config.json; give a Hugging Face model folder")
    return config_from_hf(_read_json(path))


# ---------------------------------------------------------------------------------------------------
# Reading


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, or the single one."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX} has no 'weight_map'; it should map tensor names to files")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / SINGLE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"the model folder lacks the weights file {file}; copy it there or download the model again")
    return files


class Source(Protocol):
    """Named tensors somewhere, under their checkpoint names."""

    where: str

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """Named tensors in safetensors files."""

    def __init__(self, files: list[Path], *, where: str) -> None:
        self.where = where
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, "pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is not a whole safetensors file ({error}); download or save it again") from error
            for name in handle.keys():  # noqa: SIM118  a safetensors handle is not a mapping
                self._handles[name] = handle

    def names(self) -> list[str]:
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


@torch.no_grad()
def fill(model: Decoder, source: Source, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every parameter of a meta model memory and the source's values."""
    _check_names(model, source)
    for name, parameter in list(model.named_parameters()):
        kept = source.tensor(disk_names(name, model.config)[0]).dtype if name.endswith(KEPT) else dtype
        value = torch.empty(parameter.shape, dtype=kept, device=device)
        _check_shapes(model, source, name, value)
        for disk, part in _slices(model, name, value):
            part.copy_(source.tensor(disk))
        _assign(model, name, value)
    present = set(source.names())
    for copy, original in copies(model.config).items():
        if copy in present and not torch.equal(source.tensor(copy), source.tensor(original)):
            raise CheckpointError(
                f"{source.where}: tensor {copy!r} differs from {original!r}; etude's heads share the model's own, so set "
                "num_nextn_predict_layers to 0 in config.json to load the model without them"
            )


def _check_shapes(model: Decoder, source: Source, name: str, value: Tensor) -> None:
    for disk, part in _slices(model, name, value):
        if source.shape(disk) != tuple(part.shape):
            found, asked = list(source.shape(disk)), list(part.shape)
            raise CheckpointError(f"{source.where}: tensor {disk!r} has the shape {found}, but config.json asks for {asked}")


def _slices(model: Decoder, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors behind one parameter: itself, or the slices of a stack of experts."""
    parts = value.unbind() if value.dim() == 3 else (value,)
    yield from zip(disk_names(name, model.config), parts, strict=True)


def _check_names(model: Decoder, source: Source) -> None:
    """Refuse missing and unexpected tensors before anything is read."""
    shapes = {disk: list(part.shape) for disk, part in disk_tensors(model)}
    present = set(source.names())
    present -= family(model.config).unused(present, model.config) | copies(model.config).keys()
    missing = sorted(set(shapes) - present)
    if missing:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(f"{source.where}: the weights lack tensor {missing[0]!r} of shape {shapes[missing[0]]}{more}")
    ignored = {"lm_head.weight"} if model.config.tie_embeddings else set()
    unknown = sorted(name for name in present - set(shapes) - ignored if not name.endswith(IGNORED))
    if unknown:
        found = list(source.shape(unknown[0]))
        raise CheckpointError(
            f"{source.where}: tensor {unknown[0]!r} of shape {found} has no place in the {model.config.family!r} model that config.json "
            f"describes ({len(unknown)} such); correct config.json, or the file belongs to another model"
        )


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=not leaf.endswith(KEPT)))


# ---------------------------------------------------------------------------------------------------
# Writing


def disk_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, view of the parameter) of everything a checkpoint holds."""
    for name, parameter in model.named_parameters():
        yield from _slices(model, name, parameter.detach())


def _shards(model: Decoder, dtype: torch.dtype, limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for disk, part in disk_tensors(model):
        part_bytes = part.numel() * _type(disk, part, dtype).itemsize
        if shard and size + part_bytes > limit:
            yield shard
            shard, size = {}, 0
        shard[disk] = part
        size += part_bytes
    yield shard


def _type(disk: str, part: Tensor, dtype: torch.dtype) -> torch.dtype:
    return part.dtype if disk.endswith(KEPT) else dtype


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    _replace(path, lambda temporary: temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object, got {type(data).__name__}")
    return data
