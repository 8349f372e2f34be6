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

from chaos.load import run as load_run
from chaos.load.run import LOCUSTFILE, run_headless
from quaver.cli.load import table


def test_headless_run_streams_hangs_up_and_reports(script: Any, tmp_path: Path) -> None:
    script.chunks = ["the ", "answer "] * 100
    script.gap_s = 0.01
    report = run_headless(script.url, "k", users=4, seconds=2, out_dir=tmp_path, patience_s=0.3, quiet=True)
    assert report["requests"] >= 4
    assert report["outcomes"]["left"] > 0
    assert "read" not in report["outcomes"]
    assert report["first_token_s"]["count"] > 0
    assert report["inter_token_s"]["p50"] > 0.005
    assert script.hung_up > 0
    assert (tmp_path / "readers.csv").exists()
    assert (tmp_path / "locust_stats.csv").exists()


def test_refusals_are_counted_apart_with_their_status(script: Any, tmp_path: Path) -> None:
    script.status = 503
    report = run_headless(script.url, "k", users=2, rate=20.0, seconds=1, out_dir=tmp_path, quiet=True)
    assert set(report["outcomes"]) == {"shed"}
    assert report["shed_because"] == {"503": report["requests"]}
    assert report["end_to_end_s"]["count"] == 0


def test_answers_running_at_the_end_are_read_to_their_end(script: Any, tmp_path: Path) -> None:
    script.before_s = 3.0
    report = run_headless(script.url, "k", users=2, seconds=1, out_dir=tmp_path, quiet=True)
    assert report["outcomes"] == {"read": 2}
    assert script.hung_up == 0


def test_answers_cut_by_the_end_have_their_own_outcome(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_run, "FINISH_S", 1)
    script.chunks, script.gap_s = ["word "], 20.0
    report = run_headless(script.url, "k", users=2, seconds=1, out_dir=tmp_path, patience_s=900, quiet=True)
    assert report["outcomes"] == {"ended": 2}
    assert report["first_token_s"]["count"] == 2
    assert table(report).caption == "ended with the run: 2"


def test_nobody_asks_after_the_end(script: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    report = run_headless(script.url, "k", users=1, rate=0.001, seconds=1, out_dir=tmp_path, quiet=True)
    assert report["requests"] == 0
    assert time.monotonic() - began < 20


def test_a_dead_server_is_no_connection(tmp_path: Path) -> None:
    report = run_headless("http://127.0.0.1:9", "k", users=1, seconds=1, out_dir=tmp_path, quiet=True)
    assert set(report["errors"]) == {"no connection"}
    count = report["requests"]
    assert table(report).caption == f"failed: {count} ({count} no connection)"


def test_sigterm_leaves_a_report(script: Any, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from chaos.load.run import run_headless; "
        f"run_headless({script.url!r}, 'k', users=2, seconds=60, out_dir=Path({str(tmp_path)!r}), quiet=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    deadline = time.monotonic() + 40
    while script.served < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    report = json.loads((tmp_path / "readers.json").read_text())
    assert report["outcomes"]["read"] >= 1
    assert 0 < report["seconds"] < 60


def test_locustfile_ships_beside_the_code() -> None:
    assert LOCUSTFILE.exists()
    assert LOCUSTFILE.parent == Path(str(load_run.__file__)).parent
