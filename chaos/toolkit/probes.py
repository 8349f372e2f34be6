"""What an experiment looks at."""

import asyncio
import os
import time
from typing import Any

from chaoslib.exceptions import ActivityFailed

from chaos.client import ChaosClient
from chaos.prometheus import Prometheus, PrometheusError
from chaos.quality.measure import QualityError
from chaos.quality.measure import quality as measure
from chaos.toolkit.connection import ask, key_file, read_key, url_of

__all__ = [
    "alert_fires",
    "canary",
    "faults_in_force",
    "interruption_rate",
    "nothing_fires",
    "prometheus",
    "quality",
]

_LOOK_S = 0.5


def faults_in_force(kind: str | None = None, configuration: dict[str, Any] | None = None) -> int:
    """How many faults of a kind, or of all kinds, are in force."""
    return ask(configuration, lambda c: sum(kind in (None, f["kind"]) for f in c.status()["faults"]))


def nothing_fires(configuration: dict[str, Any] | None = None) -> bool:
    """Whether no alert fires now."""
    return not ask(configuration, ChaosClient.alerts)["active"]


def alert_fires(
    name: str, within_s: float = 60.0, route: str | None = None, configuration: dict[str, Any] | None = None
) -> bool:
    """Whether an alert of this name or level (L1, L2) fires, waiting for it up to `within_s` seconds."""
    end = time.monotonic() + within_s
    while True:
        active = ask(configuration, ChaosClient.alerts)["active"]
        if any(name in (a["name"], a["level"]) and route in (None, a["route"]) for a in active):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)


def canary(configuration: dict[str, Any] | None = None) -> str:
    """How the server answers a known question now, beside its answer before the faults.

    `verified`: the same; `differs`; `not checked`: one of the answers is missing.
    """
    return str(ask(configuration, ChaosClient.canary)["state"])


def prometheus(
    query: str, url: str | None = None, configuration: dict[str, Any] | None = None
) -> float | None:
    """The value of a PromQL expression: the number, or the first series' value; null when there is none.

    `url` is Prometheus's; without it that of the configuration (`prometheus_url`) or QUAVER_PROMETHEUS_URL.
    """
    where = url or (configuration or {}).get("prometheus_url") or os.environ.get("QUAVER_PROMETHEUS_URL")
    if not where:
        raise ActivityFailed("where is Prometheus? Give url, or set QUAVER_PROMETHEUS_URL")

    async def look() -> float | None:
        client = Prometheus(where)
        try:
            values = (await client.query(query)).values
        finally:
            await client.close()
        return values[0] if values else None

    try:
        return asyncio.run(look())
    except PrometheusError as error:
        raise ActivityFailed(str(error)) from error


def interruption_rate(seconds: int = 60, configuration: dict[str, Any] | None = None) -> float | None:
    """The share of the answers of the last seconds that their readers broke off; null without answers."""
    series = ask(configuration, lambda client: client.live(seconds))["series"]
    ended = sum(filter(None, series["requests"]))
    return sum(filter(None, series["interrupted"])) / ended if ended else None


def quality(
    probe: str = "facts", n: int = 40, seed: int = 0, configuration: dict[str, Any] | None = None
) -> float | None:
    """The share of known questions that are answered as they should be, by one of the quality probes.

    `n` questions are asked with a client's key (`client_key_file`); docs/quality.md names the probes.
    """
    key = read_key(key_file(configuration, "client"))
    try:
        found = measure(url_of(configuration), key, n, seed, probes=(probe,))  # type: ignore[arg-type]
    except QualityError as error:
        raise ActivityFailed(str(error)) from error
    rate: float | None = found["rates"][probe]["rate"]
    return rate
