"""Pieces of an SVG plot: scales, axes, marks. Colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 26, 36

Scale = Callable[[float], float]


def linear(low: float, high: float, first: float, last: float) -> Scale:
    """Return the scale that maps `low`…`high` to `first`…`last`."""
    span = (high - low) or 1.0
    return lambda value: first + (value - low) / span * (last - first)


def log_scale(low: float, high: float) -> Scale:
    """Return the horizontal logarithmic scale of `low`…`high`."""
    inner = linear(math.log(low), math.log(high), LEFT, WIDTH - RIGHT)
    return lambda value: inner(math.log(max(value, low)))


def time_axis(rows: Sequence[dict[str, Any]], width_s: float) -> Scale:
    """Return the horizontal scale of a timeline."""
    return linear(0.0, len(rows) * width_s, LEFT, WIDTH - RIGHT)


def steps(top: float, wanted: int = 4) -> list[float]:
    """Return round numbers from 0 up to `top`."""
    raw = (top or 1.0) / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [round(number * step, 12) for number in range(int(top / step + 1e-9) + 1)]


def seconds_text(seconds: float) -> str:
    """Return a duration in words, three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def grid_y(values: Iterable[float], y: Scale, form: str) -> str:
    """Draw horizontal lines with their values on the left."""
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{y(v) + 3.5:.1f}">{form.format(v)}</text>'
        for v in values
    )


def tick_x(place: float, text: str) -> str:
    """Draw a tick of the horizontal axis with its name."""
    floor = HEIGHT - BOTTOM
    return (
        f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{floor}" y2="{floor + 4}"/>'
        f'<text class="tick" text-anchor="middle" x="{place:.1f}" y="{floor + 17}">{text}</text>'
    )


def axis_log(low: float, high: float, x: Scale) -> str:
    """Draw the ticks of a logarithmic axis of seconds."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) < 6 else (1,)
    values = [digit * 10.0**decade for decade in decades for digit in digits]
    return "".join(tick_x(x(value), seconds_text(value)) for value in values if low <= value <= high)


def axis_time(rows: Sequence[dict[str, Any]], width_s: float, x: Scale) -> str:
    """Draw the ticks of a timeline."""
    return "".join(tick_x(x(value), f"{value:g} s") for value in steps(len(rows) * width_s, 6))


def stairs(values: Sequence[float], width_s: float, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps its value through each stretch."""
    return [(x((n + side) * width_s), y(value)) for n, value in enumerate(values) for side in (0, 1)]


def _corners(points: Iterable[tuple[float, float]]) -> str:
    """Return the points of a line as SVG wants them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def line(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Draw a line."""
    return f'<polyline class="{kind}" points="{_corners(points)}"/>'


def area(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Fill an outline."""
    return f'<polygon class="{kind}" points="{_corners(points)}"/>'


def dot(x: float, y: float, kind: str, text: str = "") -> str:
    """Draw a dot."""
    title = f"<title>{escape(text)}</title>" if text else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">{title}</circle>'


def bar(edges: tuple[float, float], top: float, bottom: float, kind: str, text: str = "") -> str:
    """Draw a bar between its left and right edge."""
    left, right = edges
    title = f"<title>{escape(text)}</title>" if text else ""
    gap = 1.0 if right - left > 4 else 0.2
    size = f'width="{max(right - left - gap, 0.5):.1f}" height="{max(bottom - top, 0.6):.1f}"'
    return f'<rect class="{kind}" x="{left + gap / 2:.1f}" y="{top:.1f}" {size}>{title}</rect>'


def marks(found: Sequence[tuple[str, float, str]], row: int = 0) -> list[str]:
    """Draw vertical lines with their names on top, moved apart where they would touch."""
    parts, widths = [], [6.5 * len(text) for text, _, _ in found]
    places: list[float] = []
    free = float(LEFT)
    for (_, x, _), width in zip(found, widths, strict=True):
        places.append(max(x - width / 2, free))
        free = places[-1] + width + 6
    free = WIDTH - RIGHT
    for at in reversed(range(len(found))):
        places[at] = min(places[at], free - widths[at])
        free = places[at] - 6
    y = TOP - 14 + 13 * row
    for (text, x, kind), place in zip(found, places, strict=True):
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 5}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="{kind}-text" x="{place:.1f}" y="{y + 2}">{escape(text)}</text>')
    return parts


def rule(y: float, text: str) -> str:
    """Draw a limit across the plot."""
    end = WIDTH - RIGHT
    return (
        f'<line class="limit" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="limit-text" text-anchor="end" x="{end}" y="{y - 4:.1f}">{escape(text)}</text>'
    )


def hover(rows: Sequence[dict[str, Any]], width_s: float, x: Scale, texts: Iterable[str]) -> list[str]:
    """Lay a column over each stretch that says in words what is drawn there."""
    return [
        f'<rect class="hover" x="{x(row["at_s"]):.1f}" y="{TOP}" width="{x(width_s) - x(0):.1f}" '
        f'height="{HEIGHT - BOTTOM - TOP}"><title>{row["at_s"]:g} s: {escape(text)}</title></rect>'
        for row, text in zip(rows, texts, strict=True)
    ]


def drawing(parts: Iterable[str], label: str) -> str:
    """Put the parts of a plot together."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def nothing(label: str) -> str:
    """Say that there is nothing to draw."""
    return f'<p class="nothing" aria-label="{escape(label)}">nothing to show yet</p>'
