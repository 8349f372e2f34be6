"""What request headers may claim."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from engine.api.auth import Principal
from engine.api.meta import RouteLabels, request_meta


@pytest.mark.parametrize(
    ("tenant", "asked", "given"),
    [
        ("plain", None, "normal"),
        ("plain", "high", "normal"),
        ("plain", "Low", "low"),
        ("gold", None, "high"),
        ("gold", "high", "high"),
        ("gold", "normal", "normal"),
        ("gold", "highest", "high"),
        ("batch", "high", "low"),
        ("batch", "normal", "low"),
    ],
)
def test_nobody_gives_itself_more_than_the_operator_does(tenant: str, asked: str | None, given: str) -> None:
    headers = Headers({"x-quaver-priority": asked} if asked else {})
    who = Principal(role="client", tenant=tenant)
    meta = request_meta(headers, who, RouteLabels(), {"gold": "high", "batch": "low"}, prefix="cmpl")
    assert (meta.tenant, meta.priority) == (tenant, given)
