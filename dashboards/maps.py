"""Pictures of one request: entropy flow, head divergence, spans, token signals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from dashboards.charts import Picture
from dashboards.markup import visible
from dashboards.palette import TEAL, Mode
from dashboards.shapes import Detail, Instant, Layers, Span

ENTROPY_DOMAIN = (0.0, 6.0)  # nats; at 6 some 400 tokens are in the balance, and more says no more
WINDOW = 40


def sampled(detail: Detail) -> list[int]:
    """Return the positions of the tokens whose layers were sampled."""
    there = {row.step for row in detail.layers.rows}
    return [index for index, step in enumerate(detail.tokens.get("step", [])) if step in there]


def why_sampled(detail: Detail) -> str:
    """Say how many tokens were sampled and why; empty when nobody recorded a reason."""
    words = {"risk": "looked risky", "floor": "were taken whatever they looked like"}
    counts = Counter(row.reason for row in detail.layers.rows)
    told = ", ".join(f"{counts[reason]} {text}" for reason, text in words.items() if counts[reason])
    return (
        f"{len(detail.layers.rows)} of {len(detail.tokens['step'])} tokens are sampled: {told}."
        if told
        else ""
    )


def nearest(positions: Sequence[int], chosen: int) -> int | None:
    """Return the sampled position closest to `chosen`; None when nothing was sampled."""
    return min(positions, key=lambda position: abs(position - chosen), default=None)


def entropy_flow(detail: Detail, chosen: int) -> pd.DataFrame:
    """Return token, text, layer and entropy (nats) of at most `WINDOW` sampled tokens around `chosen`."""
    texts, steps = detail.tokens.get("text") or [], detail.tokens.get("step", [])
    kept = sorted(sorted(sampled(detail), key=lambda position: abs(position - chosen))[:WINDOW])
    place = {steps[position]: position for position in kept}
    rows = []
    for row in detail.layers.rows:
        token = place.get(row.step)
        if token is None or row.lens_entropy is None:
            continue
        for layer, value in zip(row.layers, row.lens_entropy, strict=False):
            rows.append((token, token_label(texts, token), layer, value))
    return pd.DataFrame(rows, columns=["token", "text", "layer", "entropy"])


def entropy_chart(data: pd.DataFrame, chosen: int, mode: Mode) -> Picture:
    """Return the entropy-flow map: tokens to the right, the last layer on top, a fixed colour domain."""
    labels = data.drop_duplicates("token").sort_values("token")
    place = labels["token"].astype(str).tolist()
    words = json.dumps(dict(zip(place, labels["text"].tolist(), strict=True)))
    axis = alt.Axis(labelAngle=-60, labelExpr=f"{words}[datum.value]", labelLimit=90, labelOverlap=False)
    x = alt.X("token:O", title=None, axis=axis)
    y = alt.Y("layer:O", title="layer", sort="descending")
    colour = alt.Color(
        "entropy:Q",
        title="nats",
        scale=alt.Scale(domain=list(ENTROPY_DOMAIN), clamp=True, scheme="cividis", reverse=mode == "light"),
        legend=_legend(data, ".2f"),
    )
    tip = [
        "token:O",
        "text:N",
        "layer:O",
        alt.Tooltip("entropy:Q", format=".2f", title="entropy (nats)"),
    ]
    pick = alt.selection_point(name="pick", fields=["token"], on="click")
    cells = alt.Chart(data).mark_rect().encode(x=x, y=y, color=colour, tooltip=tip).add_params(pick)
    frame = (
        alt.Chart(data[data["token"] == chosen])
        .mark_rect(fill=None, stroke="#D64545", strokeWidth=1.5)
        .encode(x=x, y=y)
    )
    return alt.layer(cells, frame).properties(height=map_height(data))


def map_height(data: pd.DataFrame) -> int:
    """Return the height of a map in pixels, the same for one request's maps."""
    return max(170, min(27 * int(data["layer"].nunique()), 420))


def _legend(data: pd.DataFrame, form: str) -> alt.Legend:
    length = map_height(data) - 40
    return alt.Legend(orient="right", gradientLength=length, gradientThickness=10, tickCount=5, format=form)


def head_values(layers: Layers, column: str, step: int | None) -> pd.DataFrame:
    """Return layer, head, value of a head column: at `step`, or the mean over all tokens (None), in
    which a sampled token counts for those it stands for."""
    shape = (len(layers.layers), layers.heads)
    total, weight = np.zeros(shape), np.zeros(shape)
    place = {layer: index for index, layer in enumerate(layers.layers)}
    there: set[int] = set()
    for row in layers.rows:
        grid = np.array(row.heads(column, layers.heads), dtype="float64")
        if step not in (None, row.step) or not grid.size:
            continue
        where, stands_for = [place[layer] for layer in row.layers], 1 / (row.rate or 1.0)
        known = ~np.isnan(grid)
        there.update(row.layers)
        total[where] += np.where(known, grid, 0.0) * stands_for
        weight[where] += known * stands_for
    mean = np.divide(total, weight, out=np.full(shape, np.nan), where=weight > 0)
    rows = [
        (layer, head, None if np.isnan(value) else float(value))
        for layer, line in zip(layers.layers, mean, strict=True)
        for head, value in enumerate(line)
        if layer in there
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "value"])


