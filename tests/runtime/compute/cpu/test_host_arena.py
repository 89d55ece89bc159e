"""Experts that are read from the disk when they are used: the same bits, whatever is there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.half_lives import FIRST, HALF_LIVES, CachePolicy
from dflash_runtime.placement.cache import policies
from dflash_runtime.placement.cache.simulation import PLAIN
from support.allocated import allocated_bytes
from support.arena_rig import (
    LAYERS,
    SHAPE,
    E,
    K,
    Rig,
    batch_of,
    check_whole,
    held_by,
    rig_of,
    tokens,
)
from support.examples import examples
from support.plain_arena import PlainArena
from support.random_models import write_qwen3moe


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "m.gguf", SHAPE, seed=3, tensor_type=request.param)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer's experts are larger than those of the others."""

    def type_of(name: str) -> str:
        return "Q8_0" if name.startswith("blk.0.") else "Q4_0"

    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "mixed.gguf", SHAPE, seed=3, tensor_type=type_of)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    with contextlib.closing(CpuBackend(num_threads=2)) as backend:
        yield backend


@pytest.mark.wide(2)
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("num_slots", [E, E + 3, LAYERS * E])
def test_bits_are_those_of_experts_in_memory(
    path: Path, backend: CpuBackend, num_slots: int, looks_ahead: bool
) -> None:
    with rig_of(path, backend, num_slots, looks_ahead=looks_ahead) as rig:
        for step in range(40):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(1, 7 * step + layer), step))
            if step % 10 == 9:
                for layer in range(LAYERS):
                    rig.check(layer, batch_of(tokens(30, step + layer), step, Phase.PREFILL))
        stats = rig.arena.stats()
    assert stats.failed == 0
    assert stats.num_slots == num_slots
    if num_slots == LAYERS * E:  # read once
        assert stats.missed <= LAYERS * E
    else:
        assert stats.missed > LAYERS * E
    assert stats.found > 0
    assert (stats.look_ahead.checked > 0) == looks_ahead
    assert 0 <= stats.look_ahead.prefetched_used <= stats.look_ahead.prefetched
    assert 0 <= stats.look_ahead.predicted <= stats.look_ahead.checked


@examples(30)
@given(
    num_slots=st.integers(E, LAYERS * E),
    steps=st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(1, 40), st.integers(0, 99)),
        min_size=1, max_size=30,
    ),
    looks_ahead=st.booleans(),
)  # fmt: skip
def test_any_order_of_batches(
    path: Path,
    backend: CpuBackend,
    num_slots: int,
    steps: list[tuple[int, int, int]],
    looks_ahead: bool,
) -> None:
    with rig_of(path, backend, num_slots, looks_ahead=looks_ahead) as rig:
        for layer, num_tokens, seed in steps:
            phase = Phase.PREFILL if num_tokens > 8 else Phase.DECODE
            rig.check(layer, batch_of(tokens(num_tokens, seed), seed, phase))
        stats = rig.arena.stats()
    assert stats.failed == 0
    assert stats.found + stats.missed > 0


def test_experts_that_are_used_often_stay(path: Path, backend: CpuBackend) -> None:
    often = np.array([[0, 1]], np.int32)
    with rig_of(path, backend, E) as rig:
        for step in range(20):
            rig.check(0, batch_of(often, step))
        for seldom in range(2, E, 2):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(np.array([[seldom, seldom + 1]], np.int32)))
        before = rig.arena.stats()
        rig.check(0, batch_of(often))
        after = rig.arena.stats()
    assert after.found - before.found == 2
    assert after.read_bytes == before.read_bytes


