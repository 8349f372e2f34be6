"""The paged KV pool: storage, and who owns which page.

A page belongs to at most one sequence, from its admission to its end. Invariant, checked by
`check`: free + owned = all, and no page is both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


class PagePool:
    """Keys and values of every layer in pages of `page_size` tokens.

    `keys[layer]` and `values[layer]` are [pages, page size, kv heads, head width].
    """

    def __init__(
        self, *, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.keys = _zeros(shape, dtype)
        self.values = _zeros(shape, dtype)
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand `count` pages to the caller, who must `release` them once."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back from their owner."""
        self._free.extend(pages)

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless the free and the `owned` pages are all pages, once each."""
        everything = sorted([*self._free, *owned])
        assert everything == list(range(self.pages)), "a KV page is lost or owned twice"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written to: a pool is large, and mostly empty."""
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