def clip_domain(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the 5th and 95th percentile of what is known; (0, 1) when nothing is."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    if not known:
        return 0.0, 1.0
    low, high = (float(v) for v in np.percentile(known, [5, 95]))
    return (low, high) if high > low else (low, low + 1e-6)


def head_chart(data: pd.DataFrame, mode: Mode, unit: str) -> Picture:
    """Return the layer × head map, colours clipped at the 5th and 95th percentile."""
    colour = alt.Color(
        "value:Q",
        title=unit,
        scale=alt.Scale(
            domain=list(clip_domain(data["value"].tolist())),
            clamp=True,
            scheme="cividis",
            reverse=mode == "light",
        ),
        legend=alt.Legend(
            orient="right",
            gradientLength=map_height(data) - 40,
            gradientThickness=10,
            tickCount=4,
            format=".2f",
        ),
    )
    picture: alt.Chart = (
        alt.Chart(data)
        .mark_rect()
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("layer:O", title="layer", sort="descending"),
            color=colour,
            tooltip=["layer:O", "head:O", alt.Tooltip("value:Q", format=".3f", title=unit)],
        )
        .properties(height=map_height(data))
    )
    return picture


def phases(detail: Detail) -> list[Span]:
    """Return the engine's spans, or the phases of the request record where no spans were kept."""
    request = detail.request
    if detail.spans or request.started is None:
        return list(detail.spans)
    at, found = float(request.started), []
    end = at + (request.duration_s or 0.0)
    first = at + (request.first_token_s or 0.0)
    queued = at + (request.queued_s or 0.0)
    marks = [("request", at, end), ("queue", at, queued), ("prefill", queued, first), ("decode", first, end)]
    for name, start, stop in marks:
        found.append(Span(name=name, start=Instant(start), end=Instant(max(start, min(stop, end)))))
    return found


def span_frame(spans: Sequence[Span]) -> pd.DataFrame:
    """Return name, start and end in ms from the first span's start, and attributes in words."""
    known = [span for span in spans if span.start is not None and span.end is not None]
    if not known:
        return pd.DataFrame(columns=["order", "name", "start", "end", "length", "attributes"])
    zero = min(span.start or 0.0 for span in known)
    known.sort(key=lambda span: (span.start or 0.0, -(span.end or 0.0)))
    rows = []
    for order, span in enumerate(known):
        start, end = 1000 * ((span.start or 0.0) - zero), 1000 * ((span.end or 0.0) - zero)
        told = ", ".join(f"{key}={value}" for key, value in span.attributes.items())[:400]
        rows.append((order, span.name, start, end, end - start, told))
    return pd.DataFrame(rows, columns=["order", "name", "start", "end", "length", "attributes"])


def span_chart(data: pd.DataFrame) -> Picture:
    """Return the waterfall of spans, in milliseconds from the first one's start."""
    y = alt.Y("name:N", sort=alt.SortField("order"), title=None, axis=alt.Axis(labelLimit=220, ticks=False))
    base = alt.Chart(data).encode(y=y)
    tip = ["name:N", alt.Tooltip("length:Q", format=".1f", title="ms"), "attributes:N"]
    bar = base.mark_bar(height=14, cornerRadius=2, color=TEAL).encode(
        x=alt.X("start:Q", title="ms from the start"), x2="end:Q", tooltip=tip
    )
    text = base.mark_text(align="left", dx=5, fontSize=11, color="#7C8896").encode(
        x="end:Q", text=alt.Text("length:Q", format=",.1f")
    )
    return alt.layer(bar, text).properties(height=60 + 32 * int(data["name"].nunique()))


def token_label(texts: Sequence[Any], token: int) -> str:
    """Return a token's visible text, or its index where no text was captured."""
    text = texts[token] if token < len(texts) else None
    return str(token) if text is None else visible(text)


def least_confident(tokens: dict[str, list[Any]], count: int = 8) -> pd.DataFrame:
    """Return the tokens of lowest confidence: token, text, p, rank, entropy; absent stays absent."""
    columns = {name: tokens.get(name) or [] for name in ("confidence", "rank", "entropy")}
    frame = pd.DataFrame({name: pd.Series(values, dtype="float64") for name, values in columns.items()})
    texts = tokens.get("text") or []
    frame.insert(0, "token", range(len(frame)))
    frame.insert(1, "text", [token_label(texts, index) for index in range(len(frame))])
    return frame.dropna(subset=["confidence"]).nsmallest(count, "confidence").reset_index(drop=True)
