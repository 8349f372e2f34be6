"""Faults in the device tier of the KV cache: when they strike a request, and what they share.

The front process reads these modules for their parameters only, so torch is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Fault, Place

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kv.pages import PagePool
    from engine.models.config import ModelConfig
    from engine.scheduler import Sequence

#: The range of a shift in positions or pages.
MAX_SHIFT = 32_768
HEAD_SIGNALS = ("head_kl", "sink_mass", "prev_attention", "lookback")


class PageFault(Fault, frozen=True, kw_only=True):
    """A fault that acts on KV pages of requests that decode, before the step of token `from_token`.

    The caller sees to it that nobody else owns the pages that `strike` is given, and that nobody will.
    """

    place: ClassVar[Place] = "model"
    moves: ClassVar[tuple[str, ...]] = HEAD_SIGNALS

    from_token: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="emitted token before which it strikes, at the earliest")
    ] = 1

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        """Return which of a request's pages it strikes now, by place; `done`: full pages when it last did.

        Full pages alone are looked at. Without more to say: all of them, once.
        """
        return [] if done else full_pages(sequence, pool)

    def groups(self, due: list[Sequence]) -> list[list[Sequence]]:
        """Return which of the requests that it could strike now it strikes, and which of them together."""
        return [[sequence] for sequence in due]

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        """Change the pages at `places` of each of `group`, which nobody else owns."""
        raise NotImplementedError


class KeyFault(PageFault, frozen=True, kw_only=True):
    """A fault that moves all keys of a request in a range of layers."""

    first_layer: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="the first layer that it acts in")] = 0
    layers: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="how many layers from there on; 0: all of them")
    ] = 0

    def due(self, sequence: Sequence, pool: PagePool, done: int, seed: int) -> list[int]:
        return super().due(sequence, pool, done, seed) if self.first_layer < len(pool.keys) else []

    def strike(
        self, group: list[Sequence], places: list[list[int]], pool: PagePool, config: ModelConfig, seed: int
    ) -> None:
        last = self.first_layer + (self.layers or len(pool.keys))
        keys = pool.keys.flatten(1, 2)[self.first_layer : last]
        for sequence in group:
            slots = filled_slots(sequence, pool)
            keys[:, slots] = self.moved(keys[:, slots], config)

    def moved(self, keys: Tensor, config: ModelConfig) -> Tensor:
        """Return keys [layers, positions, kv heads, head width] as they shall be. Writes to nothing."""
        raise NotImplementedError


def full_pages(sequence: Sequence, pool: PagePool) -> list[int]:
    """Return the places of a request's pages that are full and will not be written again."""
    return list(range(sequence.computed // pool.page_size))


def filled_slots(sequence: Sequence, pool: PagePool) -> Tensor:
    """Return page · page size + offset of each computed position, int64 [positions]."""
    import torch  # noqa: PLC0415

    pages = torch.tensor(sequence.pages)[:, None] * pool.page_size + torch.arange(pool.page_size)
    return pages.flatten()[: sequence.computed].to(pool.keys.device)
