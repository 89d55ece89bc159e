"""What the reference backend's caches return."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.attention import cached_rows


@pytest.mark.parametrize("dim", [32, 96, 33, 1])
def test_q8_0_is_ggufs(dim: int) -> None:
    values = np.random.default_rng(dim).standard_normal((5, 2, dim)).astype(np.float32)
    values[0, 0] = 0
    rows = cached_rows(KvType.Q8_0, 7, num_heads=2, dim=dim)
    rows.store(np.arange(1, 6, dtype=np.int32), values)
    padded = np.zeros((5, 2, -(-dim // 32) * 32), np.float32)
    padded[..., :dim] = values
    blocks = quantize(padded, GGMLQuantizationType.Q8_0)
    expected = dequantize(blocks, GGMLQuantizationType.Q8_0)[..., :dim]
    for head in range(2):
        got = rows.load(np.arange(6, dtype=np.int32), head)
        np.testing.assert_array_equal(got[0], 0)
        np.testing.assert_array_equal(got[1:], expected[:, head])


@pytest.mark.parametrize(("kv_type", "dtype"), [(KvType.F32, np.float32), (KvType.F16, np.float16)])
def test_floats_are_rounded_once(kv_type: KvType, dtype: type[np.floating]) -> None:
    values = np.random.default_rng(0).standard_normal((3, 2, 10)).astype(np.float32)
    rows = cached_rows(kv_type, 3, num_heads=2, dim=10)
    rows.store(np.arange(3, dtype=np.int32), values)
    for head in range(2):
        np.testing.assert_array_equal(
            rows.load(np.arange(3, dtype=np.int32), head), values[:, head].astype(dtype)
        )
