"""What faults in streamed answers share. A piece is what one step of the model brought to a stream."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Fault, Place

Piece = Annotated[int, Meta(ge=0, le=MAX_COUNT, description="piece of the answer at which it acts; from 0")]
Pause = Annotated[float, Meta(ge=0, le=3600, description="seconds")]


class StreamFault(Fault, frozen=True, kw_only=True):
    """A fault in streamed answers, on their way to the client. Whole answers are left alone."""

    place: ClassVar[Place] = "stream"

    def pause(self, number: int) -> float:
        """Return how many seconds the `number`-th piece waits."""
        return 0.0

    def change(self, data: bytes, number: int, seed: int) -> bytes | None:
        """Return what is sent in its place, None to close the connection instead."""
        return data
