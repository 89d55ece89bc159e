"""Captured steps compute what the same steps do layer by layer, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import CheckpointMissing, ContextExceeded
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.cpu.captured.program import Program
from dflash_runtime.compute.cpu.captured.step import MOST_ROWS, CpuStep
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import experts_kernel
from dflash_runtime.compute.cpu.kernels.words import get
from dflash_runtime.compute.cpu.simd import atomics
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.cpu.threads.parallel import claim, line_of_words, run_region
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.trees import Tree
from support.gpu_models import SHAPES
from support.host_steps import HostSteps
from support.random_gguf import write_model

PROMPT = 13


@pytest.fixture(scope="module", params=sorted(SHAPES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "m.gguf", SHAPES[request.param], seed=3, tensor_type="Q8_0")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[HostSteps]:
    """A model whose sequence can be cut anywhere."""
    path = write_model(tmp_path / "small.gguf", SHAPES["olmoe"], seed=5, tensor_type="Q8_0")
    steps = HostSteps(path, num_threads=2)
    yield steps
    steps.close()


@pytest.fixture
def recurrent(tmp_path: Path) -> Iterator[HostSteps]:
    path = write_model(tmp_path / "r.gguf", SHAPES["qwen35moe"], seed=5, tensor_type="Q8_0")
    steps = HostSteps(path, num_threads=2)
    yield steps
    steps.close()


def some_ids(steps: HostSteps, size: int, seed: int = 0) -> I32Array:
    random = np.random.default_rng(seed)
    return random.integers(0, steps.spec.vocab_size, size, dtype=np.int32)


def step_logits(captured: CpuStep, token_id: int, position: int) -> F32Array:
    captured.begin(token_id, position)
    captured.start()
    return captured.logits().copy()


@pytest.mark.wide(2)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0])
def test_every_architecture(path: Path, kv_type: KvType, num_threads: int) -> None:
    """A step's logits are those of the same step, layer by layer; experts are counted."""
    steps = HostSteps(path, num_threads=num_threads)
    try:
        ids = some_ids(steps, 80)
        expected_in, computed_in = (
            steps.new_cache(kv_type=kv_type),
            steps.new_cache(kv_type=kv_type),
        )
        captured = steps.captured(computed_in)
        for each in (expected_in, computed_in):
            steps.logits(each, ids[:PROMPT], 0)
        for position in range(PROMPT, ids.size):
            expected = steps.logits(expected_in, ids[position : position + 1], position)[0]
            got = step_logits(captured, int(ids[position]), position)
            np.testing.assert_array_equal(got, expected)
            assert captured.token(position + 1) == expected.argmax()
        selections = steps.backend.take_selections(steps.banks)
        for layer in steps.spec.moe.layers:
            num_pairs = (ids.size - PROMPT) * layer.num_experts_used
            assert selections[Phase.DECODE, layer.layer_id].sum() == num_pairs
        assert not steps.backend.take_selections(steps.banks)
        # What a captured step has left in the cache serves steps layer by layer.
        following = some_ids(steps, 5, seed=1)
        np.testing.assert_array_equal(
            steps.logits(computed_in, following, ids.size),
            steps.logits(expected_in, following, ids.size),
        )
    finally:
        steps.close()


def test_a_step_takes_the_token_that_the_last_one_chose(small: HostSteps) -> None:
    ids = some_ids(small, PROMPT)
    one, other = small.new_cache(), small.new_cache()
    for each in (one, other):
        small.logits(each, ids[:-1], 0)
    captured = small.captured(one)
    captured.begin(int(ids[-1]), PROMPT - 1)
    token_id = int(ids[-1])
    for position in range(PROMPT - 1, PROMPT + 20):
        captured.start()
        expected = small.logits(other, np.array([token_id], np.int32), position)[0]
        np.testing.assert_array_equal(captured.logits(), expected)
        token_id = int(expected.argmax())
        assert captured.token(position + 1) == token_id


