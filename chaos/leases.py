"""Faults in force at one place, each with a time to live kept there. Light: used by both processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from chaos.faults.base import Fault
from chaos.selector import Selector, parse_selector
from engine.messages import AttachFault, RequestMeta
from engine.words import convert

F = TypeVar("F", bound=Fault)


class Lease(msgspec.Struct, Generic[F], frozen=True, kw_only=True):
    """One fault in force until `deadline` (`time.monotonic` seconds)."""

    fault_id: str
    fault: F
    selector: Selector
    seed: int
    deadline: float

    def matches(self, meta: RequestMeta) -> bool:
        """Say whether the fault acts on this request."""
        return self.selector.matches(meta, self.fault_id, self.seed)


class Leases(Generic[F]):
    """The leases of one place. Whoever started them may be gone: they end by themselves."""

    def __init__(self, kinds: dict[str, type[F]]) -> None:
        self._kinds = kinds
        self._leases: dict[str, Lease[F]] = {}
        self._chain: tuple[Lease[F], ...] = ()
        self.active = False

    def attach(self, message: AttachFault) -> None:
        """Take a fault into force; raises ValueError when anything in the message is not valid."""
        kind = self._kinds.get(message.kind)
        if kind is None:
            raise ValueError(f"no fault {message.kind!r} acts here; there is {', '.join(self._kinds)}")
        if message.fault_id in self._leases:
            raise ValueError(f"fault {message.fault_id} is already in force")
        if not 0 < message.ttl_s < float("inf"):
            raise ValueError("ttl_s must be a positive number of seconds")
        try:
            fault = convert(message.params, kind)
        except ValueError as error:
            raise ValueError(f"{message.kind}: {error}") from None
        self._leases[message.fault_id] = Lease(
            fault_id=message.fault_id,
            fault=fault,
            selector=parse_selector(message.selector),
            seed=message.seed,
            deadline=time.monotonic() + message.ttl_s,
        )
        self._changed()

    def detach(self, fault_id: str | None) -> None:
        """End one fault, or all (None). Unknown ids are ignored."""
        if fault_id is None:
            self._leases.clear()
        else:
            self._leases.pop(fault_id, None)
        self._changed()

    def expire(self, now: float) -> bool:
        """End leases whose time (`time.monotonic`) is over; True when the set changed."""
        over = [lease.fault_id for lease in self._chain if lease.deadline <= now]
        for fault_id in over:
            del self._leases[fault_id]
        if over:
            self._changed()
        return bool(over)

    def fault_ids(self) -> list[str]:
        """Ids in force, in order of attachment."""
        return list(self._leases)

    def chain(self, now: float) -> Iterator[Lease[F]]:
        """Yield the leases still running at `now`, in the order in which they act."""
        return (lease for lease in self._chain if lease.deadline > now)

    def _changed(self) -> None:
        leases = self._leases.values()
        self._chain = tuple(
            sorted(leases, key=lambda lease: (lease.fault.order, lease.fault.kind, lease.fault_id))
        )
        self.active = bool(leases)
