"""Metrics in the format of Prometheus, named after vLLM's where those have the same meaning.

Counters of owners are those that the engine's thread has published, read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dflash_runtime.engine.engine import EngineStats, GenerationStats
from dflash_runtime.engine.measured_speeds import MeasuredSpeeds
from dflash_runtime.experts.telemetry import HitCounts, LatencyHistogram, OwnerStats
from dflash_runtime.placement.plan import Plan
from dflash_runtime.serving.plan_metrics import (
    daemon_memory_metrics,
    disk_metrics,
    memory_metrics,
    move_metrics,
    plan_metrics,
    slot_metrics,
)

NAMESPACE = "dflash_moe"

_TIMES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip

_ROUND_TRIPS_S = tuple(2**power * 1e-9 for power in range(13, 36))
"""Powers of two from 8 us to 34 s: bounds at which the owners' histograms are exact."""

_OWNER_COUNTERS: Mapping[str, tuple[str, str]] = {
    # metric: field of OwnerStats, what it counts
    "owner_requests": ("requests", "Requests: one or more for each layer and chunk."),
    "owner_tokens": ("tokens", "Tokens in requests."),
    "owner_pairs": ("pairs", "(token, expert) pairs in requests."),
    "owner_sent_bytes": ("bytes_sent", "Payload sent."),
    "owner_received_bytes": ("bytes_received", "Payload received."),
    "owner_wait_seconds": ("wait_s", "Time the parent waited for an owner."),
    "owner_restarts": ("restarts", "Times a daemon came back after it was lost."),
    "owner_retries": (
        "retries",
        "Batches of a lost or late daemon that a replica or the parent computed.",
    ),
    "owner_fallbacks": (
        "fallbacks",
        "Batches of a lost or late daemon that the parent computed itself.",
    ),
    "owner_checksum_failures": (
        "checksum_failures",
        "Requests or replies that were damaged in transit.",
    ),
    "owner_deadline_failures": ("deadline_failures", "Requests that took too long."),
    "owner_not_finite_replies": (
        "not_finite",
        "Replies that were NaN or infinite, and computed elsewhere.",
    ),
    "owner_checked_replies": (
        "checked",
        "Batches that the parent computed too, and compared (CHECK_REPLIES).",
    ),
    "owner_wrong_replies": (
        "wrong_replies",
        "Replies that were checked and wrong: 0, or 1, after which the daemon is not used again.",
    ),
    "owner_stale_messages": (
        "stale",
        "Messages that matched no request in flight: late replies.",
    ),
    "owner_widened_messages": (
        "widened",
        "Messages with a value that IPC_DTYPE cannot hold, sent as f32.",
    ),
    "owner_breaker_opened": ("breaker_opened", "Times a daemon's circuit breaker opened."),
    "owner_breaker_refused": ("breaker_refused", "Batches that were not sent while it was open."),
}

_OWNER_GAUGES: tuple[tuple[str, str, Callable[[OwnerStats], float]], ...] = (
    ("owner_experts", "Experts it holds.", lambda owner: owner.num_experts),
    (
        "owner_gives_back_bytes",
        "How much less memory a daemon wants its experts to take, as another program needs it.",
        lambda owner: owner.give_back_bytes,
    ),
    ("owner_up", "0 while a daemon is lost, else 1.", lambda owner: not owner.is_lost),
)

_PHASE_COUNTERS: Mapping[str, tuple[str, str]] = {
    # metric: field of PhaseStats, what it counts
    "owner_phase_requests": ("requests", "Requests by phase: they tell the modes apart."),
    "owner_phase_queue_seconds": (
        "queue_s",
        "Time requests waited at a daemon, as it reports: for its other parents, or for the "
        "request before.",
    ),
    "owner_phase_compute_seconds": ("compute_s", "Time the owner computed, as it reports."),
}

_LAYER_COUNTERS: Mapping[str, tuple[str, str]] = {
    # metric: field of HitCounts, what it counts
    "layers": (
        "layers",
        "Layers of experts, each once for every step and every chunk of a prompt, or micro-batch "
        "of one.",
    ),
    "layers_hot_only": (
        "layers_hot_only",
        "Those of layers_total that needed only the parent's own device.",
    ),
}

