"""`quaver load` as a process: every way out leaves a report."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest


def start(url: str, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quaver", "load", "--url", url, "--out", str(out), *options]
    return subprocess.Popen(
        command, env=os.environ | {"QUAVER_CLIENT_KEY": "k"}, stdout=-1, stderr=-1, text=True
    )


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "readers.json").read_text())
    return found


def requests(out: Path) -> list[dict[str, str]]:
    with (out / "requests.csv").open() as file:
        return list(csv.DictReader(file))


def until_served(script: Any, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 40
    while script.served < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_open_loop_ends_with_its_count_and_tells_all(script: Any, tmp_path: Path) -> None:
    process = start(
        script.url, tmp_path, "--rate", "40", "--count", "30", "--slo", "ttft=30,e2e=60", "--seed", "4"
    )
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "read: 30" in text and "Goodput" in text and "100.0% of requests" in text
    found = report(tmp_path)
    assert (found["state"], found["outcomes"]) == ("finished", {"read": 30})
    assert found["goodput"]["good"] == len(requests(tmp_path)) == 30
    assert sum(row["due"] for row in found["timeline"]) == 30
    assert "<svg" in (tmp_path / "readers.html").read_text()


def test_a_trace_is_replayed_with_its_lengths(script: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,50,3\n0.3,60,4\n0.3,70,5\n")
    process = start(script.url, tmp_path / "out", "--trace", str(trace))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [float(row["intended_s"]) for row in requests(tmp_path / "out")] == pytest.approx([0, 0.3, 0.3])
    assert [body["max_tokens"] for body in script.asked] == [3, 4, 5]
    assert all(body["ignore_eos"] for body in script.asked)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_with_a_report(
    number: signal.Signals, code: int, script: Any, tmp_path: Path
) -> None:
    script.chunks, script.gap_s = ["the "] * 1000, 0.05
    process = start(script.url, tmp_path, "--rate", "20", "--patience", "600")
    until_served(script, 5, process)
    process.send_signal(number)
    text, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert f"stopped by {number.name}" in text
    found = report(tmp_path)
    assert found["state"] == f"stopped by {number.name}"
    assert found["outcomes"]["ended"] == found["requests"] == len(requests(tmp_path)) >= 5


def test_sigkill_loses_at_most_the_last_second(script: Any, tmp_path: Path) -> None:
    process = start(script.url, tmp_path, "--users", "2")
    until_served(script, 5, process)
    seen, moment = script.served, time.monotonic()
    while time.monotonic() < moment + 2.0:  # a second, and as much for a machine that is busy
        time.sleep(0.02)
    process.kill()
    process.communicate()
    found = report(tmp_path)
    assert found["state"] == "running"
    assert found["requests"] >= seen - 2  # two were being read
    assert len(requests(tmp_path)) == found["requests"]
    assert "running" not in (tmp_path / "readers.html").read_text().split("<body>")[0]
    assert "of a run that was killed" in (tmp_path / "readers.html").read_text()


def test_a_server_that_dies_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    """The server answers a few, then is gone with whoever reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
    event = b'data: {"id": "r", "choices": [{"delta": {"content": "x"}}]}\n\n'

    def serve() -> None:
        for number in range(4):
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                if number == 0:
                    client.sendall(head + b"content-length: 2\r\n\r\n{}")
                    continue
                client.sendall(head + b"content-type: text/event-stream\r\n\r\n" + event)
                if number < 3:
                    client.sendall(b"data: [DONE]\n\n")
        listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    process = start(
        f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path, "--rate", "10", "--seconds", "4"
    )
    _, errors = process.communicate(timeout=60)
    thread.join()
    assert process.returncode == 0, errors
    found = report(tmp_path)
    assert found["state"] == "finished"
    assert found["outcomes"]["read"] == 2 and found["outcomes"]["failed"] >= 2
    assert {"the stream ended before [DONE]", "ConnectError"} <= set(found["errors"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--rate", "1", "--users", "2"), "give one of them"),
        (("--slo", "ttft=soon"), "a limit is a number of seconds"),
        (("--trace", "/nowhere.csv"), "cannot read the trace"),
        (("--burst-rate", "9"), "give --rate"),
        (("--out", "/proc/nope"), "--out: cannot make the folder /proc/nope"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(
    options: tuple[str, ...], complaint: str, script: Any, tmp_path: Path
) -> None:
    process = start(script.url, tmp_path / "out", *options)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("quaver: ") and complaint in errors
    assert script.served == 0 and not (tmp_path / "out").exists()


def test_nobody_there_says_what_to_do(tmp_path: Path) -> None:
    _, errors = (process := start("http://127.0.0.1:9", tmp_path / "out")).communicate(timeout=60)
    assert process.returncode == 1 and "quaver serve" in errors


def test_a_run_without_an_answer_fails(script: Any, tmp_path: Path) -> None:
    script.status = 503
    process = start(script.url, tmp_path, "--rate", "20", "--seconds", "1")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "shed" in text and "503 breaker_open" in text
