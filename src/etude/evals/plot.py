"""Small plots without a plotting library: a sparkline and a braille plot for the terminal, an SVG for a report.

The same numbers always give the same bytes, so that a committed report changes only when its numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each of the 4 x 2 dots of a braille cell."""
COLOURS = ("#1f5fa8", "#c2571a", "#2e7d43", "#7b3f98", "#6b6b6b", "#a8861f")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
"""Lines differ in dash as well as colour, for readers who do not see the colours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None
    """Ends of the interval bar; None draws no bar."""
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    points: tuple[Point, ...]


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """One character a value; a value that is not a number is a space.

    Example:
        sparkline([0, 0.5, 1])    # three bars, rising
    """
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return " " * len(values)
    bottom = min(known) if low is None else low
    span = (max(known) if high is None else high) - bottom
    return "".join(_bar((v - bottom) / span if span > 0 else 0.5) if math.isfinite(v) else " " for v in values)


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, max(0, int(share * len(BARS))))]


# ---------------------------------------------------------------------------------------------------
# Axes


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _ranges(series: Sequence[Series], y_range: tuple[float, float] | None) -> tuple[_Range, _Range]:
    points = [p for s in series for p in s.points]
    xs = [p.x for p in points]
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None and math.isfinite(v)]
    return _span(xs), _Range(*y_range) if y_range else _span(ys)


def _span(values: Sequence[float]) -> _Range:
    if not values:
        return _Range(0.0, 1.0)
    low, high = min(values), max(values)
    return _Range(low, high) if high > low else _Range(low - 0.5, low + 0.5)


def _ticks(range_: _Range, count: int = 5) -> list[float]:
    """Round numbers inside a range."""
    raw = (range_.high - range_.low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.ceil(range_.low / step - 1e-9), math.floor(range_.high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


# ---------------------------------------------------------------------------------------------------
# Terminal


def braille(series: Sequence[Series], *, width: int = 60, height: int = 12, y_range: tuple[float, float] | None = None) -> str:
    """Lines of all series in one grid of `width` x `height` characters, with the ends of both axes written beside it."""
    x_range, y_span = _ranges(series, y_range)
    cells = [[0] * width for _ in range(height)]
    for line in series:
        dots = [
            (round(x_range.share(p.x) * (2 * width - 1)), round((1 - y_span.share(p.y)) * (4 * height - 1)))
            for p in line.points
            if math.isfinite(p.y)
        ]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            _draw(cells, start, end)
    labels = [f"{y_span.high:.3g}", *[""] * (height - 2), f"{y_span.low:.3g}"]
    margin = max(len(text) for text in labels)
    rows = [f"{label:>{margin}} " + "".join(chr(BRAILLE + c) for c in row) for label, row in zip(labels, cells, strict=False)]
    left, right = f"{x_range.low:g}", f"{x_range.high:g}"
    return "\n".join([*rows, " " * (margin + 1) + left + right.rjust(width - len(left))])


def _draw(cells: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    for i in range(steps + 1):
        x, y = round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)
        if 0 <= y < 4 * len(cells) and 0 <= x < 2 * len(cells[0]):
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]


# ---------------------------------------------------------------------------------------------------
# SVG

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 54, 46
LEGEND_PITCH = 140
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def svg(
    series: Sequence[Series], *, title: str = "", x_label: str = "", y_label: str = "", y_range: tuple[float, float] | None = None
) -> str:
    """Lines with interval bars, as a standalone SVG of 640 x 360."""
    x_range, y_span = _ranges(series, y_range)

    def at(x: float, y: float) -> tuple[str, str]:
        across = LEFT + x_range.share(x) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - y_span.share(min(max(y, y_span.low), y_span.high)) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f}", f"{down:.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" {FONT} role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" fill="#222">{escape(title)}</text>',
    ]
    for tick in _ticks(y_span):
        _, y = at(x_range.low, tick)
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end" fill="#444">{tick:g}</text>')
    for tick in _ticks(x_range):
        x, _ = at(tick, y_span.low)
        out.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#444">{tick:g}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) // 2, (TOP + HEIGHT - BOTTOM) // 2
    turned = f'transform="translate(14 {middle_y}) rotate(-90)"'
    out.append(f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle" fill="#222">{escape(x_label)}</text>')
    out.append(f'<text {turned} text-anchor="middle" fill="#222">{escape(y_label)}</text>')
    for number, line in enumerate(series):
        out += _svg_line(line, COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)], at)
        out.append(_svg_legend(line.name, number, COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]))
    return "\n".join([*out, "</svg>"]) + "\n"


def _svg_line(line: Series, colour: str, dash: str, at: object) -> list[str]:
    assert callable(at)
    out = []
    points = [p for p in line.points if math.isfinite(p.y)]
    if len(points) > 1:
        path = " ".join(",".join(at(p.x, p.y)) for p in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
    for p in points:
        x, y = at(p.x, p.y)
        if p.low is not None and p.high is not None:
            (_, top), (_, bottom) = at(p.x, p.high), at(p.x, p.low)
            out.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="{colour}" stroke-width="1.5"/>')
            for end in (top, bottom):
                out.append(f'<line x1="{float(x) - 4:.1f}" y1="{end}" x2="{float(x) + 4:.1f}" y2="{end}" stroke="{colour}"/>')
        out.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
    return out


def _svg_legend(name: str, number: int, colour: str, dash: str) -> str:
    """One entry of the row between title and plot, where no line can run through it."""
    x, y = LEFT + LEGEND_PITCH * number, TOP - 16
    return (
        f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        f'<text x="{x + 30}" y="{y}" dy="4" fill="#222">{escape(name)}</text>'
    )
