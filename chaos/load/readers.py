"""Readers: clients over real sockets that see text and timing only, and leave when they have had enough."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from chaos.client import refusal
from chaos.load.reading import Patience, Reading, Screen, now

Message = dict[str, str]

_LOOK_S = 0.25  # how often a loop looks whether it should end


@dataclass(frozen=True, kw_only=True)
class Question:
    """What one reader asks. `tag` comes back with the reading; `headers` go with the request."""

    messages: tuple[Message, ...]
    tag: Any = None
    route: str = "default"
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False  # go on to `max_tokens`, as a recorded length asks for
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Every word the reader knows of: what was asked, with its passage."""
        return "\n".join(message["content"] for message in self.messages)

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of a streaming chat completion."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body if self.seed is None else body | {"seed": self.seed}

    def request_headers(self) -> dict[str, str]:
        """Return the headers of the request, without the key."""
        return {"x-quaver-route": self.route, **self.headers}


class Readers:
    """A crowd of readers at one server. One instance serves any number of readers at once."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        model: str = "default",
        patience: Patience | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self.patience = patience or Patience()
        self.open: list[float] = []  # unix times at which the requests now running were sent
        self._rng = random.Random(seed)
        self._model = model
        self._over = False
        self._leaving: set[asyncio.Timeout] = set()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __aenter__(self) -> Readers:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    def hang_up(self) -> None:
        """Close every socket at once: the run is over. What was running has the outcome `ended`."""
        self._over = True
        for leave in self._leaving:
            if not leave.expired():
                leave.reschedule(asyncio.get_running_loop().time())

    async def read(self, question: Question, intended: float | None = None) -> Reading:
        """Ask, read along, and leave when patience ends. Never raises for what the server does.

        `intended` is the unix time at which the request was due; default: now.
        """
        started = now()
        clock = time.perf_counter()
        reading = Reading(intended=started if intended is None else intended, started=started)
        if self._over:
            reading.outcome = "ended"
            return reading
        screen = Screen(reading, question.text, self.patience, self._rng)
        self.open.append(started)
        try:
            await self._stream(question, screen, clock)
        except Exception as error:  # a request that goes wrong in a new way is counted as well
            reading.fail(str(error) if isinstance(error, ValueError) else type(error).__name__)
            reading.duration_s = time.perf_counter() - clock
        finally:
            self.open.remove(started)
        return reading

    async def _stream(self, question: Question, screen: Screen, clock: float) -> None:
        reading = screen.reading
        request = self._http.build_request(
            "POST",
            "/v1/chat/completions",
            json=question.body(self._model),
            headers=question.request_headers(),
        )
        response: httpx.Response | None = None
        leave = asyncio.timeout(screen.stays_s)
        try:
            async with leave:
                self._leaving.add(leave)
                response = await self._http.send(request, stream=True)
                if response.status_code != 200:
                    await response.aread()
                    _refused(reading, response)
                    reading.duration_s = time.perf_counter() - clock
                    return
                reading.request_id = response.headers.get("x-request-id")
                loop = asyncio.get_running_loop()
                async for line in response.aiter_lines():
                    now_s = time.perf_counter() - clock
                    screen.line(line, now_s)
                    if screen.done:
                        break
                    if screen.verdict and not leave.expired():
                        leave.reschedule(loop.time() + screen.stays_s - now_s)
        except TimeoutError:
            pass  # the reader leaves
        else:
            if not screen.done:
                raise ValueError("the stream ended before [DONE]")
        finally:
            self._leaving.discard(leave)
            if response is not None:
                await response.aclose()
        screen.finish(time.perf_counter() - clock, over=self._over)


def _refused(reading: Reading, response: httpx.Response) -> None:
    reading.outcome = "shed" if response.status_code in (429, 503) else "failed"
    message, code = refusal(response)
    reading.fail(f"{response.status_code} {code or message or 'no error body'}")
    try:
        after_s = float(response.headers.get("retry-after", "1"))
    except ValueError:
        after_s = 1.0
    reading.retry_after_s = after_s if 0 <= after_s < math.inf else 1.0


async def open_loop(
    readers: Readers,
    due: Iterable[tuple[Question, float]],
    until: Callable[[], bool],
    *,
    at_once: int = 512,
) -> AsyncGenerator[tuple[Question, Reading], None]:
    """Send each question when it is due (unix time, in order), whatever the server does; yield readings.

    `until` is asked before each arrival; once it is true nothing more is sent, and the readings still
    running are yielded as they finish. No more than `at_once` run at a time: what is due beyond them is
    sent late, and its times count from when it was due.
    """
    done: asyncio.Queue[tuple[Question, Reading]] = asyncio.Queue()
    running: set[asyncio.Task[None]] = set()

    async def one(question: Question, moment: float) -> None:
        done.put_nowait((question, await readers.read(question, moment)))

    try:
        for question, moment in due:
            while not until() and ((wait := moment - now()) > 0 or len(running) >= at_once):
                if (ended := await _next(done, min(wait, _LOOK_S) if wait > 0 else _LOOK_S)) is not None:
                    yield ended
            if until():
                break
            task = asyncio.create_task(one(question, moment))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(0)  # send it before the next that is due already
            while not done.empty():
                yield done.get_nowait()
        while running or not done.empty():
            if (ended := await _next(done, _LOOK_S)) is not None:
                yield ended
    finally:
        for task in running:
            task.cancel()


async def _next(
    done: asyncio.Queue[tuple[Question, Reading]], seconds: float
) -> tuple[Question, Reading] | None:
    """Wait a little for a reading. Not `wait_for`: in Python 3.11 it can swallow a cancellation."""
    try:
        async with asyncio.timeout(seconds):
            return await done.get()
    except TimeoutError:
        return None


async def closed_loop(
    readers: Readers, questions: Iterable[Question], streams: int, until: Callable[[], bool]
) -> AsyncGenerator[tuple[Question, Reading], None]:
    """Keep `streams` readers busy until `until` is true; yield readings as they end.

    A refused reader comes back after what the server's `Retry-After` says.
    """
    supply = iter(questions)
    done: asyncio.Queue[tuple[Question, Reading]] = asyncio.Queue()

    async def one() -> None:
        while not until() and (question := next(supply, None)) is not None:
            reading = await readers.read(question)
            done.put_nowait((question, reading))
            if reading.outcome in ("shed", "failed"):
                await asyncio.sleep(min(reading.retry_after_s or 1.0, 5.0))

    running = {asyncio.create_task(one()) for _ in range(streams)}

    def busy() -> bool:
        """Tell whether a reader reads, or may ask again: who only waits out a refusal at the end does not."""
        return any(not task.done() for task in running) and not (until() and not readers.open)

    try:
        while not done.empty() or busy():
            if (ended := await _next(done, _LOOK_S)) is not None:
                yield ended
        for task in running:
            if task.done():
                task.result()
    finally:
        for task in running:
            task.cancel()
