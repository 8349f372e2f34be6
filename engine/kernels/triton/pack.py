"""KV pages in eight bits: keys with a scale per channel of a page, values with one per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused import Packed
from engine.kernels.triton import blocks
from engine.kernels.triton.launch import launch


def pack_keys(pages: Tensor, ids: Tensor, used: Tensor) -> Packed:
    """Pack the pages `ids` [n] of keys, symmetric, largest magnitude at ±127.

    `used` [n] is how many tokens of each page hold something; the others are packed as zero.
    """
    return _pack(pages, ids, used, per_token=False)


def pack_values(pages: Tensor, ids: Tensor, used: Tensor) -> Packed:
    """Pack the pages `ids` [n] of values; as `pack_keys`."""
    return _pack(pages, ids, used, per_token=True)


def unpack_keys(pages: Tensor, ids: Tensor, packed: Packed) -> None:
    """Write packed keys back into the pages `ids` [n], in place."""
    _unpack(pages, ids, packed, per_token=False)


def unpack_values(pages: Tensor, ids: Tensor, packed: Packed) -> None:
    """Write packed values back into the pages `ids` [n], in place."""
    _unpack(pages, ids, packed, per_token=True)


def _unpack(pages: Tensor, ids: Tensor, packed: Packed, *, per_token: bool) -> None:
    count, size, groups, width = packed.codes.shape
    if count:
        launch(
            _unpack_page,
            (count, groups),
            blocks.row(size * width),
            pages,
            ids,
            *packed,
            **_sizes(pages),
            per_token=per_token,
        )


def _pack(pages: Tensor, ids: Tensor, used: Tensor, *, per_token: bool) -> Packed:
    _, size, groups, width = pages.shape
    count = len(ids)
    shape = (count, size, groups) if per_token else (count, groups, width)
    packed = Packed(
        torch.empty((count, size, groups, width), dtype=torch.int8, device=pages.device),
        torch.empty(shape, dtype=torch.float32, device=pages.device),
    )
    if count:
        launch(
            _pack_page,
            (count, groups),
            blocks.row(size * width),
            pages,
            ids,
            used,
            *packed,
            **_sizes(pages),
            per_token=per_token,
        )
    return packed


def _sizes(pages: Tensor) -> dict[str, int]:
    _, size, groups, width = pages.shape
    return {
        "size": size,
        "groups": groups,
        "width": width,
        "block_t": triton.next_power_of_2(size),
        "block_d": triton.next_power_of_2(width),
    }


@triton.jit
def _places(
    group,
    size: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
):
    """Tokens [t], channels [d], where a group's values lie in a page [t, d] and which of them exist."""
    token = tl.arange(0, block_t)
    channel = tl.arange(0, block_d)
    at = (token[:, None] * groups + group) * width + channel[None, :]
    return token, channel, at, (token < size)[:, None] & (channel < width)[None, :]


@triton.jit
def _pack_page(
    pages,
    ids,
    used,
    codes,
    scales,
    size: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    per_token: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    page = tl.load(ids + entry).to(tl.int64)
    token, channel, at, inside = _places(group, size, groups, width, block_t, block_d)
    held = inside & (token < tl.load(used + entry))[:, None]
    values = tl.load(pages + page * (size * groups * width) + at, mask=held, other=0.0).to(tl.float32)
    magnitude = tl.abs(values)
    if per_token:
        scale = tl.div_rn(tl.max(magnitude, 1), 127.0)
        tl.store(scales + (entry * size + token) * groups + group, scale, mask=token < size)
        spread = scale[:, None]
    else:
        scale = tl.div_rn(tl.max(magnitude, 0), 127.0)
        tl.store(scales + (entry * groups + group) * width + channel, scale, mask=channel < width)
        spread = scale[None, :]
    code = tl.floor(tl.div_rn(values, tl.where(spread > 0, spread, 1.0)) + 0.5)
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    tl.store(codes + entry * (size * groups * width) + at, code.to(tl.int8), mask=inside)


@triton.jit
def _unpack_page(
    pages,
    ids,
    codes,
    scales,
    size: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    per_token: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    page = tl.load(ids + entry).to(tl.int64)
    token, channel, at, inside = _places(group, size, groups, width, block_t, block_d)
    code = tl.load(codes + entry * (size * groups * width) + at, mask=inside, other=0).to(tl.float32)
    if per_token:
        scale = tl.load(scales + (entry * size + token) * groups + group, mask=token < size, other=0.0)
        value = code * scale[:, None]
    else:
        scale = tl.load(scales + (entry * groups + group) * width + channel, mask=channel < width, other=0.0)
        value = code * scale[None, :]
    tl.store(pages + page * (size * groups * width) + at, value, mask=inside)
