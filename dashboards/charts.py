"""Chart builders: data in, Altair chart out. Time is in seconds and shown in the browser's zone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import pandas as pd

from dashboards.intervals import Interval, clock
from dashboards.palette import BANDS
from dashboards.shapes import Live

Picture = alt.Chart | alt.LayerChart | alt.FacetChart
LANES = {"fault": "Faults", "L1": "L1", "L2": "L2"}
AXIS_PX = 46
_BAND_SCALE = alt.Scale(domain=list(BANDS), range=list(BANDS.values()))
_LEGEND = alt.Legend(
    orient="top-right", title=None, direction="horizontal", offset=0, symbolSize=40, labelFontSize=11
)
_NO_PADDING = alt.Scale(nice=False, padding=0)


@dataclass(frozen=True)
class Line:
    """One series of a chart: its key in the live answer, its name and its colour."""

    key: str
    label: str
    colour: str


def frame(live: Live, lines: Sequence[Line]) -> pd.DataFrame:
    """Return columns time (ms), series, value and `alone`; nulls stay nulls.

    `alone` marks a value between two gaps, which a line alone would not show.
    """
    times = [1000.0 * moment for moment in live.time]
    parts = []
    for line in lines:
        values = pd.Series(live.series.get(line.key, [None] * len(times)), dtype="float64")
        gap = values.isna()
        alone = ~gap & gap.shift(1, fill_value=True) & gap.shift(-1, fill_value=True)
        part = {"time": times, "series": line.label, "value": values, "alone": alone}
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


def bands(intervals: Sequence[Interval], low: float, high: float) -> pd.DataFrame:
    """Return the intervals inside [low, high] (unix seconds) as start and end in ms.

    `lane` is where an interval is drawn: intervals of one kind that overlap go to `L2`, `L2·1`, …
    """
    rows = []
    busy: dict[str, float] = {}
    for interval in sorted(intervals, key=lambda interval: interval.start):
        inside = interval.clip(low, high)
        if inside is None:
            continue
        start, end = inside
        slot = 0
        while busy.get(lane := LANES[interval.kind] + (f"·{slot}" if slot else ""), low) > start:
            slot += 1
        busy[lane] = end
        rows.append((1000 * start, 1000 * end, interval.kind, lane, interval.label, interval.note))
    return pd.DataFrame(rows, columns=["start", "end", "kind", "lane", "label", "note"])


def time_series(
    data: pd.DataFrame,
    lines: Sequence[Line],
    shade: pd.DataFrame,
    *,
    form: str,
    domain: tuple[float, float] | None = None,
    height: int = 112,
    axis: bool = False,
) -> Picture:
    """Return lines over time with faults and alerts as bands behind them.

    `form` is a d3 number format, `domain` fixes the value axis, `axis` draws the time labels.
    """
    scale = alt.Scale(domain=list(domain), clamp=True) if domain else alt.Scale(zero=True, nice=True)
    x = alt.X("time:T", title=None, scale=_NO_PADDING, axis=_time_axis(axis))
    y = alt.Y("value:Q", title=None, scale=scale, axis=_value_axis(form))
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=[line.label for line in lines], range=[line.colour for line in lines]),
        legend=alt.Legend(
            orient="top-right", title=None, direction="horizontal", offset=0, symbolSize=40, labelFontSize=11
        )
        if len(lines) > 1
        else None,
    )
    tip = [
        alt.Tooltip("time:T", format="%H:%M:%S"),
        alt.Tooltip("series:N", title="what"),
        alt.Tooltip("value:Q", format=form),
    ]
    base = alt.Chart(data).encode(x=x, y=y, color=colour)
    line = base.mark_line(strokeWidth=1.6, invalid="break-paths-filter-domains")
    alone = base.mark_point(size=9, filled=True).transform_filter("datum.alone")
    near = base.mark_point(size=60, filled=True, opacity=0).encode(tooltip=tip)
    picture = alt.layer(_shading(shade), alt.layer(line, alone, near))
    parted: Picture = picture.resolve_scale(color="independent").properties(height=height)
    return parted


def lanes(shade: pd.DataFrame, low: float, high: float) -> Picture:
    """Return three labelled lanes, faults and both alert levels, on the time axis of the other charts."""
    used = set(shade["lane"]) | set(LANES.values())
    names = sorted(used, key=lambda name: (list(LANES.values()).index(name.partition("·")[0]), name))
    edges = pd.DataFrame({"time": [1000 * low, 1000 * high]})
    frame_ = (
        alt.Chart(edges)
        .mark_point(opacity=0)
        .encode(x=alt.X("time:T", title=None, scale=_NO_PADDING, axis=_time_axis(True)))
    )
    y = alt.Y(
        "lane:N",
        title=None,
        scale=alt.Scale(domain=names),
        axis=alt.Axis(
            minExtent=AXIS_PX,
            maxExtent=AXIS_PX,
            ticks=False,
            domain=False,
            grid=False,
            labelOverlap=False,
            labelExpr="indexof(datum.label, '·') < 0 ? datum.label : ''",
        ),
    )
    base = alt.Chart(shade).encode(x=alt.X("start:T", scale=_NO_PADDING), y=y)
    tip = [
        alt.Tooltip("label:N", title="what"),
        alt.Tooltip("note:N", title="of"),
        alt.Tooltip("start:T", format="%H:%M:%S"),
        alt.Tooltip("end:T", format="%H:%M:%S"),
    ]
    bar = base.mark_bar(height=16, cornerRadius=3, opacity=0.85).encode(
        x2="end:T", color=alt.Color("kind:N", scale=_BAND_SCALE, legend=None), tooltip=tip
    )
    text = base.mark_text(align="left", dx=5, fontSize=11, color="white", fontWeight=600).encode(
        text="label:N"
    )
    return alt.layer(frame_, bar, text).properties(height=46 + 22 * len(names))


def told(shade: pd.DataFrame) -> str:
    """Return the bands in words, for readers who do not see them."""
    if shade.empty:
        return "No fault and no alert in this time."
    stretches = [
        f"{row.label} from {clock(row.start / 1000)} to {clock(row.end / 1000)}" for row in shade.itertuples()
    ]
    return "Faults and alerts: " + "; ".join(stretches)


def _shading(shade: pd.DataFrame) -> Picture:
    shading: alt.Chart = (
        alt.Chart(shade)
        .mark_rect(opacity=0.13)
        .encode(
            x=alt.X("start:T", scale=_NO_PADDING),
            x2="end:T",
            color=alt.Color("kind:N", scale=_BAND_SCALE, legend=None),
        )
    )
    return shading


def _time_axis(labels: bool) -> alt.Axis:
    return alt.Axis(format="%H:%M:%S", labels=labels, ticks=labels, grid=True, tickCount=6, labelOverlap=True)


def _value_axis(form: str) -> alt.Axis:
    return alt.Axis(format=form, tickCount=3, minExtent=AXIS_PX, maxExtent=AXIS_PX, domain=False, ticks=False)
