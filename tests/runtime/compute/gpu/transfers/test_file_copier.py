"""Bytes of files on their way to a device arrive where they belong, whoever copies them when."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, U8Array
from dflash_runtime.compute.cpu.kernels import copy_runs
from dflash_runtime.compute.gpu.device.device import DeviceArray, Mark, address
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer
from dflash_runtime.compute.gpu.transfers.locked_room import default_threads
from support.emulated_device import EmulatedDevice
from support.emulated_device.side_stream import EmulatedSideStream
from support.examples import examples

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


def one_run(device: EmulatedDevice, source: U8Array) -> tuple[FileRuns, DeviceArray]:
    destination = device.empty(source.size, np.uint8)
    return FileRuns.of([(source, destination)]), destination


def test_runs_of_any_length_arrive(device: EmulatedDevice, copier: FileCopier) -> None:
    sizes = [1, PIECE_BYTES, PIECE_BYTES + 1, 0, 40 * PIECE_BYTES + 7]
    for seed in range(3):
        runs = [(random_bytes(size, seed), device.empty(size, np.uint8)) for size in sizes]
        transfer = copier.begin(FileRuns.of(runs))
        transfer.wait()
        assert transfer.num_bytes == sum(sizes)
        assert transfer.has_ended
        for source, destination in runs:
            assert (source == device.download(destination)).all()
    copier.begin(FileRuns.of([])).wait()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Destination and size of every copy that is asked of the driver."""
    asked: list[tuple[int, int]] = []
    copy = EmulatedSideStream.copy

    def noted(stream: EmulatedSideStream, place: int, origin: int, num_bytes: int) -> None:
        asked.append((place, num_bytes))
        copy(stream, place, origin, num_bytes)

    monkeypatch.setattr(EmulatedSideStream, "copy", noted)
    return asked


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 2 * PIECE_BYTES + 5), max_size=12),
    gaps=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    num_threads=st.integers(1, 3),
)
def test_what_lies_around_destinations_stays(
    sizes: list[int], gaps: list[int], num_threads: int
) -> None:
    device = EmulatedDevice()
    source = random_bytes(sum(sizes), 1)
    place = device.upload(np.full(sum(sizes) + sum(gaps), 0xA5, np.uint8))
    expected, runs, begin, end = device.download(place), [], 0, 0
    for size, gap in zip(sizes, gaps, strict=False):
        end += gap
        expected[end : end + size] = source[begin : begin + size]
        runs.append((source[begin : begin + size], place[end : end + size]))
        begin, end = begin + size, end + size
    copier = FileCopier(device, num_threads=num_threads, piece_bytes=PIECE_BYTES)
    copier.begin(FileRuns.of(runs)).wait()
    copier.close()
    assert (device.download(place) == expected).all()


def test_scattered_runs_with_neighbouring_destinations_are_one_copy(
    device: EmulatedDevice, copier: FileCopier, copies: list[tuple[int, int]]
) -> None:
    size, num = PIECE_BYTES // 4, 10
    source, place = random_bytes(3 * size * num, 1), device.empty(size * num, np.uint8)
    parts = [source[3 * size * i : (3 * i + 1) * size] for i in range(num)]
    runs = [(each, place[size * i : size * (i + 1)]) for i, each in enumerate(parts)]
    copier.begin(FileRuns.of(runs)).wait()
    begin = address(place)
    pieces = [(begin + first, PIECE_BYTES) for first in (0, PIECE_BYTES)]
    assert sorted(copies) == [*pieces, (begin + 2 * PIECE_BYTES, 2 * size)]
    copies.clear()
    chosen = np.arange(num) != 2  # a gap, in the middle of a piece
    copier.begin(FileRuns.of(runs).chosen(chosen)).wait()
    assert sorted(num_bytes for _, num_bytes in copies) == sorted([48, 48, 96, 24])
    assert (device.download(place) == np.concatenate(parts)).all()


