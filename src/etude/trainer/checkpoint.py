"""The trainer's half of a checkpoint, and reading it back bit for bit.

    <folder>/model/            Hugging Face folder (weights in the published type, config, tokenizer) + provenance.json
    <folder>/optim/            torch.distributed.checkpoint: float32 master weights, optimizer moments, random state
    <folder>/optim/state.json  step, version, lineage, hashes of the above, and what the trainer adds

The caller writes into `step-N.tmp` and commits by rename, so a folder with its final name is whole. Hashes of the weights and of
the optimizer's tensors are in state.json and checked on reading: a flipped byte is an error, never a slightly different run.
One process needs no process group; the tensors' layout is the one that reshards over ranks.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from etude.errors import CheckpointError, IntegrityError
from etude.model.transformer import Decoder
from etude.model.weights import save_model
from etude.sync.chain import weights_hash

STATE = "state.json"
SCHEMA = 1
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as a distributed checkpoint of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


def load_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the given tensors in place; their names and shapes say what is expected."""
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"no distributed checkpoint at {folder} (.metadata is missing); it is half-written or not a checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(into), checkpoint_id=folder, no_dist=True)
        except (CheckpointException, OSError, EOFError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise CheckpointError(f"the optimizer state in {folder} cannot be read: {reason}") from error


def save_checkpoint(
    folder: Path, model: Decoder, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, tokenizer: Path | None, dtype: torch.dtype
) -> None:
    """Write model/ and optim/ into `folder`. `tensors` is all that exact continuation needs; `state` is JSON."""
    model_folder, optim_folder = folder / "model", folder / "optim"
    model_folder.mkdir(parents=True, exist_ok=True)
    save_model(model, model_folder, dtype=dtype, extra=token_ids(tokenizer) if tokenizer is not None else None)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, model_folder)
    optim_folder.mkdir(parents=True, exist_ok=True)
    save_tensors(optim_folder, tensors)
    stored = {"schema": SCHEMA, **state, "tensors_hash": weights_hash(tensors)}
    (optim_folder / STATE).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    path = folder / "optim" / STATE
    if not path.is_file():
        raise CheckpointError(f"no trainer state at {path}; give the step-N folder of a finished checkpoint")
    try:
        state = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if state.get("schema") != SCHEMA:
        found = state.get("schema")
        raise CheckpointError(f"{path} has schema {found!r}, this etude reads {SCHEMA}; resume with the version that wrote it")
    return state


def restore_tensors(folder: Path, into: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Fill `into` from `folder`/optim and check it against the hash in the state."""
    load_tensors(folder / "optim", into)
    found = weights_hash(into)
    if found != state["tensors_hash"]:
        raise IntegrityError(f"tensors in {folder / 'optim'} hash to {found}, not {state['tensors_hash']} as recorded; they are damaged")


def token_ids(folder: Path) -> dict[str, Any]:
    """Which ids begin, end and pad a text, as the folder's config.json says; they travel with the tokenizer."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) if path.is_file() else {}
    return {name: data[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if data.get(name) is not None}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, so that a checkpoint's model folder is complete by itself."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
