"""Telemetry that gets lost on its way from the engine to records and detectors."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from chaos.faults.base import Fault, Place
from chaos.selector import draw


class TelemetryDrop(Fault, frozen=True, kw_only=True):
    """Drops a share `rate` of the tokens' rows, or of their layer detail alone, before anybody reads them.

    What is dropped is counted as every drop is. Answers are as they were. At `rate` 0 nothing is lost.
    """

    kind: ClassVar[str] = "telemetry_drop"
    title: ClassVar[str] = "Token detail lost before records and detectors"
    place: ClassVar[Place] = "telemetry"
    order: ClassVar[int] = 60
    moves: ClassVar[tuple[str, ...]] = ("quaver_telemetry_dropped", "quaver_evaluator_blind")
    control: ClassVar[dict[str, bool | float]] = {"rate": 0.0}

    rate: Annotated[float, Meta(ge=0, le=1, description="share of the tokens")] = 1.0
    what: Annotated[Literal["tokens", "layers"], Meta(description="whole rows, or layer detail only")] = (
        "tokens"
    )

    def loses(self, seed: int, request_id: str, choice: int, step: int) -> bool:
        """Say whether a token's detail is lost. Depends on the arguments alone."""
        return draw(seed, request_id, choice, step) < self.rate * 2.0**64
