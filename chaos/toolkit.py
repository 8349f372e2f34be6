"""Chaos Toolkit's hands on a Quaver server: what `chaos run experiment.yaml` calls.

An experiment's configuration may name `url` and `operator_key_file`. Without them the address is
`QUAVER_URL`, else the default one, and the key is the file `QUAVER_OPERATOR_KEY_FILE`, else the one in
the keys folder that a server with the same environment would use. The toolkit is the shell,
never the safety mechanism: every fault is a lease that ends on the server by itself, whatever
becomes of the run. A fault that cannot be started interrupts the run, which then exits non-zero;
left to itself the toolkit would call an experiment without its fault completed.
"""

from __future__ import annotations

import logging
import os
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
_URL = "http://127.0.0.1:8000"

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
    url = values.get("url") or os.environ.get("QUAVER_URL") or _URL
    path = Path(values.get("operator_key_file") or _key_file()).expanduser()
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ActivityFailed(
            f"cannot read the operator's key {path} ({error.strerror}); set QUAVER_STATE_DIR as the "
            "server has it, or QUAVER_OPERATOR_KEY_FILE to the file"
        ) from error
    return ChaosClient(url, key)


def _key_file() -> str | Path:
    """Return where the operator's key is, by the variables that the server reads too."""
    if given := os.environ.get("QUAVER_OPERATOR_KEY_FILE"):
        return given
    state = os.environ.get("QUAVER_STATE_DIR") or "~/.local/state/quaver"
    return Path(os.environ.get("QUAVER_KEYS_DIR") or Path(state) / "keys") / "operator.key"
