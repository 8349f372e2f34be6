"""What happened when: one row of counts and one histogram for each stretch of a run, bounded in number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chaos.load.histogram import Histogram
from chaos.load.reading import Reading

BINS = 240


@dataclass
class Bin:
    """One stretch. `due` and `first_token_s` belong to when a request was due, `over` to when it ended."""

    due: int = 0
    sent: int = 0
    over: Counter[str] = field(default_factory=Counter)
    first_token_s: Histogram = field(default_factory=Histogram)

    def merge(self, other: Bin) -> None:
        """Add another stretch to this one."""
        self.due += other.due
        self.sent += other.sent
        self.over.update(other.over)
        self.first_token_s.merge(other.first_token_s)


class Timeline:
    """Bins of `width_s` from the first intended start on.

    A run that outgrows `BINS` of them merges neighbours, so a long run costs no more memory than a short one.
    """

    def __init__(self, began: float | None = None) -> None:
        self.width_s = 1.0
        self.began = began
        self.bins: list[Bin] = []

    def add(self, reading: Reading) -> None:
        """Count one reading where it was due, where it was sent, and where it ended."""
        if self.began is None:
            self.began = reading.intended
        due = self._bin(reading.intended)
        due.due += 1
        if reading.first_token_due_s is not None:
            due.first_token_s.record(reading.first_token_due_s)
        self._bin(reading.started).sent += 1
        self._bin(reading.started + reading.duration_s).over[reading.outcome] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Return the bins as JSON data: start in seconds, counts, quantiles of the first token's time."""
        return [
            {
                "at_s": number * self.width_s,
                "due": bin_.due,
                "sent": bin_.sent,
                "over": dict(bin_.over),
                "first_token_s": {
                    name: bin_.first_token_s.quantile(share)
                    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
                },
            }
            for number, bin_ in enumerate(self.bins)
        ]

    def _bin(self, moment: float) -> Bin:
        assert self.began is not None
        at = int(max(0.0, moment - self.began) / self.width_s)
        while at >= BINS:
            self._halve()
            at //= 2
        while len(self.bins) <= at:
            self.bins.append(Bin())
        return self.bins[at]

    def _halve(self) -> None:
        self.width_s *= 2
        odd = self.bins[1::2]
        self.bins = self.bins[::2]
        for first, second in zip(self.bins, odd, strict=False):
            first.merge(second)
