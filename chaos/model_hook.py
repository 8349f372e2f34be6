"""Faults inside the model process: `quaver serve` names this module's `factory` to the worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos.faults.base import Fault
from chaos.faults.kv_pages import PageFault
from chaos.faults.noise import Noise
from chaos.faults.registry import MODEL_KINDS
from chaos.leases import Lease, Leases
from engine.messages import RequestMeta

if TYPE_CHECKING:
    from torch import Tensor

    from engine import scheduler
    from engine.hooks import ModelHook
    from engine.models.config import ModelConfig
    from engine.roster import Roster


class ModelFaults(Leases[Fault]):
    """Implements `engine.hooks.ModelHook`: faults that act on KV pages, and on logits."""

    on_pages = False
    on_logits = False

    def __init__(self) -> None:
        super().__init__(MODEL_KINDS)
        self._struck: dict[str, dict[tuple[str, int], int]] = {}

    def pages(self, roster: Roster, config: ModelConfig) -> dict[str, list[str]]:
        """Strike pages of sequences that decode; return the fault ids by the id of each request struck.

        What is struck belongs to its sequence alone and is tainted first; where there is no room for that the
        fault waits.
        """
        touched: dict[str, list[str]] = {}
        running = {sequence.key for sequence in roster.running}
        for lease in self.chain(time.monotonic()):
            if isinstance(lease.fault, PageFault):
                known = self._struck.get(lease.fault_id, {})
                done = {key: count for key, count in known.items() if key in running}
                self._struck[lease.fault_id] = done
                for sequence in _strike(lease, lease.fault, roster, config, done):
                    touched.setdefault(sequence.key[0], []).append(lease.fault_id)
        return touched

    def logits(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], steps: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, dict[int, list[str]]]:
        """Return logits to sample from and, for each changed row, the fault ids.

        With no match the argument itself comes back; else a copy in which only matched rows differ.
        """
        changed: dict[int, list[str]] = {}
        result = logits
        for lease in self.chain(time.monotonic()):
            fault = lease.fault
            if not isinstance(fault, Noise):
                continue
            for row, (meta, choice, step) in enumerate(zip(metas, choices, steps, strict=True)):
                if step < fault.from_token or not lease.matches(meta):
                    continue
                if result is logits:
                    result = logits.clone()
                result[row] = fault.perturb(result[row], lease.seed, meta.request_id, choice, step)
                changed.setdefault(row, []).append(lease.fault_id)
        return result, changed

    def _changed(self) -> None:
        super()._changed()
        kinds = [type(lease.fault) for lease in self._chain]
        self.on_pages = any(issubclass(kind, PageFault) for kind in kinds)
        self.on_logits = Noise in kinds
        self._struck = {fault_id: self._struck.get(fault_id, {}) for fault_id in self._leases}


def _strike(
    lease: Lease[Fault],
    fault: PageFault,
    roster: Roster,
    config: ModelConfig,
    done: dict[tuple[str, int], int],
) -> list[scheduler.Sequence]:
    """Let one fault act; returns the sequences struck, and counts in `done` the full pages each had then."""
    pool = roster.pool
    places: dict[tuple[str, int], list[int]] = {}
    for sequence in roster.running:
        if (
            sequence.decoding
            and sequence.emitted >= fault.from_token
            and lease.matches(sequence.request.meta)
        ):
            places[sequence.key] = fault.due(sequence, pool, done.get(sequence.key, 0), lease.seed)
    struck: list[scheduler.Sequence] = []
    for group in fault.groups([sequence for sequence in roster.running if places.get(sequence.key)]):
        if all(roster.seclude(sequence) for sequence in group):
            fault.strike(group, [places[sequence.key] for sequence in group], pool, config, lease.seed)
            done |= {sequence.key: sequence.computed // pool.page_size for sequence in group}
            struck += group
    return struck


def factory() -> ModelHook:
    """Return the hook of a fresh model process: nothing in force."""
    return ModelFaults()
