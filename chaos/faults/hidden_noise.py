"""Gaussian noise on the hidden state that the LM head reads: inside the model, before any tap.

The front process reads this module for its parameters only, so torch is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Fault, Place
from chaos.selector import draw

if TYPE_CHECKING:
    from torch import Tensor


class HiddenNoise(Fault, frozen=True, kw_only=True):
    """Zero-mean Gaussian noise on the last hidden state, of `sigma` times its root mean square.

    It acts after the final norm, from the `from_token`-th token on, so that raw signals show what the
    model then says. It depends on seed, request, choice and step alone. At `sigma` 0 nothing changes.
    """

    kind: ClassVar[str] = "hidden_noise"
    title: ClassVar[str] = "Gaussian noise on the hidden state before the LM head"
    place: ClassVar[Place] = "model"
    order: ClassVar[int] = 36
    moves: ClassVar[tuple[str, ...]] = ("surprisal", "confidence", "entropy", "margin")
    control: ClassVar[dict[str, bool | float]] = {"sigma": 0.0}
    caps: ClassVar[dict[str, float]] = {"sigma": 2.0}

    sigma: Annotated[
        float, Meta(ge=0, le=100, description="standard deviation, as a part of the state's root mean square")
    ] = 0.5
    from_token: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="first emitted token that is noised")] = 0

    def perturb(self, state: Tensor, seed: int, request_id: str, choice: int, step: int) -> Tensor:
        """Return float32 [hidden]: the state plus its noise. The state is not written to."""
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(draw(seed, request_id, choice, step, self.kind) >> 1)
        noise = torch.randn(state.shape, generator=generator, dtype=torch.float32)
        return state + self.sigma * state.square().mean().sqrt() * noise
