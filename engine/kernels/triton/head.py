"""The LM head without logits: statistics of rows by tiles of the vocabulary, then one merge.

Rows of all kinds stack (the step's last hidden states and those of sampled layers): the weights
are read once for all of them. Each tile leaves its running (m, l, t), its best tokens and the
logit of the row's chosen token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused import HeadRows
from engine.kernels.triton import blocks
from engine.kernels.triton.launch import Block, dot, floats, launch

#: Most tokens that `lm_head` ranks.
MOST_TOP = 32


def lm_head(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor | None = None,
    top: int = 2,
    block: Block | None = None,
) -> HeadRows:
    """Statistics of hidden·Wᵀ for normed rows [R, hidden] and weights [V, hidden].

    `tokens` int64 [R] are chosen tokens, −1 for none. Products are of the wider of the two dtypes,
    sums fp32. `block` replaces the choice by shape. Raises ValueError unless 1 ≤ top ≤ 32 and V.
    """
    rows, inner = hidden.shape
    vocab = weight.shape[0]
    if not 1 <= top <= min(MOST_TOP, vocab):
        raise ValueError(f"top is {top}; it must be 1 … {min(MOST_TOP, vocab)}")
    block = block or blocks.head(rows, max(hidden.element_size(), weight.element_size()))
    tiles = triton.cdiv(vocab, block.n)
    running = floats(hidden, rows, 3, tiles)
    best = floats(hidden, rows, tiles, top)
    best_tokens = torch.empty((rows, tiles, top), dtype=torch.int32, device=hidden.device)
    lse, entropy, chosen = floats(hidden, 3, rows)
    found = HeadRows(
        lse,
        entropy,
        floats(hidden, rows, top),
        torch.empty((rows, top), dtype=torch.int64, device=hidden.device),
        chosen if tokens is not None else chosen.fill_(float("nan")),
    )
    if rows == 0:
        return found
    launch(
        _tile,
        (triton.cdiv(rows, block.m), tiles),
        block,
        hidden.contiguous(),
        weight,
        tokens,
        running,
        best,
        best_tokens,
        chosen,
        rows,
        tiles,
        vocab=vocab,
        inner=inner,
        top=top,
        block_m=block.m,
        block_n=block.n,
        block_k=block.k,
    )
    launch(
        _merge,
        (rows,),
        Block(warps=4, stages=1),
        running,
        best,
        best_tokens,
        *found[:4],
        tiles,
        top=top,
        block_tiles=triton.next_power_of_2(tiles),
    )
    return found


@triton.jit
def _tile(
    hidden,
    weight,
    tokens,
    running,
    best,
    best_tokens,
    chosen,
    rows,
    tiles,
    vocab: tl.constexpr,
    inner: tl.constexpr,
    top: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    row = (tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    tile = tl.program_id(1)
    column = tl.arange(0, block_n)
    token = tile * block_n + column
    step = tl.arange(0, block_k)
    there = row < rows
    to_hidden = hidden + row[:, None] * inner + step[None, :]
    to_weight = weight + token.to(tl.int64)[None, :] * inner + step[:, None]
    logits = tl.zeros([block_m, block_n], tl.float32)
    for start in range(0, inner, block_k):
        rest = step < inner - start
        values = tl.load(to_hidden + start, mask=there[:, None] & rest[None, :], other=0.0)
        weights = tl.load(to_weight + start, mask=(token < vocab)[None, :] & rest[:, None], other=0.0)
        if values.dtype != weights.dtype:
            values = values.to(tl.float32)
            weights = weights.to(tl.float32)
        logits = dot(values, weights, logits)
    logits = tl.where((token < vocab)[None, :], logits, float("-inf"))

    if tokens is not None:
        wanted = tl.load(tokens + row, mask=there, other=-1)
        hit = tl.sum(tl.where(wanted[:, None] == token[None, :], logits, 0.0), 1)
        in_tile = (wanted >= tile * block_n) & (wanted < tile * block_n + block_n)
        tl.store(chosen + row, hit, mask=there & in_tile)
        tl.store(chosen + row, tl.full([block_m], float("nan"), tl.float32), mask=there & (wanted < 0))

    largest = tl.max(logits, 1)
    shifted = logits - largest[:, None]
    p = tl.exp(shifted)
    place = running + row * 3 * tiles + tile
    tl.store(place, largest, mask=there)
    tl.store(place + tiles, tl.sum(p, 1), mask=there)
    tl.store(place + 2 * tiles, tl.sum(tl.where(p > 0, p * shifted, 0.0), 1), mask=there)
    slot = (row * tiles + tile) * top
    for i in range(top):
        value, where = tl.max(logits, 1, return_indices=True)
        tl.store(best + slot + i, value, mask=there)
        tl.store(best_tokens + slot + i, tile * block_n + where, mask=there)
        logits = tl.where(column[None, :] == where[:, None], float("-inf"), logits)


@triton.jit
def _merge(
    running,
    best,
    best_tokens,
    lse,
    entropy,
    top_logits,
    top_tokens,
    tiles,
    top: tl.constexpr,
    block_tiles: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block_tiles)
    there = tile < tiles
    place = running + row * 3 * tiles + tile
    largest = tl.load(place, mask=there, other=float("-inf"))
    weight = tl.load(place + tiles, mask=there, other=0.0)
    tilt = tl.load(place + 2 * tiles, mask=there, other=0.0)
    most = tl.max(largest, 0)
    shift = tl.where(there, largest - most, 0.0)
    shrink = tl.where(there, tl.exp(shift), 0.0)
    total = tl.sum(shrink * weight, 0)
    lean = tl.sum(shrink * (tilt + shift * weight), 0)
    tl.store(lse + row, most + tl.log(total))
    tl.store(entropy + row, tl.log(total) - lean / total)

    # Each tile's list is sorted: only the first of what is left of it can be next.
    lists = row * tiles * top
    values = tl.load(best + lists + tile * top, mask=there, other=float("-inf"))
    taken = tl.zeros([block_tiles], tl.int32)
    for i in range(top):
        value, where = tl.max(values, 0, return_indices=True)
        is_best = tile == where
        winner = lists + where * top + tl.sum(tl.where(is_best, taken, 0), 0)
        tl.store(top_logits + row * top + i, value)
        tl.store(top_tokens + row * top + i, tl.load(best_tokens + winner))
        taken += is_best.to(tl.int32)
        following = tl.load(
            best + lists + tile * top + taken, mask=is_best & (taken < top), other=float("-inf")
        )
        values = tl.where(is_best, following, values)
