"""A misconfigured sampler: every selected request is drawn with someone else's numbers."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Fault, Place
from chaos.selector import draw
from engine.messages import SamplingParams


class Sampler(Fault, frozen=True, kw_only=True):
    """Forces temperature, top-k and top-p on requests, whatever they asked for.

    The model is as it was: raw signals change only by what is drawn. The control takes the same path with
    each request's own values.
    """

    kind: ClassVar[str] = "sampler"
    title: ClassVar[str] = "Sampler with other settings than the request's"
    place: ClassVar[Place] = "model"
    order: ClassVar[int] = 45
    moves: ClassVar[tuple[str, ...]] = ("surprisal", "confidence", "rank", "probe accuracy")
    control: ClassVar[dict[str, bool | float]] = {"own": True}

    temperature: Annotated[float, Meta(ge=0, le=10, description="forced temperature; 0: greedy")] = 1.8
    top_k: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="forced top-k; 0: off")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="forced top-p; 1: off")] = 1.0
    own: Annotated[bool, Meta(description="control: each request keeps its own values")] = False

    def forced(self, params: SamplingParams, seed: int, request_id: str, choice: int) -> SamplingParams:
        """Return how a choice is sampled. One without a seed gets one, so that the fault can be repeated."""
        if self.own:
            return params
        drawn = draw(seed, request_id, choice, self.kind) >> 1
        return msgspec.structs.replace(
            params,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=drawn if params.seed is None else params.seed,
        )
