"""A connection that breaks in mid answer."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.streams import Piece, StreamFault


class StreamCut(StreamFault, frozen=True, kw_only=True):
    """Closes the connection in place of the piece `at`. The server sees what it sees of a broken network: a
    client that is gone.

    The control takes the same path and sends the piece.
    """

    kind: ClassVar[str] = "stream_cut"
    title: ClassVar[str] = "Connection closed in mid answer"
    order: ClassVar[int] = 53
    moves: ClassVar[tuple[str, ...]] = ("interruption_rate",)
    control: ClassVar[dict[str, bool | float]] = {"spare": True}

    at: Piece = 3
    spare: Annotated[bool, Meta(description="control: the connection stays open")] = False

    def change(self, data: bytes, number: int, seed: int) -> bytes | None:
        return data if self.spare or number != self.at else None
