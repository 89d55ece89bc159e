"""Attention against a plain float64 formula, and the bits that must not depend on chunking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import CAUSAL, KvLayer, Mask
from dflash_protocol.errors import CheckpointMissing, ContextExceeded
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute import host_room, sliding_window
from dflash_runtime.compute.cpu import attention as launcher
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.attention import cached_rows
from support import float64_attention
from support.examples import examples


@pytest.fixture(scope="module")
def alone() -> CpuOps:
    return CpuOps(Workers(1), Scratch())


@pytest.fixture(scope="module")
def shared() -> Iterator[CpuOps]:
    """Three threads."""
    workers = Workers(3)
    yield CpuOps(workers, Scratch())
    workers.close()


@pytest.fixture
def always_shared(shared: CpuOps, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """Three threads, used for work of any size."""
    monkeypatch.setattr(launcher, "_PARALLEL_PRODUCTS", 0)
    monkeypatch.setattr(launcher, "_PARALLEL_VALUES", 0)
    return shared


@pytest.fixture(autouse=True)
def several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of these sizes would have one slab."""
    monkeypatch.setattr(host_room, "HUGE_PAGE", 100_000)


def normal(*shape: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def as_stored(values: F32Array, kv_type: KvType) -> F32Array:
    """Values as a cache returns them. Shapes: values, result [N, heads, D]."""
    num_positions, num_heads, dim = values.shape
    rows = cached_rows(kv_type, num_positions, num_heads=num_heads, dim=dim)
    positions = np.arange(num_positions, dtype=np.int32)
    rows.store(positions, values)
    return np.stack([rows.load(positions, head) for head in range(num_heads)], axis=1)


def attended(
    q: F32Array,
    keys: F32Array,
    values: F32Array,
    first: int,
    scale: float,
    mask: Mask = CAUSAL,
    sinks: F32Array | None = None,
) -> F64Array:
    """Shapes: q [T, heads, D]; keys, values [N, kv_heads, D]: everything up to the last token."""
    return float64_attention.attended(
        q.astype(np.float64) * scale,
        keys.transpose(1, 0, 2),
        values.transpose(1, 0, 2),
        np.arange(first, first + q.shape[0], dtype=np.int32),
        mask=mask,
        sinks=sinks,
    )


def run(
    attention: CpuOps,
    kv_type: KvType,
    q: F32Array,
    k: F32Array,
    v: F32Array,
    ends: list[int],
    scale: float,
    capacity: int | None = None,
    *,
    mask: Mask = CAUSAL,
    sinks: F32Array | None = None,
) -> F32Array:
    """Compute chunks that end at `ends`, in the second layer of a cache."""
    layers = (KvLayer(1, 1, 1), KvLayer(k.shape[1], k.shape[2], v.shape[2], mask))
    cache = CpuKvCache(layers, capacity or q.shape[0], kv_type)
    parts, first = [], 0
    for end in ends:
        part, positions = slice(first, end), np.arange(first, end, dtype=np.int32)
        rows = q[part], k[part], v[part]
        parts.append(attention.attention(*rows, cache, 1, positions, scale=scale, sinks=sinks))
        first = end
    return np.concatenate(parts)


@pytest.mark.wide(1)
@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "num_tokens"),
    [
        (4, 4, 64, 64, 75),
        (6, 2, 10, 10, 75),
        (8, 1, 128, 128, 300),
        (3, 3, 33, 48, 75),
        (2, 1, 1, 1, 33),
        (5, 1, 24, 100, 65),
        (40, 2, 80, 96, 70),
        (2, 1, 512, 512, 40),
        (1, 1, 576, 512, 20),
    ],
)
def test_attention_in_chunks(
    alone: CpuOps,
    always_shared: CpuOps,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    num_tokens: int,
    kv_type: KvType,
) -> None:
    q, k = normal(num_tokens, heads, dim), normal(num_tokens, kv_heads, dim, seed=1)
    v, scale = normal(num_tokens, kv_heads, value_dim, seed=2), dim**-0.5
    expected = attended(q, as_stored(k, kv_type), as_stored(v, kv_type), 0, scale)
    whole = run(alone, kv_type, q, k, v, [num_tokens], scale)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=3e-6)
    for attention in (alone, always_shared):
        for ends in ([1, 2, 19, 19, num_tokens - 1, num_tokens], list(range(1, num_tokens + 1))):
            got = run(attention, kv_type, q, k, v, ends, scale)
            np.testing.assert_array_equal(got, whole)


