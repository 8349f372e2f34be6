"""What a run of readers adds up to; failed, shed, cut-short and unfinished requests stay apart."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaos.load.histogram import Histogram
from chaos.load.reading import Reading

TIMES = ("start_delay_s", "first_token_s", "inter_token_s", "end_to_end_s")


class Report:
    """Histograms and counts of one run. `end_to_end_s` covers answers read to their end only."""

    def __init__(self) -> None:
        self.times = {name: Histogram() for name in TIMES}
        self.cut_after_s = Histogram()
        self.failed_after_s = Histogram()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # of failed requests
        self.refusals: Counter[str] = Counter()  # of shed requests
        self.tokens = 0
        self.began: float | None = None
        self.ended: float | None = None

    def add(self, reading: Reading) -> None:
        """Count one reading."""
        self.began = reading.started if self.began is None else min(self.began, reading.started)
        self.ended = max(self.ended or 0.0, reading.started + reading.duration_s)
        self.outcomes[reading.outcome] += 1
        self.tokens += reading.tokens
        self.times["start_delay_s"].record(reading.start_delay_s)
        if reading.outcome in ("failed", "shed"):
            self.failed_after_s.record(reading.duration_s)
            why = self.errors if reading.outcome == "failed" else self.refusals
            why[reading.error or "unknown"] += 1
            return
        if reading.first_token_s is not None:
            self.times["first_token_s"].record(reading.first_token_s)
        for seconds, times in reading.token_gaps():
            self.times["inter_token_s"].record(seconds, times)
        if reading.outcome == "read":
            self.times["end_to_end_s"].record(reading.duration_s)
        elif reading.outcome == "left":
            self.cut_after_s.record(reading.duration_s)
            self.reasons[reading.left or "impatient"] += 1

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
            "outcomes": dict(self.outcomes),
            "left_because": dict(self.reasons),
            "shed_because": dict(self.refusals.most_common(20)),
            "errors": dict(self.errors.most_common(20)),
            **{name: histogram.summary() for name, histogram in self.times.items()},
            "cut_after_s": self.cut_after_s.summary(),
            "failed_after_s": self.failed_after_s.summary(),
        }

    def save(self, folder: Path) -> None:
        """Write `readers.json` and `readers.csv` into a folder, each replaced in one go."""
        folder.mkdir(parents=True, exist_ok=True)
        summary = self.summary()
        _replace(folder / "readers.json", json.dumps(summary, indent=2) + "\n")
        rows = {name: summary[name] for name in (*TIMES, "cut_after_s", "failed_after_s")}
        partial = folder / "readers.csv.part"
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["what", "count", "mean", "p50", "p90", "p95", "p99", "max"])
            writer.writeheader()
            writer.writerows({"what": name, **row} for name, row in rows.items())
        partial.replace(folder / "readers.csv")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    partial.replace(path)
