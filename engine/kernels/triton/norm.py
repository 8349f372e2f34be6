"""Residual add and root-mean-square norm in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import blocks
from engine.kernels.triton.launch import launch


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Root-mean-square norm of `x` [..., width] in fp32; result in `dtype`, else in `x`'s."""
    return _norm(x, None, weight, eps, dtype or x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` to the residual `x` [T, width] in place and return the sum's norm in `dtype`."""
    return _norm(x, delta, weight, eps, dtype)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = x.numel() // width
    if rows:
        launch(
            _add_norm,
            (rows,),
            blocks.row(width),
            x.contiguous() if delta is None else x,
            delta,
            weight,
            out,
            eps,
            width=width,
            padded=triton.next_power_of_2(width),
        )
    return out


@triton.jit
def _add_norm(x, delta, weight, out, eps, width: tl.constexpr, padded: tl.constexpr):
    columns = tl.arange(0, padded)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * scale * gain, mask=inside)
