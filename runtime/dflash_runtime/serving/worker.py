"""The server's jobs: what the thread that owns the engine does for each, and what it publishes.

Jobs are submitted in the event loop's thread, which reads their events from a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

from dflash_adapters.text.grammar import Grammar
from dflash_protocol.errors import DflashError, NotFinite, QueueFull
from dflash_runtime.engine.answer_text import Delta, TextAssembler, TextRules
from dflash_runtime.engine.engine import Engine, EngineStats, GenerationStats
from dflash_runtime.engine.engine_thread import EngineThread, OpenEngine
from dflash_runtime.engine.event_channel import EventChannel
from dflash_runtime.engine.generation import OnPromptLogprobs
from dflash_runtime.engine.penalties import Penalties
from dflash_runtime.engine.sampling import SamplingParams
from dflash_runtime.serving.echo import PromptEcho
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.request_log import RequestLog
from dflash_runtime.serving.request_record import RequestRecord

_LOG = logging.getLogger(__name__)

_HUNG_S = 120.0
"""A layer that takes longer is taken to hang."""
_PUBLISH_S = 0.5
"""Longest time that `stats` lags behind an engine that is idle or begins layers."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. `finish_reason` is ``stop``, ``length`` or ``cancelled``."""

    finish_reason: str
    stats: GenerationStats
    stop: str | None = None
    """The stop string that ended it."""


JobEvent = Delta | Finished | BaseException
"""Events of a job: deltas, then its end or the exception that ended it."""


class Channel(EventChannel[JobEvent]):
    """The events of a job."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, is_last=lambda event: not isinstance(event, Delta))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """How the tokens of a generation are chosen, and which end it: options of Engine.generate."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    penalties: Penalties = field(default_factory=Penalties)
    grammar: Grammar | None = None
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One generation. `client` takes turns in the queue; jobs of the same API `key` reuse each
    other's prefixes. With `max_tokens` 0 the prompt alone is computed."""

    client: str
    prompt: list[int]
    max_tokens: int
    options: TokenOptions
    channel: Channel
    text: TextRules = field(default_factory=TextRules)
    key: str = ""
    echo: PromptEcho | None = None
    record: RequestRecord = field(default_factory=RequestRecord)
    """For logs and the status page; filled in as it goes on."""
    asked_s: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    """Set from any thread to end the job."""


