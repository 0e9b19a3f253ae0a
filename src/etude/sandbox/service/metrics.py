"""Counts and durations in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._times: dict[str, dict[str, list[float]]] = defaultdict(dict)

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        """`label` is "key=value"."""
        self._counts[name][label] += by

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        row = self._times[name].setdefault(label, [0.0] * (len(BUCKETS) + 2))
        for i, bound in enumerate(BUCKETS):
            row[i] += seconds <= bound
        row[-2] += 1
        row[-1] += seconds

    def total(self, name: str, label: str | None = None) -> int:
        counts = self._counts.get(name, Counter())
        return counts.total() if label is None else counts[label]

    def text(self, gauges: Mapping[str, float]) -> str:
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE etude_env_{name} gauge", f"etude_env_{name} {value:g}"]
        for name, counts in sorted(self._counts.items()):
            lines.append(f"# TYPE etude_env_{name}_total counter")
            lines += [f"etude_env_{name}_total{_labels(label)} {count}" for label, count in sorted(counts.items())]
        for name, rows in sorted(self._times.items()):
            lines.append(f"# TYPE etude_env_{name}_seconds histogram")
            for label, row in sorted(rows.items()):
                bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
                for bound, amount in zip(bounds, row, strict=False):
                    lines.append(f"etude_env_{name}_seconds_bucket{_labels(label, f'le={bound}')} {amount:g}")
                lines.append(f"etude_env_{name}_seconds_sum{_labels(label)} {row[-1]:.6f}")
                lines.append(f"etude_env_{name}_seconds_count{_labels(label)} {row[-2]:g}")
        return "\n".join([*lines, ""])


def _labels(*given: str) -> str:
    pairs = [label.partition("=") for label in given if label]
    return "{" + ",".join(f'{key}="{value}"' for key, _, value in pairs) + "}" if pairs else ""
