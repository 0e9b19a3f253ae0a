"""Live progress of a run in the terminal, from the events alone.

On a terminal: one panel that redraws. Elsewhere (a pipe, a log file): one plain line per step and per evaluation.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etude.rollout.recorder import PART_NAMES


class Progress:
    """Feed it every event with `see`; use it as a context manager around the run."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.console = console or Console()
        self.step = 0
        self.what = "starting"
        self.since = time.monotonic()
        self.started = time.monotonic()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.rollouts = 0
        self.failed = 0
        self.tokens: deque[tuple[float, int]] = deque(maxlen=400)
        self.recent: deque[dict[str, Any]] = deque(maxlen=128)
        self.staleness: deque[int] = deque(maxlen=64)
        self.metrics: dict[str, float] = {}
        self.evals: list[dict[str, Any]] = []
        self.evaluating = ""
        self.alarm = ""
        self._live: Live | None = None
        self._shown = 0.0

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self.render(), console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live:
            self._live.update(self.render())
            self._live.__exit__(*exc)
            self._live = None

    def see(self, event: dict[str, Any]) -> None:
        """Take one event of the run."""
        handler = getattr(self, "_on_" + event["kind"], None)
        if handler:
            handler(event)
        if self._live and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            self._live.update(self.render())

    def evaluation(self, suite: str, done: int, total: int) -> None:
        self.evaluating = f"evaluating {suite}: {done}/{total}" if done < total else ""
        if self._live and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            self._live.update(self.render())

    def _on_waiting(self, event: dict[str, Any]) -> None:
        self.spent[self.what] += time.monotonic() - self.since
        self.what, self.since = event["what"], time.monotonic()

    def _on_rollout_ended(self, event: dict[str, Any]) -> None:
        self.rollouts += 1
        self.recent.append(event)
        self.tokens.append((time.monotonic(), event["tokens"]))

    def _on_rollout_failed(self, event: dict[str, Any]) -> None:
        self.failed += 1

    def _on_group_trained(self, event: dict[str, Any]) -> None:
        self.staleness.append(event["staleness"])

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"] + 1
        self.metrics = event["metrics"]
        if not self._live:
            self.console.print(self._line(), highlight=False, soft_wrap=True)

    def _on_alarm(self, event: dict[str, Any]) -> None:
        self.alarm = f"alarm at step {event['step']}: {event['metric']} = {event['value']:.3g}, threshold {event['threshold']:g}"
        if not self._live:
            self.console.print(f"{self.alarm}; {event['advice']}", highlight=False, soft_wrap=True)

    def _on_eval(self, event: dict[str, Any]) -> None:
        self.evals.append(event)
        if not self._live:
            self.console.print(_eval_line(event), highlight=False, soft_wrap=True)

    # -- drawing -----------------------------------------------------------------------------------

    def _line(self) -> str:
        m = self.metrics
        return (
            f"step {self.step}/{self.steps}  reward {self._mean('reward'):.3f}  pass {self._mean('solved'):.2f}  "
            f"{self._rate():.0f} tok/s  staleness {self._staleness()}  mismatch {m.get('dlogp_mean', 0.0):.1e}  "
            f"ess {m.get('ess', 1.0):.2f}  rollouts {self.rollouts}  masked {self.failed}  {time.monotonic() - self.started:.0f} s"
        )

    def _mean(self, field: str) -> float:
        return sum(float(e[field]) for e in self.recent) / max(1, len(self.recent))

    def _rate(self) -> float:
        if len(self.tokens) < 2:
            return 0.0
        span = max(1e-3, time.monotonic() - self.tokens[0][0])
        return sum(n for _, n in self.tokens) / span

    def _staleness(self) -> str:
        if not self.staleness:
            return "-"
        return f"{sum(self.staleness) / len(self.staleness):.1f} (max {max(self.staleness)})"

    def render(self) -> Group:
        grid = Table.grid(padding=(0, 3))
        m = self.metrics
        grid.add_row(
            "step", f"{self.step}/{self.steps}", "reward", f"{self._mean('reward'):.3f}", "pass rate", f"{self._mean('solved'):.2f}"
        )
        grid.add_row("tokens/s", f"{self._rate():.0f}", "staleness", self._staleness(), "mismatch", f"{m.get('dlogp_mean', 0.0):.1e}")
        grid.add_row("rollouts", str(self.rollouts), "masked", str(self.failed), "elapsed", f"{time.monotonic() - self.started:.0f} s")
        now = self.evaluating or f"{PART_NAMES.get(self.what, self.what)} ({time.monotonic() - self.since:.0f} s)"
        longest = sorted(self.spent.items(), key=lambda item: -item[1])[:5]
        so_far = ", ".join(f"{PART_NAMES.get(part, part)} {seconds:.0f} s" for part, seconds in longest)
        rows: list[Any] = [Text(self.title, style="bold"), grid, Text("now: " + now, style="dim"), Text("so far: " + so_far, style="dim")]
        rows += [Text(self.alarm, style="yellow")] if self.alarm else []
        rows += [Text(_eval_line(e)) for e in self.evals[-6:]]
        return Group(*rows)


def _eval_line(event: dict[str, Any]) -> str:
    return (
        f"eval at step {event['step']}: {event['suite']:8s} pass@1 {event['pass_at_1']:.3f} "
        f"[{event['low']:.3f}, {event['high']:.3f}] on {event['tasks']} tasks"
    )