class EngineWorker:
    """Owns the engine's thread, from entering a ``with`` until leaving it.

    Other threads may read `stats`, and use of the engine what `EngineThread` says.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        *,
        queue_capacity: int,
        metrics: Metrics,
        requests: RequestLog | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.requests = requests or RequestLog()
        self.running: Job | None = None
        self.reading: tuple[int, int] | None = None
        """Prompt tokens of the running job: computed, and in all; None after the prompt."""
        self._metrics = metrics
        self._mean_job_s = 1.0
        self._stepped_s = 0.0
        self._published: EngineStats | None = None
        self._thread: EngineThread[Job] = EngineThread(
            open_engine, self, capacity=queue_capacity, on_stage=on_stage
        )
        metrics.watch_queue(lambda: self.num_waiting)

    def __enter__(self) -> EngineWorker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    @property
    def opened(self) -> Future[Engine]:
        """Gives the engine once it is ready."""
        return self._thread.opened

    @property
    def stage(self) -> str:
        """The stage of opening, for people."""
        return self._thread.stage

    @property
    def num_waiting(self) -> int:
        return self._thread.num_waiting

    def waiting(self, most: int) -> list[Job]:
        """The jobs that are next in the queue, `most` at most."""
        return self._thread.waiting(most)

    @property
    def is_well(self) -> bool:
        """The thread runs, and its current layer has not taken more than `_HUNG_S`."""
        return self._thread.is_alive and (self.stalled_s or 0.0) <= _HUNG_S

    @property
    def stalled_s(self) -> float | None:
        """Time since the running job last began a layer; None if none runs."""
        return None if self.running is None else time.monotonic() - self._stepped_s

    @property
    def stats(self) -> EngineStats:
        """What the engine's thread has published last, once the engine is open.

        It publishes at the end of each job, and else every `_PUBLISH_S` between layers or jobs.
        """
        assert self._published is not None
        return self._published

    def submit(self, job: Job) -> None:
        """Queue a job; clients take turns. Raises: QueueFull."""
        record = job.record
        record.key, record.num_prompt = self.requests.name_of(job.key), len(job.prompt)
        record.max_tokens = job.max_tokens
        try:
            self._thread.submit(job.client, job)
        except QueueFull:
            self._metrics.rejected.labels("queue_full").inc()
            self._record(job, "queue_full")
            raise

    def cancel(self, job: Job) -> None:
        """Cancel a job, waiting or running: at most one more token of it is computed."""
        job.is_cancelled = True
        if self._thread.remove(job.client, job):
            self._metrics.count_generation("cancelled", GenerationStats())
            self._record(job, "cancelled")
            job.channel.put(Finished("cancelled", GenerationStats()))

    def retry_after_s(self) -> int:
        """When the queue may have room again, from the mean time of recent jobs."""
        return max(1, min(60, round(self._mean_job_s)))

    def stop(self) -> None:
        """Cancel all jobs and have the thread end, without waiting for it."""
        self._thread.stop()

    def begin(self, engine: Engine) -> None:
        """For the thread."""
        self._publish(engine)
        self._metrics.watch_engine(lambda: self.stats, lambda: engine.plan)

    def run(self, engine: Engine, job: Job) -> None:
        """For the thread: run a job."""
        self._stepped_s = time.monotonic()
        self.running = job
        self._metrics.running.set(1)
        outcome = self._outcome_of(engine, job)
        self.running = self.reading = None
        self._metrics.running.set(0)
        # Last of all: once a client sees the end, everything is counted.
        job.channel.put(outcome)

    def rest(self, engine: Engine) -> None:
        """For the thread: nobody asks."""
        self._publish(engine)

    def _publish(self, engine: Engine) -> EngineStats:
        self._published = stats = engine.stats()
        return stats

    def _record(self, job: Job, end: str) -> None:
        job.record.whole_s, job.record.end = time.perf_counter() - job.asked_s, end
        self.requests.ended(job.record)

    def _outcome_of(self, engine: Engine, job: Job) -> Finished | Exception:
        """Run a job; return its end, which is not yet put into its channel."""
        try:
            return self._generated(engine, job)
        except Exception as error:
            if not isinstance(error, DflashError):
                # docs: a bug, with its traceback: report it. The client got status 500
                _LOG.exception("a generation failed")
            elif isinstance(error, NotFinite):
                # docs: its logits are NaN or infinite; the client got status 500 and `not_finite`.
                # Always: the model's file is damaged (compare it with its source); now and then:
                # memory, or a value that becomes too large
                _LOG.error("a generation has no token: %s", error)
            self._metrics.finished.labels("error").inc()
            with contextlib.suppress(DflashError):  # a device that has failed has no counts
                self._publish(engine)
            self._record(job, "error")
            return error

    def _generated(self, engine: Engine, job: Job) -> Finished:
        metrics, options = self._metrics, job.options
        started_s = time.perf_counter()
        record, echo = job.record, job.echo
        record.queue_s = started_s - job.asked_s
        metrics.queue_s.observe(record.queue_s)
        assembler = TextAssembler(
            engine.tokenizer, job.text, first_offset=0 if echo is None else len(echo.text)
        )
        on_prompt_logprobs: OnPromptLogprobs | None = None
        if echo is not None and echo.has_logprobs:
            on_prompt_logprobs = echo.push

        publish_s = time.monotonic() + _PUBLISH_S

        def is_cancelled() -> bool:  # asked before every layer
            nonlocal publish_s
            self._stepped_s = now_s = time.monotonic()
            if now_s > publish_s:
                self._publish(engine)
                publish_s = now_s + _PUBLISH_S
            return job.is_cancelled or self._thread.is_stopping

        def on_prefill(num_done: int, num_total: int) -> None:
            self.reading = num_done, num_total

        tokens = engine.generate(
            job.prompt,
            job.max_tokens,
            **asdict(options.sampling),
            penalties=options.penalties,
            grammar=options.grammar,
            ignore_eos=options.ignore_eos,
            stop_ids=options.stop_ids,
            top_logprobs=options.top_logprobs,
            on_prompt_logprobs=on_prompt_logprobs,
            reuse_prefix=True,
            prefix_scope=job.key,
            is_cancelled=is_cancelled,
            on_prefill=on_prefill,
        )
        is_first = True
        for token in tokens:
            if is_first:
                is_first, self.reading = False, None
                record.first_token_s = time.perf_counter() - job.asked_s
                metrics.first_token_s.observe(record.first_token_s)
                if echo is not None:
                    job.channel.put(echo.delta())
            metrics.generated_tokens.inc()
            record.num_generated += 1
            delta = assembler.push(token)
            if delta is not None:
                job.channel.put(delta)
            if assembler.is_stopped:
                break
        tokens.close()
        stats = engine.last_generation
        reason = "length" if stats.finish_reason == "context" else stats.finish_reason
        if reason != "cancelled" or assembler.is_stopped:
            if is_first and echo is not None:
                job.channel.put(echo.delta())
            if (delta := assembler.finish()) is not None:
                job.channel.put(delta)
            reason = "stop" if assembler.is_stopped else reason
        metrics.count_generation(reason, stats)
        record.stats = stats
        ended_s = time.perf_counter()
        metrics.whole_s.observe(ended_s - job.asked_s)
        metrics.count_owners(self._publish(engine).owners)
        self._mean_job_s += (ended_s - started_s - self._mean_job_s) / 8
        self._record(job, reason)
        return Finished(reason, stats, assembler.stop)
