"""Chaos Toolkit's hands on a Quaver server: what `chaos run experiment.yaml` calls.

The toolkit is the shell, never the safety mechanism: every fault is a lease that ends on the server by
itself, whatever becomes of the run. `actions` start and end faults, `probes` look, `controls` go with a
whole run; `ledger` sees to it that a run whose injection failed or matched nothing does not pass.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from chaoslib.discovery import discover_actions, discover_probes, initialize_discovery_result

from chaos.toolkit.actions import halt, note, start_fault, stop_faults
from chaos.toolkit.probes import (
    alert_fires,
    canary,
    faults_in_force,
    interruption_rate,
    nothing_fires,
    prometheus,
    quality,
    quality_change,
)

__all__ = [
    "alert_fires",
    "canary",
    "discover",
    "faults_in_force",
    "halt",
    "interruption_rate",
    "note",
    "nothing_fires",
    "prometheus",
    "quality",
    "quality_change",
    "start_fault",
    "stop_faults",
]


def discover(discover_system: bool = True) -> dict[str, Any]:
    """Return what `chaos discover` shows: every action and probe with its arguments."""
    found: dict[str, Any] = initialize_discovery_result("chaostoolkit-quaver", version("quaver"), "quaver")
    found["activities"] += discover_actions("chaos.toolkit.actions")
    found["activities"] += discover_probes("chaos.toolkit.probes")
    return found
