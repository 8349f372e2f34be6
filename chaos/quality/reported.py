"""What the probes last reported to this server, as metrics: `prompt_accuracy` and each probe's rate.

`POST /quaver/quality` (operator) takes `{"rates": {probe: {n, good, rate, low, high}}, "prompt_accuracy"}`,
`GET` tells the last. A report counts for an hour; then the series end, so that an alert on their mean
does not rest on an old one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chaos.quality.intervals import Rate
from chaos.quality.tasks import PROBES
from engine.api.body import body_of, decode
from engine.api.errors import ApiError

KEPT_S = 3600.0
_MAX_BODY = 16 * 1024

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a report."""

    rates: dict[str, Rate]
    prompt_accuracy: Share | None = None


class Reported(Collector):
    """Holds the last report; `env` is the label that tells production from tests."""

    def __init__(self, registry: CollectorRegistry, env: str, clock: Callable[[], float] = time.time) -> None:
        self._env, self._clock = env, clock
        self._given: Given | None = None
        self._at = 0.0
        registry.register(self)

    def take(self, given: Given) -> None:
        """Keep a report. Raises ValueError for a probe that there is not, or a rate that is no share."""
        if strange := set(given.rates) - set(PROBES):
            raise ValueError(f"no probe {min(strange)!r}; there are {', '.join(PROBES)}")
        if any(not 0 <= (rate.rate or 0.0) <= 1 for rate in given.rates.values()):
            raise ValueError("a rate is a share, 0 … 1")
        self._given, self._at = given, self._clock()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of a report that still counts."""
        if self._given is None or self._clock() - self._at > KEPT_S:
            return
        accuracy = GaugeMetricFamily(
            "prompt_accuracy",
            "Share of probe questions whose answer has the fact of the passage.",
            labels=["env"],
        )
        if self._given.prompt_accuracy is not None:
            accuracy.add_metric([self._env], self._given.prompt_accuracy)
        rates = GaugeMetricFamily(
            "quaver_quality_rate", "Share of good replies by quality probe.", labels=["env", "probe"]
        )
        for probe, rate in self._given.rates.items():
            if rate.rate is not None:
                rates.add_metric([self._env, probe], rate.rate)
        at = GaugeMetricFamily(
            "quaver_quality_reported_seconds", "Unix time of the last report of the quality probes."
        )
        at.add_metric([], self._at)
        yield from (accuracy, rates, at)

    def routes(self) -> list[Route]:
        """Return the routes, whose callers the API's keys have let in."""
        return [
            Route("/quaver/quality", self._post, methods=["POST"]),
            Route("/quaver/quality", self._get, methods=["GET"]),
        ]

    async def _post(self, request: Request) -> Response:
        try:
            self.take(decode(await body_of(request, _MAX_BODY), Given))
        except ApiError as error:
            return error.response()
        except ValueError as error:
            return ApiError(400, "invalid_body", str(error)).response()
        return self._answer(201)

    async def _get(self, request: Request) -> Response:
        return self._answer(200)

    def _answer(self, status: int) -> Response:
        given = None if self._given is None else msgspec.to_builtins(self._given)
        return JSONResponse({"env": self._env, "reported": self._at or None, "report": given}, status)
