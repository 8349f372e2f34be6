from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quaver.demo import main, plan
from quaver.demo.control import DemoError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few responses, so that the played demo takes seconds."""
    for name, value in {"CLEAN": 24, "FEW": 16, "MANY": 16, "RECOVERY": 8, "FINALE_BASE": 16}.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(plan, "CALIBRATION", (40, 40))


def options(stage: Any, tmp_path: Path) -> main.Options:
    key = tmp_path / "operator.key"
    key.write_text("secret\n")
    return main.Options(once=True, json_file=tmp_path / "demo.json", target=stage.url, operator_key_file=key)


def test_demo_runs_every_step_and_tells_what_it_saw(
    stage: Any, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quaver.demo.finale.FINALE_BASE", 16)
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        result = main.run(options(stage, tmp_path), console)
    data = json.loads((tmp_path / "demo.json").read_text())
    assert data == result.as_json()
    found = {fault["name"]: fault for fault in data["faults"]}
    assert found["noise"]["alerts"] == found["truncation"]["alerts"] == ["Hesitates"]
    assert found["authority"]["alerts"] == found["premise"]["alerts"] == []
    assert all(fault["control_alerts"] == [] and fault["recovered"] for fault in data["faults"])
    assert all(fault["touched"] >= 16 for fault in data["faults"])
    assert found["noise"]["probe_clean"] > 0.5 > found["noise"]["probe_faulted"]
    assert 0 < found["noise"]["time_to_detect_s"] < 10
    assert data["clean_windows"]["alerts"] == []
    assert data["clean_windows"]["responses"] >= 3 * 24
    assert data["l2"]["paged"] and data["l2"]["breaker_opened"] and data["l2"]["breaker_closed"]
    assert stage.calibration == ["start", "finish"]
    assert stage.fault is None
    assert sorted(stage.started) == sorted(stage.ended)
    assert len(stage.started) == 9  # four faults, four controls, the finale
    text = console.export_text()
    assert "went engine → Alertmanager → webhook" in text
    assert "authority" in text and "NOT caught" in text


def test_alarms_in_clean_windows_are_reported(
    stage: Any, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quaver.demo.finale.FINALE_BASE", 8)
    from quaver.demo import phases

    monkeypatch.setattr(phases, "SETTLE_S", 0.2)
    stage.false_alarm = True
    with (tmp_path / "out").open("w") as file:
        result = main.run(options(stage, tmp_path), Console(file=file))
    assert [alert.name for alert in result.clean.alerts] == ["Hesitates"]
    assert not any(fault.recovered for fault in result.faults)


def test_sigterm_ends_the_fault_in_force(stage: Any, tmp_path: Path) -> None:
    wanted = options(stage, tmp_path)
    command = [sys.executable, "-m", "quaver", "demo", "--once", "--target", stage.url]
    command += ["--operator-key-file", str(wanted.operator_key_file)]
    process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while stage.fault is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stage.fault is not None
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(20) == 130
    finally:
        process.kill()
    assert stage.fault is None


def test_target_needs_the_operator_key() -> None:
    with pytest.raises(DemoError, match="--operator-key-file"):
        main.run(main.Options(target="http://127.0.0.1:1"), Console(quiet=True))
