"""Spans of requests for OpenTelemetry, where the environment asks for them. The only module that imports it.

A request's span has one for encoding its texts, one for its time in the queue, and one for each batch that
took rows of it, with the model's pass inside. Other callers' requests in the same batch have its number too.
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
    """Makes spans and hands them on."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """`processor`: None: send them to where OTEL_EXPORTER_OTLP_ENDPOINT says, in the background."""
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
            ids = span.get_span_context()
            made = replace(
                trace,
                trace_id=f"{ids.trace_id:032x}",
                span_id=f"{ids.span_id:016x}",
                flags=f"{ids.trace_flags:02x}",
            )
            span.set_attribute("weir.request_id", trace.request_id)
            yield made, span

    def ended(self, span: api.Span, status: int) -> None:
        """A request's answer."""
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(api.StatusCode.ERROR)

    def steps(self, outcome: Outcome, *, begun_s: float, encoded_s: float) -> None:
        """What the current request spent its time on. Times are monotonic seconds."""
        if not api.get_current_span().is_recording():
            return
        ahead_ns = time.time_ns() - time.monotonic_ns()

        def child(name: str, start_s: float, end_s: float, parent: api.Span | None = None) -> api.Span:
            context = api.set_span_in_context(parent) if parent else None
            span = self._tracer.start_span(name, context, start_time=ahead_ns + int(start_s * 1e9))
            span.end(ahead_ns + int(end_s * 1e9))
            return span

        child("encode", begun_s, encoded_s)
        child("queue", encoded_s, max(encoded_s, outcome.started_s))
        for done in outcome.batches:
            ended_s = done.started_s + done.compute_s
            context = self._tracer.start_span("batch", start_time=ahead_ns + int(done.taken_s * 1e9))
            context.set_attributes(
                {
                    "weir.batch.number": done.number,
                    "weir.batch.rows": len(done.batch.rows),
                    "weir.batch.requests": len(done.batch.requests),
                    "weir.batch.tokens": done.batch.tokens,
                    "weir.batch.padded_tokens": done.batch.padded,
                }
            )
            child("forward", done.started_s, ended_s, context)
            context.end(ahead_ns + int(ended_s * 1e9))

    def flush(self) -> None:
        """Send what is left. Takes as long as the collector likes: the SDK heeds no limit of time here."""
        self._provider.force_flush()
