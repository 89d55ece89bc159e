"""Chunks whose experts are copied are timed as an engine runs them, on an emulated GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload
from dflash_runtime.compute.gpu.experts.offload_room import AHEAD_BYTES
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring import copied_experts
from dflash_runtime.engine.measuring.copied_experts import (
    CopiedPasses,
    measure_offload,
    seconds_of_gb,
    told_apart,
)
from dflash_runtime.engine.measuring.layers import sampled_layers
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.placement.box import Curve, DeviceSpeed
from support.emulated_gpu import TINY, EmulatedGpus
from support.random_models import write_qwen3moe

ROWS = 20


@pytest.fixture
def loaded(tmp_path: Path, gpus: EmulatedGpus) -> Iterator[LoadedLayers]:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    with contextlib.ExitStack() as undo:
        backend: Any = gpus.open(EmulatedGpus.device)
        undo.callback(backend.close)
        file = undo.enter_context(GgufFile.open(path))
        sampled = sampled_layers(file, describe(file), limit_bytes=1 << 30)
        made = LoadedLayers(backend, file, sampled, num_positions=64, kv_type=KvType.F16)
        undo.callback(made.close)
        yield made


@pytest.mark.parametrize("num_missing", [1, 3, 99])
def test_each_chunk_copies_the_experts_that_its_layers_lack(
    loaded: LoadedLayers, num_missing: int
) -> None:
    """Whatever earlier ones have copied, and nothing of layers that follow the last one."""
    passes = CopiedPasses(loaded, num_missing=num_missing, ends=(1, 2))
    size = loaded.spec.moe.layers[0].expert_bytes
    for _ in range(2):
        for timers in (passes.timers(ROWS), passes.group_timers(ROWS, 3)):
            for timer, num_layers in zip(timers, (1, 2), strict=True):
                seconds, num_bytes = timer()
                assert seconds > 0.0
                assert num_bytes % size == 0
                # Of five experts, 20 tokens that choose two each may leave one out; what one chunk
                # of a group has copied is not copied for the next one.
                most = num_layers * min(num_missing, TINY.num_experts)
                assert most - num_layers <= num_bytes / size <= most
    passes.close()
    passes.close()


def test_copies_beside_launches_leave_nothing_behind(loaded: LoadedLayers) -> None:
    with contextlib.closing(CopiedPasses(loaded, num_missing=99, ends=(1, 2))) as passes:
        _, expected = passes.timers(ROWS)[1]()
        before = passes._copier.num_bytes
        with passes.copying():
            pass
        of_layer = TINY.num_experts * loaded.spec.moe.layers[0].expert_bytes
        assert passes._copier.num_bytes - before == copied_experts._COPIED_AGAIN * 2 * of_layer
        assert passes.timers(ROWS)[1]()[1] == expected


LINE = Curve(((0.0, 0.0), (1e6, 1e-3)))
SPEED = DeviceSpeed("cuda:0", {ROWS: LINE}, {ROWS: LINE})


def test_what_is_told_of_a_device(loaded: LoadedLayers, gpus: EmulatedGpus) -> None:
    held = []
    for _ in range(2):
        found = measure_offload("cuda:0", loaded, SPEED, rate=1e9, limit_s=0.05)
        held.append(gpus.held())
    assert held[0] == held[1]
    assert found is not None
    assert found.device == "cuda:0"
    # Chunks have 20 rows at most here.
    for curve in (found.copies, found.single, found.grouped):
        ((rows, seconds),) = curve.points
        assert rows == ROWS
        assert seconds >= 0.0
    assert found.copies.points[0][1] > 0.0
    assert found.part_s > 0.0


def test_passes_are_opened_when_those_before_have_given_their_memory_back(
    loaded: LoadedLayers, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small GPU has no room for two, and would be taken to copy nothing."""
    measure_offload("cuda:0", loaded, SPEED, rate=1e9, limit_s=0.0)
    before, num_missing = gpus.held()["bytes of arrays"], list[int]()

    class Watched(CopiedPasses):
        def __init__(self, loaded: LoadedLayers, **options: Any) -> None:
            assert gpus.held()["bytes of arrays"] < before + 4096
            super().__init__(loaded, **options)
            num_missing.append(options["num_missing"])

    monkeypatch.setattr(copied_experts, "CopiedPasses", Watched)
    measure_offload("cuda:0", loaded, SPEED, rate=1e9, limit_s=0.0)
    assert len(num_missing) >= 4


def test_what_fails_gives_its_memory_back(
    loaded: LoadedLayers, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_offload("cuda:0", loaded, SPEED, rate=1e9, limit_s=0.0)
    before = gpus.held()

    def fails(offload: ExpertOffload) -> None:
        raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=8)

    monkeypatch.setattr(ExpertOffload, "prepare", fails)
    with pytest.raises(DeviceOutOfMemory):
        measure_offload("cuda:0", loaded, SPEED, rate=1e9, limit_s=0.0)
    assert gpus.held() == before


@given(
    layer_s=st.floats(1e-4, 1.0),
    num_bytes=st.floats(1e6, 1e10),
    trunk_share=st.floats(0.0, 0.97),
    single_share=st.floats(0.0, 0.9),
)
def test_a_layer_that_waits_for_copies_is_predicted_to_take_what_it_took(
    layer_s: float, num_bytes: float, trunk_share: float, single_share: float
) -> None:
    single_s = single_share * layer_s
    trunk_s = trunk_share * (layer_s - single_s)
    byte_s = seconds_of_gb(layer_s, num_bytes, trunk_s=trunk_s, single_s=single_s) / 1e9
    ahead_s = min(trunk_s, AHEAD_BYTES * byte_s)
    predicted_s = trunk_s + num_bytes * byte_s - ahead_s + single_s
    assert predicted_s == pytest.approx(layer_s, rel=1e-6)


@given(
    byte_s=st.floats(1e-12, 1e-9),
    num_bytes=st.floats(1e6, 1e10),
    trunk_share=st.floats(0.0, 2.0),
    after_share=st.floats(0.0, 0.9),
)
def test_what_comes_after_copies_is_told_from_layers_that_wait_for_all_and_for_half(
    byte_s: float, num_bytes: float, trunk_share: float, after_share: float
) -> None:
    trunk_s = trunk_share * num_bytes * byte_s
    ahead_s = min(trunk_s, AHEAD_BYTES * byte_s)
    after_s = ahead_s + after_share * num_bytes * byte_s

    def waited(share: float) -> tuple[float, float]:
        copied_s = share * num_bytes * byte_s
        return trunk_s + copied_s - ahead_s + after_s, share * num_bytes

    gb_s, found_s = told_apart(waited(1.0), waited(0.5), trunk_s=trunk_s)
    assert gb_s == pytest.approx(1e9 * byte_s, rel=1e-6)
    assert found_s == pytest.approx(after_s, rel=1e-6, abs=1e-6 * waited(1.0)[0])


def test_noise_makes_no_copies_that_take_no_time_and_nothing_that_comes_before_them() -> None:
    for half_s in (0.009, 0.0101, 0.001):
        gb_s, after_s = told_apart((0.01, 1e8), (half_s, 5e7), trunk_s=1e-3)
        assert 0.0 < gb_s <= 100.0
        assert after_s >= 0.0