@pytest.mark.parametrize("num_tokens", [1, 2, 5, MOST_ROWS])
def test_chains_are_verified(small: HostSteps, num_tokens: int) -> None:
    ids = some_ids(small, PROMPT + 30)
    one, other = small.new_cache(), small.new_cache()
    captured = small.captured(one)
    for each in (one, other):
        small.logits(each, ids[:PROMPT], 0)
    position = PROMPT
    for accepted in (0, num_tokens, num_tokens // 2):
        draft = ids[position : position + num_tokens]
        tree = Tree(np.arange(-1, num_tokens - 1, dtype=np.int32), position)
        expected = small.logits(other, draft, position, tree)
        layers = small.spec.num_layers
        result = captured.verify(draft, tree, range(layers))
        assert result is not None
        np.testing.assert_array_equal(result.next_token_ids, expected.argmax(axis=1))
        last = small.model.head(result.features[layers - 1])
        np.testing.assert_array_equal(last, expected)
        assert sorted(result.features) == list(range(layers))
        path = np.arange(accepted, dtype=np.int32)
        tree.accept(path)
        position += accepted
        following = some_ids(small, 1, seed=position)
        expected_next = small.logits(other, following, position)[0]
        got_next = step_logits(captured, int(following[0]), position)
        np.testing.assert_array_equal(got_next, expected_next)


def test_what_is_left_to_the_host(small: HostSteps, recurrent: HostSteps) -> None:
    cache = small.new_cache()
    ids = some_ids(small, PROMPT)
    small.logits(cache, ids, 0)
    captured = small.captured(cache)
    branches = Tree(np.array([-1, -1], np.int32), PROMPT)
    assert captured.verify(ids[:2], branches, ()) is None
    long = Tree(np.arange(-1, MOST_ROWS, dtype=np.int32), PROMPT)
    assert captured.verify(ids[: MOST_ROWS + 1], long, ()) is None
    of_states = recurrent.new_cache()
    recurrent.logits(of_states, ids[:4], 0)
    chain = Tree(np.array([-1, 0], np.int32), 4)
    assert recurrent.captured(of_states).verify(ids[:2], chain, ()) is None


def test_a_step_beyond_the_context_is_refused(small: HostSteps) -> None:
    cache = small.new_cache(capacity=16)
    small.logits(cache, some_ids(small, 15), 0)
    captured = small.captured(cache)
    captured.begin(1, 15)
    captured.start()
    with pytest.raises(ContextExceeded):
        captured.start()
    with pytest.raises(ValueError, match="token id"):
        captured.begin(small.spec.vocab_size, 3)


def test_token_ids_that_the_model_does_not_have_are_refused(small: HostSteps) -> None:
    cache = small.new_cache()
    small.logits(cache, some_ids(small, PROMPT), 0)
    captured = small.captured(cache)
    chain = Tree(np.array([-1, 0], np.int32), PROMPT)
    for bad in (-1, small.spec.vocab_size):
        with pytest.raises(ValueError, match="token id"):
            captured.verify(np.array([1, bad], np.int32), chain, ())
    captured.begin(1, PROMPT)
    captured._recorded.token_ids[0] = NOT_FINITE  # as the step before may have left it
    with pytest.raises(ValueError, match="token id"):
        captured.start()


def test_it_keeps_the_experts(small: HostSteps) -> None:
    cache = small.new_cache()
    captured = small.captured(cache)
    expected = step_logits(captured, 1, 0)
    banks = [weakref.ref(bank) for bank in small.banks.values()]
    small.banks.clear()
    gc.collect()
    assert all(bank() is not None for bank in banks)
    np.testing.assert_array_equal(step_logits(captured, 1, 0), expected)
    del captured
    gc.collect()
    assert not any(bank() is not None for bank in banks)


def test_routing_that_is_not_sound_is_noticed(small: HostSteps) -> None:
    for bank in small.banks.values():
        assert isinstance(bank, CpuExpertBank)
        bank.words[experts_kernel.NUM_EXPERTS] = 1
    cache = small.new_cache()
    captured = small.captured(cache)
    step_logits(captured, 1, 0)
    assert captured.token(1) == NOT_FINITE


def test_a_logit_that_is_not_finite_is_reported(
    small: HostSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = small.new_cache()
    ids = some_ids(small, PROMPT)
    small.logits(cache, ids, 0)
    captured = small.captured(cache)
    norm = small.model._vectors[small.model._ends.norm]
    before = norm.copy()
    for bad in (np.nan, np.inf):
        norm[3] = bad
        captured.begin(1, PROMPT)
        captured.start()
        assert captured.token(PROMPT + 1) == -3
    norm[:] = before
    captured.begin(1, PROMPT)
    captured.start()
    assert captured.token(PROMPT + 1) == captured.logits().argmax()


def test_an_interrupted_step(recurrent: HostSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step leaves half done is computed again, from a state that is whole."""
    ids = some_ids(recurrent, 40)
    cache = recurrent.new_cache()
    recurrent.logits(cache, ids[:PROMPT], 0)
    snapshot = cache.snapshot(PROMPT)
    captured = recurrent.captured(cache)
    expected = step_logits(captured, int(ids[PROMPT]), PROMPT)
    program = captured._recorded.program
    kernel = program._kernel

    def interrupted(calls: Any, first: int, end: int, counter: int, pool: int) -> int:
        kernel(calls, first, end // 2, counter, pool)
        raise KeyboardInterrupt

    program._kernel = interrupted
    captured.begin(int(ids[PROMPT + 1]), PROMPT + 1)
    with pytest.raises(KeyboardInterrupt):
        captured.start()
    program._kernel = kernel
    for position in (PROMPT, PROMPT + 1, PROMPT + 2):
        captured.begin(1, position)
        with pytest.raises(CheckpointMissing):
            captured.start()
    cache.restore(snapshot)
    np.testing.assert_array_equal(step_logits(captured, int(ids[PROMPT]), PROMPT), expected)


def test_a_long_step_returns_to_python(small: HostSteps) -> None:
    """Calls run in slices, between which Python handles signals."""
    cache = small.new_cache()
    small.logits(cache, some_ids(small, PROMPT), 0)
    captured = small.captured(cache)
    expected = step_logits(captured, 1, PROMPT)
    program = captured._recorded.program
    with_delays(program, lambda: _long_delay())
    slices = []
    kernel = program._kernel

    def counted(*arguments: Any) -> int:
        slices.append(arguments[1])
        reached: int = kernel(*arguments)
        return reached

    program._kernel = counted
    np.testing.assert_array_equal(step_logits(captured, 1, PROMPT), expected)
    assert len(slices) > 3


def test_a_long_step_can_be_cancelled(small: HostSteps) -> None:
    cache, calls = small.new_cache(), list[int]()

    def cancel() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    small.logits(cache, some_ids(small, PROMPT), 0)
    captured = small.captured(cache, cancel)
    expected = step_logits(captured, 1, PROMPT)
    assert not calls
    with_delays(captured._recorded.program, _long_delay)
    captured.begin(1, PROMPT)
    with pytest.raises(InterruptedError):
        captured.start()
    np.testing.assert_array_equal(step_logits(captured, 1, PROMPT), expected)


# -- delays ---------------------------------------------------------------------------------------

_SEED, _TASK = 0, 16


def _delay_item(args: int, counter: int, worker_idx: int) -> None:
    """Eight items: most take next to no time, some longer than workers spin."""
    while claim(counter) < 8:
        seed = atomics.relaxed_add(args, 0x9E3779B97F4A7C1) ^ system.monotonic_ns()
        seed = seed * 0x2545F4914F6CDD1D
        draw = (seed >> 33) & 1023
        delay_ns = 0
        if draw < 2:
            delay_ns = 60_000
        elif draw < 64:
            delay_ns = 20 * draw
        end_ns = system.monotonic_ns() + delay_ns
        while system.monotonic_ns() < end_ns:
            system.pause()


def _delay(args: int, counter: int, pool: int) -> None:
    run_region(pool, get(args, _TASK), args, counter)


def _wait_20_ms(args: int, counter: int, pool: int) -> None:
    end_ns = system.monotonic_ns() + 20_000_000
    while system.monotonic_ns() < end_ns:
        system.pause()


@cache
def _delay_functions() -> tuple[RowFunction, RowFunction]:
    return compile_task(_delay), compile_task(_delay_item)


@cache
def _long_delay() -> RowFunction:
    return compile_task(_wait_20_ms)


def with_delays(program: Program, function: Any) -> None:
    """Put a call of a function before every call of a program."""
    words = line_of_words(2 * _TASK)
    words[_TASK] = _delay_functions()[1].address
    program._kept.append(words)
    calls = program._calls
    both = np.empty((2 * len(calls), 2), np.int64)
    both[0::2] = function().address, words.ctypes.data
    both[1::2] = calls
    program._calls = both


def run_with_delays(steps: HostSteps, num_steps: int) -> None:
    ids, num_positions = some_ids(steps, 64, seed=7), 48
    cache = steps.new_cache(capacity=64)
    steps.logits(cache, ids[:PROMPT], 0)
    captured = steps.captured(cache)
    positions = range(PROMPT, PROMPT + num_positions)
    expected = [step_logits(captured, int(ids[p]), p) for p in positions]
    with_delays(captured._recorded.program, lambda: _delay_functions()[0])
    for index in range(num_steps):
        at = index % num_positions
        captured.begin(int(ids[PROMPT + at]), PROMPT + at)
        captured.start()
        if captured.logits().tobytes() != expected[at].tobytes():
            raise AssertionError(f"step {index} differs at position {PROMPT + at}")


def test_random_delays_change_no_bit(small: HostSteps) -> None:
    run_with_delays(small, 10_000)


@pytest.mark.slow
def test_very_many_steps_with_random_delays(small: HostSteps) -> None:
    run_with_delays(small, 200_000)
