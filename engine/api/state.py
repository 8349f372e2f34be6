"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.admission import Door
from engine.api.errors import ApiError
from engine.api.meta import RouteLabels
from engine.api.salts import Salts
from engine.api.settings import ApiSettings
from engine.hooks import AdmissionGate, Observer, PromptHook, RecordEncoder, StreamHook
from engine.messages import EngineStats, Ready, RequestMeta
from engine.process.client import EngineClient
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.api.generation import Generation

#: Names that mean "whatever this server runs".
_ANY_MODEL = frozenset({None, "", "default"})


class ApiState:
    """Composition root of the API. `observers` also hear the engine's steps, through the client.

    Without `salts` no request uses the prefix cache.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        *,
        gate: AdmissionGate | None = None,
        prompt_hook: PromptHook | None = None,
        stream_hook: StreamHook | None = None,
        observers: list[Observer] | None = None,
        record_encoder: RecordEncoder | None = None,
        salts: Salts | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.gate = gate
        self.prompt_hook = prompt_hook
        self.stream_hook = stream_hook
        self.observers = observers if observers is not None else []
        self.record_encoder = record_encoder
        self.salts = salts
        self.route_labels = RouteLabels(settings.routes, settings.max_routes)
        self.active: set[Generation] = set()
        self.draining = False
        self.started = time.time()
        self._tenants: Counter[str] = Counter()
        self.door = Door(
            time.monotonic(),
            running=client.settings.max_running,
            waiting=client.settings.max_waiting,
            delay_s=settings.queue_delay_s,
            pool=settings.admission_pool,
        )
        client.step_listeners.append(self._levels)
        client.observers.extend(o for o in self.observers if o not in client.observers)

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        name = self.client.settings.model
        return Path(name).stem if "/" in name or name.endswith(".gguf") else name

    def serves(self, model: str | None) -> bool:
        """Whether a request for this model can be answered here."""
        ready = self.client.ready
        return model in _ANY_MODEL or model in (self.model, self.client.settings.model, ready and ready.model)

    def require_ready(self) -> Ready:
        """Return the engine's description; raises ApiError 503 while there is none or at shutdown."""
        if self.draining:
            raise ApiError(503, "shutting_down", "the server is shutting down", retry_after_s=5)
        if self.client.ready is None:
            raise ApiError(503, "engine_not_ready", "the model is not ready; see /ready", retry_after_s=2)
        return self.client.ready

    @contextmanager
    def slot(self, meta: RequestMeta) -> Iterator[None]:
        """Count a request against its tenant's limit; raises ApiError 429 above it."""
        tenant, limit = meta.tenant, self.settings.tenant_concurrency
        if self._tenants[tenant] >= limit:
            raise ApiError(
                429,
                "tenant_concurrency",
                f"tenant {tenant!r} has {limit} requests running, which is its limit; try again",
                retry_after_s=1,
            )
        self._tenants[tenant] += 1
        try:
            yield
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    def admit(self, meta: RequestMeta, choices: int) -> None:
        """Last question before the engine: the door, and the gate. Raises ApiError."""
        self.require_ready()
        rejection = self.door.refuse(meta, choices, time.monotonic())
        if rejection is None and self.gate is not None:
            rejection = self.gate.admit(meta)
        if rejection is not None:
            raise ApiError(
                rejection.status, rejection.code, rejection.message, retry_after_s=rejection.retry_after_s
            )

    def _levels(self, stats: EngineStats) -> None:
        self.door.observe(stats.running, stats.waiting)

    async def drain(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, let running ones finish for `grace_s`, then end the rest with an error.

        Call it before the server closes its connections, and the client's `stop` after it.
        """
        self.draining = True
        await self._idle(grace_s)
        for generation in list(self.active):
            generation.shut_down()
        await self._idle(2.0)

    async def _idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.active and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
