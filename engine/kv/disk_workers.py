"""Threads that do one kind of disk work; one that hangs in a stalled call is left behind."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[memoryview], None]
"""Work of one thread; it is lent that thread's buffer, aligned to pages, until it returns."""

_MAX_LEFT_BEHIND = 4
_PATIENT = 15  # niceness, of 19: about a thirtieth of the processor time of a thread without


class Workers:
    """`threads` threads that take jobs from one bounded queue, in order.

    A thread that is `stuck_after_s` in one job is left behind and another takes its place, as long as
    no more than a few hang: a disk that stalls again and again must not collect threads. Nobody waits for
    the jobs of `patient` workers: their threads leave the processor to others, where the system has a
    priority for each thread.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        limit: int,
        buffer_bytes: int,
        stuck_after_s: float = math.inf,
        patient: bool = False,
    ) -> None:
        self._name, self._limit, self._buffer_bytes = name, limit, buffer_bytes
        self._stuck_after_s, self._patient = stuck_after_s, patient
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._began: dict[int, float | None] = {}  # serving thread -> when its job began; None: idle
        self._numbers = itertools.count()
        self._left_behind = 0
        self._closing = False
        with self._changed:
            for _ in range(threads):
                self._start()

    def put(self, job: Job) -> bool:
        """Queue a job. False: the queue is full, all threads hang, or it is closed. Never waits."""
        with self._changed:
            self._replace_stuck()
            hang = all(self._is_stuck(began) for began in self._began.values())
            if self._closing or hang or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def replace_stuck(self) -> None:
        """Leave threads behind that hang, so that the jobs queued behind theirs go on."""
        with self._changed:
            self._replace_stuck()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and all(began is None for began in self._began.values()), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Finish the queued jobs and end the threads; False when they did not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._began and not self._left_behind, timeout_s)

    def _is_stuck(self, began: float | None) -> bool:
        return began is not None and time.monotonic() - began > self._stuck_after_s

    def _replace_stuck(self) -> None:
        for number in [number for number, began in self._began.items() if self._is_stuck(began)]:
            if self._left_behind < _MAX_LEFT_BEHIND and not self._closing:
                log.warning("%s: a call to the disk hangs; another thread goes on", self._name)
                del self._began[number]
                self._left_behind += 1
                self._start()

    def _start(self) -> None:
        number = next(self._numbers)
        self._began[number] = None
        threading.Thread(target=self._run, args=(number,), name=self._name, daemon=True).start()

    def _run(self, number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        if self._patient and sys.platform == "linux":
            with contextlib.suppress(OSError):  # only a hint
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PATIENT)
        while (job := self._next(number)) is not None:
            try:
                job(buffer)
            except Exception:
                log.exception("%s: a job failed", self._name)

    def _next(self, number: int) -> Job | None:
        """End the thread's last job and wait for its next; None: the thread is to end."""
        with self._changed:
            if number in self._began:
                self._began[number] = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if self._jobs:
                    self._began[number] = time.monotonic()
                    return self._jobs.popleft()
                del self._began[number]
            else:
                self._left_behind -= 1
            self._changed.notify_all()
            return None
