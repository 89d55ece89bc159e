"""Memory of results: taken again when it is free, and once more in the order of a trial."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_runtime.compute.gpu.device.buffers import Buffer, Buffers
from dflash_runtime.compute.gpu.device.device import DeviceArray
from support.emulated_device import EmulatedDevice


def test_an_array_is_taken_again_when_nobody_holds_it() -> None:
    buffers = Buffers(EmulatedDevice())
    first, second = buffers.take((2, 3), np.float32), buffers.take((2, 3), np.float32)
    assert first.array is not second.array
    assert buffers.take((2, 3), np.int32).array is not first.array
    freed = first.array
    del first
    assert buffers.take((2, 3), np.float32).array is freed
    assert buffers.nbytes == 3 * 24


def trial(buffers: Buffers) -> list[DeviceArray]:
    """Takes five, of which the third and the fifth are one."""
    rows = buffers.take((1, 4), np.float32)
    ids = buffers.take((1, 2), np.int32)
    more = buffers.take((1, 4), np.float32)
    arrays = [rows.array, ids.array, more.array]
    del more
    arrays.append(buffers.take((1, 2), np.float32).array)
    arrays.append(buffers.take((1, 4), np.float32).array)
    return arrays


@pytest.mark.parametrize("is_held", [False, True])
def test_noted_arrays_are_taken_again_even_if_in_use(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = EmulatedDevice()
    buffers = Buffers(device)
    held: list[Buffer] = []
    take = buffers.take

    def held_take(shape: tuple[int, ...], dtype: type) -> Buffer:
        held.append(take(shape, dtype))
        return held[-1]

    if is_held:
        monkeypatch.setattr(buffers, "take", held_take)
    with buffers.noted() as noted:
        arrays = trial(buffers)
    assert (arrays[2] is arrays[4]) == (not is_held)
    num_bytes = buffers.nbytes
    assert num_bytes == 16 + 8 + 16 + 8 + 16 * is_held

    def record() -> None:
        with buffers.repeated(noted):
            assert all(a is b for a, b in zip(trial(buffers), arrays, strict=True))

    device.capture(record).close()  # nothing was allocated
    assert buffers.nbytes == num_bytes


def test_the_arrays_of_a_repetition_are_its_own_while_it_is_held() -> None:
    buffers = Buffers(EmulatedDevice())
    with buffers.noted() as noted:
        arrays = trial(buffers)
    with buffers.repeated(noted) as kept:
        trial(buffers)
    assert len(kept) == 4
    others = [buffers.take((1, 4), np.float32) for _ in range(3)]
    assert not any(other.array is array for other in others for array in arrays)
    del kept, others
    assert buffers.take((1, 4), np.float32).array is arrays[0]


def test_what_is_no_repetition_is_told() -> None:
    buffers = Buffers(EmulatedDevice())
    with buffers.noted() as noted:
        buffers.take((1, 4), np.float32)
    with (
        buffers.repeated(noted),
        pytest.raises(RuntimeError, match=r"array 1\b.* int32 \[1, 4\].* float32 \["),
    ):
        buffers.take((1, 4), np.int32)
    with buffers.repeated(noted):
        buffers.take((1, 4), np.float32)
        with pytest.raises(RuntimeError, match=r"array 2\b.* float32 \[1, 4\]"):
            buffers.take((1, 4), np.float32)
    buffers.take((1, 4), np.int32)  # as ever