_PLACES = ("hot", "remote", "cold", "offloaded")
"""Fields of HitCounts: where a chosen expert is computed."""


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # would double the lines
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

        def histogram(
            name: str, text: str, *labels: str, buckets: Sequence[float] = _TIMES_S
        ) -> Histogram:
            return Histogram(
                name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets
            )

        self.http_requests = counter("http_requests", "Answers.", "endpoint", "status")
        self.rejected = counter("requests_rejected", "Not taken into the queue.", "reason")
        self.finished = counter(
            "requests_finished", "Generations that ended: stop, length, cancelled, error.", "reason"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.reused_tokens = counter(
            "prefix_cache_hits", "Tokens of prompts that were not computed again."
        )
        self.generated_tokens = counter("generation_tokens", "Generated tokens, counted singly.")
        self.queue_s = histogram("request_queue_time_seconds", "From asking to the first layer.")
        self.first_token_s = histogram("time_to_first_token_seconds", "From asking.")
        self.token_s = histogram(
            "time_per_output_token_seconds",
            "From the second token on, one value for each generation.",
        )
        self.whole_s = histogram("e2e_request_latency_seconds", "From asking to the last token.")
        self.prefill_s = histogram("request_prefill_time_seconds", "Computing prompts.")
        self.decode_s = histogram(
            "request_decode_time_seconds", "Computing all tokens but the first."
        )
        self.owner_wait_s = histogram(
            "owner_generation_wait_seconds",
            "Time the parent waited for an owner, for each generation.",
            "owner",
        )
        self.owner_requests = histogram(
            "owner_generation_requests",
            "Requests to an owner, for each generation.",
            "owner",
            buckets=[4**power for power in range(11)],
        )
        self.speeds = MeasuredSpeeds()
        self.running = self._gauge("num_requests_running", "Generations being computed: 0 or 1.")
        self._owners_before: dict[str, tuple[float, int]] = {}

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Add the length of the queue to the metrics."""
        self._gauge("num_requests_waiting", "Length of the queue.").set_function(length)

    def watch_engine(
        self, stats: Callable[[], EngineStats], plan: Callable[[], Plan | None] = lambda: None
    ) -> None:
        """Add the counters of the engine and its owners, and its plan, to the metrics; both are
        called at each scrape, from any thread."""
        self.registry.register(_EngineCollector(stats, plan, self.speeds))

    def count_generation(self, reason: str, stats: GenerationStats) -> None:
        """Count a generation that ended."""
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(stats.num_prompt_tokens)
        self.reused_tokens.inc(stats.num_reused_tokens)
        self.speeds.add(stats)
        if stats.num_generated_tokens:
            self.prefill_s.observe(stats.prefill_s)
        if stats.num_generated_tokens > 1:
            self.decode_s.observe(stats.decode_s)
            self.token_s.observe(stats.decode_s / (stats.num_generated_tokens - 1))

    def count_owners(self, owners: Mapping[str, OwnerStats]) -> None:
        """Observe what owners did for the generation that just ended."""
        for name, owner in owners.items():
            wait_s, requests = self._owners_before.get(name, (0.0, 0))
            self._owners_before[name] = owner.wait_s, owner.requests
            self.owner_wait_s.labels(name).observe(owner.wait_s - wait_s)
            self.owner_requests.labels(name).observe(owner.requests - requests)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, namespace=NAMESPACE, registry=self.registry)


class _EngineCollector(Collector):
    """Reads the counters of an engine and its owners at each scrape."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        plan: Callable[[], Plan | None],
        speeds: MeasuredSpeeds,
    ) -> None:
        self._stats, self._plan, self._speeds = stats, plan, speeds

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from _hits(stats.hits)
        yield from _owners(stats.owners)
        yield from plan_metrics(self._plan(), self._speeds, NAMESPACE)
        yield from move_metrics(stats.moves, NAMESPACE)
        yield from memory_metrics(stats.memory, NAMESPACE)
        yield from daemon_memory_metrics(stats.daemon_memory, NAMESPACE)
        yield from disk_metrics(stats.disk, NAMESPACE)
        yield from slot_metrics(stats.slots, NAMESPACE)


def _hits(hits: HitCounts) -> Iterator[Metric]:
    for metric, (field, text) in _LAYER_COUNTERS.items():
        yield CounterMetricFamily(f"{NAMESPACE}_{metric}", text, value=getattr(hits, field))
    selections = CounterMetricFamily(
        f"{NAMESPACE}_selections",
        "Experts that were chosen for a token: hot are computed by the parent's own, remote by "
        "daemons, cold by the fallback, offloaded by the parent's device with copied weights.",
        labels=["place"],
    )
    for place in _PLACES:
        selections.add_metric([place], getattr(hits, place))
    yield selections


def _owners(owners: Mapping[str, OwnerStats]) -> Iterator[Metric]:
    for metric, (field, text) in _OWNER_COUNTERS.items():
        family = CounterMetricFamily(f"{NAMESPACE}_{metric}", text, labels=["owner", "kind"])
        for name, owner in owners.items():
            family.add_metric([name, owner.kind.value], getattr(owner, field))
        yield family
    labels = ["owner", "phase"]
    phases = [
        ([name, phase.value], stats)
        for name, owner in owners.items()
        for phase, stats in owner.phases.items()
    ]
    for metric, (field, text) in _PHASE_COUNTERS.items():
        family = CounterMetricFamily(f"{NAMESPACE}_{metric}", text, labels=labels)
        for values, stats in phases:
            family.add_metric(values, getattr(stats, field))
        yield family
    round_trips = HistogramMetricFamily(
        f"{NAMESPACE}_owner_round_trip_seconds",
        "From before a request is packed until its reply is received.",
        labels=labels,
    )
    for values, stats in phases:
        if stats.round_trips.num_samples:
            round_trips.add_metric(values, *_buckets_and_sum(stats.round_trips))
    yield round_trips
    for metric, text, value_of in _OWNER_GAUGES:
        gauge = GaugeMetricFamily(f"{NAMESPACE}_{metric}", text, labels=["owner", "kind"])
        for name, owner in owners.items():
            gauge.add_metric([name, owner.kind.value], value_of(owner))
        yield gauge


def _buckets_and_sum(times: LatencyHistogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by ``le``, in Prometheus's format, and the sum of all times."""
    bounds = [*map(floatToGoString, _ROUND_TRIPS_S), "+Inf"]
    return list(zip(bounds, times.cumulative(_ROUND_TRIPS_S), strict=True)), times.total_s
