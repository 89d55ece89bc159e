"""Attention of chunks of a prompt, emulated, against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.rope import AttentionTemperature, RopePairing
from dflash_adapters.spec import Mask
from dflash_runtime.compute.gpu.layers.attention_plan import PrefillPlan
from dflash_runtime.compute.kv_cache import KvType
from support.attention_rig import AttentionRig, LayerCase, relative_error

SMALL = LayerCase(num_heads=4, key_dim=32, value_dim=32, num_rotated=32)

FLOAT_BOUND = 3e-6
HALVES_BOUND = 5e-3
"""Of tensor cores, which take queries, keys, probabilities and values as halves."""

CASES = (
    (SMALL.having(kv_type=KvType.F32), FLOAT_BOUND),
    (SMALL.having(lanes=64), FLOAT_BOUND),
    # An odd number of scales, of which the last are used too.
    (
        SMALL.having(num_heads=3, num_kv_heads=1, kv_type=KvType.Q8_0, capacity=117),
        FLOAT_BOUND,
    ),
    (SMALL.having(use_mma=True), HALVES_BOUND),
    (SMALL.having(kv_type=KvType.Q8_0, use_mma=True), HALVES_BOUND),
    # Odd sizes; keys whose last step of 32 is half empty; values of more than one span of 64.
    (
        SMALL.having(
            num_heads=3,
            num_kv_heads=1,
            key_dim=42,
            value_dim=74,
            num_rotated=20,
            pairing=RopePairing.INTERLEAVED,
            has_norm=False,
            use_mma=True,
        ),
        HALVES_BOUND,
    ),
)


@pytest.mark.wide(1)
@pytest.mark.parametrize(("case", "bound"), CASES)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 1),
        (37, 40),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 16), (100, 17))),
    ],
)
def test_a_chunk_attends_to_all_before_and_inside_it(
    case: LayerCase, bound: float, first: int, count: int
) -> None:
    rig = AttentionRig(case)
    rig.fill_cache(first)
    out = rig.prefill(first, count)
    assert relative_error(out, rig.expected(first, count)) < bound


@pytest.mark.parametrize("mask", [Mask(window=5), Mask(window=40), Mask(chunk=24)])
@pytest.mark.parametrize(("case", "bound"), [CASES[0], CASES[3]])
def test_what_a_mask_hides_is_not_seen(case: LayerCase, bound: float, mask: Mask) -> None:
    rig = AttentionRig(case.having(mask=mask))
    rig.fill_cache(37)
    out = rig.prefill(37, 60)
    assert relative_error(out, rig.expected(37, 60)) < bound


@pytest.mark.parametrize(("case", "bound"), [CASES[0], CASES[3]])
def test_sinks_and_queries_that_grow_without_rotation(case: LayerCase, bound: float) -> None:
    temperature = AttentionTemperature(period=16, slope=0.4)
    rig = AttentionRig(case.having(num_rotated=0, temperature=temperature, has_sinks=True))
    rig.fill_cache(37)
    out = rig.prefill(37, 60)
    assert relative_error(out, rig.expected(37, 60)) < bound


@pytest.mark.parametrize("case", [SMALL, SMALL.having(use_mma=True)])
def test_bits_of_a_row_do_not_depend_on_its_chunk(case: LayerCase) -> None:
    whole, parts = AttentionRig(case), AttentionRig(case)
    out = whole.prefill(0, 90)
    at = 0
    for count in (1, 16, 40, 33):
        np.testing.assert_array_equal(parts.prefill(at, count), out[at : at + count])
        at += count
    np.testing.assert_array_equal(whole.cached(), parts.cached())


def test_large_and_small_blocks_give_the_same_bits() -> None:
    """Blocks are larger where there are enough of them for the device's four multiprocessors."""
    case = SMALL.having(use_mma=True)
    large, small = AttentionRig(case), AttentionRig(case)
    out = large.prefill(0, 80)
    assert large.row_tiles(80) == 2
    assert small.row_tiles(16) == 1
    for at in range(0, 80, 16):
        np.testing.assert_array_equal(small.prefill(at, 16), out[at : at + 16])


@pytest.mark.parametrize("case", [SMALL, SMALL.having(use_mma=True)])
def test_threads_and_blocks_may_run_in_any_order(case: LayerCase) -> None:
    forward, backward = (AttentionRig(case.having(runs_backward=last)) for last in (False, True))
    np.testing.assert_array_equal(backward.prefill(0, 50), forward.prefill(0, 50))


def test_copies_may_be_early_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged tiles come as late as the waits allow, everywhere else; here at once."""
    case = SMALL.having(use_mma=True)
    late = AttentionRig(case).prefill(0, 70)
    defines = PrefillPlan.defines
    monkeypatch.setattr(PrefillPlan, "defines", lambda plan: defines(plan) | {"COPY_EARLY": 1})
    np.testing.assert_array_equal(AttentionRig(case).prefill(0, 70), late)


@pytest.mark.parametrize("case", [SMALL, SMALL.having(use_mma=True)])
def test_decoding_goes_on_where_a_chunk_ended(case: LayerCase) -> None:
    rig = AttentionRig(case)
    rig.prefill(0, 45)
    out = rig.decode(45, 3)
    assert relative_error(out, rig.expected(45, 3)) < FLOAT_BOUND


@pytest.mark.parametrize("case", [SMALL, SMALL.having(use_mma=True)])
def test_what_is_no_number_shows(case: LayerCase) -> None:
    rig = AttentionRig(case)
    rig.head_rows(1, 20, 1)[0, 0, 3] = np.nan
    out = rig.prefill(0, 40)
    assert np.isfinite(out[:20]).all()
    assert np.isnan(out[20:, :2]).any(axis=(1, 2)).all()
    assert np.isfinite(out[20:, 2:]).all()


def test_what_was_in_the_cache_before_does_not_matter() -> None:
    """After truncating, rows are written over."""
    rig, fresh = AttentionRig(SMALL), AttentionRig(SMALL)
    rig.fill_cache(150)
    np.testing.assert_array_equal(rig.prefill(0, 50), fresh.prefill(0, 50))
