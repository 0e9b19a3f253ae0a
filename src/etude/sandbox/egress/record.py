"""What a sandbox asked of the network: one JSON object a line, written by the host as it happens.

Every line has `t` (seconds since the sandbox's network began), `phase`, `kind` and `allowed`; what was denied says why in `reason`.
Kinds: `name` (a question to the resolver), `connect`, `request` (also with `method`, `path`, `status`, `sent`,
`received`, `stripped`), `stray` (a packet to a port or by a protocol that nothing listens on), `phase`.
A line holds at most a few hundred bytes of what came from inside, and lines are counted beyond MAX_LINES: the log is
evidence, and no place to fill a disk from.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

MAX_LINES = 20_000
MAX_TEXT = 500


class NetworkLog:
    """Kept in memory, and in a file where a path is given."""

    def __init__(self, path: Path | None = None) -> None:
        self._since = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        """"KIND allowed" and "KIND denied", lines that were not kept included."""
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")

    def write(self, phase: str, kind: str, allowed: bool, **fields: Any) -> None:
        self.counts[f"{kind} {'allowed' if allowed else 'denied'}"] += 1
        if len(self.lines) >= MAX_LINES:
            self.counts["not kept"] += 1
            return
        kept = {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in fields.items() if value not in ("", None, [])}
        line = {"t": round(time.monotonic() - self._since, 4), "phase": phase, "kind": kind, "allowed": allowed, **kept}
        self.lines.append(line)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
