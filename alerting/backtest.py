"""Rules on stored records: what would have fired, how often, on which route. Sees what detectors see.

Responses are replayed one after another in the order of their ends, so that what depends on several at once
(how long an L1 stays live) is near what it was, not equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from alerting.alerts import Alert, AlertBook
from alerting.baseline import Baseline
from alerting.breaker import Breaker
from alerting.evaluator import Evaluator
from alerting.metrics import AlertMetrics
from alerting.rules import Rules
from alerting.scores import LayerRow, recorded
from engine.messages import TOKEN_SIGNALS
from telemetry import query
from telemetry.signals import BusinessEvent, LayerBatch, ResponseEnded, ResponseStarted, TokenBatch

_CHUNK = 200  # responses read at once
_BUSINESS = ("completed", "interrupted", "failed", "rejected")

Row = dict[str, Any]


class Fired(msgspec.Struct, frozen=True):
    """One alert that would have begun: at a unix time, after so many responses on its route."""

    name: str
    level: str
    route: str
    time: str
    responses: int


class RouteReport(msgspec.Struct, frozen=True):
    """`l1` counts responses that raise an L1, by preset; `blind` says why some could not be judged."""

    responses: int
    tokens: int
    interrupted: int
    l1: dict[str, int]
    alerts: dict[str, int]
    blind: str | None


class Report(msgspec.Struct, frozen=True):
    """What the rules make of the records."""

    preset: str
    routes: dict[str, RouteReport]
    fired: list[Fired]


def backtest(
    folder: Path, rules: Rules, preset: str, baseline: Baseline | None, *, since: float | None = None
) -> Report:
    """Replay the recorded responses that ended after `since` (unix seconds) through an evaluator of its own.

    Canaries and responses of other models than the baseline's are left out. Raises RulesError for a preset
    that the rules do not have, and duckdb.Error when the records cannot be read.
    """
    rules.preset(preset)
    replay = _Replay(rules, preset, baseline)
    for request, tokens, layers in _responses(folder, since, None if baseline is None else baseline.model):
        replay.tell(request, tokens, layers)
    return replay.report()


class _Replay:
    """An evaluator, and counts of what it was told and said."""

    def __init__(self, rules: Rules, preset: str, baseline: Baseline | None) -> None:
        self._preset, self._rules = preset, rules
        self._now = 0.0
        self._registry = CollectorRegistry()
        self._fired: list[Fired] = []
        self._responses: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._interrupted: Counter[str] = Counter()
        self._evaluator = Evaluator(
            rules,
            preset,
            AlertBook(self._hear),
            Breaker(rules.breaker, "observe", clock=lambda: self._now),
            AlertMetrics(self._registry),
            clock=lambda: self._now,
        )
        if baseline is not None:
            self._evaluator.use(baseline, baseline.model, baseline.quantization)

    def tell(self, request: Row, tokens: np.ndarray, layers: list[LayerRow]) -> None:
        """Tell of one response as telemetry did."""
        key, route, now = request["request_id"], request["route"], request["ended"]
        self._now = now
        self._responses[route] += 1
        self._tokens[route] += len(tokens)
        self._interrupted[route] += request["outcome"] == "interrupted"
        self._evaluator.on_started(
            ResponseStarted(
                request_id=key,
                tenant=request["tenant"],
                route=route,
                canary=False,
                model=request["model"],
                temperature=request["temperature"] or 0.0,
                prompt_tokens=request["prompt_tokens"],
                time=request["started"],
            )
        )
        aggregates = request["aggregates"] or {}
        for what in ("tokens", "layers"):
            if f"lost_{what}" in aggregates:
                self._evaluator.on_lost(key, 0, what)
        sentence = aggregates.get("sentence_tokens")
        first = len(tokens) if sentence is None else min(int(sentence), len(tokens))
        self._tokens_of(key, tokens[:first], 0, now)
        if sentence is not None:
            self._evaluator.on_sentence(key, 0, first)
        self._tokens_of(key, tokens[first:], first, now)
        for row in layers:
            self._evaluator.on_layers(_batch(key, row, now))
        self._evaluator.on_ended(
            ResponseEnded(
                request_id=key,
                time=now,
                finish_reason=request["finish_reason"],
                disconnected=request["disconnected"],
                completion_tokens=request["completion_tokens"],
                aggregates={},
            )
        )
        if request["outcome"] in _BUSINESS:
            self._evaluator.on_business(
                BusinessEvent(
                    kind=request["outcome"], request_id=key, tenant=request["tenant"], route=route, time=now
                )
            )
        self._evaluator.tick()

    def report(self) -> Report:
        """Sum up."""
        blind = self._evaluator.blind()
        routes = {
            route: RouteReport(
                responses=count,
                tokens=self._tokens[route],
                interrupted=self._interrupted[route],
                l1={preset: self._l1(route, preset) for preset in self._rules.presets},
                alerts=dict(Counter(fired.name for fired in self._fired if fired.route == route)),
                blind=blind.get(route),
            )
            for route, count in sorted(self._responses.items())
        }
        return Report(self._preset, routes, self._fired)

    def _tokens_of(self, key: str, rows: np.ndarray, step: int, now: float) -> None:
        count = len(rows)
        if count:
            steps = list(range(step, step + count))
            self._evaluator.on_tokens(
                TokenBatch(
                    time=now, request_ids=[key] * count, choices=[0] * count, steps=steps, signals=rows
                )
            )

    def _l1(self, route: str, preset: str) -> int:
        labels = {"route": route, "preset": preset}
        return int(self._registry.get_sample_value("quaver_l1_events_total", labels) or 0)

    def _hear(self, alert: Alert) -> None:
        if alert.state == "firing":
            count = self._responses[alert.route]
            self._fired.append(Fired(alert.name, alert.level, alert.route, alert.starts_at, count))


def _responses(
    folder: Path, since: float | None, model: str | None
) -> Iterator[tuple[Row, np.ndarray, list[LayerRow]]]:
    """Yield request rows with their tokens [T, TOKEN_SIGNALS] and layer rows, in order of their ends."""
    ids = query.select(
        folder,
        "SELECT request_id FROM requests WHERE NOT canary AND outcome <> 'rejected' "
        "AND ($1 IS NULL OR ended > to_timestamp($1)) AND ($2 IS NULL OR model = $2) "
        "ORDER BY ended, request_id",
        [since, model],
    )
    keys = [row["request_id"] for row in ids]
    for start in range(0, len(keys), _CHUNK):
        chunk = keys[start : start + _CHUNK]
        requests = _of(folder, "requests", chunk, "ORDER BY ended, request_id")
        tokens = _of(folder, "tokens", chunk, "AND choice = 0 ORDER BY step")
        layers = _of(folder, "layers", chunk, "AND choice = 0 ORDER BY step")
        rows: dict[str, list[list[float]]] = {key: [] for key in chunk}
        detail: dict[str, list[LayerRow]] = {key: [] for key in chunk}
        for token in tokens:
            rows[token["request_id"]].append([token[name] for name in TOKEN_SIGNALS])
        for layer in layers:
            found = recorded(layer)
            if found is not None:
                detail[layer["request_id"]].append(found)
        for request in requests:
            key = request["request_id"]
            array = np.array(rows[key], dtype=np.float32).reshape(-1, len(TOKEN_SIGNALS))
            yield request, array, detail[key]


def _of(folder: Path, table: str, keys: list[str], rest: str) -> list[Row]:
    sql = f"SELECT * FROM {table} WHERE request_id IN (SELECT unnest($1)) {rest}"  # noqa: S608 - our words
    return query.select(folder, sql, [keys])


def _batch(key: str, row: LayerRow, now: float) -> LayerBatch:
    return LayerBatch(
        time=now,
        request_ids=[key],
        choices=[0],
        steps=[row.step],
        layers=list(row.layers),
        stride=1,
        reasons=["full"],
        rates=[1.0],
        lens_entropy=np.full((1, len(row.layers)), np.nan, np.float16),
        heads=row.heads[None],
    )
