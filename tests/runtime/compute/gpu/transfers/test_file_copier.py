"""Bytes of files on their way to a device arrive where they belong, whoever copies them when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, U8Array
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FilePiece
from support.emulated_device import EmulatedDevice
from support.emulated_device.side_stream import EmulatedSideStream

PIECE_BYTES = 96


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.fixture
def copier(device: EmulatedDevice) -> Iterator[FileCopier]:
    opened = FileCopier(device, num_threads=3, piece_bytes=PIECE_BYTES)
    yield opened
    opened.close()


def random_bytes(size: int, seed: int) -> U8Array:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_runs_of_any_length_arrive(device: EmulatedDevice, copier: FileCopier) -> None:
    sizes = [1, PIECE_BYTES, PIECE_BYTES + 1, 0, 40 * PIECE_BYTES + 7]
    for seed in range(3):
        runs = [FilePiece(random_bytes(size, seed), device.empty(size, np.uint8)) for size in sizes]
        transfer = copier.begin(runs)
        transfer.wait()
        assert transfer.num_bytes == sum(sizes)
        assert transfer.bytes_per_s() > 0
        assert transfer.bytes_per_s(transfer.ended_s - 1e-6) > transfer.bytes_per_s()
        for run in runs:
            assert (run.source == device.download(run.destination)).all()
    copier.begin([]).wait()


def test_transfers_come_in_the_order_in_which_they_were_begun(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    write = EmulatedSideStream.write

    def noted(stream: EmulatedSideStream, destination: DeviceArray, source: AnyArray) -> None:
        order.append(int(source[0]))
        write(stream, destination, source)

    monkeypatch.setattr(EmulatedSideStream, "write", noted)
    transfers = [
        copier.begin(
            [FilePiece(np.full(9 * PIECE_BYTES, number, np.uint8), device.empty(9 * 96, np.uint8))]
        )
        for number in range(4)
    ]
    for transfer in reversed(transfers):
        transfer.wait()
    assert sorted(order) == sorted(list(range(4)) * 9)
    first_of = [order.index(number) for number in range(4)]
    assert first_of == sorted(first_of)


def test_what_is_cancelled_is_not_begun(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, has_begun = threading.Event(), threading.Event()
    wait = EmulatedSideStream.synchronize

    def held(stream: EmulatedSideStream) -> None:
        has_begun.set()
        assert is_open.wait(20)
        wait(stream)

    monkeypatch.setattr(EmulatedSideStream, "synchronize", held)
    destination = device.empty(50 * PIECE_BYTES, np.uint8)
    transfer = copier.begin([FilePiece(random_bytes(50 * PIECE_BYTES, 1), destination)])
    behind = copier.begin([FilePiece(random_bytes(9, 1), device.empty(9, np.uint8))])
    assert has_begun.wait(20)
    threading.Timer(0.05, is_open.set).start()
    behind.cancel()
    transfer.cancel()
    for each in (behind, transfer):
        each.wait()
    copied = (device.download(destination).reshape(50, -1) != 0xFF).any(axis=1)
    assert copied.sum() <= 3  # of each thread the one that it was at
    follower = copier.begin([FilePiece(random_bytes(300, 2), device.empty(300, np.uint8))])
    follower.wait()


def test_what_goes_wrong_in_a_thread_is_told_and_others_go_on(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise DeviceUnavailable("the device has gone")

    runs = [FilePiece(random_bytes(999, 1), device.empty(999, np.uint8))]
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedSideStream, "write", fails)
        transfer = copier.begin(runs)
        with pytest.raises(DeviceUnavailable, match="the device has gone"):
            transfer.wait()
    copier.begin(runs).wait()
    assert (runs[0].source == device.download(runs[0].destination)).all()


def test_a_wait_has_an_end(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_runtime.compute.gpu.transfers.file_copier._TIMEOUT_S", 0.05)
    is_open = threading.Event()
    wait = EmulatedSideStream.synchronize

    def held(stream: EmulatedSideStream) -> None:
        assert is_open.wait(20)
        wait(stream)

    monkeypatch.setattr(EmulatedSideStream, "synchronize", held)
    transfer = copier.begin([FilePiece(random_bytes(999, 1), device.empty(999, np.uint8))])
    threading.Timer(0.3, is_open.set).start()
    with pytest.raises(DeviceUnavailable, match=r"\b999 bytes\b"):
        transfer.wait()


def test_a_device_that_cannot_lock_memory_leaves_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_host, num_mapped = EmulatedDevice.map_host, 0

    def fails(device: EmulatedDevice, array: AnyArray) -> Any:
        nonlocal num_mapped
        num_mapped += 1
        if num_mapped == 3:
            raise DeviceUnavailable("no more memory can be locked")
        return map_host(device, array)

    monkeypatch.setattr(EmulatedDevice, "map_host", fails)
    with pytest.raises(DeviceUnavailable, match="locked"):
        FileCopier(device, num_threads=4, piece_bytes=PIECE_BYTES)
    assert not device._range_bytes
