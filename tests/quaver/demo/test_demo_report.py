from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from quaver.demo.control import Alert, alerts_of
from quaver.demo.phases import between
from quaver.demo.plan import experiments
from quaver.demo.report import CleanWindows, DemoResult, FaultResult, FinaleResult, table, verdicts

ALERT = Alert("QuaverLowConfidenceRate", "L1", "default", 100.0, None)


def result(**noise: Any) -> DemoResult:
    faults = []
    for experiment in experiments():
        facts: dict[str, Any] = {
            "experiment": experiment,
            "touched": 40,
            "probe_clean": 0.9,
            "probe_control": 0.9,
            "probe_faulted": 0.25,
            "alerts": [],
            "control_alerts": [],
            "time_to_detect_s": None,
            "recovered": True,
        }
        if experiment.name == "noise":
            facts |= {"alerts": [ALERT], "time_to_detect_s": 7.25} | noise
        faults.append(FaultResult(**facts))
    return DemoResult(
        model="smollm2",
        faults=faults,
        clean=CleanWindows(responses=348),
        finale=FinaleResult(
            paged=True,
            breaker_opened=True,
            breaker_closed=True,
            page_s=3.0,
            open_s=3.2,
            closed_s=14.0,
            left=19,
        ),
        seconds=600.0,
    )


def test_json_has_exactly_the_agreed_keys() -> None:
    data = json.loads(json.dumps(result().as_json()))
    assert set(data) == {"model", "faults", "clean_windows", "l2"}
    assert [fault["name"] for fault in data["faults"]] == ["authority", "premise", "truncation", "noise"]
    assert set(data["faults"][0]) == {
        *("name", "touched", "probe_clean", "probe_faulted", "alerts", "control_alerts"),
        *("time_to_detect_s", "recovered"),
    }
    assert data["faults"][3]["alerts"] == ["QuaverLowConfidenceRate"]
    assert data["clean_windows"] == {"responses": 348, "alerts": []}
    assert data["l2"] == {"paged": True, "breaker_opened": True, "breaker_closed": True, "seconds": 3.0}


def test_words_say_what_was_missed_and_why() -> None:
    authority, _, _, noise, clean, finale = verdicts(result())
    assert "NOT caught" in authority and "as surely as" in authority
    assert "caught in 7.2 s" in noise and "90% to 25%" in noise
    assert clean == "Clean windows: 0 false alarm(s) in 348 responses."
    assert "the page came after 3.0 s" in finale and "closed again" in finale


def test_alarm_in_the_control_is_not_hidden() -> None:
    noise = verdicts(result(control_alerts=[ALERT]))[3]
    assert "harmless control raised the alarm too" in noise


def test_table_shows_every_fault_and_the_finale() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(table(result()))
    text = console.export_text()
    assert "noise" in text and "7.2 s" in text and "90% → 25%" in text and "breaker opened" in text


def test_alerts_are_read_once_each_and_matched_by_their_start() -> None:
    firing = {
        "name": "A",
        "level": "L1",
        "route": "r",
        "startsAt": "1970-01-01T00:01:40Z",
        "endsAt": None,
        "state": "firing",
    }
    resolved = firing | {"endsAt": "1970-01-01T00:02:00Z", "state": "resolved"}
    watchdog = firing | {"name": "Watchdog", "level": "none"}
    alerts = alerts_of({"active": [firing, watchdog], "history": [firing, resolved]})
    assert [(a.name, a.starts_at, a.ends_at) for a in alerts] == [
        ("A", 100.0, 120.0),
        ("Watchdog", 100.0, None),
    ]
    assert [a.name for a in between(alerts, 99.0, 101.0)] == ["A"]
    assert between(alerts, 100.5, 200.0) == []
