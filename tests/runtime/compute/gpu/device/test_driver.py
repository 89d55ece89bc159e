"""What a driver is asked, byte by byte, and what becomes of its refusals."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable
from dflash_runtime.compute.gpu.device import devices
from dflash_runtime.compute.gpu.device.capabilities import Vendor, hip_capabilities
from dflash_runtime.compute.gpu.device.devices import (
    CONTEXT_BYTES,
    corrected_memory,
    describe_gpus,
    is_display_connected,
    memory_of,
)
from dflash_runtime.compute.gpu.device.driver import Driver
from dflash_runtime.compute.gpu.device.driver_table import (
    FUNCTIONS,
    DeviceAttribute,
    FunctionAttribute,
    LaunchAttribute,
    LaunchConfig,
)
from support.fake_driver.fake_driver import FakeDriver, Setting
from support.processes import environment


class Args(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_uint64), ("rows", ctypes.c_int), ("tail", ctypes.c_uint16))


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(params=list(DeviceKind)[1:])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    return devices.VENDORS[request.param]


def launch(driver: Driver, *, overlaps_previous: bool) -> None:
    args = Args(0x1122334455667788, -2, 0xABCD)
    call = driver.launch_call(
        0x77,
        (5, 6, 7),
        128,
        args=args,
        shared_bytes=4096,
        stream=0x99,
        overlaps_previous=overlaps_previous,
    )
    assert call() == 0


def test_a_launch_carries_its_sizes_and_a_copy_of_its_struct(
    fake: FakeDriver, vendor: Vendor
) -> None:
    fake.set(Setting.PARAMETER_BYTES, ctypes.sizeof(Args))
    driver = fake.open(vendor)
    fake.take_notes()
    launch(driver, overlaps_previous=False)
    assert fake.take_notes() == [
        "launch 119 grid 5 6 7 block 128 1 1 shared 4096 stream 153 args "
        "8877665544332211" + "feffffff" + "cdab0000"
    ]


def test_a_launch_that_overlaps_says_so_where_the_driver_can(fake: FakeDriver) -> None:
    fake.set(Setting.PARAMETER_BYTES, 2)
    driver = fake.open(Vendor.CUDA)
    fake.take_notes()
    launch(driver, overlaps_previous=True)
    assert fake.take_notes() == [
        "launch_with 1 attributes, first 6 = 1, of 119 grid 5 6 7 block 128 1 1 shared 4096 "
        "stream 153 args 8877"
    ]
    # An older driver launches it plainly; so does HIP's.
    for other in (fake.open(Vendor.CUDA), fake.open(Vendor.HIP)):
        other._functions.pop("launch_with_attributes", None)
        fake.take_notes()
        launch(other, overlaps_previous=True)
        assert fake.take_notes()[0].startswith("launch 119 ")


def test_structs_lie_as_cuda_has_them() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56
    assert LaunchConfig.stream.offset == 32


def test_an_error_has_the_drivers_own_words(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.fail("synchronize_stream", 700)
    name = FUNCTIONS["synchronize_stream"]
    symbol = name.cuda if vendor is Vendor.CUDA else name.hip
    expected = rf"^{symbol}: the fake's error 700 \(error 700\)$"
    with pytest.raises(DeviceUnavailable, match=expected) as caught:
        driver.synchronize_stream(3)
    assert len(str(caught.value).splitlines()) == 1


def test_an_error_without_words_keeps_its_number(fake: FakeDriver) -> None:
    driver = fake.open(Vendor.CUDA)
    fake.fail("copy", 999)
    text = ctypes.create_string_buffer(8)
    address = ctypes.addressof(text)
    with pytest.raises(DeviceUnavailable, match="error 999"):
        driver.copy(address, address + 4, 4, stream=0)


def test_memory_that_runs_out_is_told_with_amounts(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.fail("instantiate_graph", 2)
    with pytest.raises(DeviceOutOfMemory) as caught:
        driver.capture(3, lambda: None)
    assert (caught.value.free_bytes, caught.value.total_bytes) == (1000, 4000)
    assert caught.value.num_bytes is None
    # The graph that could not be made ready is given back.
    assert any(line.startswith("destroy_graph") for line in fake.take_notes())


def test_a_capture_makes_a_graph_and_gives_back_what_it_was_made_of(
    fake: FakeDriver, vendor: Vendor
) -> None:
    driver = fake.open(vendor)
    fake.take_notes()
    executable = driver.capture(3, lambda: launch(driver, overlaps_previous=False))
    driver.launch_graph(executable, 3)
    driver.destroy_graph(executable)
    names = [line.split(" grid")[0] for line in fake.take_notes()]
    assert names == [
        "begin_capture 3 mode 1",
        "launch 119",
        "end_capture 3",
        "instantiate_graph 1 flags 0",
        "destroy_graph 1",
        "launch_graph 2 on 3",
        "destroy_executable 2",
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_within_a_capture_ends_it(
    fake: FakeDriver, vendor: Vendor, error: type[BaseException]
) -> None:
    driver = fake.open(vendor)

    def record() -> None:
        raise error

    fake.take_notes()
    with pytest.raises(error):
        driver.capture(3, record)
    assert fake.take_notes() == ["begin_capture 3 mode 1", "end_capture 3", "destroy_graph 1"]
    # A stream that fails to end it hides nothing.
    fake.fail("end_capture", 901)
    with pytest.raises(error):
        driver.capture(3, record)
    assert fake.take_notes() == ["begin_capture 3 mode 1", "end_capture 3"]


def test_memory_of_the_host_is_unlocked_when_it_cannot_be_seen(
    fake: FakeDriver, vendor: Vendor
) -> None:
    driver = fake.open(vendor)
    array = np.zeros(8, np.uint8)
    fake.take_notes()
    assert driver.register_host(array.ctypes.data, 8) == array.ctypes.data + 0x1000
    assert fake.take_notes() == ["register_host 8 flags 3", "host_pointer flags 0"]
    fake.fail("host_pointer", 1)
    with pytest.raises(DeviceUnavailable):
        driver.register_host(array.ctypes.data, 8)
    assert fake.take_notes()[-1] == "unregister_host"


def test_copies_go_both_ways(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    source, destination = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    driver.copy(destination.ctypes.data, source.ctypes.data, 8, stream=3)
    np.testing.assert_array_equal(destination, source)
    driver.clear(destination.ctypes.data, 4, 3)
    np.testing.assert_array_equal(destination, [0, 0, 0, 0, 4, 5, 6, 7])


def test_a_thread_means_the_device_it_has_said(fake: FakeDriver) -> None:
    fake.set(Setting.NUM_DEVICES, 2)
    cuda, hip = fake.open(Vendor.CUDA), fake.open(Vendor.HIP)
    for index in (1, 1, 0):
        cuda.use(index)
    hip.use(1)
    lines = fake.library.fake_notes().decode().splitlines()
    assert lines[-6:] == [
        *("retain_context 101", "set_context 1", "set_context 1"),
        *("retain_context 100", "set_context 2", "set_device 1"),
    ]


def test_functions_are_made_ready_before_they_are_captured(fake: FakeDriver) -> None:
    driver = fake.open(Vendor.CUDA)
    function = driver.module_function(driver.load_module(b"\x7fELF..."), "kernel")
    driver.set_function_attribute(function, FunctionAttribute.MAX_DYNAMIC_SHARED_BYTES, 77)
    assert fake.take_notes()[1:] == [
        "load_module 7fELF",
        "module_function kernel of 1",
        "load_function 2",
        "set_function_attribute 8 of 2 = 77",
    ]
    assert driver.parameter_bytes(function) == 24
    assert fake.open(Vendor.HIP).parameter_bytes(function) is None


def test_a_driver_that_lacks_a_function_is_too_old() -> None:
    with pytest.raises(DeviceUnavailable, match=r"\bcuda driver\b.* cu"):
        Driver(Vendor.CUDA, ctypes.CDLL(None))


def test_a_driver_that_cannot_start_says_why(fake: FakeDriver, vendor: Vendor) -> None:
    fake.fail("init", 100)
    with pytest.raises(DeviceUnavailable, match="Init: the fake's error 100"):
        fake.open(vendor)


@pytest.mark.parametrize("index", [0, 1])
def test_attributes_have_each_vendors_numbers(fake: FakeDriver, index: int) -> None:
    for vendor, number in ((Vendor.CUDA, 16), (Vendor.HIP, 63)):
        driver = fake.open(vendor)
        fake.take_notes()
        assert driver.device_attribute(index, DeviceAttribute.MULTIPROCESSORS) == 7
        assert fake.take_notes() == [f"device_attribute {number} of {100 + index}"]


def test_more_free_than_there_is_is_clamped_and_said(
    fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver = fake.open(Vendor.CUDA)
    memory = memory_of(driver, 0)
    assert (memory.free_bytes, memory.total_bytes, memory.note) == (1000, 4000, "")
    assert not memory.is_shared_with_host
    fake.set(Setting.FREE, 9000)
    fake.set(Setting.INTEGRATED, 1)
    memory = memory_of(driver, 0)
    assert (memory.free_bytes, memory.total_bytes) == (4000, 4000)
    assert memory.is_shared_with_host
    assert re.search(r"\b9,000 .*\b4,000 bytes\b.*\b4,000\b", memory.note)
    assert [record.args for record in caplog.records] == [("cuda", 0, memory.note)]
    fake.set(Setting.FREE, 4000)
    assert memory_of(driver, 0).note == ""


def test_memory_that_is_shared_with_the_host_is_one_pool() -> None:
    memory = corrected_memory(3000, 4000, host_free_bytes=500)
    assert (memory.free_bytes, memory.total_bytes, memory.note) == (500, 4000, "")
    assert memory.is_shared_with_host
    assert corrected_memory(9000, 4000, host_free_bytes=4500).free_bytes == 4000
    assert corrected_memory(9000, 4000).free_bytes == 4000
    assert not corrected_memory(10, 4000).is_shared_with_host


def test_more_stays_free_where_a_display_hangs_on_the_device(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = fake.open(Vendor.CUDA)
    fake.set(Setting.FREE, 1 << 30)
    fake.set(Setting.TOTAL, 1 << 32)
    memory = memory_of(driver, 0)
    assert memory.stays_free_bytes == 256 << 20
    assert memory.room_bytes == 768 << 20
    fake.set(Setting.TIMEOUT, 1)
    memory = memory_of(driver, 0)
    assert memory.stays_free_bytes == 768 << 20
    assert memory.room_bytes == 256 << 20
    fake.set(Setting.FREE, 1 << 20)
    assert memory_of(driver, 0).room_bytes == 0
    # Or where the system says that one is connected.
    fake.set(Setting.TIMEOUT, 0)
    monkeypatch.setattr(devices, "is_display_connected", lambda pci_bus_id: True)
    assert memory_of(driver, 0).stays_free_bytes == 768 << 20


def test_the_system_tells_of_connected_displays(tmp_path: Path) -> None:
    outputs = tmp_path / "sys/bus/pci/devices/0000:0a:00.0/drm/card1"
    assert not is_display_connected("0000:0A:00.0", tmp_path)
    for name, status in (("card1-DP-1", "disconnected\n"), ("card1-HDMI-A-1", "\xff")):
        (outputs / name).mkdir(parents=True)
        (outputs / name / "status").write_text(status)
    assert not is_display_connected("0000:0A:00.0", tmp_path)
    (outputs / "card1-DP-1" / "status").write_text("connected\n")
    assert is_display_connected("0000:0A:00.0", tmp_path)
    assert not is_display_connected("0000:0B:00.0", tmp_path)
    assert not is_display_connected("\0", tmp_path)


def test_every_gpu_is_described(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "open_driver", fake.open)
    fake.set(Setting.NUM_DEVICES, 2)
    found, why_none = describe_gpus(DeviceKind.CUDA)
    assert why_none is None
    assert [each.device for each in found] == [Device(DeviceKind.CUDA, i) for i in (0, 1)]
    assert (found[1].name, found[1].uuid, found[1].pci_bus_id) == (
        "Fake 101",
        "65" * 16,
        "0000:65:00.0",
    )
    # What asking took there is not counted as taken: plans count it.
    assert found[1].memory.free_bytes == 4000
    fake.set(Setting.TOTAL, 1 << 40)
    found, _ = describe_gpus(DeviceKind.CUDA)
    assert found[1].memory.free_bytes == 1000 + CONTEXT_BYTES
    assert memory_of(fake.open(Vendor.CUDA), 1).free_bytes == 1000
    assert found[1].capabilities is not None
    assert found[1].capabilities.architecture == "sm_90a"
    fake.set(Setting.MAJOR, 5)
    found, _ = describe_gpus(DeviceKind.CUDA)
    assert found[0].why_not is not None
    assert "5.0" in found[0].why_not
    found, why_none = describe_gpus(DeviceKind.HIP)
    assert why_none is None
    assert [each.why_not for each in found] == [None, None]
    assert found[1].capabilities == hip_capabilities("gfx1030")
    fake.set(Setting.NUM_DEVICES, 0)
    found, why_none = describe_gpus(DeviceKind.HIP)
    assert (found, "hip driver" in (why_none or "")) == ([], True)


def test_an_architecture_that_nothing_tells_is_told_so(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake.open(Vendor.HIP)
    told = old._functions.pop("device_properties")
    monkeypatch.setattr(devices, "open_driver", lambda vendor: old)
    found, _ = describe_gpus(DeviceKind.HIP)
    assert (found[0].device, found[0].name) == (Device(DeviceKind.HIP, 0), "Fake 100")
    assert found[0].capabilities is None
    assert re.search(r"architecture\b.*\bhip:0\b", found[0].why_not or "")
    old._functions["old_device_properties"] = told
    assert old.hip_architecture(1) == "gfx1030:sramecc+:xnack-"


def test_without_a_driver_there_is_one_line_why() -> None:
    """In a process of its own, whose loader finds nothing."""
    program = (
        "import ctypes\n"
        "def missing(name, *rest): raise OSError(f'{name}: cannot open\\nshared object file')\n"
        "ctypes.CDLL = missing\n"
        "from dflash_protocol.device import DeviceKind\n"
        "from dflash_runtime.compute.gpu.device.devices import describe_gpus\n"
        "for kind in (DeviceKind.CUDA, DeviceKind.HIP): print(describe_gpus(kind))\n"
    )
    result = subprocess.run(
        (sys.executable, "-c", program),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=True,
    )
    lines = result.stdout.splitlines()
    for line, library in zip(lines, ("libcuda.so.1", "libamdhip64.so"), strict=True):
        gpus, why_none = ast.literal_eval(line)
        assert gpus == []
        assert f"{library}: cannot open\\nshared object file" in why_none


def test_a_stream_is_waited_for_no_longer_than_is_said(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.set(Setting.BUSY, 3)
    fake.take_notes()
    assert not driver.is_empty(5)
    driver.synchronize_stream(5, 10.0)
    assert fake.take_notes() == ["query_stream 5"] * 4
    fake.set(Setting.BUSY, 1 << 40)
    with pytest.raises(DeviceUnavailable, match=r"\b0\.06 s\b"):
        driver.synchronize_stream(5, 0.06)
    fake.set(Setting.BUSY, 0)
    fake.fail("query_stream", 700)
    with pytest.raises(DeviceUnavailable, match="error 700"):
        driver.synchronize_stream(5, 10.0)


def test_streams_wait_for_events_of_each_other(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.take_notes()
    stream, event = driver.create_stream(priority=-1), driver.create_event()
    driver.record_event(event, 9)
    driver.wait_for_event(stream, event)
    driver.destroy_event(event)
    assert fake.take_notes() == [
        "create_stream_of_priority 1 -1",
        "create_event 2",
        "record_event 2 in 9",
        "wait_for_event 2 in 1 flags 0",
        "destroy_event 2",
    ]


def test_memory_is_shown_to_other_processes(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.take_notes()
    address, handle = driver.export_memory(100)
    assert handle == bytes([address]) * 64
    driver.free(address)
    assert fake.take_notes() == [
        "allocate 100", f"export_memory {address}", "clear 100 on 0", "synchronize_stream 0",
        f"free {address}",
    ]  # fmt: skip
    fake.fail("export_memory", 1)
    with pytest.raises(DeviceUnavailable, match="the fake's error 1"):
        driver.export_memory(100)
    assert fake.take_notes()[-1].startswith("free ")


def test_memory_that_is_shown_must_be_large_enough(fake: FakeDriver, vendor: Vendor) -> None:
    driver = fake.open(vendor)
    fake.set(Setting.SHOWN, 128)
    fake.take_notes()
    address = driver.import_memory(bytes([7]) * 64, 128)
    assert fake.take_notes() == ["import_memory 07 flags 1", f"memory_range {address}"]
    with pytest.raises(DeviceUnavailable, match=r"\b128 bytes\b.*\b129\b"):
        driver.import_memory(bytes(64), 129)
    assert fake.take_notes()[-1] == f"close_memory {address + 1}"
    fake.fail("memory_range", 1)  # what cannot be asked is not used
    with pytest.raises(DeviceUnavailable, match="the fake's error 1"):
        driver.import_memory(bytes(64), 1)
    assert fake.take_notes()[-1] == f"close_memory {address + 2}"
