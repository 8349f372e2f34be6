"""Pieces of a stream that are no longer JSON."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.streams import StreamFault
from chaos.selector import draw


class StreamGarble(StreamFault, frozen=True, kw_only=True):
    """Breaks off the first event of a piece in its middle, of a share `rate` of the pieces.

    Which pieces depends on seed and request alone. At `rate` 0 the same path runs and every piece stays.
    """

    kind: ClassVar[str] = "stream_garble"
    title: ClassVar[str] = "Malformed pieces of a stream"
    order: ClassVar[int] = 52
    moves: ClassVar[tuple[str, ...]] = ("interruption_rate",)
    control: ClassVar[dict[str, bool | float]] = {"rate": 0.0}

    rate: Annotated[float, Meta(ge=0, le=1, description="share of the pieces")] = 0.2

    def change(self, data: bytes, number: int, seed: int) -> bytes | None:
        if draw(seed, number) >= self.rate * 2.0**64:
            return data
        event, mark, rest = data.partition(b"\n\n")
        return event[: len(event) // 2] + mark + rest
