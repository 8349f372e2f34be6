"""Request: one answer in depth: where the model hesitated, in which layers and heads, and in which phase."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards import maps, markup
from dashboards.api import ApiError
from dashboards.intervals import clock
from dashboards.session import api, heading, mode, tell
from dashboards.shapes import HEAD_COLUMNS, Detail, Request

OVER = ("all tokens", "this one")
HEAD_LABELS = {
    "head_kl": "divergence from the mean head",
    "head_kl_nonsink": "divergence, first token apart",
    "sink_mass": "attention on the first token",
    "prev_attention": "attention on the last token",
    "lookback": "attention on the prompt",
}


def page() -> None:
    """Draw the page."""
    st.title("Request")
    try:
        recent = api().requests(limit=100)
        chosen = _choose(recent)
        detail = api().request(chosen) if chosen else None
    except ApiError as error:
        tell(error)
        return
    if chosen is None:
        st.info(
            "No request has been recorded yet. Send one through the API, "
            "or send traffic with `quaver load` or `quaver demo`.",
            icon=":material/play_circle:",
        )
    elif detail is None:
        st.warning("There is no record of this request: it still runs, or its record was rotated away.")
    else:
        _facts(detail.request)
        detail = _choice(detail)
        _tokens(detail)
        left, right = st.columns([2, 3], gap="large")
        with left:
            _doubts(detail)
        with right:
            _spans(detail)


def _choose(recent: list[Request]) -> str | None:
    """Let the user pick a request; the address names the one shown, so that it can be shared."""
    ids = [request.request_id for request in recent]
    asked = st.query_params.get("id")
    if asked and asked not in ids:
        ids.insert(0, asked)
    if not ids:
        return None
    told = {r.request_id: f"{clock(r.started)}  {r.route}  {r.completion_tokens} tokens  " for r in recent}
    if "request" not in st.session_state and asked:
        st.session_state["request"] = asked
    elif st.session_state.get("request") not in ids:
        st.session_state["request"] = asked or ids[0]
    chosen = st.selectbox("Request", ids, format_func=lambda i: told.get(i, "") + i, key="request")
    if chosen != asked:
        st.query_params["id"] = chosen
    return chosen


def _facts(request: Request) -> None:
    aggregates = request.aggregates or {}
    st.html(
        markup.facts(
            [
                ("Route", request.route),
                ("Tenant", request.tenant),
                ("Outcome", f"{request.outcome or '–'} ({request.finish_reason})"),
                ("Started", clock(request.started)),
                ("Duration", _unit(request.duration_s, "s")),
                ("First token", _unit(request.first_token_s, "s")),
                ("Queue, prefill", f"{_unit(request.queued_s, 's')}, {_unit(request.prefill_s, 's')}"),
                ("Tokens in, out", f"{request.prompt_tokens}, {request.completion_tokens}"),
                ("Mean confidence", _unit(aggregates.get("mean_confidence"), "")),
                ("Mean entropy", _unit(aggregates.get("mean_entropy"), "nats")),
                ("Temperature", request.temperature),
                ("Prompt tokens cached", _cached(request)),
                ("Wait for KV tiers", _unit(request.kv_wait_s, "s")),
                ("Model", " ".join(filter(None, (request.model, request.quantization)))),
                ("Faults that touched it", ", ".join(request.faults or []) or "none"),
                ("L1 events it raised", ", ".join(request.alerts or []) or "none"),
                ("Trace", request.trace_id),
            ]
        )
    )
    if request.error:
        st.error(markup.plain(request.error))


def _choice(detail: Detail) -> Detail:
    """Return the request with one choice only; let the user say which where there are several."""
    choices = detail.choices()
    if len(choices) < 2:
        return detail.only(choices[0]) if choices else detail
    picked = st.segmented_control("Choice", choices, default=choices[0], required=True, key="choice")
    return detail.only(choices[0] if picked is None else picked)


def _cached(request: Request) -> str | None:
    """Return which of the prompt's tokens came from which tier."""
    hits = {"device": request.kv_hit_device, "host": request.kv_hit_host, "disk": request.kv_hit_disk}
    known = {tier: tokens for tier, tokens in hits.items() if tokens is not None}
    told = ", ".join(f"{tokens} {tier}" for tier, tokens in known.items() if tokens)
    return told or ("none" if known else None)


def _unit(value: float | None, unit: str) -> str | None:
    if value is not None and unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    return None if value is None else f"{value:.3g} {unit}".strip()


