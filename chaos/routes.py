"""HTTP endpoints of chaos. The API's middleware has already asked for the operator role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chaos.contract import ChaosError, StartFault
from chaos.controller import Controller
from engine.api.body import body_of, decode
from engine.api.errors import ApiError

Handler = Callable[[Request], Awaitable[Response]]

_MAX_BODY = 64 * 1024


class Preview(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a preview."""

    selector: dict[str, float | str] = {}


def routes(controller: Controller) -> list[Route]:
    """Return the routes under /quaver/chaos."""

    async def status(request: Request) -> Response:
        return JSONResponse(controller.status())

    async def start(request: Request) -> Response:
        asked = await _body(request, StartFault)
        return JSONResponse(await controller.start(asked, _who(request)), status_code=201)

    async def preview(request: Request) -> Response:
        asked = await _body(request, Preview)
        return JSONResponse(controller.preview(asked.selector))

    async def end(request: Request) -> Response:
        return JSONResponse(await controller.end(request.path_params["fault_id"], by=_who(request)))

    async def halt(request: Request) -> Response:
        return JSONResponse(await controller.halt(_who(request)))

    async def unblock(request: Request) -> Response:
        return JSONResponse(await controller.unblock(_who(request)))

    return [
        Route("/quaver/chaos", _shaped(status), methods=["GET"]),
        Route("/quaver/chaos/faults", _shaped(start), methods=["POST"]),
        Route("/quaver/chaos/preview", _shaped(preview), methods=["POST"]),
        Route("/quaver/chaos/faults/{fault_id}", _shaped(end), methods=["DELETE"]),
        Route("/quaver/chaos/halt", _shaped(halt), methods=["POST"]),
        Route("/quaver/chaos/unblock", _shaped(unblock), methods=["POST"]),
    ]


def _shaped(handler: Handler) -> Handler:
    """Turn a ChaosError, or a body that cannot be read, into an OpenAI-shaped error."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except ChaosError as error:
            body = {"message": str(error), "type": "chaos_error", "param": None, "code": error.code}
            return JSONResponse({"error": body}, status_code=error.status)
        except ApiError as error:
            return error.response()

    return wrapped


async def _body(request: Request, shape: type[Any]) -> Any:
    raw = await body_of(request, _MAX_BODY)
    try:
        return decode(raw, shape)
    except ValueError as error:
        raise ChaosError(400, "invalid_body", str(error)) from None


def _who(request: Request) -> str:
    principal = getattr(request.state, "principal", None)
    return f"{principal.role}:{principal.tenant}" if principal is not None else "operator"
