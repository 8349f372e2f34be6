"""Who asks and by which way: request headers become a RequestMeta with bounded values."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import get_args

from starlette.datastructures import Headers

from engine.api.auth import Principal
from engine.messages import Priority, RequestMeta

_LABEL = re.compile(r"[a-z0-9_.-]{1,64}")
_SESSION = re.compile(r"[!-~]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SECRET = {"x-api-key", "x-auth-token"}
_MAX_HEADERS = 32
_MAX_VALUE = 256


class RouteLabels:
    """Keeps the set of route labels bounded, as they become metric labels."""

    def __init__(self, allowed: Iterable[str] = (), cap: int = 16) -> None:
        self._known = set(allowed)
        self._open = not self._known
        self._cap = cap

    def label(self, wanted: str | None) -> str:
        """Return `wanted` when it is well formed and within the cap, else `default`."""
        if wanted is None or not _LABEL.fullmatch(wanted):
            return "default"
        if self._open and len(self._known) < self._cap:
            self._known.add(wanted)
        return wanted if wanted in self._known else "default"


def request_meta(
    headers: Headers,
    principal: Principal | None,
    routes: RouteLabels,
    priorities: Mapping[str, Priority],
    *,
    prefix: str,
) -> RequestMeta:
    """Read the headers of a generation request; ids are ours, whatever the client sends.

    `headers` of the result holds the `x-…` headers and `traceparent`, bounded in number and size;
    those that usually carry secrets are left out. A canary mark counts from an operator only.
    `priorities` caps what a tenant may ask for in `x-quaver-priority`; without it, it gets the cap.
    """
    kept: dict[str, str] = {}
    for name, value in headers.items():
        wanted = (name.startswith("x-") and name not in _SECRET) or name == "traceparent"
        if wanted and len(kept) < _MAX_HEADERS:
            kept[name] = value[:_MAX_VALUE]
    session = headers.get("x-quaver-session", "")
    trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    valid = trace is not None and trace[1].strip("0") and trace[2].strip("0")
    operator = principal is not None and principal.role == "operator"
    tenant = principal.tenant if principal is not None else "default"
    return RequestMeta(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        tenant=tenant,
        route=routes.label(headers.get("x-quaver-route")),
        priority=_priority(headers.get("x-quaver-priority", ""), priorities.get(tenant, "normal")),
        session=session if _SESSION.fullmatch(session) else None,
        trace_id=trace[1] if trace is not None and valid else None,
        canary=operator and headers.get("x-quaver-canary", "").lower() in ("1", "true", "yes"),
        headers=kept,
    )


def _priority(asked: str, highest: Priority) -> Priority:
    """Return the lower of two priorities; what is not one asks for nothing."""
    order: tuple[Priority, ...] = get_args(Priority)
    wanted = asked.strip().lower()
    return max(highest, next((p for p in order if p == wanted), highest), key=order.index)
