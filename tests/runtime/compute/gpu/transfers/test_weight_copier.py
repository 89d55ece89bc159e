"""Threads copy weights through locked memory: all bytes arrive, or whoever waits hears why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.transfers import weight_copier
from dflash_runtime.compute.gpu.transfers.weight_copier import WeightCopier, cut
from support.emulated_device import EmulatedDevice
from support.emulated_device.side_stream import EmulatedSideStream

PIECE_BYTES = 96


def copying_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("dflash-weights")]


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.fixture
def copier(device: EmulatedDevice) -> Iterator[WeightCopier]:
    opened = WeightCopier(device, num_threads=3, piece_bytes=PIECE_BYTES)
    yield opened
    opened.close()
    assert not copying_threads()


def random_bytes(size: int, seed: int = 0) -> U8Array:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_sources_of_any_length_arrive_one_after_the_other(
    device: EmulatedDevice, copier: WeightCopier
) -> None:
    sizes = [1, PIECE_BYTES, PIECE_BYTES + 1, 0, 40 * PIECE_BYTES + 7, 3]
    copies = []
    for seed in range(5):
        sources = [random_bytes(size, seed) for size in sizes]
        place = device.empty(sum(sizes), np.uint8)
        copy = copier.begin(sources, place, after=device.mark())
        copies.append((copy, np.concatenate(sources), place))
    for copy, expected, place in copies:
        copy.wait()
        assert (device.download(place) == expected).all()
    assert copier.num_bytes == 5 * sum(sizes)
    copier.begin([], device.empty(0, np.uint8), after=device.mark()).wait()


def test_parts_are_views_of_equal_size() -> None:
    sources = [random_bytes(size, size) for size in (5, 0, 17, 3, 8)]
    parts = list(cut(sources, 8))
    assert [sum(each.size for each in part) for part in parts] == [8, 8, 8, 8, 1]
    views = [view for part in parts for view in part]
    assert (np.concatenate(views) == np.concatenate(sources)).all()
    assert all(
        np.shares_memory(each, source)
        for each, source in zip(parts[0], (sources[0], sources[2]), strict=True)
    )


def test_nothing_is_written_before_the_mark(
    device: EmulatedDevice, copier: WeightCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece waits in its own stream for the mark of its own copy."""
    calls: dict[EmulatedSideStream, list[object]] = {}
    wait_for, copy = EmulatedSideStream.wait_for, EmulatedSideStream.copy

    def waits(stream: EmulatedSideStream, mark: object) -> None:
        calls.setdefault(stream, []).append(mark)
        wait_for(stream, mark)

    def copies(stream: EmulatedSideStream, *place: int) -> None:
        calls.setdefault(stream, []).append("copy")
        copy(stream, *place)

    monkeypatch.setattr(EmulatedSideStream, "wait_for", waits)
    monkeypatch.setattr(EmulatedSideStream, "copy", copies)
    marks = [device.mark() for _ in range(4)]
    place = device.empty(10 * PIECE_BYTES, np.uint8)
    for mark in marks:
        copier.begin([random_bytes(10 * PIECE_BYTES)], place, after=mark).wait()
    found = [call for of_stream in calls.values() for call in of_stream]
    assert len(found) == 2 * 4 * 10
    for of_stream in calls.values():
        assert of_stream[1::2] == ["copy"] * (len(of_stream) // 2)
    assert {mark: found.count(mark) for mark in marks} == dict.fromkeys(marks, 10)


def test_a_half_is_filled_again_only_when_the_device_has_read_it(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the emulated device read their source as late as they may."""
    with_one = WeightCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)
    source, place = random_bytes(50 * PIECE_BYTES), device.empty(50 * PIECE_BYTES, np.uint8)
    with_one.begin([source], place, after=device.mark()).wait()
    with_one.close()
    assert (device.download(place) == source).all()


@pytest.mark.parametrize("call", ["copy", "wait_for", "synchronize"])
def test_an_error_of_a_thread_reaches_who_waits(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    copier = WeightCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)

    def fail(*_: object) -> None:
        raise DeviceUnavailable("it has fallen off the bus")

    source, place = random_bytes(20 * PIECE_BYTES), device.empty(20 * PIECE_BYTES, np.uint8)
    with monkeypatch.context() as broken:
        broken.setattr(EmulatedSideStream, call, fail)
        copy = copier.begin([source], place, after=device.mark())
        with pytest.raises(DeviceUnavailable, match="fallen off the bus"):
            copy.wait()
    again = copier.begin([source], place, after=device.mark())
    if call == "synchronize":  # what was to be read may still be read: it is not overwritten
        with pytest.raises(DeviceUnavailable, match="fallen off the bus"):
            again.wait()
    else:  # the thread goes on
        again.wait()
        assert (device.download(place) == source).all()
    copier.close()


def test_any_error_of_a_thread_reaches_who_waits(
    device: EmulatedDevice, copier: WeightCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(weight_copier, "join", fail)
    with pytest.raises(MemoryError):
        copier.begin([random_bytes(9)], device.empty(9, np.uint8), after=device.mark()).wait()


def test_what_is_not_begun_is_dropped_when_it_is_closed(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ctrl-C ends an opening: closing waits for pieces under way only."""
    goes_on, num_filled = threading.Semaphore(0), 0
    join = weight_copier.join

    def slowly(*given: Any) -> int:
        nonlocal num_filled
        num_filled += 1
        goes_on.acquire()
        return join(*given)

    monkeypatch.setattr(weight_copier, "join", slowly)
    copier = WeightCopier(device, num_threads=2, piece_bytes=PIECE_BYTES)
    source, place = random_bytes(1000 * PIECE_BYTES), device.empty(1000 * PIECE_BYTES, np.uint8)
    copy = copier.begin([source], place, after=device.mark())
    closing = threading.Thread(target=copier.close)
    closing.start()
    while not copier._is_closed:
        closing.join(0.001)
    goes_on.release(2)
    closing.join(60)
    assert not closing.is_alive()
    assert num_filled <= 2
    assert not copying_threads()
    assert device.num_ranges == 1  # the locked memory is given back
    with pytest.raises(DeviceUnavailable):
        copy.wait()
    copier.close()


@pytest.mark.parametrize("call", ["map_host", "new_stream"])
def test_what_cannot_be_opened_leaves_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = getattr(EmulatedDevice, call)
    left = {"map_host": 0, "new_stream": 2}[call]

    def refused(*given: Any) -> Any:
        nonlocal left
        if not left:
            raise DeviceUnavailable("no memory can be locked")
        left -= 1
        return made(*given)

    monkeypatch.setattr(EmulatedDevice, call, refused)
    with pytest.raises(DeviceUnavailable):
        WeightCopier(device, num_threads=3)
    assert not copying_threads()
    assert device.num_ranges == 0
