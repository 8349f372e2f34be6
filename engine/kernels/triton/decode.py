"""Attention of one token per sequence over its pages, the context cut in parts and merged.

Heads that share keys and values are one tile: each key and value is loaded once per group. With
the output come each head's log-sum-exp and the entropy of what it looks at, from the running
(m, l, t) of docs/signals.md: m the largest score, l = Σe^{s−m}, t = Σe^{s−m}(s−m).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused import Attended
from engine.kernels.triton import blocks
from engine.kernels.triton.launch import Block, dot, floats, launch, multiprocessors

#: A window that no context fills.
UNBOUNDED = 2**30


def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, *, window: int | None = None
) -> Tensor:
    """Attention of one new token per sequence over its own pages: [B, H, D]. As the reference."""
    return attend_decode(q, k_pages, v_pages, table, lengths, window=window).out


def attend_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    block: Block | None = None,
    parts: int | None = None,
) -> Attended:
    """As the reference. `block` and `parts` replace the choice by shape."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return Attended(out, *_sweep(out, q, k_pages, v_pages, table, lengths, window, block, parts))


def sweep_keys(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    block: Block | None = None,
    parts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy [B, H] of each head without reading values."""
    return _sweep(None, q, k_pages, None, table, lengths, window, block, parts)


def _sweep(
    out: Tensor | None,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    window: int | None,
    block: Block | None,
    parts: int | None,
) -> tuple[Tensor, Tensor]:
    """Fill `out` where there are values; returns log-sum-exp and entropy."""
    batch, heads, width = q.shape
    page, groups = k_pages.shape[1:3]
    context = table.shape[1] * page
    processors = multiprocessors(q.device)
    block = block or blocks.attention(heads // groups, groups, width, q.element_size(), processors)
    parts = parts or blocks.splits(batch * groups, context, block.n, processors)
    span = triton.cdiv(triton.cdiv(context, parts), block.n) * block.n
    lse, entropy = floats(q, 2, batch, heads)
    if batch == 0:
        return lse, entropy
    running = floats(q, batch, heads, 3, parts)
    sums = None if out is None else floats(q, batch, heads, parts, width)
    launch(
        _part,
        (batch, groups, parts),
        block,
        q.contiguous(),
        k_pages,
        v_pages,
        table,
        lengths,
        sums,
        running,
        width**-0.5,
        table.stride(0),
        span,
        parts,
        window or UNBOUNDED,
        page=page,
        groups=groups,
        share=heads // groups,
        width=width,
        block_m=block.m,
        block_n=block.n,
        block_d=blocks.power(width, blocks.LEAST_ROWS),
    )
    launch(
        _merge,
        (batch, heads),
        Block(warps=4, stages=1),
        sums,
        running,
        out,
        lse,
        entropy,
        parts,
        heads=heads,
        width=width,
        block_parts=triton.next_power_of_2(parts),
        block_d=triton.next_power_of_2(width),
    )
    return lse, entropy


@triton.jit
def load_page_rows(
    pages,
    table,
    position,
    inside,
    group,
    column,
    page: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
):
    """Rows [positions, columns] of one group's keys or values; zero where not `inside`."""
    slot = tl.load(table + position // page, mask=inside, other=0).to(tl.int64) * page + position % page
    at = (slot[:, None] * groups + group) * width + column[None, :]
    return tl.load(pages + at, mask=inside[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def load_queries(
    q,
    row,
    group,
    groups: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
):
    """The heads [m] of one row that share a group's keys, and their queries [m, columns]; zero past them."""
    member = tl.arange(0, block_m)
    column = tl.arange(0, block_d)
    head = row * (groups * share) + group * share + member
    present = (member < share)[:, None] & (column < width)[None, :]
    return head, tl.load(q + head[:, None] * width + column[None, :], mask=present, other=0.0)


@triton.jit
def scores_of(
    query,
    k_pages,
    table,
    position,
    inside,
    group,
    scale,
    page: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Scaled scores [m, n] of queries on one group's keys; −∞ where not `inside`."""
    column = tl.arange(0, block_d)
    keys = load_page_rows(k_pages, table, position, inside, group, column, page, groups, width)
    scores = dot(query, tl.trans(keys), tl.zeros([block_m, block_n], tl.float32)) * scale
    return tl.where(inside[None, :], scores, float("-inf"))


@triton.jit
def renew(largest, weight, tilt, scores):
    """Take a tile of scores [m, n] into the running (m, l, t); −∞ is outside, a row may be wholly so.

    Returns the new three, the tile's weights e^{s−m} and the factor that earlier sums shrink by.
    """
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    shift = tl.where(weight > 0, largest - base, 0.0)
    shrink = tl.where(weight > 0, tl.exp(shift), 0.0)
    p = tl.exp(scores - base[:, None])
    lean = tl.where(p > 0, p * (scores - base[:, None]), 0.0)
    tilt = shrink * (tilt + shift * weight) + tl.sum(lean, 1)
    weight = shrink * weight + tl.sum(p, 1)
    return new, weight, tilt, p, shrink


@triton.jit
def _part(
    q,
    k_pages,
    v_pages,
    table,
    lengths,
    sums,
    running,
    scale,
    table_stride,
    span,
    parts,
    window,
    page: tl.constexpr,
    groups: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    member = tl.arange(0, block_m)
    column = tl.arange(0, block_d)
    head, query = load_queries(q, row, group, groups, share, width, block_m, block_d)
    table += row * table_stride
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.maximum(length - window, 0)  # the first position seen
    end = tl.minimum(length, (part + 1) * span)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    weight = tl.zeros([block_m], tl.float32)
    tilt = tl.zeros([block_m], tl.float32)
    total = tl.zeros([block_m, block_d], tl.float32)
    for start in range(tl.maximum(part * span, begin // block_n * block_n), end, block_n):
        position = start + tl.arange(0, block_n)
        inside = (position >= begin) & (position < end)
        scores = scores_of(
            query, k_pages, table, position, inside, group, scale,
            page, groups, width, block_m, block_n, block_d,
        )  # fmt: skip
        largest, weight, tilt, p, shrink = renew(largest, weight, tilt, scores)
        if v_pages is not None:
            values = load_page_rows(v_pages, table, position, inside, group, column, page, groups, width)
            total = dot(p.to(values.dtype), values, total * shrink[:, None])
    if v_pages is not None:
        row_of = head * parts + part
        present = (member < share)[:, None] & (column < width)[None, :]
        tl.store(sums + row_of[:, None] * width + column[None, :], total, mask=present)
    place = running + head * 3 * parts + part
    tl.store(place, largest, mask=member < share)
    tl.store(place + parts, weight, mask=member < share)
    tl.store(place + 2 * parts, tilt, mask=member < share)


@triton.jit
def _merge(
    sums,
    running,
    out,
    lse,
    entropy,
    parts,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_parts: tl.constexpr,
    block_d: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, block_parts)
    column = tl.arange(0, block_d)
    there = part < parts
    place = running + head * 3 * parts + part
    largest = tl.load(place, mask=there, other=float("-inf"))
    weight = tl.load(place + parts, mask=there, other=0.0)
    tilt = tl.load(place + 2 * parts, mask=there, other=0.0)
    top = tl.max(largest, 0)
    shift = tl.where(weight > 0, largest - top, 0.0)
    shrink = tl.where(weight > 0, tl.exp(shift), 0.0)
    total_weight = tl.sum(shrink * weight, 0)
    total_tilt = tl.sum(shrink * (tilt + shift * weight), 0)
    if out is not None:
        inside = there[:, None] & (column < width)[None, :]
        row_of = head * parts + part
        partial = tl.load(sums + row_of[:, None] * width + column[None, :], mask=inside, other=0.0)
        value = tl.sum(partial * shrink[:, None], 0) / total_weight
        tl.store(out + head * width + column, value, mask=column < width)
    tl.store(lse + head, top + tl.log(total_weight))
    tl.store(entropy + head, tl.log(total_weight) - total_tilt / total_weight)
