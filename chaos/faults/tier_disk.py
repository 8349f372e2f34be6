"""Faults in the tiers of the KV cache below the page pool, and what those of the disk share.

They act on the whole model process: blocks of a tier are no one request's. Which blocks are struck depends on
the seed and the block's name alone. What they do to the bytes must be noticed by the tiers' checksums.

The front process reads these modules for their parameters only.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from chaos.faults.base import Fault, Tier
from chaos.selector import draw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CORRUPT, ERRORS = "quaver_kv_tier_corrupt", "quaver_kv_tier_errors"
LATE, MISSES = "quaver_kv_tier_late", "quaver_kv_tier_misses"
REFUSED = "quaver_kv_tier_refused"

On = Annotated[Literal["both", "reads", "writes"], Meta(description="what is struck")]
Burst = Annotated[int, Meta(ge=1, le=4096, description="adjacent bits flipped at a time")]


class TierFault(Fault, frozen=True, kw_only=True):
    """A fault of the host or the disk tier. At `share` 0 the same path runs and no block is struck."""

    place: ClassVar[Literal["prompt", "model"]] = "model"
    scope: ClassVar[Literal["request", "process"]] = "process"
    control: ClassVar[dict[str, bool | float]] = {"share": 0}

    share: Annotated[float, Meta(ge=0, le=1, description="share of the blocks that are struck")] = 1.0

    def strikes(self, seed: int, block: str) -> bool:
        """Say whether a block is struck, by its name in hexadecimal digits."""
        return draw(seed, block) < self.share * 2.0**64

    def source(self, seed: int, block: str) -> random.Random:
        """Return the randomness that is this block's own."""
        return random.Random(draw(seed, block, "where"))


class DiskFault(TierFault, frozen=True, kw_only=True):
    """A fault of the disk. It acts on calls that read and write blocks, on the disk tier's own threads."""

    tier: ClassVar[Tier | None] = "disk"

    @property
    def struck(self) -> str:
        """What is struck: `both`, `reads` or `writes`."""
        return "both"

    @property
    def delay_s(self) -> float:
        """Seconds that pass before a block is read or written."""
        return 0.0

    @property
    def error(self) -> int | None:
        """What reading or writing fails with (`errno`); None: it does not."""
        return None

    def read(self, data: memoryview, source: random.Random) -> None:
        """Change in place what was read of a block."""

    def lost(self, size: int, source: random.Random) -> range:
        """Return which of the `size` bytes of a block never reach the disk, although it says so."""
        return range(0)

    def acts_on(self, writes: bool) -> bool:
        """Say whether writing or reading is struck."""
        return self.struck in ("both", "writes" if writes else "reads")


def flip(data: memoryview | NDArray[np.uint8], burst: int, source: random.Random) -> None:
    """Flip `burst` adjacent bits somewhere in bytes; all of them where there are fewer."""
    bits = 8 * len(data)
    start = source.randrange(max(bits - burst, 0) + 1)
    for bit in range(start, min(start + burst, bits)):
        data[bit // 8] ^= 1 << bit % 8
