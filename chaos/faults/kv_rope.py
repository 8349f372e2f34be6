"""Keys rotated to positions where they do not stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.kv_pages import MAX_SHIFT, KeyFault

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.config import ModelConfig


class KvRope(KeyFault, frozen=True, kw_only=True):
    """Rotates a request's keys on by `positions` in a range of layers, once, as if they stood so much later.

    Tokens that come after stand where they should. At `positions` 0 the same path runs and the numbers stay.
    """

    kind: ClassVar[str] = "kv_rope"
    title: ClassVar[str] = "Keys rotated to other positions"
    order: ClassVar[int] = 38
    control: ClassVar[dict[str, bool | float]] = {"positions": 0}

    positions: Annotated[
        int, Meta(ge=-MAX_SHIFT, le=MAX_SHIFT, description="positions by which keys are rotated on")
    ] = 8

    def moved(self, keys: Tensor, config: ModelConfig) -> Tensor:
        import torch  # noqa: PLC0415

        from engine.models import rotary  # noqa: PLC0415

        distance = abs(self.positions)
        cos, sin = (table[distance].to(keys.device) for table in rotary.tables(config, distance + 1))
        sin = sin if self.positions >= 0 else -sin
        one, other = keys.float().chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(keys.dtype)