@examples(40)
@given(data=st.data())
def test_bits_do_not_depend_on_chunks_or_threads(
    alone: CpuOps, shared: CpuOps, data: st.DataObject
) -> None:
    kv_heads = data.draw(st.integers(1, 3), "kv_heads")
    group = data.draw(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 16, 20]), "group")
    dim = data.draw(st.sampled_from([1, 8, 24, 32, 64, 80, 96, 100, 128]), "dim")
    value_dim = data.draw(st.sampled_from([1, 24, 32, 64, 100, 128]), "value_dim")
    num_tokens = data.draw(st.integers(1, 600), "num_tokens")
    cuts = data.draw(st.sets(st.integers(1, num_tokens), max_size=5), "cuts")
    alone_from = data.draw(st.integers(max(0, num_tokens - 40), num_tokens), "alone_from")
    kv_type = data.draw(st.sampled_from(list(KvType)), "kv_type")
    q = normal(num_tokens, group * kv_heads, dim)
    k, v = normal(num_tokens, kv_heads, dim, seed=1), normal(num_tokens, kv_heads, value_dim)
    scale = dim**-0.5
    whole = run(alone, kv_type, q, k, v, [num_tokens], scale)
    in_chunks = sorted(cuts | {num_tokens})
    one_by_one = sorted({alone_from, *range(alone_from, num_tokens + 1)} - {0})
    with pytest.MonkeyPatch.context() as patch:
        slab_bytes = data.draw(st.sampled_from([1, 100_000, 2 << 20]), "slab_bytes")
        patch.setattr(host_room, "HUGE_PAGE", slab_bytes)
        if data.draw(st.booleans(), "shares small work"):
            patch.setattr(launcher, "_PARALLEL_PRODUCTS", 0)
            patch.setattr(launcher, "_PARALLEL_VALUES", 0)
        for ends in (in_chunks, one_by_one):
            for attention in (alone, shared):
                got = run(attention, kv_type, q, k, v, ends, scale)
                np.testing.assert_array_equal(got, whole)
    last = attended(q[-1:], as_stored(k, kv_type), as_stored(v, kv_type), num_tokens - 1, scale)
    np.testing.assert_allclose(whole[-1:], last, rtol=0, atol=3e-6)


MASKS = (Mask(window=1), Mask(window=50), Mask(window=300), Mask(chunk=70), Mask(200, 128))


@pytest.mark.wide(2)
@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("heads", "dim"), [(2, 24), (12, 40)], ids=["few rows", "many rows"])
def test_masks_in_chunks(
    alone: CpuOps,
    always_shared: CpuOps,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    dim: int,
    mask: Mask,
    kv_type: KvType,
) -> None:
    """In a sliding window that wraps more than once, with the bits of a cache that has room for
    all."""
    num_tokens = 700
    q, k = normal(num_tokens, heads, dim), normal(num_tokens, 2, dim, seed=1)
    v, sinks = normal(num_tokens, 2, 33, seed=2), normal(heads, seed=3)
    scale = dim**-0.5
    stored = as_stored(k, kv_type), as_stored(v, kv_type)
    expected = attended(q, *stored, 0, scale, mask, sinks)
    whole = run(alone, kv_type, q, k, v, [num_tokens], scale, mask=mask, sinks=sinks)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=3e-6)
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 100)
    for attention in (alone, always_shared):
        for ends in ([num_tokens], [1, 2, 130, 619, *range(620, num_tokens + 1)]):
            got = run(attention, kv_type, q, k, v, ends, scale, mask=mask, sinks=sinks)
            np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("size", [1e-3, 80.0, 1e4])
def test_sinks(alone: CpuOps, size: float) -> None:
    q, k, v = (normal(70, 4, 16, seed=seed) for seed in range(3))
    sinks = np.array([-1, 0, 0.5, 1], np.float32) * np.float32(size)
    got = run(alone, KvType.F32, q, k, v, [70], 0.25, sinks=sinks)
    expected = attended(q, k, v, 0, 0.25, sinks=sinks)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_a_window_keeps_only_what_can_still_be_seen(alone: CpuOps) -> None:
    mask = Mask(window=100)
    cache = CpuKvCache((KvLayer(2, 16, 16, mask), KvLayer(2, 16, 16)), 10_000, KvType.F32)
    window, plain = cache.layers
    kept = 99 + sliding_window.WINDOW_CHUNK
    assert kept <= sliding_window.num_rows(mask, 10_000) < kept + 64
    num_rows = window.slabs.nbytes / (2 * (16 + 32) * 4)
    assert 640 <= num_rows < 640 + 64 * window.slabs.shape[0]
    assert cache.nbytes == sum(e.slabs.nbytes for e in (window, plain))
    assert sliding_window.num_rows(mask, 200) == 200

    def go_on(first: int, num_tokens: int) -> F32Array:
        positions = np.arange(first, first + num_tokens, dtype=np.int32)
        q, k = normal(num_tokens, 2, 16), normal(num_tokens, 2, 16, seed=1)
        return alone.attention(q, k, k, cache, 0, positions, scale=0.25)

    go_on(0, 1000)
    go_on(1000, 1)
    go_on(900, 3)
    with pytest.raises(CheckpointMissing):
        go_on(300, 3)
    assert go_on(0, 3).shape == (3, 2, 16)


