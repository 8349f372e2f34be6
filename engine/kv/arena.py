"""A piece of memory that blocks of any size share.

First fit: the low end has been written to, and so has memory of the system's, already.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray


class Arena:
    """`capacity` bytes. Invariant: `_free` are the runs that nobody has, in order, none touching the next."""

    def __init__(self, capacity: int) -> None:
        self._memory = np.empty(capacity, np.uint8)
        self._free = [(0, capacity)] if capacity else []

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._memory.size

    def take(self, size: int) -> int | None:
        """Hand out a run of `size` bytes, by its first; None when no run is as long."""
        for place, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[place : place + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take a run back."""
        place = bisect_left(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == start + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start:
            place -= 1
            before = self._free.pop(place)
            start, size = before[0], before[1] + size
        self._free.insert(place, (start, size))

    def view(self, start: int, size: int) -> NDArray[np.uint8]:
        """The bytes of a run."""
        return self._memory[start : start + size]
