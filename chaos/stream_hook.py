"""Faults in the front process, on streamed answers on their way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from chaos.faults.registry import STREAM_KINDS
from chaos.faults.streams import StreamFault
from chaos.leases import Lease, Leases
from chaos.selector import draw
from engine.messages import RequestMeta

_LOOK_S = 0.05  # between looks whether a pause still has a reason


class StreamHook(Leases[StreamFault]):
    """Implements `engine.hooks.StreamHook`. Lives on the event loop.

    `applied` hears (request id, fault id) whenever a fault meets a piece of a request.
    """

    def __init__(self, applied: Callable[[str, str], None] | None = None) -> None:
        super().__init__(STREAM_KINDS)
        self.applied = applied

    async def piece(
        self, meta: RequestMeta, number: int, data: bytes, gone: Callable[[], bool]
    ) -> tuple[bytes | None, list[str]]:
        """Return what is sent as the `number`-th piece, None to close the connection, and the fault ids."""
        touched: list[str] = []
        changed: bytes | None = data
        for lease in self.chain(time.monotonic()):
            if changed is None or not lease.matches(meta):
                continue
            touched.append(lease.fault_id)
            await self._pause(lease, lease.fault.pause(number), gone)
            changed = lease.fault.change(changed, number, draw(lease.seed, meta.request_id))
        if self.applied is not None:
            for fault_id in touched:
                self.applied(meta.request_id, fault_id)
        return changed, touched

    async def _pause(self, lease: Lease[StreamFault], seconds: float, gone: Callable[[], bool]) -> None:
        """Wait, but no longer than the lease lasts or anybody listens."""
        until = min(time.monotonic() + seconds, lease.deadline)
        while (left := until - time.monotonic()) > 0:
            if gone() or lease.fault_id not in self.fault_ids():
                return
            await asyncio.sleep(min(left, _LOOK_S))
