"""Whether what leaves the page pool is worth a copy: by how often what left was wanted again.

Names are remembered of all blocks that left, copied or not. So reuse is noticed without a copy of
anything, and copying begins again by itself. Pure figures.
"""

from __future__ import annotations

from collections import OrderedDict

_REMEMBERED = 1 << 16  # names
_LATELY = 4096  # blocks that left, in which what was seen falls to 1 ÷ e
_PRIOR = (64.0, 512.0)  # wanted again, of so many that left: what is believed at first


class Reuse:
    """The share of blocks that are wanted again after they left."""

    def __init__(self) -> None:
        self._left: OrderedDict[bytes, None] = OrderedDict()
        self._again, self._gone = 0.0, 0.0

    @property
    def rate(self) -> float:
        """Blocks wanted again ÷ blocks that left, lately; about one in eight while little is known."""
        again, gone = _PRIOR
        return min(1.0, (self._again + again) / (self._gone + gone))

    def leaves(self, name: bytes) -> None:
        """A block leaves the pool."""
        fade = 1 - 1 / _LATELY
        self._again, self._gone = self._again * fade, self._gone * fade + 1
        self._left[name] = None
        self._left.move_to_end(name)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)

    def wanted(self, name: bytes) -> bool:
        """A prompt wants a block that the pool does not have; return whether it had left."""
        if name not in self._left:
            return False
        del self._left[name]
        self._again += 1
        return True

    def pays(self, copy_s: float, compute_s: float) -> bool:
        """Whether a copy is expected to save more than it takes; unknown times are in favour."""
        return not copy_s or not compute_s or self.rate * compute_s > copy_s