def test_a_step_has_what_the_next_layer_will_choose_read_meanwhile(
    path: Path, backend: CpuBackend
) -> None:
    with rig_of(path, backend, LAYERS * E, looks_ahead=True) as rig:
        for step in range(E):  # enough of them are missing for predictions
            batch = batch_of(tokens(1, step), step)
            rig.check(0, batch)
            for layer in range(1, LAYERS):
                before = rig.arena.stats()
                likely = likely_by_numpy(rig.file, layer, batch.hidden[0])
                batch = batch_of(likely[None], 10 * step + layer)
                rig.check(layer, batch)
                after = rig.arena.stats()
                assert after.look_ahead.checked - before.look_ahead.checked == (
                    K if before.look_ahead.prefetched else 0
                )
                assert after.look_ahead.predicted == after.look_ahead.checked
        assert after.look_ahead.prefetched > 0
        assert after.look_ahead.prefetched_used == after.look_ahead.prefetched
        # Everything is there by now: nothing more is predicted, sooner or later.
        for step in range(300):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(1, step + layer), step))
        settled = rig.arena.stats()
        rig.check(0, batch_of(tokens(1, 1)))
        rig.check(1, batch_of(tokens(1, 1)))
        assert rig.arena.stats().look_ahead.checked == settled.look_ahead.checked


