"""Experts that move while an engine serves: texts are those of a new engine with that placement,
memory stays flat, and a round that fails changes nothing. The GPU is emulated."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable
from dflash_protocol.ids import F32Array, Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier
from dflash_runtime.compute.room import staged_slots
from dflash_runtime.engine import replacing
from dflash_runtime.placement import moves
from dflash_runtime.placement.split import LOCAL_OWNER
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.worker import Channel, EngineWorker, Finished, Job, TokenOptions
from support.emulated_gpu import TINY, TINY_GPT_OSS
from support.planned_gpu import CONTEXT, OneGpu
from support.processes import wait_until
from support.random_gguf import write_model
from support.random_models import write_qwen3moe
from support.scripted_moves import ScriptedPolicy

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 10
MOST = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedPolicy]:
    monkeypatch.setattr(replacing, "MovePolicy", ScriptedPolicy)
    monkeypatch.setattr(ScriptedPolicy, "is_silent", False)
    monkeypatch.setattr(ScriptedPolicy, "saved_s", 1.0)
    return ScriptedPolicy


def gpu_for(model: Path, monkeypatch: pytest.MonkeyPatch, *, num_experts: int = 5) -> OneGpu:
    """A GPU with room for so many experts, and for those that are about to move there."""
    gpu = OneGpu(monkeypatch, model)
    gpu.copies_per_s = 1e12
    gpu.make_room_for(num_experts)
    with GgufFile.open(model) as file:
        num_slots, slot_bytes = staged_slots(read_spec(file).moe.layers, MOST)
    gpu.room_bytes += num_slots * slot_bytes
    return gpu


@pytest.fixture
def gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> OneGpu:
    return gpu_for(model, monkeypatch)


def settings_of(model: Path, **wishes: Any) -> Settings:
    options = {
        "context": CONTEXT, "kv_type": "f16", "heat": "off", "prefill_offload": "off",
        "swap_max": MOST, "moe_mode": "hot", **wishes,
    }  # fmt: skip
    return replace(load_settings(), model=str(model), **options)


def opened(model: Path, placement: Placement | None = None, **wishes: Any) -> Engine:
    return Engine.open(model, placement=placement, settings=settings_of(model, **wishes))


def tokens_of(engine: Engine, **wish: Any) -> list[int]:
    options = {"ignore_eos": True, **wish}
    return [each.token_id for each in engine.generate(PROMPT, NUM_TOKENS, **options)]


def results_of(engine: Engine) -> tuple[list[int], F32Array]:
    """Without moves, whose policy has to be silent."""
    tokens = [*tokens_of(engine), *tokens_of(engine, temperature=2.0, seed=3)]
    return tokens, engine.logits([*PROMPT, *tokens], 12)


def assert_same(found: tuple[list[int], F32Array], expected: tuple[list[int], F32Array]) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def assert_as_new(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch, **wishes: Any
) -> None:
    """Results are those of a new engine with the same placement."""
    monkeypatch.setattr(ScriptedPolicy, "is_silent", True)
    found = results_of(engine)
    with opened(model, engine.placement, **{"device": engine.plan.setup.device, **wishes}) as new:  # type: ignore[union-attr]
        assert_same(found, results_of(new))
    monkeypatch.setattr(ScriptedPolicy, "is_silent", False)


def apply_next(engine: Engine) -> None:
    """Wait for what is being copied, and have it applied."""
    before = engine.stats().moves

    def is_applied() -> bool:
        engine.move_experts()
        return engine.stats().moves.rounds > before.rounds

    wait_until(is_applied, "a round", pause_s=0.0)
    assert engine.stats().moves.experts_moved > before.experts_moved


def fail_next(engine: Engine) -> None:
    """Wait for what is being copied, and have it fail."""

    def has_failed() -> bool:
        engine.move_experts()
        return engine.stats().moves.rounds_not_applied > 0

    wait_until(has_failed, "a round that fails", pause_s=0.0)


@pytest.mark.parametrize(
    "kind",
    [
        "Q8_0",
        pytest.param("F16", marks=pytest.mark.slow),
        pytest.param("gpt-oss", marks=pytest.mark.slow),
    ],
)
def test_texts_after_many_moves_are_those_of_a_new_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: type[ScriptedPolicy]
) -> None:
    """Types that are repacked and that are copied as they are; biases; copies for prompts."""
    is_oss = kind == "gpt-oss"
    experts_type = "MXFP4" if is_oss else kind

    def type_of(name: str) -> str:
        is_router = "ffn_gate_inp." in name
        return "F32" if is_router else experts_type if "_exps" in name else "Q8_0"

    path = tmp_path / "m.gguf"
    write_model(path, TINY_GPT_OSS if is_oss else TINY, seed=5, tensor_type=type_of)
    gpu_for(path, monkeypatch)
    wishes: dict[str, Any] = {"prefill_offload": "off" if kind == "Q8_0" else "on"}
    with opened(path, **wishes) as engine:
        assert engine.plan is not None
        first = engine.placement
        for turn in range(12):
            tokens_of(engine)
            apply_next(engine)
            if turn in (0, 5, 11):
                assert_as_new(engine, path, monkeypatch, **wishes)
        stats = engine.stats().moves
    assert stats.rounds >= 12
    assert stats.experts_moved >= stats.rounds
    assert "saves" in stats.last_reason
    assert engine.placement is not first


def test_experts_stay_where_they_are_within_a_request(
    gpu: OneGpu, model: Path, scripted: type[ScriptedPolicy]
) -> None:
    with opened(model) as engine:
        tokens_of(engine)
        num_rounds = 0
        for _ in range(20):
            seen: list[Placement] = []
            for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
                assert token is not None
                seen.append(engine.placement)
            assert all(each is seen[0] for each in seen)
            num_rounds = engine.stats().moves.rounds
        assert num_rounds > 0


def test_the_next_round_is_decided_and_copied_within_a_long_request(
    gpu: OneGpu, model: Path, scripted: type[ScriptedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "FEWEST_TOKENS", 3)
    monkeypatch.setattr(ScriptedPolicy, "is_silent", True)
    with opened(model) as engine:
        before = engine.placement
        for _ in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
            monkeypatch.setattr(ScriptedPolicy, "is_silent", False)
            assert engine.placement is before
        monkeypatch.setattr(ScriptedPolicy, "is_silent", True)
        apply_next(engine)
        assert engine.placement is not before
        assert_as_new(engine, model, monkeypatch)


def test_a_server_moves_experts_between_requests_of_many_clients(
    gpu: OneGpu, model: Path, scripted: type[ScriptedPolicy]
) -> None:
    """And while nobody asks."""

    async def serve(worker: EngineWorker) -> list[str]:
        jobs = [
            Job(
                f"client {number}",
                PROMPT,
                NUM_TOKENS,
                TokenOptions(ignore_eos=True),
                Channel(asyncio.get_running_loop()),
            )
            for number in range(32)
        ]
        for job in jobs:
            worker.submit(job)
        ends = []
        for job in jobs:
            await job.channel.ended()
            last = (await job.channel.take())[-1]
            assert isinstance(last, Finished)
            ends.append(last.finish_reason)
        return ends

    metrics = Metrics()
    with EngineWorker(lambda report: opened(model), queue_capacity=32, metrics=metrics) as worker:
        worker.opened.result(60)
        assert asyncio.run(serve(worker)) == ["length"] * 32
        served = worker.stats.moves
        assert served.rounds > 10
        deadline = time.monotonic() + 30
        while worker.stats.moves.rounds < served.rounds + 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("num_rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_rounds_of_moves(
    gpu: OneGpu,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripted: type[ScriptedPolicy],
    num_rounds: int,
) -> None:
    process = psutil.Process()
    with opened(model) as engine:
        tokens_of(engine)
        for _ in range(100):
            apply_next(engine)
        held, num_threads = gpu.emulated.held(), process.num_threads()
        rss = process.memory_info().rss
        for _ in range(num_rounds):
            apply_next(engine)
        assert gpu.emulated.held() == held
        assert process.num_threads() == num_threads
        assert process.memory_info().rss <= rss + (4 << 20)
        assert engine.stats().moves.rounds == 100 + num_rounds
        assert_as_new(engine, model, monkeypatch)


def test_a_prefix_that_is_worth_more_keeps_the_placement(
    gpu: OneGpu, model: Path, monkeypatch: pytest.MonkeyPatch, scripted: type[ScriptedPolicy]
) -> None:
    """A round that saves less than computing the reused tokens again waits for another prompt."""
    prices = moves.move_prices

    def slow_prompts(*args: Any, **options: Any) -> Any:
        found = prices(*args, **{**options, "prompt_s": 1.0})
        assert found is not None
        return found

    monkeypatch.setattr("dflash_runtime.engine.planning.move_prices", slow_prompts)
    long = [int(each) for each in np.random.default_rng(1).integers(1, 60, 30)]
    with opened(model) as engine:
        for token in engine.generate(long, 2, reuse_prefix=True, ignore_eos=True):
            assert token is not None
        before = engine.placement
        for _ in range(3):
            list(engine.generate([*long, 7], 2, reuse_prefix=True, ignore_eos=True))
            assert engine.last_generation.num_reused_tokens > 0
            engine.move_experts()
        stats = engine.stats().moves
        assert engine.placement is before
        assert stats.rounds == 0
        assert "cached tokens" in stats.last_reason
        for _ in range(3):
            list(engine.generate(PROMPT[::-1], 2, reuse_prefix=True, ignore_eos=True))
        assert engine.stats().moves.rounds > 0


def broken(*args: object, **options: object) -> Any:
    raise DeviceUnavailable("it broke")


def out_of_memory(*args: object, **options: object) -> Any:
    raise DeviceOutOfMemory("cuda:0", num_bytes=1, free_bytes=0, total_bytes=1)


class FailsOnce:
    """Fails at one call, the `at`-th; counts all."""

    def __init__(self, function: Any, at: int) -> None:
        self.function, self.at, self.num_calls = function, at, 0

    def bound(self) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.at:
                raise DeviceUnavailable("it broke once")
            return self.function(*args, **options)

        return call


FAULTS = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("begin", "rename", "fill", "follow")),
    "rename later",
]


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches on a fault within rounds."""

    def start(patch: pytest.MonkeyPatch) -> None:
        if request.param == "begin":
            patch.setattr(FileCopier, "begin", broken)
        elif request.param == "follow":
            name = "dflash_runtime.compute.gpu.experts.offload.ExpertOffload.follow"
            patch.setattr(name, FailsOnce(lambda *args: None, 1).bound())
        else:
            name = request.param.partition(" ")[0]
            at = 4 if "later" in request.param else 1
            patch.setattr(ResidentLayer, name, FailsOnce(getattr(ResidentLayer, name), at).bound())

    return start


