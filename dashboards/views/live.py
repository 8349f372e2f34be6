"""Live: is it well, since when not, and which request shows it."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboards import charts, judge, markup
from dashboards.api import ApiError
from dashboards.charts import Line
from dashboards.intervals import Interval, alert_intervals, clock, fault_intervals
from dashboards.palette import BLUE, GREY, ORANGE, ROSE, TEAL, VIOLET
from dashboards.session import api, heading, tell
from dashboards.settings import DashboardSettings
from dashboards.shapes import Alerts, Chaos, Live, Request, Status
from dashboards.views import request as request_view

SPANS = {"5 min": 300, "15 min": 900, "1 h": 3600}
REFRESH_S = DashboardSettings().refresh_s

ROWS: tuple[tuple[str, str, tuple[Line, ...], str, tuple[float, float] | None], ...] = (
    (
        "Mean confidence",
        "probability of the emitted tokens",
        (Line("mean_confidence", "confidence", BLUE),),
        ".2f",
        (0.0, 1.0),
    ),
    ("Response entropy", "nats", (Line("response_entropy", "entropy", VIOLET),), ".1f", None),
    (
        "Interruptions and L1 events",
        "share of responses",
        (Line("interruption_rate", "interrupted", ORANGE), Line("l1_rate", "L1 event", ROSE)),
        ".0%",
        None,
    ),
    ("First token, 95th percentile", "seconds", (Line("first_token_p95", "first token", TEAL),), ".2f", None),
    (
        "Requests in the engine",
        "count",
        (Line("running", "running", BLUE), Line("waiting", "waiting", ORANGE)),
        ".0f",
        None,
    ),
    ("Throughput", "tokens per second", (Line("tokens_per_s", "tokens/s", GREY),), ".0f", None),
    ("KV cache used", "share of pages", (Line("kv_used", "used", TEAL),), ".0%", (0.0, 1.0)),
)


def page() -> None:
    """Draw the page."""
    head, choice = st.columns([3, 1], vertical_alignment="bottom")
    head.title("Live")
    span = choice.segmented_control(
        "Time shown", list(SPANS), default="5 min", required=True, label_visibility="collapsed", key="span"
    )
    _signals(SPANS[span or "5 min"])
    heading("Recent requests")
    _recent()


@st.fragment(run_every=REFRESH_S)
def _signals(seconds: int) -> None:
    try:
        status, live, alerts, chaos = api().status(), api().live(seconds), api().alerts(), api().chaos()
    except ApiError as error:
        tell(error)
        return
    st.html(markup.note(about(status)))
    _tiles(live, alerts)
    if all(value is None for series in live.series.values() for value in series):
        st.info(
            "Nothing has been generated in this time. Send traffic with `quaver load`, "
            "or see the whole path once with `quaver demo`.",
            icon=":material/play_circle:",
        )
    if live.time:
        _series(live, alerts, chaos)


def about(status: Status) -> str:
    """Return in one line which model answers, and since when."""
    if not status.ready:
        return f"{status.model or 'The model'} is loading, or the model process restarts."
    told = status.engine.get("description") or {}
    names = [status.model or told.get("model"), told.get("quantization"), told.get("backend")]
    up = "" if status.uptime_s is None else f"up {_length(status.uptime_s)}"
    return " · ".join(str(part) for part in [*names, up] if part)


def _length(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _tiles(live: Live, alerts: Alerts) -> None:
    quality = markup.tile_row("Quality", judge.tiles(judge.QUALITY, live, alerts))
    told = [*judge.tiles(judge.BUSINESS, live, alerts), judge.breaker(alerts)]
    business = markup.tile_row("Business", told)
    engine = markup.tile_row("Engine", judge.tiles(judge.ENGINE, live, alerts))
    st.html(f'<div class="q-board"><div class="q-pair">{quality}{business}</div>{engine}</div>')
    for alert in alerts.active:
        st.html(
            markup.banner(
                "alarm" if alert.level == "L2" else "watch",
                f"{alert.level} {alert.name} on {alert.route}",
                f"{alert.summary}. Firing since {clock(alert.starts_at)}, for the team {alert.team}.",
            )
        )
    if alerts.blind:
        st.html(markup.note(f"Quality alerts cannot fire yet: {alerts.blind}."))


def alert_table(alerts: Alerts) -> pd.DataFrame:
    """Return active and past alerts, the newest first, with when the webhook heard of them."""
    rows = []
    for alert in alerts.all()[:50]:
        notice = alerts.heard(alert)
        rows.append(
            {
                "level": alert.level,
                "alert": alert.name,
                "route": alert.route,
                "team": alert.team,
                "began": clock(alert.starts_at),
                "ended": "firing" if alert.state == "firing" else clock(alert.ends_at),
                "webhook": f"{clock(notice.received)} from {notice.source}" if notice else None,
                "summary": alert.summary,
            }
        )
    return pd.DataFrame(rows)


def _series(live: Live, alerts: Alerts, chaos: Chaos) -> None:
    intervals: list[Interval] = [*fault_intervals(chaos), *alert_intervals(alerts)]
    low, high = live.time[0], live.time[-1]
    shade = charts.bands(intervals, low, high)
    heading("Faults and alerts")
    st.altair_chart(charts.lanes(shade, low, high), key="lanes", alt=charts.told(shade))
    with st.container(gap="xxsmall"):
        _rows(live, shade)
    heading("Alerts")
    told = alert_table(alerts)
    if told.empty:
        st.caption("None has fired.")
    else:
        st.dataframe(told, hide_index=True, placeholder="–", alt="Alerts, the newest first")


def _rows(live: Live, shade: pd.DataFrame) -> None:
    for number, (title, unit, lines, form, domain) in enumerate(ROWS):
        if not any(line.key in live.series for line in lines):
            continue
        st.html(f'<div class="q-chart"><b>{title}</b> {unit}</div>')
        data = charts.frame(live, lines)
        last = number == len(ROWS) - 1
        picture = charts.time_series(data, lines, shade, form=form, domain=domain, axis=last)
        st.altair_chart(picture, key=f"row-{number}", alt=f"{title} ({unit}) over time, {_spoken(data)}")


def _spoken(data: pd.DataFrame) -> str:
    known = data.dropna(subset=["value"])
    if known.empty:
        return "no traffic"
    parts = [
        f"{name} between {group['value'].min():.3g} and {group['value'].max():.3g}"
        for name, group in known.groupby("series")
    ]
    return ", ".join(parts)


@st.fragment(run_every=max(REFRESH_S * 2, 5.0))
def _recent() -> None:
    try:
        requests = api().requests(limit=40)
    except ApiError as error:
        tell(error)
        return
    if not requests:
        st.caption("None yet.")
        return
    shown = st.session_state.get("recent_ids", [])  # what the browser showed when a row was picked
    st.session_state["recent_ids"] = [request.request_id for request in requests]
    picked = st.dataframe(
        table(requests),
        hide_index=True,
        height=320,
        key="recent",
        on_select="rerun",
        selection_mode="single-row",
        column_config=COLUMNS,
        alt="The most recent requests, the newest first",
    )
    st.caption("Select a row to look inside the request.")
    rows = picked["selection"]["rows"]
    if rows and rows[0] < len(shown):
        target = st.Page(request_view.page, url_path="request")
        st.switch_page(target, query_params={"id": shown[rows[0]]})


COLUMNS = {
    "started": st.column_config.DatetimeColumn("started", format="HH:mm:ss"),
    "confidence": st.column_config.ProgressColumn("confidence", min_value=0.0, max_value=1.0, format="%.2f"),
    "entropy": st.column_config.NumberColumn("entropy, nats", format="%.2f"),
    "first token": st.column_config.NumberColumn("first token, s", format="%.2f"),
    "duration": st.column_config.NumberColumn("duration, s", format="%.2f"),
}


def table(requests: list[Request]) -> pd.DataFrame:
    """Return the requests as the table shows them; means over the whole response."""
    rows = [
        {
            "started": pd.to_datetime(request.started, unit="s", utc=True),
            "route": request.route,
            "outcome": request.outcome or request.finish_reason,
            "confidence": (request.aggregates or {}).get("mean_confidence"),
            "entropy": (request.aggregates or {}).get("mean_entropy"),
            "tokens": request.completion_tokens,
            "first token": request.first_token_s,
            "duration": request.duration_s,
            "alerts": ", ".join(request.alerts or []),
            "faults": ", ".join(request.faults or []),
            "request": request.request_id,
        }
        for request in requests
    ]
    return pd.DataFrame(rows)
