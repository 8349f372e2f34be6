"""Blocks of pages as bytes: int8 codes, float16 scales per channel of keys and per token of values.

A whole block is, for T tokens of L layers with G heads of width D, without gaps and little-endian:

    key codes    int8     [L, T, G, D]
    value codes  int8     [L, T, G, D]
    key scales   float16  [L, G, D]     over the block's tokens
    value scales float16  [L, T]        over all heads

A partial block holds n of the T tokens: a bitmap of those kept (token i is bit i % 8 of byte i // 8),
padded to an even size, then the same parts with n in place of T. It is smaller than a whole block
whatever n is, so the size says which of them it is.

Of the values that share a scale, let m be the largest magnitude. The scale is the smallest float16
that is not below m / 127 in fp32: rounded up, so that codes stay within ±127 and the scale of tiny
values does not vanish. It is at most m / 127 · (1 + 2^-10) + 2^-24, and a value is off by at most half of it.
There is none for m > 127 · 65504; a block with such a magnitude, or with infinities or NaN, is
refused. Codes are value · (1 / scale) in fp32, rounded to the nearest whole number, ties to even.

What is written here in NumPy is the specification; the native kernels give the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.pages import PagePool

LARGEST = 127 * 65504.0


class Parts(NamedTuple):
    """Views of a block of n tokens; `bitmap` is empty in a whole one."""

    bitmap: NDArray[np.uint8]
    keys: NDArray[np.int8]
    values: NDArray[np.int8]
    key_scales: NDArray[np.float16]
    value_scales: NDArray[np.float16]


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a block, and where in its bytes things are. `tokens` is a whole block's.

    Raises ValueError where a token is so small that partial blocks could be larger than whole ones.
    """

    layers: int
    tokens: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self._token_bytes <= self._bitmap_bytes:
            raise ValueError(f"{self.tokens} tokens of {self._token_bytes} bytes are too many for a block")

    @property
    def row(self) -> int:
        """Numbers in the key, or the value, of one token in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def size(self) -> int:
        """Bytes of a whole block."""
        return self.partial_size(self.tokens)

    def partial_size(self, kept: int) -> int:
        """Bytes of a block of `kept` tokens, a whole one if these are all."""
        return self.start(kept) + kept * self._token_bytes + self._key_scale_bytes

    def kept(self, size: int) -> int:
        """Tokens in a block of `size` bytes. Raises ValueError if no block has that size."""
        if size == self.size:
            return self.tokens
        kept, rest = divmod(size - self._bitmap_bytes - self._key_scale_bytes, self._token_bytes)
        if rest or not 0 <= kept < self.tokens:
            raise ValueError(f"no block has {size} bytes; a whole one has {self.size}")
        return kept

    def start(self, kept: int) -> int:
        """Bytes before the key codes of a block of `kept` tokens."""
        return self._bitmap_bytes if kept < self.tokens else 0

    def parts(self, block: NDArray[np.uint8]) -> Parts:
        """Views of a block, which is contiguous. Raises ValueError if no block has its size."""
        kept = self.kept(block.size)
        ends = np.cumsum([self.start(kept), *[self.layers * kept * self.row] * 2, self._key_scale_bytes])
        bitmap, keys, values, key_scales, value_scales = np.split(block, ends)
        shape = (self.layers, kept, self.kv_heads, self.head_dim)
        return Parts(
            bitmap,
            keys.view(np.int8).reshape(shape),
            values.view(np.int8).reshape(shape),
            key_scales.view("<f2").reshape(self.layers, self.kv_heads, self.head_dim),
            value_scales.view("<f2").reshape(self.layers, kept),
        )

    @property
    def _token_bytes(self) -> int:
        return 2 * self.layers * (self.row + 1)

    @property
    def _key_scale_bytes(self) -> int:
        return 2 * self.layers * self.row

    @property
    def _bitmap_bytes(self) -> int:
        return 2 * -(-self.tokens // 16)


def pack(
    pool: PagePool,
    pages: Sequence[int],
    layout: BlockLayout,
    out: NDArray[np.uint8],
    *,
    keep: NDArray[np.bool_] | None = None,
    kernels: ctypes.CDLL | None = None,
) -> bool:
    """Pack the tokens of `pages` that `keep` [tokens] marks, without it all, into `out`.

    `out` is contiguous, of `layout.partial_size` of as many tokens. False: the block has values that
    no code stands for, and what `out` holds is not a block. `kernels` speed up a bf16 pool on the CPU.
    Raises ValueError when sizes do not fit together or a page is not the pool's.
    """
    slots = _slots(pool, pages, layout)
    if keep is not None and keep.shape != slots.shape:
        raise ValueError(f"{keep.shape} says nothing of which of {layout.tokens} tokens to keep")
    kept = slots if keep is None else slots[keep]
    _check(out, layout, len(kept))
    start = layout.start(len(kept))
    if keep is not None and start:
        out[:start] = 0
        out[: -(-layout.tokens // 8)] = np.packbits(keep, bitorder="little")
    if kernels is not None and _native(pool):
        return bool(kernels.quaver_pack_block(*_arguments(pool, kept, layout), out[start:].ctypes.data))
    parts = layout.parts(out)
    return _pack(_read(pool.keys, kept), 1, parts.keys, parts.key_scales) and _pack(
        _read(pool.values, kept), (2, 3), parts.values, parts.value_scales
    )


def unpack(
    pool: PagePool,
    packed: NDArray[np.uint8],
    pages: Sequence[int],
    layout: BlockLayout,
    *,
    kernels: ctypes.CDLL | None = None,
) -> NDArray[np.bool_]:
    """Write a block into `pages`, zeros for tokens that it does not hold; return which it holds [tokens].

    `packed` is contiguous and, but for its sizes, trusted. Raises ValueError as `pack`, and when a
    bitmap disagrees with the block's size.
    """
    slots = _slots(pool, pages, layout)
    count = layout.kept(packed.size)
    _check(packed, layout, count)
    start = layout.start(count)
    mask = np.ones(layout.tokens, np.bool_)
    if start:
        mask = np.unpackbits(packed[:start], count=layout.tokens, bitorder="little").astype(np.bool_)
        if mask.sum() != count:
            raise ValueError(f"a block of {count} tokens says that it holds {mask.sum()}")
        for pages_of in (pool.keys, pool.values):
            _flat(pages_of)[:, torch.from_numpy(slots[~mask])] = 0
    kept = slots[mask]
    if kernels is not None and _native(pool):
        kernels.quaver_unpack_block(*_arguments(pool, kept, layout), packed[start:].ctypes.data)
        return mask
    parts = layout.parts(packed)
    _write(pool.keys, kept, parts.keys, parts.key_scales[:, None])
    _write(pool.values, kept, parts.values, parts.value_scales[:, :, None, None])
    return mask


def _slots(pool: PagePool, pages: Sequence[int], layout: BlockLayout) -> NDArray[np.int64]:
    """Where each token of a block lies in a layer: page · page size + offset, [tokens]."""
    layers, count, page_size, *heads = pool.keys.shape
    if (layers, *heads) != (layout.layers, layout.kv_heads, layout.head_dim):
        raise ValueError(f"the pool has {layers} layers of {heads}, the block is {layout}")
    places = np.asarray(pages, np.int64)
    if len(places) * page_size != layout.tokens:
        raise ValueError(f"{len(places)} pages of {page_size} tokens are no block of {layout.tokens}")
    if places.min() < 0 or places.max() >= count:
        raise ValueError(f"pages {list(pages)} are not all in a pool of {count}")
    return (places[:, None] * page_size + np.arange(page_size)).reshape(-1)


def _check(block: NDArray[np.uint8], layout: BlockLayout, kept: int) -> None:
    if block.size != layout.partial_size(kept) or block.dtype != np.uint8 or not block.flags.c_contiguous:
        raise ValueError(f"a block of {kept} tokens is {layout.partial_size(kept)} bytes, in one piece")


def _pack(
    values: NDArray[np.float32],
    shared: int | tuple[int, ...],
    codes: NDArray[np.int8],
    scales: NDArray[np.float16],
) -> bool:
    """Pack `values` [L, n, G, D] with a scale over the axes `shared`; False if there is none."""
    largest = np.abs(values).max(shared, initial=0)
    if not (largest <= LARGEST).all():
        return False
    exact = largest / np.float32(127)
    nearest = exact.astype(np.float16)
    scales[:] = (nearest.view(np.uint16) + (nearest < exact)).view(np.float16)  # the next one's bits
    factors = 1 / np.where(scales > 0, scales, 1).astype(np.float32)
    codes[:] = np.rint(values * np.expand_dims(factors, shared))
    return True


def _flat(pages: Tensor) -> Tensor:
    """The same memory by slots: [L, pages · page size, G, D]."""
    layers, count, page_size, *heads = pages.shape
    return pages.view(layers, count * page_size, *heads)


def _read(pages: Tensor, slots: NDArray[np.int64]) -> NDArray[np.float32]:
    return _flat(pages)[:, torch.from_numpy(slots)].float().cpu().numpy()


def _write(
    pages: Tensor, slots: NDArray[np.int64], codes: NDArray[np.int8], scales: NDArray[np.float16]
) -> None:
    values = codes * scales.astype(np.float32)
    _flat(pages)[:, torch.from_numpy(slots)] = torch.from_numpy(values).to(pages.device, pages.dtype)


def _native(pool: PagePool) -> bool:
    return pool.keys.dtype == torch.bfloat16 and pool.keys.device.type == "cpu"


def _arguments(pool: PagePool, slots: NDArray[np.int64], layout: BlockLayout) -> tuple[int, ...]:
    """What the native functions take of the pool; `slots` must outlive the call."""
    return (
        pool.keys.data_ptr(),
        pool.values.data_ptr(),
        pool.keys.stride(0),
        slots.ctypes.data,
        len(slots),
        layout.layers,
        layout.row,
    )
