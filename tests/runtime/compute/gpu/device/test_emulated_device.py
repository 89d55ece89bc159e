"""The emulation of a device: it computes what a kernel says, and finds what none may do."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import DeviceUnavailable, KernelCompileError, SettingsError
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import KernelDevice, PreparedLaunch, address
from support.emulated_device import EmulatedDevice, KernelFailure, emulated_device
from support.emulated_device.device_checks import (
    CASES,
    MistakeArgs,
    SumArgs,
    check_every_name,
    check_padding,
    check_sums,
)

_MISTAKES = CASES.with_name("mistakes.cu")

FOUND_MISTAKES = {
    "barrier_not_reached": "waits in block_barrier at .*:12, thread 5 has ended",
    "two_barriers": "is at .*:17 while thread 0 is at .*:16",
    "exchange_not_reached": "waits in a lane exchange at .*common.cuh:[0-9]+, thread 3 has ended",
    "waits_for_each_other": "waits in block_barrier at .*, thread 1 waits at .*common.cuh",
    "writes_behind": "written outside of an array of 20 bytes",
    "writes_before": "written outside of an array of 20 bytes",
    "reads_behind": "reads 4 bytes at .*, outside of every array",
    "reads_unaligned": "reads 16 bytes at .*, which is not aligned",
    "reads_too_early": "before wait_for_previous",
    "never_waits": "no thread has called wait_for_previous",
    "unaligned_vector": "mistakes.cu:53: a pointer is null or not aligned",
    "outside_of_local_array": "mistakes.cu:58: an index outside of its array",
    "shifts_too_far": "mistakes.cu:62: a shift by too many bits",
    "writes_behind_dynamic_shared": "behind the dynamic shared memory",
    "writes_behind_shared": "behind a shared array",
    "too_much_shared": "more than 49152 bytes of static shared memory",
}


@pytest.fixture(params=[32, 64])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(lanes=request.param)


def launch_mistake(device: EmulatedDevice, name: str, array: AnyArray, *, num_blocks: int) -> None:
    kernel = device.module(_MISTAKES, {}).kernel(name, MistakeArgs)
    device.launch(kernel, (num_blocks, 1, 1), 128, MistakeArgs(address(array), array.size))


def test_every_name_means_what_common_cuh_says(device: EmulatedDevice) -> None:
    check_every_name(device)


@pytest.mark.parametrize("runs_backward", [False, True])
@pytest.mark.parametrize("lanes", [32, 64])
def test_a_kernel_of_many_blocks_and_warps(lanes: int, runs_backward: bool) -> None:
    check_sums(EmulatedDevice(lanes=lanes, runs_backward=runs_backward))


def test_arguments_are_padded_as_ctypes_pads_them(device: EmulatedDevice) -> None:
    check_padding(device)


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", FOUND_MISTAKES)
def test_a_mistake_is_found(device: EmulatedDevice, name: str) -> None:
    array = device.empty(5, np.float32)
    with pytest.raises(KernelFailure, match=FOUND_MISTAKES[name]):
        launch_mistake(device, name, array, num_blocks=1)
    # What went wrong is forgotten.
    check_padding(device)


def test_a_missing_barrier_shows_when_threads_run_backward() -> None:
    sums = []
    for runs_backward in (False, True):
        device = EmulatedDevice(runs_backward=runs_backward)
        array = device.empty(1, np.float32)
        launch_mistake(device, "misses_a_barrier", array, num_blocks=1)
        sums.append(array[0])
    assert sums[0] == 128
    assert np.isnan(sums[1])


def test_shared_memory_of_another_block_is_gone(device: EmulatedDevice) -> None:
    array = device.empty((2, 128), np.float32)
    launch_mistake(device, "reads_shared_of_the_block_before", array, num_blocks=2)
    assert (array[0] == 1).all()
    assert np.isnan(array[1]).all()


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "what"),
    [
        ((1, 1, 1), 96 + 1, 0, "97 threads"),
        ((1, 1, 1), 256 + 64, 0, "320 threads"),
        ((0, 1, 1), 64, 0, "grid"),
        ((1, 65536, 1), 64, 0, "grid"),
        ((1, 1, 1), 64, 96 * 1024 + 1, "dynamic shared memory"),
    ],
)
def test_a_launch_that_no_device_would_do(
    device: EmulatedDevice, grid: tuple[int, int, int], block: int, shared_bytes: int, what: str
) -> None:
    kernel = device.module(CASES, {}).kernel("sum_rows", SumArgs)
    with pytest.raises(KernelFailure, match=what):
        device.launch(kernel, grid, block, SumArgs(), shared_bytes=shared_bytes)


def test_memory_that_was_given_back_cannot_be_read(device: EmulatedDevice) -> None:
    array = device.zeros(5, np.float32)
    args = MistakeArgs(address(array), 0)  # reads element 0, which is there
    kernel = device.module(_MISTAKES, {}).kernel("reads_behind", MistakeArgs)
    device.launch(kernel, (1, 1, 1), 128, args)
    view = array[2:]
    del array
    device.launch(kernel, (1, 1, 1), 128, args)  # a view keeps the memory
    del view
    with pytest.raises(KernelFailure, match="outside"):
        device.launch(kernel, (1, 1, 1), 128, args)


def test_a_graph_repeats_launches_with_the_arguments_they_had(device: EmulatedDevice) -> None:
    array = device.upload(np.arange(256, dtype=np.float32))
    out = device.empty(1, np.float32)
    kernel = device.module(CASES, {}).kernel("sum_rows", SumArgs)
    args = SumArgs(address(array), address(out), 1, 256)
    graph = device.capture(lambda: device.launch(kernel, (1, 1, 1), 64, args))
    args.columns = 7
    assert np.isnan(out[0])  # captured, not run
    device.write(array, np.ones(256, np.float32))
    graph.replay()
    assert out[0] == 256
    graph.close()
    with pytest.raises(AssertionError, match="closed"):
        graph.replay()


def test_nothing_but_launches_goes_into_a_graph(device: EmulatedDevice) -> None:
    def record() -> None:
        device.zeros(1, np.float32)

    with pytest.raises(DeviceUnavailable, match="cannot allocate"):
        device.capture(record)
    assert device.zeros(1, np.float32)[0] == 0  # the capture has ended


def test_kernels_see_memory_of_the_host_while_it_is_mapped(device: EmulatedDevice) -> None:
    array = np.full(5, 3, np.float32)
    out = device.empty(1, np.float32)
    kernel = device.module(CASES, {}).kernel("sum_rows", SumArgs)
    mapping = device.map_host(array)
    args = SumArgs(mapping.device_address, address(out), 1, 5)
    device.launch(kernel, (1, 1, 1), 64, args)
    assert out[0] == 15
    mapping.close()
    with pytest.raises(KernelFailure, match="outside"):
        device.launch(kernel, (1, 1, 1), 64, args)


def test_arrays_are_aligned_and_poisoned(device: EmulatedDevice) -> None:
    emulated: KernelDevice = device
    for num_bytes in (1, 255, 4096):
        array = emulated.empty(num_bytes, np.uint8)
        assert address(array) % 256 == 0
        assert (device.download(array) == 0xFF).all()


def test_an_array_with_gaps_has_no_address(device: EmulatedDevice) -> None:
    with pytest.raises(SettingsError, match="contiguous"):
        address(device.empty((4, 4), np.float32)[:, 1:])


def test_a_struct_of_another_size_is_refused(device: EmulatedDevice) -> None:
    class TooSmall(ctypes.Structure):
        _fields_ = (("pointer", ctypes.c_void_p),)

    with pytest.raises(SettingsError, match=r"\b24\b.*TooSmall\b.*\b8\b"):
        device.module(CASES, {}).kernel("sum_rows", TooSmall)
    with pytest.raises(SettingsError, match=r"kernel\b.*\bnothing\b"):
        device.module(CASES, {}).kernel("nothing", TooSmall)


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("KERNEL(wrong, int, 64, 1) { undeclared(); }", "undeclared"),
        ("KERNEL(wrong, int, 64, 1) { int unused; }", "unused"),
        ("KERNEL(wrong, int, 64, 1) { volatile u8 big[70000]; big[0] = *big = 1; }", "larger than"),
        ("KERNEL(wrong, int, 2048, 1) {}", "launch bounds"),
    ],
)
def test_what_cannot_be_compiled_is_said(
    device: EmulatedDevice, tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text(f'#include "common.cuh"\n{text}\n')
    with pytest.raises(KernelCompileError, match=what):
        device.module(path, {})


@given(st.integers(0, 0xFFFFFFFF))
def test_halves_are_rounded_to_the_nearest_even_one(bits: int) -> None:
    device = EmulatedDevice()
    value = np.uint32(bits).view(np.float32)
    with np.errstate(over="ignore"):
        expected = np.float32(value).astype(np.float16)
    found = np.uint16(_to_half(device, float(value))).view(np.float16)
    assert found == expected or (np.isnan(found) and np.isnan(expected))


def _to_half(device: EmulatedDevice, value: float) -> int:
    return int(check_every_name(device, value=value)[6, 0])


def test_a_prepared_launch_takes_its_arguments_as_they_are_then() -> None:
    device, launched = EmulatedDevice(), []

    class Noting(EmulatedDevice):
        def launch(self, kernel, grid, block, args, **options):  # type: ignore[no-untyped-def]
            launched.append((kernel, grid, block, bytes(args), options["shared_bytes"]))

    kernel, args = device.module(CASES, {}).kernel("sum_rows", SumArgs), SumArgs()
    launch = PreparedLaunch(kernel, (1, 2, 3), 64, args, shared_bytes=5)
    noting = Noting()
    noting.start([launch])
    name, _ = SumArgs._fields_[0][:2]
    setattr(args, name, 77)
    noting.start([launch])
    assert launched[0][:3] == launched[1][:3] == (kernel, (1, 2, 3), 64)
    assert launched[0][4] == 5
    assert launched[1][3] == bytes(args) != launched[0][3]


def test_an_array_that_goes_while_ranges_are_listed_is_not_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may free it; its memory then belongs to something else."""
    device = EmulatedDevice()
    kept, going = device.zeros(4, np.int32), [device.zeros(8, np.int32)]
    begin, as_ranges = going[0].ctypes.data, emulated_device._as_ranges

    def meanwhile(places: list[tuple[int, int]], guarded: set[int]) -> Any:
        made = as_ranges(places, guarded)
        going.clear()
        return made

    monkeypatch.setattr(emulated_device, "_as_ranges", meanwhile)
    ranges, _ = device._current_ranges()
    begins = [each.begin for each in ranges]
    assert kept.ctypes.data in begins
    assert begin not in begins


def test_arrays_that_are_collected_while_ranges_are_listed_do_no_harm() -> None:
    """A collection may begin wherever a tuple is made, and free what another thread has left."""
    device, is_over = EmulatedDevice(), threading.Event()
    kept = [device.zeros(4, np.int32) for _ in range(50)]

    def leave_cycles() -> None:
        while not is_over.is_set():
            cycle: list[Any] = [device.zeros(4, np.int32)]
            cycle.append(cycle)

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    thread = threading.Thread(target=leave_cycles)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(2000):
            device.require_mapped(kept[0].ctypes.data, kept[0].nbytes)
    finally:
        is_over.set()
        thread.join()
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
