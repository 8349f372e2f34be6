"""Builds the baseline: healthy questions to a running server, which gathers and keeps what it saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from chaos.client import refusal
from chaos.load.questions import supply
from chaos.load.readers import Question, Readers, closed_loop
from chaos.load.reading import Patience

#: Readers of healthy traffic stay to the end.
_PATIENT = Patience(median_s=3600.0, reaction_s=3600.0)
_PATH = "/quaver/alerts/calibration"


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
) -> dict[str, Any]:
    """Ask until the server has gathered `responses` healthy ones and return its summary of the baseline.

    Questions are asked at each of `temperatures` in turn.

    `key` is an operator's. The old baseline stays in force until the new one is whole. Raises
    CalibrationError and httpx.TransportError.
    """
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=10.0, trust_env=False
    ) as server:

        async def call(method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
            answer = await server.request(method, path, json=body)
            if not answer.is_success:
                raise CalibrationError(_refusal(answer))
            state: dict[str, Any] = answer.json()
            return state

        async def act(action: str) -> dict[str, Any]:
            return await call("POST", _PATH, {"action": action})

        before = await call("GET", "/quaver/chaos")
        if before["faults"]:
            raise CalibrationError("a fault is in force; end it first: `quaver chaos halt`")
        await act("start")
        try:
            questions = supply("calibration", max_tokens=max_tokens, seed=seed, temperatures=temperatures)
            await _ask(url, key, questions, responses, readers, seed, progress)
            after = await call("GET", "/quaver/chaos")
            if _starts(after) - _starts(before):
                raise CalibrationError("a fault was started meanwhile: what was gathered is not all healthy")
            return await act("finish")
        except BaseException:
            await act("cancel")
            raise


def _starts(chaos: dict[str, Any]) -> set[str]:
    """Return the ids of the faults whose start the journal tells."""
    return {entry["fault_id"] for entry in chaos["journal"] if entry["event"] == "start"}


def _refusal(answer: httpx.Response) -> str:
    message, _ = refusal(answer)
    return message or f"{answer.url} answered {answer.status_code}; is a Quaver server there?"


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
