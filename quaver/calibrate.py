"""Builds the baseline: healthy questions to a running server, which gathers and keeps what it saw."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import httpx

from alerting.collector import CONTRAST
from chaos.client import RefusedError, content
from chaos.load.questions import supply
from chaos.load.readers import Question, Readers, closed_loop
from chaos.load.reading import Patience
from chaos.prompts import generate, twins

#: Readers of healthy traffic stay to the end.
_PATIENT = Patience(median_s=3600.0, reaction_s=3600.0)
_PATH = "/quaver/alerts/calibration"
_CANARIES = "/quaver/canaries"
_POLL_S = 0.5
_PATIENCE_S = 120.0  # the server fits for some seconds before it answers


class CalibrationError(Exception):
    """The baseline was not built; the message says what to do."""


async def calibrate(
    url: str,
    key: str,
    *,
    responses: int,
    readers: int,
    max_tokens: int,
    seed: int,
    temperatures: Sequence[float],
    progress: Callable[[int], None],
    contrast: int = 0,
) -> dict[str, Any]:
    """Ask until the server has gathered `responses` healthy ones and return its summary of the baseline.

    Questions are asked at each of `temperatures` in turn. Then `contrast` further questions are asked four
    times each: with the answer in their passage, and without it.

    `key` is an operator's. The old baseline stays in force until the new one is whole. Raises
    CalibrationError and httpx.TransportError.
    """
    async with _server(url, key) as server:
        before = await _healthy(server)
        begun = await _act(server, _PATH, "start")
        try:
            questions = supply("calibration", max_tokens=max_tokens, seed=seed, temperatures=temperatures)
            await _ask(url, key, questions, responses, readers, seed, progress)
            if contrast:
                pairs = _contrast(contrast, max_tokens=max_tokens, seed=seed + 1, temperatures=temperatures)
                told = lambda read: progress(responses + read)  # noqa: E731
                await _ask(url, key, iter(pairs), len(pairs), readers, seed, told)
            await _healthy(server, before)
            return await _act(server, _PATH, "finish", id=begun["id"])
        except BaseException:
            await _cancel(server, _PATH, begun["id"])
            raise


async def calibrate_canaries(
    url: str, key: str, *, rounds: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Have the server ask its canaries `rounds` times each and return what it says of them then.

    `progress` hears how many were asked, of how many. Raises as `calibrate` does.
    """
    async with _server(url, key) as server:
        before = await _healthy(server)
        state = await _act(server, _CANARIES, "calibrate", rounds=rounds)
        own = state["calibration"]["id"]
        try:
            while state["calibration"]["running"]:
                progress(state["calibration"]["asked"], state["calibration"]["of"])
                await asyncio.sleep(_POLL_S)
                state = await _call(server, "GET", _CANARIES)
                if state["calibration"]["id"] != own:
                    raise CalibrationError("it was cancelled, and another calibration took its place")
            await _healthy(server, before)
        except BaseException:
            await _cancel(server, _CANARIES, own)
            raise
        if state["calibration"]["error"] or not state["usable"]:
            raise CalibrationError(state["calibration"]["error"] or state["why_not"])
        return state


def _contrast(count: int, *, max_tokens: int, seed: int, temperatures: Sequence[float]) -> list[Question]:
    """Return each question with its answer's sentence gone and another one gone, and its twins."""
    questions = []
    for item, temperature in zip(generate("calibration", count, seed), cycle(temperatures), strict=False):
        for twin, lacking in (
            (twins.lacking, True),
            (twins.sparing, False),
            (twins.absent, True),
            (twins.answered, False),
        ):
            route = next(name for name, lacks in CONTRAST.items() if lacks == lacking)
            questions.append(
                Question(
                    messages=tuple(twin(item).messages),
                    route=route,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    headers={"x-quaver-canary": "1", "x-quaver-group": item.family},
                )
            )
    return questions


def _server(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=_PATIENCE_S, trust_env=False
    )


async def _call(
    server: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        return content(await server.request(method, path, json=body))
    except RefusedError as error:
        raise CalibrationError(str(error)) from None


async def _act(server: httpx.AsyncClient, path: str, action: str, **more: Any) -> dict[str, Any]:
    return await _call(server, "POST", path, {"action": action, **more})


async def _cancel(server: httpx.AsyncClient, path: str, own: str) -> None:
    """End the calibration with this id; one that took its place goes on."""
    with contextlib.suppress(CalibrationError):
        await _act(server, path, "cancel", id=own)


async def _healthy(server: httpx.AsyncClient, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of chaos; raises CalibrationError when a fault is, or since `before` was, in force."""
    now = await _call(server, "GET", "/quaver/chaos")
    if before is not None and _starts(now) - _starts(before):
        raise CalibrationError("a fault was started meanwhile: what was gathered is not all healthy")
    if before is None and now["faults"]:
        raise CalibrationError("a fault is in force; end it first: `quaver chaos halt`")
    return now


def _starts(chaos: dict[str, Any]) -> set[str]:
    """Return the ids of the faults whose start the journal tells."""
    return {entry["fault_id"] for entry in chaos["journal"] if entry["event"] == "start"}


async def _ask(  # noqa: PLR0917
    url: str,
    key: str,
    questions: Iterator[Question],
    responses: int,
    readers: int,
    seed: int,
    progress: Callable[[int], None],
) -> None:
    outcomes: Counter[str] = Counter()
    async with Readers(url, key, patience=_PATIENT, seed=seed) as crowd:
        enough = lambda: outcomes["read"] >= responses  # noqa: E731
        async for _, reading in closed_loop(crowd, questions, readers, enough):
            outcomes[reading.outcome] += 1
            progress(outcomes["read"])
            failed = outcomes.total() - outcomes["read"]
            if failed > max(10, outcomes["read"]):
                raise CalibrationError(f"{failed} of {outcomes.total()} answers failed; see the server's log")
