"""What an experiment looks at."""

import asyncio
import os
import time
from typing import Any

from chaoslib.exceptions import ActivityFailed

from chaos.client import ChaosClient
from chaos.prometheus import Prometheus, PrometheusError
from chaos.quality.measure import QualityError, compare
from chaos.quality.measure import quality as measure
from chaos.toolkit.connection import Configuration, ask, firing, key_file, read_key, url_of

__all__ = [
    "alert_fires",
    "canary",
    "faults_in_force",
    "interruption_rate",
    "nothing_fires",
    "prometheus",
    "quality",
    "quality_change",
]

_LOOK_S = 0.5
_first: dict[tuple[str, str, int, int], dict[str, Any]] = {}  # quality as this run first measured it


def faults_in_force(kind: str | None = None, configuration: dict[str, Any] | None = None) -> int:
    """How many faults of a kind, or of all kinds, are in force."""
    return ask(configuration, lambda c: sum(kind in (None, f["kind"]) for f in c.status()["faults"]))


def nothing_fires(configuration: dict[str, Any] | None = None) -> bool:
    """Whether no alert fires now. What only informs, as of other traffic, does not count."""
    return not firing(configuration)


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
    `quality_change` compares with the first measurement.
    """
    found = _measure(probe, n, seed, configuration)
    _first.setdefault((url_of(configuration), probe, n, seed), found)
    rate: float | None = found["rates"][probe]["rate"]
    return rate


def quality_change(
    probe: str = "facts", n: int = 40, seed: int = 0, configuration: dict[str, Any] | None = None
) -> str:
    """How the failure rate changed since `quality` first asked the same: asks again, and pairs answers.

    `harmed: …` where the whole 95 % interval of the change is on the worse side, else `not harmed: …`; then
    the rates, the change and its interval.
    """
    clean = _first.get((url_of(configuration), probe, n, seed))
    if clean is None:
        raise ActivityFailed(f"ask quality first, without a fault: probe {probe}, n {n}, seed {seed}")
    now = _measure(probe, n, seed, configuration)
    change = compare(clean, now)[probe]
    if change["change"] is None:
        raise ActivityFailed(f"no question of {probe} was answered both times")
    before, after = (1 - found["rates"][probe]["rate"] for found in (clean, now))
    return (
        f"{'harmed' if change['harmed'] else 'not harmed'}: {probe} failed {before:.0%}, now {after:.0%}: "
        f"{-change['change']:+.2f} ({-change['high']:+.2f} to {-change['low']:+.2f}) of {change['n']}"
    )


def _measure(probe: str, n: int, seed: int, configuration: Configuration) -> dict[str, Any]:
    key = read_key(key_file(configuration, "client"))
    try:
        return measure(url_of(configuration), key, n, seed, probes=(probe,))  # type: ignore[arg-type]
    except QualityError as error:
        raise ActivityFailed(str(error)) from error
