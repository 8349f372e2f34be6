"""The faults that this run started, and why the run may be worth nothing.

The toolkit calls a run completed although an action failed or a fault touched nothing, swallows SIGTERM
while an activity runs, and skips rollbacks when it is interrupted. So the process keeps its own books:

- a fault that is refused, or that touched too little, is a flaw, and a flaw interrupts the run;
- SIGINT and SIGTERM end what the run started before anything else happens;
- at the exit of the process what is left is ended, and with a flaw its exit status is not 0.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
from chaoslib.exceptions import ActivityFailed

from chaos.client import ChaosClient, RefusedError
from chaos.toolkit.connection import Configuration, connect

log = logging.getLogger("chaostoolkit")

_GRACEFUL = 20  # what chaoslib takes for an exit with a journal, see chaoslib.exit
_VERDICT_S = 15.0
_TROUBLE = (RefusedError, httpx.HTTPError, ActivityFailed)


class Ledger:
    """One for each process. Activities in the background use it from other threads."""

    def __init__(self) -> None:
        self.flaws: list[str] = []
        self.interrupted = False
        self.judged = False  # a control has told the toolkit's journal
        self._open: dict[str, tuple[Configuration, int]] = {}
        self._ended: dict[str, Configuration] = {}
        self._lock = threading.RLock()
        self._guarded = False
        self._starting = 0
        self._deferred: int | None = None  # a signal that came meanwhile

    def opened(self, fault_id: str, configuration: Configuration, at_least: int) -> None:
        """Take in a fault that this run started; it has to touch `at_least` requests."""
        with self._lock:
            self._open[fault_id] = (configuration, at_least)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Let no signal come between the start of a fault and its name in these books."""
        self.guard()
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting and self._deferred is not None:
                os.kill(os.getpid(), self._deferred)

    def guard(self) -> None:
        """Answer signals and the exit of this process from now on. Signals reach the main thread alone."""
        if threading.current_thread() is not threading.main_thread() or self._guarded:
            return
        self._guarded = True
        atexit.register(self._leave)
        for signum, stop in ((signal.SIGTERM, _exit_gracefully), (signal.SIGINT, _interrupt)):
            signal.signal(signum, self._stopping(stop))

    def flaw(self, why: str) -> None:
        """Note why the run is worth nothing."""
        log.error("this run is not valid: %s", why)
        self.flaws.append(why)

    def settle(self) -> None:
        """End what is left of this run's faults, and look at how each did."""
        for fault_id in list(self._open):
            self.close(fault_id)
        for fault_id in list(self._ended):
            self._check_revert(fault_id, self._ended.pop(fault_id))

    def close(self, fault_id: str) -> None:
        """End a fault of this run and see whether it touched enough. Harmless for others."""
        with self._lock:
            configuration, at_least = self._open.pop(fault_id, (None, -1))
        if at_least < 0:
            return
        try:
            with connect(configuration) as client:
                client.stop(fault_id)
                ended = _ended(client, fault_id)
        except _TROUBLE as error:
            self.flaw(f"what became of {fault_id} is not known: {error}")
            return
        self._ended[fault_id] = configuration
        if ended is None:
            self.flaw(f"the server knows nothing of {fault_id}")
        elif ended["reason"] not in ("stopped", "expired"):
            self.flaw(f"{fault_id} did not last: {ended['reason']}")
        elif at_least and ended["touched"] is None:
            self.flaw(f"{fault_id} strikes the whole process and counts no requests: give at_least: 0")
        elif at_least and ended["touched"] < at_least:
            few = f"touched {ended['touched']} requests, fewer than {at_least}"
            self.flaw(f"{fault_id} {few}; is there traffic that its selector matches?")

    def halted(self) -> str | None:
        """Return why the server halted chaos, if it did while a fault of this run was in force."""
        for fault_id, (configuration, _) in list(self._open.items()):
            with connect(configuration) as client:
                status = client.status()
            if status["lever"]["blocked"]:
                return f"{fault_id} was ended, chaos is halted: {status['lever']['reason']}"
        return None

    def _check_revert(self, fault_id: str, configuration: Configuration) -> None:
        verdict: dict[str, Any] = {"state": "pending"}
        until = time.monotonic() + _VERDICT_S
        try:
            with connect(configuration) as client:
                while verdict["state"] == "pending" and time.monotonic() < until:
                    ended = _ended(client, fault_id)
                    verdict = ended["reverted"] if ended is not None else {"state": "not known"}
                    time.sleep(0.1)
        except _TROUBLE as error:
            verdict = {"state": "not known", "why": error}
        if verdict["state"] == "differs":
            self.flaw(f"after {fault_id} the server answers otherwise than before: {verdict['why']}")
        elif verdict["state"] != "verified":
            log.warning("the revert of %s is %s: %s", fault_id, verdict["state"], verdict.get("why"))

    def _stopping(self, stop: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, frame: FrameType | None) -> None:
            self.interrupted = True
            if self._starting:
                self._deferred = signum
                return
            self._end_at_once()
            stop()

        return handle

    def _end_at_once(self) -> None:
        """End every fault of this run, whatever it touched."""
        for fault_id, (configuration, _) in list(self._open.items()):
            self._open.pop(fault_id, None)
            try:
                with connect(configuration) as client:
                    client.stop(fault_id)
            except _TROUBLE as error:
                log.error("%s could not be ended and ends by itself: %s", fault_id, error)

    def _leave(self) -> None:
        """The process exits: nothing stays in force, and a flaw that nobody told shows in the status."""
        if self.interrupted:
            self._end_at_once()
            return
        self.settle()
        if self.flaws and not self.judged:
            print(f"quaver: this run is not valid: {'; '.join(self.flaws)}", file=sys.stderr)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def interrupt() -> None:
    """End the toolkit's run at once, with a journal and an exit status that is not 0."""
    if callable(signal.getsignal(signal.SIGUSR1)):  # a run of the toolkit waits for it
        os.kill(os.getpid(), signal.SIGUSR1)


def _ended(client: ChaosClient, fault_id: str) -> dict[str, Any] | None:
    return next((f for f in client.status()["ended"] if f["fault_id"] == fault_id), None)


def _exit_gracefully() -> None:
    # Not InterruptExecution: that is an Exception, which the toolkit takes for a failed activity.
    raise SystemExit(_GRACEFUL)


def _interrupt() -> None:
    raise KeyboardInterrupt


LEDGER = Ledger()
