"""Bytes that a product with its bias and activation moves, in one launch and as a chain of launches."""

from __future__ import annotations

from typing import NamedTuple

from engine.kernels.fused import Activation


class Traffic(NamedTuple):
    """Bytes read and written through global memory, each operand counted once per launch."""

    fused: int
    chain: int

    @property
    def saved(self) -> float:
        """The share of the chain's bytes that the one launch does not move."""
        return 1 - self.fused / self.chain


def linear_traffic(
    rows: int,
    inner: int,
    outputs: int,
    *,
    itemsize: int = 2,
    activation: Activation | None = None,
    bias: bool = False,
    quantized: bool = False,
) -> Traffic:
    """Traffic of `linear` [rows, inner] → [rows, outputs] in activations of `itemsize` bytes.

    The chain has a launch for each of: widening int8 weights, scaling them, the product, the bias,
    the activation (for "silu_mul" silu of the gates, then the product with the rest).
    """
    stored = 2 * outputs if activation == "silu_mul" else outputs
    x, weight = rows * inner * itemsize, stored * inner * itemsize
    wide, narrow = rows * stored * itemsize, rows * outputs * itemsize
    scale = offset = 0
    held = weight
    if quantized:
        held, scale = stored * inner, 4 * stored
    if bias:
        offset = 4 * stored
    fused = x + held + scale + offset + narrow
    chain = x + weight + wide
    if quantized:
        chain += (held + weight) + (weight + scale + weight)
    if bias:
        chain += wide + offset + wide
    if activation == "silu_mul":
        chain += (narrow + narrow) + 3 * narrow
    elif activation is not None:
        chain += wide + wide
    return Traffic(fused, chain)
