"""The HTTP routes of telemetry. Who may call them is decided before they run, by the API's keys.

- `GET /metrics`: Prometheus text, or OpenMetrics with exemplars when the client accepts it.
- `GET /quaver/live?seconds=300`: series in bins of one second.
- `GET /quaver/tiers`: the KV cache by tier: what each holds, how old that is, and what moves between them.
- `GET /quaver/records/requests?limit=&route=&since=`: request records, newest first.
- `GET /quaver/records/requests/{id}`: one request with tokens, layers and spans.
- `POST /v1/feedback`: what the owner of a request thought of the answer.

All times are unix seconds; what is absent is null.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.api.body import body_of, decode
from engine.api.errors import ApiError
from telemetry import query
from telemetry.business import Feedback

if TYPE_CHECKING:
    from telemetry.hub import Telemetry

_MAX_BODY = 4096


def routes(telemetry: Telemetry) -> list[Route]:
    """Return the routes, bound to one `Telemetry`."""
    folder = telemetry.settings.records_dir

    async def metrics(request: Request) -> Response:
        telemetry.tick()
        body, content_type = telemetry.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def live(request: Request) -> Response:
        seconds = _number(request, "seconds", 300)
        if seconds is None:
            return _error(400, "`seconds` must be a number", param="seconds")
        telemetry.tick()
        return _json(telemetry.live.series(telemetry.clock(), int(seconds)))

    async def tiers(request: Request) -> Response:
        telemetry.tick()
        return _json(telemetry.metrics.kv.report(telemetry.clock()))

    async def requests(request: Request) -> Response:
        limit, since = _number(request, "limit", 100), _number(request, "since", -math.inf)
        if limit is None or since is None:
            return _error(
                400, "`limit` and `since` must be numbers", param="limit" if limit is None else "since"
            )
        start = None if since == -math.inf else since
        route = request.query_params.get("route")

        def find() -> list[dict[str, Any]]:
            telemetry.writer.flush(1.0)
            return query.requests(folder, int(limit), route, start)

        return _json(await asyncio.to_thread(find))

    async def one(request: Request) -> Response:
        request_id = request.path_params["id"]

        def find() -> dict[str, Any] | None:
            telemetry.writer.flush(1.0)
            return query.request(folder, request_id)

        found = await asyncio.to_thread(find)
        if found is None:
            return _error(404, "no finished request with this id is recorded", code="request_not_found")
        return _json(found | {"spans": telemetry.spans.recent(request_id)})

    async def feedback(request: Request) -> Response:
        principal = request.scope.get("state", {}).get("principal")
        if principal is None:
            return _error(401, "a key is needed", code="invalid_api_key")
        try:
            given = decode(await body_of(request, _MAX_BODY), Feedback)
        except ApiError as error:
            return error.response()
        except ValueError as error:
            return _error(400, str(error))
        try:
            value = telemetry.give_feedback(given, principal.tenant)
        except LookupError:
            return _error(404, "no such request", param="request_id", code="request_not_found")
        answer = {"object": "feedback", "request_id": given.request_id, "kind": given.kind, "rating": value}
        return _json(answer)

    return [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/quaver/live", live, methods=["GET"]),
        Route("/quaver/tiers", tiers, methods=["GET"]),
        Route("/quaver/records/requests", requests, methods=["GET"]),
        Route("/quaver/records/requests/{id}", one, methods=["GET"]),
        Route("/v1/feedback", feedback, methods=["POST"]),
    ]


def _number(request: Request, name: str, default: float) -> float | None:
    """A finite number of the query, the default when it is not there, None when it is not one."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")
