"""What the evaluator keeps of a response while it streams."""

from __future__ import annotations

from alerting.scores import Frozen
from alerting.scores.response import HeadRows, combined
from alerting.statistics import ResponseTracker
from telemetry.signals import ResponseStarted


class OpenResponse:
    """A response that streams."""

    __slots__ = ("cusum_limit", "detail", "frozen", "judged", "l1", "raw_l1", "started", "tracker")

    def __init__(self, started: ResponseStarted, frozen: Frozen | None, cusum_limit: float) -> None:
        """An L1 of the paging preset is certain once the CUSUM is beyond `cusum_limit`."""
        self.started = started
        self.frozen = frozen
        self.cusum_limit = cusum_limit
        self.tracker = ResponseTracker(None if frozen is None else frozen.surprisal)
        self.detail = None if frozen is None else HeadRows(frozen)
        self.raw_l1: set[str] = set()
        self.l1: set[str] = set()  # presets whose L1 it raised
        self.judged = False  # the first sentence was

    def statistics(self) -> dict[str, float]:
        """Return all statistics of a response that is over."""
        found = self.tracker.sentence | self.tracker.whole()
        if self.frozen is None or self.detail is None or not found:
            return found
        found |= self.detail.scores()
        return found | combined(found, self.frozen)