@pytest.mark.wide(2)
@pytest.mark.parametrize("policy", [*CachePolicy])
@pytest.mark.parametrize("num_slots", [E, LAYERS * 4])
def test_slots_hold_what_a_plain_version_holds(
    path: Path, backend: CpuBackend, num_slots: int, policy: CachePolicy
) -> None:
    """Steps, and batches of a few tokens now and then."""
    rng = np.random.default_rng(num_slots)
    with rig_of(path, backend, num_slots, policy=policy) as rig:
        plain, num_found = PlainArena(num_slots, LAYERS), 0
        for step in range(90):
            for layer in range(LAYERS):
                ids = tokens(int(rng.choice([1, 1, 1, 2])), 9 * (step // 4) + layer)
                rig.check(layer, batch_of(ids, step))
                check_whole(rig.arena)
                # A step changes the half-life before its own experts come.
                half_life, held = rig.arena.stats().half_life, held_by(rig.arena)
                num_found += plain.use(layer, ids.ravel().tolist(), half_life, after=held)
                assert held == plain.slots
        stats = rig.arena.stats()
    assert stats.found == num_found > 0
    assert stats.missed > num_slots


@pytest.mark.parametrize("num_slots", [E, LAYERS * 4])
def test_shadows_keep_what_the_simulator_keeps(
    path: Path, backend: CpuBackend, num_slots: int
) -> None:
    """Of each half-life, beside slots that follow one of them."""
    num_tokens = 150
    chosen = [tokens(num_tokens, seed) for seed in range(LAYERS)]
    with rig_of(path, backend, num_slots) as rig:
        for token in range(num_tokens):
            for layer, ids in enumerate(chosen):
                rig.check(layer, batch_of(ids[token : token + 1], token))
        for of_layer, ids in zip(rig.arena._layers, chosen, strict=True):
            for kind, half_life in enumerate(HALF_LIVES):
                place = np.full(E, policies.ABSENT, np.uint8)
                state = place, np.full(E, -1, np.int64), np.zeros(E), np.zeros(E, np.uint8)
                rates = np.array([2.0 ** (1.0 / half_life), 0.0])
                ignored = np.zeros((2, *ids.shape), np.uint8)
                PLAIN.replay(ids, policies.LFU, num_slots // LAYERS, rates, *state, *ignored)
                np.testing.assert_array_equal(
                    of_layer.shadows >> kind & 1, place != policies.ABSENT, f"{half_life}"
                )
                assert of_layer.shadow_sizes[kind] == num_slots // LAYERS


@pytest.mark.parametrize(
    ("is_recent", "expected"), [(True, HALF_LIVES[:1]), (False, HALF_LIVES[2:])]
)
def test_the_half_life_follows_what_is_chosen(
    path: Path, backend: CpuBackend, is_recent: bool, expected: tuple[float, ...]
) -> None:
    """Either the same few experts for a while, then others; or always the same popularity."""
    rng, few = np.random.default_rng(7), np.arange(3)
    popularity = np.array([0.17] * 4 + [0.08] * 4)
    with rig_of(path, backend, LAYERS * 4) as rig:
        assert rig.arena.stats().half_life == HALF_LIVES[FIRST]
        for token in range(900):
            if is_recent and token % 6 == 0:
                few = rng.choice(E, 3, replace=False)
            for layer in range(LAYERS):
                among, weights = (few, None) if is_recent else (E, popularity)
                ids = rng.choice(among, K, replace=False, p=weights)
                rig.check(layer, batch_of(ids[None].astype(np.int32), token))
        assert rig.arena.stats().half_life in expected


@pytest.mark.parametrize(
    ("policy", "half_life"),
    [(CachePolicy.LRU, 2.0), (CachePolicy.LFU, 128.0), (CachePolicy.STATIC, 2048.0)],
)
def test_a_half_life_that_was_asked_for_stays(
    path: Path, backend: CpuBackend, policy: CachePolicy, half_life: float
) -> None:
    """Whatever is chosen: `lru` keeps what was used last, `static` what was used most."""
    often, seldom = [0, 1], [2, 3, 4, 5]
    with rig_of(path, backend, LAYERS * 4, policy=policy) as rig:
        for token in range(300):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(np.array([often], np.int32), token))
        for first in (0, 2) * 6:
            for layer in range(LAYERS):
                rig.check(layer, batch_of(np.array([seldom[first : first + 2]], np.int32)))
        before = rig.arena.stats()
        assert before.half_life == half_life
        assert all(not of_layer.shadows.any() for of_layer in rig.arena._layers)
        for layer in range(LAYERS):
            rig.check(layer, batch_of(np.array([often], np.int32)))
        num_found = rig.arena.stats().found - before.found
        assert num_found == (0 if policy is CachePolicy.LRU else LAYERS * len(often))


def test_what_twice_the_memory_would_find(path: Path, backend: CpuBackend) -> None:
    popularity = np.array([0.3, 0.2, 0.15, 0.15, 0.05, 0.05, 0.05, 0.05])
    rng = np.random.default_rng(5)
    with rig_of(path, backend, LAYERS * 4) as rig:
        assert rig.arena.stats().share_found is None  # nothing is known yet
        assert not rig.arena.stats().shares_by_half_life
        for token in range(600):
            for layer in range(LAYERS):
                ids = rng.choice(E, K, replace=False, p=popularity)
                rig.check(layer, batch_of(ids[None].astype(np.int32), token))
        stats = rig.arena.stats()
    found = stats.found / (stats.found + stats.missed)
    assert stats.share_found is not None
    assert abs(stats.share_found - found) < 0.06
    assert stats.share_found_by_twice is not None
    assert 0.98 < stats.share_found_by_twice < 1.0  # all but the first use of each
    shares = stats.shares_by_half_life
    assert [float(each) for each in shares] == [*HALF_LIVES]
    assert shares[f"{stats.half_life:g}"] == stats.share_found
    assert [*shares.values()] == sorted(shares.values())  # popularity does not change


def likely_by_numpy(file: GgufFile, layer: int, row: F32Array) -> I32Array:
    """What a layer's router chooses for a row of the one before. Shapes: row [H]."""
    theirs, ours = (file.floats(f"blk.{number}.ffn_norm.weight") for number in (layer, layer - 1))
    logits = (file.floats(f"blk.{layer}.ffn_gate_inp.weight") * (theirs / ours)) @ row
    return np.argsort(-logits, kind="stable")[:K].astype(np.int32)


def test_a_chunk_has_the_next_layer_read_meanwhile(path: Path, backend: CpuBackend) -> None:
    chunk = batch_of(tokens(60, 1), phase=Phase.PREFILL)
    with rig_of(path, backend, LAYERS * E) as rig:
        rig.check(0, chunk)
        before = rig.arena.stats().read_bytes
        rig.check(1, chunk)  # reads the third layer, and nothing of its own
        read = rig.arena.stats().read_bytes - before
        rig.check(2, chunk)
        assert rig.arena.stats().read_bytes - before == read


def predicted_of(file: GgufFile, layer: int, batch: RoutedBatch) -> list[int]:
    """What a layer's router chooses for any row of the one before."""
    return sorted({*np.concatenate([likely_by_numpy(file, layer, row) for row in batch.hidden])})


def there_of(rig: Rig, layer: int) -> list[int]:
    """A layer's experts in slots."""
    return np.flatnonzero(rig.arena._layers[layer].slot_of >= 0).tolist()


def test_a_chunk_that_uses_few_experts_has_those_read_that_are_predicted(
    path: Path, backend: CpuBackend
) -> None:
    few = np.tile(np.array([[1, 2]], np.int32), (20, 1))
    with rig_of(path, backend, LAYERS * E, looks_ahead=True) as rig:
        batch = batch_of(few, 3, Phase.PREFILL)
        batch.hidden[:] = batch.hidden[:2].repeat(10, axis=0)  # so that not all are predicted
        rig.check(0, batch)
        assert there_of(rig, 0) == [1, 2]
        assert there_of(rig, 1) == predicted_of(rig.file, 1, batch)
        assert 0 < len(there_of(rig, 1)) < E
    with rig_of(path, backend, LAYERS * E) as rig:  # without routers nothing is
        rig.check(0, batch)
        assert there_of(rig, 1) == []


def test_later_chunks_find_what_one_before_has_brought(path: Path, backend: CpuBackend) -> None:
    """A layer's experts stay until the next layer is computed, and so do those that were read for
    it."""
    for num_slots in (E, 2 * E):
        with rig_of(path, backend, num_slots) as rig:
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(40, layer), phase=Phase.PREFILL))
                ahead = there_of(rig, min(layer + 1, LAYERS - 1))
                before = rig.arena.stats()
                for seed in range(3):
                    rig.check(layer, batch_of(tokens(40, seed), seed, Phase.PREFILL))
                assert rig.arena.stats().missed == before.missed
                assert there_of(rig, min(layer + 1, LAYERS - 1)) == ahead
                assert (len(ahead) == E) == (num_slots > E or layer + 1 == LAYERS)


