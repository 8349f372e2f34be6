"""Rotary positions and the write into the KV pages in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import blocks
from engine.kernels.triton.launch import launch


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, store keys and values at `slots` [T], return queries [T, H, D].

    `qkv` [T, H+2G, D]; `cos`, `sin` fp32 [positions, 1, D/2] are the whole tables. `norms` are the
    gains [D] of a norm of each query and key head before the rotation, with `eps`.
    """
    count, heads, width = qkv.shape
    groups = k_pages.shape[2]
    q = torch.empty((count, heads - 2 * groups, width), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or (None, None)
    block = blocks.row(heads * width)
    if count:
        launch(
            _rope_write,
            (count,),
            block,
            qkv.contiguous(),
            cos,
            sin,
            positions,
            slots,
            q,
            k_pages,
            v_pages,
            q_norm,
            k_norm,
            eps,
            heads=heads - 2 * groups,
            groups=groups,
            half=width // 2,
            block_heads=triton.next_power_of_2(heads),
            block_half=triton.next_power_of_2(width // 2),
        )
    return q


@triton.jit
def _rope_write(
    qkv,
    cos,
    sin,
    positions,
    slots,
    q,
    k_pages,
    v_pages,
    q_norm,
    k_norm,
    eps,
    heads: tl.constexpr,
    groups: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    pair = tl.arange(0, block_half)[None, :]
    inside = (head < heads + 2 * groups) & (pair < half)
    at = head * (2 * half) + pair
    source = qkv + token * ((heads + 2 * groups) * 2 * half) + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_query = head < heads
    is_value = head >= heads + groups
    if q_norm is not None:
        # The gain of a row is the query's or the key's; values pass through.
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)[:, None]
        gain_q = tl.load(q_norm + pair, mask=pair < half, other=0.0).to(tl.float32)
        gain_k = tl.load(k_norm + pair, mask=pair < half, other=0.0).to(tl.float32)
        first = tl.where(is_value, first, first * scale * tl.where(is_query, gain_q, gain_k))
        gain_q = tl.load(q_norm + half + pair, mask=pair < half, other=0.0).to(tl.float32)
        gain_k = tl.load(k_norm + half + pair, mask=pair < half, other=0.0).to(tl.float32)
        second = tl.where(is_value, second, second * scale * tl.where(is_query, gain_q, gain_k))
    place = tl.load(positions + token).to(tl.int64) * half
    c = tl.load(cos + place + pair, mask=pair < half, other=0.0)
    s = tl.load(sin + place + pair, mask=pair < half, other=0.0)
    low = tl.where(is_value, first, first * c - second * s)
    high = tl.where(is_value, second, second * c + first * s)

    to_q = q + token * (heads * 2 * half) + at
    tl.store(to_q, low, mask=inside & is_query)
    tl.store(to_q + half, high, mask=inside & is_query)
    slot = tl.load(slots + token).to(tl.int64) * (groups * 2 * half)
    to_k = k_pages + slot + at - heads * 2 * half
    is_key = (head >= heads) & (head < heads + groups)
    tl.store(to_k, low, mask=inside & is_key)
    tl.store(to_k + half, high, mask=inside & is_key)
    to_v = v_pages + slot + at - (heads + groups) * 2 * half
    tl.store(to_v, low, mask=inside & is_value)
    tl.store(to_v + half, high, mask=inside & is_value)
