"""`bagu serve --otlp-endpoint URL`: a trace of every API request, sent by OpenTelemetry (`pip install 'bagu[otel]'`).

    chat tiny                 from the arrival of the request to the end of its response
      queue                   until the first step of its prefill
      prefill                 until the first token
      decode                  until the end of the response

Attributes use the names of OpenTelemetry's semantic conventions for generative AI. A request with a W3C `traceparent`
header continues the client's trace.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from bagu.errors import ArgumentError, BaguError
from bagu.serve.http.observe.record import RequestRecord

OPERATIONS: Mapping[str, str] = {  # routes that are traced: their gen_ai.operation.name
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


def attributes(record: RequestRecord) -> dict[str, Any]:
    """The attributes of the request's span. Prompts and outputs are not sent."""
    values = {
        "gen_ai.operation.name": OPERATIONS[record.route],
        "gen_ai.provider.name": "bagu",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "bagu.request.id": record.id,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "error.type": str(record.status) if record.status >= 400 else None,
    }
    return {name: value for name, value in values.items() if value is not None}


class Tracing:
    """An observer of requests that makes their spans. Spans are sent in batches from a thread of the SDK."""

    def __init__(self, endpoint: str) -> None:
        self._provider, self._propagator, self._api = _provider(_traces_url(endpoint))
        self._tracer = self._provider.get_tracer("bagu.serve")

    def __call__(self, record: RequestRecord) -> None:
        if record.route not in OPERATIONS or record.status == 401:  # without a key nobody writes into the traces
            return
        carrier = {name: record.headers.get(name.encode(), b"").decode("latin-1") for name in self._propagator.fields}
        parent = self._propagator.extract({name: value for name, value in carrier.items() if value})
        values = attributes(record)
        name = f"{values['gen_ai.operation.name']} {record.model or ''}".strip()
        begin, end = record.began_ns, record.began_ns + _ns(record.total_s)
        span = self._tracer.start_span(
            name, context=parent, kind=self._api.SpanKind.SERVER, attributes=values, start_time=begin
        )
        if record.status >= 500:
            span.set_status(self._api.StatusCode.ERROR)
        inside = self._api.set_span_in_context(span)
        for child, first, last in _phases(record):
            begin_ns = begin + _ns(first)
            self._tracer.start_span(child, context=inside, start_time=begin_ns).end(begin + _ns(last))
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the phases that were reached, in seconds since the arrival."""
    limits = [0.0, record.queue_end_s, record.ttft_s, record.total_s]
    names = ("queue", "prefill", "decode")
    found = zip(names, limits, limits[1:], strict=False)
    return [(name, first, last) for name, first, last in found if first is not None and last is not None]


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _traces_url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        hint = "the URL of an OTLP/HTTP receiver, e.g. http://localhost:4318"
        raise ArgumentError(f"the OTLP endpoint is {endpoint!r}", hint=hint)
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _provider(url: str) -> tuple[Any, Any, Any]:
    """The SDK's tracer provider that exports to `url`, the propagator of W3C headers, and the module of the API."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ModuleNotFoundError as error:
        hint = f"run pip install 'bagu[otel]' in {sys.prefix}"
        raise BaguError(f"--otlp-endpoint needs {error.name}, which is not installed", hint=hint) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "bagu")
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider, TraceContextTextMapPropagator(), trace
