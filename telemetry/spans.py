"""Request spans, made when a request ends, with the times at which things happened.

Nothing is attached to the running context, so nothing can leak across an await; each request
makes its spans exactly once, whatever way it ended.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from engine.hooks import RequestEnded
from telemetry import names, rows
from telemetry.open_requests import OpenChoice, OpenRequest
from telemetry.otlp import CountedExporter
from telemetry.sampling import KeepLong, RecordAll
from telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)


class ChosenIds(RandomIdGenerator):
    """Random ids, except for the one span whose ids were drawn when its request started."""

    def __init__(self) -> None:
        self._chosen: tuple[int, int] | None = None

    @contextmanager
    def use(self, trace_id: int, span_id: int) -> Iterator[None]:
        """Give these ids to the span started inside."""
        self._chosen = (trace_id, span_id)
        try:
            yield
        finally:
            self._chosen = None

    def generate_trace_id(self) -> int:
        """Return the chosen trace id, or a random one."""
        return self._chosen[0] if self._chosen else super().generate_trace_id()

    def generate_span_id(self) -> int:
        """Return the chosen span id, or a random one."""
        return self._chosen[1] if self._chosen else super().generate_span_id()


class Spans:
    """Makes the spans of ended requests, keeps the last ones, exports where configured."""

    def __init__(
        self,
        settings: TelemetrySettings,
        resource: Resource,
        drop: Callable[[str, int], None],
        exporter: SpanExporter | None = None,
    ) -> None:
        self.settings = settings
        self.ids = ChosenIds()
        self._exported = exporter is not None
        self._recent: OrderedDict[str, Callable[[], list[Span]]] = OrderedDict()
        self._provider = TracerProvider(
            sampler=RecordAll(ParentBased(TraceIdRatioBased(settings.trace_ratio))),
            resource=resource,
            id_generator=self.ids,
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_events=128, max_attribute_length=65_536),
        )
        if exporter is not None:
            batch = BatchSpanProcessor(CountedExporter(exporter, drop), max_queue_size=4096)
            self._provider.add_span_processor(KeepLong(batch, settings.trace_long_tokens))
        self._tracer = self._provider.get_tracer("quaver")

    def emit(self, request: OpenRequest, ended: RequestEnded, outcome: str) -> None:
        """Take in a request that ended. Unless they are exported, its spans are made when somebody looks."""
        make = functools.cache(lambda: self._make(request, ended, outcome))
        if self._exported:
            make()
        if self.settings.traces_kept:
            self._recent[request.started.meta.request_id] = make
            while len(self._recent) > self.settings.traces_kept:
                self._recent.popitem(last=False)

    def _make(self, request: OpenRequest, ended: RequestEnded, outcome: str) -> list[Span]:
        """The server span of a request, then its children."""
        started = request.started
        operation = names.OPERATIONS[started.endpoint]
        context = Context()
        if request.parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(request.parent), context)
        end = max(ended.time, started.time)
        with self.ids.use(request.trace_id, request.span_id):
            span = self._tracer.start_span(
                f"{operation} {started.model}",
                context,
                SpanKind.SERVER,
                self._attributes(request, ended, operation, outcome),
                start_time=_ns(started.time),
            )
        if ended.first_token_s is not None:
            span.add_event(names.EVENT_FIRST_TOKEN, timestamp=_ns(started.time + ended.first_token_s))
        for time, name in request.alerts:
            span.add_event(names.EVENT_ALERT, {"name": name}, timestamp=_ns(time))
        children = self._children(request, ended, trace.set_span_in_context(span, Context()), end)
        if ended.reason in ("abort", "error", "shed"):
            cause = ended.error or ("client disconnected" if ended.disconnected else ended.reason)
            span.set_status(Status(StatusCode.ERROR, cause))
        span.end(_ns(end))
        return [span, *children]

    def recent(self, request_id: str) -> list[dict[str, Any]]:
        """Return the spans of one of the last requests, as `view` shows them; none of older ones."""
        spans = self._recent.get(request_id, list)()
        return [view(span) for span in spans if isinstance(span, ReadableSpan)]

    def close(self) -> bool:
        """Export what is queued. False when that took longer than the export timeout."""
        closing = threading.Thread(target=self._provider.shutdown, name="quaver-otlp-close", daemon=True)
        closing.start()
        closing.join(self.settings.otlp_timeout_s)
        return not closing.is_alive()

    def _children(
        self, request: OpenRequest, ended: RequestEnded, context: Context, end: float
    ) -> list[Span]:
        started = request.started
        first = min((c.first_time for c in request.choices.values() if c.first_time is not None), default=end)
        admitted = min(started.time + max(ended.queued_s, 0.0), first)
        encode_start = min(admitted + ended.loading_s, first)
        spans = []
        if encode_start > admitted:
            load = self._tracer.start_span(
                names.SPAN_KV_LOAD, context, attributes=_hits(ended), start_time=_ns(admitted)
            )
            load.end(_ns(encode_start))
            spans.append(load)
        encode = self._tracer.start_span(
            names.SPAN_ENCODE,
            context,
            attributes={
                names.LLM_PROMPT_LENGTH: started.prompt_tokens,
                names.LLM_MODEL_ID: started.model,
                names.QUAVER_QUEUED: ended.queued_s,
            },
            start_time=_ns(encode_start),
        )
        encode.end(_ns(max(encode_start, min(first, end))))
        spans.append(encode)
        for number, choice in sorted(request.choices.items()):
            if choice.first_time is None or choice.last_time is None:
                continue
            generate = self._tracer.start_span(
                names.SPAN_GENERATE,
                context,
                attributes=_choice_attributes(number, choice, started.prompt_tokens),
                start_time=_ns(choice.first_time),
            )
            if choice.finish is not None and choice.finish.error:
                generate.set_status(Status(StatusCode.ERROR, choice.finish.error))
            generate.end(_ns(max(choice.first_time, choice.last_time)))
            spans.append(generate)
        return spans

    def _attributes(
        self, request: OpenRequest, ended: RequestEnded, operation: str, outcome: str
    ) -> dict[str, Any]:
        started, meta = request.started, request.started.meta
        choices = request.choices.values()
        steps = [(c.first_step, c.last_step) for c in choices if c.first_time is not None]
        reasons = [c.finish.reason for c in choices if c.finish is not None] or [ended.reason]
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: started.model,
            names.REQUEST_MAX_TOKENS: started.max_tokens,
            names.REQUEST_TEMPERATURE: started.temperature,
            names.RESPONSE_ID: meta.request_id,
            names.RESPONSE_MODEL: started.model,
            names.FINISH_REASONS: reasons,
            names.INPUT_TOKENS: ended.prompt_tokens,
            names.OUTPUT_TOKENS: ended.completion_tokens,
            names.LLM_REQUEST_TYPE: started.endpoint,
            names.LLM_PROMPT_TOKENS: ended.prompt_tokens,
            names.LLM_COMPLETION_TOKENS: ended.completion_tokens,
            names.QUAVER_REQUEST_ID: meta.request_id,
            names.QUAVER_ROUTE: request.route,
            names.QUAVER_TENANT: request.tenant,
            names.QUAVER_CANARY: meta.canary,
            names.QUAVER_OUTCOME: outcome,
        }
        ratio = rows.hit_ratio(ended)
        if ratio is not None:
            attributes[names.LLM_KV_HIT_RATIO] = ratio
        attributes |= _hits(ended)
        if started.choices > 1:
            attributes[names.REQUEST_CHOICES] = started.choices
        if ended.token_times_s:
            attributes[names.LLM_TOKEN_LATENCY] = sum(ended.token_times_s) / len(ended.token_times_s)
        if steps:
            attributes[names.LLM_DECODE_STEP_LENGTH] = max(s[1] for s in steps) - min(s[0] for s in steps) + 1
        if meta.session:
            attributes[names.CONVERSATION_ID] = meta.session
        if request.upstream_step is not None:
            attributes[names.QUAVER_UPSTREAM_STEP] = request.upstream_step
        if request.faults:
            attributes[names.QUAVER_FAULTS] = request.faults
        if ended.reason in ("abort", "error", "shed"):
            attributes[names.ERROR_TYPE] = ended.reason
        if self.settings.capture_content:
            attributes |= _content(started.prompt, ended.output)
        attributes |= {
            names.QUAVER_AGGREGATE + key: value
            for key, value in ended.aggregates.items()
            if math.isfinite(value)
        }
        return attributes | {names.QUAVER_ANNOTATION + key: v for key, v in request.annotations.items()}


def view(span: ReadableSpan) -> dict[str, Any]:
    """Return a span as plain JSON types; times are unix seconds."""
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "start": (span.start_time or 0) / 1e9,
        "end": (span.end_time or 0) / 1e9,
        "status": span.status.status_code.name.lower(),
        "status_message": span.status.description,
        "attributes": {
            key: list(v) if isinstance(v, tuple) else v for key, v in (span.attributes or {}).items()
        },
        "events": [
            {"name": event.name, "time": event.timestamp / 1e9, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
    }


def _choice_attributes(number: int, choice: OpenChoice, prompt_tokens: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        names.LLM_STEP_INDEX: choice.last_step,
        names.LLM_KV_SIZE: prompt_tokens + choice.tokens,
        names.LLM_COMPLETION_TOKENS: choice.tokens,
        names.QUAVER_CHOICE: number,
    }
    if choice.finish is not None:
        attributes[names.FINISH_REASONS] = [choice.finish.reason]
    return attributes


def _hits(ended: RequestEnded) -> dict[str, int]:
    return {names.QUAVER_KV_TOKENS + tier: tokens for tier, tokens in rows.hits(ended).items()}


def _content(prompt: str | None, output: str | None) -> dict[str, str]:
    pairs = ((names.INPUT_MESSAGES, prompt), (names.OUTPUT_MESSAGES, output))
    return {key: text for key, text in pairs if text is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
