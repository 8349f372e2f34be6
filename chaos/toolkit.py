"""Chaos Toolkit's hands on a Quaver server: what `chaos run experiment.yaml` calls.

Experiments name `url` and `operator_key_file` in their configuration. The toolkit is the shell,
never the safety mechanism: every fault is a lease that ends on the server by itself, whatever
becomes of the run. A fault that cannot be started interrupts the run, which then exits non-zero;
left to itself the toolkit would call an experiment without its fault completed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from chaoslib.exceptions import ActivityFailed
from chaoslib.exit import exit_gracefully

from chaos.client import ChaosClient, RefusedError

__all__ = ["alert_fires", "faults_in_force", "halt", "nothing_fires", "start_fault", "stop_faults"]

T = TypeVar("T")
_LOOK_S = 0.5

log = logging.getLogger("chaostoolkit")


def start_fault(  # noqa: PLR0917 (the toolkit passes arguments by name)
    kind: str,
    ttl_s: float,
    params: dict[str, Any] | None = None,
    selector: dict[str, Any] | None = None,
    seed: int = 0,
    configuration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Action: start a fault that ends by itself after `ttl_s`; interrupts the run if it is refused."""
    try:
        with _client(configuration) as client:
            return client.start(kind, ttl_s, params, selector, seed)
    except (RefusedError, httpx.TransportError, ActivityFailed) as error:
        log.error("%s: %s", kind, error)
        exit_gracefully()
        raise ActivityFailed(f"the fault {kind} was not started: {error}") from error


def stop_faults(kind: str | None = None, configuration: dict[str, Any] | None = None) -> list[str]:
    """Action: end the faults of a kind, or all; harmless when there are none. Returns their ids."""

    def stop(client: ChaosClient) -> list[str]:
        found = [f["fault_id"] for f in client.status()["faults"] if kind in (None, f["kind"])]
        for fault_id in found:
            client.stop(fault_id)
        return found

    return _ask(configuration, stop)


def halt(configuration: dict[str, Any] | None = None) -> dict[str, Any]:
    """Action: end every fault and block new ones until `quaver chaos unblock`."""
    return _ask(configuration, ChaosClient.halt)


def faults_in_force(kind: str | None = None, configuration: dict[str, Any] | None = None) -> int:
    """Probe: how many faults of a kind, or of all kinds, are in force."""
    return _ask(configuration, lambda c: sum(kind in (None, f["kind"]) for f in c.status()["faults"]))


def nothing_fires(configuration: dict[str, Any] | None = None) -> bool:
    """Probe: whether no alert fires now."""
    return not _ask(configuration, ChaosClient.alerts)["active"]


def alert_fires(name: str, within_s: float = 60.0, configuration: dict[str, Any] | None = None) -> bool:
    """Probe: whether the alert `name` fires, waiting for it up to `within_s` seconds."""
    end = time.monotonic() + within_s
    while True:
        active = _ask(configuration, ChaosClient.alerts)["active"]
        if any(alert["name"] == name for alert in active):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)


def _ask(configuration: dict[str, Any] | None, question: Callable[[ChaosClient], T]) -> T:
    try:
        with _client(configuration) as client:
            return question(client)
    except (RefusedError, httpx.TransportError) as error:
        raise ActivityFailed(str(error)) from error


def _client(configuration: dict[str, Any] | None) -> ChaosClient:
    values = configuration or {}
    try:
        key = Path(values["operator_key_file"]).expanduser().read_text().strip()
        return ChaosClient(values["url"], key)
    except KeyError as error:
        raise ActivityFailed(f"the experiment's configuration lacks {error}") from error
    except OSError as error:
        raise ActivityFailed(f"cannot read the operator's key: {error}") from error