def _tokens(detail: Detail) -> None:
    count = len(detail.tokens.get("step", []))
    if not count:
        st.info("This request emitted no token.")
        return
    captured = any(text is not None for text in detail.tokens.get("text") or [])
    heading("Answer, token by token")
    place = st.container(gap="xsmall")
    chosen = _token(detail, count)
    with place:
        st.html(markup.ribbon(detail.tokens, mode(), chosen) + markup.ribbon_legend(mode()))
    if not captured:
        st.caption(
            "Only the numbers of the tokens are shown, because text is not recorded. "
            "Start the engine with `QUAVER_CAPTURE_CONTENT=1` to record it from then on."
        )
    left, right = st.columns([3, 2], gap="large")
    with left:
        _entropy(detail, chosen)
    with right:
        _heads(detail, chosen)


def _token(detail: Detail, count: int) -> int:
    """Return the token looked at: the slider's, moved by a click on the map, at first the least sure one."""
    key = f"token-{detail.request.request_id}-{detail.tokens['choice'][0]}"
    doubts = maps.least_confident(detail.tokens)["token"].tolist()
    if key not in st.session_state:
        st.session_state[key] = min(doubts[0] if doubts else 0, count - 1)
    columns = st.session_state.get("flow", {}).get("selection", {}).get("pick") or []
    rows = st.session_state.get("doubts", {}).get("selection", {}).get("rows") or []
    steps = {"flow": columns[0]["token"] if columns else None, "doubts": doubts[rows[0]] if rows else None}
    for source, step in steps.items():
        if step != st.session_state.get(f"picked-{source}"):
            st.session_state[f"picked-{source}"] = step
            st.session_state[key] = st.session_state[key] if step is None else min(int(step), count - 1)
    if count == 1:
        return 0
    return int(st.slider("Token looked at", 0, count - 1, key=key))


def _entropy(detail: Detail, chosen: int) -> None:
    heading("Entropy flow")
    data = maps.entropy_flow(detail, chosen)
    if data.empty:
        st.caption("No layer was sampled for this request.")
        return
    chosen = maps.nearest(data["token"].unique().tolist(), chosen) or 0
    st.altair_chart(
        maps.entropy_chart(data, chosen, mode()),
        key="flow",
        on_select="rerun",
        selection_mode="pick",
        alt=f"Entropy of each sampled layer's reading of the next token, {data['token'].nunique()} tokens "
        f"by {data['layer'].nunique()} layers, from {data['entropy'].min():.1f} to "
        f"{data['entropy'].max():.1f} nats",
    )
    st.caption("How unsure each layer is of the next token, last layer on top. Click a column to choose it.")
    if len(maps.sampled(detail)) < len(detail.tokens["step"]):
        why = maps.why_sampled(detail) or "Only some tokens are sampled."
        st.caption(f'{why} A request with `"signals": true` has all of them.')


def _heads(detail: Detail, chosen: int) -> None:
    heading("Attention heads")
    there = [name for name in HEAD_COLUMNS if any(getattr(row, name) for row in detail.layers.rows)]
    if not there:
        st.caption("No head was sampled for this request.")
        return
    signal, over_ = st.columns([5, 4], vertical_alignment="bottom")
    column = signal.selectbox(
        "Signal", there, format_func=HEAD_LABELS.__getitem__, key="head-signal", label_visibility="collapsed"
    )
    over = over_.segmented_control(
        "Over",
        ["all", "this token"],
        default="all",
        required=True,
        key="head-over",
        label_visibility="collapsed",
    )
    token = maps.nearest(maps.sampled(detail), chosen) if over == OVER[1] else None
    data = maps.head_values(detail.layers, column, None if token is None else detail.tokens["step"][token])
    if data.empty:
        st.caption("No head was sampled for this request.")
        return
    st.altair_chart(
        maps.head_chart(data, mode(), "nats" if "kl" in column else "share"),
        key="heads",
        alt=f"{HEAD_LABELS[column]}, layer by head, median {data['value'].median():.2f}",
    )


def _doubts(detail: Detail) -> None:
    doubts = maps.least_confident(detail.tokens)
    if doubts.empty:
        return
    heading("Least confident tokens")
    st.dataframe(
        doubts,
        hide_index=True,
        key="doubts",
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "token": st.column_config.NumberColumn(format="%d"),
            "confidence": st.column_config.NumberColumn("p", format="%.3f"),
            "entropy": st.column_config.NumberColumn("entropy, nats", format="%.2f"),
        },
        alt="Tokens of the lowest confidence, the lowest first",
    )


def _spans(detail: Detail) -> None:
    heading("Spans")
    data: Any = maps.span_frame(maps.phases(detail))
    if data.empty:
        st.caption("No span was kept for this request.")
        return
    told = ", ".join(f"{row.name} {row.length:.0f} ms" for row in data.itertuples(index=False))
    st.altair_chart(maps.span_chart(data), key="spans", alt=f"Spans of the request: {told}")
