"""Experts that are copied to a device from an arena, or past the page cache, never from where the
file is mapped unless a read fails: the same bytes, whatever batches do meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import Phase, U8Array
from dflash_runtime.compute.cpu import CpuBackend, run_reader
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels import copy_runs, lent_runs
from dflash_runtime.compute.cpu.threads.system import READ_SYSCALLS
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer
from support.arena_rig import (
    LAYERS,
    SHAPE,
    E,
    Rig,
    batch_of,
    check_whole,
    empty_some,
    held_by,
    read_from,
    rig_of,
    slots_of,
    tokens,
)
from support.descriptors import num_descriptors
from support.emulated_device import EmulatedDevice
from support.examples import examples
from support.processes import wait_until
from support.random_models import write_qwen3moe

PIECE_BYTES = 5000
"""Less than a matrix, and not a multiple of what direct reads want."""
LARGE = replace(SHAPE, hidden_size=1024, ffn_size=1024, num_experts=3, num_layers=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "m.gguf", SHAPE, seed=3, tensor_type="Q8_0")


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    with contextlib.closing(CpuBackend(num_threads=2)) as backend:
        yield backend


class Copies:
    """All experts of a rig's layers, on their way to an emulated device."""

    def __init__(self, rig: Rig, *, num_threads: int = 3, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._arena = EmulatedDevice(), rig.arena
        self.copier = FileCopier(
            self._device, num_threads=num_threads, piece_bytes=piece_bytes, arena=rig.arena
        )
        self.sources: list[tuple[U8Array, tuple[int, int]]] = []
        for bank in rig.brought:
            layer_id = bank.layer.layer_id
            for expert in range(bank.num_experts):
                place = rig.arena.place_of(layer_id, expert)
                assert place is not None
                for index, each in enumerate(bank.layer.projections):
                    mapped = rig.file.region(*each.place_of(expert), each.num_bytes)
                    self.sources.append((mapped, (place[0], 3 * place[1] + index)))

    def begin(self, *, is_mapped: bool = False) -> tuple[Transfer, list[DeviceArray]]:
        """Unless `is_mapped`, bytes that are taken from where the file is mapped are wrong ones."""
        found: list[DeviceArray] = [
            self._device.empty(mapped.size, np.uint8) for mapped, _ in self.sources
        ]
        wrong = np.full(max(mapped.size for mapped, _ in self.sources), 0xA5, np.uint8)
        runs = FileRuns.lent(
            (
                (mapped if is_mapped else wrong[: mapped.size], destination, matrix)
                for (mapped, matrix), destination in zip(self.sources, found, strict=True)
            ),
            (self._arena, wrong),
        )
        return self.copier.begin(runs), found

    def check(self, *, is_mapped: bool = False) -> None:
        transfer, found = self.begin(is_mapped=is_mapped)
        transfer.wait()
        self.compare(found)

    def compare(self, found: list[DeviceArray]) -> None:
        for (mapped, _), destination in zip(self.sources, found, strict=True):
            np.testing.assert_array_equal(self._device.download(destination), mapped)

    @property
    def readers(self) -> list[int]:
        """Addresses of their words."""
        found: list[int] = self.copier._lanes[:, copy_runs.READER].tolist()
        return found


@contextlib.contextmanager
def copies_of(rig: Rig, **options: int) -> Iterator[Copies]:
    copies = Copies(rig, **options)
    try:
        yield copies
    finally:
        copies.copier.close()


def words_at(address: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * lent_runs.READER_WORDS).from_address(address)


@pytest.mark.parametrize("piece_bytes", [700, PIECE_BYTES, 1 << 20])
def test_bytes_are_those_of_the_file_wherever_an_expert_lies(
    path: Path, backend: CpuBackend, piece_bytes: int
) -> None:
    """Nothing comes from where the file is mapped, no slot is taken, and nothing leaves one."""
    with rig_of(path, backend, LAYERS * E) as rig, copies_of(rig, piece_bytes=piece_bytes) as all_:
        all_.check()
        assert all(each == held_by(rig.arena)[0] for each in held_by(rig.arena))  # empty
        stats = rig.arena.stats()
        assert (stats.found, stats.missed) == (0, LAYERS * E)
        assert stats.read_bytes > sum(mapped.size for mapped, _ in all_.sources)
        for layer in range(LAYERS):
            rig.check(layer, batch_of(np.array([[0, 3]], np.int32)))
        held, before = held_by(rig.arena), rig.arena.stats()
        all_.check()
        stats = rig.arena.stats()
        assert held_by(rig.arena) == held
        assert stats.found - before.found == 2 * LAYERS
        assert stats.missed - before.missed == (E - 2) * LAYERS
        assert stats.failed == 0
        assert not slots_of(rig.arena)[:, w.LENT].any()


def test_experts_of_several_reads_each(backend: CpuBackend, tmp_path: Path) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", LARGE, seed=4, tensor_type="Q8_0")
    with (
        rig_of(model, backend, LARGE.num_experts) as rig,
        copies_of(rig, num_threads=2, piece_bytes=2 << 20) as copies,
    ):
        assert min(mapped.size for mapped, _ in copies.sources) > 3 * lent_runs.CELL_BYTES
        chosen = np.array([[0, 1]], np.int32)
        rig.check(0, batch_of(chosen, hidden_size=LARGE.hidden_size))
        copies.check()
        assert rig.arena.stats().failed == 0


@examples(8)
@given(num_slots=st.integers(E, LAYERS * E), seed=st.integers(0, 99))
def test_batches_may_have_experts_leave_meanwhile(
    path: Path, backend: CpuBackend, num_slots: int, seed: int
) -> None:
    """And memory may be taken away and given back: neither sees half an expert."""
    rng, is_done = np.random.default_rng(seed), threading.Event()
    with rig_of(path, backend, num_slots) as rig, copies_of(rig) as copies:

        def resize() -> None:
            while not is_done.is_set():
                for num_bytes in (0, rig.arena.most_bytes):
                    rig.arena.resize(num_bytes)

        resizing = threading.Thread(target=resize)
        resizing.start()
        try:
            for turn in range(6):
                transfer, found = copies.begin()
                while not transfer.has_ended:
                    num_tokens = int(rng.integers(1, 20))
                    phase = Phase.PREFILL if num_tokens > 8 else Phase.DECODE
                    chosen = tokens(num_tokens, int(rng.integers(1000)))
                    rig.check(int(rng.integers(LAYERS)), batch_of(chosen, turn, phase))
                transfer.wait()
                copies.compare(found)
        finally:
            is_done.set()
            resizing.join()
        check_whole(rig.arena)
        assert rig.arena.stats().failed == 0
        assert not slots_of(rig.arena)[:, w.LENT].any()


def test_an_expert_does_not_leave_while_it_is_copied(path: Path, backend: CpuBackend) -> None:
    """Who needs the slot waits for the copy."""
    with rig_of(path, backend, E) as rig:
        rig.check(0, batch_of(tokens(40, 1), phase=Phase.PREFILL))
        slots = slots_of(rig.arena)
        slots[:, w.LENT] = 1
        other = threading.Thread(target=rig.check, args=(1, batch_of(tokens(1, 1))))
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert slots[:, w.NUM_PENDING].max() == 0
        slots[:, w.LENT] = 0
        other.join()
        check_whole(rig.arena)


@pytest.mark.parametrize("way", ["short", "nothing", "refused"])
def test_reads_that_fail_cost_time_alone(
    path: Path, backend: CpuBackend, tmp_path: Path, way: str
) -> None:
    content = path.read_bytes()
    (tmp_path / "short").write_bytes(content[: 2 * len(content) // 3])
    instead, flags = {
        "short": (tmp_path / "short", os.O_RDONLY),
        "nothing": (Path(os.devnull), os.O_RDONLY),
        "refused": (Path(os.devnull), os.O_WRONLY),
    }[way]
    with rig_of(path, backend, E) as rig, copies_of(rig) as copies:
        read_from(rig.arena, instead, flags)
        copies.check(is_mapped=True)
        assert rig.arena.stats().failed > 0
        failed = rig.arena.stats().failed
        read_from(rig.arena, path, os.O_RDONLY | os.O_DIRECT)
        copies.check()
        assert rig.arena.stats().failed == failed


def test_a_read_that_does_not_end_ends_all_others(path: Path, backend: CpuBackend) -> None:
    """Its memory is not used again, nor given back; what lies in the arena is still copied."""
    library, numbers = ctypes.CDLL(None, use_errno=True), READ_SYSCALLS[platform.machine()]
    silent = ctypes.c_ulong(0)
    assert library.syscall(numbers["setup"], 64, ctypes.byref(silent)) == 0
    with rig_of(path, backend, LAYERS * E) as rig:
        with copies_of(rig, num_threads=1) as copies:
            rig.check(0, batch_of(np.array([[0, 3]], np.int32)))
            words = words_at(copies.readers[0])
            queue, words[lent_runs.CONTEXT] = words[lent_runs.CONTEXT], silent.value
            # As if none had ended: those that are begun go to the other queue, and this is asked.
            rig.arena._words[w.LIMIT_NS] = int(50e6)
            words[lent_runs.NUM_PENDING] = lent_runs.NUM_CELLS
            copies.check(is_mapped=True)
            assert words[lent_runs.IS_BROKEN] == rig.arena._words[w.IS_BROKEN] == 1
            stats = rig.arena.stats()
            assert stats.failed > 0
            copies.check(is_mapped=True)
            assert rig.arena.stats().found - stats.found == 2
            assert rig.arena.stats().read_bytes == stats.read_bytes
        [hung] = [each for each in run_reader._HUNG if each.words.ctypes.data == copies.readers[0]]
        run_reader._HUNG.remove(hung)
    for each in (queue, silent.value):
        library.syscall(numbers["destroy"], ctypes.c_ulong(each))


def test_without_a_queue_of_reads_the_mapped_file_is_used(
    path: Path, backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(path, backend, E) as rig:

        def refused(*_: object) -> None:
            raise OSError("no more queues")

        monkeypatch.setattr(run_reader, "ReadQueue", refused)
        with copies_of(rig) as copies:
            copies.check(is_mapped=True)
            assert rig.arena.stats().failed > 0
            assert not rig.arena._words[w.IS_BROKEN]


def test_nothing_is_left(path: Path, backend: CpuBackend) -> None:
    def num_queued() -> int:
        return int(Path("/proc/sys/fs/aio-nr").read_text())

    with rig_of(path, backend, E) as rig:
        for number in range(12):
            with copies_of(rig) as copies:
                if number % 2:
                    copies.begin()[0].cancel()
                else:
                    copies.check()
            if number == 3:
                descriptors, queued = num_descriptors(), num_queued()
        assert num_descriptors() == descriptors
        wait_until(lambda: num_queued() <= queued + 8, "queues to be given back")
        assert not any(
            each.words[lent_runs.ARENA] == rig.arena.address for each in run_reader._HUNG
        )


def test_what_leaves_and_comes_back_elsewhere_is_not_taken_for_the_same(
    path: Path, backend: CpuBackend
) -> None:
    """Memory that holds no expert is spoilt between copies."""
    rng = np.random.default_rng(0)
    with rig_of(path, backend, 2 * E) as rig, copies_of(rig) as copies:
        for turn in range(8):
            rig.check(turn % LAYERS, batch_of(tokens(4, turn), turn))
            empty_some(rig.arena, rng, 0.4)
            copies.check()
        assert rig.arena.stats().failed == 0
