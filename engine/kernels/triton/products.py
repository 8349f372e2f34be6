"""A product with weights, its bias and its activation in one launch.

The accumulator never leaves the registers before the activation; INT8 weights are widened in
the registers too, their scale applied once per output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused import Activation
from engine.kernels.triton import blocks
from engine.kernels.triton.launch import Block, dot, launch, multiprocessors, widened


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    scale: Tensor | None = None,
    block: Block | None = None,
) -> Tensor:
    """Return act(x·Wᵀ·scale + bias) [T, out] in `x`'s dtype, accumulated in fp32.

    `x` [T, in]; `weight` [out, in] in `x`'s dtype, or int8 with `scale` fp32 [out]. "gelu" is the
    tanh form. "silu_mul" takes `weight` [2·out, in], gates first, and returns silu(gate)·up.
    `block` replaces the choice by shape. Raises ValueError for weights of another dtype.
    """
    quantized = weight.dtype == torch.int8
    if weight.dtype != x.dtype and not quantized:
        raise ValueError(f"weights are {weight.dtype}, inputs {x.dtype}; weights may be the same or int8")
    if quantized != (scale is not None):
        raise ValueError("int8 weights need a scale per output, and no others do")
    count, inner = x.shape
    pair = activation == "silu_mul"
    outputs = weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((count, outputs), dtype=x.dtype, device=x.device)
    block = block or blocks.gemm(count, outputs, pair, x.element_size(), multiprocessors(x.device))
    if count:
        launch(
            _linear,
            (triton.cdiv(count, block.m), triton.cdiv(outputs, block.n)),
            block,
            x.contiguous(),
            weight,
            bias,
            scale,
            out,
            count,
            outputs=outputs,
            inner=inner,
            activation=activation,
            block_m=block.m,
            block_n=block.n,
            block_k=block.k,
        )
    return out


@triton.jit
def _scaled(total, scale, bias, output, inside):
    """Apply one output's scale and bias to the accumulator [m, n]."""
    if scale is not None:
        total *= tl.load(scale + output, mask=inside, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _linear(
    x,
    weight,
    bias,
    scale,
    out,
    count,
    outputs: tl.constexpr,
    inner: tl.constexpr,
    activation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    # Programs that run together share a tile of weights: the rows' axis runs first.
    row = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    output = tl.program_id(1) * block_n + tl.arange(0, block_n)
    step = tl.arange(0, block_k)
    there = row < count
    inside = output < outputs
    to_x = x + row[:, None] * inner + step[None, :]
    to_weight = weight + output.to(tl.int64)[None, :] * inner + step[:, None]
    total = tl.zeros([block_m, block_n], tl.float32)
    second = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, inner, block_k):
        if inner % block_k == 0:
            values = tl.load(to_x + start, mask=there[:, None], other=0.0)
            mask = inside[None, :]
        else:
            rest = step < inner - start
            values = tl.load(to_x + start, mask=there[:, None] & rest[None, :], other=0.0)
            mask = inside[None, :] & rest[:, None]
        weights = tl.load(to_weight + start, mask=mask, other=0)
        total = dot(values, widened(weights, values), total)
        if activation == "silu_mul":
            weights = tl.load(to_weight + outputs * inner + start, mask=mask, other=0)
            second = dot(values, widened(weights, values), second)
    total = _scaled(total, scale, bias, output, inside)
    if activation == "relu":
        total = tl.maximum(total, 0.0)
    elif activation == "gelu":
        # 1 + tanh(u) = 2·sigmoid(2u)
        total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    elif activation == "silu_mul":
        total *= tl.sigmoid(total) * _scaled(second, scale, bias, output + outputs, inside)
    tl.store(out + row[:, None] * outputs + output[None, :], total, mask=there[:, None] & inside[None, :])
