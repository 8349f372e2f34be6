"""Every page as a script: empty, populated, unreachable; and what the chaos desk sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboards

OPERATOR_KEY = "operator-key-of-the-tests"
APP = Path(dashboards.__file__).with_name("app.py")
PAGES = ("live", "request", "tiers", "chaos")


@pytest.fixture(autouse=True)
def _fresh_clients() -> Iterator[None]:
    """Clients are cached for a process; each test has its own engine."""
    yield
    st.cache_resource.clear()


def live() -> None:
    from dashboards.views.live import page

    page()


def request() -> None:
    from dashboards.views.request import page

    page()


def chaos() -> None:
    from dashboards.views.chaos import page

    page()


def tiers() -> None:
    from dashboards.views.tiers import page

    page()


def show(name: str, **state: Any) -> AppTest:
    script = AppTest.from_function(
        {"live": live, "request": request, "tiers": tiers, "chaos": chaos}[name], default_timeout=30
    )
    for key, value in state.items():
        script.session_state[key] = value
    script.run()
    assert not script.exception, script.exception
    return script


def text(script: AppTest) -> str:
    parts = [*script.html, *script.markdown, *script.caption, *script.info, *script.error, *script.warning]
    return "\n".join(str(getattr(part, "body", None) or part.value) for part in parts)


def test_the_app_starts_on_live(recorded_engine: Any) -> None:
    script = AppTest.from_file(APP, default_timeout=30).run()
    assert not script.exception
    assert script.title[0].value == "Live"


@pytest.mark.parametrize("name", PAGES)
def test_populated(recorded_engine: Any, name: str) -> None:
    script = show(name, request=recorded_engine.answers["detail"]["request"]["request_id"])
    assert not script.error
    assert not script.warning
    assert script.title[0].value.lower().endswith(name)


@pytest.mark.parametrize("name", PAGES)
def test_empty_says_what_to_run(recorded_engine: Any, name: str) -> None:
    recorded_engine.empty()
    assert "quaver demo" in text(show(name))


@pytest.mark.parametrize("name", PAGES)
def test_unreachable_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("QUAVER_URL", "http://127.0.0.1:9")
    script = show(name)
    assert script.error
    assert "quaver serve" in script.error[0].value


@pytest.mark.parametrize("name", PAGES)
def test_wrong_key_says_so(recorded_engine: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("QUAVER_VIEWER_KEY", "wrong")
    assert "QUAVER_VIEWER_KEY" in show(name).error[0].value


def test_live_shows_alerts_and_firing_ones_first(recorded_engine: Any) -> None:
    alerts = recorded_engine.answers["alerts"]
    past = alerts["history"][0]
    alerts["active"] = [{**past, "name": "Paged", "state": "firing", "endsAt": None, "level": "L2"}]
    script = show("live")
    assert "L2 Paged" in text(script)
    table = script.dataframe[0].value
    assert table["alert"].tolist()[0] == "Paged"
    assert table["ended"].tolist()[0] == "firing"


def test_request_without_captured_text_shows_indices(recorded_engine: Any) -> None:
    tokens = recorded_engine.answers["detail"]["tokens"]
    tokens["text"] = [None] * len(tokens["step"])
    told = text(show("request", request=recorded_engine.answers["detail"]["request"]["request_id"]))
    assert "q-chips" in told
    assert "QUAVER_CAPTURE_CONTENT=1" in told


def test_request_survives_a_record_of_nulls(recorded_engine: Any) -> None:
    detail = recorded_engine.answers["detail"]
    keep = {"request_id": detail["request"]["request_id"]}
    detail["request"] = keep
    detail["tokens"] = {
        name: column if name in ("choice", "step") else [None] * len(column)
        for name, column in detail["tokens"].items()
    }
    for row in detail["layers"]["rows"]:
        row.update(lens_entropy=None, head_kl=None)
    detail["spans"] = []
    assert "No layer was sampled" in text(show("request", request=keep["request_id"]))


def test_unknown_request_says_so(recorded_engine: Any) -> None:
    script = show("request", request=recorded_engine.answers["requests"][-1]["request_id"])
    assert "There is no record" in script.warning[0].value


def test_tiers_that_are_off_say_how_to_switch_them_on(recorded_engine: Any) -> None:
    told = recorded_engine.answers["tiers"]
    assert "QUAVER_KV_DISK_DIR" not in text(show("tiers"))
    told["tiers"] = told["tiers"][:1]
    script = show("tiers")
    assert "QUAVER_KV_HOST_MB=512" in script.info[0].value
    assert "QUAVER_KV_DISK_DIR" in script.info[0].value
    assert text(script).count("q-off") == 2
    told["tiers"] = []
    assert "it is loading" in show("tiers").info[0].value


def test_a_damaged_block_of_the_last_minute_is_an_alarm_and_an_older_one_is_watched(
    recorded_engine: Any,
) -> None:
    disk = recorded_engine.answers["tiers"]["tiers"][2]
    assert "none since the start" in text(show("tiers"))
    disk["counts"]["corrupt"], disk["rates"]["corrupt"] = 3.0, 1 / 60
    assert "Corrupt blocks: 3 , 1 in the last minute" in text(show("tiers"))
    disk["rates"]["corrupt"] = 0.0
    assert "Corrupt blocks: 3 , 0 in the last minute" in text(show("tiers"))


def ready(script: AppTest) -> AppTest:
    script.number_input(key="ttl").set_value(30.0)
    return script.run()


def test_start_needs_key_duration_and_quiet(recorded_engine: Any) -> None:
    recorded_engine.calm()
    script = show("chaos")
    assert script.button(key="start").disabled
    assert "Type the operator key" in text(script)
    script.text_input(key="operator_key").set_value(OPERATOR_KEY).run()
    assert "Give a duration" in text(script)
    assert not ready(script).button(key="start").disabled
    alert = {**recorded_engine.answers["alerts"]["history"][0], "state": "firing"}
    recorded_engine.answers["alerts"]["active"] = [alert]
    script.run()
    assert script.button(key="start").disabled
    assert "An alert fires" in text(script)


def test_start_asks_for_the_typed_name(recorded_engine: Any) -> None:
    recorded_engine.calm()
    script = ready(show("chaos", operator_key=OPERATOR_KEY))
    script.button(key="start").click().run()
    assert not script.exception
    assert script.button(key="confirm").disabled
    assert script.selectbox(key="kind").value in script.text_input(key="typed").label
    assert recorded_engine.sent == []


def test_halt_needs_no_confirmation_but_the_key(recorded_engine: Any) -> None:
    script = show("chaos")
    script.button(key="halt").click().run()
    assert "operator key" in script.error[0].value
    assert recorded_engine.sent == []
    script.text_input(key="operator_key").set_value(OPERATOR_KEY).run()
    script.button(key="halt").click().run()
    assert recorded_engine.sent[-1][:2] == ("POST", "/quaver/chaos/halt")
    assert "Halted" in text(script)
    script.button(key="unblock").click().run()
    assert recorded_engine.sent[-1][:2] == ("POST", "/quaver/chaos/unblock")


def test_halt_works_while_nothing_can_be_read(recorded_engine: Any) -> None:
    recorded_engine.answers["chaos"] = {"enabled": "?"}
    script = show("chaos", operator_key=OPERATOR_KEY)
    script.button(key="halt").click().run()
    assert recorded_engine.sent[-1][:2] == ("POST", "/quaver/chaos/halt")


def test_a_refused_key_is_said(recorded_engine: Any) -> None:
    script = show("chaos", operator_key="wrong")
    script.button(key="halt").click().run()
    assert any("operator.key" in error.value for error in script.error)


def test_a_fault_in_force_can_be_stopped(recorded_engine: Any) -> None:
    recorded_engine.answers["chaos"]["faults"] = [
        {"fault_id": "noise-1", "kind": "noise", "remaining_s": 20.0, "params": {"sigma": 2.0}}
    ]
    script = show("chaos", operator_key=OPERATOR_KEY)
    assert "1 fault in force" in text(script)
    script.button(key="stop-noise-1").click().run()
    assert recorded_engine.sent[-1][:2] == ("DELETE", "/quaver/chaos/faults/noise-1")


def test_harmless_control_fills_its_parameters(recorded_engine: Any) -> None:
    script = show("chaos")
    script.selectbox(key="kind").set_value("noise").run()
    script.toggle(key="noise-control").set_value(True).run()
    assert "sigma 0" in text(script)
