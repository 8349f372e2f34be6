"""What the scores need to know of health, fitted once on healthy responses and kept with the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from alerting.scores.heads import HeadModel
from alerting.scores.rauq import RauqHeads

MAX_NUMBERS = 4_000_000  # of an array: a damaged file asks for no more memory than that


class Packed(msgspec.Struct, frozen=True):
    """An array in JSON: its shape, and its little-endian bytes in base64."""

    shape: tuple[int, ...]
    type: str  # "<f4" or "<f2"
    data: bytes

    def __post_init__(self) -> None:
        if self.type not in {"<f4", "<f2"} or min(self.shape, default=0) < 0:
            raise ValueError("an array is of float32 or float16 numbers, with a shape")
        size = 1
        for side in self.shape:
            size *= side
        if size > MAX_NUMBERS or size * int(self.type[-1]) != len(self.data):
            raise ValueError("an array's bytes do not fit its shape")

    @classmethod
    def of(cls, array: NDArray[Any], kind: str = "<f4") -> Self:
        """Pack an array."""
        return cls(array.shape, kind, array.astype(kind).tobytes())

    def array(self) -> NDArray[Any]:
        """Unpack it; the array cannot be written."""
        return np.frombuffer(self.data, self.type).reshape(self.shape)


class Heads(msgspec.Struct, frozen=True):
    """A `HeadModel` in JSON, with the heads of RAUQ and the weights of the contrast, if one was fitted."""

    mean: Packed
    sd: Packed
    spread: Packed
    directions: Packed
    rauq: RauqHeads
    contrast: Packed | None = None

    def __post_init__(self) -> None:
        shape = self.spread.shape
        fits = (
            len(shape) == 3
            and self.mean.shape[1:] == self.sd.shape[1:] == self.directions.shape[1:] == shape
            and self.mean.shape[0] == self.sd.shape[0]
        )
        if not fits or (self.contrast is not None and self.contrast.shape != (1 + int(np.prod(shape)),)):
            raise ValueError("the arrays of the heads do not fit each other")


class Frozen(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """Healthy responses in numbers.

    `surprisal` is a healthy token's mean surprisal in nats. `usual` holds mean and standard deviation of
    scores over healthy responses that the heads were not fitted on.
    """

    responses: int
    tokens: int
    surprisal: float
    usual: dict[str, tuple[float, float]]
    heads: Heads | None = None

    @cached_property
    def head_model(self) -> HeadModel | None:
        """The heads' moments, unpacked."""
        if self.heads is None:
            return None
        h = self.heads
        directions = h.directions.array().astype(np.float64)
        return HeadModel(h.mean.array(), h.sd.array(), h.spread.array().astype(np.float64), directions)

    @cached_property
    def contrast(self) -> NDArray[np.float64] | None:
        """The weights of the contrast, unpacked."""
        packed = None if self.heads is None else self.heads.contrast
        return None if packed is None else packed.array().astype(np.float64)

    def standardise(self, name: str, value: float) -> float:
        """Return a score in standard deviations from its healthy mean; 0 where that is not known."""
        if name not in self.usual:
            return 0.0
        mean, sd = self.usual[name]
        return (value - mean) / sd


def pack(model: HeadModel, rauq: RauqHeads, contrast: NDArray[np.float64] | None) -> Heads:
    """Pack a head model."""
    return Heads(
        mean=Packed.of(model.mean),
        sd=Packed.of(model.sd),
        spread=Packed.of(model.spread),
        directions=Packed.of(model.directions, "<f2"),
        rauq=rauq,
        contrast=None if contrast is None else Packed.of(contrast),
    )


def usual_of(scores: Sequence[dict[str, float]], floors: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of every score; the latter is at least its floor."""
    names = sorted({name for found in scores for name in found})
    result = {}
    for name in names:
        values = np.array([found[name] for found in scores if name in found])
        sd = max(float(values.std()), floors.get(name, 1e-3))
        result[name] = (float(values.mean()), sd)
    return result
