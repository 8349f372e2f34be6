"""What an experiment does to a server."""

import logging
from typing import Any

from chaoslib.exceptions import ActivityFailed

from chaos.client import ChaosClient
from chaos.toolkit.connection import ask
from chaos.toolkit.ledger import LEDGER, interrupt

__all__ = ["halt", "note", "start_fault", "stop_faults"]

log = logging.getLogger("chaostoolkit")


def start_fault(  # noqa: PLR0917 (the toolkit passes arguments by name)
    kind: str,
    ttl_s: float,
    params: dict[str, Any] | None = None,
    selector: dict[str, Any] | None = None,
    seed: int = 0,
    stop: dict[str, Any] | None = None,
    at_least: int | None = None,
    configuration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Start a fault that ends by itself after `ttl_s`, or at the end of the run at the latest.

    A fault that is refused, or that has touched fewer than `at_least` requests when it ends, makes the run
    invalid. Without a number that is one request, and none for a fault of the whole process, which
    touches no request in particular. `stop` are stop conditions: `alert`, `promql`, `interruptions`.
    """
    if LEDGER.interrupted:
        raise ActivityFailed(f"the run is interrupted; {kind} is not started")
    try:
        if at_least is not None and (type(at_least) is not int or at_least < 0):
            raise ActivityFailed(f"at_least has to be a whole number from 0 on, not {at_least!r}")
        with LEDGER.starting():
            lease = ask(
                configuration,
                lambda client: client.start(kind, ttl_s, params, selector, seed=seed, stop=stop),
            )
            if at_least is None:
                at_least = 0 if lease["scope"] == "process" else 1
            LEDGER.opened(lease["fault_id"], configuration, at_least)
    except Exception as error:  # whatever went wrong, the experiment is none
        LEDGER.flaw(f"{kind} was not started: {error}")
        interrupt()
        raise ActivityFailed(str(error)) from error
    return lease


def stop_faults(kind: str | None = None, configuration: dict[str, Any] | None = None) -> list[str]:
    """End the faults of a kind, or all; harmless when there are none. Returns their ids.

    One of this run that has touched too few requests interrupts the run.
    """
    before = len(LEDGER.flaws)
    found = ask(configuration, lambda client: _of(kind, client.status()["faults"]))
    known = ask(configuration, lambda client: _of(kind, client.status()["ended"]))
    for fault_id in found:
        LEDGER.close(fault_id)
        ask(configuration, lambda client, fault_id=fault_id: client.stop(fault_id))  # type: ignore[misc]
    for fault_id in known:
        LEDGER.close(fault_id)
    if len(LEDGER.flaws) > before:
        interrupt()
        raise ActivityFailed(LEDGER.flaws[-1])
    return found


def halt(configuration: dict[str, Any] | None = None) -> dict[str, Any]:
    """End every fault and block new ones until `quaver chaos unblock`."""
    return ask(configuration, ChaosClient.halt)


def note(text: str, configuration: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write a line to the server's chaos journal, where dashboards show it."""
    return ask(configuration, lambda client: client.note(text))


def _of(kind: str | None, faults: list[dict[str, Any]]) -> list[str]:
    return [fault["fault_id"] for fault in faults if kind in (None, fault["kind"])]
