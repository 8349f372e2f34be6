"""Trace context in and out, and the engine step id that travels downstream."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import (
    CarrierT,
    Getter,
    Setter,
    TextMapPropagator,
    default_getter,
    default_setter,
)
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.names import HEADER_STEP

_STEP = otel_context.create_key("quaver-step")
_TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")
_TRACEPARENT = TraceContextTextMapPropagator()


class StepPropagator(TextMapPropagator):
    """Carries the engine step id in the header `x-quaver-step`."""

    def extract(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        getter: Getter[CarrierT] = default_getter,
    ) -> Context:
        """Read the header; anything but a decimal number is ignored."""
        context = Context() if context is None else context
        values = getter.get(carrier, HEADER_STEP) or []
        if values and values[0].isascii() and values[0].isdigit() and len(values[0]) < 19:
            return otel_context.set_value(_STEP, int(values[0]), context)
        return context

    def inject(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        setter: Setter[CarrierT] = default_setter,
    ) -> None:
        """Write the header when the context has a step."""
        step = step_of(context)
        if step is not None:
            setter.set(carrier, HEADER_STEP, str(step))

    @property
    def fields(self) -> set[str]:
        """Headers this propagator writes."""
        return {HEADER_STEP}


propagator = CompositePropagator([_TRACEPARENT, StepPropagator()])


def step_of(context: Context | None = None) -> int | None:
    """Return the step id a context carries."""
    step = otel_context.get_value(_STEP, context)
    return step if isinstance(step, int) else None


def with_step(step: int, context: Context | None = None) -> Context:
    """Return a context that carries a step id."""
    return otel_context.set_value(_STEP, step, Context() if context is None else context)


def parent_of(trace_id: str | None, headers: Mapping[str, str]) -> tuple[SpanContext | None, int, int | None]:
    """Return (remote parent or None, trace id to use, upstream step id or None).

    `trace_id` is a whole `traceparent` header or a bare 32-digit trace id; anything else, and an
    absent one, starts a new trace.
    """
    carrier = {"traceparent": trace_id or "", **headers}
    context = propagator.extract(carrier, Context())
    parent = trace.get_current_span(context).get_span_context()
    if parent.is_valid:
        return parent, parent.trace_id, step_of(context)
    if trace_id and _TRACE_ID.fullmatch(trace_id) and int(trace_id, 16):
        return None, int(trace_id, 16), step_of(context)
    return None, secrets.randbits(128) or 1, step_of(context)


def headers_for(trace_id: int, span_id: int, step: int | None) -> dict[str, str]:
    """Return the headers to send with a call made on behalf of a request."""
    span = trace.NonRecordingSpan(SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED)))
    context = trace.set_span_in_context(span, Context())
    carrier: dict[str, str] = {}
    propagator.inject(carrier, context if step is None else with_step(step, context))
    return carrier
