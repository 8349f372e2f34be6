"""What is asked of the chaos controller, and what it keeps on its list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from chaos.faults.base import Fault
from chaos.selector import Selector
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


class Running(msgspec.Struct, kw_only=True):
    """A fault on the controller's list. `deadline` is `time.monotonic` seconds, `started` unix."""

    fault_id: str
    fault: Fault
    selector: Selector
    seed: int
    ttl_s: float
    by: str
    started: float
    deadline: float
    confirmed: bool = False
    touched: set[str] = msgspec.field(default_factory=set)

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
            "by": self.by,
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
