"""Gathers healthy responses from live traffic for `quaver calibrate`."""

from __future__ import annotations

import time
import uuid

import numpy as np

from alerting.baseline import Baseline, build
from alerting.limits import Count
from alerting.open_response import OpenResponse, OpenResponses, complete
from alerting.rules import RawPreset, Rules
from alerting.samples import Sample
from alerting.scores import LayerRow, Response
from alerting.statistics import temperature_band
from telemetry.signals import BusinessEvent, LayerBatch, Lost, ResponseEnded, ResponseStarted, TokenBatch

MAX_SAMPLES = 100_000
MAX_KEPT = 2_000  # responses whose rows are kept for the fit of the scores ...
#: Routes of canaries that are the contrast, and whether their passage lacks the answer.
CONTRAST = {"contrast-whole": False, "contrast-lacking": True}
MAX_KEPT_ROWS = 512  # ... of at most so many tokens each
_MAX_KEPT_BYTES = 256 * 1024 * 1024  # and so much of layer detail in all


class _Kept(OpenResponse):
    """A response that may be kept. `rows` is None once it is too long for that."""

    __slots__ = ("layers", "rows")

    def __init__(self, started: ResponseStarted) -> None:
        super().__init__(started)
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
        raw = {n: p for n, p in rules.presets.items() if isinstance(p, RawPreset)}
        self._open: OpenResponses[_Kept] = OpenResponses(raw)
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
        self.model = event.model
        self._open.open(_Kept(event))

    def on_lost(self, request_id: str, choice: int, what: Lost) -> None:
        """Keep no response that is not whole."""
        self._open.lose(request_id, choice, what)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Take tokens in."""
        for entry, row, _ in self._open.feed(batch):
            if entry.rows is not None:
                entry.rows.append(row)
                if len(entry.rows) > MAX_KEPT_ROWS:
                    entry.rows = None

    def on_layers(self, batch: LayerBatch) -> None:
        """Keep the layer detail of a response that may be kept."""
        for entry, row in self._open.details(batch):
            if entry.rows is not None:
                entry.layers.append(row._replace(heads=row.heads.copy()))

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """Mark the end of the first sentence."""
        self._open.end_sentence(request_id, choice, tokens)

    def on_ended(self, event: ResponseEnded) -> None:
        """Keep the response if it is complete."""
        entry = self._open.close(event.request_id)
        if entry is not None:
            self.heard = time.monotonic()
        if entry is None or entry.lost or not complete(event) or len(self.samples) >= MAX_SAMPLES:
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
                    group=entry.started.group,
                    statistics=tracker.sentence | tracker.whole(),
                    raw_l1=sorted(entry.raw_l1),
                    kept=self._keep(entry),
                )
            )

    def on_business(self, event: BusinessEvent) -> None:
        """Count interruptions."""
        if event.kind in ("interrupted", "completed"):
            count = self._interruptions.setdefault(event.route, [0, 0])
            count[0] += event.kind == "interrupted"
            count[1] += 1

    def _keep(self, entry: _Kept) -> Response | None:
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
