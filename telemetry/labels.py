"""Label values with a cap, so that no client can grow the number of series."""

from __future__ import annotations

import re

from telemetry.names import ALL, OTHER

_CLEAN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+() -]{0,127}")


class Labels:
    """The first `limit` distinct values keep their name; every later one is `other`.

    Each value has an index, so that arrays can be kept by value. Index 0 is `other`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.names = [OTHER]
        self._index: dict[str, int] = {OTHER: 0, ALL: 0}

    def index(self, value: str) -> int:
        """Return the index of a value, admitting it while there is room."""
        known = self._index.get(value)
        if known is not None:
            return known
        if len(self.names) > self.limit or not _CLEAN.fullmatch(value):
            return 0
        self._index[value] = len(self.names)
        self.names.append(value)
        return len(self.names) - 1

    def name(self, value: str) -> str:
        """Return the label value to use for a value."""
        return self.names[self.index(value)]
