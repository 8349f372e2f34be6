"""Faults in the front process, on token detail before telemetry takes it in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from chaos.faults.registry import TELEMETRY_KINDS
from chaos.faults.telemetry_drop import TelemetryDrop
from chaos.leases import Leases
from engine.messages import RequestMeta


class DetailHook(Leases[TelemetryDrop]):
    """Implements `engine.hooks.DetailHook`. Lives on the event loop.

    `applied` hears (request id, fault id) of every token that a fault looked at.
    """

    def __init__(self, applied: Callable[[str, str], None] | None = None) -> None:
        super().__init__(TELEMETRY_KINDS)
        self.applied = applied

    def lost(
        self, metas: Sequence[RequestMeta | None], choices: Sequence[int], steps: Sequence[int]
    ) -> tuple[set[int], set[int]]:
        """Return the rows that are lost, and those of which the layer detail alone is."""
        rows: set[int] = set()
        layers: set[int] = set()
        for lease in self.chain(time.monotonic()):
            gone = rows if lease.fault.what == "tokens" else layers
            for row, (meta, choice, step) in enumerate(zip(metas, choices, steps, strict=True)):
                if meta is None or not lease.matches(meta):
                    continue
                if self.applied is not None:
                    self.applied(meta.request_id, lease.fault_id)
                if lease.fault.loses(lease.seed, meta.request_id, choice, step):
                    gone.add(row)
        return rows, layers