def test_a_prompt_leaves_what_steps_use(path: Path, backend: CpuBackend) -> None:
    """Its chunks bring whole layers, which leave first."""
    hot = np.array([[1, 4]], np.int32)
    with rig_of(path, backend, LAYERS * E - 2) as rig:

        def step() -> int:
            before = rig.arena.stats().missed
            for layer in range(LAYERS):
                rig.check(layer, batch_of(hot))
            return rig.arena.stats().missed - before

        assert step() == LAYERS * K
        for seed in range(3):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(60, seed), seed, Phase.PREFILL))
            assert step() == 0


def test_less_than_a_layer_is_refused(path: Path, backend: CpuBackend) -> None:
    with (
        pytest.raises(ValueError, match="a layer has 8"),
        rig_of(path, backend, E - 1),
    ):
        pass


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_reads_that_fail_cost_time_alone(
    path: Path, backend: CpuBackend, caplog: pytest.LogCaptureFixture, looks_ahead: bool
) -> None:
    """A descriptor that is no file any more: each expert is used where the file is mapped."""
    with rig_of(path, backend, E, looks_ahead=looks_ahead) as rig:
        for step in range(6):
            rig.check(0, batch_of(tokens(1, step)))
        [descriptor] = rig.arena._descriptors.values()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)
        for layer in range(LAYERS):
            rig.check(layer, batch_of(tokens(3, layer)))
            rig.check(layer, batch_of(tokens(40, layer), phase=Phase.PREFILL))
            rig.check(layer, batch_of(tokens(1, layer)))
            rig.arena.warn()
        assert rig.arena.stats().failed > 0
    [record] = caplog.records
    assert "reads of experts have failed" in record.getMessage()


