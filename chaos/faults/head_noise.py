"""Gaussian noise on the weights of the LM head, as after a bad load or a careless quantisation.

The front process reads this module for its parameters only, so torch is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import Fault, Place
from chaos.selector import draw

if TYPE_CHECKING:
    from torch import Tensor

_PROBES = 64
_ROWS = 4096  # drawn at a time


class HeadNoise(Fault, frozen=True, kw_only=True):
    """Zero-mean Gaussian noise on every weight of the LM head, of `sigma` times their root mean square.

    The same wrong weights for every selected request, drawn from the seed; without a selector, for the
    whole process. The weights themselves stay as they are: what the noise adds to a row's logits is added.
    At `sigma` 0 nothing changes. Drawing takes the model process some tenths of a second, and 2 bytes
    a weight until the fault ends.
    """

    kind: ClassVar[str] = "head_noise"
    title: ClassVar[str] = "Gaussian noise on the weights of the LM head"
    place: ClassVar[Place] = "model"
    order: ClassVar[int] = 37
    moves: ClassVar[tuple[str, ...]] = ("surprisal", "confidence", "entropy", "margin")
    control: ClassVar[dict[str, bool | float]] = {"sigma": 0.0}
    caps: ClassVar[dict[str, float]] = {"sigma": 2.0}

    sigma: Annotated[
        float,
        Meta(ge=0, le=100, description="standard deviation, as a part of the weights' root mean square"),
    ] = 0.5

    def weights(self, head: Callable[[Tensor], Tensor], hidden: int, seed: int) -> Tensor:
        """Return what is added to the weights of `head` ([R, hidden] → [R, vocab]), bfloat16 [vocab, hidden].

        A weight's root mean square is that of a logit over that of a state, on states of white noise.
        """
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(draw(seed, self.kind) >> 1)
        logits = head(torch.randn((_PROBES, hidden), generator=generator))
        scale = self.sigma * float((logits.square().mean() / hidden).sqrt())
        found = torch.empty((logits.shape[1], hidden), dtype=torch.bfloat16)
        for first in range(0, len(found), _ROWS):
            part = found[first : first + _ROWS]
            part.copy_(scale * torch.randn(part.shape, generator=generator))
        return found
