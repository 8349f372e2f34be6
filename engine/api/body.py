"""Request bodies: read within bounds of size and time, decoded with one kind of error."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar, overload

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from engine.api.errors import ApiError
from engine.words import in_words

#: How long a small body, of anything but a generation, may take to arrive.
TIMEOUT_S = 30.0

T = TypeVar("T")

_MALFORMED = re.compile(r"^JSON is malformed: | - at `.*`$")


class DisconnectedError(Exception):
    """The client is gone; there is nobody to answer."""


async def read_body(headers: Headers, receive: Receive, limit: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the request body.

    Raises ApiError 413 above `limit` bytes and 408 when it does not arrive, DisconnectedError when
    the client leaves.
    """
    too_large = ApiError(413, "body_too_large", f"the body may have at most {limit} bytes")
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise DisconnectedError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, "body_timeout", f"the body did not arrive within {timeout_s:g} s") from None


async def body_of(request: Request, limit: int) -> bytes:
    """Return the body of a request that generates nothing; raises ApiError, also when the client leaves."""
    try:
        return await read_body(request.headers, request.receive, limit)
    except DisconnectedError:
        raise ApiError(499, "client_closed_request", "the client left before its body was whole") from None


@overload
def decode(body: bytes) -> Any: ...
@overload
def decode(body: bytes, shape: type[T]) -> T: ...
def decode(body: bytes, shape: Any = Any) -> Any:
    """Return the JSON value; raises ValueError that says what is wrong with it, whatever it is."""
    try:
        return msgspec.json.decode(body, type=shape)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) and shape is not Any:
            raise in_words(error, decode(body), shape) from None
        raise ValueError(_MALFORMED.sub("", str(error))) from None
