"""Plots of a run as SVG that takes its colours from the page around it, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from chaos.load.histogram import Histogram
from chaos.load.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    area,
    axis_log,
    axis_time,
    bar,
    dot,
    drawing,
    grid_y,
    hover,
    line,
    linear,
    log_scale,
    marks,
    nothing,
    rule,
    seconds_text,
    stairs,
    steps,
    tick_x,
    time_axis,
)

_BARS = 48
OUTCOMES = ("read", "left", "shed", "failed", "ended")
_PERCENTILES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999)


def spread(histogram: Histogram, label: str, limit_s: float | None = None) -> str:
    """Draw how often which duration occurred, on a logarithmic axis, with its quantiles and its limit."""
    if not histogram.count:
        return nothing(label)
    low, high = _decent(histogram, limit_s)
    x = log_scale(low, high)
    counts = [0] * _BARS
    step = math.log(high / low) / _BARS
    for seconds, times in histogram.shares():
        at = int(math.log(max(seconds, low) / low) / step) if step else 0
        counts[min(max(at, 0), _BARS - 1)] += times
    y = linear(0, max(counts), HEIGHT - BOTTOM, TOP + 12)
    parts = [grid_y(steps(max(counts)), y, "{:,.0f}"), axis_log(low, high, x)]
    for at, times in enumerate(counts):
        if times:
            begin, end = low * math.exp(at * step), low * math.exp((at + 1) * step)
            late = limit_s is not None and begin >= limit_s
            text = f"{seconds_text(begin)} to {seconds_text(end)}: {times:,} ({times / histogram.count:.1%})"
            parts.append(bar((x(begin), x(end)), y(times), y(0), "late" if late else "bar", text))
    quantiles = (
        (name, histogram.quantile(share)) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    )
    parts += marks(
        [(f"{name} {seconds_text(at)}", x(at), "mark") for name, at in quantiles if at is not None]
    )
    if limit_s is not None:
        parts += marks([(f"limit {seconds_text(limit_s)}", x(limit_s), "limit")], row=1)
    return drawing(parts, label)


def tail(histograms: dict[str, Histogram], label: str) -> str:
    """Draw durations by percentile, the axis stretched towards the slowest of them."""
    shown = {name: histogram for name, histogram in histograms.items() if histogram.count}
    if not shown:
        return nothing(label)
    most = max(histogram.count for histogram in shown.values())
    ends = [share for share in _PERCENTILES if share < 1 - 0.5 / most or share == 0.0]
    last = min(1 - 0.5 / most, 0.99995)
    stretch = linear(0.0, -math.log10(1 - last) or 1.0, LEFT, WIDTH - RIGHT)
    x: Scale = lambda share: stretch(-math.log10(1 - min(share, last)))  # noqa: E731
    top = max(histogram.maximum for histogram in shown.values()) or 1.0
    y = linear(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_y(steps(top), y, "{:g} s")]
    parts += [tick_x(x(share), f"{100 * share:g} %") for share in ends]
    for number, (name, histogram) in enumerate(shown.items()):
        shares = [1 - 10 ** (-(at / 60) * -math.log10(1 - last)) for at in range(61)]
        points = [(x(share), y(histogram.quantile(share) or 0.0)) for share in shares]
        parts.append(line(points, f"line c{number}"))
        for share in ends[1:]:
            at = histogram.quantile(share) or 0.0
            parts.append(
                dot(x(share), y(at), f"dot c{number}", f"{name}, {100 * share:g} %: {seconds_text(at)}")
            )
    return drawing(parts, label)


def rates(rows: Sequence[dict[str, Any]], width_s: float, label: str) -> str:
    """Draw arrivals a second: those due as an area, those sent and those read to the end as lines."""
    if not rows:
        return nothing(label)
    due, sent, read = (
        [row[name] / width_s for row in rows]
        if name != "read"
        else [row["over"].get(name, 0) / width_s for row in rows]
        for name in ("due", "sent", "read")
    )
    top = max((*due, *sent, *read)) or 1.0
    x, y = time_axis(rows, width_s), linear(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_y(steps(top), y, "{:g}"), axis_time(rows, width_s, x)]
    outline = stairs(due, width_s, x, y)
    parts.append(area([(LEFT, y(0)), *outline, (outline[-1][0], y(0))], "area"))
    parts += [line(stairs(sent, width_s, x, y), "line c0"), line(stairs(read, width_s, x, y), "line c1")]
    texts = (
        f"due {d:.3g}/s, sent {s:.3g}/s, read {r:.3g}/s" for d, s, r in zip(due, sent, read, strict=True)
    )
    parts += hover(rows, width_s, x, texts)
    return drawing(parts, label)


def latencies(
    rows: Sequence[dict[str, Any]], width_s: float, label: str, limit_s: float | None = None
) -> str:
    """Draw the first token's time by when the request was due: median, 95 % and the slowest."""
    found = [(row["at_s"] + width_s / 2, row["first_token_s"]) for row in rows]
    found = [(at, times) for at, times in found if times["max"] is not None]
    if not found:
        return nothing(label)
    top = max(*(times["max"] for _, times in found), limit_s or 0.0) or 1.0
    x, y = time_axis(rows, width_s), linear(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_y(steps(top), y, "{:g} s"), axis_time(rows, width_s, x)]
    lines = {name: [(x(at), y(times[name])) for at, times in found] for name in ("p50", "p95", "max")}
    parts.append(area([*lines["p50"], *reversed(lines["p95"])], "area blue"))
    parts += [line(lines["p95"], "line c0 thin"), line(lines["p50"], "line c0")]
    parts += [dot(*place, "dot c3") for place in lines["max"]]
    if limit_s is not None:
        parts.append(rule(y(limit_s), f"limit {seconds_text(limit_s)}"))
    texts = (
        "no first token"
        if t["max"] is None
        else f"p50 {seconds_text(t['p50'])}, p95 {seconds_text(t['p95'])}, max {seconds_text(t['max'])}"
        for t in (row["first_token_s"] for row in rows)
    )
    parts += hover(rows, width_s, x, texts)
    return drawing(parts, label)


def ends(rows: Sequence[dict[str, Any]], width_s: float, label: str) -> str:
    """Draw how requests ended, stacked, by when they did."""
    top = max((sum(row["over"].values()) for row in rows), default=0)
    if not top:
        return nothing(label)
    x, y = time_axis(rows, width_s), linear(0, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_y(steps(top), y, "{:,.0f}"), axis_time(rows, width_s, x)]
    for row in rows:
        below = 0
        for outcome in OUTCOMES:
            if count := row["over"].get(outcome, 0):
                edges = x(row["at_s"]), x(row["at_s"] + width_s)
                parts.append(bar(edges, y(below + count), y(below), f"o-{outcome}"))
                below += count
    texts = (
        ", ".join(f"{row['over'][o]} {o}" for o in OUTCOMES if o in row["over"]) or "nothing ended"
        for row in rows
    )
    parts += hover(rows, width_s, x, texts)
    return drawing(parts, label)


def _decent(histogram: Histogram, limit_s: float | None) -> tuple[float, float]:
    """Return the ends of a logarithmic axis: what occurred and the limit, a factor of two at least."""
    ends_ = [max(histogram.minimum, 1e-4), max(histogram.maximum, 1e-4)]
    ends_ += [] if limit_s is None else [limit_s * 0.97, limit_s * 1.03]
    low, high = min(ends_), max(ends_) * 1.02
    if high / low < 2:
        low, high = low / 1.5, high * 1.5
    return low, high