def test_a_round_that_fails_leaves_the_old_placement_in_use(
    fault: Any,
    gpu: OneGpu,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripted: type[ScriptedPolicy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    wishes: dict[str, Any] = {"prefill_offload": "on"}
    with opened(model, **wishes) as engine:
        tokens_of(engine)
        apply_next(engine)
        monkeypatch.setattr(ScriptedPolicy, "is_silent", True)
        expected, before, held = results_of(engine), engine.placement, gpu.emulated.held()
        monkeypatch.setattr(ScriptedPolicy, "is_silent", False)
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            fault(patch)
            fail_next(engine)
        stats = engine.stats().moves
        assert stats.rounds_not_applied == 1
        assert "broke" in stats.last_reason
        assert len([each for each in caplog.records if "moved" in each.message]) == 1
        assert engine.placement.owner_names == before.owner_names
        for one, other in zip(engine.placement.owners, before.owners, strict=True):
            assert one.fingerprint == other.fingerprint
        monkeypatch.setattr(ScriptedPolicy, "is_silent", True)
        assert_same(results_of(engine), expected)
        assert gpu.emulated.held() == held
        assert_as_new(engine, model, monkeypatch, **wishes)


def test_a_file_that_vanishes_is_still_mapped_and_one_that_is_written_to_is_not_used(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripted: type[ScriptedPolicy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    gpu_for(path, monkeypatch)
    with opened(path) as engine:
        tokens_of(engine)
        path.rename(tmp_path / "other")
        apply_next(engine)
        before = engine.placement
        with (tmp_path / "other").open("ab") as file:
            file.write(b"x")
        with caplog.at_level(logging.WARNING):
            fail_next(engine)
        assert engine.placement is before
        assert "written" in engine.stats().moves.last_reason
        assert len([each for each in caplog.records if "moved" in each.message]) == 1


@pytest.mark.parametrize("error", [DeviceUnavailable, MemoryError])
def test_if_it_cannot_be_undone_nothing_is_computed_any_more(
    gpu: OneGpu,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripted: type[ScriptedPolicy],
    error: type[Exception],
) -> None:
    def broken(*args: object, **options: object) -> Any:
        raise error("it broke")

    with opened(model) as engine:
        tokens_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(ResidentLayer, "rename", broken)
            fail_next(engine)
        with pytest.raises(DeviceUnavailable, match="broke"):
            tokens_of(engine)


@pytest.mark.parametrize(
    "wishes",
    [{"swap_max": 0}, {"placement": True}, {"local_experts": 2, "moe_mode": "auto"}],
    ids=str,
)
def test_what_is_asked_for_stays(
    wishes: dict[str, Any], gpu: OneGpu, model: Path, scripted: type[ScriptedPolicy]
) -> None:
    with opened(model) as engine:
        placement = engine.placement if wishes.pop("placement", False) else None
        device = engine.plan.setup.device  # type: ignore[union-attr]
    with opened(model, placement, device=device, **wishes) as engine:
        before = engine.placement
        for _ in range(3):
            tokens_of(engine)
            engine.move_experts()
        assert engine.placement is before
        assert engine.stats().moves.rounds == 0


def test_without_memory_for_it_experts_stay(
    gpu: OneGpu,
    model: Path,
    scripted: type[ScriptedPolicy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_runtime.compute.gpu.experts.stage.DeviceStage", out_of_memory)
    with opened(model) as engine:
        before = engine.placement
        tokens_of(engine)
        engine.move_experts()
        assert engine.placement is before


def test_experts_follow_what_is_written(
    gpu: OneGpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real policy, which is told to need little evidence."""
    monkeypatch.setattr(moves, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(moves, "_CERTAINTY", 0.0)
    with opened(model) as engine:
        for _ in range(12):
            tokens_of(engine)
            engine.heat()
            engine.move_experts()
        heat, stats = engine.heat(), engine.stats().moves
        owned = engine.placement.owners[engine.placement.owner_names.index(LOCAL_OWNER)].by_layer
    assert stats.rounds > 0
    for layer_id, ids in owned.items():
        expected = heat.probabilities(Phase.DECODE, layer_id)
        assert expected[ids].sum() >= 0.95 * np.sort(expected)[::-1][: ids.size].sum()
