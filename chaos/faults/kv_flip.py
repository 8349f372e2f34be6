"""Bits flipped in keys and values, as by a memory that fails."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from chaos.faults.kv_pages import HEAD_SIGNALS, PageFault, full_pages
from chaos.selector import draw

if TYPE_CHECKING:
    from torch import dtype

    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence


class KvFlip(PageFault, frozen=True, kw_only=True):
    """Flips `burst` adjacent bits at a random place of each full page, once or at a `rate`.

    Where depends on seed, request, choice, page and step alone. Flips may make infinities and NaN,
    as they do in a memory. At `burst` 0 the same path runs and no bit changes.
    """

    kind: ClassVar[str] = "kv_flip"
    title: ClassVar[str] = "Bits flipped in the KV cache"
    order: ClassVar[int] = 35
    moves: ClassVar[tuple[str, ...]] = (*HEAD_SIGNALS, "surprisal", "entropy")
    control: ClassVar[dict[str, bool | float]] = {"burst": 0}

    burst: Annotated[int, Meta(ge=0, le=16, description="adjacent bits flipped at a time")] = 1
    bit: Annotated[
        Literal["any", "sign", "exponent", "mantissa"], Meta(description="part of a number that is hit first")
    ] = "exponent"
    where: Annotated[
        Literal["both", "keys", "values"], Meta(description="what is hit; both: drawn each time")
    ] = "both"
    rate: Annotated[
        float, Meta(ge=0, le=1, description="chance of each page in each step; 0: each page once, when full")
    ] = 0.0

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        full = full_pages(sequence, pool)
        if not self.rate:
            return full[done:]
        return [page for page in full if self._random(sequence, page, seed).random() < self.rate]

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        for sequence, struck in zip(group, places, strict=True):
            for place in struck:
                source = self._random(sequence, place, seed)
                source.random()  # spent by `due`
                self._flip(pool, sequence.pages[place], source)

    def _random(self, sequence: Sequence, place: int, seed: int) -> random.Random:
        step = sequence.emitted if self.rate else 0
        return random.Random(draw(seed, *sequence.key, place, step))

    def _flip(self, pool: PagePool, page: int, source: random.Random) -> None:
        import torch  # noqa: PLC0415

        hit = source.choice(("keys", "values")) if self.where == "both" else self.where
        kept = pool.keys if hit == "keys" else pool.values
        slab = kept[source.randrange(len(kept)), page].view(-1)
        bits = slab.view({2: torch.int16, 4: torch.int32}[slab.itemsize])
        width = 8 * slab.itemsize
        element = source.randrange(len(bits) - 1)  # a burst may reach into the next
        start = source.choice(bits_of(slab.dtype, self.bit))
        for bit in range(start, start + self.burst):
            mask = 1 << bit % width
            bits[element + bit // width] ^= mask - (mask << 1) if bit % width == width - 1 else mask


def bits_of(dtype: dtype, part: str) -> range:
    """Return the bits of a part of a number, from 0, the least significant of the mantissa."""
    import torch  # noqa: PLC0415

    info = torch.finfo(dtype)
    mantissa = round(1 / info.eps).bit_length() - 1
    return {
        "any": range(info.bits),
        "mantissa": range(mantissa),
        "exponent": range(mantissa, info.bits - 1),
        "sign": range(info.bits - 1, info.bits),
    }[part]
