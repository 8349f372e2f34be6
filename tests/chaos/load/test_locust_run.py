from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.load import headless
from chaos.load.headless import LOCUSTFILE
from chaos.load.plan import Plan
from quaver.cli.load import table


def run_headless(url: str, out: Path, **given: Any) -> dict[str, Any]:
    return headless.run_headless(Plan(out=str(out), **given), url, "k", quiet=True)


def test_headless_run_streams_hangs_up_and_reports(script: Any, tmp_path: Path) -> None:
    script.chunks = ["the ", "answer "] * 100
    script.gap_s = 0.01
    report = run_headless(script.url, tmp_path, users=4, seconds=2, patience_s=0.3)
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
    report = run_headless(script.url, tmp_path, users=2, rate=20.0, seconds=1)
    assert set(report["outcomes"]) == {"shed"}
    assert report["shed_because"] == {"503": report["requests"]}
    assert report["end_to_end_s"]["count"] == 0


def test_answers_running_at_the_end_are_read_to_their_end(script: Any, tmp_path: Path) -> None:
    script.before_s = 3.0
    report = run_headless(script.url, tmp_path, users=2, seconds=1)
    assert report["outcomes"] == {"read": 2}
    assert script.hung_up == 0


def test_answers_cut_by_the_end_have_their_own_outcome(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headless, "FINISH_S", 1)
    script.chunks, script.gap_s = ["word "], 20.0
    report = run_headless(script.url, tmp_path, users=2, seconds=1, patience_s=900)
    assert report["outcomes"] == {"ended": 2}
    assert report["first_token_s"]["count"] == 2
    assert table(report).caption == "ended with the run: 2"


def test_an_open_loop_starts_readers_when_they_are_due(script: Any, tmp_path: Path) -> None:
    script.before_s = 1.0
    report = run_headless(script.url, tmp_path, rate=10.0, seconds=3, seed=2)
    due = [at_s for _, at_s in Plan(rate=10.0, seconds=3, seed=2).due()]
    assert len(due) * 0.6 <= report["requests"] <= len(due)  # Locust's own clock begins earlier
    assert report["outcomes"] == {"read": report["requests"]}
    assert report["first_token_s"]["p50"] >= 1.0
    with (tmp_path / "requests.csv").open() as file:
        rows = sorted(float(row["intended_s"]) for row in csv.DictReader(file))  # they lie as they ended
    gaps = [later - earlier for earlier, later in itertools.pairwise(rows)]
    assert gaps == pytest.approx([b - a for a, b in itertools.pairwise(due)][: len(gaps)], abs=1e-5)


def test_nobody_asks_after_the_end(script: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    report = run_headless(script.url, tmp_path, users=1, rate=0.001, seconds=1)
    assert report["requests"] == 0
    assert time.monotonic() - began < 20


def test_a_dead_server_is_no_connection(tmp_path: Path) -> None:
    report = run_headless("http://127.0.0.1:9", tmp_path, users=1, seconds=1)
    assert set(report["errors"]) == {"no connection"}
    count = report["requests"]
    assert table(report).caption == f"failed: {count} ({count} no connection)"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_report_that_says_so(script: Any, tmp_path: Path, signum: signal.Signals) -> None:
    code = (
        "from chaos.load.headless import run_headless; from chaos.load.plan import Plan; "
        f"run_headless(Plan(users=2, out={str(tmp_path)!r}), {script.url!r}, 'k', quiet=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    deadline = time.monotonic() + 40
    while script.served < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    assert process.wait(30) == 0
    report = json.loads((tmp_path / "readers.json").read_text())
    assert report["state"] == f"stopped by {signum.name}"
    assert report["outcomes"]["read"] >= 1
    assert 0 < report["seconds"] < 60


def test_locustfile_ships_beside_the_code() -> None:
    assert LOCUSTFILE.exists()
    assert LOCUSTFILE.parent == Path(str(headless.__file__)).parent
