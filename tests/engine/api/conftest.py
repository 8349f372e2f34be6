"""One real server with the real model for all API tests, and what its observers heard."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from engine.api.app import ApiState, create_app
from engine.api.auth import Keys
from engine.api.salts import Salts
from engine.api.settings import ApiSettings
from engine.hooks import ChoiceText, RequestEnded, RequestStarted
from engine.messages import RequestMeta, StepOutput
from engine.models import store
from engine.models.loader import load_tokenizer
from engine.process.client import EngineClient
from engine.settings import EngineSettings


class Recorder:
    """Observer and record encoder: keeps events by request id."""

    def __init__(self) -> None:
        self.started: dict[str, RequestStarted] = {}
        self.ended: dict[str, RequestEnded] = {}
        self.ends: Counter[str] = Counter()
        self.texts: dict[str, list[ChoiceText]] = {}
        self.rejected: list[tuple[RequestMeta, int, str]] = []
        self.states: list[str] = []
        self.steps: dict[tuple[str, int], list[int]] = {}

    def on_started(self, event: RequestStarted) -> None:
        self.started[event.meta.request_id] = event

    def on_step(self, output: StepOutput) -> None:
        for request_id, choice, step in zip(output.request_ids, output.choices, output.steps, strict=True):
            self.steps.setdefault((request_id, choice), []).append(step)

    def on_text(self, event: ChoiceText) -> None:
        self.texts.setdefault(event.meta.request_id, []).append(event)

    def on_ended(self, event: RequestEnded) -> None:
        self.ended[event.meta.request_id] = event
        self.ends[event.meta.request_id] += 1

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None:
        self.rejected.append((meta, status, code))

    def on_engine(self, state: str) -> None:
        self.states.append(state)

    def records(self, request_id: str, choice: int, start: int = 0) -> list[dict[str, Any]]:
        return [{"step": step} for step in self.steps.get((request_id, choice), [])[start:]]

    def end_of(self, request_id: str, timeout_s: float = 10.0) -> RequestEnded:
        """Wait for a request's end."""
        until = time.monotonic() + timeout_s
        while request_id not in self.ended and time.monotonic() < until:
            time.sleep(0.01)
        return self.ended[request_id]


class Server:
    """uvicorn on a thread with an engine of its own."""

    def __init__(self, engine: EngineSettings, api: ApiSettings, keys: Path) -> None:
        self.recorder = Recorder()
        self._keys = keys
        self._engine = engine
        self._api = api
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(120)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            self._started.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        keys = Keys.load_or_create(self._keys)
        self.client = EngineClient(self._engine, hung_s=20)
        self.state = ApiState(
            self.client,
            load_tokenizer(store.resolve(self._engine.model, self._engine.model_cache)),
            self._api,
            observers=[self.recorder],
            record_encoder=self.recorder,
            salts=Salts.load_or_create(self._keys),
        )
        app = create_app(self.state, keys)
        await self.client.start()
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._started.set()
        await serving
        await self.client.stop(grace_s=0)

    def key(self, role: str) -> str:
        return (self._keys / f"{role}.key").read_text().strip()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def wait_ready(self) -> None:
        until = time.monotonic() + 60
        while self.client.ready is None and time.monotonic() < until:
            time.sleep(0.02)
        assert self.client.ready is not None

    def idle(self) -> bool:
        """Whether nothing of any request is left, waiting a little for it."""
        until = time.monotonic() + 15
        while time.monotonic() < until:
            stats = self.client.stats
            empty = stats is None or (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
            if empty and not self.state.active and not self.client.open_choices:
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="session")
def server(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server with the real model. At the end every start must have had one end."""
    engine = EngineSettings(
        model_cache=smollm.parent, threads=1, deterministic=True, max_running=4, max_waiting=12
    )
    server = Server(engine, ApiSettings(admission_pool="fixed"), tmp_path_factory.mktemp("keys"))
    yield server
    assert server.idle()
    server.close()
    assert server.recorder.ends == Counter(dict.fromkeys(server.recorder.started, 1))


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client with the client key."""
    headers = {"authorization": f"Bearer {server.key('client')}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=server.key("client"), max_retries=0, timeout=60
    ) as client:
        yield client
