"""A slow prefill: prompts take their time, decodes of others go on."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import Fault, Place


class SlowPrefill(Fault, frozen=True, kw_only=True):
    """Holds a prompt back for `delay_ms` for each of its tokens that has to be computed, once.

    Its request runs and keeps its pages; the steps of others go on as before. When nothing but held prompts
    is there to compute, the model process looks again every 10 ms. At 0 ms nobody is held.
    """

    kind: ClassVar[str] = "slow_prefill"
    title: ClassVar[str] = "Prompts that are computed late"
    place: ClassVar[Place] = "model"
    order: ClassVar[int] = 32
    moves: ClassVar[tuple[str, ...]] = ("first_token_seconds", "interruption_rate")
    control: ClassVar[dict[str, bool | float]] = {"delay_ms": 0.0}
    caps: ClassVar[dict[str, float]] = {"delay_ms": 100.0}

    delay_ms: Annotated[float, Meta(ge=0, le=10_000, description="delay for each prompt token, in ms")] = 10.0
