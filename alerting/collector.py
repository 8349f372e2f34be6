"""Gathers healthy responses from live traffic for `quaver calibrate`."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict

import numpy as np

from alerting.baseline import Baseline, build
from alerting.limits import Count
from alerting.rules import RawPreset, Rules
from alerting.samples import Sample
from alerting.scores import LayerRow, Response, rows_of
from alerting.statistics import ResponseTracker, temperature_band
from telemetry.signals import BusinessEvent, LayerBatch, ResponseEnded, ResponseStarted, TokenBatch

MAX_SAMPLES = 100_000
MAX_OPEN = 4096
MAX_KEPT = 2_000  # responses whose rows are kept for the fit of the scores ...
#: Routes of canaries that are the contrast, and whether their passage lacks the answer.
CONTRAST = {"contrast-whole": False, "contrast-lacking": True}
MAX_KEPT_ROWS = 512  # ... of at most so many tokens each
_MAX_KEPT_BYTES = 256 * 1024 * 1024  # and so much of layer detail in all


class _Open:
    """A response that streams. `rows` is None once it is too long to be kept."""

    __slots__ = ("layers", "raw", "rows", "started", "tracker")

    def __init__(self, started: ResponseStarted) -> None:
        self.started = started
        self.tracker = ResponseTracker()
        self.raw: set[str] = set()
        self.rows: list[list[float]] | None = []
        self.layers: list[LayerRow] = []


class Collector:
    """A SignalSink that keeps one sample per healthy, complete response. Canaries stay out.

    Canaries on the routes of `CONTRAST` are answers with and without what their question needs: the fit of
    the heads learns to tell them apart. `heard` is when the last response began or ended, as
    `time.monotonic` tells.
    """

    def __init__(self, rules: Rules) -> None:
        self.id = uuid.uuid4().hex
        self._rules = rules
        self._raw = {n: p for n, p in rules.presets.items() if isinstance(p, RawPreset)}
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._kept = self._bytes = 0
        self._interruptions: dict[str, list[int]] = {}
        self.samples: list[Sample] = []
        self.contrast: list[tuple[Response, bool]] = []
        self.model = ""
        self.heard = time.monotonic()

    def on_started(self, event: ResponseStarted) -> None:
        """Open a response."""
        if event.canary and event.route not in CONTRAST:
            return
        self.heard = time.monotonic()
        entry = _Open(event)
        for preset in self._raw.values():
            entry.tracker.watch_run(preset.confidence)
        self._open[event.request_id] = entry
        self.model = event.model
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Take tokens in."""
        for request_id, choice, row in zip(
            batch.request_ids, batch.choices, batch.signals.tolist(), strict=True
        ):
            entry = self._open.get(request_id)
            if entry is None or choice:
                continue
            entry.tracker.add(row)
            if entry.rows is not None:
                entry.rows.append(row)
                if len(entry.rows) > MAX_KEPT_ROWS:
                    entry.rows = None
            for name, preset in self._raw.items():
                if raw_condition(entry.tracker, preset):
                    entry.raw.add(name)

    def on_layers(self, batch: LayerBatch) -> None:
        """Keep the layer detail of a response that may be kept."""
        for request_id, choice, row in rows_of(batch):
            entry = self._open.get(request_id)
            if entry is not None and not choice and entry.rows is not None:
                entry.layers.append(row._replace(heads=row.heads.copy()))

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """Mark the end of the first sentence."""
        entry = self._open.get(request_id)
        if entry is not None and choice == 0:
            entry.tracker.end_sentence(tokens)

    def on_ended(self, event: ResponseEnded) -> None:
        """Keep the response if it is complete."""
        entry = self._open.pop(event.request_id, None)
        if entry is not None:
            self.heard = time.monotonic()
        if entry is None or not complete(event) or len(self.samples) >= MAX_SAMPLES:
            return
        tracker = entry.tracker
        tracker.finish()
        if entry.started.canary:
            kept = self._keep(entry) if tracker.tokens else None
            if kept is not None:
                self.contrast.append((kept, CONTRAST[entry.started.route]))
            return
        if tracker.tokens and not tracker.missing:
            self.samples.append(
                Sample(
                    route=entry.started.route,
                    band=temperature_band(entry.started.temperature),
                    statistics=tracker.sentence | tracker.whole(),
                    raw_l1=sorted(entry.raw),
                    kept=self._keep(entry),
                )
            )

    def on_business(self, event: BusinessEvent) -> None:
        """Count interruptions."""
        if event.kind in ("interrupted", "completed"):
            count = self._interruptions.setdefault(event.route, [0, 0])
            count[0] += event.kind == "interrupted"
            count[1] += 1

    def _keep(self, entry: _Open) -> Response | None:
        if entry.rows is None or self._kept >= MAX_KEPT:
            return None
        self._kept += 1
        self._bytes += sum(row.heads.nbytes for row in entry.layers)
        if self._bytes > _MAX_KEPT_BYTES:
            entry.layers = []
        tokens = np.asarray(entry.rows, dtype=np.float32)
        return Response(tokens, entry.layers, entry.tracker.sentence_tokens, entry.started.group)

    def build(self, *, model: str | None = None, quantization: str) -> Baseline:
        """Build the baseline from what was gathered; raises BaselineError when it is too little.

        May run on a thread while more is gathered: what comes after the call counts for nothing.
        """
        return build(
            list(self.samples),
            self._rules,
            model=model or self.model,
            quantization=quantization,
            interruptions={route: Count(*count) for route, count in list(self._interruptions.items())},
            contrast=list(self.contrast),
        )


def raw_condition(tracker: ResponseTracker, preset: RawPreset) -> bool:
    """Return whether a raw preset's L1 condition holds at the newest token."""
    return tracker.run_below(preset.confidence) >= preset.run and tracker.mean_entropy > preset.entropy


def complete(event: ResponseEnded) -> bool:
    """Return whether a response reached its own end, so that whole-response statistics count."""
    return event.finish_reason in ("stop", "length") and not event.disconnected
