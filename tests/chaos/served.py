"""Chaos' own endpoints on a socket, for tests that talk to them from outside."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from chaos.service import Chaos
from chaos.settings import ChaosSettings
from engine.messages import RequestMeta
from tests.chaos.lab import Process

PASSAGE = [{"role": "user", "content": "Bo is old. Cy is new. Di is tall.\n\nWho is old?"}]


def wait_for(what: Callable[[], Any], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


class Server:
    """Chaos' own endpoints with the real hooks, and traffic that prompt faults strike."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active: list[dict[str, Any]] = []
        self.slow_s = 0.0  # what the answer to a start waits
        self._over = threading.Event()
        (folder / "operator.key").write_text("key\n")
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        wait_for(lambda: self._server is not None and self._server.started)
        assert self._server is not None
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._http = httpx.Client(base_url=self.url)

    async def _serve(self) -> None:
        chaos = Chaos(
            ChaosSettings(chaos=True), Process(), self.folder / "journal.jsonl", tiers=lambda: ["host"]
        )

        async def alerts(request: Request) -> JSONResponse:
            return JSONResponse({"active": self.active})

        app = Starlette(routes=[*chaos.routes(), Route("/quaver/alerts", alerts)])

        async def as_operator(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("state", {})["principal"] = SimpleNamespace(role="operator", tenant="ops")
            starts = (
                scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith("/faults")
            )

            async def answer(message: Any) -> None:
                if starts:
                    await asyncio.sleep(self.slow_s)
                await send(message)

            await app(scope, receive, answer)

        async def traffic() -> None:
            for number in itertools.count():
                chaos.prompt_hook.apply(RequestMeta(request_id=str(number), tenant="gold"), PASSAGE)
                await asyncio.sleep(0.01)

        await chaos.start()
        asking = asyncio.create_task(traffic())
        self._server = uvicorn.Server(uvicorn.Config(as_operator, port=0, log_level="error", lifespan="off"))
        await self._server.serve()
        asking.cancel()
        await chaos.stop()

    def stop(self) -> None:
        assert self._server is not None
        self._http.close()
        self._server.should_exit = True
        self._thread.join(10)

    def state(self) -> dict[str, Any]:
        return dict(self._http.get("/quaver/chaos").json())

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self._http.request(method, path, json=body).json()

    def in_force(self) -> list[str]:
        return [fault["kind"] for fault in self.state()["faults"]]

    def began(self) -> list[str]:
        return [entry["kind"] for entry in self.state()["journal"] if entry["event"] == "start"]
