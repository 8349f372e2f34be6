"""Fan-out to the signal sinks: one that raises stops nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from telemetry.signals import SignalSink

log = logging.getLogger(__name__)


class Sinks:
    """The sinks, in the order they were added. `count(sink name)` is told of every exception."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._sinks: list[SignalSink] = []
        self._complained: set[tuple[str, str]] = set()

    def add(self, sink: SignalSink) -> None:
        """Call this sink from now on."""
        self._sinks.append(sink)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call one method of every sink; an exception is counted, and logged once per method."""
        for sink in self._sinks:
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                kind = type(sink).__name__
                self._count(kind)
                if (kind, method) not in self._complained:
                    self._complained.add((kind, method))
                    log.exception("%s.%s raised; its later errors are only counted", kind, method)
