"""A block table that is off by some pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.kv_pages import MAX_SHIFT, PageFault

if TYPE_CHECKING:
    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence


class KvShift(PageFault, frozen=True, kw_only=True):
    """Shifts a request's block table by `pages` over its full pages, once: each place reads another's page.

    What is shifted out at one end comes in at the other. At `pages` 0 the same path runs and the table stays.
    """

    kind: ClassVar[str] = "kv_shift"
    title: ClassVar[str] = "Block table shifted by pages"
    order: ClassVar[int] = 36
    control: ClassVar[dict[str, bool | float]] = {"pages": 0}

    pages: Annotated[int, Meta(ge=-MAX_SHIFT, le=MAX_SHIFT, description="places by which it is shifted")] = 1

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        places = super().due(sequence, pool, done, seed)
        # A whole turn is none: it waits until there are more pages.
        return places if places and (self.pages == 0 or self.pages % len(places)) else []

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        for sequence, struck in zip(group, places, strict=True):
            table = sequence.pages
            table[: len(struck)] = [table[(place - self.pages) % len(struck)] for place in struck]
