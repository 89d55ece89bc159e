"""An arena whose reads fail, come late, are short or never end, and whose slots are emptied and
spoilt at any time: the same bits, and nothing is lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.cpu import CpuBackend, host_arena
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.threads.system import READ_SYSCALLS
from support.arena_rig import (
    LAYERS,
    SHAPE,
    E,
    batch_of,
    check_whole,
    empty_some,
    memory_of,
    read_from,
    rig_of,
    slots_of,
    tokens,
)
from support.descriptors import num_descriptors
from support.examples import examples
from support.random_models import Qwen3MoeShape, write_qwen3moe

LARGE = Qwen3MoeShape(
    "read in several parts",
    num_layers=2,
    hidden_size=1024,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_experts=3,
    num_experts_used=2,
    ffn_size=1024,
    vocab_size=300,
    context_length=64,
)
_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(
        tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, seed=3, tensor_type="Q8_0"
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(
        tmp_path_factory.mktemp("model") / "m.gguf", LARGE, seed=4, tensor_type="Q8_0"
    )


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    with contextlib.closing(CpuBackend(num_threads=2)) as backend:
        yield backend


def whole_layer(num_tokens: int = 40, seed: int = 1) -> I32Array:
    return tokens(num_tokens, seed)


@contextlib.contextmanager
def silent_queue() -> Iterator[int]:
    """Another queue of the system's, in which no read ends that was begun in the arena's own."""
    numbers, queue = READ_SYSCALLS[platform.machine()], ctypes.c_ulong(0)
    assert _LIBC.syscall(numbers["setup"], w.MOST_PENDING, ctypes.byref(queue)) == 0
    try:
        yield queue.value
    finally:
        _LIBC.syscall(numbers["destroy"], queue)


# -- any order of events --------------------------------------------------------------------------

_EVENTS = st.one_of(
    st.tuples(st.just("batch"), st.integers(0, LAYERS - 1), st.integers(1, 40)),
    st.tuples(st.just("fault"), st.sampled_from(["whole", "short", "nothing", "refused"])),
    st.tuples(st.just("leave"), st.floats(0.0, 1.0)),
)


@examples(40)
@given(
    num_slots=st.integers(E, LAYERS * E),
    events=st.lists(_EVENTS, min_size=1, max_size=25),
    looks_ahead=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_order_of_batches_faults_and_leaving_experts(
    path: Path,
    backend: CpuBackend,
    tmp_path_factory: pytest.TempPathFactory,
    num_slots: int,
    events: list[tuple[str, int | float | str, int]],
    looks_ahead: bool,
    seed: int,
) -> None:
    """Memory that holds no expert is spoilt before each batch; what cannot be read is used where
    the file is mapped, and read again once that is possible."""
    short = tmp_path_factory.mktemp("short") / "m.gguf"
    content = path.read_bytes()
    short.write_bytes(content[: len(content) // 2])
    files: dict[object, tuple[Path | str, int]] = {
        "whole": (path, os.O_RDONLY | os.O_DIRECT),
        "short": (short, os.O_RDONLY),
        "nothing": (os.devnull, os.O_RDONLY),
        "refused": (os.devnull, os.O_WRONLY),
    }
    rng = np.random.default_rng(seed)
    with rig_of(path, backend, num_slots, looks_ahead=looks_ahead) as rig:
        has_failed = False
        for kind, *values in events:
            if kind == "batch":
                layer, num_tokens = int(values[0]), int(values[1])
                phase = Phase.PREFILL if num_tokens > 8 else Phase.DECODE
                chosen = tokens(num_tokens, int(rng.integers(1000)))
                rig.check(layer, batch_of(chosen, seed, phase))
            elif kind == "fault":
                has_failed |= values[0] != "whole"
                read_from(rig.arena, *files[values[0]])
            else:
                empty_some(rig.arena, rng, float(values[0]))
            check_whole(rig.arena)
            empty_some(rig.arena, rng, 0.0)
        assert has_failed or not rig.arena.stats().failed
        read_from(rig.arena, *files["whole"])
        few = batch_of(np.array([[0, E - 1]], np.int32))
        for _ in range(2):  # what failed may still be there the first time
            before = rig.arena.stats()
            rig.check(0, few)
            after = rig.arena.stats()
        assert after.failed == before.failed
        assert after.found - before.found + after.missed - before.missed == 2


# -- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing_bytes", [1, 600 << 10, 1 << 20])
def test_an_expert_of_which_a_part_is_missing_is_not_used(
    large: Path, backend: CpuBackend, tmp_path: Path, missing_bytes: int
) -> None:
    """Of an expert that is read in several parts, the last byte, one of two parts, or both."""
    hidden = LARGE.hidden_size
    with rig_of(large, backend, LARGE.num_experts) as rig:
        places = rig.brought[0].places()
        _, offset, num_bytes = places[1][2]
        assert num_bytes > 2 * w.PART_BYTES
        end = offset + num_bytes - missing_bytes
        expected = sum(any(first + size > end for _, first, size in expert) for expert in places)
        assert 0 < expected < len(places) or missing_bytes > 1
        (tmp_path / "short").write_bytes(large.read_bytes()[:end])
        read_from(rig.arena, tmp_path / "short")
        for number in range(2):
            for expert in range(LARGE.num_experts):
                chosen = np.array([[expert]], np.int32)
                rig.check(0, batch_of(chosen, expert, hidden_size=hidden))
                empty_some(rig.arena, np.random.default_rng(0), 0.0)
                check_whole(rig.arena)
            assert rig.arena.stats().failed == (number + 1) * expected
        assert rig.arena.stats().found == LARGE.num_experts - expected


def test_reads_wait_for_control_blocks(large: Path, backend: CpuBackend) -> None:
    """Where an expert has more parts than there are."""
    with rig_of(large, backend, LARGE.num_experts) as rig:
        words = rig.arena._words
        words[w.NUM_FREE] = 2
        for layer in (0, 1, 0):
            chosen = np.array([[0, 1], [1, 2]], np.int32)
            rig.check(layer, batch_of(chosen, layer, hidden_size=LARGE.hidden_size))
        assert words[w.NUM_FREE] == 2
        words[w.NUM_FREE] = w.MOST_PENDING
        assert rig.arena.stats().failed == 0


def test_nothing_is_used_before_it_has_arrived(path: Path, backend: CpuBackend) -> None:
    """A layer that is read ahead arrives late: until then other bytes are in its slots."""
    chunk = batch_of(whole_layer(), phase=Phase.PREFILL)
    with rig_of(path, backend, LAYERS * E) as rig, silent_queue() as silent:
        words, memory = rig.arena._words, memory_of(rig.arena)
        rig.check(0, chunk)
        ahead = slots_of(rig.arena)[:, w.NUM_PENDING] > 0
        assert ahead.sum() == E
        time.sleep(0.05)
        arrived = memory[ahead].copy()
        memory[ahead] = 0xFF
        queue, words[w.CONTEXT] = words[w.CONTEXT].item(), silent

        def arrive() -> None:
            memory[ahead] = arrived
            words[w.CONTEXT] = queue

        before = rig.arena.stats()
        timer = threading.Timer(0.15, arrive)
        timer.start()
        rig.check(1, chunk)
        timer.join()
        after = rig.arena.stats()
        check_whole(rig.arena)
    assert after.failed == 0
    assert after.read_s - before.read_s > 0.05


def test_a_disk_that_is_behind_reads_what_is_predicted(path: Path, backend: CpuBackend) -> None:
    """Where a layer arrives in time, all of the next one is read; else what its router predicts."""
    chunk = batch_of(whole_layer(), phase=Phase.PREFILL)
    chunk.hidden[:] = chunk.hidden[:1]
    rigged = rig_of(path, backend, LAYERS * E, looks_ahead=True)
    with rigged as rig, silent_queue() as silent:
        words = rig.arena._words
        rig.check(0, chunk)
        queue, words[w.CONTEXT] = words[w.CONTEXT].item(), silent
        timer = threading.Timer(0.1, words.__setitem__, (w.CONTEXT, queue))
        timer.start()
        rig.check(1, chunk)
        timer.join()
        there = [np.count_nonzero(layer.slot_of >= 0) for layer in rig.arena._layers]
        assert there == [E, E, SHAPE.num_experts_used]
        check_whole(rig.arena)


def test_what_is_on_its_way_does_not_leave(path: Path, backend: CpuBackend) -> None:
    """Its slots may be written: others leave, though they were used more."""
    with rig_of(path, backend, 2 * E) as rig, silent_queue() as silent:
        words, slots = rig.arena._words, slots_of(rig.arena)
        for step in range(20):
            rig.check(0, batch_of(tokens(1, step), step))
        rig.check(0, batch_of(whole_layer(), phase=Phase.PREFILL))
        ahead = np.flatnonzero(slots[:, w.NUM_PENDING])
        expected = slots[ahead].copy()
        assert ahead.size == E
        queue, words[w.CONTEXT] = words[w.CONTEXT].item(), silent
        for step in range(4):
            rig.check(2, batch_of(np.array([[2 * step, 2 * step + 1]], np.int32)))
            np.testing.assert_array_equal(slots[ahead], expected)
        words[w.CONTEXT] = queue
        rig.check(1, batch_of(whole_layer(), phase=Phase.PREFILL))
        check_whole(rig.arena)
        assert rig.arena.stats().failed == 0


def test_what_does_not_arrive_is_used_where_the_file_is_mapped(
    path: Path, backend: CpuBackend
) -> None:
    """Later too, when its bytes may come at any time. What had arrived stays in use."""
    chunk = batch_of(whole_layer(), phase=Phase.PREFILL)
    with rig_of(path, backend, LAYERS * E) as rig, silent_queue() as silent:
        words = rig.arena._words
        rig.check(0, chunk)
        ahead = slots_of(rig.arena)[:, w.NUM_PENDING] > 0
        words[w.CONTEXT], words[w.LIMIT_NS] = silent, int(50e6)
        before = rig.arena.stats()
        rig.check(1, chunk)
        assert words[w.IS_BROKEN]
        failed = rig.arena.stats().failed
        assert failed == E
        for seed in range(3):
            memory_of(rig.arena)[ahead] = seed + 1
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(3, seed)))
        after = rig.arena.stats()
        check_whole(rig.arena)
        words[w.LIMIT_NS] = int(host_arena.LIMIT_S * 1e9)
    assert after.read_bytes == before.read_bytes
    assert after.found > before.found
    assert after.failed > failed
    assert rig.arena not in host_arena._HUNG


def test_memory_stays_while_a_read_may_write_it(path: Path, backend: CpuBackend) -> None:
    """Closing does not wait for longer than the limit."""
    with rig_of(path, backend, E) as rig:
        arena, queue = rig.arena, rig.arena._words[w.CONTEXT].item()
        rig.check(0, batch_of(tokens(2, 1)))
        arena._words[w.NUM_FREE] -= 1  # one that has not ended
        arena._words[w.LIMIT_NS] = int(50e6)
        began_s = time.monotonic()
        arena.close()
        assert time.monotonic() - began_s < 5
        assert host_arena._HUNG.count(arena) == 1
        host_arena._HUNG.remove(arena)
    _LIBC.syscall(READ_SYSCALLS[platform.machine()]["destroy"], ctypes.c_ulong(queue))


# -- what is left ---------------------------------------------------------------------------------


def num_queued() -> int:
    """Reads that all of the system's queues have room for."""
    return int(Path("/proc/sys/fs/aio-nr").read_text())


@pytest.mark.parametrize("rounds", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_arenas_that_are_closed_leave_nothing(path: Path, backend: CpuBackend, rounds: int) -> None:
    """Some in the middle of reading ahead."""
    process, before = psutil.Process(), (0, 0, 0)
    chunk = batch_of(whole_layer(), phase=Phase.PREFILL)
    for number in range(rounds):
        if number == rounds // 10:
            gc.collect()
            before = num_descriptors(), num_queued(), process.memory_info().rss
        with rig_of(path, backend, LAYERS * E, looks_ahead=number % 2 == 0) as rig:
            rig.check(0, chunk if number % 3 else batch_of(tokens(1, number)))
    gc.collect()
    descriptors, queued, resident = before
    assert num_descriptors() == descriptors
    assert num_queued() - queued < rounds // 2 * w.MOST_PENDING  # others may have some, too
    assert process.memory_info().rss - resident < 8 << 20
