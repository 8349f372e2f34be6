"""Gathers healthy responses from live traffic for `quaver calibrate`."""

from __future__ import annotations

from collections import OrderedDict

from alerting.baseline import Baseline, Count, Sample, build
from alerting.rules import RawPreset, Rules
from alerting.statistics import ResponseTracker, temperature_band
from telemetry.signals import BusinessEvent, LayerBatch, ResponseEnded, ResponseStarted, TokenBatch

MAX_SAMPLES = 100_000
MAX_OPEN = 4096


class Collector:
    """A SignalSink that keeps one sample per healthy, complete response. Canaries stay out."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._raw = {n: p for n, p in rules.presets.items() if isinstance(p, RawPreset)}
        self._open: OrderedDict[str, tuple[ResponseStarted, ResponseTracker, set[str]]] = OrderedDict()
        self._interruptions: dict[str, list[int]] = {}
        self.samples: list[Sample] = []
        self.model = ""

    def on_started(self, event: ResponseStarted) -> None:
        """Open a response."""
        if event.canary:
            return
        tracker = ResponseTracker()
        for preset in self._raw.values():
            tracker.watch_run(preset.confidence)
        self._open[event.request_id] = (event, tracker, set())
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
            tracker = entry[1]
            tracker.add(row)
            for name, preset in self._raw.items():
                if raw_condition(tracker, preset):
                    entry[2].add(name)

    def on_layers(self, batch: LayerBatch) -> None:
        """Layers have no part in the baseline."""

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """Mark the end of the first sentence."""
        entry = self._open.get(request_id)
        if entry is not None and choice == 0:
            entry[1].end_sentence(tokens)

    def on_ended(self, event: ResponseEnded) -> None:
        """Keep the response if it is complete."""
        entry = self._open.pop(event.request_id, None)
        if entry is None or not complete(event) or len(self.samples) >= MAX_SAMPLES:
            return
        started, tracker, raw = entry
        tracker.finish()
        if tracker.tokens and not tracker.missing:
            self.samples.append(
                Sample(
                    route=started.route,
                    band=temperature_band(started.temperature),
                    statistics=tracker.sentence | tracker.whole(),
                    raw_l1=sorted(raw),
                )
            )

    def on_business(self, event: BusinessEvent) -> None:
        """Count interruptions."""
        if event.kind in ("interrupted", "completed"):
            count = self._interruptions.setdefault(event.route, [0, 0])
            count[0] += event.kind == "interrupted"
            count[1] += 1

    def build(self, *, model: str | None = None, quantization: str) -> Baseline:
        """Build the baseline from what was gathered; raises BaselineError when it is too little."""
        return build(
            self.samples,
            self._rules,
            model=model or self.model,
            quantization=quantization,
            interruptions={route: Count(*count) for route, count in self._interruptions.items()},
        )


def raw_condition(tracker: ResponseTracker, preset: RawPreset) -> bool:
    """Return whether a raw preset's L1 condition holds at the newest token."""
    return tracker.run_below(preset.confidence) >= preset.run and tracker.mean_entropy > preset.entropy


def complete(event: ResponseEnded) -> bool:
    """Return whether a response reached its own end, so that whole-response statistics count."""
    return event.finish_reason in ("stop", "length") and not event.disconnected