@pytest.mark.parametrize("kv_type", KvType)
def test_what_lies_after_a_token_does_not_reach_it(shared: CpuOps, kv_type: KvType) -> None:
    """Not even as infinity times zero: neither later tokens of the chunk nor those of a dropped
    draft."""
    q, k, v = (normal(100, 2, 16, seed=seed) for seed in range(3))
    whole = run(shared, kv_type, q, k, v, [100], 0.25)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[70:], bad_v[70:] = np.nan, np.inf
    np.testing.assert_array_equal(
        run(shared, kv_type, q, bad_k, bad_v, [100], 0.25)[:70], whole[:70]
    )
    cache = CpuKvCache((KvLayer(2, 16, 16),), 100, kv_type)
    positions = np.arange(100, dtype=np.int32)
    shared.attention(q, bad_k, bad_v, cache, 0, positions, scale=0.25)
    for token in range(70, 100):
        part = slice(token, token + 1)
        got = shared.attention(q[part], k[part], v[part], cache, 0, positions[part], scale=0.25)
        np.testing.assert_array_equal(got, whole[part])


@pytest.mark.parametrize("size", [80.0, 1e4])
def test_large_scores(alone: CpuOps, size: float) -> None:
    q, k, v = (normal(300, 2, 16, seed=seed) for seed in range(3))
    q *= np.float32(size)
    got = run(alone, KvType.F32, q, k, v, [300], 1.0)
    np.testing.assert_allclose(got, attended(q, k, v, 0, 1.0), atol=2e-6 * size)


@pytest.mark.parametrize("kv_type", KvType)
def test_kv_type_is_the_only_difference(alone: CpuOps, kv_type: KvType) -> None:
    """A single value comes back exactly as the cache's type stores it."""
    v = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65504, 2**-24, 1e-9, 0], np.float32)[:, None, None]
    v = v * np.linspace(-1, 1, 33, dtype=np.float32)
    k = np.ones((6, 1, 33), np.float32)
    for token in range(6):
        part = slice(token, token + 1)
        got = run(alone, kv_type, k[part], k[part], v[part], [1], 1.0)
        np.testing.assert_array_equal(got, as_stored(v[part], kv_type))


def test_guards(alone: CpuOps) -> None:
    cache = CpuKvCache((KvLayer(2, 16, 16),), 8, KvType.F32)
    q, k = normal(2, 4, 16), normal(2, 2, 16)

    def attention(first: int, q: Any = q, k: Any = k, step: int = 1) -> F32Array:
        positions = np.arange(first, first + 2 * step, step, dtype=np.int32)
        return alone.attention(q, k, k, cache, 0, positions, scale=0.25)

    with pytest.raises(ContextExceeded):
        attention(7)
    with pytest.raises(ContextExceeded):
        attention(2**31 - 3)
    with pytest.raises(ValueError, match="positions"):
        attention(-1)
    with pytest.raises(ValueError, match="ascend"):
        attention(0, step=2)
    for wrong_k in (normal(2, 1, 16), normal(2, 2, 8)):
        with pytest.raises(ValueError, match="fit"):
            attention(0, k=wrong_k)
    for wrong_q in (normal(2, 5, 16), normal(2, 4, 8)):
        with pytest.raises(ValueError, match="fit"):
            attention(0, q=wrong_q)
    with pytest.raises(ValueError, match="sinks"):
        alone.attention(
            q, k, k, cache, 0, np.arange(2, dtype=np.int32), scale=0.25, sinks=normal(3)
        )
    for other in (q.astype(np.float64), normal(2, 16, 4).transpose(0, 2, 1)):
        with pytest.raises(TypeError):
            attention(0, q=other)
    assert attention(6).shape == (2, 4, 16)
    empty = alone.attention(q[:0], k[:0], k[:0], cache, 0, np.zeros(0, np.int32), scale=0.25)
    assert empty.shape == (0, 4, 16)
