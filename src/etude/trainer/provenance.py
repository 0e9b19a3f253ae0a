"""Where a checkpoint comes from: base, licences, data, and the share of compute that was ours. Lies in model/provenance.json.

A provenance is a list of stages, oldest first; each training run appends one. A stage counts the floating-point operations it
really did (see `flops`). `share_ours` is the operations of our stages over those of all; it is null as long as one stage's count is
unknown, because a guess would look like a measurement.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError

FILE = "provenance.json"


@dataclass(frozen=True, kw_only=True)
class Stage:
    kind: str
    """base | pretrain | rl | rollouts"""
    name: str
    ours: bool
    flops: float | None
    """Operations of the stage so far; None when nobody published them."""
    licence: str = ""
    data: tuple[str, ...] = ()
    """What it was trained on: shard folders, recipes, generators."""
    weights: str = ""
    """Content hash of the weights the stage started from; empty for random weights."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    stages: tuple[Stage, ...] = ()

    def plus(self, *stages: Stage) -> Provenance:
        return Provenance(stages=(*self.stages, *stages))

    @property
    def share_ours(self) -> float | None:
        if any(s.flops is None for s in self.stages):
            return None
        total = sum(s.flops or 0.0 for s in self.stages)
        return sum(s.flops or 0.0 for s in self.stages if s.ours) / total if total else None

    @property
    def licence(self) -> str:
        """Licence of the latest stage that names one."""
        return next((s.licence for s in reversed(self.stages) if s.licence), "")

    def write(self, folder: Path) -> None:
        data = {"schema": 1, "licence": self.licence, "share_ours": self.share_ours, "stages": [asdict(s) for s in self.stages]}
        (folder / FILE).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def read(folder: Path) -> Provenance:
    """The provenance of a model folder; a folder without one is a base of unknown compute."""
    path = folder / FILE
    if not path.is_file():
        return Provenance(stages=(Stage(kind="base", name=folder.name, ours=False, flops=None),))
    try:
        data = json.loads(path.read_text())
        return Provenance(stages=tuple(Stage(**{**s, "data": tuple(s["data"])}) for s in data["stages"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a provenance record: {error!r}; restore it from the folder it was copied from") from error
