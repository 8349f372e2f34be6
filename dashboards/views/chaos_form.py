"""The form that starts a fault: kind, parameters, whom it strikes, for how long, and a typed confirmation."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards import markup
from dashboards.api import ApiError
from dashboards.intervals import describe, reach
from dashboards.session import api, tell
from dashboards.shapes import Alerts, Chaos, Kind, Param


def form(chaos: Chaos, alerts: Alerts, key: str) -> None:
    """Draw the form and, when asked, the confirmation."""
    if not chaos.kinds:
        st.caption("This engine knows no fault.")
        return
    left, right = st.columns([3, 2], gap="large")
    with left:
        kinds = {kind.kind: kind for kind in chaos.kinds}
        name = st.selectbox("Kind", list(kinds), key="kind", format_func=lambda k: f"{k}: {kinds[k].title}")
        kind = kinds[name]
        st.caption(" ".join(kind.description.split()).replace("`", ""))
        fault = _fault(chaos, kind)
    with right:
        _preview(kind, fault, key)
        why = refusal(chaos, alerts, fault, key)
        if why:
            st.caption(f":material/block: {why}")
        if st.button("Start …", key="start", disabled=bool(why), type="secondary"):
            _confirm(fault, key)


def _fault(chaos: Chaos, kind: Kind) -> dict[str, Any]:
    """Return the body of the start that the widgets describe; `ttl_s` None while it is not given."""
    control = bool(kind.control) and st.toggle(
        "Harmless control instead", key=f"{kind.kind}-control", help=describe(kind.control)
    )
    columns = st.columns(2)
    params: dict[str, Any] = {}
    for param in kind.parameters():
        if param.name in kind.control and (control or param.type == "boolean"):
            continue
        with columns[len(params) % 2]:
            params[param.name] = _widget(kind.kind, param)
    whom = st.columns(3)
    share_max = float(chaos.caps.get("share", 1.0))
    share = whom[0].number_input("Share of requests", 0.01, share_max, min(1.0, share_max), 0.05, key="share")
    tenant = whom[1].text_input("Tenant", key="tenant", placeholder="any", max_chars=64)
    route = whom[2].text_input("Route", key="route", placeholder="any", max_chars=64)
    ttl = st.number_input(
        "Duration, seconds (required)",
        1.0,
        float(chaos.caps.get("ttl_s", 3600.0)),
        value=None,
        step=10.0,
        format="%.0f",
        key="ttl",
        placeholder=f"at most {chaos.caps.get('ttl_s', 3600.0):.0f}",
    )
    selector = {"share": share} | ({"tenant": tenant} if tenant else {}) | ({"route": route} if route else {})
    given = {name: value for name, value in params.items() if value is not None}
    if control:
        given |= kind.control
    return {"kind": kind.kind, "params": given, "selector": selector, "ttl_s": ttl, "seed": 0}


def _widget(kind: str, param: Param) -> Any:
    label, key, about = param.name.replace("_", " "), f"{kind}-{param.name}", param.description or None
    if param.choices:
        first = param.choices.index(param.default) if param.default in param.choices else 0
        return st.selectbox(
            label, param.choices, first, key=key, help=about, format_func=lambda c: str(c) or "none"
        )
    if param.type == "boolean":
        return st.checkbox(label, bool(param.default), key=key, help=about)
    if param.type == "integer":
        low, high, value = (
            None if x is None else int(x) for x in (param.minimum, param.maximum, param.default)
        )
        return st.number_input(label, low, high, value, 1, key=key, help=about)
    if param.type == "number":
        least, most = param.minimum, param.maximum
        start = None if param.default is None else float(param.default)
        return st.number_input(label, least, most, start, 0.1, key=key, help=about)
    return st.text_input(label, str(param.default or ""), key=key, help=about)


def _preview(kind: Kind, fault: dict[str, Any], key: str) -> None:
    told = "the whole model process" if kind.scope == "process" else None
    if key and told is None:
        try:
            seen = api().preview(key, fault["selector"])
            told = f"about {seen.expected:.0f} of the last {seen.recent} requests"
        except ApiError as error:
            tell(error)
    st.html(
        '<div class="q-h">Preview</div>'
        + markup.facts(
            [
                ("Fault", fault["kind"]),
                ("Parameters", describe(fault["params"]) or "none"),
                ("Acts on", reach(fault["selector"])),
                ("Would have touched", told or "type the operator key to see"),
                ("Ends by itself after", None if fault["ttl_s"] is None else f"{fault['ttl_s']:.0f} s"),
                ("Should move", ", ".join(kind.moves) or None),
            ]
        )
    )


def refusal(chaos: Chaos, alerts: Alerts, fault: dict[str, Any], key: str) -> str | None:
    """Return why the fault may not be started now, in words; None when it may."""
    firing = [alert for alert in alerts.active if alert.level]
    if not chaos.enabled:
        return "Chaos is switched off on this engine."
    if chaos.lever.blocked:
        return "Chaos is halted; allow new faults first."
    if firing:
        return (
            f"An alert fires ({firing[0].name}): what a fault does could not be told apart. Wait for its end."
        )
    if not key:
        return "Type the operator key."
    if fault["ttl_s"] is None:
        return "Give a duration: no fault lasts for ever."
    return None


@st.dialog("Start this fault?")
def _confirm(fault: dict[str, Any], key: str) -> None:
    st.html(
        markup.facts(
            [
                ("Fault", fault["kind"]),
                ("Parameters", describe(fault["params"]) or "none"),
                ("Acts on", reach(fault["selector"])),
                ("Ends after", f"{fault['ttl_s']:.0f} s"),
            ]
        )
    )
    typed = st.text_input(f"Type {fault['kind']} to confirm", key="typed", live=True)
    if st.button("Start", type="primary", key="confirm", disabled=typed != fault["kind"]):
        try:
            api().start_fault(key, fault)
        except ApiError as error:
            tell(error)
            return
        st.rerun()
