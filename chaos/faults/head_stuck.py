"""Attention heads stuck on one position, as on a padding token that everybody looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import MAX_COUNT
from chaos.faults.kv_pages import HEAD_SIGNALS, MAX_SHIFT, PageFault

if TYPE_CHECKING:
    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence


class HeadStuck(PageFault, frozen=True, kw_only=True):
    """Adds `pull` times the first token's key to the key at `position`, for one head of one layer, once.

    The first token is the attention sink: most queries like its key, so they then see little else. The key is
    rotated to where it is put. Query heads that share the head's keys are stuck with it. At `pull` 0 the
    same path runs and the numbers stay. Waits while `position` is not computed.
    """

    kind: ClassVar[str] = "head_stuck"
    title: ClassVar[str] = "Attention heads stuck on one position"
    order: ClassVar[int] = 39
    moves: ClassVar[tuple[str, ...]] = (*HEAD_SIGNALS, "head_kl_nonsink")
    control: ClassVar[dict[str, bool | float]] = {"pull": 0.0}

    layer: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="layer")] = 10
    head: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="query head; those with the same keys follow")
    ] = 0
    position: Annotated[int, Meta(ge=0, le=MAX_SHIFT, description="position of the context it looks at")] = 0
    pull: Annotated[float, Meta(ge=0, le=1000, description="how much of the sink's key is added")] = 8.0

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        if self.layer >= len(pool.keys) or self.position >= sequence.computed:
            return []
        return super().due(sequence, pool, done, seed)

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        import torch  # noqa: PLC0415

        from engine.models import rotary  # noqa: PLC0415

        shared = (self.head % config.heads) * config.kv_heads // config.heads
        cos, sin = (table[self.position, 0] for table in rotary.tables(config, self.position + 1))
        for sequence in group:
            keys = pool.keys[self.layer]  # [pages, page size, kv heads, width]
            page, offset = divmod(self.position, pool.page_size)
            sink = keys[sequence.pages[0], 0, shared].float().cpu()
            one, other = sink.chunk(2, dim=-1)
            added = self.pull * torch.cat([one * cos - other * sin, other * cos + one * sin])
            keys[sequence.pages[page], offset, shared] += added.to(keys)
