"""The same questions without a fault and under one, that strikes the probes' own requests alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos.client import ChaosClient
from chaos.quality.measure import QualityError, compare
from chaos.quality.tasks import ROUTE

_MARGIN_S = 30.0


def under_fault(
    client: ChaosClient,
    kind: str,
    params: dict[str, Any],
    ask: Callable[[], dict[str, Any]],
    *,
    seed: int = 0,
    route: str = ROUTE,
) -> dict[str, Any]:
    """Ask without a fault, start it for the probes' route, ask again, end it; return both and what changed.

    `ask` is a call of `quality` on that route. The fault's time to live is three times what the clean half
    took. Raises RefusedError when the server refuses the fault, and QualityError when other faults are in
    force, when this one cannot be confined to a route,
    or when it struck nothing or ended before the questions did: nothing is comparable then.
    """
    status = client.status()
    if others := status["faults"]:
        raise QualityError(f"{others[0]['fault_id']} is in force: what is asked first would not be clean")
    if any(each["kind"] == kind and each["scope"] == "process" for each in status["kinds"]):
        raise QualityError(
            f"{kind} strikes the whole process, not one route: ask with --json clean.json, start it with "
            f"`quaver chaos start {kind}`, and ask again with --against clean.json"
        )
    client.start(
        kind, _MARGIN_S, params, {"route": route}, seed=seed, dry=True
    )  # a refusal costs nothing yet
    clean = ask()
    lease = client.start(kind, 3 * clean["seconds"] + _MARGIN_S, params, {"route": route}, seed=seed)
    name = lease["fault_id"]
    try:
        faulted = ask()
        left = [fault for fault in client.status()["faults"] if fault["fault_id"] == name]
    finally:
        client.stop(name)
    if not left:
        raise QualityError(f"{name} ended before the questions did: its time was over, or it was halted")
    if not left[0]["touched"]:
        raise QualityError(f"{name} struck none of the requests: there is nothing to compare")
    return {
        "fault": {"kind": kind, "params": lease.get("params", params), "touched": left[0]["touched"]},
        "clean": clean,
        "faulted": faulted,
        "changes": compare(clean, faulted),
    }