def test_a_read_that_never_ends_ends_all_others(path: Path, backend: CpuBackend) -> None:
    with rig_of(path, backend, E) as rig:
        words = rig.arena._words
        words[w.LIMIT_NS] = 1
        context, words[w.CONTEXT] = words[w.CONTEXT].item(), 0
        words[w.NUM_FREE] = 0  # all control blocks are taken, and none is given back
        rig.check(0, batch_of(tokens(1, 1)))
        assert words[w.IS_BROKEN]
        read_bytes = rig.arena.stats().read_bytes
        words[w.CONTEXT], words[w.NUM_FREE] = context, w.MOST_PENDING
        for layer in range(LAYERS):
            rig.check(layer, batch_of(tokens(20, 1)))
        assert rig.arena.stats().read_bytes == read_bytes
        assert rig.arena.stats().failed > 0


def test_nothing_is_left_behind(path: Path, backend: CpuBackend) -> None:
    before = 0
    for number in range(4):
        if number == 1:  # what is opened once is there
            before = len(os.listdir("/proc/self/fd"))
        with rig_of(path, backend, E) as rig:
            rig.check(0, batch_of(tokens(4, 1)))
            rig.arena.close()
            rig.arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_brought_experts_are_not_replaced(path: Path, backend: CpuBackend) -> None:
    one = np.zeros(1, np.int32)
    with rig_of(path, backend, E) as rig, pytest.raises(ValueError, match="come from the disk"):
        rig.brought[0].replace(rig.file, one, one)


def hits(rig: Rig, layer: int, experts: list[int]) -> int:
    """How many of a step's experts are in memory."""
    before = rig.arena.stats().found
    rig.check(layer, batch_of(np.array([experts], np.int32)))
    return rig.arena.stats().found - before


def test_the_hottest_experts_are_read_at_once(path: Path, backend: CpuBackend) -> None:
    shares = {layer: np.linspace(0.5, 0.01, E) / (1 + layer) for layer in range(LAYERS)}
    with rig_of(path, backend, E + 1, shares=shares) as rig:
        for _ in rig.arena.read_hottest():
            pass
        assert rig.arena.empty_bytes == 0
        before = rig.arena.stats()
        assert (before.found, before.missed) == (0, 0)
        # Of 24 the nine with the largest shares.
        every = np.concatenate([*shares.values()])
        hottest = np.isin(np.arange(LAYERS * E), np.argsort(-every)[: E + 1]).reshape(LAYERS, E)
        for layer in range(LAYERS):
            experts = np.flatnonzero(hottest[layer]).tolist()
            assert hits(rig, layer, experts) == len(experts)
        assert rig.arena.stats().read_bytes == before.read_bytes
        # What was expected counts as uses do: others leave first.
        for seldom in range(0, E, K):
            rig.check(2, batch_of(np.array([[seldom, seldom + 1]], np.int32)))
        assert hits(rig, 0, [0, 1]) == 2


def test_reading_the_hottest_fails_as_other_reads(path: Path, backend: CpuBackend) -> None:
    with rig_of(path, backend, E, shares={0: np.full(E, 0.25)}) as rig:
        [descriptor] = rig.arena._descriptors.values()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)
        for _ in rig.arena.read_hottest():
            pass
        assert rig.arena.empty_bytes == rig.arena.num_bytes
        rig.check(0, batch_of(tokens(3, 0)))


