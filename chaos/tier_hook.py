"""Faults that act on the stores of the tiers themselves, before each step of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from chaos.faults.base import Fault
from chaos.faults.tier_disk import flip
from chaos.faults.tier_flip import HostFlip
from chaos.faults.tier_staging import DiskStaging
from chaos.leases import Lease

if TYPE_CHECKING:
    from engine.kv.disk import DiskStore
    from engine.kv.host import HostStore
    from engine.kv.store import Slot


class StoreFaults:
    """What such faults have done, by lease, and what they hold until its end."""

    def __init__(self) -> None:
        self._flipped: dict[str, set[bytes]] = {}
        self._held: dict[str, list[Slot]] = {}

    def act(self, leases: Iterable[Lease[Fault]], host: HostStore | None, disk: DiskStore | None) -> None:
        """Strike what the stores hold now. Called on the engine's thread."""
        for lease in leases:
            if isinstance(lease.fault, HostFlip) and host is not None:
                self._flip(lease, lease.fault, host)
            elif isinstance(lease.fault, DiskStaging) and disk is not None:
                self._hold(lease, lease.fault, disk)

    def let_go(self, in_force: Container[str]) -> None:
        """Give back what leases held that are over."""
        for fault_id in [fault_id for fault_id in self._held if fault_id not in in_force]:
            for slot in self._held.pop(fault_id):
                slot.complete(False)
        self._flipped = {lease: names for lease, names in self._flipped.items() if lease in in_force}

    def _flip(self, lease: Lease[Fault], fault: HostFlip, host: HostStore) -> None:
        done = self._flipped.get(lease.fault_id, set())
        there = dict(host.contents())
        for name in there.keys() - done:
            if fault.strikes(lease.seed, name.hex()):
                flip(there[name], fault.burst, fault.source(lease.seed, name.hex()))
        self._flipped[lease.fault_id] = set(there)

    def _hold(self, lease: Lease[Fault], fault: DiskStaging, disk: DiskStore) -> None:
        held = self._held.setdefault(lease.fault_id, [])
        while len(held) < round(fault.share * disk.buffers) and disk.free_buffers:
            slot = disk.prepare_store(secrets.token_bytes(32), b"")
            if slot is None:
                return
            held.append(slot)
