"""Pictures of one request: entropy flow, head divergence, spans, token signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from dashboards.charts import Picture
from dashboards.markup import visible
from dashboards.palette import TEAL, Mode
from dashboards.shapes import Detail, Instant, Layers, Span

ENTROPY_DOMAIN = (0.0, 10.8)  # nats; ln of SmolLM2's vocabulary
WINDOW = 40


def window(count: int, chosen: int, size: int = WINDOW) -> tuple[int, int]:
    """Return the half-open range of at most `size` tokens around `chosen`."""
    first = min(max(chosen - size // 2, 0), max(count - size, 0))
    return first, min(first + size, count)


def entropy_flow(detail: Detail, chosen: int) -> pd.DataFrame:
    """Return one row a sampled token × layer near `chosen`: step, token, layer, entropy (nats)."""
    texts = detail.tokens.get("text") or []
    steps = detail.tokens.get("step") or [row.step for row in detail.layers.rows]
    first, last = window(len(steps), chosen)
    rows = []
    for row in detail.layers.rows:
        if row.choice != 0 or row.lens_entropy is None or not first <= row.step < last:
            continue
        for layer, value in zip(detail.layers.layers, row.lens_entropy, strict=False):
            rows.append((row.step, token_label(texts, row.step), layer, value))
    return pd.DataFrame(rows, columns=["step", "token", "layer", "entropy"])


def entropy_chart(data: pd.DataFrame, chosen: int, mode: Mode) -> Picture:
    """Return the entropy-flow map: tokens to the right, the last layer on top, a fixed colour domain."""
    labels = dict(zip(data["step"].tolist(), data["token"].tolist(), strict=True))
    expr = " : ".join(f"datum.value == {step} ? {_quoted(label)}" for step, label in labels.items()) + " : ''"
    x = alt.X(
        "step:O", title=None, axis=alt.Axis(labelAngle=-60, labelExpr=expr, labelLimit=90, labelOverlap=False)
    )
    y = alt.Y("layer:O", title="layer", sort="descending")
    colour = alt.Color(
        "entropy:Q",
        title="nats",
        scale=alt.Scale(domain=list(ENTROPY_DOMAIN), clamp=True, scheme="cividis", reverse=mode == "light"),
        legend=_legend(data, ".2f"),
    )
    tip = [
        alt.Tooltip("step:O", title="token"),
        alt.Tooltip("token:N", title="text"),
        "layer:O",
        alt.Tooltip("entropy:Q", format=".2f", title="entropy (nats)"),
    ]
    pick = alt.selection_point(name="pick", fields=["step"], on="click")
    cells = alt.Chart(data).mark_rect().encode(x=x, y=y, color=colour, tooltip=tip).add_params(pick)
    frame = (
        alt.Chart(data[data["step"] == chosen])
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
    """Return layer, head, value of a head column: at `step`, or the mean over sampled tokens (None)."""
    rows = [row for row in layers.rows if row.choice == 0 and (step is None or row.step == step)]
    grids = [np.array(row.heads(column, layers.heads), dtype="float64") for row in rows]
    grids = [grid for grid in grids if grid.ndim == 2 and grid.size]
    if not grids:
        return pd.DataFrame(columns=["layer", "head", "value"])
    stack = np.stack(grids)
    known = ~np.isnan(stack)
    total, count = np.where(known, stack, 0.0).sum(axis=0), known.sum(axis=0)
    mean = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    rows_ = [
        (layer, head, None if np.isnan(value) else float(value))
        for layer, line in zip(layers.layers, mean, strict=False)
        for head, value in enumerate(line)
    ]
    return pd.DataFrame(rows_, columns=["layer", "head", "value"])


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
    return alt.layer(bar, text).properties(height=max(70, 30 * data["name"].nunique()))


def token_label(texts: Sequence[Any], step: int) -> str:
    """Return a token's visible text, or its index where no text was captured."""
    text = texts[step] if step < len(texts) else None
    return str(step) if text is None else visible(text)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\u2028", "")
    return f"'{escaped}'"


def least_confident(tokens: dict[str, list[Any]], count: int = 8) -> pd.DataFrame:
    """Return the tokens of lowest confidence: token, text, p, rank, entropy; absent stays absent."""
    frame = pd.DataFrame({name: tokens.get(name) for name in ("step", "confidence", "rank", "entropy")})
    texts = tokens.get("text") or []
    frame.insert(1, "text", [token_label(texts, index) for index in range(len(frame))])
    return frame.dropna(subset=["confidence"]).nsmallest(count, "confidence").reset_index(drop=True)
