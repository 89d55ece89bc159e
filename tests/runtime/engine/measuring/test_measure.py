"""A box is filled with real passes of a small model, on the processor and on a GPU, emulated
here."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.settings import Settings
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.cpu import backend as cpu_backend
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring import (
    asked_model,
    copied_experts,
    copies,
    devices,
    machine,
    measure,
    passes,
)
from dflash_runtime.engine.measuring.asked_model import (
    AskedModel,
    Asks,
    measure_unasked,
    told,
)
from dflash_runtime.engine.measuring.layers import sampled_layers
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.machine import box_of_machine
from dflash_runtime.engine.measuring.measure import (
    MeasuredDevice,
    chunk_to_measure,
    measure_box,
)
from dflash_runtime.placement.box import Box, Curve, DeviceSpeed
from dflash_runtime.placement.split import HOST_OWNER
from support.architectures import RANDOM
from support.emulated_gpu import TINY, EmulatedGpus
from support.gpu_models import SHAPES
from support.random_gguf import write_model
from support.random_models import write_qwen3moe

QUICK_S = 0.05
KV = KvType.F16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def host() -> Iterator[MeasuredDevice]:
    backend = make_backend(BackendName.AUTO, num_threads=1)
    yield MeasuredDevice("cpu", backend)
    backend.close()


def measured(
    path: Path, *devices: MeasuredDevice, known: Box | None = None, limit_s: float = QUICK_S
) -> Box:
    with GgufFile.open(path) as file:
        return measure_box(file, devices, key="k", kv_type=KV, known=known, limit_s=limit_s)


def is_sound(curve: Curve) -> bool:
    return all(math.isfinite(seconds) and seconds >= 0.0 for _, seconds in curve.points)


def check_device(box: Box, name: str, *, rows: set[int]) -> None:
    device = box.devices[name]
    assert set(device.trunk) == set(device.experts) == set(device.head) == rows
    assert set(device.attention) <= rows
    for num_rows, curve in device.experts.items():
        assert curve.points[0] == (0.0, 0.0)
        assert curve.points[-1][0] == num_rows * TINY.num_experts_used * 6528  # bytes of an expert
        assert curve.points[-1][1] >= curve.points[1][1]
    curves = (device.trunk, device.experts, device.head, device.attention)
    assert all(is_sound(curve) for each in curves for curve in each.values())
    assert all(seconds > 0.0 for _, seconds in device.trunk[1].points)


def test_the_host(model: Path, host: MeasuredDevice) -> None:
    box = measured(model, host, limit_s=5.0)
    assert box.key == "k"
    assert set(box.devices) == {"cpu"}
    check_device(box, "cpu", rows={1, 2, 4, 8, 64, 512})
    assert not box.host_stop
    assert not box.copies


def test_what_plans_need(model: Path, host: MeasuredDevice) -> None:
    with GgufFile.open(model) as file:
        box = measure_box(file, [host], key="k", kv_type=KV, limit_s=5.0, for_plan=True)
    check_device(box, "cpu", rows={1, 64, 512})
    assert all(len(curve.points) == 2 for curve in box.devices["cpu"].attention.values())


def test_chunks_of_512_rows_however_short_the_time(model: Path, host: MeasuredDevice) -> None:
    """Smaller ones are half as fast: plans would copy fewer experts of prompts than is best."""
    with GgufFile.open(model) as file:
        box = measure_box(file, [host], key="k", kv_type=KV, limit_s=0.01, for_plan=True)
    assert {1, 64, 512} <= set(box.devices["cpu"].experts)


def test_all_that_is_measured_shares_one_deadline(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}
    load = measure._loaded

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return load(*args, **options)

    def measured_within(name: str, *_: Any, limit_s: float, **__: Any) -> DeviceSpeed:
        limits[name] = limit_s
        time.sleep(0.3)
        return DeviceSpeed(name, {})

    monkeypatch.setattr(measure, "_loaded", slowly)
    monkeypatch.setattr(measure, "measure_device", measured_within)
    with contextlib.ExitStack() as undo:
        names = "one", "two", "three"
        hosts = [MeasuredDevice(name, make_backend(BackendName.AUTO)) for name in names]
        for each in hosts:
            undo.callback(each.backend.close)
        measured(model, *hosts, limit_s=1.2)
    assert 0.0 <= limits["one"] < 0.15  # a third of the time, less what loading took
    assert limits["three"] <= 0.1


def test_a_gpu_beside_the_host(
    model: Path, host: MeasuredDevice, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 4)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    backend: Any = gpus.open(EmulatedGpus.device)
    before = gpus.held()
    box = measured(model, host, MeasuredDevice("cuda:0", backend, lambda: "gen 4 x8"))
    check_device(box, "cuda:0", rows={1, backend.chunking.preferred})
    assert [rows for rows, _ in box.host_stop["cuda:0"].points] == [1.0, 20.0]
    asked = box.host_asked["cuda:0"]
    for curve in (asked.beyond, asked.computing):
        *few, all_used = (amount for amount, _ in curve.points)
        # But where one of them is the device's.
        assert TINY.num_experts_used - 1 <= all_used / 6528 <= TINY.num_experts_used
        assert few
        assert all(6528 <= each < all_used for each in few)
        assert is_sound(curve)
    assert min(asked.layer_s, asked.step_s) >= 0.0
    crossing = box.links[HOST_OWNER]
    assert not crossing.by_device
    assert crossing.step.at(1) == 0.0
    chunk_rows = backend.chunking.preferred
    assert all(0 < rows < chunk_rows and s >= 0.0 for rows, s in crossing.chunk.points)
    rates = box.copies["cuda:0"]
    assert min(rates.from_locked, rates.from_page_cache, rates.to_host, rates.kernel_reads) > 0.0
    assert rates.pcie == "gen 4 x8"
    offload = box.offload["cuda:0"]
    for curve in (offload.copies, offload.single, offload.grouped):
        assert [rows for rows, _ in curve.points] == [backend.chunking.preferred]
        assert is_sound(curve)
    assert [(each.first, each.second) for each in box.together] == [
        ("experts of cpu", "copies to cuda:0"),
        ("experts of cpu", "steps of cuda:0"),
    ]
    assert all(min(each.first_factor, each.second_factor) >= 1.0 for each in box.together)
    backend.close()
    del backend
    assert gpus.held()["pieces of memory"] <= before["pieces of memory"]


def test_a_gpu_that_fails_is_left_out(
    model: Path,
    host: MeasuredDevice,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program has its memory, say; a GPU that was asked for is an error."""
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    measured_device = devices.measure_device

    def fails(name: str, *args: Any, **options: Any) -> DeviceSpeed:
        if name == "cuda:0":
            raise DeviceOutOfMemory(name, num_bytes=1, free_bytes=0, total_bytes=1)
        return measured_device(name, *args, **options)

    monkeypatch.setattr(measure, "measure_device", fails)
    with contextlib.ExitStack() as undo:
        here = [host]
        for index in range(2):
            backend: Any = gpus.open(Device(DeviceKind.CUDA, index))
            undo.callback(backend.close)
            here.append(MeasuredDevice(f"cuda:{index}", backend))
        with GgufFile.open(model) as file:
            options: Any = {"key": "k", "kv_type": KV, "limit_s": QUICK_S, "for_plan": True}
            box = measure_box(file, here, leaves_out=True, **options)
            with pytest.raises(DeviceOutOfMemory):
                measure_box(file, here[:2], **options)
    assert set(box.devices) == {"cpu", "cuda:1"}
    assert set(box.host_stop) == set(box.copies) == {"cuda:1"}
    assert "cuda:0 is left out" in caplog.text


