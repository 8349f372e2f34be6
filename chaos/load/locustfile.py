"""Locust users who stream answers, read along and hang up when their patience ends.

Locust's own table keeps one row per request (to the headers). First-token, inter-token and
end-to-end times live in our report, saved every second and on every way out. When the run
is over nobody asks any more, and answers still running are read on for Locust's stop timeout.

With a rate or a trace there is one user, `Arrivals`, that starts a reader whenever one is due (open loop);
without, each `Reader` asks again as soon as it has read (closed loop).

Environment: `QUAVER_KEY` (client key), and every field of `chaos.load.plan.Plan` as `QUAVER_LOAD_…`:
`QUAVER_LOAD_RATE`, `QUAVER_LOAD_TRACE`, `QUAVER_LOAD_SLO`, `QUAVER_LOAD_OUT` (folder) and so on.
"""

from __future__ import annotations

import atexit
import itertools
import os
import random
import signal
import time
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust import HttpUser, constant, events, task
from locust.exception import StopUser
from requests.exceptions import ConnectionError as NoConnection

from chaos.load.plan import Plan
from chaos.load.readers import Question
from chaos.load.reading import Reading, Screen, now
from chaos.load.recorder import SAVE_EVERY_S, Recorder

KEY = os.environ.get("QUAVER_KEY", "")

plan = Plan.from_env()
plan.check()
over = Event()
numbers = itertools.count()


class Session:
    """What lasts from one start of the test to its end; Locust's web page may start it again."""

    def __init__(self, url: str) -> None:
        self.recorder = Recorder(plan, url, now())
        self.questions = itertools.islice(plan.questions(), plan.count)

    def save_often(self) -> None:
        """Keep the files fresh, so that even a kill leaves a report."""
        while self.recorder.state == "running":
            self.recorder.save()
            gevent.sleep(SAVE_EVERY_S)


sessions: list[Session] = []  # the last one is the one that goes on


def start(environment: Any, **_: Any) -> None:
    """Begin a new report as soon as the test runs."""
    over.clear()
    sessions.append(Session(environment.host or ""))
    gevent.spawn(sessions[-1].save_often)


def stop_asking(**_: Any) -> None:
    """Wake whoever waits to ask: the run is over."""
    over.set()


def finish(**_: Any) -> None:
    """Write the last report."""
    if sessions:
        sessions[-1].recorder.close(f"stopped by {told[0]}" if told else "finished")


#: The signals that ended the run; `run_headless` sends SIGUSR1 before it passes SIGINT on.
told: list[str] = []
gevent.signal_handler(signal.SIGUSR1, told.append, "SIGINT")
gevent.signal_handler(signal.SIGTERM, told.append, "SIGTERM")
events.test_start.add_listener(start)  # type: ignore[no-untyped-call]
events.test_stopping.add_listener(stop_asking)  # type: ignore[no-untyped-call]
events.test_stop.add_listener(finish)  # type: ignore[no-untyped-call]
events.quitting.add_listener(finish)  # type: ignore[no-untyped-call]
atexit.register(finish)


class Asking(HttpUser):
    """What both kinds of users share: one question, read as it comes."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        """Draw this user's own patience."""
        self.rng = random.Random(f"{plan.seed}/{next(numbers)}")

    def read(self, question: Question, due: float) -> Reading:
        """Ask a question that was due at a unix time, and read the answer as it comes."""
        reading = Reading(intended=due, started=now())
        screen = Screen(reading, question.text, plan.patience, self.rng)
        clock = time.perf_counter()
        try:
            self.stream(question.body("default"), question.request_headers(), screen, clock)
        except gevent.GreenletExit:
            reading.outcome = "ended"
            raise
        finally:
            reading.duration_s = time.perf_counter() - clock
            sessions[-1].recorder.add(reading)
        return reading

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
                    reading.fail(_why_not(response))
                    reading.retry_after_s = 1.0
                    response.failure(f"status {response.status_code}")
                    return
                response.encoding = "utf-8"
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
        except Exception as error:  # a request that goes wrong in a new way is counted as well
            reading.fail(str(error) if isinstance(error, ValueError) else type(error).__name__)
        finally:
            leave.close()


class Reader(Asking):
    """One reader after another in one chair: asks, reads, leaves, and the next sits down."""

    abstract = plan.loop == "open"

    @task
    def ask(self) -> None:
        """Ask the next question and read the answer; a refused reader waits before the next."""
        question = next(sessions[-1].questions, None)
        if over.is_set() or question is None:
            raise StopUser
        reading = self.read(question, now())
        if reading.retry_after_s:
            over.wait(min(reading.retry_after_s, 5.0))


class Arrivals(Asking):
    """The door through which readers come when they are due, whatever the server does."""

    abstract = plan.loop == "closed"
    fixed_count = 1

    @task
    def open_the_door(self) -> None:
        """Start a reader for each arrival; at the end wait for those who still read."""
        readers = Pool(plan.at_once)
        began = now()
        try:
            for question, at_s in plan.due():
                if over.wait(max(0.0, began + at_s - now())):
                    break
                readers.spawn(self.read, question, began + at_s)
            readers.join()
        finally:
            readers.kill()
        over.wait()
        raise StopUser


def _why_not(response: Any) -> str:
    """Say why there is no answer. Locust gives a request that got none the status 0."""
    if response.status_code:
        return str(response.status_code)
    return "no connection" if isinstance(response.error, NoConnection) else type(response.error).__name__
