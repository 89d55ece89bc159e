"""CupyDevice over a driver and a CuPy that are not there: everything but running kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError
from dflash_runtime.compute.gpu.device import cupy_device
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.capabilities import Vendor
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import KernelDevice, PreparedLaunch, address
from dflash_runtime.compute.gpu.device.devices import describe_gpus
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from dflash_runtime.compute.gpu.device.rtc import DeviceCompiler
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns
from support.emulated_device.device_checks import CASES, SumArgs
from support.fake_driver.fake_driver import FakeDriver, Setting, fake_cupy

CUDA = Device(DeviceKind.CUDA, 0)
HIP = Device(DeviceKind.HIP, 0)


class OtherArgs(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int),)


class NoCompiler:
    """For either vendor; DeviceCompiler.binary is replaced."""

    version = "none"
    major = 12
    vendor = Vendor.CUDA

    def supports(self, architecture: str) -> bool:
        return True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cupy_device, "open_driver", fake.open)
    monkeypatch.setattr(cupy_device, "runtime_compiler", lambda vendor, newest: NoCompiler())
    monkeypatch.setattr(DeviceCompiler, "binary", lambda self, file, defines: b"\x7fELF")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    return fake


@pytest.fixture
def device(fake: FakeDriver, tmp_path: Path) -> Iterator[CupyDevice]:
    device = CupyDevice(CUDA, cache=BinaryCache(tmp_path))
    fake.take_notes()
    yield device
    device.close()


def sums(device: CupyDevice) -> cupy_device.CupyKernel:
    return device.module(str(CASES), {}).kernel("sum_rows", SumArgs)


def test_it_is_a_kernel_device(device: CupyDevice) -> None:
    kernel_device: KernelDevice = device
    assert kernel_device.name == "cuda:0"
    assert (kernel_device.lanes, kernel_device.num_multiprocessors) == (32, 7)
    assert kernel_device.max_shared_bytes == 100000
    assert kernel_device.capabilities.architecture == "sm_90a"


def test_amd_is_known_by_its_architecture(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(is_hip=True))
    device = CupyDevice(HIP, cache=BinaryCache(tmp_path))
    assert (device.name, device.capabilities.vendor) == ("hip:0", Vendor.HIP)
    assert (device.capabilities.architecture, device.lanes) == ("gfx1030", 32)
    fake.take_notes()
    device.launch(sums(device), (1, 1, 1), 64, SumArgs())
    assert [line.split()[0] for line in fake.take_notes()] == [
        *("load_module", "module_function", "function_attribute", "launch"),
    ]
    device.close()


def test_kernels_are_compiled_ahead_for_such_a_device(
    device: CupyDevice, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, dict[str, int | str]]] = []

    def binary(compiler: DeviceCompiler, file: str, defines: Defines) -> bytes:
        compiled.append((file, dict(defines)))
        return b""

    monkeypatch.setattr(DeviceCompiler, "binary", binary)

    def launch(like: KernelDevice) -> None:
        facts = "lanes", "num_multiprocessors", "max_shared_bytes", "capabilities"
        assert all(getattr(like, name) == getattr(device, name) for name in facts)
        for number in (1, 2, 1):
            kernel = like.module("a.cu", {"N": number}).kernel("a", SumArgs)
            like.launch(kernel, (1, 1, 1), 64, SumArgs())

    device.compile_ahead("model", launch, lambda num_done, num_total: None)
    assert sorted(compiled, key=str) == [("a.cu", {"N": 1}), ("a.cu", {"N": 2})]
    assert not fake.take_notes()  # the driver was asked for nothing


def test_arrays_go_to_the_device_and_back(device: CupyDevice, fake: FakeDriver) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = device.upload(values)
    np.testing.assert_array_equal(device.download(array), values)
    device.write(array, 2 * values.T)  # which has gaps
    np.testing.assert_array_equal(device.download(array).reshape(4, 3), 2 * values.T)
    assert not device.download(device.zeros((5,), np.int32)).any()
    assert device.upload(np.empty((0, 4), np.float32)).shape == (0, 4)
    with pytest.raises(SettingsError, match=r"\b16\b.*\b48\b"):
        device.write(array, values[0])
    # A source may change at once: nothing returns before it has been read.
    names = [line.split()[0] for line in fake.take_notes()]
    assert all(names[i + 1] == "synchronize_stream" for i, n in enumerate(names) if n == "copy")


@pytest.mark.parametrize("kind", [CUDA, HIP], ids=str)
def test_compiled_code_copies_by_the_driver(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Device
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(is_hip=kind is HIP))
    device = CupyDevice(kind, cache=BinaryCache(tmp_path))
    copier = FileCopier(device, num_threads=1, piece_bytes=64)
    source, place = np.arange(200, dtype=np.uint8), device.empty(100, np.uint8)
    runs = [(source[2 * i : 2 * i + 20], place[i : i + 20]) for i in range(0, 100, 20)]
    fake.take_notes()
    copier.begin(FileRuns.of(runs)).wait()
    asked = [line.split()[:2] for line in fake.take_notes()]
    copies = [size for name, size in asked if name == "copy_to_device"]
    assert copies == ["64", "36"]
    assert asked[-1][0] == "synchronize_stream"
    assert (device.download(place) == np.concatenate([each for each, _ in runs])).all()
    fake.fail("copy_to_device", 700)
    with pytest.raises(DeviceUnavailable, match="error 700"):
        copier.begin(FileRuns.of(runs)).wait()
    copier.close()
    device.close()


def test_too_much_memory_is_refused_with_amounts(device: CupyDevice) -> None:
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.empty((1 << 20,), np.float32)
    error = caught.value
    assert (error.device, error.num_bytes) == ("cuda:0", 1 << 22)
    assert (error.free_bytes, error.total_bytes) == (1000, 4000)


def test_a_module_is_loaded_once_and_its_kernels_may_use_all_shared_memory(
    device: CupyDevice, fake: FakeDriver
) -> None:
    sums(device)
    assert device.module(str(CASES), {}) is device.module(str(CASES), {})
    assert fake.take_notes() == [
        *("load_module 7fELF", "module_function sum_rows of 3", "load_function 4"),
        *("parameter_info 0 of 4", "function_attribute 1 of 4"),
        "set_function_attribute 8 of 4 = 99488",  # 512 are static
        "set_function_attribute 14 of 4 = 1",
    ]


def test_a_struct_of_another_size_is_refused(device: CupyDevice, fake: FakeDriver) -> None:
    fake.set(Setting.PARAMETER_BYTES, 32)
    with pytest.raises(SettingsError, match=r"sum_rows\b.*\b32\b.*SumArgs\b.*\b24\b"):
        sums(device)


@pytest.mark.parametrize(
    ("major", "overlaps_previous", "name"),
    [(9, True, "launch_with"), (9, False, "launch"), (8, True, "launch")],
)
def test_kernels_overlap_where_they_may_and_the_device_can(
    fake: FakeDriver, tmp_path: Path, major: int, overlaps_previous: bool, name: str
) -> None:
    fake.set(Setting.MAJOR, major)
    device = CupyDevice(CUDA, cache=BinaryCache(tmp_path))
    kernel = sums(device)
    fake.take_notes()
    device.launch(kernel, (1, 1, 1), 64, SumArgs(), overlaps_previous=overlaps_previous)
    assert fake.take_notes()[0].split()[0] == name
    with pytest.raises(SettingsError, match=r"sum_rows\b.*SumArgs"):
        device.launch(kernel, (1, 1, 1), 64, OtherArgs())
    with pytest.raises(SettingsError, match=r"sum_rows\b.*\b80 threads"):
        device.launch(kernel, (1, 1, 1), 80, SumArgs())
    device.close()


@pytest.mark.parametrize(("major", "name"), [(9, "launch_with"), (8, "launch")])
def test_prepared_launches_have_their_arguments_as_they_are_then(
    fake: FakeDriver, tmp_path: Path, major: int, name: str
) -> None:
    """The same calls as of kernels that are launched one by one."""
    fake.set(Setting.MAJOR, major)
    with closing(CupyDevice(CUDA, cache=BinaryCache(tmp_path))) as device:
        kernel, args = sums(device), SumArgs()
        prepared = [PreparedLaunch(kernel, (n, 1, 1), 64, args, n) for n in (1, 2)]
        fake.take_notes()
        for number in (5, 6):
            args.rows = number
            device.start(prepared)
            found = fake.take_notes()
            for n in (1, 2):
                device.launch(kernel, (n, 1, 1), 64, args, shared_bytes=n)
            expected = fake.take_notes()
            assert [each for each in found if each.startswith(name)] == [
                each for each in expected if each.startswith(name)
            ]
            assert len(found) >= 2
        with pytest.raises(SettingsError, match=r"sum_rows\b.*SumArgs"):
            device.start([PreparedLaunch(kernel, (1, 1, 1), 64, OtherArgs())])
        with pytest.raises(SettingsError, match=r"sum_rows\b.*\b80 threads"):
            device.start([PreparedLaunch(kernel, (1, 1, 1), 80, args)])


def test_a_graph_is_recorded_and_replayed(device: CupyDevice, fake: FakeDriver) -> None:
    kernel = sums(device)
    fake.take_notes()
    graph = device.capture(lambda: device.launch(kernel, (1, 1, 1), 64, SumArgs()))
    graph.replay()
    graph.close()
    graph.close()
    with pytest.raises(SettingsError, match="closed"):
        graph.replay()
    names = [line.split()[0] for line in fake.take_notes()]
    assert names == [
        *("begin_capture", "launch_with", "end_capture", "instantiate_graph"),
        *("destroy_graph", "launch_graph", "destroy_executable"),
    ]


def test_a_stream_of_ones_own_replays_graphs_and_ends_when_it_is_empty(
    device: CupyDevice, fake: FakeDriver
) -> None:
    graph, stream = device.capture(lambda: None), device.new_stream()
    fake.take_notes()
    stream.replay(graph)
    stream.synchronize()
    stream.close()
    stream.close()
    notes = fake.take_notes()
    assert [line.split()[0] for line in notes] == [
        *("launch_graph", "synchronize_stream", "synchronize_stream", "destroy_stream")
    ]
    handle = notes[-1].split()[1]
    assert notes[0].endswith(f" on {handle}")
    assert handle != str(device.stream)
    with pytest.raises(DeviceUnavailable, match="closed"):
        stream.replay(graph)


def test_nothing_but_launches_goes_into_a_graph(device: CupyDevice, fake: FakeDriver) -> None:
    array = device.zeros(4, np.float32)
    forbidden = {
        r"allocate float32 \[1\]": lambda: device.empty(1, np.float32),
        "write": lambda: device.write(array, np.zeros(4, np.float32)),
        "download": lambda: device.download(array),
        "load .*cases.cu": lambda: device.module(str(CASES), {}),
        "synchronise": device.synchronize,
        "map memory": lambda: device.map_host(np.zeros(4)),
        "capture": lambda: device.capture(lambda: None),
    }
    for what, action in forbidden.items():
        fake.take_notes()
        with pytest.raises(DeviceUnavailable, match=what):
            device.capture(action)  # type: ignore[arg-type]
        assert fake.take_notes()[1].startswith("end_capture")
    device.synchronize()  # it has ended


def test_memory_of_the_host_is_mapped_until_it_is_closed(
    device: CupyDevice, fake: FakeDriver
) -> None:
    array = np.zeros(16, np.float32)
    mapping = device.map_host(array)
    assert mapping.device_address == address(array) + 0x1000
    mapping.close()
    mapping.close()
    assert fake.take_notes() == [
        *("register_host 64 flags 3", "host_pointer flags 0", "unregister_host")
    ]


def test_what_runs_beside_waits_for_marks_alone(device: CupyDevice, fake: FakeDriver) -> None:
    kernel = sums(device)
    fake.take_notes()
    side = device.side_stream("out")
    assert device.side_stream("out") is side
    assert device.side_stream("in") is not side
    array = device.empty(4, np.float32)
    mark = device.mark()
    side.wait_for(mark)
    side.write(array, np.arange(4, dtype=np.float32))
    found = np.zeros(4, np.float32)
    side.read(found, array)
    assert found.tolist() == [0, 1, 2, 3]
    side.launch(kernel, (1, 1, 1), 64, SumArgs())
    assert side.is_empty()
    side.synchronize(10.0)
    del mark
    device.mark()  # with the same event, which nobody has any more
    notes = [line for line in fake.take_notes() if not line.startswith("create_stream")]
    stream = notes[2].split()[3]
    assert stream != str(device.stream)
    assert notes[0] == "create_event 2"
    event = notes[1].split()[1]
    assert notes[1] == f"record_event {event} in {device.stream}"
    assert notes[2] == f"wait_for_event {event} in {stream} flags 0"
    assert notes[3:5] == [f"copy 16 on {stream}"] * 2
    assert notes[5].startswith("launch ")
    assert f"stream {stream} " in notes[5]
    assert notes[6:] == [f"query_stream {stream}"] * 2 + [notes[1]]
    with pytest.raises(SettingsError, match="fill"):
        side.write(array, np.zeros(3, np.float32))
    with pytest.raises(SettingsError, match="fill"):
        side.read(np.zeros(3, np.float32), array)
    device.close()
    names = [line.split()[0] for line in fake.take_notes()]
    assert names.count("destroy_stream") == 3
    assert names.count("destroy_event") == 1
    with pytest.raises(DeviceUnavailable, match=r"cuda:0\b.*closed"):
        side.synchronize(1.0)


def test_what_arrays_leave_after_their_device_was_closed_is_given_back(
    fake: FakeDriver, tmp_path: Path
) -> None:
    """Found on an H200: each load that failed left 1.25 MiB, which its traceback had kept."""
    cache = BinaryCache(tmp_path)
    first = CupyDevice(CUDA, cache=cache)
    pool = first._memory._pool
    pool.held_bytes = 100
    first.close()
    pool.held_bytes = 0  # the traceback is gone
    num_freed = pool.num_freed
    for _ in range(2):
        CupyDevice(CUDA, cache=cache).close()
    assert pool.num_freed == num_freed + 1


def test_what_is_free_is_asked_after_closed_devices_gave_theirs_back(
    fake: FakeDriver, tmp_path: Path
) -> None:
    """An engine that learns heat is closed, and the next one is planned with what is free."""
    device = CupyDevice(CUDA, cache=BinaryCache(tmp_path))
    pool = device._memory._pool
    pool.held_bytes = 100
    device.close()
    pool.held_bytes, num_freed = 0, pool.num_freed
    for _ in range(2):
        describe_gpus(DeviceKind.CUDA)
    assert pool.num_freed == num_freed + 1


def test_closing_gives_everything_back_even_when_the_device_has_failed(
    device: CupyDevice, fake: FakeDriver
) -> None:
    sums(device)
    fake.take_notes()
    device.close()
    device.close()
    names = [line.split()[0] for line in fake.take_notes()]
    assert names == ["synchronize_stream", "unload_module", "destroy_stream"]
    other = CupyDevice(CUDA)
    mapping, graph = other.map_host(np.zeros(4096, np.uint8)), other.capture(lambda: None)
    stream, peer = other.new_stream(), other.export_memory(4096)
    for name in ("synchronize_stream", "unregister_host", "destroy_executable", "free"):
        fake.fail(name, 700)
    for each in (mapping, graph, stream, peer, other):
        each.close()


def test_what_cannot_be_opened_says_why(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceUnavailable, match=r"cuda:1\b.*\b1 device"):
        CupyDevice(Device(DeviceKind.CUDA, 1))
    with pytest.raises(DeviceUnavailable, match=r"hip:0\b.*CuPy\b.*vendor"):
        CupyDevice(HIP)
    with pytest.raises(SettingsError, match=r"\bcpu\b.*GPU"):
        CupyDevice(CPU)
    fake.set(Setting.MAJOR, 3)
    with pytest.raises(SettingsError, match=r"\b3\.0 "):
        CupyDevice(CUDA)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailable, match=r"^cuda:0: .*CuPy") as caught:
        CupyDevice(CUDA)
    assert len(str(caught.value).splitlines()) == 1
