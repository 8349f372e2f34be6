"""Gaussian noise on the logits before sampling.

The front process reads this module for its parameters only, so torch is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Fault, Place
from chaos.selector import draw

if TYPE_CHECKING:
    from torch import Tensor


class Noise(Fault, frozen=True, kw_only=True):
    """Zero-mean Gaussian noise of standard deviation `sigma`, from the `from_token`-th token on.

    A row's noise depends on seed, request, choice and step alone, so it is the same in any batch
    and on any device. At `sigma` 0 the same path runs and the numbers stay as they were.
    """

    kind: ClassVar[str] = "noise"
    title: ClassVar[str] = "Gaussian noise on the logits before sampling"
    place: ClassVar[Place] = "model"
    order: ClassVar[int] = 40
    moves: ClassVar[tuple[str, ...]] = ("surprisal", "confidence", "entropy_post", "interruption_rate")
    control: ClassVar[dict[str, bool | float]] = {"sigma": 0.0}
    caps: ClassVar[dict[str, float]] = {"sigma": 10.0}

    sigma: Annotated[float, Meta(ge=0, le=100, description="standard deviation, in logits (nats)")] = 2.0
    from_token: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="first emitted token that is noised")] = 0

    def perturb(self, row: Tensor, seed: int, request_id: str, choice: int, step: int) -> Tensor:
        """Return float32 [vocab]: the row plus its noise. The row is not written to."""
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(draw(seed, request_id, choice, step) >> 1)
        noise = torch.randn(row.shape, generator=generator, dtype=torch.float32)
        return row + self.sigma * noise.to(row.device)
