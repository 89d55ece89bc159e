"""Rows of files on a device: the same bytes, whether the driver or threads copy them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS, scratch_of_chunk
from dflash_runtime.compute.gpu.launch.layouts import is_native, row_bytes
from dflash_runtime.compute.gpu.layers import matrix
from dflash_runtime.compute.gpu.layers.matrix import STAGED_BYTES, Uploader
from dflash_runtime.compute.gpu.transfers.weight_copier import WeightCopier
from support.counting_device import PooledDevice

COLUMNS = 256
ROWS = (1, 7, 64, 3, 200)
"""Of arrays; together more than a stage has room for."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PooledDevice:
    monkeypatch.setattr(matrix, "STAGED_BYTES", 50 * TensorType.Q6_K.row_bytes(COLUMNS))
    monkeypatch.setattr(matrix, "_LEAST_COPIED_BYTES", 2000)
    return PooledDevice()


def filled(
    uploader: Uploader, device: PooledDevice, tensor_type: TensorType, seed: int = 1
) -> tuple[U8Array, U8Array]:
    """What is on the device behind `fill`, and what was uploaded."""
    native = tensor_type.row_bytes(COLUMNS)
    random = np.random.default_rng(seed)
    raws = [random.integers(0, 256, rows * native, np.uint8) for rows in ROWS]
    weights = device.zeros((sum(ROWS) + 1) * row_bytes(tensor_type, COLUMNS), np.uint8)
    uploader.fill(weights, raws, tensor_type, columns=COLUMNS)
    return device.download(weights), np.concatenate(raws)


@pytest.mark.parametrize(
    "tensor_type", [TensorType.Q4_K, TensorType.F32, TensorType.Q6_K, TensorType.Q8_0]
)
def test_threads_copy_what_the_driver_does(device: PooledDevice, tensor_type: TensorType) -> None:
    uploader = Uploader(device)
    plain, raw = filled(uploader, device, tensor_type)
    with uploader.copying():
        for seed in (1, 2, 1):
            found, _ = filled(uploader, device, tensor_type, seed)
        with uploader.copying():
            again, _ = filled(uploader, device, tensor_type)
        assert uploader._copier is not None
        assert uploader._copier.num_bytes == 4 * raw.size
    assert uploader._copier is None
    assert (found == plain).all()
    assert (again == plain).all()
    if is_native(tensor_type, COLUMNS):  # Q4_K and F32
        assert (plain[: raw.size] == raw).all()
    assert (plain[sum(ROWS) * row_bytes(tensor_type, COLUMNS) :] == 0).all()


def test_rows_that_are_laid_out_are_those_of_their_own_stage(
    device: PooledDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is begun to be filled only behind a mark after which its rows were laid out."""
    events: list[tuple[str, int]] = []
    begin, lay_out = WeightCopier.begin, Uploader.lay_out

    def begins(self: WeightCopier, sources: object, place: U8Array, **options: object) -> object:
        events.append(("fill", place.ctypes.data))
        return begin(self, sources, place, **options)  # type: ignore[arg-type]

    def lays_out(self: Uploader, native: U8Array, *given: object, **options: object) -> None:
        events.append(("lay out", native.ctypes.data))
        lay_out(self, native, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightCopier, "begin", begins)
    monkeypatch.setattr(Uploader, "lay_out", lays_out)
    uploader = Uploader(device)
    with uploader.copying():
        filled(uploader, device, TensorType.Q6_K)
    places = {place for _, place in events}
    assert len(places) == 2
    for place in places:
        kinds = [kind for kind, at in events if at == place]
        assert kinds == ["fill", "lay out"] * (len(kinds) // 2)
    assert [kind for kind, _ in events[:3]] == ["fill", "fill", "lay out"]


@pytest.mark.parametrize("locks", [True, False])
def test_stages_leave_no_memory_behind(
    device: PooledDevice, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """An array that is loaded after a stage was freed is not cut from it."""
    if not locks:
        monkeypatch.setattr(matrix, "WeightCopier", _refused)
    monkeypatch.setattr(matrix, "STAGED_BYTES", 12 << 20)
    tensor_type = TensorType.Q6_K
    native, kept, needed = tensor_type.row_bytes(COLUMNS), [], 0
    uploader = Uploader(device)
    for num_bytes in (1 << 20, 5 << 20, 3 << 20, 14 << 20, 7 << 20):
        rows = num_bytes // native
        with uploader.copying():
            for _ in range(2):
                weights = device.empty(rows * row_bytes(tensor_type, COLUMNS), np.uint8)
                raw = np.zeros(rows * native, np.uint8)
                uploader.fill(weights, [raw], tensor_type, columns=COLUMNS)
                kept.append(weights)
                needed += -(-weights.nbytes // (2 << 20)) * (2 << 20)
    device.trim()
    assert device.pool.total_bytes <= needed
    assert device.pool.peak_bytes <= needed + matrix.STAGED_BYTES + (2 << 20)


def test_stages_fit_where_chunks_are_computed_afterwards() -> None:
    """Predicted memory has no room of their own for them."""
    assert min(map(scratch_of_chunk, GPU_CHUNKS)) >= STAGED_BYTES


def _refused(*_: object) -> WeightCopier:
    raise DeviceUnavailable("no memory can be locked")


def test_without_locked_memory_the_driver_copies_which_is_said_once(
    device: PooledDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploader = Uploader(device)
    plain, _ = filled(uploader, device, TensorType.Q6_K)
    monkeypatch.setattr(matrix, "WeightCopier", _refused)
    with caplog.at_level(logging.INFO, matrix.__name__):
        for _ in range(3):
            with uploader.copying():
                found, _ = filled(uploader, device, TensorType.Q6_K)
    assert (found == plain).all()
    names = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert names == [device.name]


def test_an_interrupt_while_weights_come_ends_the_threads(
    device: PooledDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    uploader = Uploader(device)
    monkeypatch.setattr(Uploader, "lay_out", interrupted)
    with pytest.raises(KeyboardInterrupt), uploader.copying():
        filled(uploader, device, TensorType.Q6_K)
    assert uploader._copier is None
    assert uploader._staging is None