@examples(20)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(1, 40), st.integers(0, 99)),
        min_size=2, max_size=30,
    ),
    parts=st.lists(st.floats(0.0, 1.5), min_size=1, max_size=5),
)  # fmt: skip
def test_memory_changes_between_batches(
    mixed: Path, backend: CpuBackend, steps: list[tuple[int, int, int]], parts: list[float]
) -> None:
    """Layers have experts of two sizes."""
    with rig_of(mixed, backend, 2 * E) as rig:
        most = rig.arena.most_bytes
        for number, (layer, num_tokens, seed) in enumerate(steps):
            phase = Phase.PREFILL if num_tokens > 8 else Phase.DECODE
            rig.check(layer, batch_of(tokens(num_tokens, seed), seed, phase))
            part = parts[number % len(parts)]
            rig.arena.resize(int(part * most))
            assert rig.arena.num_slots >= E
            assert rig.arena.num_bytes <= most
            if part >= 1.0:
                assert rig.arena.num_bytes == most
        assert rig.arena.stats().failed == 0


def test_memory_that_is_given_back_is_the_systems(path: Path, backend: CpuBackend) -> None:
    with rig_of(path, backend, LAYERS * E) as rig:
        for layer in range(LAYERS):
            rig.check(layer, batch_of(tokens(40, layer), phase=Phase.PREFILL))
        memory = np.frombuffer(rig.arena._memory, np.uint8)
        allocated = allocated_bytes(memory)
        assert allocated > 0.8 * rig.arena.most_bytes
        rig.arena.resize(0)
        kept = rig.arena.num_bytes
        assert kept == rig.arena.most_bytes // LAYERS
        assert allocated_bytes(memory[kept:]) == 0
        assert allocated_bytes(memory) < allocated / 2
        rig.arena.resize(rig.arena.most_bytes)
        assert rig.arena.empty_bytes == rig.arena.most_bytes - kept
        for layer in range(LAYERS):
            rig.check(layer, batch_of(tokens(40, layer), phase=Phase.PREFILL))
        assert rig.arena.empty_bytes == 0
        del memory


def test_a_batch_is_waited_for_before_memory_is_given_back(path: Path, backend: CpuBackend) -> None:
    with rig_of(path, backend, LAYERS * E) as rig:
        rig.arena._words[w.LOCK] = 1
        thread = threading.Thread(target=rig.arena.resize, args=(0,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert rig.arena.num_slots == LAYERS * E
        rig.arena._words[w.LOCK] = 0
        thread.join(20.0)
        assert rig.arena.num_slots == E


def test_pinned_experts_never_leave(path: Path, backend: CpuBackend) -> None:
    """The hottest of each layer, of the hottest layers first, in half of the slots."""
    often = [3, 6]
    with rig_of(path, backend, LAYERS * 4, policy=CachePolicy.LRU) as rig:
        for step in range(30):
            for layer in range(1 if step % 3 else LAYERS):
                rig.check(layer, batch_of(np.array([often], np.int32), step))
        rig.arena.pin_hottest(E)  # of those that were used
        assert rig.arena.pins.experts == {layer: often for layer in range(LAYERS)}
        rig.arena.pin_hottest(1)
        assert [len(each) for each in rig.arena.pins.experts.values()] == [1] * LAYERS
        rig.arena.pin_hottest(K)
        pins, stats = rig.arena.stats().pins, rig.arena.stats()
        assert (pins.found_before, pins.missed_before) == (stats.found, stats.missed)
        for seed in range(20):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(1, seed), seed))
                rig.check(layer, batch_of(tokens(40, seed), seed, Phase.PREFILL))
        assert [hits(rig, layer, often) for layer in range(LAYERS)] == [K] * LAYERS
    with rig_of(path, backend, E) as rig:
        for layer, times in ((1, 5), (2, 9), (0, 7)):
            for step in range(times):
                rig.check(layer, batch_of(tokens(3, step), step))
        rig.arena.pin_hottest(3)
        pinned = [np.count_nonzero(layer.pins) for layer in rig.arena._layers]
        assert pinned == [1, 0, 3]
        assert [len(rig.arena.pins.experts[layer]) for layer in range(LAYERS)] == pinned
