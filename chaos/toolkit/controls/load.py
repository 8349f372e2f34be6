"""Control: `quaver load` asks in the background while an experiment runs.

It begins before the hypothesis is looked at and ends with the run; `seconds` bounds it, should the run be
killed. The toolkit gives every function of a control all of the control's arguments.
"""

from __future__ import annotations

import atexit
import logging
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from chaoslib.exceptions import InterruptExecution

from chaos.toolkit.connection import Configuration, key_file, url_of

log = logging.getLogger("chaostoolkit")

_SAVE_S = 45.0  # for answers that still run, and the report
_processes: list[subprocess.Popen[bytes]] = []


def before_experiment_control(
    context: Any,
    *,
    configuration: Configuration = None,
    users: int = 4,
    rate: float = 0.0,
    seconds: float = 600.0,
    warm_up_s: float = 10.0,
    out: str = "load",
) -> None:
    """Start asking, and give it `warm_up_s`; interrupts the run if the load does not run by then."""
    command = [sys.executable, "-m", "quaver", "load", "--quiet", "--url", url_of(configuration)]
    command += ["--key-file", str(key_file(configuration, "client")), "--out", out]
    command += ["--rate", str(rate)] if rate else ["--users", str(users)]
    command += ["--seconds", str(seconds)]
    process = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - Ctrl-C reaches it through us
    _processes.append(process)
    atexit.register(cleanup_control)
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(warm_up_s)
        raise InterruptExecution(f"the load ended at once, with status {status}; try `quaver load` by itself")


def after_experiment_control(context: Any, **_: Any) -> None:
    """Stop asking, and let the load write its report."""
    until = time.monotonic() + _SAVE_S
    for process in _processes:
        process.send_signal(signal.SIGINT)
    for process in _processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def cleanup_control() -> None:
    """End whatever still asks."""
    while _processes:
        process = _processes.pop()
        if process.poll() is None:
            log.warning("the load did not end by itself")
            process.kill()
        process.wait()
