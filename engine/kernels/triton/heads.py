"""What each head looks at, for the rows that are sampled.

Two sweeps over the keys: the first (or the attention itself) gives every head's log-sum-exp,
the second has all heads' probabilities of a position at hand and so their mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import blocks
from engine.kernels.triton.decode import UNBOUNDED, load_queries, scores_of, sweep_keys
from engine.kernels.triton.launch import NEGLIGIBLE, Block, floats, launch, multiprocessors


def head_statistics(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    *,
    window: int | None = None,
    lse: Tensor | None = None,
    block: Block | None = None,
    parts: int | None = None,
) -> Tensor:
    """As the reference: [R, 5, H] fp32, NaN is absent.

    `lse` [R, H] of the rows' scaled scores saves the first sweep where attention has kept it.
    `block` and `parts` replace the choice by shape. Scratch: the heads' mean, fp32 [R, context].
    """
    rows, heads, width = q.shape
    page, groups = k_pages.shape[1:3]
    context = table.shape[1] * page
    processors = multiprocessors(q.device)
    block = block or blocks.attention(heads // groups, groups, width, q.element_size(), processors)
    parts = parts or blocks.splits(rows * groups, context, block.n, processors)
    if lse is None:
        lse, _ = sweep_keys(q, k_pages, table, lengths, window=window, block=block, parts=parts)
    span = triton.cdiv(triton.cdiv(context, parts), block.n) * block.n
    mean = floats(q, rows, context)
    sums = floats(q, rows, parts, 5, heads)
    found = floats(q, rows, 5, heads)
    if rows == 0:
        return found
    queries = q.contiguous()
    sizes = {
        "page": page,
        "groups": groups,
        "share": heads // groups,
        "width": width,
        "block_m": block.m,
        "block_n": block.n,
        "block_d": blocks.power(width, blocks.LEAST_ROWS),
    }
    given = (queries, k_pages, table, lengths, lse, mean)
    strides = (width**-0.5, table.stride(0), context, window or UNBOUNDED)
    launch(_mean, (rows, triton.cdiv(context, block.n)), block, *given, *strides, **sizes)
    launch(
        _sums,
        (rows, groups, parts),
        block,
        *given,
        sums,
        prompt_lengths,
        *strides,
        span,
        parts,
        **sizes,
    )
    launch(
        _statistics,
        (rows,),
        Block(warps=4, stages=1),
        sums,
        mean,
        lengths,
        prompt_lengths,
        found,
        context,
        parts,
        heads=heads,
        block_heads=triton.next_power_of_2(heads),
    )
    return found


@triton.jit
def _probabilities(
    q,
    k_pages,
    table,
    lse,
    row,
    group,
    position,
    inside,
    scale,
    page: tl.constexpr,
    groups: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Log-probabilities and probabilities [m, n] of a group's heads; zero probability outside."""
    head, query = load_queries(q, row, group, groups, share, width, block_m, block_d)
    total = tl.load(lse + head, mask=tl.arange(0, block_m) < share, other=float("inf"))
    scores = scores_of(
        query, k_pages, table, position, inside, group, scale,
        page, groups, width, block_m, block_n, block_d,
    )  # fmt: skip
    log_p = scores - total[:, None]
    return log_p, tl.exp(log_p)


