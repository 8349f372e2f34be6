"""Which idle page of the prefix cache is given up first.

A rank never changes while a page lies idle, so that a heap can hold it: what ages all pages alike is
left out. Ranks of one policy are comparable, and only those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from engine.models.config import ModelConfig, weight_shapes

#: Seconds in which what a hit tells about the next one falls to 1 ÷ e.
MEMORY_S: Final = 600.0
#: What a page that was never hit counts for, in hits.
UNPROVEN: Final = 0.1


@dataclass(slots=True)
class Use:
    """How a page was used: `hits`, faded to the time `last` (`time.monotonic`) of its last use."""

    last: float
    hits: float = 0.0

    def touch(self, now: float, hits: int = 0) -> None:
        """Take in that it is used now."""
        self.hits = self.hits * math.exp((self.last - now) / MEMORY_S) + hits
        self.last = now


class Policy(Protocol):
    """Ranks idle pages; the lowest goes first."""

    def rank(self, depth: int, use: Use) -> float:
        """Return the rank of a page with `depth` pages before it."""
        ...


@dataclass(frozen=True, slots=True)
class Recompute:
    """What computing a page takes, in tokens: those it has, and attention's growth with context.

    `growth` is the attention over one token of context ÷ all products of a token; a window bounds it.
    Times seconds a prompt token (`engine.load.StepCost.prompt_s`) it is seconds.
    """

    page_size: int
    growth: float = 0.0
    window: int | None = None

    @classmethod
    def of(cls, config: ModelConfig, page_size: int) -> Recompute:
        """Count a model's products: 2 a weight, and 4 a head's width for each token of context."""
        shapes = weight_shapes(config)
        layers = [math.prod(shape) for name, shape in shapes.items() if ".layers." in name]
        attention = 4 * config.layers * config.heads * config.head_dim
        return cls(page_size, attention / (2 * sum(layers)), config.sliding_window)

    def tokens(self, depth: int) -> float:
        """Return what a page with `depth` pages before it takes."""
        context = (depth + 0.5) * self.page_size
        if self.window is not None:
            context = min(context, self.window)
        return self.page_size * (1 + self.growth * context)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to compute the page again × how likely it is wanted again.

    The likelihood is taken to be proportional to the hits, faded by age: (hits + UNPROVEN) ·
    e^(−age ÷ MEMORY_S). The rank is the product's logarithm but for −now ÷ MEMORY_S and for the seconds
    a token, which are the same for every page.
    """

    recompute: Recompute

    def rank(self, depth: int, use: Use) -> float:
        """Return the logarithm of the cost expected."""
        return math.log(self.recompute.tokens(depth) * (use.hits + UNPROVEN)) + use.last / MEMORY_S


class Lru:
    """The page that was used least recently: the baseline."""

    def rank(self, _depth: int, use: Use) -> float:
        """Return the time of the last use."""
        return use.last
