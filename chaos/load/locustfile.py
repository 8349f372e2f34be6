"""Locust users who stream answers, read along and hang up when their patience ends.

Locust's own table keeps one row per request (to the headers). First-token, inter-token and
end-to-end times live in our histograms, saved every two seconds and on every way out. When the run
is over nobody asks any more, and answers still running are read on for Locust's stop timeout.

Environment: `QUAVER_KEY` (client key), `QUAVER_LOAD_OUT` (folder), `QUAVER_LOAD_RATE` (requests a
second over all users; 0: each user asks again at once), `QUAVER_LOAD_TOKENS`, `QUAVER_LOAD_PATIENCE_S`,
`QUAVER_LOAD_SEED`, `QUAVER_LOAD_PREFIX` (name of the files).
"""

from __future__ import annotations

import atexit
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust import HttpUser, constant, events, task
from locust.exception import StopUser
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import RequestException

from chaos.load.questions import supply
from chaos.load.reading import Patience, Reading, Screen
from chaos.load.report import Report

OUT = Path(os.environ.get("QUAVER_LOAD_OUT", "load"))
RATE = float(os.environ.get("QUAVER_LOAD_RATE", "0"))
TOKENS = int(os.environ.get("QUAVER_LOAD_TOKENS", "48"))
SEED = int(os.environ.get("QUAVER_LOAD_SEED", "0"))
KEY = os.environ.get("QUAVER_KEY", "")
PATIENCE = Patience(median_s=float(os.environ.get("QUAVER_LOAD_PATIENCE_S", "20")))
SAVE_EVERY_S = 2.0

report = Report()
questions = supply("demo", max_tokens=TOKENS, seed=SEED)
user_numbers = itertools.count()
over = Event()


def save(**_: Any) -> None:
    """Write what was seen so far."""
    report.save(OUT)


def save_often() -> None:
    """Keep the files fresh, so that even a kill leaves a report."""
    while True:
        gevent.sleep(SAVE_EVERY_S)
        save()


def start_saving(**_: Any) -> None:
    """Begin to save as soon as the test runs."""
    over.clear()
    gevent.spawn(save_often)


def stop_asking(**_: Any) -> None:
    """Wake whoever waits to ask: the run is over."""
    over.set()


events.test_start.add_listener(start_saving)  # type: ignore[no-untyped-call]
events.test_stopping.add_listener(stop_asking)  # type: ignore[no-untyped-call]
events.test_stop.add_listener(save)  # type: ignore[no-untyped-call]
events.quitting.add_listener(save)  # type: ignore[no-untyped-call]
atexit.register(save)


class Reader(HttpUser):
    """One reader after another in one chair: asks, reads, leaves, comes back when due."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Draw this chair's own arrivals: Poisson, fixed before any answer."""
        self.rng = random.Random(f"{SEED}/{next(user_numbers)}")
        self.due = time.time()

    def next_due(self) -> float:
        """Return when the next question is due. A late chair keeps the intended time."""
        if RATE <= 0:
            return time.time()
        chairs = self.environment.runner.target_user_count or 1
        self.due += self.rng.expovariate(RATE / chairs)
        return self.due

    @task
    def ask(self) -> None:
        """Wait until the question is due, ask it, and read the answer as it comes."""
        due = self.next_due()
        if over.wait(max(0.0, due - time.time())):
            raise StopUser
        question = next(questions)
        reading = Reading(intended=due, started=time.time())
        screen = Screen(reading, question.text, PATIENCE, self.rng)
        clock = time.perf_counter()
        try:
            self.stream(question.body("default"), question.request_headers(), screen, clock)
        except gevent.GreenletExit:
            reading.outcome = "ended"
            raise
        finally:
            reading.duration_s = time.perf_counter() - clock
            report.add(reading)
        if reading.retry_after_s:
            over.wait(min(reading.retry_after_s, 5.0))

    def stream(self, body: dict[str, Any], headers: dict[str, str], screen: Screen, clock: float) -> None:
        """Read one event stream until it ends or the reader leaves; leaving closes the socket."""
        reading = screen.reading
        leave = gevent.Timeout.start_new(screen.stays_s)
        try:
            with self.client.post(
                "/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {KEY}", **headers},
                stream=True,
                catch_response=True,
            ) as response:
                if response.status_code != 200:
                    reading.outcome = "shed" if response.status_code in (429, 503) else "failed"
                    reading.error = _why_not(response)
                    reading.retry_after_s = 1.0
                    response.failure(f"status {response.status_code}")
                    return
                try:
                    for line in response.iter_lines(chunk_size=1, decode_unicode=True):
                        now_s = time.perf_counter() - clock
                        screen.line(line, now_s)
                        if screen.done or (screen.verdict and now_s >= screen.stays_s):
                            break
                finally:
                    response.close()
                response.success()
            if not (screen.done or screen.verdict):
                raise ValueError("the stream ended before [DONE]")
            screen.finish(time.perf_counter() - clock)
        except gevent.Timeout as timeout:
            if timeout is not leave:
                raise
            screen.finish(time.perf_counter() - clock)
        except (RequestException, ValueError) as error:
            reading.error = str(error) if isinstance(error, ValueError) else type(error).__name__
        finally:
            leave.close()


def _why_not(response: Any) -> str:
    """Say why there is no answer. Locust gives a request that got none the status 0."""
    if response.status_code:
        return str(response.status_code)
    return "no connection" if isinstance(response.error, NoConnection) else type(response.error).__name__
