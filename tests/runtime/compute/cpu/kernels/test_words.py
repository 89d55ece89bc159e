"""Addresses of arrays, as words of calls."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.cpu.kernels.words import address


def read_only(array: AnyArray) -> AnyArray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 5), np.float32),
        np.ones((3, 5), np.float32)[1:],
        np.empty((0, 5), np.float32),
        read_only(np.ones(7, np.float32)),
        read_only(np.empty(0, np.float32)),
    ],
    ids=["whole", "rows", "empty", "read-only", "empty read-only"],
)
def test_an_address_is_that_of_the_first_element(array: AnyArray) -> None:
    assert address(array) == array.ctypes.data


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 5), np.float32).T,
        np.ones((3, 5), np.float32)[:, 1:],
        np.ones(7, np.float32)[::-1],
        read_only(np.ones((3, 5), np.float32)[:, ::2]),
        np.ones(7, np.float64),
        np.ones(7, ">f4"),
    ],
    ids=["transposed", "columns", "backwards", "read-only columns", "float64", "big-endian"],
)
def test_arrays_with_gaps_or_of_another_type_have_none(array: AnyArray) -> None:
    with pytest.raises(TypeError):
        address(array)
    assert address(np.ones(7, np.int32), np.int32) > 0
