"""Causal convolution and the gated delta rule of both host backends, against plain formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import DeltaShape
from dflash_protocol.errors import CheckpointMissing
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.recurrent_rig import (
    conv_outputs,
    delta_inputs,
    delta_outputs,
    error,
    expected_outputs,
    float64_conv,
    recurrent_cache,
)

HostOps: TypeAlias = CpuOps | ReferenceOps

SHAPES = (
    DeltaShape(1, 1, 32, 32),
    DeltaShape(2, 4, 16, 16),
    DeltaShape(3, 9, 20, 20),
    DeltaShape(2, 2, 7, 45),
    DeltaShape(2, 6, 36, 70, is_tiled=False),
    DeltaShape(1, 2, 128, 128),
)
MOST = 1e-5
"""The largest error, on the scale of the largest value."""


def chunks_of(num_tokens: int, *, largest: int, seed: int) -> list[int]:
    """Uneven chunk sizes, some of a single token."""
    random = np.random.default_rng(seed)
    sizes: list[int] = []
    while num_tokens:
        some = (1, 1, 3, int(random.integers(1, largest + 1)))
        size = min(num_tokens, some[random.integers(4)])
        sizes.append(size)
        num_tokens -= size
    return sizes


# -- convolution ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "kernel"), [(128, 4), (37, 4), (70, 2), (5, 1), (300, 7)])
def test_convolution_is_that_of_the_formula_in_any_chunks(
    ops: HostOps, channels: int, kernel: int
) -> None:
    random = np.random.default_rng(channels)
    x = random.standard_normal((41, channels), dtype=np.float32)
    weight = random.standard_normal((channels, kernel), dtype=np.float32)
    expected = float64_conv(x, weight)
    shape = DeltaShape(1, 1, 1, channels - 2)
    bits = set()
    for chunks in ([41], [1] * 41, [2, 1, 30, 8], [1, 40], [40, 1]):
        cache = recurrent_cache(ops, shape, kernel=kernel)
        got = conv_outputs(ops, x, weight, cache, chunks=chunks)
        assert error(got, expected) <= 1e-6, chunks
        bits.add(got.tobytes())
    assert len(bits) == 1


# -- delta rule -----------------------------------------------------------------------------------


@pytest.mark.wide(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 65, 200])
def test_delta_rule_is_the_recurrence(ops: HostOps, shape: DeltaShape, num_tokens: int) -> None:
    inputs = delta_inputs(shape, num_tokens)
    expected, _ = expected_outputs(inputs)
    bits = set()
    for chunks in (
        [num_tokens],
        [1] * num_tokens,
        chunks_of(num_tokens, largest=90, seed=num_tokens),
    ):
        got = delta_outputs(ops, inputs, recurrent_cache(ops, shape), chunks=chunks)
        assert error(got, expected) <= MOST, chunks
        bits.add(got.tobytes())
    if isinstance(ops, CpuOps):
        assert len(bits) == 1


@pytest.mark.parametrize("shape", [DeltaShape(2, 4, 32, 32), DeltaShape(1, 1, 128, 128)], ids=str)
def test_two_thousand_tokens_in_any_chunks_are_the_recurrence(
    ops: HostOps, shape: DeltaShape
) -> None:
    inputs = delta_inputs(shape, 2000)
    expected, _ = expected_outputs(inputs)
    for chunks in ([2000], chunks_of(2000, largest=600, seed=1), [512] * 3 + [464]):
        got = delta_outputs(ops, inputs, recurrent_cache(ops, shape), chunks=chunks)
        assert error(got, expected) <= MOST, chunks[:9]


def test_threads_do_not_show_in_the_bits() -> None:
    shape = DeltaShape(5, 10, 40, 64)
    inputs = delta_inputs(shape, 100)
    bits = set()
    for num_threads in (1, 2, 3, 8):
        backend = CpuBackend(num_threads=num_threads)
        cache = recurrent_cache(backend.ops, shape)
        bits.add(delta_outputs(backend.ops, inputs, cache, chunks=[37, 1, 62]).tobytes())
        backend.close()
    assert len(bits) == 1


def test_heads_that_forget_everything_or_nothing(ops: HostOps) -> None:
    shape = DeltaShape(1, 3, 16, 16)
    inputs = delta_inputs(shape, 150)
    inputs.a[:] = -1e4, 0, -30
    inputs.beta[::2] *= 100
    inputs.alpha[::3] *= 50
    expected, _ = expected_outputs(inputs)
    for chunks in ([150], [1] * 150):
        got = delta_outputs(ops, inputs, recurrent_cache(ops, shape), chunks=chunks)
        assert error(got, expected) <= MOST


def test_zeros_are_no_division_by_zero(ops: HostOps) -> None:
    shape = DeltaShape(1, 2, 16, 16)
    inputs = delta_inputs(shape, 70)
    inputs.mixed[:] = 0
    for chunks in ([70], [1] * 70):
        got = delta_outputs(ops, inputs, recurrent_cache(ops, shape), chunks=chunks)
        np.testing.assert_array_equal(got, 0)


def test_no_tokens_change_nothing(ops: HostOps) -> None:
    shape = SHAPES[1]
    inputs = delta_inputs(shape, 40)
    plain = delta_outputs(ops, inputs, recurrent_cache(ops, shape), chunks=[30, 10])
    cache = recurrent_cache(ops, shape)
    got = delta_outputs(ops, inputs, cache, chunks=[0, 30, 0, 10, 0])
    np.testing.assert_array_equal(got, plain)
    x = np.empty((0, shape.num_channels), np.float32)
    weight = np.ones((shape.num_channels, 4), np.float32)
    assert ops.causal_conv(x, weight, cache, 0, np.empty(0, np.int32)).shape == x.shape


# -- state ----------------------------------------------------------------------------------------


def both(ops: HostOps, cache: object, shape: DeltaShape, bounds: tuple[int, int]) -> F32Array:
    """Convolution and delta rule of the tokens at these positions, with the same inputs each
    time."""
    inputs = delta_inputs(shape, 400, seed=3)
    weight = delta_inputs(shape, 4, seed=4).mixed.T.copy()
    first, last = bounds
    positions = np.arange(first, last, dtype=np.int32)
    mixed = ops.causal_conv(inputs.mixed[first:last], weight, cache, 0, positions)  # type: ignore[arg-type]
    part = replace(inputs.of(slice(first, last)), mixed=mixed)
    return delta_outputs(ops, part, cache, chunks=[last - first], first=first)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept_at", [1, 5, 32, 63, 64, 200])
def test_a_snapshot_is_gone_on_from_as_if_nothing_had_been(ops: HostOps, kept_at: int) -> None:
    shape = SHAPES[2]
    cache = recurrent_cache(ops, shape)
    both(ops, cache, shape, (0, kept_at))
    snapshot = cache.snapshot(kept_at)
    assert snapshot.num_positions == kept_at
    assert 0 < snapshot.nbytes <= cache.nbytes
    first = both(ops, cache, shape, (kept_at, kept_at + 17))
    both(ops, cache, shape, (kept_at + 17, kept_at + 80))
    cache.restore(snapshot)
    np.testing.assert_array_equal(both(ops, cache, shape, (kept_at, kept_at + 17)), first)
    # In the memory of the first, which is no longer a valid snapshot.
    again = cache.snapshot(kept_at + 17, instead_of=snapshot)
    later = both(ops, cache, shape, (kept_at + 17, kept_at + 20))
    both(ops, cache, shape, (0, 9))
    cache.restore(again)
    np.testing.assert_array_equal(both(ops, cache, shape, (kept_at + 17, kept_at + 20)), later)


def test_position_0_begins_anew_whatever_there_was(ops: HostOps) -> None:
    shape = SHAPES[1]
    cache = recurrent_cache(ops, shape)
    expected = both(ops, cache, shape, (0, 40))
    for bounds in ((40, 90), (90, 91)):
        both(ops, cache, shape, bounds)
    np.testing.assert_array_equal(both(ops, cache, shape, (0, 40)), expected)
    both(ops, cache, shape, (40, 41))
    np.testing.assert_array_equal(both(ops, cache, shape, (0, 40)), expected)


def test_a_state_that_was_not_kept_is_not_gone_on_from(ops: HostOps) -> None:
    shape = SHAPES[1]
    cache = recurrent_cache(ops, shape)
    both(ops, cache, shape, (0, 40))
    for bounds in ((39, 45), (41, 45)):
        with pytest.raises(CheckpointMissing):
            both(ops, cache, shape, bounds)
    for num_positions in (39, 41):
        with pytest.raises(CheckpointMissing):
            cache.snapshot(num_positions)
    # A step that was interrupted between the two parts leaves no state for a checkpoint.
    x = delta_inputs(shape, 2).mixed
    ops.causal_conv(
        x, np.ones((shape.num_channels, 4), np.float32), cache, 0, np.array([40, 41], np.int32)
    )
    for num_positions in (40, 42):
        with pytest.raises(CheckpointMissing):
            cache.snapshot(num_positions)


@given(cuts=st.lists(st.integers(0, 120), max_size=8), num_tokens=st.integers(1, 120))
def test_any_chunks_and_snapshots_in_between(cuts: list[int], num_tokens: int) -> None:
    ops, shape = ReferenceOps(), DeltaShape(1, 2, 8, 8)
    inputs = delta_inputs(shape, num_tokens)
    expected, _ = expected_outputs(inputs)
    cache, parts = recurrent_cache(ops, shape), []
    bounds = sorted({0, num_tokens, *(cut for cut in cuts if cut < num_tokens)})
    for first, last in pairwise(bounds):
        parts.append(
            delta_outputs(
                ops, inputs.of(slice(first, last)), cache, chunks=[last - first], first=first
            )
        )
    assert error(np.concatenate(parts), expected) <= MOST
