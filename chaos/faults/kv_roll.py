"""Keys that stand beside other positions' values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.kv_pages import MAX_SHIFT, KeyFault

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence


class KvRoll(KeyFault, frozen=True, kw_only=True):
    """Rolls a request's keys by `positions` against its values in a range of layers, once.

    What is rolled out at one end comes in at the other. At `positions` 0 the same path runs and the
    numbers stay.
    """

    kind: ClassVar[str] = "kv_roll"
    title: ClassVar[str] = "Keys rolled against values"
    order: ClassVar[int] = 37
    control: ClassVar[dict[str, bool | float]] = {"positions": 0}

    positions: Annotated[
        int, Meta(ge=-MAX_SHIFT, le=MAX_SHIFT, description="positions by which keys are rolled")
    ] = 1

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        # A whole turn is none: it waits until there are more positions.
        turned = self.positions and self.positions % sequence.computed == 0
        return [] if turned else super().due(sequence, pool, done, seed)

    def moved(self, keys: Tensor, config: ModelConfig) -> Tensor:
        return keys.roll(self.positions, 1)
