"""HTTP endpoints of chaos. The API's middleware has already asked for the operator role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chaos.contract import ChaosError, StartFault
from chaos.controller import Controller
from chaos.stops import StopWhen
from engine.api.body import body_of, decode
from engine.api.errors import ApiError
from engine.words import convert

Handler = Callable[[Request], Awaitable[Response]]

_MAX_BODY = 64 * 1024


class Preview(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a preview: a selector alone, or all that a start would be given."""

    kind: str | None = None
    ttl_s: float = 1.0
    params: dict[str, float | int | str | bool] = {}
    selector: dict[str, float | str] = {}
    seed: int = 0
    stop: StopWhen = StopWhen()


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a note."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


def routes(controller: Controller) -> list[Route]:
    """Return the routes under /quaver/chaos."""

    async def status(request: Request) -> Response:
        return JSONResponse(controller.status())

    async def start(request: Request) -> Response:
        asked = await _body(request, StartFault)
        return JSONResponse(await controller.start(asked, _who(request)), status_code=201)

    async def preview(request: Request) -> Response:
        asked = await _body(request, Preview)
        if asked.kind is None:
            return JSONResponse(controller.admission.preview(asked.selector))
        return JSONResponse(controller.preview(StartFault(**msgspec.structs.asdict(asked)), _who(request)))

    async def end(request: Request) -> Response:
        return JSONResponse(await controller.end(request.path_params["fault_id"], by=_who(request)))

    async def halt(request: Request) -> Response:
        return JSONResponse(await controller.halt(_who(request)))

    async def unblock(request: Request) -> Response:
        return JSONResponse(await controller.unblock(_who(request)))

    async def note(request: Request) -> Response:
        asked = await _body(request, Note)
        return JSONResponse(await controller.note(asked.text, _who(request)), status_code=201)

    async def canary(request: Request) -> Response:
        return JSONResponse(msgspec.to_builtins(await controller.reverts.look()))

    return [
        Route("/quaver/chaos", _shaped(status), methods=["GET"]),
        Route("/quaver/chaos/faults", _shaped(start), methods=["POST"]),
        Route("/quaver/chaos/preview", _shaped(preview), methods=["POST"]),
        Route("/quaver/chaos/faults/{fault_id:path}", _shaped(end), methods=["DELETE"]),
        Route("/quaver/chaos/halt", _shaped(halt), methods=["POST"]),
        Route("/quaver/chaos/unblock", _shaped(unblock), methods=["POST"]),
        Route("/quaver/chaos/notes", _shaped(note), methods=["POST"]),
        Route("/quaver/chaos/canary", _shaped(canary), methods=["POST"]),
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
        return convert(decode(raw), shape)
    except ValueError as error:
        raise ChaosError(400, "invalid_body", str(error)) from None


def _who(request: Request) -> str:
    principal = getattr(request.state, "principal", None)
    return f"{principal.role}:{principal.tenant}" if principal is not None else "operator"