def test_threads_stay_in_compiled_code_from_transfer_to_transfer(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the interpreter needed for each transfer, launches would wait for its lock."""
    num_calls = 0
    kernel = copy_runs.serve()

    def counted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return kernel(*args)

    monkeypatch.setattr(copy_runs, "serve", lambda: counted)
    copier = FileCopier(device, num_threads=2, piece_bytes=PIECE_BYTES)
    for seed in range(5):
        runs, destination = one_run(device, random_bytes(50 * PIECE_BYTES, seed))
        copier.begin(runs).wait()
        assert (device.download(destination) == random_bytes(50 * PIECE_BYTES, seed)).all()
    assert num_calls == 2
    copier.close()


def test_the_next_transfer_is_begun_while_the_last_piece_is_on_its_way(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waited for it first would leave the bus idle while it fills the next piece."""
    opened = FileCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)
    found: list[U8Array] = []
    has_begun, is_open = threading.Event(), threading.Event()
    copy, wait = EmulatedSideStream.copy, EmulatedSideStream.synchronize

    def noted(stream: EmulatedSideStream, *what: int) -> None:
        copy(stream, *what)
        has_begun.set()
        assert is_open.wait(20)

    def looked(stream: EmulatedSideStream) -> None:
        staged = int(opened._lanes[0, copy_runs.STAGED])
        found.append(np.frombuffer(ctypes.string_at(staged, 2 * PIECE_BYTES), np.uint8))
        wait(stream)

    monkeypatch.setattr(EmulatedSideStream, "copy", noted)
    monkeypatch.setattr(EmulatedSideStream, "synchronize", looked)
    sources = [random_bytes(PIECE_BYTES, seed) for seed in range(2)]
    runs = [one_run(device, source) for source in sources]
    first = opened.begin(runs[0][0])
    assert has_begun.wait(20)
    second = opened.begin(runs[1][0])
    is_open.set()
    for transfer, (_, destination), source in zip((first, second), runs, sources, strict=True):
        transfer.wait()
        assert (device.download(destination) == source).all()
    assert (found[0] == np.concatenate(sources)).all()
    opened.close()


