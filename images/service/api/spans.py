"""Spans of requests for OpenTelemetry, where the environment asks for them. The only module that imports it.

A request's span has child spans for encoding its texts, for its time in the queue, and for each batch that
included rows of it, with the model's pass inside. The batch's number is the same in all of its requests.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry import trace as api
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.api.tracing import Trace
from service.batching.worker import Outcome


class Spans:
    """Makes spans and exports them."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """`processor`: None exports to OTEL_EXPORTER_OTLP_ENDPOINT, in the background."""
        if processor is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter())
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win
        self._provider = TracerProvider(resource=Resource({SERVICE_NAME: "weir"}).merge(Resource.create()))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weir")
        self._carrier = TraceContextTextMapPropagator()

    @contextmanager
    def request(
        self, route: str, trace: Trace, headers: Mapping[str, str]
    ) -> Iterator[tuple[Trace, api.Span]]:
        """A span around the block, and the trace with its ids. `headers`: traceparent, tracestate."""
        parent = self._carrier.extract(dict(headers))
        kind = api.SpanKind.SERVER
        with self._tracer.start_as_current_span(route, parent, kind, record_exception=False) as span:
            context = span.get_span_context()
            traced = replace(
                trace,
                trace_id=f"{context.trace_id:032x}",
                span_id=f"{context.span_id:016x}",
                flags=f"{context.trace_flags:02x}",
            )
            span.set_attribute("weir.request_id", trace.request_id)
            yield traced, span

    def ended(self, span: api.Span, status: int) -> None:
        """Note the status of a request's answer in its span."""
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(api.StatusCode.ERROR)

    def steps(self, outcome: Outcome, *, begun_s: float, encoded_s: float) -> None:
        """Add the child spans of the current request. Times are monotonic seconds."""
        if not api.get_current_span().is_recording():
            return
        offset_ns = time.time_ns() - time.monotonic_ns()

        def child(name: str, start_s: float, end_s: float, parent: api.Span | None = None) -> api.Span:
            context = api.set_span_in_context(parent) if parent else None
            span = self._tracer.start_span(name, context, start_time=offset_ns + int(start_s * 1e9))
            span.end(offset_ns + int(end_s * 1e9))
            return span

        child("encode", begun_s, encoded_s)
        child("queue", encoded_s, max(encoded_s, outcome.started_s))
        for computed in outcome.batches:
            batch, ended_s = computed.batch, computed.started_s + computed.compute_s
            span = self._tracer.start_span("batch", start_time=offset_ns + int(computed.taken_s * 1e9))
            span.set_attributes(
                {
                    "weir.batch.number": computed.number,
                    "weir.batch.rows": len(batch.rows),
                    "weir.batch.requests": len(batch.requests),
                    "weir.batch.tokens": batch.tokens,
                    "weir.batch.padded_tokens": batch.padded,
                }
            )
            child("forward", computed.started_s, ended_s, span)
            span.end(offset_ns + int(ended_s * 1e9))

    def flush(self) -> None:
        """Export what is left. Takes as long as the collector does: the SDK has no timeout here."""
        self._provider.force_flush()
