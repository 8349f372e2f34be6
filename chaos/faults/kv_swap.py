"""Pages that two requests have of each other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.kv_pages import MAX_SHIFT, PageFault
from chaos.selector import draw

if TYPE_CHECKING:
    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence


class KvSwap(PageFault, frozen=True, kw_only=True):
    """Swaps `pages` pages between two selected requests of one tenant that run together, once.

    The pages keep their places and are drawn among those that both have; never is a page swapped with another
    tenant's. A request without a partner waits for one. At `pages` 0 the same path runs and every page stays.
    """

    kind: ClassVar[str] = "kv_swap"
    title: ClassVar[str] = "Pages swapped between requests that run together"
    order: ClassVar[int] = 39
    control: ClassVar[dict[str, bool | float]] = {"pages": 0}

    pages: Annotated[int, Meta(ge=0, le=MAX_SHIFT, description="pages swapped, as far as both have them")] = 4

    def groups(self, due: list[Sequence]) -> list[list[Sequence]]:
        tenants: dict[str, list[Sequence]] = {}
        for sequence in due:
            tenants.setdefault(sequence.request.meta.tenant, []).append(sequence)
        return [mates[i - 1 : i + 1] for mates in tenants.values() for i in range(1, len(mates), 2)]

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        one, other = (sequence.pages for sequence in group)
        common = range(min(map(len, places)))
        source = random.Random(draw(seed, *(part for sequence in group for part in sequence.key)))
        for place in source.sample(common, min(self.pages, len(common))):
            one[place], other[place] = other[place], one[place]