@triton.jit
def _mean(
    q,
    k_pages,
    table,
    lengths,
    lse,
    mean,
    scale,
    table_stride,
    context,
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
    position = tl.program_id(1) * block_n + tl.arange(0, block_n)
    length = tl.load(lengths + row).to(tl.int32)
    inside = (position < length) & (position >= length - window)
    total = tl.zeros([block_n], tl.float32)
    for group in range(groups):
        _, p = _probabilities(
            q, k_pages, table + row * table_stride, lse, row, group, position, inside, scale,
            page, groups, share, width, block_m, block_n, block_d,
        )  # fmt: skip
        total += tl.sum(p, 0)
    tl.store(mean + row * context + position, total / (groups * share), mask=position < context)


@triton.jit
def _sums(
    q,
    k_pages,
    table,
    lengths,
    lse,
    mean,
    sums,
    prompt_lengths,
    scale,
    table_stride,
    context,
    window,
    span,
    parts,
    page: tl.constexpr,
    groups: tl.constexpr,
    share: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Sums over one part of the context: divergence, divergence at 0, p(0), p(previous), p(prompt)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    prompt = tl.load(prompt_lengths + row).to(tl.int32)
    end = tl.minimum(length, (part + 1) * span)
    divergence = tl.zeros([block_m], tl.float32)
    at_sink = tl.zeros([block_m], tl.float32)
    sink = tl.zeros([block_m], tl.float32)
    previous = tl.zeros([block_m], tl.float32)
    on_prompt = tl.zeros([block_m], tl.float32)
    for start in range(part * span, end, block_n):
        position = start + tl.arange(0, block_n)
        inside = (position < end) & (position >= length - window)
        log_p, p = _probabilities(
            q, k_pages, table + row * table_stride, lse, row, group, position, inside, scale,
            page, groups, share, width, block_m, block_n, block_d,
        )  # fmt: skip
        shared = tl.load(mean + row * context + position, mask=inside, other=1.0)
        counts = (p > NEGLIGIBLE) & (shared > NEGLIGIBLE)[None, :]
        term = tl.where(counts, p * (log_p - tl.log(shared)[None, :]), 0.0)
        is_sink = (position == 0)[None, :]
        divergence += tl.sum(tl.where(is_sink, 0.0, term), 1)
        at_sink += tl.sum(tl.where(is_sink, term, 0.0), 1)
        sink += tl.sum(tl.where(is_sink, p, 0.0), 1)
        previous += tl.sum(tl.where((position == length - 2)[None, :], p, 0.0), 1)
        on_prompt += tl.sum(tl.where((position < prompt)[None, :], p, 0.0), 1)
    member = tl.arange(0, block_m)
    heads: tl.constexpr = groups * share
    place = sums + (row * parts + part) * (5 * heads) + group * share + member
    tl.store(place, divergence, mask=member < share)
    tl.store(place + heads, at_sink, mask=member < share)
    tl.store(place + 2 * heads, sink, mask=member < share)
    tl.store(place + 3 * heads, previous, mask=member < share)
    tl.store(place + 4 * heads, on_prompt, mask=member < share)


@triton.jit
def _statistics(
    sums,
    mean,
    lengths,
    prompt_lengths,
    found,
    context,
    parts,
    heads: tl.constexpr,
    block_heads: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)
    there = head < heads
    others = tl.zeros([block_heads], tl.float32)
    at_sink = tl.zeros([block_heads], tl.float32)
    sink = tl.zeros([block_heads], tl.float32)
    previous = tl.zeros([block_heads], tl.float32)
    on_prompt = tl.zeros([block_heads], tl.float32)
    for part in range(parts):
        place = sums + (row * parts + part) * (5 * heads) + head
        others += tl.load(place, mask=there, other=0.0)
        at_sink += tl.load(place + heads, mask=there, other=0.0)
        sink += tl.load(place + 2 * heads, mask=there, other=0.0)
        previous += tl.load(place + 3 * heads, mask=there, other=0.0)
        on_prompt += tl.load(place + 4 * heads, mask=there, other=0.0)
    rest = 1 - sink
    rest_mean = tl.maximum(1 - tl.load(mean + row * context), NEGLIGIBLE)
    split = tl.where(rest > 0, rest * tl.log(rest / rest_mean), 0.0)
    length = tl.load(lengths + row).to(tl.int32)
    prompt = tl.load(prompt_lengths + row).to(tl.float32)
    generated = length.to(tl.float32) - prompt
    nan = tl.full([block_heads], float("nan"), tl.float32)
    per_prompt = on_prompt / prompt
    per_generated = tl.maximum(1 - on_prompt, 0.0) / tl.maximum(generated, 1.0)
    lookback = per_prompt / (per_prompt + per_generated)
    out = found + row * (5 * heads) + head
    tl.store(out, tl.maximum(others + at_sink, 0.0), mask=there)
    tl.store(out + heads, tl.maximum(others - split, 0.0), mask=there)
    tl.store(out + 2 * heads, sink, mask=there)
    tl.store(out + 3 * heads, tl.where(length >= 2, previous, nan), mask=there)
    tl.store(out + 4 * heads, tl.where(generated >= 1, lookback, nan), mask=there)
