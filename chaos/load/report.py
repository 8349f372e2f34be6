"""What a run of readers adds up to; failed, shed, cut-short and unfinished requests stay apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from chaos.load.histogram import Histogram
from chaos.load.reading import Reading
from chaos.load.slo import Slo
from chaos.load.timeline import Timeline

TIMES = ("first_token_s", "inter_token_s", "per_output_token_s", "end_to_end_s", "start_delay_s")


class Report:
    """Histograms and counts of one run, in memory that does not grow with its requests.

    `first_token_s` and `end_to_end_s` run from the intended start, so that a client that is late cannot hide
    a server that is slow; `start_delay_s` says how late it was. `end_to_end_s` covers answers read to their
    end only, `inter_token_s` has one count a token, `per_output_token_s` one a request.
    """

    def __init__(self, slo: Slo | None = None, began: float | None = None) -> None:
        self.slo = slo or Slo({})
        self.times = {name: Histogram() for name in TIMES}
        self.timeline = Timeline(began)
        self.cut_after_s = Histogram()
        self.failed_after_s = Histogram()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # of failed requests
        self.refusals: Counter[str] = Counter()  # of shed requests
        self.missed: Counter[str] = Counter()  # limits, and outcomes other than "read"
        self.good = 0
        self.left_before_first_token = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.began = began
        self.ended: float | None = None

    def add(self, reading: Reading) -> None:
        """Count one reading."""
        self.began = reading.intended if self.began is None else min(self.began, reading.intended)
        self.ended = max(self.ended or 0.0, reading.started + reading.duration_s)
        self.timeline.add(reading)
        self.outcomes[reading.outcome] += 1
        self.tokens += reading.tokens
        self.prompt_tokens += reading.prompt_tokens
        self.times["start_delay_s"].record(reading.start_delay_s)
        missed = self.slo.missed(reading)
        self.missed.update(missed)
        self.good += not missed
        if reading.outcome in ("failed", "shed"):
            self.failed_after_s.record(reading.duration_s)
            why = self.errors if reading.outcome == "failed" else self.refusals
            why[reading.error or "unknown"] += 1
        self._add_times(reading)
        if reading.outcome == "left":
            self.cut_after_s.record(reading.duration_s)
            self.reasons[reading.left or "impatient"] += 1
            self.left_before_first_token += reading.first_token_s is None

    def _add_times(self, reading: Reading) -> None:
        """Record what a request that was not turned away or lost took."""
        if reading.outcome in ("failed", "shed"):
            return
        if (first := reading.first_token_due_s) is not None:
            self.times["first_token_s"].record(first)
        for seconds, times in reading.token_gaps():
            self.times["inter_token_s"].record(seconds, times)
        if (mean := reading.per_output_token_s) is not None:
            self.times["per_output_token_s"].record(mean)
        if reading.outcome == "read":
            self.times["end_to_end_s"].record(reading.duration_due_s)

    def extend(self, readings: Iterable[Reading]) -> None:
        """Count many readings."""
        for reading in readings:
            self.add(reading)

    def summary(self) -> dict[str, Any]:
        """Return the report as plain JSON data: seconds, counts, rates per second."""
        span = (self.ended - self.began) if self.began is not None and self.ended is not None else 0.0
        total = sum(self.outcomes.values())
        return {
            "requests": total,
            "seconds": span,
            "requests_per_s": total / span if span else None,
            "tokens_per_s": self.tokens / span if span else None,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "outcomes": dict(self.outcomes),
            "left_because": dict(self.reasons),
            "left_before_first_token": self.left_before_first_token,
            "shed_because": dict(self.refusals.most_common(20)),
            "errors": dict(self.errors.most_common(20)),
            "goodput": self._goodput(span, total),
            **{name: histogram.summary() for name, histogram in self.times.items()},
            "cut_after_s": self.cut_after_s.summary(),
            "failed_after_s": self.failed_after_s.summary(),
        }

    def _goodput(self, span: float, total: int) -> dict[str, Any]:
        """Good requests a second, and as a share of all that the end of the run did not cut."""
        over = total - self.outcomes["ended"]
        return {
            "slo": dict(self.slo.limits),
            "good": self.good,
            "share": self.good / over if over else None,
            "per_s": self.good / span if span else None,
            "missed": dict(self.missed),
        }
