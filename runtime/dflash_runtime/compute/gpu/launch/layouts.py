"""Layout of weights in a device's memory: the fields of a row's blocks, one array after another;
and of a layer's experts.

A file's blocks have odd sizes, so that loads of 16 bytes would not be aligned. On the device a row
is cut into the fields of its blocks, each field one array over the row's blocks, each array padded
to 16 bytes; blocks are added until the row is a whole number of units of 64 weights. Padding is
zero, which every type reads as weights of zero. The order inside a field is the file's.

The table below is the only definition; kernels have it as ``kernels/common/formats_table.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.step_order import UNIT_VALUES

UNIT = UNIT_VALUES
"""Weights unpacked by a lane at once."""

_ALIGNMENT = 16


class Field(NamedTuple):
    """Part of a block: its offset and length in the file."""

    name: str
    native_offset: int
    num_bytes: int


FIELDS: dict[TensorType, tuple[Field, ...]] = {
    TensorType.Q4_0: (Field("QUANTS", 2, 16), Field("SCALE", 0, 2)),
    TensorType.Q4_1: (Field("QUANTS", 4, 16), Field("SCALE", 0, 4)),
    TensorType.Q5_0: (Field("QUANTS", 6, 16), Field("HIGH", 2, 4), Field("SCALE", 0, 2)),
    TensorType.Q5_1: (Field("QUANTS", 8, 16), Field("HIGH", 4, 4), Field("SCALE", 0, 4)),
    TensorType.Q8_0: (Field("QUANTS", 2, 32), Field("SCALE", 0, 2)),
    TensorType.Q2_K: (Field("QUANTS", 16, 64), Field("SCALES", 0, 16), Field("SCALE", 80, 4)),
    TensorType.Q3_K: (
        Field("QUANTS", 32, 64),
        Field("HIGH", 0, 32),
        Field("SCALES", 96, 12),
        Field("SCALE", 108, 2),
    ),
    # These two are aligned as they are.
    TensorType.Q4_K: (Field("BLOCK", 0, 144),),
    TensorType.Q5_K: (Field("BLOCK", 0, 176),),
    TensorType.Q6_K: (
        Field("QUANTS", 0, 128),
        Field("HIGH", 128, 64),
        Field("SCALES", 192, 16),
        Field("SCALE", 208, 2),
    ),
    TensorType.IQ4_NL: (Field("QUANTS", 2, 16), Field("SCALE", 0, 2)),
    TensorType.IQ4_XS: (Field("QUANTS", 8, 128), Field("SCALES", 0, 8)),
    TensorType.MXFP4: (Field("QUANTS", 1, 16), Field("SCALE", 0, 1)),
    TensorType.NVFP4: (Field("QUANTS", 4, 32), Field("SCALES", 0, 4)),
    TensorType.F32: (Field("VALUES", 0, 4),),
    TensorType.F16: (Field("VALUES", 0, 2),),
    TensorType.BF16: (Field("VALUES", 0, 2),),
}
"""Types supported by the kernels, and their fields in the order of the arrays."""

"""Types that are multiplied with float32 activations; all others are with int8."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A weight on a device. Shapes: weights [rows * row_bytes] uint8, rows as above."""

    rows: int
    columns: int
    tensor_type: TensorType
    weights: DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class ResidentMatrices:
    """One projection of a layer's experts on a device: ``y = scale * (W x) + bias``.

    Matrices lie by slot, one after another; biases and scales by expert id, if there are any.
    Shapes: weights [slots * rows] rows in the device's layout, uint8; bias [E, rows] and scale [E]
    float32.
    """

    tensor_type: TensorType
    weights: DeviceArray
    bias: DeviceArray | None = None
    scale: DeviceArray | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentExperts:
    """The experts of a layer that are on a device.

    Shapes: slot_of_expert [E] int32, -1 for an expert that is not resident.
    """

    gate: ResidentMatrices
    up: ResidentMatrices
    down: ResidentMatrices
    slot_of_expert: DeviceArray
    activation_limit: float = float("inf")
    activation_alpha: float = 1.0
    up_offset: float = 0.0
    """These three: see spec.MoeLayer and its Activation."""


def num_units(columns: int) -> int:
    """Units of a row."""
    return -(-columns // UNIT)


@cache
def row_bytes(tensor_type: TensorType, columns: int) -> int:
    """Bytes of one row on the device, a multiple of 16.

    Raises: ValueError if kernels have no layout for the type, or if the row is no whole number of
    the file's blocks.
    """
    fields = fields_of(tensor_type, columns)
    return sum(array_bytes(tensor_type, field, columns) for field in fields)


def is_native(tensor_type: TensorType, columns: int) -> bool:
    """Whether a row has the same bytes on the device as in the file."""
    return len(FIELDS[tensor_type]) == 1 and row_bytes(
        tensor_type, columns
    ) == tensor_type.row_bytes(columns)


def fields_of(tensor_type: TensorType, columns: int) -> tuple[Field, ...]:
    """Raises: ValueError as `row_bytes` does."""
    fields = FIELDS.get(tensor_type)
    if fields is None:
        raise ValueError(f"no device layout for {tensor_type.name}")
    tensor_type.row_bytes(columns)  # raises for a part of a block
    return fields


def array_bytes(tensor_type: TensorType, field: Field, columns: int) -> int:
    """Bytes of one field's array in a row."""
    num_blocks = num_units(columns) * UNIT // tensor_type.layout.block_elements
    # A row of 256-value blocks is a whole number of units anyway.
    num_blocks = max(num_blocks, columns // tensor_type.layout.block_elements)
    return -(-num_blocks * field.num_bytes // _ALIGNMENT) * _ALIGNMENT
