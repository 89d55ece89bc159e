"""Memory of keys and values on a device: what it takes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.spec import KvLayer
from dflash_protocol.errors import ContextExceeded, SettingsError
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.kv_rows import layer_bytes
from dflash_runtime.compute.kv_cache import KvType
from support.emulated_device import EmulatedDevice

LAYERS = (KvLayer(num_heads=2, key_dim=80, value_dim=40), KvLayer(1, 64, 64))


@pytest.mark.parametrize(
    ("kv_type", "row_bytes"),
    [
        (KvType.F32, (4 * 80, 4 * 48, 4 * 64)),
        (KvType.F16, (2 * 80, 2 * 48, 2 * 64)),
        (KvType.Q8_0, (96 + 6, 64 + 4, 64 + 4)),
    ],
)
def test_bytes_are_counted_and_loads_are_aligned(
    kv_type: KvType, row_bytes: tuple[int, int, int]
) -> None:
    cache = DeviceKvCache(EmulatedDevice(), LAYERS, capacity=100, kv_type=kv_type)
    keys, values, others = row_bytes
    assert cache.nbytes == 100 * (2 * (keys + values) + 2 * others)
    assert cache.nbytes == sum(layer_bytes(kv, 100, kv_type) for kv in LAYERS)
    held = [
        np.asarray(array).nbytes
        for layer in cache.layers
        for rows in (layer.keys, layer.values)
        for array in (rows.elements, rows.scales)
        if array is not None
    ]
    assert sum(held) == cache.nbytes
    assert cache.capacity == 100
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            elements = np.asarray(rows.elements)
            assert elements.ctypes.data % 16 == 0
            assert elements.strides[1] % 16 == 0


@pytest.mark.parametrize("capacity", [0, -1, 1 << 40])
def test_a_capacity_that_cannot_be_is_refused(capacity: int) -> None:
    with pytest.raises(SettingsError, match="positions"):
        DeviceKvCache(EmulatedDevice(), LAYERS, capacity=capacity, kv_type=KvType.F16)


@pytest.mark.parametrize("kv", [KvLayer(2, 257, 64), KvLayer(2, 64, 0), KvLayer(0, 64, 64)])
def test_heads_that_kernels_cannot_take_are_refused(kv: KvLayer) -> None:
    with pytest.raises(SettingsError, match="heads"):
        DeviceKvCache(EmulatedDevice(), (LAYERS[0], kv), capacity=100, kv_type=KvType.F16)


def test_tokens_must_fit() -> None:
    cache = DeviceKvCache(EmulatedDevice(), LAYERS, capacity=100, kv_type=KvType.F16)
    cache.check_fits(96, 4)
    with pytest.raises(ContextExceeded) as caught:
        cache.check_fits(97, 4)
    assert (caught.value.num_tokens, caught.value.num_positions) == (101, 100)
    with pytest.raises(ValueError, match="position -1"):
        cache.check_fits(-1, 1)
