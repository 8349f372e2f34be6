"""Causal attention of a chunk of one sequence over its pages.

A tile's rows are tokens × the heads that share keys, so that a group's keys and values are
loaded once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused import Attended
from engine.kernels.triton import blocks
from engine.kernels.triton.decode import UNBOUNDED, load_page_rows, renew
from engine.kernels.triton.launch import Block, dot, floats, launch, multiprocessors


def prefill_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, start: int, *, window: int | None = None
) -> Tensor:
    """Causal attention at positions start … start+T−1 of one sequence: [T, H, D]. As the reference."""
    return attend_prefill(q, k_pages, v_pages, table, start, window=window).out


def attend_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    start: int,
    *,
    window: int | None = None,
    block: Block | None = None,
) -> Attended:
    """As the reference. `block` replaces the choice by shape."""
    count, heads, width = q.shape
    page, groups = k_pages.shape[1:3]
    share = heads // groups
    block = block or blocks.attention(
        count * share, groups, width, q.element_size(), multiprocessors(q.device)
    )
    lse, entropy = floats(q, 2, count, heads)
    found = Attended(torch.empty_like(q, memory_format=torch.contiguous_format), lse, entropy)
    if count:
        launch(
            _prefill,
            (triton.cdiv(count * share, block.m), groups),
            block,
            q.contiguous(),
            k_pages,
            v_pages,
            table,
            *found,
            width**-0.5,
            count,
            start,
            window or UNBOUNDED,
            page=page,
            groups=groups,
            share=share,
            width=width,
            block_m=block.m,
            block_n=block.n,
            block_d=blocks.power(width, blocks.LEAST_ROWS),
        )
    return found


@triton.jit
def _prefill(
    q,
    k_pages,
    v_pages,
    table,
    out,
    lse,
    entropy,
    scale,
    count,
    first,
    window,
    page: tl.constexpr,
    groups: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest work starts first
    group = tl.program_id(1)
    row = tile * block_m + tl.arange(0, block_m)
    column = tl.arange(0, block_d)
    token = row // share
    head = token.to(tl.int64) * (groups * share) + group * share + row % share
    there = token < count
    present = there[:, None] & (column < width)[None, :]
    at = head[:, None] * width + column[None, :]
    query = tl.load(q + at, mask=present, other=0.0)
    seen = first + tl.minimum(token, count - 1)  # the last position that a row may look at
    end = first + tl.minimum(count, (tile * block_m + block_m - 1) // share + 1)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    weight = tl.zeros([block_m], tl.float32)
    tilt = tl.zeros([block_m], tl.float32)
    total = tl.zeros([block_m, block_d], tl.float32)
    begin = tl.maximum(first + tile * block_m // share - window + 1, 0)
    for start in range(begin // block_n * block_n, end, block_n):
        position = start + tl.arange(0, block_n)
        inside = position < end
        keys = load_page_rows(k_pages, table, position, inside, group, column, page, groups, width)
        scores = dot(query, tl.trans(keys), tl.zeros([block_m, block_n], tl.float32)) * scale
        visible = (position[None, :] <= seen[:, None]) & (position[None, :] > seen[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        largest, weight, tilt, p, shrink = renew(largest, weight, tilt, scores)
        values = load_page_rows(v_pages, table, position, inside, group, column, page, groups, width)
        total = dot(p.to(values.dtype), values, total * shrink[:, None])
    tl.store(out + at, total / weight[:, None], mask=present)
    tl.store(lse + head, largest + tl.log(weight), mask=there)
    tl.store(entropy + head, tl.log(weight) - tilt / weight, mask=there)
