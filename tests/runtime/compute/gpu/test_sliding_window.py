"""Layers with a window or a chunk on a device, emulated: windows of the last positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dflash_adapters.spec import KvLayer, Mask
from dflash_protocol.errors import CheckpointMissing
from dflash_protocol.ids import AnyArray, F32Array, Phase
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.gpu.device.buffers import Buffers
from dflash_runtime.compute.gpu.layers.attention import AttentionForm, AttentionLauncher
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.kv_rows import bytes_with_snapshots, layer_bytes
from dflash_runtime.compute.gpu.layers.placed_step import place
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step
from dflash_runtime.compute.sliding_window import MOST_KEPT
from support.emulated_device import EmulatedDevice
from support.float64_attention import attended

NUM_TOKENS, CAPACITY = 100, 400
SCALE = 0.3
RANDOM = np.random.default_rng(1)
QUERIES, KEYS, VALUES = (
    RANDOM.standard_normal((NUM_TOKENS, heads, 16), np.float32) for heads in (4, 2, 2)
)
WINDOW, CHUNK = Mask(window=10), Mask(chunk=14)
CASES = (
    (KvType.F32, WINDOW, 32),
    (KvType.F16, CHUNK, 32),  # on tensor cores
    (KvType.Q8_0, Mask(window=9, chunk=20), 64),
)
"""Types, masks, and lanes of the device."""


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 18)
    monkeypatch.setattr(sliding_window, "_ROW_UNIT", 16)


class Sequence:
    """One layer's attention over the rows above, from anywhere to anywhere."""

    def __init__(self, kv_type: KvType, mask: Mask, lanes: int) -> None:
        self.device = EmulatedDevice(lanes=lanes, runs_backward=lanes == 64)
        self.attention = AttentionLauncher(self.device, Buffers(self.device))
        self.kv = KvLayer(2, 16, 16, mask)
        self.cache = DeviceKvCache(self.device, (self.kv,), capacity=CAPACITY, kv_type=kv_type)

    def go_on(self, *ends: int) -> F32Array:
        """Computed in parts. Shapes: result [T, heads * 16]."""
        device, form, found = self.device, AttentionForm(QUERIES.shape[1], SCALE), []
        for first, last in pairwise(ends):
            num_tokens = last - first
            q, k, v = (
                device.upload(rows[first:last].reshape(num_tokens, -1))
                for rows in (QUERIES, KEYS, VALUES)
            )
            ids = np.zeros(num_tokens, np.int32)
            step = Step.of_chunk(ids, first, self.cache, Phase.PREFILL)
            out = Rows(device.empty(q.shape, np.float32))
            placed = place(step, device, vocab_size=1)
            self.attention.launch(form, (q, k, v), placed, cache_layer=0, out=out)
            found.append(device.download(out.array))
        return np.concatenate(found)


def expected(mask: Mask) -> AnyArray:
    found = attended(
        QUERIES.astype(np.float64) * SCALE,
        KEYS.swapaxes(0, 1),
        VALUES.swapaxes(0, 1),
        np.arange(NUM_TOKENS, dtype=np.int32),
        mask=mask,
    )
    return found.reshape(NUM_TOKENS, -1)


@pytest.mark.parametrize(("kv_type", "mask", "lanes"), CASES)
def test_tokens_see_what_they_would_without_a_ring(kv_type: KvType, mask: Mask, lanes: int) -> None:
    sequence = Sequence(kv_type, mask, lanes)
    (layer,) = sequence.cache.layers
    assert layer.window_rows == layer.keys.elements.shape[1] == 32
    assert sequence.cache.nbytes == layer_bytes(sequence.kv, CAPACITY, kv_type)
    in_whole = layer_bytes(KvLayer(2, 16, 16), CAPACITY, kv_type)
    assert sequence.cache.nbytes * CAPACITY == in_whole * 32
    bound = {KvType.F32: 3e-6, KvType.F16: 5e-3, KvType.Q8_0: 2e-2}[kv_type]
    wanted = expected(mask)
    steps = [*range(31, 50), 55, 60, 61]
    found = sequence.go_on(0, 3, 30, *steps, NUM_TOKENS)
    assert np.abs(found - wanted).max() < bound
    # In steps of five tokens, one of which goes over the window's end, and one by one: same bits.
    assert (sequence.go_on(0, 30, 35, 40, 45, 50)[30:] == found[30:50]).all()


@pytest.mark.parametrize(("kv_type", "mask", "lanes"), CASES)
def test_a_ring_goes_on_from_a_snapshot_with_the_same_bits(
    kv_type: KvType, mask: Mask, lanes: int
) -> None:
    sequence = Sequence(kv_type, mask, lanes)
    cache = sequence.cache
    sequence.go_on(0, 30)
    older = cache.snapshot(30)
    assert older.nbytes == cache.nbytes
    sequence.go_on(30, 35)
    before = sequence.device.num_bytes
    snapshot = cache.snapshot(35, older)
    assert (snapshot.num_positions, sequence.device.num_bytes) == (35, before)
    wanted = sequence.go_on(35, 40, NUM_TOKENS)
    for lost in (cache.snapshot, cache.begin_step):
        with pytest.raises(CheckpointMissing):
            lost(35)
    with pytest.raises(CheckpointMissing):
        sequence.go_on(35, 36)
    for _ in range(2):
        cache.restore(snapshot)
        assert (sequence.go_on(35, 40, NUM_TOKENS) == wanted).all()


def test_recorded_steps_count_as_others_do() -> None:
    """Those that were started too much can be taken back, as long as nothing of it is gone."""
    sequence = Sequence(*CASES[0])
    cache = sequence.cache
    sequence.go_on(0, 50)
    cache.begin_step(50)
    for _ in range(20):
        cache.count_step()
    assert [cache.can_resume(each) for each in (70, 60, 47, 46, 0)] == [
        True,
        True,
        True,
        False,
        True,
    ]
    cache.begin_step(60)
    cache.count_step()
    assert cache.can_resume(61)
    with pytest.raises(CheckpointMissing):
        cache.begin_step(46)
    cache.begin_step(0)
    cache.count_step()
    assert cache.can_resume(1)


@pytest.mark.parametrize("kv_type", KvType)
def test_there_is_a_ring_where_it_takes_no_more_memory_with_its_snapshots(kv_type: KvType) -> None:
    device = EmulatedDevice()
    layer, plain = KvLayer(2, 16, 16, WINDOW), KvLayer(2, 16, 16)
    for capacity, num_rows in ((30, 30), (159, 159), (160, 32), (1000, 32)):
        cache = DeviceKvCache(device, [layer], capacity=capacity, kv_type=kv_type)
        assert cache.layers[0].num_rows == num_rows
        assert cache.layers[0].window_rows == (num_rows if num_rows < capacity else 0)
        assert cache.nbytes == layer_bytes(plain, num_rows, kv_type)
        snapshot = cache.snapshot(0)
        assert snapshot.nbytes == (cache.nbytes if num_rows < capacity else 0)
        all_bytes = bytes_with_snapshots(layer, capacity, kv_type)
        assert all_bytes == cache.nbytes + MOST_KEPT * snapshot.nbytes
        assert all_bytes <= layer_bytes(plain, capacity, kv_type)
