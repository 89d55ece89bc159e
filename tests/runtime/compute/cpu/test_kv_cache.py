"""Where a sequence's keys and values lie, and when the system allocates that memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.spec import KvLayer, Mask
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from dflash_runtime.compute import host_room
from dflash_runtime.compute.cpu import kv_cache
from dflash_runtime.compute.cpu.captured.program import Program
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.kv_cache import KvType
from support.allocated import allocated_bytes
from support.emulated_gpu import TINY
from support.random_gguf import write_model

WINDOW = KvLayer(2, 64, 64, Mask(window=100))
PLAIN = KvLayer(2, 64, 64)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(3)
    yield workers
    workers.close()


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a few pages, none of which is huge."""
    monkeypatch.setattr(host_room, "HUGE_PAGE", 100_000)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)


def allocated_of(cache: CpuKvCache) -> int:
    """Bytes of its keys and values that the system has allocated."""
    return sum(allocated_bytes(layer.slabs) for layer in cache.layers)


def step(attention: CpuOps, cache: CpuKvCache, first: int, num_tokens: int) -> list[F32Array]:
    """Tokens from a position on through all layers."""
    random = np.random.default_rng(first)
    positions = np.arange(first, first + num_tokens, dtype=np.int32)
    q, k, v = random.standard_normal((3, num_tokens, 2, 64)).astype(np.float32)
    layers = range(len(cache.layers))
    return [attention.attention(q, k, v, cache, each, positions, scale=0.1) for each in layers]


def test_all_heads_of_many_positions_share_a_huge_page() -> None:
    cache = CpuKvCache((KvLayer(4, 128, 128),) * 2, 10_000, KvType.F16)
    for layer in cache.layers:
        assert layer.slabs.ctypes.data % (2 << 20) == 0
        assert layer.slabs.shape == (10, 1024 * 4 * 2 * 256)
    small = CpuKvCache((WINDOW, PLAIN), 1000, KvType.F32)
    assert [layer.slabs.shape for layer in small.layers] == [(1, 640 * 1024), (1, 1024 * 1024)]
    # Slabs are about equally full: no memory for a last one that is nearly empty.
    (odd,) = CpuKvCache((KvLayer(4, 128, 128),), 1100, KvType.F16).layers
    assert odd.slabs.shape == (2, 576 * 2048)


@pytest.mark.parametrize("kv_type", KvType)
def test_steps_find_their_memory_allocated(
    workers: Workers, kv_type: KvType, small_slabs: None
) -> None:
    cache = CpuKvCache((PLAIN, WINDOW, PLAIN), 8192, kv_type, workers=workers)
    attention = CpuOps(workers, Scratch())
    position = 0
    for num_tokens in (12, 1, 500, 1000, *[1] * 600):
        cache.touch(position + num_tokens)
        before = allocated_of(cache)
        step(attention, cache, position, num_tokens)
        assert allocated_of(cache) == before
        position += num_tokens
    assert before < 0.6 * cache.nbytes


def test_memory_grows_with_the_positions_in_use(small_slabs: None) -> None:
    cache = CpuKvCache((PLAIN,) * 4, 1 << 16, KvType.F32)
    a_position = cache.nbytes // cache.capacity

    def fits(num_positions: int) -> bool:
        """Allocated for these, and for few more: a slab and what is touched ahead."""
        num_allocated = allocated_of(cache) // a_position
        return num_positions <= num_allocated <= num_positions + 600

    assert fits(1)
    for num_positions in (100, 1000, 1001, 5000):
        cache.touch(num_positions)
        assert fits(num_positions)
    cache.touch(10)
    assert fits(5000)
    cache.touch(cache.capacity + 10)
    assert allocated_of(cache) >= cache.nbytes


def test_no_step_waits_for_the_memory_of_all_layers(small_slabs: None) -> None:
    cache = CpuKvCache((PLAIN,) * 8, 4096, KvType.F16)
    a_slab = max(layer.slabs.shape[1] for layer in cache.layers)
    allocated = [allocated_of(cache)]
    for position in range(2048):
        cache.touch(position + 1)
        allocated.append(allocated_of(cache))
    steps = np.diff(allocated)
    assert steps.max() <= 2 * a_slab
    assert np.count_nonzero(steps) < 100 + 2048 // 192 * 8


def test_touching_changes_nothing(workers: Workers, small_slabs: None) -> None:
    attention = CpuOps(workers, Scratch())
    untouched, touched = (CpuKvCache((PLAIN, WINDOW), 4096, KvType.F16) for _ in range(2))
    addresses = [layer.words.tolist() for layer in touched.layers]
    step(attention, untouched, 0, 1000)
    step(attention, touched, 0, 1000)
    touched.touch(4096)
    for ours, theirs in zip(touched.layers, untouched.layers, strict=True):
        np.testing.assert_array_equal(ours.slabs, theirs.slabs)
    assert [layer.words.tolist() for layer in touched.layers] == addresses


def test_a_model_touches_memory_before_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "HUGE_PAGE", 20_000)
    monkeypatch.setattr(kv_cache, "_TOUCHED_AHEAD", 32)
    path = write_model(tmp_path / "model.gguf", replace(TINY, context_length=2048), seed=1)
    with Engine.open(path, backend="cpu", device="cpu", context=2048) as engine:
        cache = engine._steps._cache
        assert isinstance(cache, CpuKvCache)
        before = [allocated_of(cache)]

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def note_and_call(*args: object) -> Any:
                before.append(allocated_of(cache))
                return function(*args)

            return note_and_call

        monkeypatch.setattr(CpuOps, "embed", noting(CpuOps.embed))
        monkeypatch.setattr(Program, "run", noting(Program.run))
        prompt = [token % 7 for token in range(700)]
        for _ in engine.generate(prompt, max_tokens=100, ignore_eos=True):
            assert allocated_of(cache) == before[-1]
        assert len(before) > 100
        assert before[0] < before[-1] < 0.7 * cache.nbytes
