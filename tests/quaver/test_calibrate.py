"""What calibration asks of the server, and when it refuses to go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import httpx
import pytest

from chaos.load.questions import supply
from chaos.prompts import generate
from quaver import calibrate

REFUSED = httpx.Response(403, json={"error": {"message": "a client key may not do this"}})


class Server:
    """Stands for a server: `chaos` are its answers to GET /quaver/chaos, in order."""

    def __init__(self, *chaos: httpx.Response) -> None:
        self.chaos = list(chaos)
        self.actions: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return self.chaos.pop(0)
        body = json.loads(request.content)
        self.actions.append(body["action"])
        assert body.get("id") == (None if body["action"] == "start" else "mine")
        return httpx.Response(200, json={"baseline": "new", "id": "mine"})


def chaos(started: tuple[str, ...] = (), faults: tuple[str, ...] = ()) -> httpx.Response:
    journal = [{"event": "start", "fault_id": fault} for fault in started]
    return httpx.Response(200, json={"faults": list(faults), "journal": [{"event": "halt"}, *journal]})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], Any]:
    async def ask(*_: Any) -> None: ...

    def start(server: Server) -> Any:
        client = httpx.AsyncClient
        monkeypatch.setattr(calibrate, "_ask", ask)
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **options: client(transport=httpx.MockTransport(server), **options)
        )
        return asyncio.run(
            calibrate.calibrate(
                "http://quaver",
                "key",
                responses=40,
                readers=1,
                max_tokens=1,
                seed=0,
                temperatures=(0.0, 1.0),
                progress=print,
            )
        )

    return start


def test_it_starts_and_finishes(run: Callable[[Server], Any]) -> None:
    server = Server(chaos(("old",)), chaos(("old",)))
    assert run(server)["baseline"] == "new"
    assert server.actions == ["start", "finish"]


@pytest.mark.parametrize(
    ("answers", "actions", "said"),
    [
        ([REFUSED], [], "a client key may not do this"),
        ([httpx.Response(404, text="<html>")], [], "404; is a Quaver server there"),
        ([chaos(faults=("f",))], [], "a fault is in force"),
        ([chaos(), chaos(("f",))], ["start", "cancel"], "a fault was started meanwhile"),
    ],
)
def test_it_refuses_and_leaves_nothing_running(
    run: Callable[[Server], Any], answers: list[httpx.Response], actions: list[str], said: str
) -> None:
    server = Server(*answers)
    with pytest.raises(calibrate.CalibrationError, match=said):
        run(server)
    assert server.actions == actions


def test_questions_are_asked_at_each_temperature_in_turn() -> None:
    questions = supply("calibration", max_tokens=8, temperatures=(0.0, 1.0))
    assert [question.temperature for question in islice(questions, 4)] == [0.0, 1.0, 0.0, 1.0]


def test_a_contrast_has_every_question_with_and_without_its_answer() -> None:
    questions = calibrate._contrast(6, max_tokens=8, seed=1, temperatures=(0.0, 1.0))
    assert len(questions) == 24
    assert {question.headers["x-quaver-canary"] for question in questions} == {"1"}
    assert [question.route for question in questions[:4]] == [
        "contrast-lacking",
        "contrast-whole",
        "contrast-lacking",
        "contrast-whole",
    ]
    items = generate("calibration", 6, 1)
    for item, lacking, whole in zip(items, questions[::4], questions[1::4], strict=True):
        assert item.answers[0] not in lacking.messages[1]["content"]
        assert item.answers[0] in whole.messages[1]["content"]
