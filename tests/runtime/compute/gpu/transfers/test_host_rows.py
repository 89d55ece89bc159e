"""Rows of an emulated device that the host computes with: those that are used, in mapped memory.
And sums on their way back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dflash_protocol.batch import Hidden
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.device.device import address
from dflash_runtime.compute.gpu.transfers import locked_room
from dflash_runtime.compute.gpu.transfers.host_rows import HostChoices, RowIndices
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover
from support.emulated_device import EmulatedDevice
from support.emulated_device.side_stream import EmulatedMark, EmulatedSideStream

HIDDEN = 40


class Rig:
    """A device, and rows on it."""

    def __init__(self, num_rows: int) -> None:
        self.device = EmulatedDevice(num_multiprocessors=2)
        self.mover = PayloadMover(self.device, threading.RLock())
        rng = np.random.default_rng(num_rows)
        self.hidden: F32Array = rng.standard_normal((num_rows, HIDDEN), np.float32)
        self.rows = self.mover.rows(self.device.upload(self.hidden))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(13)
    yield made
    made.mover.close()
    made.mover.close()
    assert not made.device._range_bytes.keys() - made.device._buffers.keys()  # nothing is mapped


def doubled(hidden: Hidden, sums: F64Array) -> None:
    assert (sums == 0).all()
    sums += 2.0 * hidden.to_host()


def indices(*rows: int) -> I32Array:
    return np.array(rows, np.int32)


@pytest.mark.parametrize("used", [None, indices(11, 0, 5), indices(3), indices()])
def test_sums_are_added_to_the_rows_that_are_used(rig: Rig, used: I32Array | None) -> None:
    where = slice(None) if used is None else used
    expected = np.zeros(rig.hidden.shape)
    sums = rig.rows.new_sums()
    for _ in range(3):
        sums.add_computed(rig.rows if used is None else rig.rows.chosen(used), used, doubled)
        expected[where] += 2.0 * rig.hidden[where]
        assert (sums.to_host() == expected).all()


def test_only_used_rows_leave_the_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("a copy that waits for all launches")

    for name in ("download", "upload", "write", "synchronize"):
        monkeypatch.setattr(EmulatedDevice, name, fails)
    seen: list[tuple[int, ...]] = []
    some = indices(2, 7)

    def computed(hidden: Hidden, sums: F64Array) -> None:
        seen.append(hidden.shape)
        assert (hidden.to_host() == rig.hidden[some]).all()
        rig.device.require_mapped(sums.ctypes.data, sums.nbytes)
        rig.device.require_mapped(hidden.to_host().ctypes.data, 4 * 2 * HIDDEN)

    rig.rows.new_sums().add_computed(rig.rows.chosen(some), some, computed)
    assert seen == [(2, HIDDEN)]


def test_other_sums_of_some_rows_do_not_wait_either(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = rig.mover.sums(rig.device.upload(np.ones((3, HIDDEN))))
    sums = rig.rows.new_sums()
    chosen = rig.rows.chosen(indices(4, 4, 12))
    with monkeypatch.context() as patched:
        for name in ("download", "upload", "write", "synchronize"):
            patched.delattr(EmulatedDevice, name)
        sums.add(part, indices(12, 0, 4))
        gathered = rig.mover.array_of(chosen)
    assert (sums.to_host()[[12, 0, 4]] == 1).all()
    assert sums.to_host().sum() == 3 * HIDDEN
    assert (rig.device.download(gathered) == rig.hidden[[4, 4, 12]]).all()


def test_rows_of_another_device_and_of_the_host(rig: Rig) -> None:
    other = Rig(5)
    sums = rig.rows.new_sums()
    used = indices(1, 2, 3, 4, 6)
    sums.add_computed(other.rows, used, doubled)
    expected = np.zeros(rig.hidden.shape)
    expected[used] = 2.0 * other.hidden
    assert (sums.to_host() == expected).all()
    other.mover.close()


def test_memory_grows_with_the_largest_chunk(rig: Rig) -> None:
    def mapped() -> int:
        sizes = rig.device._range_bytes
        return sum(sizes[each] for each in sizes.keys() - rig.device._buffers.keys())

    larger = np.ones((900, HIDDEN), np.float32)
    for hidden, num_rows in ((rig.hidden, 13), (larger, 900), (rig.hidden, 900)):
        rows = rig.mover.rows(rig.device.upload(hidden))
        sums = rows.new_sums()
        sums.add_computed(rows, None, doubled)
        assert (sums.to_host() == 2.0 * hidden).all()
        assert 0 <= mapped() - locked_room.rows_bytes(num_rows, HIDDEN) < 4096 + 256


def test_what_fails_while_the_host_computes_leaves_the_sums(rig: Rig) -> None:
    def fails(hidden: Hidden, sums: F64Array) -> None:
        sums[:] = np.nan
        raise DeviceUnavailable("an owner is gone")

    sums = rig.rows.new_sums()
    sums.add_computed(rig.rows, None, doubled)
    with pytest.raises(DeviceUnavailable, match="gone"):
        sums.add_computed(rig.rows, None, fails)
    sums.add_computed(rig.rows, None, doubled)
    assert (sums.to_host() == 4.0 * rig.hidden).all()


def test_a_choice_comes_without_a_wait_for_later_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("a copy that waits for all launches")

    device = EmulatedDevice()
    choices, rng = HostChoices(device), np.random.default_rng(1)
    begun = []
    for num_tokens, num_used in ((5, 2), (3, 1), (40, 8), (2, 2)):
        ids = rng.integers(0, 99, (num_tokens, num_used), np.int32)
        weights = rng.random(ids.shape, np.float32)
        with monkeypatch.context() as patched:
            sources = device.upload(ids), device.upload(weights)
            for name in ("download", "write", "synchronize"):
                patched.setattr(EmulatedDevice, name, fails)
            begun.append(((ids, weights), choices.begin(*sources, num_experts=99)))
            if num_tokens == 3:
                begun[-1][1].wait()
    for given, pending in reversed(begun):  # those after it have not overwritten it
        for wanted, array in zip(given, pending.wait(), strict=True):
            np.testing.assert_array_equal(array, wanted, strict=True)
    assert len(choices._places) == 3  # one was waited for, and its memory used again
    choices.close()
    choices.close()
    assert not device._range_bytes.keys() - device._buffers.keys()


def test_a_choice_that_is_given_up_gives_its_memory_back() -> None:
    """When it was read: it may still be on its way."""
    device = EmulatedDevice()
    choices, kept = HostChoices(device), []
    for num_tokens in (40, 4, 5, 6, 7):
        ids, weights = (device.zeros((num_tokens, 2), each) for each in (np.int32, np.float32))
        kept.append(device.zeros((4, 2), np.int32))  # so that others do not get the same place
        pending = choices.begin(ids, weights, num_experts=9)
        del ids, weights, pending
        gc.collect()
    assert len(choices._places) == 1
    choices.begin(kept[0], kept[1].view(np.float32), num_experts=9).wait()
    gc.collect()
    assert len(device._buffers) == len(kept)
    choices.close()


def test_a_slot_of_indices_is_written_when_its_readers_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = EmulatedDevice()
    waited: list[EmulatedMark] = []
    monkeypatch.setattr(EmulatedSideStream, "wait_for", lambda _, mark: waited.append(mark))
    marks: list[EmulatedMark] = []
    mark = EmulatedDevice.mark

    def noted(device: EmulatedDevice) -> EmulatedMark:
        marks.append(mark(device))
        return marks[-1]

    monkeypatch.setattr(EmulatedDevice, "mark", noted)
    found = RowIndices(device)
    places = [address(found.put(np.arange(9, dtype=np.int32))) for _ in range(20)]
    assert len(set(places)) == 8
    # Each slot's mark was made at the call after its own.
    assert waited == marks[:13]
    found.put(np.arange(5000, dtype=np.int32))
    found.close()
    assert not device.num_ranges
