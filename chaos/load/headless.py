"""Headless Locust in a process of its own: the same plan, readers and report, driven by Locust."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chaos.load.plan import Plan
from chaos.load.recorder import hold

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
GRACE_S = 15.0
FINISH_S = 30  # for answers that still run when the time is over


class LocustError(Exception):
    """Locust could not run; the message says what to do."""


def run_headless(plan: Plan, url: str, key: str, *, quiet: bool = False) -> dict[str, Any]:
    """Run a plan with Locust and return the report; Locust's own CSV lies beside it.

    Answers still running at the end get `FINISH_S` more; what is cut then has the outcome `ended`.
    SIGINT and SIGTERM reach Locust, which saves what it has. Raises LocustError, and what
    `Plan.check` raises.
    """
    if find_spec("locust") is None:  # not imported here: that would patch this process's threads
        raise LocustError("Locust is not installed; pip install 'quaver[load]', or leave out --locust")
    plan.check()
    folder = Path(plan.out)
    folder.mkdir(parents=True, exist_ok=True)
    os.close(hold(folder))  # Locust's own process holds it from now on
    report_file = folder / "readers.json"
    report_file.unlink(missing_ok=True)
    users = 1 if plan.loop == "open" else plan.users
    command = [
        *(sys.executable, "-m", "locust", "--headless", "--locustfile", str(LOCUSTFILE), "--host", url),
        *("--users", str(users), "--spawn-rate", str(users), "--run-time", f"{max(1, round(plan.seconds))}s"),
        *("--stop-timeout", str(FINISH_S), "--csv", str(folder / "locust"), "--exit-code-on-error", "0"),
        *(("--loglevel", "WARNING", "--only-summary") if quiet else ("--loglevel", "INFO")),
    ]
    environment = os.environ | plan.to_env() | {"QUAVER_KEY": key}
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(  # noqa: S603 - in a session of its own, a Ctrl-C reaches it through us alone
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )
    code = _wait(process)
    if not report_file.exists():
        raise LocustError(f"Locust ended with code {code} and left no report; run again without --quiet")
    report: dict[str, Any] = json.loads(report_file.read_text())
    return report


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for Locust; when we are told to stop, so is it, and its report is waited for."""

    def stop(number: int, _: object) -> None:
        if number == signal.SIGINT:
            process.send_signal(signal.SIGUSR1)  # so that the report has which it was
        process.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
            process.wait(GRACE_S)