def test_a_gpu_that_comes_later_is_measured_beside_the_host(
    model: Path, host: MeasuredDevice, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    known = measured(model, host)
    backend: Any = gpus.open(EmulatedGpus.device)
    box = measured(model, host, MeasuredDevice("cuda:0", backend), known=known)
    backend.close()
    assert box.devices["cpu"] is known.devices["cpu"]
    assert [each.second for each in box.together] == ["copies to cuda:0", "steps of cuda:0"]
    assert set(box.links) == {HOST_OWNER}


@contextlib.contextmanager
def asked_model_of(path: Path, gpus: EmulatedGpus) -> Iterator[AskedModel]:
    backend: Any = gpus.open(EmulatedGpus.device)
    processor = make_backend(BackendName.AUTO, num_threads=1)
    with GgufFile.open(path) as file, contextlib.ExitStack() as undo:
        undo.callback(processor.close)
        undo.callback(backend.close)
        layers = AskedModel(backend, processor, file, kv_type=KV, limit_bytes=1 << 30, limit_s=1.0)
        undo.callback(layers.close)
        yield layers


def test_the_processor_computes_what_steps_ask(model: Path, gpus: EmulatedGpus) -> None:
    with asked_model_of(model, gpus) as layers:
        assert len(layers.description.layers) == TINY.num_layers
        num_used = TINY.num_experts_used
        # The device has one of the experts, which some tokens choose.
        for every, least, most in ((1, num_used - 1, num_used), (2, 0, num_used), (1 << 30, 0, 0)):
            asked = layers.asked(every)
            for passes in asked.ends:
                assert passes.captured is not None
                assert passes.seconds(1) > 0.0
                assert passes.captured.most_ahead > 1  # asked through a mailbox
            share_asking, num_asked = asked.owners[1].counts()
            assert least <= num_asked <= most
            assert num_asked / num_used <= share_asking <= 1.0


def test_steps_in_a_row_that_ask_the_processor_have_different_tokens(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ones soon have the same again, whose experts a processor has in its caches."""
    with asked_model_of(model, gpus) as layers:
        timed = layers.asked(1).ends[1]
        assert timed.captured is not None
        read, token_ids = timed.captured.token, list[int | None]()

        def noted(captured: object, position: int) -> int | None:
            token_ids.append(read(position))
            return token_ids[-1]

        monkeypatch.setattr(type(timed.captured), "token", noted)
        for _ in range(2):
            timed.seconds(1)
    assert len(token_ids) > passes.STEPS_IN_A_ROW
    assert len(set(token_ids)) > len(token_ids) / 2


def test_what_steps_take_that_could_ask_the_processor(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the passes takes so long as is said here: emulated ones tell nothing of a GPU."""
    backend: Any = gpus.open(EmulatedGpus.device)
    processor = make_backend(BackendName.AUTO, num_threads=1)
    with GgufFile.open(model) as file, contextlib.ExitStack() as undo:
        undo.callback(processor.close)
        undo.callback(backend.close)
        sampled = sampled_layers(file, describe(file), limit_bytes=1 << 30)
        loaded = LoadedLayers(backend, file, sampled, num_positions=64, kv_type=KV)
        undo.callback(loaded.close)
        passes = loaded.unasked_passes(TINY.num_layers, processor)
        assert passes.captured is not None
        assert passes.seconds(1) > 0.0
        assert passes.captured.most_ahead > 1  # through the mailbox
        num_timed = []

        def timed(timers: Sequence[Any], *, limit_s: float) -> list[tuple[float]]:
            num_timed.append(len(timers))
            return [(5e-5,), (9e-5,), (7e-5,), (13e-5,)]

        monkeypatch.setattr(asked_model, "medians", timed)
        layer_s, step_s = measure_unasked(loaded, processor, limit_s=0.01)
    num_first = sampled.num_first
    assert num_timed == [4]
    assert layer_s == pytest.approx(2e-5 / (TINY.num_layers - num_first))
    assert step_s == pytest.approx(4e-5 - TINY.num_layers * layer_s)


def test_as_many_layers_are_asked_as_there_is_room_for(tmp_path: Path, gpus: EmulatedGpus) -> None:
    shape = replace(TINY, num_layers=4)
    model = write_qwen3moe(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    backend: Any = gpus.open(EmulatedGpus.device)
    processor = make_backend(BackendName.AUTO, num_threads=1)
    with GgufFile.open(model) as file, contextlib.ExitStack() as undo:
        undo.callback(processor.close)
        undo.callback(backend.close)
        for limit_bytes, limit_s, expected in ((0, 9.0, 2), (1 << 30, 0.0, 2), (1 << 30, 9.0, 4)):
            layers = AskedModel(
                backend, processor, file, kv_type=KV, limit_bytes=limit_bytes, limit_s=limit_s
            )
            assert len(layers.description.layers) == expected
            layers.close()
            layers.close()


def test_a_gpu_with_little_memory_is_measured_with_smaller_chunks(model: Path) -> None:
    with GgufFile.open(model) as file:
        chunks = [
            chunk_to_measure(file, kv_type=KV, free_bytes=free_bytes)
            for free_bytes in (0, 1 << 30, 5 << 28, 1 << 31, 1 << 36)
        ]
    assert chunks == sorted(chunks)
    assert (chunks[0], chunks[-1]) == (GPU_CHUNKS[-1], GPU_CHUNKS[0])
    assert len({*chunks}) > 2


@given(
    st.floats(0, 1e-4),
    st.floats(0, 1e-4),
    st.floats(0, 1e-4),
    st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(1.0, 7.0)), max_size=3),
)
def test_what_asking_takes_is_told_from_layers_that_ask_nothing(
    none_s: float, any_s: float, slope_s: float, few: list[tuple[float, float]]
) -> None:
    def passes(share: float, num: float) -> Asks:
        return Asks(share, share * num, share * any_s + (1.0 - share) * none_s, slope_s * num)

    fewer = sorted(few, key=lambda each: -each[1])
    beyond, computing = told([passes(1.0, 8.0), *(passes(*each) for each in fewer), passes(0.0, 0)])
    assert len(beyond) >= 1 + bool(few)
    assert beyond[-1][0] == 8.0
    for num, seconds in beyond:
        assert seconds == pytest.approx(any_s + slope_s * num, abs=1e-12)
    assert [num for num, _ in computing] == [num for num, _ in beyond]


def test_noise_of_few_that_ask_tells_little() -> None:
    most, none = Asks(1.0, 8.0, 1e-5, 1.9e-4), Asks(0.0, 0.0, 1e-6, 0.0)
    for few_s, rest_s in ((0.0, 0.91e-5 / 1.1), (1.9e-6, 1e-5), (1.0, 1.0 / 1.1), (-1.0, 0.0)):
        few = Asks(0.1, 0.1, few_s, 5e-5)
        beyond, computing = told([most, few, Asks(0.01, 0.01, 1.0, 1.0), none])
        assert computing == [(pytest.approx(1.0), 5e-5), (8.0, 1.9e-4)]
        for (_, seconds), (_, computing_s) in zip(beyond, computing, strict=True):
            assert seconds - computing_s == pytest.approx(rest_s, rel=1e-4)
    # Fewer experts are never computed longer.
    _, computing = told([most, Asks(0.5, 1.0, 1e-5, 9e-4), none])
    assert computing == [(2.0, 1.9e-4), (8.0, 1.9e-4)]


def test_ctrl_c_gives_all_memory_back(model: Path, gpus: EmulatedGpus) -> None:
    """What stays is the backend's: buffers that are used again, and a model's rotary angles."""
    backend: Any = gpus.open(EmulatedGpus.device)

    def interrupt(what: str, num_done: int, num_total: int) -> None:
        if num_done == 1:
            raise KeyboardInterrupt

    def held_after() -> dict[str, int]:
        with GgufFile.open(model) as file, pytest.raises(KeyboardInterrupt):
            measure_box(
                file,
                [MeasuredDevice("cuda:0", backend)],
                key="k",
                kv_type=KV,
                limit_s=QUICK_S,
                on_progress=interrupt,
            )
        return gpus.held()

    first = held_after()
    assert held_after()["pieces of memory"] <= first["pieces of memory"] + 1
    backend.close()


def test_what_is_known_is_not_measured_again(model: Path, host: MeasuredDevice) -> None:
    known = measured(model, host)
    again = measured(model, host, known=known)
    assert again == known


@pytest.mark.parametrize("architecture", ["qwen35moe", "llama4", "gpt_oss"])
def test_layers_of_several_kinds(architecture: str, tmp_path: Path, host: MeasuredDevice) -> None:
    path = write_model(tmp_path / "m.gguf", RANDOM[architecture].SMALL, seed=1)
    box = measured(path, host)
    device = box.devices["cpu"]
    for each in (device.trunk, device.experts, device.head, device.attention):
        assert all(is_sound(curve) for curve in each.values())


def test_layers_that_were_timed_are_freed_before_prompts_with_copies_are(
    tmp_path: Path,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A small GPU has no room for both. Models that keep states have more layers for steps far into
    a context."""
    path = write_model(tmp_path / "m.gguf", SHAPES["qwen35moe"], seed=1)
    load, loaded = measure._loaded, list[LoadedLayers]()

    def noted(*args: Any, **options: Any) -> tuple[LoadedLayers, LoadedLayers | None]:
        layers, far = load(*args, **options)
        assert far is not None
        loaded.extend((layers, far))
        return layers, far

    def fails(name: str, layers: LoadedLayers, *_: Any, **__: Any) -> None:
        assert [each for each in loaded if "_model" in vars(each)] == [layers]
        raise DeviceOutOfMemory(name, num_bytes=9, free_bytes=1, total_bytes=8)

    monkeypatch.setattr(measure, "_loaded", noted)
    monkeypatch.setattr(copied_experts, "measure_offload", fails)
    monkeypatch.setattr(passes, "STEPS_IN_A_ROW", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 15)
    backend: Any = gpus.open(EmulatedGpus.device)
    with contextlib.closing(backend), caplog.at_level("INFO"):
        box = measured(path, MeasuredDevice("cuda:0", backend))
    assert "cuda:0" in box.copies
    assert not box.offload
    assert "prompts with copied experts are not timed on cuda:0" in caplog.text


def test_a_box_is_kept_for_the_next_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def made(file: GgufFile, devices: list[MeasuredDevice], *, key: str, **_: object) -> Box:
        calls.append([each.name for each in devices])
        return Box(key, {each.name: DeviceSpeed(each.name, {}) for each in devices})

    monkeypatch.setattr(machine, "measure_box", made)
    settings = Settings(backend="reference", cache_dir=str(tmp_path))
    with GgufFile.open(model) as file:
        first = box_of_machine(file, settings, devices=(CPU,))
        assert box_of_machine(file, settings, devices=(CPU,)) == first
        assert calls == [["cpu"]]
        box_of_machine(file, settings, devices=(CPU,), measures_all=True)
        assert len(calls) == 2
        other = box_of_machine(file, replace(settings, kv_type="q8_0"), devices=(CPU,))
        assert other.key != first.key
        assert len(calls) == 3


def test_what_steps_of_a_gpu_need_of_the_processor_is_compiled_with_all_else(
    model: Path, tmp_path: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the thread that measures, one kernel after another."""
    ahead: list[set[str]] = []
    monkeypatch.setattr(cpu_backend, "compile_ahead", lambda jobs, _: ahead.append({*jobs}))
    monkeypatch.setattr(cpu_backend, "run_job", lambda job: None)
    monkeypatch.setattr(machine, "measure_box", lambda *_, key, **__: Box(key, {}))
    settings = Settings(cache_dir=str(tmp_path))
    with GgufFile.open(model) as file:
        for devices in ((CPU,), (CPU, EmulatedGpus.device)):
            box_of_machine(file, settings, devices=devices)
    new = ahead[1] - ahead[0]
    of_rows = {job for job in new if job.startswith("step_rows.")}
    assert of_rows
    assert new - of_rows == {"asked", "graphs", "mailed", "copies", "quantise_step"}
