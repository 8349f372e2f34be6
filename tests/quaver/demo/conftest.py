"""A server that plays its part for the demo: it answers, takes faults, alerts and opens its breaker.

It keeps to the wire forms of the real one, so that the demo's own logic can be tested in seconds. The
demo against the real server is a job of CI.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NOISE = "zxq Ölfen grabTion parlour %% mitos quibbl xxvij onda velt "
SEEN_AFTER = 5  # bad answers after which the alert fires


@dataclass
class Stage:
    """State of the played server. `visible` names the faults its alert can see."""

    url: str = ""
    visible: frozenset[str] = frozenset({"noise", "truncation"})
    false_alarm: bool = False
    fault: dict[str, Any] | None = None
    touched: int = 0
    bad: int = 0
    good: int = 0
    hung_up: int = 0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    breaker: str = "closed"
    half_open_at: float = 0.0
    calibration: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=itertools.count)

    def raise_alert(self, name: str, level: str) -> None:
        if not any(a["name"] == name and a["state"] == "firing" for a in self.alerts):
            self.alerts.append(
                {"name": name, "level": level, "route": "qa", "startsAt": time.time(), "state": "firing"}
            )

    def resolve(self) -> None:
        for alert in self.alerts:
            if alert["state"] == "firing":
                alert.update(state="resolved", endsAt=time.time())

    def harmful(self) -> bool:
        if self.fault is None:
            return False
        params = self.fault["params"]
        return not (params.get("harmless") or params.get("spare_question") or params.get("sigma") == 0.0)

    def count(self, bad: bool, kind: str, left: bool) -> None:
        """An answer is over that began under a fault of this kind."""
        self.bad = self.bad + 1 if bad else 0
        self.good = 0 if bad else self.good + 1
        self.hung_up += left
        if self.false_alarm and "finish" in self.calibration:
            self.raise_alert("Hesitates", "L1")
        if bad and self.bad >= SEEN_AFTER and kind in self.visible:
            self.raise_alert("Hesitates", "L1")
        if bad and left and self.hung_up >= SEEN_AFTER:
            self.raise_alert("UsersLeave", "L2")
            self.breaker, self.half_open_at = "open", time.time() + 0.4
        if self.good >= SEEN_AFTER:
            self.breaker = "closed"
            if not self.false_alarm:
                self.resolve()


def _app(stage: Stage) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        if stage.breaker == "open":
            if time.time() < stage.half_open_at:
                error = {"message": "paused", "type": "x", "param": None, "code": "breaker_open"}
                return JSONResponse({"error": error}, 503, {"retry-after": "0.1"})
            stage.breaker = "half_open"
        bad = stage.harmful()
        if stage.fault is not None:
            stage.touched += 1
        asked = [message["content"] for message in body["messages"] if message["role"] == "user"][-1]
        passage = asked.split("\n\n")[0]
        kind = stage.fault["kind"] if stage.fault else ""
        text = NOISE * 3 if bad and kind == "noise" else "Nobody knows. " if bad else passage.replace(".", "")
        return StreamingResponse(_stream(stage, text, bad, kind), media_type="text/event-stream")

    async def alerts(request: Request) -> Response:
        return JSONResponse(
            {
                "active": [a for a in stage.alerts if a["state"] == "firing"],
                "history": stage.alerts,
                "webhook": [
                    {
                        "source": "alertmanager",
                        "labels": {"alertname": a["name"]},
                        "startsAt": a["startsAt"],
                    }
                    for a in stage.alerts
                ],
                "breaker": {"qa": {"state": stage.breaker}},
                "evaluator": {"baseline": "now", "baseline_problem": None},
            }
        )

    async def calibration(request: Request) -> Response:
        stage.calibration.append((await request.json())["action"])
        return JSONResponse({})

    async def chaos(request: Request) -> Response:
        faults = [] if stage.fault is None else [stage.fault | {"touched": stage.touched}]
        return JSONResponse({"enabled": True, "lever": {"blocked": False}, "faults": faults})

    async def start(request: Request) -> Response:
        body = await request.json()
        stage.fault = body | {"fault_id": f"{body['kind']}-{next(stage.ids)}", "started": time.time()}
        stage.touched = stage.bad = stage.hung_up = 0
        stage.started.append(stage.fault["fault_id"])
        return JSONResponse(stage.fault, 201)

    async def end(request: Request) -> Response:
        stage.fault = None
        stage.ended.append(request.path_params["fault_id"])
        return JSONResponse({})

    async def status(request: Request) -> Response:
        return JSONResponse({"model": "played", "ready": True})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/quaver/alerts", alerts),
            Route("/quaver/alerts/calibration", calibration, methods=["POST"]),
            Route("/quaver/chaos", chaos),
            Route("/quaver/chaos/faults", start, methods=["POST"]),
            Route("/quaver/chaos/faults/{fault_id}", end, methods=["DELETE"]),
            Route("/quaver/status", status),
            Route("/ready", status),
        ]
    )


async def _stream(stage: Stage, text: str, bad: bool, kind: str) -> AsyncIterator[str]:
    """Whoever has read the end finds the answer counted."""
    left = True
    try:
        for word in text.split():
            yield f"data: {json.dumps({'choices': [{'delta': {'content': f'{word} '}}]})}\n\n"
            await asyncio.sleep(0.003)
        left = False
        stage.count(bad, kind, left)
        yield "data: [DONE]\n\n"
    finally:
        if left:
            stage.count(bad, kind, left)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """The played server, listening at `stage.url`."""
    stage = Stage()
    server = uvicorn.Server(uvicorn.Config(_app(stage), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    stage.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield stage
    server.should_exit = True
    thread.join(10)
