"""Engine events turned into request records, sink events, and the end of what was left open."""

from __future__ import annotations

import datetime
from typing import Any

from engine.hooks import RequestEnded, RequestStarted
from engine.messages import RequestMeta
from telemetry import names
from telemetry.business import Outcome
from telemetry.open_requests import OpenRequest
from telemetry.propagation import parent_of
from telemetry.signals import BusinessEvent, ResponseEnded, ResponseStarted


def started(event: RequestStarted, route: str) -> ResponseStarted:
    """Return what a sink may know of a start: no faults, no text, the capped route."""
    meta = event.meta
    return ResponseStarted(
        request_id=meta.request_id,
        tenant=meta.tenant,
        route=route,
        canary=meta.canary,
        model=event.model,
        temperature=event.temperature,
        prompt_tokens=event.prompt_tokens,
        time=event.time,
        group=meta.headers.get("x-quaver-group", ""),
    )


def ended(event: RequestEnded) -> ResponseEnded:
    """Return what a sink may know of an end."""
    return ResponseEnded(
        request_id=event.meta.request_id,
        time=event.time,
        finish_reason=event.reason,
        disconnected=event.disconnected,
        completion_tokens=event.completion_tokens,
        aggregates=event.aggregates,
    )


def business(outcome: Outcome, meta: RequestMeta, route: str, time: float) -> BusinessEvent:
    """Return the business event of an end or a rejection."""
    return BusinessEvent(kind=outcome, request_id=meta.request_id, tenant=meta.tenant, route=route, time=time)


def stopped(request: OpenRequest, time: float) -> RequestEnded:
    """Return the end of a request that the server left open when it stopped."""
    start = request.started
    tokens = sum(choice.tokens for choice in request.choices.values())
    firsts = [c.first_time for c in request.choices.values() if c.first_time is not None]
    return RequestEnded(
        meta=start.meta,
        time=time,
        reason="error",
        disconnected=False,
        error="the server stopped",
        prompt_tokens=start.prompt_tokens,
        completion_tokens=tokens,
        queued_s=0.0,
        prefill_s=0.0,
        first_token_s=min(firsts) - start.time if firsts else None,
        duration_s=max(0.0, time - start.time),
        token_times_s=[],
        faults=[],
        aggregates={},
        output=None,
    )


def request(
    request: OpenRequest, event: RequestEnded, outcome: str, quantization: str, capture: bool
) -> dict[str, Any]:
    """Return the row of `telemetry.record.REQUESTS` for a request that ended."""
    start, meta = request.started, request.started.meta
    return {
        "request_id": meta.request_id,
        "trace_id": request.trace,
        "session": meta.session,
        "tenant": meta.tenant,
        "route": meta.route,
        "canary": meta.canary,
        "endpoint": start.endpoint,
        "stream": start.stream,
        "model": start.model,
        "quantization": quantization,
        "started": _utc(start.time),
        "ended": _utc(event.time),
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.completion_tokens,
        "temperature": start.temperature,
        "queued_s": event.queued_s,
        "prefill_s": event.prefill_s,
        "first_token_s": event.first_token_s,
        "duration_s": event.duration_s,
        "token_times_s": list(event.token_times_s),
        "finish_reason": event.reason,
        "disconnected": event.disconnected,
        "error": event.error,
        **{f"kv_hit_{tier}": tokens for tier, tokens in hits(event).items()},
        "kv_hit_ratio": hit_ratio(event),
        "kv_wait_s": None if event.tier_tokens is None else event.loading_s,
        "aggregates": event.aggregates | _sentence(request) | _lost(request),
        "faults": list(request.faults),
        "alerts": list(dict.fromkeys(name for _, name in request.alerts)),
        "outcome": outcome,
        "prompt": start.prompt if capture else None,
        "output": event.output if capture else None,
    }


def _sentence(request: OpenRequest) -> dict[str, float]:
    """Return how many tokens the first sentence of choice 0 had, once it has ended."""
    first = request.choices.get(0)
    length = None if first is None else first.sentence.length
    return {} if length is None else {"sentence_tokens": float(length)}


def _lost(request: OpenRequest) -> dict[str, float]:
    """Return how many token rows and how much layer detail got lost, where some did."""
    return {f"lost_{what}": float(count) for what, count in request.lost.items()}


def hits(event: RequestEnded) -> dict[str, int]:
    """Return the prompt's cached tokens by tier; nothing where they are not known."""
    if event.tier_tokens is None:
        return {}
    return {tier: event.tier_tokens.get(tier, 0) for tier in names.TIERS}


def hit_ratio(event: RequestEnded) -> float | None:
    """Return which share of the prompt's tokens was cached."""
    if event.cached_tokens is None or not event.prompt_tokens:
        return None
    return event.cached_tokens / event.prompt_tokens


def rejected(meta: RequestMeta, status: int, code: str, model: str, time: float) -> dict[str, Any]:
    """Return the row of a request that was turned away; what it would have been is not known."""
    _, trace_id, _ = parent_of(meta.trace_id, meta.headers)
    return {
        "request_id": meta.request_id,
        "trace_id": f"{trace_id:032x}",
        "session": meta.session,
        "tenant": meta.tenant,
        "route": meta.route,
        "canary": meta.canary,
        "endpoint": "unknown",
        "stream": False,
        "model": model,
        "started": _utc(time),
        "ended": _utc(time),
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "duration_s": 0.0,
        "finish_reason": "shed" if status in (429, 503) else "error",
        "disconnected": False,
        "error": f"{status} {code}",
        "outcome": "rejected",
    }


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
