"""Shared by the launches of decode kernels: forms of rows, checks of arrays, rows on lanes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.launch.layouts import row_bytes
from dflash_runtime.compute.step_order import FLOAT_TYPES, GRANULE, MOST_TOKENS, padded_columns

STEP_SIZES = (1, 2, 4, MOST_TOKENS)
"""Sizes that steps are cut into or padded to; few, since each has kernels of its own."""


def meta_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Shape of the float32 array beside int8 rows: scale, and scale times sum, of each granule."""
    return rows, padded_columns(columns) // GRANULE, 2


def staged_bytes(rows: int, columns: int, *, as_bytes: bool, as_floats: bool) -> int:
    """Bytes of shared memory for rows of activations in a block."""
    padded = padded_columns(columns)
    return rows * (as_bytes * (padded + padded // 2) + as_floats * 4 * padded)


def check_shared_bytes(device: KernelDevice, num_bytes: int, what: str) -> int:
    """Returns the number. Raises: ValueError if a block cannot have so much."""
    if num_bytes > device.max_shared_bytes:
        raise ValueError(
            f"{what} take {num_bytes} bytes of shared memory, {device.name} has "
            f"{device.max_shared_bytes} for a block: use fewer tokens a step"
        )
    return num_bytes


def check_columns(columns: int, tensor_types: tuple[TensorType, ...]) -> None:
    """Raises: ValueError if rows of activations of this length cannot be multiplied."""
    step = 4 if all(kind in FLOAT_TYPES for kind in tensor_types) else 32
    if columns <= 0 or columns % step:
        raise ValueError(f"{columns} columns are not a multiple of {step}")
    for kind in tensor_types:
        row_bytes(kind, columns)  # raises for a part of a block, or a type without layout


def most_rows(device: KernelDevice, columns: int, *, as_bytes: bool, as_floats: bool) -> int:
    """Rows of activations, of at most MOST_TOKENS, that fit a block's shared memory; at least 1."""
    num_bytes = staged_bytes(1, columns, as_bytes=as_bytes, as_floats=as_floats)
    return max(1, min(MOST_TOKENS, device.max_shared_bytes // num_bytes))


def step_parts(num_tokens: int, most: int = MOST_TOKENS) -> list[slice]:
    """Slices of a step's tokens, each of at most `most`."""
    if num_tokens <= most:
        return [slice(0, num_tokens)]
    parts, first = [], 0
    for size in (size for size in STEP_SIZES[::-1] if size <= most):
        while num_tokens - first >= size:
            parts.append(slice(first, first + size))
            first += size
    return parts


def check_tokens(num_tokens: int) -> None:
    """Raises: ValueError outside of 1 to MOST_TOKENS."""
    if not 1 <= num_tokens <= MOST_TOKENS:
        raise ValueError(f"T={num_tokens}, a step has 1 to {MOST_TOKENS} tokens")


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of activations in the forms that the weights' types need; the others may be None.

    Shapes: quants [rows, padded_columns] int8; meta `meta_shape` float32; values [rows, columns]
    float32.
    """

    quants: DeviceArray | None = None
    meta: DeviceArray | None = None
    values: DeviceArray | None = None

    def __getitem__(self, tokens: slice) -> StepRows:
        """Some of the rows, in place."""
        forms = (self.quants, self.meta, self.values)
        return StepRows(*(None if form is None else form[tokens] for form in forms))


class ArrayChecker:
    """Checks arrays and returns their addresses."""

    def __init__(self, device: KernelDevice) -> None:
        family, _, index = device.name.partition(":")
        self._name = device.name
        self._device_id = None if family == "host" else int(index)

    def address(self, name: str, array: DeviceArray | None, dtype: DTypeLike, **sizes: int) -> int:
        """Address of `array`. `sizes` are its dimensions in order, by shape letter.

        Raises: ValueError naming the array, what it is and what is expected.
        """
        if array is None:
            raise ValueError(f"{name} is missing")
        given: Any = array
        expected = tuple(sizes.values())
        if array.shape != expected or array.dtype != dtype:
            letters = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, "
                f"expected {np.dtype(dtype)} [{letters}]"
            )
        if getattr(given.device, "id", None) != self._device_id:
            raise ValueError(f"{name} is on {given.device}, expected {self._name}")
        return address(array)

    def optional(self, name: str, array: DeviceArray | None, dtype: DTypeLike, **sizes: int) -> int:
        """The same; 0 for None."""
        return 0 if array is None else self.address(name, array, dtype, **sizes)

    def weights(
        self, name: str, array: DeviceArray, tensor_type: TensorType, *, rows: int, columns: int
    ) -> int:
        """The same for rows in the device's layout, of any shape."""
        expected = rows * row_bytes(tensor_type, columns)
        if array.dtype != np.uint8 or array.size != expected:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, expected {expected} bytes: "
                f"{rows} rows of {columns} {tensor_type.name}"
            )
        flat: DeviceArray = array.reshape(-1)
        return self.address(name, flat, np.uint8, bytes=expected)

    def int8_rows(
        self,
        prefix: str,
        quants: DeviceArray | None,
        meta: DeviceArray | None,
        *,
        rows: int,
        columns: int,
    ) -> tuple[int, int]:
        """Addresses of int8 rows and of their scales and sums."""
        padded = padded_columns(columns)
        return (
            self.address(f"{prefix}quants", quants, np.int8, T=rows, padded=padded),
            self.address(
                f"{prefix}meta", meta, np.float32, T=rows, granules=padded // GRANULE, two=2
            ),
        )

    def set_forms(
        self, args: ctypes.Structure, prefix: str, forms: StepRows, *, rows: int, columns: int
    ) -> None:
        """Set a struct's values, quants and meta, as far as there are such."""
        args.values = self.optional(f"{prefix}values", forms.values, np.float32, T=rows, H=columns)
        if forms.quants is not None:
            args.quants, args.meta = self.int8_rows(
                prefix, forms.quants, forms.meta, rows=rows, columns=columns
            )
