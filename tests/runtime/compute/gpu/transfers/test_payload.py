"""Payload on an emulated device: what goes through a window is what lay there, with its digest."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import HostSums, SomeRows, Sums
from dflash_protocol.device_payload import digest_of
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, U8Array
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover, SegmentWindow
from support.emulated_device import EmulatedDevice, KernelFailure
from support.examples import examples

HIDDEN = 40
NUM_BYTES = 8 * mmap.PAGESIZE


class Rig:
    """A device with a window on memory of the host."""

    def __init__(self, **options: object) -> None:
        self.device = EmulatedDevice(num_multiprocessors=1, **options)  # type: ignore[arg-type]
        self.mover = PayloadMover(self.device, threading.RLock())
        self._memory = mmap.mmap(-1, NUM_BYTES)
        self.shared: U8Array = np.frombuffer(self._memory, np.uint8)
        self.window: SegmentWindow = self.mover.open(self.shared.ctypes.data, NUM_BYTES)

    def bytes_at(self, offset: int, like: AnyArray) -> AnyArray:
        return self.shared[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)


@pytest.fixture(params=[{}, {"lanes": 64}, {"runs_backward": True}], ids=["32", "64", "backward"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(**request.param)
    yield made
    made.window.close()


def rows_of(num_rows: int) -> AnyArray:
    return np.random.default_rng(num_rows).standard_normal((num_rows, HIDDEN), np.float32)


def digest(array: AnyArray) -> int:
    return digest_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@pytest.mark.wide(1)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 21])  # of which a launch has eight blocks
def test_rows_go_out_and_come_in(rig: Rig, num_rows: int) -> None:
    hidden = rows_of(num_rows)
    rows = rig.mover.rows(rig.device.upload(hidden))
    crossing = rig.window.write_rows(128, rows)
    assert crossing.digest() == digest(hidden)
    assert (rig.bytes_at(128, hidden) == hidden).all()
    read = rig.window.read_rows(128, hidden.shape)
    assert read.shape == hidden.shape
    assert (read.to_host() == hidden).all()
    rig.shared[:] = 0  # it has been read
    assert read.digest() == digest(hidden)
    assert (rig.mover.device.download(rig.mover.array_of(read)) == hidden).all()


def test_rows_are_read_when_somebody_needs_them(rig: Rig) -> None:
    hidden, other = rows_of(5), rows_of(6)
    first = rig.window.read_rows(0, hidden.shape)
    second = rig.window.read_rows(2048, other.shape)
    rig.bytes_at(0, hidden)[...] = hidden
    rig.bytes_at(2048, other)[...] = other
    num_launches = rig.device.num_launches
    first.abandon()
    assert rig.device.num_launches == num_launches
    assert second.digest() == digest(other)
    assert first.digest() == digest(hidden)
    assert second.digest() == digest(other)
    first.abandon()


@pytest.mark.wide(1)
@pytest.mark.parametrize("num_rows", [0, 1, 19])
def test_sums_go_out_and_come_in(rig: Rig, num_rows: int) -> None:
    sums = rows_of(num_rows).astype(np.float64)
    placed = rig.mover.sums(rig.device.upload(sums))
    assert rig.window.write_sums(256, placed) == digest(sums)
    expected = rig.window.expect_sums(sums.shape)
    assert rig.window.read_sums(256, expected).digest() == digest(sums)
    rig.shared[:] = 0
    assert (expected.sums.to_host() == sums).all()


@pytest.mark.parametrize("num_rows", [1, 19])
def test_sums_that_are_not_finite_are_told_while_they_are_read(rig: Rig, num_rows: int) -> None:
    """Wherever one stands, in whatever word and block; and no large or small number is taken for
    one, nor what was read before."""
    sums = rows_of(num_rows).astype(np.float64)
    largest, smallest = np.finfo(np.float64).max, 5e-324
    places = [(0, 0), (num_rows - 1, 1), (num_rows // 2, sums.shape[1] - 1)]
    values = [np.nan, 0.0, np.inf, largest, -np.inf, -largest, smallest, -np.nan, 1.0]
    for place in places:
        for value in values:
            changed = sums.copy()
            changed[place] = value
            rig.window.write_sums(256, rig.mover.sums(rig.device.upload(changed)))
            expected = rig.window.expect_sums(sums.shape)
            crossing = rig.window.read_sums(256, expected)
            assert crossing.digest() == digest(changed)
            assert crossing.is_finite() == np.isfinite(value)


def test_what_is_on_its_way_is_kept(rig: Rig) -> None:
    """Nobody else refers to rows, indices or sums any more: the side streams run late here, and
    find out what is gone."""
    hidden = rows_of(9)
    some = np.array([8, 2, 2, 5], np.int32)
    crossing = rig.window.write_rows(0, rig.mover.rows(rig.device.upload(hidden)).chosen(some))
    assert not crossing.has_ended()
    assert (rig.shared == 0).all()
    assert crossing.has_ended()
    assert crossing.digest() == digest(hidden[some])
    assert (rig.bytes_at(0, hidden[some]) == hidden[some]).all()
    sums = rows_of(3).astype(np.float64)
    rig.bytes_at(4096, sums)[...] = sums
    num_bytes = rig.device.num_bytes
    rig.window.read_sums(4096, rig.window.expect_sums(sums.shape))
    assert rig.device.num_bytes > num_bytes  # though nobody waits for it
    expected = rig.window.expect_sums(sums.shape)
    assert rig.window.read_sums(4096, expected).digest() == digest(sums)
    assert (expected.sums.to_host() == sums).all()
    del expected
    assert rig.device.num_bytes == num_bytes


@st.composite
def choices(draw: st.DrawFn) -> list[SomeRows]:
    """Rows of rows of thirteen rows."""
    num_rows, found = 13, []
    for _ in range(draw(st.integers(0, 3))):
        chosen: SomeRows
        if draw(st.booleans()):
            first = draw(st.integers(0, num_rows))
            chosen = slice(first, draw(st.integers(first, num_rows)))
            num_rows = chosen.stop - chosen.start
        else:
            places = st.lists(st.integers(0, max(num_rows - 1, 0)), max_size=min(num_rows, 9))
            chosen = np.array(draw(places), np.int32)
            num_rows = chosen.size
        found.append(chosen)
    return found


@examples(60)
@given(choices())
def test_some_of_some_rows(chosen: list[SomeRows]) -> None:
    rig = _ONE
    expected = rows_of(13)
    rows = rig.mover.rows(rig.device.upload(expected))
    for each in chosen:
        rows, expected = rows.chosen(each), expected[each]
    assert rows.shape == rows.new_sums().shape == expected.shape
    assert rig.window.write_rows(0, rows).digest() == digest(expected)
    assert (rig.bytes_at(0, expected) == expected).all()
    assert (rig.device.download(rig.mover.array_of(rows)) == expected).all()
    assert (rows.to_host() == expected).all()


_ONE = Rig()


def test_sums_are_added_to_the_rows_that_are_named(rig: Rig) -> None:
    expected = np.zeros((9, HIDDEN))
    sums = rig.mover.rows(rig.device.upload(rows_of(9))).new_sums()
    assert (sums.to_host() == 0).all()
    parts: list[tuple[SomeRows | None, int]] = [
        (slice(2, 5), 3),
        (np.array([8, 0, 3], np.int32), 3),
        (None, 9),
        (slice(0, 0), 0),
        (np.empty(0, np.int32), 0),
    ]
    for index, (where, count) in enumerate(parts):
        part = rows_of(count).astype(np.float64) + index
        given_: Sums = HostSums(part) if index % 2 else rig.mover.sums(rig.device.upload(part))
        sums.add(given_, where)
        expected[slice(None) if where is None else where] += part
        assert (sums.to_host() == expected).all()


def test_the_first_sums_are_taken_over(rig: Rig) -> None:
    part = rig.device.upload(rows_of(4).astype(np.float64))
    sums = rig.mover.rows(rig.device.upload(rows_of(4))).new_sums()
    num_launches = rig.device.num_launches
    sums.add(rig.mover.sums(part))
    assert sums.array() is part
    assert rig.device.num_launches == num_launches


def test_payload_of_another_device_comes_by_the_host(rig: Rig) -> None:
    other = Rig()
    hidden = rows_of(4)
    rows = other.mover.rows(other.device.upload(hidden))
    assert rig.window.write_rows(0, rows).digest() == digest(hidden)
    assert (rig.device.download(rig.mover.array_of(rows)) == hidden).all()
    sums = other.mover.sums(other.device.upload(hidden.astype(np.float64)))
    assert rig.window.write_sums(0, sums) == digest(hidden.astype(np.float64))
    other.window.close()


def test_a_window_gives_everything_back(rig: Rig) -> None:
    num_bytes = rig.device.num_bytes
    windows = [rig.mover.open(rig.shared.ctypes.data, NUM_BYTES) for _ in range(2)]
    for _ in range(2):
        windows[0].close()
        windows[0].close()
    with pytest.raises(DeviceUnavailable, match="shared"):
        windows[0].write_rows(0, rig.mover.rows(rig.device.upload(rows_of(2))))
    windows[1].close()
    rig.window.close()
    assert rig.device.num_bytes == num_bytes
    array = rig.device.empty((2, HIDDEN), np.float32)
    with pytest.raises(KernelFailure):  # the memory is no device's now
        rig.mover.kernels.move(rig.shared.ctypes.data, array.ctypes.data, (2, HIDDEN), itemsize=4)


def test_a_window_that_cannot_be_opened_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_host = EmulatedDevice.map_host
    mapped: list[object] = []

    def failing(device: EmulatedDevice, array: AnyArray) -> object:
        if mapped:
            raise DeviceUnavailable("no more memory can be locked")
        mapped.append(map_host(device, array))
        return mapped[0]

    monkeypatch.setattr(EmulatedDevice, "map_host", failing)
    num_ranges = len(rig.device._range_bytes)
    memory = ctypes.create_string_buffer(4 * mmap.PAGESIZE)
    with pytest.raises(DeviceUnavailable, match="locked"):
        rig.mover.open(ctypes.addressof(memory), 2 * mmap.PAGESIZE)
    assert len(rig.device._range_bytes) == num_ranges
