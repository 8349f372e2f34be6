"""Faults inside the model process: `quaver serve` names this module's `factory` to the worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos.faults.base import Fault
from chaos.faults.kv_pages import PageFault
from chaos.faults.noise import Noise
from chaos.faults.registry import MODEL_KINDS
from chaos.faults.tier_disk import TierFault
from chaos.leases import Lease, Leases
from chaos.selector import Selector, parse_selector
from chaos.tier_hook import StoreFaults
from engine.messages import AttachFault, RequestMeta

if TYPE_CHECKING:
    from torch import Tensor

    from chaos.tier_files import TierFiles
    from engine import scheduler
    from engine.hooks import ModelHook
    from engine.kv.disk import DiskStore
    from engine.kv.disk_files import Files
    from engine.kv.host import HostStore
    from engine.models.config import ModelConfig
    from engine.roster import Roster


class ModelFaults(Leases[Fault]):
    """Implements `engine.hooks.ModelHook`: faults that act on the KV cache, by tier, and on logits."""

    on_tiers = False
    on_pages = False
    on_logits = False

    def __init__(self) -> None:
        super().__init__(MODEL_KINDS)
        self._struck: dict[str, dict[tuple[str, int], int]] = {}
        self._stores = StoreFaults()
        self._files: TierFiles | None = None

    def attach(self, message: AttachFault) -> None:
        """Take a fault into force; raises ValueError when anything in the message is not valid."""
        kind = MODEL_KINDS.get(message.kind)
        selected = parse_selector(message.selector) != Selector()
        if kind is not None and kind.scope == "process" and selected:
            raise ValueError(f"{kind.kind} acts on the whole model process and takes no selector")
        super().attach(message)

    def files(self) -> Files:
        """Return the file system as the disk tier is to use it: with the faults that are in force."""
        from chaos.tier_files import TierFiles  # noqa: PLC0415 (reads LZ4, which few servers need)

        self._files = TierFiles(self)
        return self._files

    def tiers(self, host: HostStore | None, disk: DiskStore | None) -> None:
        """Strike what the stores of the tiers hold."""
        self._stores.act(self.chain(time.monotonic()), host, disk)

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
        self.on_tiers = any(issubclass(kind, TierFault) for kind in kinds)
        self.on_pages = any(issubclass(kind, PageFault) for kind in kinds)
        self.on_logits = Noise in kinds
        self._struck = {fault_id: self._struck.get(fault_id, {}) for fault_id in self._leases}
        self._stores.let_go(self._leases)
        if self._files is not None:
            self._files.let_go()


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
