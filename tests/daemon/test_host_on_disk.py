"""A daemon's placements whose experts do not fit into its memory: they share it, and have the bits
of experts in memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_daemon import host as host_module
from dflash_daemon.host import ExpertHost
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.experts.store import HeldPlacement
from support.arena_rig import (
    LAYERS,
    SHAPE,
    E,
    batch_of,
    check_whole,
    read_from,
    result,
    slot_bytes_of,
    tokens,
)
from support.descriptors import num_descriptors
from support.random_models import write_qwen3moe

WHOLE = OwnedExperts.from_lists({layer: range(E) for layer in range(LAYERS)})
OTHER = OwnedExperts.from_lists({layer: range(E - 1, -1, -1) for layer in range(LAYERS)})
FEW = OwnedExperts.from_lists({0: [5, 2]})
SEVERAL_LAYERS = 2 * E
"""Slots for two layers of three."""

LARGER = replace(SHAPE, hidden_size=256, ffn_size=256)
"""Slots are not much larger than these experts."""

Opened = Callable[[float | None], ExpertHost]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "m.gguf", LARGER, seed=3, tensor_type="Q8_0")


@pytest.fixture
def opened(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Opened]:
    """Hosts with memory for so many experts; None: for all that is free."""
    with GgufFile.open(path) as file:
        slot_bytes = slot_bytes_of(file)
    with contextlib.ExitStack() as undo:

        def open_host(num_slots: float | None) -> ExpertHost:
            # Predictions take a little of it.
            most_bytes = None if num_slots is None else int((num_slots + 0.9) * slot_bytes)
            backend = CpuBackend(num_threads=1)
            host = ExpertHost(path, backend, str(tmp_path), most_bytes=most_bytes)
            undo.callback(host.close)
            # Compiling all kernels ahead takes longer than the test.
            monkeypatch.setattr(host, "_is_compiled", True)
            return host

        yield open_host


def arena_of(held: HeldPlacement) -> HostArena:
    assert isinstance(held.arena, HostArena)
    return held.arena


def check(found: HeldPlacement, expected: HeldPlacement, seed: int = 0) -> None:
    """All experts, by global id, of a step and of a chunk."""
    for layer, bank in found.banks.items():
        ids = found.owned.by_layer[layer]
        there = {each: i for i, each in enumerate(expected.owned.by_layer[layer].tolist())}
        for num_tokens, phase in ((1, Phase.DECODE), (30, Phase.PREFILL)):
            chosen = tokens(num_tokens, seed) % ids.size
            as_there = np.vectorize(lambda each, ids=ids, there=there: there[ids[each]])(chosen)
            sums = result(bank, batch_of(chosen, seed, phase, hidden_size=LARGER.hidden_size))  # type: ignore[arg-type]
            other = result(
                expected.banks[layer],  # type: ignore[arg-type]
                batch_of(as_there.astype(np.int32), seed, phase, hidden_size=LARGER.hidden_size),
            )
            np.testing.assert_allclose(sums, other, rtol=1e-12)
            if np.array_equal(ids, expected.owned.by_layer[layer]):
                np.testing.assert_array_equal(sums, other)


def test_what_fits_is_in_memory(opened: Opened) -> None:
    for num_slots in (None, 1000):
        host = opened(num_slots)
        assert host.load(WHOLE).arena is None
        assert host.on_disk() == ""


def test_what_does_not_fit_has_the_bits_of_what_does(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    expected = opened(None).load(WHOLE)
    host = opened(SEVERAL_LAYERS)
    before, one = host.memory(), host.memory().expert_bytes[0]
    held = host.load(WHOLE)
    assert arena_of(held).num_slots == SEVERAL_LAYERS
    assert f"room for {SEVERAL_LAYERS} of {LAYERS * E} experts" in caplog.text
    assert host.on_disk().startswith(f"memory for {SEVERAL_LAYERS} experts")
    for seed in range(5):
        check(held, expected, seed)
    assert before.free_bytes - host.memory().free_bytes > (SEVERAL_LAYERS - 1) * one
    stats = arena_of(held).stats()
    assert stats.failed == 0
    assert stats.missed > SEVERAL_LAYERS
    assert held.pairs_per_second < expected.pairs_per_second
    host.release(held)
    assert host.load(WHOLE) is held


@pytest.mark.parametrize("num_slots", [0, 1, E - 1])
def test_less_than_a_layer_is_said(
    opened: Opened, caplog: pytest.LogCaptureFixture, num_slots: int
) -> None:
    expected, host = opened(None).load(WHOLE), opened(num_slots)
    held = host.load(WHOLE)
    assert held.arena is None
    assert "experts are not read from the disk as a whole" in caplog.text
    check(held, expected)


def test_placements_in_use_share_the_memory(opened: Opened) -> None:
    """Those that are used no more leave it to the others."""
    expected, host = opened(None).load(WHOLE), opened(2 * E + 3)
    first = host.load(WHOLE)
    assert arena_of(first).num_slots == 2 * E + 3
    second = host.load(OTHER)
    share = (2 * E + 3) // 2
    assert [arena_of(each).num_slots for each in (first, second)] == [share, share]
    for held in (first, second):
        check(held, expected)
        check_whole(arena_of(held))
    host.release(first)
    host.look_after_disk()
    assert [arena_of(each).num_slots for each in (first, second)] == [E, 2 * E + 3]
    assert host.load(WHOLE) is first
    host.look_after_disk()
    assert [arena_of(each).num_slots for each in (first, second)] == [share, share]
    host.release(second)
    third = host.load(FEW)  # for which the second is dropped; both share again
    assert host.store.arenas() == [first.arena, *([third.arena] if third.arena else [])]
    check(third, expected)
    check(first, expected)


def test_what_was_in_memory_is_not_dropped_for_others(opened: Opened) -> None:
    """A small placement stays there; a large one gets the rest."""
    expected, host = opened(None).load(WHOLE), opened(E + 4)
    few = host.load(FEW)
    assert few.arena is None
    whole = host.load(WHOLE)
    assert E <= arena_of(whole).num_slots <= E + 2
    check(few, expected)
    check(whole, expected)


def test_reads_that_fail_are_said(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    expected, host = opened(None).load(WHOLE), opened(E)
    held = host.load(WHOLE)
    read_from(arena_of(held), os.devnull)
    for seed in range(3):
        check(held, expected, seed)
    host.look_after_disk()
    host.look_after_disk()
    assert caplog.text.count("reads of experts have failed") == 1


def test_a_placement_may_be_dropped_while_it_computes(opened: Opened) -> None:
    """As its parent is gone: what is computed for it stays right, and nothing is left."""
    expected, host = opened(None).load(WHOLE), opened(E)
    other = OwnedExperts.from_lists({0: range(E), 1: range(E)})
    before = 0
    for turn in range(6):
        held, is_done = host.load((WHOLE, OTHER)[turn % 2]), threading.Event()

        def compute(held: HeldPlacement = held, is_done: threading.Event = is_done) -> None:
            while not is_done.is_set():
                check(held, expected)

        computing = threading.Thread(target=compute)
        computing.start()
        try:
            host.release(held)
            host.release(host.load(other))
            check(held, expected)
        finally:
            is_done.set()
            computing.join()
        if turn == 1:
            before = num_descriptors()
    assert num_descriptors() <= before


def test_files_in_memory_are_used_where_they_are(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "is_in_memory", lambda path: True)
    assert opened(E).load(WHOLE).arena is None
