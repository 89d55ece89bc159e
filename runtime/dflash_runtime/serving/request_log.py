"""Requests that have ended: a log line and a span for each, the last hundred, rates of the hour."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from dflash_protocol.process.output import FIELDS, REQUESTS
from dflash_runtime.serving.hourly_rates import HourlyRates
from dflash_runtime.serving.request_record import RequestRecord

NUM_KEPT = 100

_LOG = logging.getLogger(REQUESTS)


class SpanSink(Protocol):
    """Where spans of requests go."""

    def add(self, record: RequestRecord) -> None:
        """A request has ended. Never waits."""


class RequestLog:
    """What becomes of requests. For several threads. `key_names` are of API keys by their index."""

    def __init__(self, key_names: Sequence[str] = (), spans: SpanSink | None = None) -> None:
        self._key_names, self._spans = key_names, spans
        self._lock = threading.Lock()
        self._latest: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self._rates = HourlyRates()

    def name_of(self, key: str) -> str:
        """The name of an API key, by its index as text; empty for no key."""
        is_known = key.isascii() and key.isdigit() and int(key) < len(self._key_names)
        return self._key_names[int(key)] if is_known else key

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended: once for each."""
        fields = record.as_fields()
        with self._lock:
            self._latest.append(fields)
            self._rates.add(record)
        if self._spans is not None:
            try:
                self._spans.add(record)
            except Exception:  # of another project's library: the client has waited for its answer
                # docs: a bug, or a version of OpenTelemetry's library that differs, with its
                # traceback: report it. The request was answered, and has no span
                _LOG.exception("a request has no span")
        if not _LOG.isEnabledFor(logging.INFO):
            return
        trace_id = record.trace_id
        first, rate = record.first_token_s, record.stats.decode_tokens_per_s
        # docs: a request has ended: its id, that of the answer where it has one; the name of its
        # key; tokens of the prompt, of which so many were cached, and written; seconds to the first
        # token; its rate after that; and `stop`, `length`, `cancelled`, `error` or `queue_full`.
        # `--log-level warning` leaves these lines out
        _LOG.info(
            "request %s%s: %d tokens in (%d cached), %d out, first after %s, %s, %s",
            record.request_id,
            f" of {record.key}" if record.key else "",
            record.num_prompt,
            record.num_cached,
            record.num_generated,
            "-" if first is None else f"{first:.3f} s",
            f"{rate:.1f} tokens/s" if rate else "-",
            record.end,
            extra={FIELDS: fields if trace_id is None else {**fields, "trace_id": trace_id}},
        )

    def latest(self) -> list[dict[str, Any]]:
        """The last `NUM_KEPT` requests that ended, the newest first; see `RequestRecord`."""
        with self._lock:
            return [*reversed(self._latest)]

    def last_hour(self) -> list[dict[str, Any]]:
        """See `HourlyRates.as_records`."""
        with self._lock:
            return self._rates.as_records()
