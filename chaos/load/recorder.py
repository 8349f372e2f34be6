"""Keeps a run on disk while it goes on: what is killed loses at most the last second.

`requests.csv` has a row per request, appended; `readers.json`, `readers.csv` and `readers.html` are replaced
in one go, so each is whole at any time. A disk without room is reported once and tried again; rows wait.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.load.page import page
from chaos.load.plan import Plan, PlanError
from chaos.load.reading import Reading
from chaos.load.report import TIMES, Report

SAVE_EVERY_S = 0.8  # seconds; what a kill loses at most
_WAITING_BYTES = 16 << 20  # of rows that the disk does not take
_COLUMNS = (
    *("intended_s", "start_delay_s", "outcome", "left", "error", "first_token_s", "duration_s"),
    *("tokens", "prompt_tokens", "per_output_token_s", "missed", "request_id"),
)


class Recorder:
    """Takes readings of one run and owns its files. Raises OSError when the folder cannot be made,
    PlanError when another run writes to it.
    """

    def __init__(self, plan: Plan, url: str, began: float, tell: Callable[[str], None] | None = None) -> None:
        self.report = Report(plan.limits, began)
        self.folder = Path(plan.out)
        self.state = "running"
        self.trouble: str | None = None
        self._about = {"url": url, "plan": {n: getattr(plan, n) for n in plan.__struct_fields__}}
        self._began = began
        self._tell = tell or _complain
        self.folder.mkdir(parents=True, exist_ok=True)
        self._hold: int | None = hold(self.folder)
        for name in ("requests.csv", "readers.json", "readers.csv", "readers.html"):
            (self.folder / name).unlink(missing_ok=True)
        self._rows = io.StringIO()
        self._kept = 0  # bytes of requests.csv that are whole rows
        self._lost = 0
        self._saved = 0.0
        csv.writer(self._rows).writerow(_COLUMNS)

    def add(self, reading: Reading) -> None:
        """Count one reading and remember its row."""
        self.report.add(reading)
        if self._rows.tell() > _WAITING_BYTES:
            self._lost += 1
            return
        row = (
            reading.intended - self._began,
            reading.start_delay_s,
            reading.outcome,
            reading.left,
            reading.error,
            reading.first_token_due_s,
            reading.duration_due_s,
            reading.tokens,
            reading.prompt_tokens,
            reading.per_output_token_s,
            " ".join(self.report.slo.missed(reading)),
            reading.request_id,
        )
        csv.writer(self._rows).writerow(f"{v:.6f}" if isinstance(v, float) else v for v in row)

    def save_if_due(self) -> None:
        """Save when the last time is long enough ago."""
        if time.monotonic() - self._saved >= SAVE_EVERY_S:
            self.save()

    def save(self) -> bool:
        """Write everything seen so far; False when the disk does not take it, which is told once."""
        summary = self.summary()
        try:
            self._append()
            _replace(self.folder / "readers.json", json.dumps(summary, indent=2) + "\n")
            _replace(self.folder / "readers.csv", _quantiles(summary))
            _replace(self.folder / "readers.html", page(summary, self.report))
        except OSError as error:
            if self.trouble is None:
                self._tell(
                    f"cannot write to {self.folder}: {error.strerror}. The load goes on and writing is tried "
                    "again every second; make room, or copy the figures printed at the end"
                )
            self.trouble = error.strerror
        else:
            self.trouble = None
        self._saved = time.monotonic()
        return self.trouble is None

    def close(self, state: str) -> bool:
        """Save for the last time, with how the run ended: `finished`, or what stopped it."""
        self.state = state
        try:
            return self.save()
        finally:
            if self._hold is not None:
                os.close(self._hold)
                self._hold = None

    def summary(self) -> dict[str, Any]:
        """Return the report with what was run, against what, and how far it came."""
        return {
            "state": self.state,
            "started": self._began,
            **self._about,
            **self.report.summary(),
            "rows_lost": self._lost,
            "bin_s": self.report.timeline.width_s,
            "timeline": self.report.timeline.rows(),
        }

    def _append(self) -> None:
        """Append the rows that wait. Half a row that a full disk took is cut off again."""
        data = self._rows.getvalue().encode()
        file = os.open(self.folder / "requests.csv", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, self._kept)
            os.lseek(file, self._kept, os.SEEK_SET)
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            os.ftruncate(file, self._kept)
            raise
        finally:
            os.close(file)
        self._kept += len(data)
        self._rows = io.StringIO()


def hold(folder: Path) -> int:
    """Return a descriptor that holds the folder until it is closed; PlanError where another run holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PlanError(f"another run writes to {folder}: give --out a folder of its own") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def _complain(text: str) -> None:
    print(f"quaver load: {text}", file=sys.stderr, flush=True)


def _quantiles(summary: dict[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["what", "count", "mean", "p50", "p90", "p95", "p99", "max"])
    writer.writeheader()
    names = (*TIMES, "cut_after_s", "failed_after_s")
    writer.writerows({"what": name, **summary[name]} for name in names)
    return out.getvalue()


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
