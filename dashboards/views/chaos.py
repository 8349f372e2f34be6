"""Chaos: what is broken now, HALT ALL, a careful way to break something, and what it set off."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from dashboards import charts, markup
from dashboards.api import ApiError
from dashboards.intervals import (
    AFTERMATH_S,
    alert_intervals,
    clock,
    describe,
    fault_intervals,
    reach,
    what_fired,
)
from dashboards.session import api, heading, tell
from dashboards.settings import DashboardSettings
from dashboards.shapes import Alerts, Chaos, Entry, Lease
from dashboards.views.chaos_form import form

KEY_HELP = "the content of `operator.key` in the engine's keys folder"
SHOWN = 8  # faults on the timeline
REFRESH_S = DashboardSettings().refresh_s


def page() -> None:
    """Draw the page. HALT ALL stands in the main script: it never waits for a refresh."""
    st.title("Chaos")
    said = st.empty()
    banner, halt = st.columns([4, 1], vertical_alignment="center")
    key = st.text_input(
        "Operator key",
        type="password",
        key="operator_key",
        persist_state="session",
        autocomplete="off",
        placeholder="kept in this browser session only",
        help=f"It is {KEY_HELP}. The dashboard stores it nowhere else.",
        width=460,
    )
    if halt.button("HALT ALL", type="primary", width="stretch", key="halt", icon=":material/front_hand:"):
        _act(said, "Every fault is ended; new ones are refused.", key, api().halt)
    try:
        chaos, alerts = api().chaos(), api().alerts()
    except ApiError as error:
        tell(error)
        return
    with banner:
        _banner()
    for lease in chaos.faults:
        _lease(lease, key, said)
    if chaos.lever.blocked and st.button("Allow new faults again", key="unblock"):
        _act(said, "New faults may be started.", key, api().unblock, rerun=True)
    heading("Start a fault")
    form(chaos, alerts, key or "")
    _story()


def _act(said: Any, done: str, key: str | None, call: Any, *args: Any, rerun: bool = False) -> None:
    """Do what the operator asked, and say in `said` how it went."""
    if not key:
        said.error(
            "Type the operator key first: it is the content of `operator.key` in the engine's keys folder."
        )
        return
    try:
        call(key, *args)
    except ApiError as error:
        with said:
            tell(error)
        return
    said.success(done)
    if rerun:
        st.rerun()


@st.fragment(run_every=1.0)
def _banner() -> None:
    try:
        chaos = api().chaos()
    except ApiError as error:
        tell(error)
        return
    st.html(banner(chaos))
    known = [lease.id for lease in chaos.faults]
    before = st.session_state.get("leases")
    st.session_state["leases"] = known
    if before is not None and before != known:
        st.rerun()


def banner(chaos: Chaos) -> str:
    """Return the state of chaos as one banner."""
    if not chaos.enabled:
        return markup.banner(
            "none", "Chaos is switched off", "Start the engine with QUAVER_CHAOS=1 to allow faults."
        )
    if chaos.faults:
        left = max(lease.remaining_s or 0.0 for lease in chaos.faults)
        names = ", ".join(f"{lease.kind} ({_left(lease)})" for lease in chaos.faults)
        many = "1 fault" if len(chaos.faults) == 1 else f"{len(chaos.faults)} faults"
        return markup.banner("alarm", f"{many} in force, the last ends in {left:.0f} s", names)
    if chaos.lever.blocked:
        return markup.banner("watch", "Halted", f"New faults are refused: {chaos.lever.reason or 'halted'}.")
    return markup.banner("steady", "Nothing is broken on purpose", "Faults may be started.")


def _left(lease: Lease) -> str:
    return "–" if lease.remaining_s is None else f"{lease.remaining_s:.0f} s left"


def _lease(lease: Lease, key: str | None, said: Any) -> None:
    told, stop = st.columns([4, 1], vertical_alignment="center")
    with told:
        st.html(
            markup.facts(
                [
                    (lease.kind, lease.id),
                    ("Parameters", describe(lease.params) or "none"),
                    ("Acts on", reach(lease.selector)),
                    ("Halts when", describe(lease.stop) or "the operator says so"),
                    ("Requests touched", lease.touched),
                    ("Started", clock(lease.started)),
                ]
            )
        )
    if stop.button("Stop", key=f"stop-{lease.id}", width="stretch"):
        _act(said, f"{lease.kind} is ended.", key, api().stop_fault, lease.id, rerun=True)


@st.fragment(run_every=max(REFRESH_S, 2.0))
def _story() -> None:
    try:
        chaos, alerts = api().chaos(), api().alerts()
    except ApiError as error:
        tell(error)
        return
    _timeline(chaos, alerts)
    heading("What fired")
    fired = fired_table(chaos, alerts)
    if fired.empty:
        st.caption("No fault has run yet. Start one above, or see all of them once with `quaver demo`.")
    else:
        st.dataframe(fired, hide_index=True, placeholder="–", alt="Alerts that each fault was met by")
    heading("Journal")
    if not chaos.journal:
        st.caption("Empty.")
        return
    st.dataframe(
        journal_table(chaos), hide_index=True, placeholder="", alt="The chaos journal, the newest first"
    )


def _timeline(chaos: Chaos, alerts: Alerts) -> None:
    faults = fault_intervals(chaos)[-SHOWN:]
    if not faults:
        return
    intervals = [*faults, *alert_intervals(alerts)]
    low = faults[0].start - AFTERMATH_S
    open_end = any(interval.end is None for interval in intervals)
    last = time.time() if open_end else max(i.end or 0.0 for i in faults) + 2 * AFTERMATH_S
    shade = charts.bands(intervals, low, last)
    heading("Timeline")
    st.altair_chart(charts.lanes(shade, low, last), key="timeline", alt=charts.told(shade))


def fired_table(chaos: Chaos, alerts: Alerts) -> pd.DataFrame:
    """Return one row a fault and alert it met, the newest fault first."""
    rows = [
        {
            "fault": fired.fault.label,
            "started": clock(fired.fault.start),
            "lasted, s": None if fired.fault.end is None else round(fired.fault.end - fired.fault.start),
            "what": fired.fault.note,
            "alert": fired.alert.name if fired.alert else "none",
            "level": fired.alert.level if fired.alert else None,
            "route": fired.alert.route if fired.alert else None,
            "after, s": None if fired.after_s is None else round(fired.after_s, 1),
            "alert ended": clock(fired.alert.ends_at) if fired.alert else None,
        }
        for fired in what_fired(fault_intervals(chaos), alerts)
    ]
    return pd.DataFrame(rows)


def _what(entry: Entry) -> str:
    """Return what a line of the journal is about: the fault, the verdict on its revert, or a note."""
    if entry.event == "start":
        return f"{describe(entry.params)}; {reach(entry.selector)}"
    return entry.state or entry.text or ""


def journal_table(chaos: Chaos) -> pd.DataFrame:
    """Return the journal, the newest entry first."""
    rows = [
        {
            "time": clock(entry.time),
            "event": entry.event,
            "fault": entry.kind,
            "what": _what(entry),
            "for, s": entry.ttl_s,
            "touched": entry.touched,
            "reason": entry.reason or entry.why,
            "by": entry.by,
            "id": entry.id,
        }
        for entry in sorted(chaos.journal, key=lambda e: e.time, reverse=True)
    ]
    return pd.DataFrame(rows)
