"""Rotary positions: the angles of every position and pair, and the ways models stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions 0 … length−1, fp32 [length, 1, head_dim/2].

    Angles are computed in fp64: at position 100,000 an fp32 angle is off by a hundredth.
    """
    import torch  # noqa: PLC0415  tokenizer and config load without it

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_divisors is not None:
        frequencies /= torch.tensor(config.rope_divisors, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def llama3_divisors(theta: float, head_dim: int, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Return what Llama 3.1 divides each pair's frequency by.

    With λ a pair's wavelength and L the context the model was first trained on: 1 where
    λ < L/high, `factor` where λ > L/low, between them the reciprocal of a blend linear in L/λ.
    Raises KeyError for a missing parameter and ValueError for `high` not above `low`.
    """
    factor, low, high, original = (
        float(parameters[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not (high > low and factor > 0):
        raise ValueError(f"rotary factor {factor}, low_freq_factor {low}, high_freq_factor {high}")
    turns = [original / (2 * math.pi * theta ** (i / head_dim)) for i in range(0, head_dim, 2)]
    kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return tuple(1 / ((1 - share) / factor + share) for share in kept)
