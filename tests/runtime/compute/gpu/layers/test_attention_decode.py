"""Attention of one to eight tokens, emulated, against its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_adapters.rope import AttentionTemperature, RopePairing
from dflash_adapters.spec import Mask
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.attention import cached_rows
from support.attention_rig import AttentionRig, LayerCase, relative_error

SMALL = LayerCase(num_heads=4, key_dim=32, value_dim=32, num_rotated=32)

# What a path may round away: of tensor cores and q8_0, keys and values become halves.
FLOAT_BOUND = 3e-6
HALVES_BOUND = 2e-3

PATHS = (
    (SMALL.having(kv_type=KvType.F32), FLOAT_BOUND),
    (SMALL, FLOAT_BOUND),
    (SMALL.having(kv_type=KvType.Q8_0), FLOAT_BOUND),
    (SMALL.having(use_mma=True), FLOAT_BOUND),
    (SMALL.having(kv_type=KvType.Q8_0, use_mma=True), HALVES_BOUND),
    (SMALL.having(lanes=64), FLOAT_BOUND),
    pytest.param(SMALL.having(lanes=64, kv_type=KvType.Q8_0), FLOAT_BOUND, marks=pytest.mark.slow),
)

SHAPES = (
    # Seven heads on one, odd sizes, part of a head rotated in neighbouring pairs, no norm.
    (
        SMALL.having(
            num_heads=7,
            num_kv_heads=1,
            key_dim=18,
            value_dim=10,
            num_rotated=12,
            pairing=RopePairing.INTERLEAVED,
            has_norm=False,
        ),
        1,
    ),
    pytest.param(
        SMALL.having(
            num_heads=5, key_dim=18, value_dim=10, num_kv_heads=1, num_rotated=18, use_mma=True
        ),
        1,
        marks=pytest.mark.slow,
    ),
    # Keys whose last step of 32 is half empty; nine rows, so two tiles of rows.
    (SMALL.having(num_heads=3, num_kv_heads=1, key_dim=80, value_dim=48, num_rotated=80), 3),
    # More rows than one block takes.
    (
        SMALL.having(
            num_heads=16,
            num_kv_heads=1,
            key_dim=16,
            value_dim=16,
            num_rotated=16,
            use_mma=True,
        ),
        8,
    ),
)


def _slowly(*positions: int) -> list[Any]:
    """The same again elsewhere, in the long run of the tests."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in positions]


def _rig(case: LayerCase, first: int) -> AttentionRig:
    rig = AttentionRig(case)
    rig.fill_cache(first)
    return rig


@pytest.mark.wide(1)
@pytest.mark.parametrize(("case", "bound"), PATHS)
@pytest.mark.parametrize("first", [0, 15, 64, 130, *_slowly(1, 16, 37, 63, 65, 191)])
def test_one_token_attends_to_all_up_to_its_own(case: LayerCase, bound: float, first: int) -> None:
    rig = _rig(case, first)
    out = rig.decode(first, 1)
    assert relative_error(out, rig.expected(first, 1)) < bound


@pytest.mark.parametrize(("case", "bound"), [PATHS[1], PATHS[3], PATHS[4]])
@pytest.mark.parametrize("first", [0, 62, *_slowly(37, 126)])
def test_tokens_of_a_step_see_those_before_them(case: LayerCase, bound: float, first: int) -> None:
    rig = _rig(case, first)
    out = rig.decode(first, 3)
    assert relative_error(out, rig.expected(first, 3)) < bound


@pytest.mark.wide(1)
@pytest.mark.parametrize("mask", [Mask(window=5), Mask(window=70), Mask(chunk=48), Mask(33, 24)])
@pytest.mark.parametrize(("case", "bound"), [PATHS[1], PATHS[3]])
@pytest.mark.parametrize("first", [94, *_slowly(0, 3, 64, 143)])
def test_what_a_mask_hides_is_not_seen(
    case: LayerCase, bound: float, first: int, mask: Mask
) -> None:
    rig = _rig(case.having(mask=mask), first)
    for num_tokens in (1, 4):
        out = rig.decode(first, num_tokens)
        assert relative_error(out, rig.expected(first, num_tokens)) < bound


@pytest.mark.parametrize(("case", "bound"), [PATHS[1], PATHS[3]])
@pytest.mark.parametrize("first", [94, *_slowly(0, 64)])
def test_sinks_and_queries_that_grow_without_rotation(
    case: LayerCase, bound: float, first: int
) -> None:
    temperature = AttentionTemperature(period=16, slope=0.4)
    rig = _rig(case.having(num_rotated=0, temperature=temperature, has_sinks=True), first)
    for num_tokens in (1, 4):
        out = rig.decode(first, num_tokens)
        assert relative_error(out, rig.expected(first, num_tokens)) < bound


@pytest.mark.parametrize(("case", "num_tokens"), SHAPES)
def test_heads_of_any_shape(case: LayerCase, num_tokens: int) -> None:
    rig = _rig(case, 70)
    out = rig.decode(70, num_tokens)
    assert relative_error(out, rig.expected(70, num_tokens)) < FLOAT_BOUND


@pytest.mark.parametrize(("case", "bound"), [PATHS[1], PATHS[3], PATHS[4]])
def test_threads_and_blocks_may_run_in_any_order(case: LayerCase, bound: float) -> None:
    forward, backward = (_rig(case.having(runs_backward=last), 100) for last in (False, True))
    out = backward.decode(100, 3)
    assert relative_error(out, backward.expected(100, 3)) < bound
    np.testing.assert_array_equal(out, forward.decode(100, 3))