def test_threads_without_work_end_and_are_started_again(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = FileCopier(device, num_threads=3, piece_bytes=PIECE_BYTES)
    for seed in range(3):
        runs, destination = one_run(device, random_bytes(9 * PIECE_BYTES, seed))
        copier.begin(runs).wait()
        assert (device.download(destination) == random_bytes(9 * PIECE_BYTES, seed)).all()
        deadline_s = time.monotonic() + 20
        while (copier._lanes[:, copy_runs.STATE] != copy_runs.ASLEEP).any():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    copier.close()


def test_transfers_without_number(device: EmulatedDevice) -> None:
    """More than a queue has places, most of them begun before earlier ones have ended."""
    copier = FileCopier(device, num_threads=3, piece_bytes=PIECE_BYTES)
    begun = []
    for seed in range(3 * copy_runs.MOST_POSTED):
        source = random_bytes(2 * PIECE_BYTES + seed, seed)
        runs, destination = one_run(device, source)
        begun.append((copier.begin(runs), source, destination))
    for transfer, source, destination in begun:
        transfer.wait()
        assert (device.download(destination) == source).all()
    copier.close()


def test_transfers_that_do_not_end_are_an_error_for_later_ones(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_runtime.compute.gpu.transfers.file_copier._TIMEOUT_S", 0.05)
    is_open = threading.Event()
    wait = EmulatedSideStream.synchronize

    def held(stream: EmulatedSideStream) -> None:
        assert is_open.wait(20)
        wait(stream)

    monkeypatch.setattr(EmulatedSideStream, "synchronize", held)
    copier = FileCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)
    runs, _ = one_run(device, random_bytes(9, 1))
    for _ in range(copy_runs.MOST_POSTED):
        copier.begin(runs)
    with pytest.raises(DeviceUnavailable, match="copies have not ended"):
        copier.begin(runs)
    is_open.set()
    copier.close()


def test_transfers_come_in_the_order_in_which_they_were_begun(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    copy = EmulatedSideStream.copy

    def noted(stream: EmulatedSideStream, place: int, origin: int, num_bytes: int) -> None:
        order.append(ctypes.c_uint8.from_address(origin).value)
        copy(stream, place, origin, num_bytes)

    monkeypatch.setattr(EmulatedSideStream, "copy", noted)
    runs = [one_run(device, np.full(9 * PIECE_BYTES, number, np.uint8)) for number in range(4)]
    transfers = [copier.begin(each) for each, _ in runs]
    for transfer in reversed(transfers):
        transfer.wait()
    assert sorted(order) == sorted(list(range(4)) * 9)
    first_of = [order.index(number) for number in range(4)]
    assert first_of == sorted(first_of)


def test_nothing_is_written_before_a_mark(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    copy, wait_for = EmulatedSideStream.copy, EmulatedSideStream.wait_for

    def noted(stream: EmulatedSideStream, place: int, origin: int, num_bytes: int) -> None:
        order.append(id(stream))
        copy(stream, place, origin, num_bytes)

    def waits(stream: EmulatedSideStream, mark: Mark) -> None:
        order.append((id(stream), mark))
        wait_for(stream, mark)

    monkeypatch.setattr(EmulatedSideStream, "copy", noted)
    monkeypatch.setattr(EmulatedSideStream, "wait_for", waits)
    mark = device.mark()
    copier.begin(one_run(device, random_bytes(9 * PIECE_BYTES, 1))[0], after=mark).wait()
    streams = {each for each in order if isinstance(each, int)}
    assert streams
    for each in streams:
        assert order.index((each, mark)) < order.index(each)


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
    runs, destination = one_run(device, random_bytes(50 * PIECE_BYTES, 1))
    transfer = copier.begin(runs)
    behind = copier.begin(one_run(device, random_bytes(9, 1))[0])
    assert has_begun.wait(20)
    threading.Timer(0.05, is_open.set).start()
    behind.cancel()
    transfer.cancel()
    for each in (behind, transfer):
        each.wait()
    copied = (device.download(destination).reshape(50, -1) != 0xFF).any(axis=1)
    assert copied.sum() <= 6  # of each thread what was in both halves of its memory
    runs, destination = one_run(device, random_bytes(300, 2))
    copier.begin(runs).wait()
    assert (device.download(destination) == random_bytes(300, 2)).all()


def test_a_thread_that_fell_asleep_goes_on_with_what_it_missed(device: EmulatedDevice) -> None:
    """Two transfers are posted while it falls asleep: one before it says so, one after."""
    copier = FileCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)
    lane = copier._lanes[0]
    begun = []
    for seed, state in enumerate([copy_runs.AWAKE, copy_runs.ASLEEP]):
        lane[copy_runs.STATE] = state
        runs, destination = one_run(device, random_bytes(3 * PIECE_BYTES, seed))
        begun.append((copier.begin(runs), destination))
    for seed, (transfer, destination) in enumerate(begun):
        transfer.wait()
        assert (device.download(destination) == random_bytes(3 * PIECE_BYTES, seed)).all()
    copier.close()


@pytest.mark.parametrize("error", [DeviceUnavailable, RuntimeError])
def test_what_goes_wrong_in_a_thread_is_told_and_others_go_on(
    device: EmulatedDevice,
    copier: FileCopier,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    def fails(*_: Any) -> None:
        raise error("the device has gone")

    runs, destination = one_run(device, random_bytes(999, 1))
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedSideStream, "copy", fails)
        transfer = copier.begin(runs)
        with pytest.raises(DeviceUnavailable) as raised:
            transfer.wait()
    assert "the device has gone" in f"{raised.value} {raised.value.__cause__}"
    copier.begin(runs).wait()
    assert (device.download(destination) == random_bytes(999, 1)).all()


def test_what_goes_wrong_after_a_transfer_s_last_piece_was_begun_is_told(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the one that the thread has gone on to."""
    copier = FileCopier(device, num_threads=1, piece_bytes=PIECE_BYTES)
    runs, destination = one_run(device, random_bytes(PIECE_BYTES, 1))
    copy, wait = EmulatedSideStream.copy, EmulatedSideStream.synchronize
    for num_others in (0, 1):
        has_begun, is_open = threading.Event(), threading.Event()

        def held(stream: EmulatedSideStream, *what: int) -> None:
            copy(stream, *what)
            has_begun.set()  # noqa: B023 - it is called at once
            assert is_open.wait(20)  # noqa: B023

        def fails_once(stream: EmulatedSideStream) -> None:
            patched.setattr(EmulatedSideStream, "synchronize", wait)
            raise DeviceUnavailable("the device has gone")

        with monkeypatch.context() as patched:
            patched.setattr(EmulatedSideStream, "copy", held)
            patched.setattr(EmulatedSideStream, "synchronize", fails_once)
            transfers = [copier.begin(runs)]
            assert has_begun.wait(20)
            transfers += [copier.begin(runs) for _ in range(num_others)]
            is_open.set()
            for transfer in transfers:
                with pytest.raises(DeviceUnavailable, match="the device has gone"):
                    transfer.wait()
    copier.begin(runs).wait()
    assert (device.download(destination) == random_bytes(PIECE_BYTES, 1)).all()
    copier.close()


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_transfer_whose_begin_was_interrupted_is_known_and_ends(
    device: EmulatedDevice, copier: FileCopier, monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    """Also if its threads were not started."""
    post = copy_runs.post()

    def interrupted() -> Any:
        def posted(*words: int) -> None:
            if is_posted:
                post(*words)
            raise KeyboardInterrupt

        return posted

    runs, destination = one_run(device, random_bytes(PIECE_BYTES, 1))
    begun: list[Transfer] = []
    with monkeypatch.context() as patched:
        patched.setattr(copy_runs, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copier.begin(runs, into=begun)
    [transfer] = begun
    transfer.wait()
    assert not (device.download(destination) == random_bytes(PIECE_BYTES, 1)).all()
    copier.begin(runs, into=begun).wait()
    assert (device.download(destination) == random_bytes(PIECE_BYTES, 1)).all()
    assert len(begun) == 2


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
    transfer = copier.begin(one_run(device, random_bytes(999, 1))[0])
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


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_copies_leave_a_core_to_the_thread_that_launches(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    assert default_threads() == num_threads
