"""The demo's hand on a server: alerts and status to read, chaos to start and end. HTTP only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from chaos.client import refusal


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Alert:
    """One alert as the engine tells of it. Times are unix seconds."""

    name: str
    level: str
    route: str
    starts_at: float
    ends_at: float | None

    @property
    def label(self) -> str:
        """Name and level, as the table shows them."""
        return f"{self.name} ({self.level})"


@dataclass(frozen=True)
class Lease:
    """A fault in force."""

    id: str
    kind: str
    started: float


def unix(value: Any) -> float | None:
    """Return unix seconds of an ISO 8601 text or a number; None for None and for the zero time."""
    if value is None or value == "":
        return None
    if isinstance(value, int | float):
        return float(value)
    seconds = datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    return seconds if seconds > 0 else None


class Control:
    """Calls to `/quaver/...` with the operator key. Raises DemoError with the server's own words."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=10.0, trust_env=False
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise DemoError(f"no answer from {self.url}{path} ({type(error).__name__})") from None
        if answer.is_success:
            return answer.json() if answer.content else None
        message, _ = refusal(answer)
        if message is None:
            message = answer.text[:200]
        raise DemoError(f"{method} {path}: {answer.status_code} {message}")

    async def ready(self) -> bool:
        """Tell whether the server answers and its model is loaded."""
        try:
            return (await self._http.get("/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def status(self) -> dict[str, Any]:
        """Return `/quaver/status`."""
        return dict(await self._call("GET", "/quaver/status"))

    async def alert_state(self) -> dict[str, Any]:
        """Return `/quaver/alerts` as it is."""
        return dict(await self._call("GET", "/quaver/alerts"))

    async def alerts(self) -> list[Alert]:
        """Return every alert the engine knows of, firing and resolved, oldest first."""
        return alerts_of(await self.alert_state())

    async def breaker_states(self) -> dict[str, str]:
        """Return the breaker's state by route: closed, open or half_open."""
        routes = (await self.alert_state()).get("breaker") or {}
        return {route: str(state["state"]) for route, state in routes.items() if isinstance(state, dict)}

    async def chaos(self) -> dict[str, Any]:
        """Return `/quaver/chaos`."""
        return dict(await self._call("GET", "/quaver/chaos"))

    async def start_fault(self, kind: str, params: dict[str, Any], ttl_s: float, seed: int) -> Lease:
        """Take a fault into force on all traffic."""
        body = {"kind": kind, "params": params, "selector": {"share": 1.0}, "ttl_s": ttl_s, "seed": seed}
        answer = await self._call("POST", "/quaver/chaos/faults", body)
        return Lease(answer["fault_id"], kind, answer["started"])

    @asynccontextmanager
    async def fault(
        self, held: list[Lease], kind: str, params: dict[str, Any], ttl_s: float, seed: int
    ) -> AsyncIterator[Lease]:
        """Keep a fault in force; `held` names it for whoever cleans up, from before it may act.

        Being cancelled while the fault starts loses no lease: the start is waited for, then ended.
        """
        starting = asyncio.ensure_future(self.start_fault(kind, params, ttl_s, seed))
        try:
            lease = await asyncio.shield(starting)
        except asyncio.CancelledError:
            held.append(await starting)
            raise
        held.append(lease)
        yield lease
        await self.end_fault(lease)
        held.remove(lease)

    async def touched(self, lease: Lease) -> int | None:
        """Return how many requests a fault in force has touched, None when it has ended."""
        for fault in (await self.chaos())["faults"]:
            if fault["fault_id"] == lease.id:
                return int(fault["touched"])
        return None

    async def end_fault(self, lease: Lease) -> None:
        """End a fault; harmless when it has ended."""
        await self._call("DELETE", f"/quaver/chaos/faults/{lease.id}")

    async def calibration(self, action: str) -> None:
        """Start, finish or cancel the gathering of healthy responses."""
        await self._call("POST", "/quaver/alerts/calibration", {"action": action})

    async def halt(self) -> None:
        """End every fault and block new ones."""
        await self._call("POST", "/quaver/chaos/halt")


def alerts_of(state: dict[str, Any]) -> list[Alert]:
    """Return the alerts in an answer of `/quaver/alerts`, each once, oldest first."""
    found: dict[tuple[str, str, float], Alert] = {}
    for entry in [*state.get("history", ()), *state.get("active", ())]:
        starts = unix(entry["startsAt"])
        if starts is None:
            continue
        alert = Alert(
            name=entry["name"],
            level=entry["level"],
            route=entry.get("route") or "",
            starts_at=starts,
            ends_at=unix(entry.get("endsAt")) if entry.get("state") == "resolved" else None,
        )
        key = (alert.name, alert.route, round(alert.starts_at, 3))
        if key not in found or found[key].ends_at is None:
            found[key] = alert
    return sorted(found.values(), key=lambda alert: alert.starts_at)
