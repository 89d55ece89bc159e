"""How attention's work is cut, and which shapes and arrays are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_adapters.rope import RopePairing
from dflash_adapters.spec import KvLayer
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.layers.attention import DecodeAttention, PrefillAttention
from dflash_runtime.compute.gpu.layers.attention_args import NewRows
from dflash_runtime.compute.gpu.layers.attention_plan import (
    AttentionShape,
    DecodePlan,
    PrefillPlan,
    context_bucket,
)
from dflash_runtime.compute.kv_cache import KvType
from support.attention_rig import AttentionRig, LayerCase

QWEN3 = AttentionShape(
    num_heads=32,
    kv=KvLayer(num_heads=4, key_dim=128, value_dim=128),
    kv_type=KvType.F16,
    pairing=RopePairing.HALF_SPLIT,
    num_rotated=128,
    use_mma=True,
)


@pytest.mark.parametrize(
    ("num_positions", "bucket"), [(1, 1024), (1024, 1024), (1025, 4096), (40_000, 65_536)]
)
def test_a_context_has_a_bucket(num_positions: int, bucket: int) -> None:
    assert context_bucket(num_positions) == bucket


@pytest.mark.wide(1)
@pytest.mark.parametrize("bucket", [1024, 4096, 16_384, 65_536, 262_144])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
def test_splits_cover_a_bucket_and_do_not_depend_on_the_step(
    bucket: int, num_kv_heads: int
) -> None:
    shape = replace(QWEN3, kv=KvLayer(num_kv_heads, 128, 128))
    plans = [DecodePlan(shape, num_tokens, bucket) for num_tokens in range(1, 9)]
    assert {plan.split_keys for plan in plans} == {plans[0].split_keys}
    assert plans[0].num_splits * plans[0].split_keys == bucket
    assert plans[0].split_keys & (plans[0].split_keys - 1) == 0
    assert plans[0].num_splits * num_kv_heads <= 1024
    for plan in plans:
        assert plan.grid[2] * plan.row_warps * 8 >= plan.num_tokens * shape.group
        assert (plan.grid[2] - 1) * plan.row_warps * 8 < plan.num_tokens * shape.group
        assert plan.threads(32) <= 512


def test_a_long_chunk_takes_large_blocks() -> None:
    assert PrefillPlan.of(QWEN3, 4096, num_multiprocessors=132).row_tiles == 2
    assert PrefillPlan.of(QWEN3, 64, num_multiprocessors=132).row_tiles == 1
    wide = replace(QWEN3, kv=KvLayer(4, 256, 256))
    assert PrefillPlan.of(wide, 4096, num_multiprocessors=132).row_tiles == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 30}, "share"),
        ({"num_rotated": 130}, "rotated"),
        ({"num_rotated": 3}, "rotated"),
        ({"kv_type": KvType.F32}, "tensor cores"),
        ({"kv": KvLayer(4, 288, 128)}, r"\b288\b"),
    ],
)
def test_a_shape_that_kernels_cannot_take_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(QWEN3, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_tokens", "bucket"), [(0, 1024), (9, 1024), (1, 1000)])
def test_a_step_that_is_none_is_refused(num_tokens: int, bucket: int) -> None:
    with pytest.raises(ValueError, match=r"T=|bucket"):
        DecodePlan(QWEN3, num_tokens, bucket)


def test_a_device_with_too_little_shared_memory_is_refused() -> None:
    rig = AttentionRig(
        LayerCase(key_dim=32, value_dim=32, num_rotated=32, use_mma=True, max_shared_bytes=8 * 1024)
    )
    with pytest.raises(SettingsError, match="shared memory"):
        PrefillAttention(rig.device, rig.case.shape)


def test_int8_rows_of_broken_granules_are_refused() -> None:
    rig = AttentionRig(LayerCase(num_heads=4, key_dim=32, value_dim=24, num_rotated=32))
    out = StepRows(
        quants=rig.device.empty((1, 256), np.int8),
        meta=rig.device.empty((1, 16, 2), np.float32),
    )
    with pytest.raises(ValueError, match="granules"):
        rig.decode_into(out, 0, 1)


def _with_rows(**changes: object) -> dict[str, object]:
    return {"rows": changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": np.zeros(1, np.int64)}, "positions"),
        ({"positions": np.zeros(0, np.int32)}, "positions"),
        ({"scratch": np.zeros(16, np.uint8)}, "scratch"),
        ({"out": StepRows(values=np.zeros((1, 5, 32), np.float32))}, "out"),
        ({"out": StepRows(values=np.zeros((2, 4, 16), np.float32))}, "out"),
        ({"out": StepRows(quants=np.zeros((1, 128), np.int8))}, "out.quants"),
        ({"out": StepRows(quants=np.zeros((1, 256), np.int8))}, r"out\.meta\b.*missing"),
        (_with_rows(queries=np.zeros((2, 128), np.float32)), "queries"),
        (_with_rows(keys=np.zeros((1, 63), np.float32)), "keys"),
        (_with_rows(values=np.zeros((1, 64), np.float64)), "values"),
        (_with_rows(key_weight=np.zeros(31, np.float32)), "key_weight"),
        (_with_rows(angles=np.zeros((192, 15, 2), np.float32)), "pairs=16"),
        (_with_rows(angles=np.zeros((191, 16, 2), np.float32)), r"\b191\b.*\b192 positions"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    case = LayerCase(num_heads=4, key_dim=32, value_dim=32, num_rotated=32)
    rig = AttentionRig(case)
    plan = DecodePlan(case.shape, 1, 1024)
    attention = DecodeAttention(rig.device, plan)
    rows = rig.new_rows(0, 1)
    given: dict[str, object] = {
        "positions": rig.device.upload(np.zeros(1, np.int32)),
        "scratch": rig.device.empty(plan.scratch_bytes, np.uint8),
        "out": StepRows(values=rig.device.empty((1, 4, 32), np.float32)),
    }
    row_changes = changes.get("rows", {})
    assert isinstance(row_changes, dict)
    changed: NewRows = replace(rows, **row_changes)
    arrays = given | {name: value for name, value in changes.items() if name != "rows"}
    with pytest.raises(ValueError, match=message):
        attention.launch(changed, rig.cache.layers[0], **arrays)  # type: ignore[arg-type]
    attention.launch(rows, rig.cache.layers[0], **given)  # type: ignore[arg-type]


def test_a_cache_of_another_layer_is_refused() -> None:
    rig = AttentionRig(LayerCase(num_heads=4, key_dim=32, value_dim=32, num_rotated=32))
    other = AttentionRig(LayerCase(num_heads=4, num_rotated=64))
    rig.cache = other.cache
    with pytest.raises(ValueError, match="compiled for"):
        rig.decode(0, 1)
