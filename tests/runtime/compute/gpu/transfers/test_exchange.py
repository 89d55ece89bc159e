"""Boxes that host and device see, and steps of experts that are captured with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.batch import group_by_expert
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F64Array, Phase
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import Graph, KernelDevice
from dflash_runtime.compute.gpu.experts import experts
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.transfers import exchange
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY
from support.gpu_devices import EMULATED_AND_GPU, opened_device
from support.random_models import write_qwen3moe

TOKENS, HIDDEN, USED = 3, 100, 5
"""Rows and choices that are no multiple of what one thread, or all of them, move at a time."""


@pytest.fixture(params=EMULATED_AND_GPU)
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with opened_device(request.param) as opened:
        yield opened


@pytest.fixture
def box(device: KernelDevice) -> Iterator[StepBox]:
    box = StepBox(device, num_tokens=TOKENS, hidden_size=HIDDEN, num_used=USED)
    yield box
    device.synchronize()
    box.close()
    box.close()


def test_what_a_device_gives_is_there_when_the_host_is_told(
    device: KernelDevice, box: StepBox
) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, 99, (TOKENS, USED)).astype(np.int32)
    weights = rng.random((TOKENS, USED)).astype(np.float32)
    choice = Choice(device.upload(ids), device.upload(weights))
    exchanger = Exchanger(device)
    for _ in range(2):
        for array in (box.rows, box.ids, box.weights):
            array.fill(-1)
        box.expect()
        exchanger.give(box, device.upload(rows), choice)
        box.wait()
        np.testing.assert_array_equal(box.rows, rows)
        np.testing.assert_array_equal(box.ids, ids)
        np.testing.assert_array_equal(box.flat_weights.reshape(TOKENS, USED), weights)
    sums = rng.standard_normal((TOKENS, HIDDEN))
    box.expect()
    exchanger.give_sums(box, device.upload(sums))
    box.wait()
    np.testing.assert_array_equal(box.sums, sums)


def test_what_the_host_has_written_is_taken(device: KernelDevice, box: StepBox) -> None:
    rng = np.random.default_rng(2)
    box.rows[...] = rng.standard_normal(box.rows.shape)
    box.ids[...] = rng.integers(0, 99, box.ids.shape)
    box.weights[...] = rng.random(box.weights.shape)
    rows, weights = (device.empty(x.shape, np.float32) for x in (box.rows, box.weights))
    ids = device.empty(box.ids.shape, np.int32)
    Exchanger(device).take(box, rows, Choice(ids, weights))
    for taken, written in ((rows, box.rows), (ids, box.ids), (weights, box.weights)):
        np.testing.assert_array_equal(device.download(taken), written)


def test_arrays_of_other_shapes_are_refused(device: KernelDevice, box: StepBox) -> None:
    sums = device.empty((TOKENS, HIDDEN + 1), np.float64)
    with pytest.raises(ValueError, match=r"\bsource\b.* float64"):
        Exchanger(device).give_sums(box, sums)


def test_work_that_ends_without_a_word_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_TIMEOUT_S", 0.01)
    box = StepBox(EmulatedDevice(), num_tokens=1, hidden_size=32, num_used=1)
    box.expect()
    with pytest.raises(DeviceUnavailable, match="result"):
        box.wait()
    box.close()


class Layer:
    """One layer's experts on an emulated device, and how they are asked."""

    def __init__(self, folder: Path) -> None:
        self.device = EmulatedDevice()
        self.backend = CupyBackend(self.device, max_chunk=20, scratch_bytes=1 << 20)
        self.file = GgufFile.open(write_qwen3moe(folder / "m.gguf", TINY, seed=3))
        self.layer = read_spec(self.file).moe.layers[0]
        self.rows = np.random.default_rng(4).standard_normal((9, TINY.hidden_size), np.float32)

    def load(self) -> CupyExpertBank:
        every = np.arange(TINY.num_experts, dtype=np.int32)
        return self.backend.load_experts(self.file, self.layer, every)

    def sums(self, bank: CupyExpertBank, tokens: slice, *, num_pairs: int = 2) -> F64Array:
        """Of tokens that have chosen the first experts."""
        rows = self.rows[tokens]
        count = rows.shape[0]
        batch = group_by_expert(
            rows,
            np.repeat(np.arange(count, dtype=np.int32), num_pairs),
            np.tile(np.arange(num_pairs, dtype=np.int32), count),
            weights=np.full(count * num_pairs, 0.5, np.float32),
            phase=Phase.DECODE,
        )
        out = np.full(rows.shape, 1.0)
        bank.accumulate(batch, out)
        return out

    def close(self) -> None:
        self.backend.close()
        self.file.close()


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Layer]:
    layer = Layer(tmp_path)
    yield layer
    layer.close()


def test_a_step_has_the_same_bits_however_many_tokens_it_has(layer: Layer) -> None:
    bank = layer.load()
    whole = layer.sums(bank, slice(0, 9))
    assert (whole != 1.0).all()
    for tokens in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 7), slice(1, 9)):
        np.testing.assert_array_equal(layer.sums(bank, tokens), whole[tokens])
    # What the step before it has left behind is no part of it.
    fewer = layer.sums(bank, slice(3, 4), num_pairs=1)
    layer.sums(bank, slice(0, 1))
    np.testing.assert_array_equal(layer.sums(bank, slice(3, 4), num_pairs=1), fewer)
    assert (fewer != whole[3:4]).any()


def test_a_token_with_too_many_pairs_is_refused(layer: Layer) -> None:
    bank = layer.load()
    for tokens in (slice(0, 1), slice(0, 2)):
        with pytest.raises(ValueError, match=r"\b3 pairs\b.*\b2 experts"):
            layer.sums(bank, tokens, num_pairs=3)


def test_few_recordings_are_kept_and_none_of_banks_that_are_gone(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_MOST_CAPTURES", 2)
    closed: list[Graph] = []
    capture = layer.device.capture
    monkeypatch.setattr(layer.device, "capture", lambda record: noted(capture(record), closed))
    bank = layer.load()
    first = layer.sums(bank, slice(0, 1))
    for size in (2, 3, 1, 2):  # each but the last has to make room
        layer.sums(bank, slice(0, size))
    assert len(closed) == 3
    np.testing.assert_array_equal(layer.sums(bank, slice(0, 1)), first)
    del bank
    gc.collect()
    layer.backend.drop_experts(layer.file, layer.layer, np.arange(5, dtype=np.int32))
    assert len(closed) == 5


def noted(graph: Graph, closed: list[Graph]) -> Graph:
    """A graph that tells when it is closed."""
    close = graph.close

    def close_noted() -> None:
        closed.append(graph)
        close()

    graph.close = close_noted  # type: ignore[method-assign]
    return graph
