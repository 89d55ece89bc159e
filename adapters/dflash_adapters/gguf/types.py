"""Records of a GGUF file: value types, metadata values, rows of the tensor table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from dflash_adapters.quant import TensorType


class ValueType(IntEnum):
    """GGUF metadata value type."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_FORMATS: dict[int, tuple[ValueType, Struct]] = {
    int(value_type): (value_type, Struct("<" + letter))
    for value_type, letter in {
        ValueType.UINT8: "B",
        ValueType.INT8: "b",
        ValueType.UINT16: "H",
        ValueType.INT16: "h",
        ValueType.UINT32: "I",
        ValueType.INT32: "i",
        ValueType.FLOAT32: "f",
        ValueType.BOOL: "B",
        ValueType.UINT64: "Q",
        ValueType.INT64: "q",
        ValueType.FLOAT64: "d",
    }.items()
}


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """A metadata value: a scalar, or the file position of a string or array.

    ``count`` is the bytes of a string or the elements of an array; ``offset_bytes`` is where the
    first one is.
    """

    value_type: ValueType
    is_array: bool
    offset_bytes: int
    count: int = 1
    scalar: int | float | bool | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A row of the tensor table; ``offset_bytes`` is from the start of its shard."""

    name: str
    file_shape: tuple[int, ...]
    tensor_type: TensorType
    shard_index: int
    offset_bytes: int
    num_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in row-major order, the reverse of the file's."""
        return self.file_shape[::-1]

    @property
    def columns(self) -> int:
        """Values in one contiguous row."""
        return self.file_shape[0]

    @property
    def num_rows(self) -> int:
        """Rows over all outer dimensions."""
        return self.num_bytes // self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one contiguous row."""
        return self.tensor_type.row_bytes(self.file_shape[0])


@dataclass(frozen=True, slots=True)
class Scan:
    """Metadata and tensor table of one shard; ``metadata_bytes`` is where the table ends."""

    values: dict[str, MetadataValue]
    tensors: list[TensorInfo]
    metadata_bytes: int
