"""The server asks itself: a request that takes the same way as a client's, without the socket."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from engine.api.app import ApiState, routes
from engine.api.auth import Principal
from engine.api.errors import EXCEPTION_HANDLERS

_MARK = {"x-quaver-canary": "1"}


async def ask_as_canary(state: ApiState, body: dict[str, Any]) -> dict[str, Any]:
    """Send a chat request marked as a canary and return its JSON answer.

    It is admitted, queued and struck by faults as traffic is, and stays out of business figures. Raises
    RuntimeError with the API's own words when it is refused.
    """
    import httpx  # noqa: PLC0415 - slow to import, and the first canary can wait

    app = Starlette(routes=routes(state), exception_handlers=EXCEPTION_HANDLERS)

    async def as_operator(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["principal"] = Principal("operator")
        await app(scope, receive, send)

    transport = httpx.ASGITransport(as_operator)
    async with httpx.AsyncClient(transport=transport, base_url="http://quaver", headers=_MARK) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    payload: dict[str, Any] = answer.json()
    if not answer.is_success:
        raise RuntimeError(payload["error"]["message"])
    return payload
