"""What is asked of the chaos controller, and what it keeps on its list."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import msgspec

from chaos.canary import PENDING, Verdict
from chaos.faults.base import Fault
from chaos.selector import Selector
from chaos.stops import StopWhen
from engine.messages import AttachFault


class ChaosError(Exception):
    """A refused start. `status` is the HTTP status, `code` a stable word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ModelPort(Protocol):
    """The way into the model process; `engine.process.client.EngineClient` is one."""

    fault_listeners: list[Callable[[list[str]], None]]

    async def attach_fault(self, fault: AttachFault) -> bool: ...

    async def detach_fault(self, fault_id: str | None = None) -> bool: ...


class StartFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator asks for. `ttl_s` is mandatory: no fault outlives its time."""

    kind: str
    ttl_s: float
    params: dict[str, float | int | str | bool] = {}
    selector: dict[str, float | str] = {}
    seed: int = 0
    stop: StopWhen = StopWhen()


class Stage(IntEnum):
    """How far the start of a fault has come. It is in force from `ATTACHED` on, if at all."""

    ADMITTED = 0  # on the list
    CLEARED = 1  # the canary has been asked, and will not be until this fault is over
    JOURNALLED = 2  # on its way to the disk, or there
    ATTACHED = 3  # on its way to where it acts, or there
    ACTIVE = 4  # confirmed


class Running(msgspec.Struct, kw_only=True):
    """A fault on the controller's list, from the moment its start is admitted.

    `deadline` is `time.monotonic` seconds, infinite until it is attached; `started` is unix.
    """

    fault_id: str
    fault: Fault
    selector: Selector
    seed: int
    ttl_s: float
    by: str
    stop: StopWhen
    started: float
    deadline: float = float("inf")
    stage: Stage = Stage.ADMITTED
    touched: set[str] = msgspec.field(default_factory=set)

    @property
    def count(self) -> int | None:
        """Requests that it changed; None for a fault of the whole process, which strikes no request."""
        return None if self.fault.scope == "process" else len(self.touched)

    def facts(self) -> dict[str, Any]:
        """Return what the journal and the list say of it."""
        return {
            "fault_id": self.fault_id,
            "kind": self.fault.kind,
            "place": self.fault.place,
            "scope": self.fault.scope,
            "params": msgspec.structs.asdict(self.fault),
            "selector": self.selector.to_wire(),
            "seed": self.seed,
            "ttl_s": self.ttl_s,
            "stop": self.stop.to_wire(),
            "by": self.by,
        }

    def listing(self, chain: list[str]) -> dict[str, Any]:
        """Return how it stands; `chain` are the ids of those that it acts with, in their order."""
        return {
            "id": self.fault_id,
            **self.facts(),
            "state": "active" if self.stage is Stage.ACTIVE else "starting",
            "started": self.started,
            "remaining_s": round(min(self.ttl_s, max(0.0, self.deadline - time.monotonic())), 3),
            "touched": self.count,
            "chain": chain,
        }

    def message(self) -> AttachFault:
        """Return the message that takes it into force."""
        return AttachFault(
            fault_id=self.fault_id,
            kind=self.fault.kind,
            params=msgspec.structs.asdict(self.fault),
            selector=self.selector.to_wire(),
            seed=self.seed,
            ttl_s=self.ttl_s,
        )


class Ended(msgspec.Struct, kw_only=True):
    """A fault that was in force. `reverted` says whether the server answers again as before it."""

    fault_id: str
    kind: str
    reason: str
    touched: int | None  # requests; None: it struck the whole process
    started: float
    lasted_s: float
    reverted: Verdict = PENDING

    def listing(self) -> dict[str, Any]:
        """Return it as JSON."""
        return dict(msgspec.to_builtins(self))
