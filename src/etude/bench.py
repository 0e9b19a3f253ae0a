"""`etude bench NAME`: run one script of benchmarks/ and print what it measured.

A benchmark is `benchmarks/bench_NAME.py` with a function `run(device, quick) -> list[Row]`. It measures ours and the
peer in the same run, so that the ratio holds on any machine. The last line of output is one JSON object:

    {"bench", "device", "rows": [{"name", "unit", "ours", "peer", "peer_name", "ratio"}], "machine", "versions"}

`ratio` > 1 means that ours is better, whatever the unit; `peer` and `ratio` are null where there is no peer.
A full run with --write leaves the same object in benchmarks/results/NAME.DEVICE.json. A benchmark whose `run` also takes `model` measures
on any model that `etude model ls` shows: `--model M`, and the result is NAME-M.DEVICE.json.

    def run(device, quick):
        return [Row(name="decode", unit="tokens/s", ours=900.0, peer=300.0, peer_name="transformers", higher_is_better=True)]
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import EtudeError, UserError, nearest

PACKAGES = ("etude", "torch", "numpy", "safetensors", "tokenizers", "transformers", "vllm", "zstandard")
"""Whose versions a result names, where installed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number and, where there is one, the same number of a named peer from the same run."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str | None = None
    higher_is_better: bool
    """True for rates and scores, False for times and sizes."""

    def __post_init__(self) -> None:
        for value in (self.ours, self.peer):
            if value is not None and not math.isfinite(value):
                raise UserError(f"row {self.name!r} of the benchmark measured {value}, which is not a number to compare")
        if self.peer is not None and not self.peer_name:
            raise UserError(f"row {self.name!r} has a peer's value and no peer_name; name what it was measured against")

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; None without a peer, or where a zero makes it meaningless."""
        if self.peer is None:
            return None
        better, worse = (self.ours, self.peer) if self.higher_is_better else (self.peer, self.ours)
        return better / worse if worse else None

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "peer_name": self.peer_name,
            "ratio": self.ratio,
        }


def main(
    *, name: str, device: str = "cpu", quick: bool = False, write: bool = False, model: str | None = None, folder: Path | None = None
) -> int:
    """Run a benchmark, print its table and, as the last line, its JSON object."""
    if write and quick:
        raise UserError("--write keeps full runs only; leave --quick out")
    folder = folder or benchmarks_folder()
    run = load_benchmark(folder, name)
    require_device(device)
    if model is not None and "model" not in inspect.signature(run).parameters:
        raise UserError(f"benchmark {name!r} is not about a model of your choice; leave --model out")
    rows = run(device, quick, **({"model": model} if model is not None else {}))
    if not rows or not all(isinstance(row, Row) for row in rows):
        raise EtudeError(f"benchmark {name!r} returned {rows!r:.80}; its run() should return a list of etude.bench.Row, at least one")
    result = {
        "bench": name,
        "device": device,
        "rows": [row.plain() for row in rows],
        "machine": machine(device),
        "versions": versions(),
    }
    print(table(rows))
    if write:
        path = folder / "results" / f"{name}{f'-{model}' if model else ''}.{device}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        print(f"written: {path}")
    print(json.dumps(result, allow_nan=False))
    return 0


def benchmarks_folder() -> Path:
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "benchmarks").is_dir():
            return root / "benchmarks"
    raise UserError("no benchmarks/ folder here; run `./etude bench` in a clone of the repository")


def load_benchmark(folder: Path, name: str) -> Callable[..., Sequence[Row]]:
    """The `run` function of benchmarks/bench_NAME.py."""
    path = folder / f"bench_{name}.py"
    if not path.is_file():
        known = [p.stem.removeprefix("bench_") for p in folder.glob("bench_*.py")]
        raise UserError(f"no benchmark {name!r} in {folder}; {nearest(name, known)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickled workers of the script look it up there
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UserError(f"benchmark {name!r} needs something that is not installed: {error}") from error
    if not callable(getattr(module, "run", None)):
        raise UserError(f"{path} has no function run(device, quick)")
    return module.run


def require_device(device: str) -> None:
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda needs an NVIDIA GPU and a torch with CUDA; `etude doctor` says what is missing")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = ("name", "unit", "ours", "peer", "ratio", "")
    cells = [head]
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        cells.append((row.name, row.unit, f"{row.ours:.4g}", peer, ratio, f"against {row.peer_name}" if row.peer_name else ""))
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def machine(device: str) -> dict[str, Any]:
    """What a number depends on: processor, cores, memory, kernel, accelerator."""
    out: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpu": None,
    }
    if device == "cuda":
        import torch

        out["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return out


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out
