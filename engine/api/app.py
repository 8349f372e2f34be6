"""Routes of the OpenAI-compatible API, and a whole application around them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from engine.api.auth import AuthMiddleware, Keys
from engine.api.endpoint import GenerationEndpoint
from engine.api.errors import EXCEPTION_HANDLERS, ApiError, json_response
from engine.api.jobs import chat_job, completion_job
from engine.api.replies import ChatReply, CompletionReply
from engine.api.state import ApiState

__all__ = ["ApiState", "create_app", "routes"]


def routes(state: ApiState) -> list[BaseRoute]:
    """Return the routes of /v1, /health and /ready."""

    async def models(_request: Request) -> Response:
        return json_response({"object": "list", "data": [_model(state)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if not state.serves(name):
            raise ApiError(404, "model_not_found", f"this server runs {state.model!r}", param="model")
        return json_response(_model(state))

    async def health(_request: Request) -> Response:
        return json_response({"status": "ok", "uptime_s": round(time.time() - state.started, 3)})

    async def ready(_request: Request) -> Response:
        client = state.client
        open_now = client.ready is not None and not state.draining
        detail = {
            "ready": open_now,
            "model": state.model,
            "draining": state.draining,
            "engine": client.ready,
            "restarts": client.restarts,
            "last_error": client.last_error,
        }
        return json_response(detail, 200 if open_now else 503, None if open_now else {"retry-after": "2"})

    chat = GenerationEndpoint(state, "chatcmpl", chat_job, ChatReply)
    completions = GenerationEndpoint(state, "cmpl", completion_job, CompletionReply)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
    ]


def create_app(
    state: ApiState, keys: Keys, extra: Sequence[BaseRoute] = (), *, metrics_open: bool = True
) -> Starlette:
    """Return the API with its keys and error shapes; `extra` routes are behind the same policy."""
    return Starlette(
        routes=[*routes(state), *extra],
        middleware=[Middleware(AuthMiddleware, keys=keys, metrics_open=metrics_open)],
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _model(state: ApiState) -> dict[str, object]:
    return {"id": state.model, "object": "model", "created": int(state.started), "owned_by": "quaver"}
