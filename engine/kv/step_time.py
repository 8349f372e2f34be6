"""What moving blocks may take of one engine step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

BESIDE_DECODES_S = 0.02
ALONE_S = 0.05


class StepTime:
    """Seconds that packing and unpacking may take of the step under way, `limit`, and have taken, `spent`."""

    def __init__(self) -> None:
        self.limit = self.spent = 0.0

    def begin(self, decoding: bool) -> None:
        """Let a new step begin; `decoding`: somebody waits for a next token."""
        self.limit, self.spent = BESIDE_DECODES_S if decoding else ALONE_S, 0.0

    @property
    def left(self) -> bool:
        """Whether there is some."""
        return self.spent < self.limit

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began
