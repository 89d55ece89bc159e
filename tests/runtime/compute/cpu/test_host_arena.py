"""Experts that are read from the disk when they are used: the same bits, whatever is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.kernels import arena_tasks as t
from dflash_runtime.compute.half_lives import FIRST, HALF_LIVES, CachePolicy
from dflash_runtime.placement.cache import policies
from dflash_runtime.placement.cache.simulation import PLAIN
from support.arena_rig import LAYERS, SHAPE, E, K, batch_of, check_whole, held_by, rig_of, tokens
from support.examples import examples
from support.plain_arena import PlainArena
from support.random_models import write_qwen3moe


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "m.gguf", SHAPE, seed=3, tensor_type=request.param)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    with contextlib.closing(CpuBackend(num_threads=2)) as backend:
        yield backend


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
    assert (stats.checked > 0) == looks_ahead
    assert 0 <= stats.prefetched_used <= stats.prefetched
    assert 0 <= stats.predicted <= stats.checked


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
                assert after.checked - before.checked == (K if before.prefetched else 0)
                assert after.predicted == after.checked
        assert after.prefetched > 0
        assert after.prefetched_used == after.prefetched
        # Everything is there by now: nothing more is predicted, sooner or later.
        for step in range(300):
            for layer in range(LAYERS):
                rig.check(layer, batch_of(tokens(1, step + layer), step))
        settled = rig.arena.stats()
        rig.check(0, batch_of(tokens(1, 1)))
        rig.check(1, batch_of(tokens(1, 1)))
        assert rig.arena.stats().checked == settled.checked


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
        words[t.LIMIT_NS] = 1
        context, words[t.CONTEXT] = words[t.CONTEXT].item(), 0
        words[t.NUM_FREE] = 0  # all control blocks are taken, and none is given back
        rig.check(0, batch_of(tokens(1, 1)))
        assert words[t.IS_BROKEN]
        read_bytes = rig.arena.stats().read_bytes
        words[t.CONTEXT], words[t.NUM_FREE] = context, t.MOST_PENDING
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
