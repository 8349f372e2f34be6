"""Charts of the KV tiers: where prompts came from, and how long what is kept has not been wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import altair as alt
import pandas as pd

from dashboards.charts import Picture
from dashboards.flow import COLOURS
from dashboards.palette import GREY, Mode, cividis
from dashboards.shapes import Live, Tiers

BIN_S = 10
HEIGHT = 300
SOURCES = {"computed": GREY, **COLOURS}


def sources(live: Live) -> pd.DataFrame:
    """Return time (ms), source and tokens a second, in bins of `BIN_S` seconds; nothing where none came."""
    starts = [int(moment) // BIN_S * BIN_S for moment in live.time]
    rows = []
    for order, source in enumerate(SOURCES):
        sums = dict.fromkeys(starts, 0.0)
        for start, tokens in zip(starts, live.series.get(f"prompt_{source}", []), strict=False):
            sums[start] += tokens or 0.0
        rows += [(1000.0 * start, source, order, total / BIN_S) for start, total in sums.items()]
    data = pd.DataFrame(rows, columns=["time", "source", "order", "tokens"])
    return data if data["tokens"].any() else data.iloc[:0]


def source_chart(data: pd.DataFrame) -> Picture:
    """Return the sources on top of each other, over time."""
    colour = alt.Color(
        "source:N",
        title=None,
        scale=alt.Scale(domain=list(SOURCES), range=list(SOURCES.values())),
        legend=_legend(len(SOURCES)),
    )
    picture: alt.Chart = (
        alt.Chart(data)
        .mark_area(interpolate="step-after", opacity=0.85)
        .encode(
            x=alt.X(
                "time:T",
                title=None,
                scale=alt.Scale(nice=False, padding=0),
                axis=alt.Axis(format="%H:%M", tickCount=5, grid=False),
            ),
            y=alt.Y("tokens:Q", title="tokens a second", stack="zero", axis=alt.Axis(tickCount=4)),
            color=colour,
            order="order:Q",
            tooltip=[
                alt.Tooltip("time:T", format="%H:%M:%S"),
                "source:N",
                alt.Tooltip("tokens:Q", format=",.0f", title="tokens a second"),
            ],
        )
        .properties(height=HEIGHT)
    )
    return picture


def age_labels(edges: Sequence[float]) -> list[str]:
    """Return a name for each bin between `edges` (seconds, rising)."""
    told = [_length(edge) for edge in edges]
    if not told:
        return []
    spans = [f"{low} – {high}" for low, high in pairwise(told)]
    return [f"under {told[0]}", *spans, f"over {told[-1]}"]


def ages(tiers: Tiers) -> pd.DataFrame:
    """Return columns tier, age, order and tokens of what each tier keeps; empty bins have no row."""
    labels = age_labels(tiers.age_edges_s)
    rows = [
        (tier.tier, label, order, tokens)
        for tier in tiers.tiers
        for order, (label, tokens) in enumerate(zip(labels, tier.ages, strict=False))
        if tokens
    ]
    return pd.DataFrame(rows, columns=["tier", "age", "order", "tokens"])


def age_chart(data: pd.DataFrame, tiers: Tiers, mode: Mode) -> Picture:
    """Return one bar a tier, the youngest first; old tokens recede into the page."""
    labels = age_labels(tiers.age_edges_s)
    shades = [cividis(0.12 + 0.8 * place / max(len(labels) - 1, 1)) for place in range(len(labels))]
    picture: alt.Chart = (
        alt.Chart(data)
        .mark_bar(cornerRadius=1)
        .encode(
            y=alt.Y(
                "tier:N",
                title=None,
                sort=[tier.tier for tier in tiers.tiers],
                scale=alt.Scale(paddingInner=0.35, paddingOuter=0.2),
                axis=alt.Axis(ticks=False, domain=False),
            ),
            x=alt.X("tokens:Q", title="tokens", stack="zero", axis=alt.Axis(tickCount=5, format="~s")),
            color=alt.Color(
                "age:N",
                title=None,
                scale=alt.Scale(domain=labels, range=shades if mode == "light" else shades[::-1]),
                legend=_legend(3),
            ),
            order="order:Q",
            tooltip=["tier:N", "age:N", alt.Tooltip("tokens:Q", format=",")],
        )
        .properties(height=HEIGHT)
    )
    return picture


def _length(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _legend(columns: int) -> alt.Legend:
    return alt.Legend(
        orient="top", direction="horizontal", columns=columns, symbolType="square", offset=6, labelFontSize=11
    )
