"""Headless Locust in a process of its own, as `quaver load` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
GRACE_S = 15.0
FINISH_S = 30  # for answers that still run when the time is over


class LoadError(Exception):
    """The load could not run; the message says what to do."""


def run_headless(
    url: str,
    key: str,
    *,
    users: int = 8,
    rate: float = 0.0,
    seconds: float = 60.0,
    out_dir: Path = Path("load"),
    max_tokens: int = 48,
    patience_s: float = 20.0,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run `users` readers for `seconds` and return the report of `out_dir/readers.json`.

    `rate` is requests a second over all users, scheduled ahead; 0 asks as fast as answers come.
    Answers still running at the end get `FINISH_S` more; what is cut then has the outcome `ended`.
    SIGINT and SIGTERM reach Locust, which saves what it has. Raises LoadError.
    """
    if find_spec("locust") is None:  # not imported here: that would patch this process's threads
        raise LoadError("Locust is not installed; pip install 'quaver[load]'")
    out_dir.mkdir(parents=True, exist_ok=True)
    report_file = out_dir / "readers.json"
    report_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "locust", "--headless", "--locustfile", str(LOCUSTFILE), "--host", url),
        *("--users", str(users), "--spawn-rate", str(users), "--run-time", f"{max(1, round(seconds))}s"),
        *("--stop-timeout", str(FINISH_S), "--csv", str(out_dir / "locust"), "--exit-code-on-error", "0"),
        *(("--loglevel", "WARNING", "--only-summary") if quiet else ("--loglevel", "INFO")),
    ]
    environment = os.environ | {
        "QUAVER_KEY": key,
        "QUAVER_LOAD_OUT": str(out_dir),
        "QUAVER_LOAD_RATE": str(rate),
        "QUAVER_LOAD_TOKENS": str(max_tokens),
        "QUAVER_LOAD_PATIENCE_S": str(patience_s),
        "QUAVER_LOAD_SEED": str(seed),
    }
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: S603
    code = _wait(process)
    if not report_file.exists():
        raise LoadError(f"Locust ended with code {code} and left no report; run again without --quiet")
    report: dict[str, Any] = json.loads(report_file.read_text())
    return report


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for Locust; when we are told to stop, so is it, and its report is waited for."""

    def stop(*_: object) -> None:
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
            process.wait(GRACE_S)
