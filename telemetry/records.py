"""Writes the record tables: a bounded queue, one thread, live segments, Parquet, caps.

The event loop only appends to deques. Detail (tokens, layers) is dropped and counted when the
writer cannot follow; request rows are kept until they are on disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from telemetry import columns, segments
from telemetry.columns import Step
from telemetry.record import TABLES
from telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

_MB = 1 << 20
_OUTAGE_S = 10.0  # without a failed write, and an outage is over
_MAX_PENDING_REQUESTS = 200_000  # only reached when the disk takes nothing for long


class RecordsInUseError(OSError):
    """Another server writes into the same records folder."""


class Records:
    """Owner of a records folder. `drop(what, rows)` is told of every row that is lost."""

    def __init__(
        self,
        settings: TelemetrySettings,
        drop: Callable[[str, int], None],
        text: Callable[[int], str | None] | None = None,
    ) -> None:
        self.settings, self.text = settings, text
        self.folder = settings.records_dir.expanduser()
        self._drop = drop
        self._steps: deque[Step] = deque()
        self._requests: deque[dict[str, Any]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._flushed = threading.Condition()
        self._asked = self._answered = 0
        self._failing: dict[str, float] = {}  # table -> when a write last failed
        self._rotate_at = 0.0
        self._cpu_s = 0.0
        self._lock = self._claim()
        self._recover()
        self._segments = {name: segments.Segment(self.folder / name, TABLES[name]) for name in TABLES}
        self._thread = threading.Thread(target=self._run, name="quaver-records", daemon=True)
        self._thread.start()

    def put_step(self, step: Step) -> None:
        """Queue the rows of one step, or drop and count them. Never waits."""
        if len(self._steps) >= self.settings.records_queue or self._closing:
            self._drop("tokens", len(step.request_ids))
            self._drop("layers", len(step.detail_rows))
            return
        self._steps.append(step)
        if len(self._steps) * 2 == self.settings.records_queue:
            self._wake.set()

    def put_request(self, row: dict[str, Any]) -> None:
        """Queue one row of `requests`. Never waits."""
        self._requests.append(row)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Write out everything queued so far. False when that took longer than `timeout_s`."""
        with self._flushed:
            self._asked += 1
            ticket = self._asked
            self._wake.set()
            return self._flushed.wait_for(
                lambda: self._answered >= ticket or not self._thread.is_alive(), timeout_s
            )

    def cpu_s(self) -> float:
        """Processor time of the writing thread so far."""
        if self._thread.is_alive() and self._thread.ident is not None:
            self._cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return self._cpu_s

    def close(self, timeout_s: float = 10.0) -> None:
        """Write out everything, rotate the live segments, stop the thread. Harmless twice."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("records: the disk did not take the last rows within %.0f s", timeout_s)
            return
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> int:
        for name in TABLES:
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RecordsInUseError(
                f"{self.folder} is in use by another server: stop it, or set QUAVER_RECORDS_DIR"
            ) from None
        return lock

    def _recover(self) -> None:
        """Turn what a killed process left behind into Parquet."""
        for part in self.folder.glob("*/*.part"):
            part.unlink(missing_ok=True)
        for name in TABLES:
            for path in sorted((self.folder / name).glob(f"*{segments.LIVE}")):
                try:
                    rows = segments.convert(path)
                    log.info("records: recovered %d rows of %s from %s", rows, name, path.name)
                except OSError as error:
                    log.warning("records: cannot convert %s yet: %s", path, error)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self.settings.records_flush_s)
            self._wake.clear()
            self._turn()
        self._turn()
        self._rotate(force=True)

    def _turn(self) -> None:
        with self._flushed:
            asked = self._asked
        try:
            self._write()
            self._rotate(force=False)
        except Exception:
            log.exception("records: a write failed")
        with self._flushed:
            self._answered = asked
            self._flushed.notify_all()

    def _write(self) -> None:
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        with_rows = [step for step in steps if step.request_ids]
        if with_rows:
            rows = sum(len(step.request_ids) for step in with_rows)
            if not self._append("tokens", lambda: columns.tokens_batch(with_rows, self.text)):
                self._drop("tokens", rows)
            detail = sum(len(step.detail_rows) for step in with_rows)
            if detail and not self._append("layers", lambda: columns.layers_batch(with_rows)):
                self._drop("layers", detail)
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        if requests and not self._append("requests", lambda: columns.requests_batch(requests)):
            self._requests.extendleft(reversed(requests))
            while len(self._requests) > _MAX_PENDING_REQUESTS:
                self._requests.popleft()
                self._drop("requests", 1)

    def _append(self, table: str, build: Callable[[], Any]) -> bool:
        """Append one batch; False when the disk refused it, which is logged once per outage."""
        try:
            self._segments[table].append(build())
        except OSError as error:
            if table not in self._failing:
                cause = "the disk is full" if error.errno == errno.ENOSPC else str(error)
                log.error(
                    "records: cannot write to %s: %s; detail is dropped until it can", self.folder, cause
                )
            self._failing[table] = time.monotonic()
            return False
        if time.monotonic() - self._failing.get(table, math.inf) > _OUTAGE_S:
            log.warning("records: %s of %s are written again", table, self.folder)
            del self._failing[table]
        return True

    def _rotate(self, force: bool) -> None:
        """Rotate all tables together, so that retention takes whole spans of time."""
        open_segments = [segment for segment in self._segments.values() if segment.path is not None]
        big = any(segment.size >= self.settings.records_rotate_mb * _MB for segment in open_segments)
        now = time.monotonic()
        old = any(now - segment.born >= self.settings.records_rotate_s for segment in open_segments)
        if force or big or old:
            for segment in open_segments:
                path = segment.path
                try:
                    segment.rotate()
                except OSError as error:
                    log.error("records: %s stays as it is, readable, until the next start: %s", path, error)
        if force or big or old or now >= self._rotate_at:
            self._rotate_at = now + 60.0
            self._retire()

    def _retire(self) -> None:
        """Delete the oldest Parquet files beyond the caps on age and total size."""
        files = list(segments.sizes(self.folder))
        excess = sum(size for _, _, size in files) - self.settings.records_max_mb * _MB
        oldest_ns = time.time_ns() - self.settings.records_max_age_h * 3600e9
        for name, path, size in files:
            if path.suffix != segments.PARQUET:
                continue
            if excess > 0 or int(name.split("-")[0]) < oldest_ns:
                path.unlink(missing_ok=True)
                excess -= size
