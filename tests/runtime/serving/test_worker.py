"""The engine's thread: cancels within a token, survives failures, ends when it is told to."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import ModelFileError, QueueFull
from dflash_runtime import Engine
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.worker import Channel, EngineWorker, Finished, Job, TokenOptions

pytestmark = pytest.mark.asyncio


def worker_of(model: Path, *, capacity: int = 8) -> EngineWorker:
    return EngineWorker(
        lambda report: Engine.open(model, backend="reference", on_progress=report),
        queue_capacity=capacity,
        metrics=Metrics(),
    )


def job_of(
    client: str = "me", *, max_tokens: int = 400, top_logprobs: int | None = None, **options: Any
) -> Job:
    return Job(
        client,
        [1, 2, 3],
        max_tokens,
        TokenOptions(ignore_eos=True, top_logprobs=top_logprobs),
        Channel(asyncio.get_running_loop()),
        **options,
    )


async def end_of(job: Job) -> Finished:
    """The last event; an error is raised."""
    while True:
        for event in await job.channel.take():
            if isinstance(event, Finished):
                return event
            if isinstance(event, BaseException):
                raise event


async def test_a_cancelled_job_ends_within_a_token(model: Path) -> None:
    with worker_of(model) as worker:
        job = job_of(top_logprobs=0)
        worker.submit(job)
        num_tokens = 0
        while num_tokens < 5:
            num_tokens += sum(
                len(event.tokens) for event in await job.channel.take() if isinstance(event, Delta)
            )
        worker.cancel(job)
        num_at_cancel = worker._metrics.generated_tokens._value.get()
        end = await end_of(job)
        assert end.finish_reason == "cancelled"
        assert end.stats.num_generated_tokens <= num_at_cancel + 1 < 400


async def test_a_job_that_is_cancelled_before_its_turn_is_never_begun(model: Path) -> None:
    with worker_of(model) as worker:
        jobs = [job_of(), job_of(), job_of("other", max_tokens=2)]
        for job in jobs:
            worker.submit(job)
        worker.cancel(jobs[1])
        assert (await end_of(jobs[1])).stats.num_prompt_tokens == 0
        worker.cancel(jobs[0])
        assert (await end_of(jobs[2])).finish_reason == "length"
        assert worker.num_waiting == 0


async def test_a_full_queue_says_so_and_takes_others_later(model: Path) -> None:
    with worker_of(model, capacity=2) as worker:
        await asyncio.wrap_future(worker.opened)
        running = job_of()
        worker.submit(running)
        while worker.num_waiting:
            await asyncio.sleep(0.001)
        waiting = [job_of(f"client {number}", max_tokens=1) for number in range(3)]
        for job in waiting[:2]:
            worker.submit(job)
        with pytest.raises(QueueFull):
            worker.submit(waiting[2])
        assert 1 <= worker.retry_after_s() <= 60
        worker.cancel(running)
        for job in waiting[:2]:
            await end_of(job)
        worker.submit(waiting[2])
        await end_of(waiting[2])


async def test_moves_that_fail_while_nothing_runs_end_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed = threading.Event()

    def fail(engine: Engine) -> None:
        has_failed.set()
        raise ValueError("a bug")

    monkeypatch.setattr(Engine, "move_experts", fail)
    with worker_of(model) as worker:
        await asyncio.wrap_future(worker.opened)
        assert await asyncio.to_thread(has_failed.wait, 20)
        job = job_of(max_tokens=2)
        worker.submit(job)
        assert (await end_of(job)).finish_reason == "length"
    assert "the work between two requests has failed" in caplog.text


async def test_a_failure_is_the_jobs_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def fail_at_two(engine: Engine, prompt: Any, max_tokens: int, **options: Any) -> Any:
        if max_tokens == 2:
            raise MemoryError("no room")
        return generate(engine, prompt, max_tokens, **options)

    monkeypatch.setattr(Engine, "generate", fail_at_two)
    with worker_of(model) as worker:
        bad, good = job_of(max_tokens=2), job_of(max_tokens=3)
        worker.submit(bad)
        worker.submit(good)
        with pytest.raises(MemoryError):
            await end_of(bad)
        assert (await end_of(good)).stats.num_generated_tokens == 3


async def test_closing_ends_what_runs_and_what_waits(model: Path) -> None:
    with worker_of(model) as worker:
        jobs = [job_of(), job_of()]
        for job in jobs:
            worker.submit(job)
        await jobs[0].channel.take()
    assert not worker.is_well
    assert [(await end_of(job)).finish_reason for job in jobs] == ["cancelled", "cancelled"]


async def test_what_cannot_be_opened_is_told_and_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no model")
    threads_before = set(threading.enumerate())
    with (
        worker_of(tmp_path / "no.gguf") as worker,
        pytest.raises(ModelFileError),
    ):
        await asyncio.wrap_future(worker.opened)
    assert set(threading.enumerate()) <= threads_before
