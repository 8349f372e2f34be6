"""Which spans are exported: the sampler's choice, and every trace that turned out long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

from telemetry import names

_MAX_HELD = 1024


class RecordAll(Sampler):
    """Asks another sampler, but records what it drops, so that the end can still decide."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def should_sample(  # noqa: PLR0917 - the shape OpenTelemetry asks for
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Return the inner decision with DROP raised to RECORD_ONLY."""
        result = self.sampler.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        if result.decision is Decision.DROP:
            return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)
        return result

    def get_description(self) -> str:
        """Name the sampler, as OpenTelemetry asks."""
        return f"RecordAll({self.sampler.get_description()})"


class KeepLong(SpanProcessor):
    """Hands on sampled spans, and unsampled traces whose root had more than `tokens` tokens.

    Unsampled children wait for their local root, at most 1,024 traces at a time. What is kept
    against the sampler is handed on as sampled.
    """

    def __init__(self, inner: SpanProcessor, tokens: int = 1000) -> None:
        self.inner, self.tokens = inner, tokens
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is decided at the start."""

    def on_end(self, span: ReadableSpan) -> None:
        """Hand on, hold, or let go."""
        context = span.get_span_context()
        if context is None:
            return
        if context.trace_flags.sampled:
            self.inner.on_end(span)
            return
        if span.parent is not None and not span.parent.is_remote:
            self._held.setdefault(context.trace_id, []).append(span)
            if len(self._held) > _MAX_HELD:
                self._held.popitem(last=False)
            return
        children = self._held.pop(context.trace_id, [])
        tokens = (span.attributes or {}).get(names.LLM_COMPLETION_TOKENS, 0)
        if isinstance(tokens, int) and tokens > self.tokens:
            for kept in (*children, span):
                self.inner.on_end(_sampled(kept))

    def shutdown(self) -> None:
        """Shut the inner processor down."""
        self.inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the inner processor."""
        return self.inner.force_flush(timeout_millis)


def _sampled(span: ReadableSpan) -> ReadableSpan:
    context = span.get_span_context() or trace.INVALID_SPAN_CONTEXT
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(context.trace_id, context.span_id, False, flags, context.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
