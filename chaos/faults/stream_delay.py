"""A stream whose every piece comes late."""

from __future__ import annotations

from typing import ClassVar

from chaos.faults.streams import Pause, StreamFault


class StreamDelay(StreamFault, frozen=True, kw_only=True):
    """Waits `seconds` before each piece; the model goes on meanwhile. At 0 s nothing waits."""

    kind: ClassVar[str] = "stream_delay"
    title: ClassVar[str] = "Stream whose pieces come late"
    order: ClassVar[int] = 51
    moves: ClassVar[tuple[str, ...]] = ("interruption_rate",)
    control: ClassVar[dict[str, bool | float]] = {"seconds": 0.0}

    seconds: Pause = 0.2

    def pause(self, number: int) -> float:
        return self.seconds
