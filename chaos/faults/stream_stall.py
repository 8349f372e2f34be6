"""A stream that stops once in mid answer, and goes on."""

from __future__ import annotations

from typing import ClassVar

from chaos.faults.streams import Pause, Piece, StreamFault


class StreamStall(StreamFault, frozen=True, kw_only=True):
    """Waits `seconds` before the piece `at`, once; the model goes on meanwhile. At 0 s nothing waits."""

    kind: ClassVar[str] = "stream_stall"
    title: ClassVar[str] = "Stream that stops for a while"
    order: ClassVar[int] = 50
    moves: ClassVar[tuple[str, ...]] = ("interruption_rate",)
    control: ClassVar[dict[str, bool | float]] = {"seconds": 0.0}

    seconds: Pause = 5.0
    at: Piece = 3

    def pause(self, number: int) -> float:
        return self.seconds if number == self.at else 0.0
