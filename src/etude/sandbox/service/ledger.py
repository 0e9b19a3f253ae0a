"""What an environment service must know after a kill -9: one small file an environment, written before it exists.

    ROOT/envs/<id>.json    owner, create_id, image, limits, network, leases as points in time

Written whole under another name and renamed, so a file is either the old or the new one. A file without a sandbox is a
sandbox that died with a machine; a sandbox without a file is an orphan. The list of both is compared at start.

Leases: an environment lives as long as one of its leases does. "rollout" is taken by who creates it, "grade" by who
grades, for longer and independent of the first: a rollout that ends or dies must not take its environment away from the
grader. A lease ends at its time, or when its holder has not been heard of for BEAT_GRACE_S.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import UserError

BEAT_S, BEAT_GRACE_S = 10.0, 45.0
ROLLOUT, GRADE = "rollout", "grade"
KINDS = (ROLLOUT, GRADE)


@dataclass(kw_only=True, slots=True)
class Lease:
    """Times are monotonic. A lease without a holder's name goes by its time alone: whoever took it at a terminal does not beat."""

    holder: str
    until: float
    heard: float

    def why_over(self, now: float) -> str:
        if now >= self.until:
            return "its lease ran out"
        if self.holder and now >= self.heard + BEAT_GRACE_S:
            return f"nothing was heard of {self.holder} for {BEAT_GRACE_S:g} s"
        return ""


@dataclass(kw_only=True, slots=True)
class Entry:
    """One environment, as it is kept on disk."""

    id: str
    owner: str
    create_id: str
    image: str
    limits: dict[str, Any]
    network: dict[str, Any]
    leases: dict[str, Lease] = field(default_factory=dict)

    def take(self, kind: str, holder: str, ttl_s: float) -> None:
        if kind not in KINDS:
            raise UserError(f"no lease {kind!r}; known: {', '.join(KINDS)}")
        if not 0 < ttl_s < 1e7:
            raise UserError(f"a lease of {ttl_s} s")
        now = time.monotonic()
        self.leases[kind] = Lease(holder=holder, until=now + ttl_s, heard=now)

    def beat(self, holder: str) -> None:
        for lease in self.leases.values():
            if lease.holder == holder:
                lease.heard = time.monotonic()

    def why_over(self, now: float) -> str:
        """Why no lease holds it any more; "" while one does."""
        whys = [lease.why_over(now) for lease in self.leases.values()]
        return "" if not all(whys) else (whys[0] if whys else "it has no lease")


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()

    def write(self, entry: Entry) -> None:
        shift = time.time() - time.monotonic()
        leases = {kind: {"holder": lease.holder, "until": lease.until + shift} for kind, lease in entry.leases.items()}
        fields = {name: getattr(entry, name) for name in ("id", "owner", "create_id", "image", "limits", "network")}
        path = self._folder / f"{entry.id}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**fields, "leases": leases}))
        os.replace(temporary, path)

    def remove(self, name: str) -> None:
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def read(self) -> tuple[list[Entry], list[str]]:
        """(entries, names of files that are none). Holders get a grace period from now on: they could not beat while nobody listened."""
        entries, broken = [], []
        now, shift = time.monotonic(), time.time() - time.monotonic()
        for path in sorted(self._folder.glob("*.json")):
            try:
                data = json.loads(path.read_text())
                kept = data.pop("leases")
                leases = {kind: Lease(holder=each["holder"], until=each["until"] - shift, heard=now) for kind, each in kept.items()}
                entries.append(Entry(**data, leases=leases))
            except (ValueError, TypeError, KeyError):
                broken.append(path.stem)
        return entries, broken