@pytest.mark.parametrize("case", [SMALL, SMALL.having(use_mma=True)])
def test_bits_of_a_token_do_not_depend_on_the_step_it_came_in(case: LayerCase) -> None:
    """Verifying a draft gives what decoding token by token gives."""
    together, alone = _rig(case, 61), _rig(case, 61)
    out = together.decode(61, 3)
    for token in range(3):
        np.testing.assert_array_equal(alone.decode(61 + token, 1)[0], out[token])


@pytest.mark.parametrize("kv_type", list(KvType))
def test_new_rows_are_stored_as_the_reference_stores_them(kv_type: KvType) -> None:
    rig = AttentionRig(SMALL.having(kv_type=kv_type))
    for position in range(3):
        rig.decode(position, 1)
    positions = np.arange(3, dtype=np.int32)
    keys, values = (cached_rows(kv_type, 3, num_heads=2, dim=32) for _ in range(2))
    keys.store(positions, rig.rotated(1, 0, 3).astype(np.float32))
    values.store(positions, rig.head_rows(2, 0, 3))
    # A byte of q8_0 may round to its neighbour where keys in float32 and float64 disagree.
    step = {KvType.F32: 2e-6, KvType.F16: 1e-3, KvType.Q8_0: 1e-2}[kv_type]
    cached_keys, cached_values = rig.cached()
    for head in range(2):
        np.testing.assert_allclose(
            cached_keys[head, :3], keys.load(positions, head), rtol=step, atol=4 * step
        )
        # Values are only converted: the same bits.
        np.testing.assert_array_equal(cached_values[head, :3], values.load(positions, head))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (SMALL, 0),
        (SMALL, 1),
        (SMALL.having(use_mma=True), 1),
        (SMALL.having(kv_type=KvType.Q8_0), 1),
        (SMALL.having(kv_type=KvType.Q8_0), 2),
        (SMALL.having(kv_type=KvType.Q8_0, use_mma=True), 2),
    ],
)
def test_what_is_no_number_shows(case: LayerCase, kind: int) -> None:
    """In a query, key or value (0, 1, 2) of the second of three tokens."""
    rig = _rig(case, 70)
    rig.head_rows(kind, 71, 1)[0, 0, 3] = np.nan
    first, second, third = (rig.decode(70 + token, 1)[0] for token in range(3))
    assert np.isfinite(first).all()
    assert np.isnan(second[0]).any()
    assert np.isnan(third[0]).any() == (kind != 0)
    # Only in heads that read it.
    assert np.isfinite(second[2:]).all()


def test_an_old_key_that_is_no_number_shows() -> None:
    rig = _rig(SMALL, 70)
    np.asarray(rig.cache.layers[0].keys.elements)[0, 5, 3] = np.nan
    out = rig.decode(70, 1)[0]
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()


def test_a_larger_bucket_serves_a_short_context() -> None:
    """Runs are as long in the first two buckets, so the bits are the same too."""
    rig, small = _rig(SMALL, 100), _rig(SMALL, 100)
    np.testing.assert_array_equal(rig.decode(100, 1, bucket=4096), small.decode(100, 1))


def test_rows_are_written_where_they_belong_and_nowhere_else() -> None:
    rig = _rig(SMALL, 37)
    before = np.asarray(rig.cache.layers[0].keys.elements).copy()
    rig.decode(37, 3)
    after = np.asarray(rig.cache.layers[0].keys.elements)
    changed = (before.view(np.uint16) != after.view(np.uint16)).any(axis=(0, 2))
    assert np.flatnonzero(changed).tolist() == [37, 38, 39]


@pytest.mark.parametrize("case", [SMALL, SMALL.having(lanes=64)])
def test_results_as_int8_rows(case: LayerCase) -> None:
    """A scale and its sum for every 16, as the output projection reads them; then a NaN."""
    rig = _rig(case, 37)
    columns = 4 * 32
    out = StepRows(
        quants=rig.device.empty((1, 256), np.int8),
        meta=rig.device.empty((1, 16, 2), np.float32),
        values=rig.device.empty((1, columns), np.float32),
    )
    rig.decode_into(out, 37, 1)
    values = np.asarray(out.values).reshape(-1, 16)
    quants = np.asarray(out.quants)[0, :columns].reshape(-1, 16).astype(np.float32)
    scales, scaled_sums = np.asarray(out.meta)[0, : columns // 16].T
    assert np.abs(quants).max(axis=1).tolist() == [127] * len(quants)
    np.testing.assert_allclose(scales, np.abs(values).max(axis=1) / 127, rtol=1e-6)
    np.testing.assert_allclose(scaled_sums, scales * quants.sum(axis=1), rtol=1e-6)
    assert (np.abs(quants * scales[:, None] - values) <= 0.51 * scales[:, None]).all()

    rig.head_rows(1, 38, 1)[0, 0, 3] = np.nan
    rig.decode_into(out, 38, 1)
    scales = np.asarray(out.meta)[0, : columns // 16, 0]
    assert np.isnan(scales[: len(scales) // 2]).all()
    assert np.isfinite(scales[len(scales) // 2 :]).all()
