"""A GPU whose driver fails within a move of experts or while text is written: no wrong token, the
old placement stays in use, nothing is leaked. The GPU is emulated."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.engine import replacing
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.worker import Channel, EngineWorker, Finished, Job, TokenOptions
from support.emulated_gpu import TINY
from support.failing_gpu import ALLOCATIONS, FailingGpu, taken
from support.moving_parent import (
    NUM_TOKENS,
    PROMPT,
    install_moving_gpu,
    next_round,
    opened,
    text_of,
)
from support.planned_gpu import OneGpu
from support.random_models import write_qwen3moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> OneGpu:
    return install_moving_gpu(monkeypatch, model)


@pytest.fixture
def engine(gpu: OneGpu, model: Path) -> Iterator[Engine]:
    """One that has moved experts."""
    with opened(model) as engine:
        text_of(engine)
        next_round(engine)
        yield engine


def fingerprints(engine: Engine) -> list[str]:
    return [owned.fingerprint for owned in engine.placement.owners]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_any_call_of_a_round_may_fail(
    engine: Engine,
    gpu: OneGpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
) -> None:
    monkeypatch.setattr(replacing, "RESTING", 0)
    failing = FailingGpu(monkeypatch)
    held = gpu.emulated.held()
    num_failed = 0
    for call in range(1, 1000, step):
        expected, before = text_of(engine), fingerprints(engine)
        stats = engine.stats().moves
        caplog.clear()
        failing.fail_at(call)
        now = next_round(engine)
        if not failing.has_failed:
            break
        failing.fail_at(0)
        assert gpu.emulated.held() == held
        if now.rounds > stats.rounds:  # when all was done
            continue
        num_failed += 1
        assert now.rounds_not_applied == stats.rounds_not_applied + 1
        assert len([each for each in caplog.records if "moved" in each.message]) == 1
        assert fingerprints(engine) == before
        assert text_of(engine) == expected
    assert num_failed > 15 // step
    failing.fail_at(0)
    assert next_round(engine).rounds > stats.rounds


@pytest.mark.parametrize("call", [1, 12, 20, 28])
def test_a_gpu_that_vanishes_within_a_move(
    gpu: OneGpu,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: int,
) -> None:
    def held() -> tuple[dict[str, int], int]:
        return gpu.emulated.held(), threading.active_count()

    opened(model).close()  # what is made once for all engines
    before = held()
    with opened(model) as engine:
        text_of(engine)
        next_round(engine)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            failing = FailingGpu(patch)
            failing.fail_at(call, is_gone=True)
            while not failing.has_failed:
                engine.move_experts()
            for _ in range(3):
                engine.move_experts()
                with pytest.raises(DeviceUnavailable, match="bus"):
                    text_of(engine)
            engine.close()
    assert len([each for each in caplog.records if "moved" in each.message]) <= 1
    del engine, failing
    gc.collect()
    assert held() == before


def test_a_round_takes_no_memory_that_another_program_could_have_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingGpu(monkeypatch, error=taken, calls=ALLOCATIONS)
    failing.fail_at(1, is_gone=True)
    rounds = engine.stats().moves.rounds
    assert next_round(engine).rounds == rounds + 1
    assert not failing.has_failed


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 25),
        ({"error": taken, "calls": ALLOCATIONS}, 5),
        pytest.param({}, 1, marks=pytest.mark.slow),
    ],
    ids=["any call", "another program's memory", "every call"],
)
def test_a_call_that_fails_while_text_is_written_costs_that_text_alone(
    engine: Engine,
    gpu: OneGpu,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    step: int,
) -> None:
    expected, held = text_of(engine), gpu.emulated.held()
    failing = FailingGpu(monkeypatch, **options)
    num_failed = 0
    for call in range(1, 10_000, step):
        failing.fail_at(call)
        written: list[int] = []
        try:
            text_of(engine, written)
        except DeviceUnavailable:
            num_failed += 1
        else:
            assert written == expected
        assert written == expected[: len(written)]
        if not failing.has_failed:
            break
        failing.fail_at(0)
        assert text_of(engine) == expected
        gc.collect()
        assert gpu.emulated.held() == held
    assert num_failed > 2


def test_a_gpu_that_vanishes_while_a_server_writes(
    gpu: OneGpu, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests fail, one by one, each with a line; the engine's thread goes on."""

    async def outcome_of(worker: EngineWorker) -> object:
        channel = Channel(asyncio.get_running_loop())
        job = Job("client", PROMPT, NUM_TOKENS, TokenOptions(ignore_eos=True), channel)
        worker.submit(job)
        await channel.ended()
        return (await channel.take())[-1]

    with EngineWorker(lambda _: opened(model), queue_capacity=4, metrics=Metrics()) as worker:
        engine = worker.opened.result(60)
        assert isinstance(asyncio.run(outcome_of(worker)), Finished)
        failing = FailingGpu(monkeypatch)
        failing.fail_at(60, is_gone=True)
        for _ in range(3):
            end = asyncio.run(outcome_of(worker))
            assert isinstance(end, DeviceUnavailable)
            assert "\n" not in str(end)
        time.sleep(0.7)  # idle, it would move experts
        assert worker.is_well
        assert isinstance(asyncio.run(outcome_of(worker)), DeviceUnavailable)
        assert engine.stats().moves.rounds_not_applied <= 2
    assert not [each for each in caplog.records if each.exc_info]
