"""Tells a signal sink of generated answers as telemetry tells it of those of a server, and scores them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alerting.open_response import raw_condition
from alerting.rules import RawPreset, Rules
from alerting.scores import Frozen, LayerRow, Response, fit, folds, response_scores
from alerting.statistics import ResponseTracker
from chaos.score.answer import Answer
from telemetry.signals import (
    BusinessEvent,
    LayerBatch,
    ResponseEnded,
    ResponseStarted,
    SignalSink,
    TokenBatch,
)

MODEL = "scored"
ROUTE = "qa"
_TENANT = "score"


def tell(
    sink: SignalSink,
    answer: Answer,
    request_id: str,
    *,
    now: float,
    temperature: float,
    interrupted: bool = False,
    route: str = ROUTE,
    canary: bool = False,
) -> None:
    """Tell of one whole answer, from its start to what became of it; all at `now`, unix seconds."""
    rows, heads = answer.token_rows, answer.head_rows
    ids, choices, steps = [request_id] * len(rows), [0] * len(rows), list(range(len(rows)))
    sink.on_started(
        ResponseStarted(
            request_id=request_id,
            tenant=_TENANT,
            route=route,
            canary=canary,
            model=MODEL,
            temperature=temperature,
            prompt_tokens=1,
            time=now,
            group=answer.family,
        )
    )
    first = len(rows) if answer.sentence is None else min(answer.sentence, len(rows))
    for part in (slice(0, first), slice(first, None)):
        if len(rows[part]):
            sink.on_tokens(
                TokenBatch(
                    time=now,
                    request_ids=ids[part],
                    choices=choices[part],
                    steps=steps[part],
                    signals=rows[part],
                )
            )
        if part.start == 0 and answer.sentence is not None:
            sink.on_sentence(request_id, 0, answer.sentence)
    if len(heads):
        sink.on_layers(
            LayerBatch(
                time=now,
                request_ids=ids,
                choices=choices,
                steps=steps,
                layers=list(range(answer.layers)),
                stride=1,
                reasons=["full"] * len(rows),
                rates=[1.0] * len(rows),
                lens_entropy=np.full((len(rows), answer.layers), np.nan, np.float16),
                heads=heads,
            )
        )
    sink.on_ended(
        ResponseEnded(
            request_id=request_id,
            time=now,
            finish_reason="stop",
            disconnected=interrupted,
            completion_tokens=len(rows),
            aggregates={},
        )
    )
    sink.on_business(
        BusinessEvent(
            kind="interrupted" if interrupted else "completed",
            request_id=request_id,
            tenant=_TENANT,
            route=route,
            time=now,
        )
    )


def response(answer: Answer) -> Response:
    """Return an answer as the scores read it."""
    layers = range(answer.layers)
    rows = [LayerRow(step, layers, heads) for step, heads in enumerate(answer.head_rows)]
    return Response(answer.token_rows, rows, answer.sentence)


def scores(answers: Sequence[Answer], frozen: Frozen) -> list[dict[str, float]]:
    """Score answers, one dict each."""
    return [response_scores(r.tokens, r.layers, r.sentence, frozen) for r in map(response, answers)]


def held_out_scores(
    healthy: Sequence[Answer], contrast: Sequence[tuple[Answer, bool]]
) -> list[dict[str, float]]:
    """Score healthy answers, each by a fit that has seen none of its family."""
    found: list[dict[str, float]] = []
    for out in folds(answer.family for answer in healthy):
        frozen = fit(
            [response(answer) for answer in healthy if answer.family not in out],
            [(response(answer), lacks) for answer, lacks in contrast if answer.family not in out],
        )
        found += scores([answer for answer in healthy if answer.family in out], frozen)
    return found


def raw_fires(answer: Answer, rules: Rules) -> bool:
    """Tell whether the fixed numbers of a raw preset call an answer an L1."""
    preset = next(p for p in rules.presets.values() if isinstance(p, RawPreset))
    tracker = ResponseTracker()
    tracker.watch_run(preset.confidence)
    for row in answer.token_rows.tolist():
        tracker.add(row)
        if raw_condition(tracker, preset):
            return True
    return False
