"""Spans: what a collector gets of a request, and that nothing is imported while they are off."""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.generation import GenerationStats
from dflash_runtime.serving.request_log import RequestLog
from dflash_runtime.serving.request_record import RequestRecord
from dflash_runtime.serving.spans import Spans
from support.processes import run_python

LIBRARY = ("opentelemetry.sdk", "opentelemetry.exporter", "google.protobuf", "requests")
"""Not its API alone, which FastAPI imports if it is there."""
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector, and the bodies that it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()
        thread.join()


def spans_of(bodies: list[bytes]) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    resources = [
        each
        for body in bodies
        for each in ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    for each in resources:
        names = {item.key: item.value.string_value for item in each.resource.attributes}
        assert names["service.name"] == "dflash-moe"
    return [span for each in resources for scope in each.scope_spans for span in scope.spans]


def record_of(**fields: Any) -> RequestRecord:
    return RequestRecord(
        request_id="cmpl-1", key="alice", num_prompt=12, max_tokens=50, asked_unix_s=1000.0,
        num_generated=7, queue_s=0.25, first_token_s=0.5, whole_s=2.0,
        stats=GenerationStats(12, 8, 7, 0.25, 1.5), **fields,
    )  # fmt: skip


def test_a_collector_gets_a_span_of_each_request(collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    spans = Spans.to(endpoint, lambda: "demo")
    log = RequestLog(spans=spans)
    parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    log.ended(record_of(end="stop", trace={"traceparent": parent, "tracestate": "a=b"}))
    log.ended(record_of(end="error"))
    log.ended(record_of(end="stop", trace={"traceparent": "nonsense"}))
    log.ended(record_of(end="stop", trace={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}))
    spans.close()
    first, second, third = spans_of(bodies)  # the client does not want the fourth
    assert first.trace_id.hex() == TRACE_ID
    assert first.parent_span_id.hex() == PARENT_ID
    assert first.trace_state == "a=b"
    assert first.name == "generate demo"
    assert first.end_time_unix_nano - first.start_time_unix_nano == 2 * 10**9
    assert first.start_time_unix_nano == 1000 * 10**9
    values = {each.key: each.value for each in first.attributes}
    assert values["gen_ai.response.id"].string_value == "cmpl-1"
    assert values["gen_ai.request.model"].string_value == "demo"
    assert values["gen_ai.usage.input_tokens"].int_value == 12
    assert values["gen_ai.usage.output_tokens"].int_value == 7
    assert values["gen_ai.usage.cache_read.input_tokens"].int_value == 8
    assert values["dflash.key"].string_value == "alice"
    assert values["dflash.first_token_s"].double_value == 0.5
    assert values["dflash.tokens_per_s"].double_value == 4.0
    reasons = values["gen_ai.response.finish_reasons"].array_value.values
    assert [each.string_value for each in reasons] == ["stop"]
    assert second.parent_span_id == third.parent_span_id == b""
    assert second.status.code == 2  # an error
    assert first.status.code == third.status.code == 0


def test_a_collector_that_does_not_answer_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_runtime.serving.spans._EXPORT_S", 0.3)
    spans = Spans.to("http://127.0.0.1:9/v1/traces", lambda: None)
    began_s = time.monotonic()
    for _ in range(20):
        spans.add(record_of(end="stop"))
    assert time.monotonic() - began_s < 1
    spans.close()
    assert time.monotonic() - began_s < 5


def test_without_the_library_the_option_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"install dflash-moe\[otel\]"):
        Spans.to("http://127.0.0.1:9/v1/traces", lambda: None)


def test_nothing_is_imported_while_they_are_off() -> None:
    program = "import sys, dflash_runtime.serving.server; print(sorted(sys.modules))"
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr
    loaded = ast.literal_eval(ended.stdout)
    assert not [each for each in loaded if each.startswith(LIBRARY)]
