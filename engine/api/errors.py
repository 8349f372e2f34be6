"""Errors in OpenAI's shape, each decided before a 200 is sent."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

log = logging.getLogger("quaver.api")


class ApiError(Exception):
    """A refusal or failure: HTTP status, machine-readable code, and a message that says what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error object, also used as the last event of a broken stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return json_response(self.body(), self.status, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return strict JSON: a number that is not finite becomes null."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def on_api_error(_request: Request, error: Exception) -> Response:
    """Exception handler for ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Exception handler for what Starlette raises itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        error.status_code,
        codes.get(error.status_code, "http_error"),
        error.detail,
        headers=dict(error.headers or {}),
    ).response()


async def on_exception(_request: Request, error: Exception) -> Response:
    """Exception handler for everything unforeseen; the details stay in the log."""
    log.error("a request failed", exc_info=error)
    return ApiError(
        500, "internal_error", "the server failed on this request; its log has the cause"
    ).response()


EXCEPTION_HANDLERS: dict[Any, Any] = {
    ApiError: on_api_error,
    HTTPException: on_http_exception,
    Exception: on_exception,
}
