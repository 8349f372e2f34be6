"""The paged KV pool: storage, and who owns which page.

Every sequence owns the pages in its table, from its admission to its end; the prefix cache owns those
that it keeps. Several may own a page; such a page is full and is never written again. Invariant, checked
by `check`: free + owned = all, no page is both, and each has as many owners as it counts.

A slot of a page may be dead: the page came back from a lower tier without that token, and nobody attends
to it. A page keeps its dead slots as long as it has an owner; free pages have none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_PAGES = 4  # pages that go down and come back together: a block


class PagePool:
    """Keys and values of every layer in pages of `page_size` tokens.

    `keys[layer]` and `values[layer]` are [pages, page size, kv heads, head width] on `device`, `dead`
    is [pages, page size] on the CPU.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, torch.device(device))
        self.values = _zeros(shape, dtype, torch.device(device))
        self.dead = np.zeros((pages, page_size), np.bool_)
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return int(2 * self.keys.element_size() * self.keys.numel()) // (self.pages * self.page_size)

    def owners(self, page: int) -> int:
        """How many own a page."""
        return self._owners[page]

    def needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand `count` pages to the caller, who must `release` them once."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Give owned pages one more owner, who must `release` them too."""
        for page in pages:
            if not self._owners[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back from one of their owners; those without owners are free again."""
        before = len(self._free)
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        self.dead[self._free[before:]] = False

    def revive(self, slots: NDArray[np.int64]) -> None:
        """Note that tokens are written to `slots` (page · page size + offset): these are not dead."""
        self.dead.reshape(-1)[slots] = False

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy what every layer holds in `sources` into `targets`, one for one, dead slots too."""
        for source, target in zip(sources, targets, strict=True):
            for layer in (*self.keys, *self.values):  # in pieces too small to wake PyTorch's own threads
                layer[target].copy_(layer[source])
        self.dead[targets] = self.dead[sources]

    def clear(self, pages: Iterable[int]) -> None:
        """Write zeros over what every layer holds in `pages`: NaN there could reach the next owner."""
        cleared = list(pages)
        for kept in (self.keys, self.values):
            kept[:, cleared] = 0

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless `owned`, a page for each of its owners, accounts for all pages."""
        owners = Counter(owned)
        assert [owners[page] for page in range(self.pages)] == self._owners, "a KV page's owners are wrong"
        free = [page for page, count in enumerate(self._owners) if not count]
        assert sorted(self._free) == free, "a KV page is lost or free twice"
        assert not self.dead[free].any(), "a free KV page has dead slots"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; a CPU's take memory only once they are written to: a pool is large, and mostly empty."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
