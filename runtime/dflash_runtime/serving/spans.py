"""OpenTelemetry: a span for each request, sent to a collector by OpenTelemetry's own library.

The library is imported here alone, and only if the settings name a collector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_protocol import __version__
from dflash_protocol.errors import SettingsError
from dflash_runtime.serving.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXPORT_S = 5.0
"""Longest time that the collector may take for a batch, or the server at its end for the last."""

_UNNAMED = "unknown_service"

_NAMES = {
    # Ours: OpenTelemetry's, of its conventions for generative models, or ours with a prefix.
    "request_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "key": "dflash.key",
    "queue_s": "dflash.queue_s",
    "first_token_s": "dflash.first_token_s",
    "tokens_per_s": "dflash.tokens_per_s",
}


class Spans:
    """Sends spans. Owns: the library's thread that sends them, until `close`."""

    def __init__(self, provider: TracerProvider, model: Callable[[], str | None]) -> None:
        """`model` gives the model's id once it is known."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("dflash-moe", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model: Callable[[], str | None]) -> Spans:
        """Spans for the collector at a URL, over HTTP.

        Raises: SettingsError if the library is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SettingsError(
                # docs: install dflash-moe with the extra `otel`, or leave the option out
                f"otlp_endpoint: OpenTelemetry is not installed ({error}); install dflash-moe[otel]"
            ) from error
        resource = Resource.create({SERVICE_VERSION: __version__})
        # The library's variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first.
        if str(resource.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
            resource = resource.merge(Resource({SERVICE_NAME: "dflash-moe"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, model)

    def add(self, record: RequestRecord) -> None:
        """Queue the span of a request that has ended; it is dropped if too many wait."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        fields = record.as_fields()
        attributes: dict[str, Any] = {
            name: fields[ours] for ours, name in _NAMES.items() if fields[ours] is not None
        }
        attributes |= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "dflash-moe",
            "gen_ai.response.finish_reasons": [record.end],
        }
        if (model := self._model()) is not None:
            attributes["gen_ai.request.model"] = model
        asked_ns = int(record.asked_unix_s * 1e9)
        span = self._tracer.start_span(
            "generate" if model is None else f"generate {model}",
            context=self._propagator.extract(record.trace),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=asked_ns,
        )
        if record.end in ("error", "queue_full"):
            span.set_status(Status(StatusCode.ERROR, record.end))
        span.end(asked_ns + int((record.whole_s or 0.0) * 1e9))

    def close(self) -> None:
        """Send what is left, and end; what takes longer than `_EXPORT_S` is lost."""
        # The library bounds the time of a batch, not of all.
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(_EXPORT_S)
