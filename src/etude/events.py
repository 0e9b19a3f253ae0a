"""The append-only event log of a run: one JSON object a line, and every claim about a run is proved from it.

Each line is `{"n", "t", "kind", ...}`: n counts from 0 without gaps, t is seconds since the run's first line
(0 in lockstep, where nothing may depend on a clock). Kinds and their fields are in `KINDS`, and as JSON schema in
docs/schemas/event.json.

Crash safety: a line counts only with its newline. `EventLog` opens an existing file, cuts an unfinished last
line, and goes on counting; `read_events` ignores such a tail.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import RecordError, nearest

KINDS: dict[str, tuple[str, ...]] = {
    "run_started": ("name", "recipe", "seed", "schedule", "lineage", "versions"),
    "run_resumed": ("from_step", "lineage"),
    "run_ended": ("outcome", "detail"),
    "config_revision": ("revision", "changed"),
    "group_admitted": ("admission", "task", "version"),
    "rollout_ended": ("admission", "member", "trajectory", "stop", "reward", "solved", "oldest", "tokens", "turns", "seconds"),
    "rollout_failed": ("admission", "member", "where", "error"),
    "group_ready": ("admission", "members", "dropped", "oldest"),
    "group_trained": ("admission", "step", "lineage", "staleness"),
    "group_dropped": ("admission", "step", "reason"),
    "step": ("step", "version", "metrics", "seconds"),
    "alarm": ("step", "metric", "value", "threshold", "advice"),
    "published": ("step", "version", "hash", "bytes", "seconds"),
    "served": ("step", "version", "hash", "pause_s"),
    "checkpoint": ("step", "path", "unfinished"),
    "eval": ("step", "suite", "tasks", "pass_at_1", "low", "high", "detail"),
    "finding": ("trajectory", "rule", "action", "evidence"),
    "waiting": ("part", "what", "seconds"),
    "note": ("text",),
}
"""kind -> the fields every such line has (more are allowed)."""

METRICS: dict[str, str] = {
    "loss": "Surrogate loss of the step; its value means little, its gradient is what trains.",
    "grad_norm": "Global gradient norm before clipping.",
    "gain_slope": "Derivative of the loss by the logarithm of the logits' scale.",
    "gain_step": "What the step moved that logarithm by, beside the optimizer.",
    "lr": "Learning rate of this step.",
    "rows": "Packed rows.",
    "tokens": "Tokens of the packed rows, prompts and tool results included.",
    "sampled_tokens": "Sampled tokens trained on.",
    "groups": "Groups of the step.",
    "silent_groups": "Groups whose kept members all have the same reward.",
    "rollouts": "Kept rollouts of the step.",
    "signal_rollouts": "Rollouts with an advantage other than 0.",
    "dlogp_mean": "Mean |delta|, delta = log pi - log mu of a sampled token: trainer now minus engine then.",
    "dlogp_p99": "99th percentile of |delta|.",
    "dlogp_max": "Largest |delta|.",
    "mismatch_kl": "k1 estimate of KL(mu || pi): mean of -delta.",
    "mismatch_k3": "k3 estimate of KL(mu || pi): mean of r - 1 - delta, r = exp(delta).",
    "f2": "Share of tokens with max(r, 1/r) > 2.",
    "engine_dlogp_mean": "Mean |delta| of tokens sampled by the very weights that are trained.",
    "engine_dlogp_p99": "99th percentile of the same.",
    "engine_dlogp_max": "Largest of the same.",
    "engine_f2": "f2 of the same tokens.",
    "stale_dlogp_mean": "Mean |delta| of tokens sampled by older weights.",
    "stale_dlogp_p99": "99th percentile of the same.",
    "stale_dlogp_max": "Largest of the same.",
    "stale_f2": "f2 of the same tokens.",
    "fresh_share": "Share of tokens sampled by the very weights that are trained.",
    "lag_mean": "Mean age of the sampled tokens in versions.",
    "lag_max": "Largest age in versions.",
    "ess": "(sum r)^2 / (M sum r^2): effective sample size as a share of the tokens, before any correction.",
    "weight_mean": "Mean of r.",
    "weight_std": "Standard deviation of r.",
    "weight_max": "Largest r.",
    "applied_ess": "ess of the weights w that the correction gave to the tokens' gradients.",
    "applied_mean": "Mean of w.",
    "applied_std": "Standard deviation of w.",
    "applied_max": "Largest w.",
    "clip_share": "Share of tokens whose weight a bound of the correction changed.",
    "mask_share": "Share of tokens that the correction left without a gradient.",
    "entropy": "Mean entropy of the policy at the sampled tokens, in nats.",
    "kl": "k1 against the reference policy: mean of log pi - log ref; 0 when KL is off.",
    "kl_k3": "k3 against the reference policy; 0 when KL is off.",
    "balance": "Load-balancing loss (mixture of experts).",
    "load_entropy": "Evenness of expert use, 1 when even (mixture of experts).",
    "route_recorded": "Share of expert choices that the engine recorded; the others were routed freely (router replay).",
    "route_changed": "Share of recorded choices that the trainer's router would not have made.",
    "route_replaced": "Share of recorded choices that the route filter refused and the trainer's router replaced.",
}
"""Numbers of a `step` event and what they say. A trainer reports those it has."""


class EventLog:
    """Appends events to a file, one whole line per write."""

    def __init__(self, path: Path, *, clock: bool = True, since: float | None = None) -> None:
        """`since` is the monotonic time that counts as the start; now when it is not given."""
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._count, self._last_t, size = _whole_lines(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, size)
        self._t0 = (time.monotonic() if since is None else since) - self._last_t

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. Fields must be JSON types and include those the kind requires."""
        required = KINDS.get(kind)
        if required is None:
            raise RecordError(f"unknown event kind {kind!r}; {nearest(kind, KINDS)}")
        missing = [name for name in required if name not in fields]
        if missing:
            raise RecordError(f"event {kind!r} needs the field {missing[0]!r}")
        if taken := {"n", "t"} & set(fields):
            raise RecordError(f"event {kind!r} has a field {min(taken)!r}, which is the log's own; choose another name")
        t = round(time.monotonic() - self._t0, 4) if self._clock else 0
        line = json.dumps({"n": self._count, "t": t, "kind": kind, **fields}, separators=(",", ":"), allow_nan=False)
        self._append(line.encode() + b"\n")
        self._count += 1

    def _append(self, data: bytes) -> None:
        """The whole line or nothing of it: what a full disk cut short is taken back."""
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def sync(self) -> None:
        """Force what was written to the disk; called before a checkpoint is committed."""
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _whole_lines(path: Path) -> tuple[int, float, int]:
    """(number of whole lines, time of the last, their size in bytes)."""
    if not path.exists():
        return 0, 0.0, 0
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    lines = data[:size].splitlines()
    if not lines:
        return 0, 0.0, size
    try:
        last = json.loads(lines[-1])
        n, t = int(last["n"]), float(last["t"])
    except (ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{path} ends in a line that is not an event: {lines[-1][:60]!r}") from error
    if n != len(lines) - 1:
        raise RecordError(f"{path} has {len(lines)} lines and the last says n={n}: lines were lost")
    return len(lines), t, size


def read_events(path: Path, *, after: int = -1) -> Iterator[dict[str, Any]]:
    """Whole events with n > `after`, in order. A gap or a broken line in the middle is an error."""
    if not path.is_file():
        raise RecordError(f"no event log at {path}; give a run folder that has events.jsonl")
    expected = 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                event = json.loads(raw)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise RecordError(f"{path} line {expected + 1} is not JSON: {error}") from error
            n = event.get("n") if isinstance(event, dict) else None
            if n != expected:
                raise RecordError(f"{path} line {expected + 1} has n={n!r}, expected {expected}: lines were lost")
            expected += 1
            if event["n"] > after:
                yield event
