"""Scans the metadata and the tensor table of one untrusted GGUF file; reads no weight.

For strings and arrays only the position is recorded.

::

    "GGUF" | version u32 | num_tensors u64 | num_values u64
    num_values  x ( key: string | type u32 | value )
    num_tensors x ( name: string | num_dims u32 | dim u64 x num_dims | type u32 | offset u64 )
    padding to general.alignment | tensor data            string = length u64 | bytes

Python integers do not wrap, so a sum or product of sizes is exact before it is compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn, Self

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError, UnsupportedModel, one_line

# A hostile file may have any size, so time and memory of a scan are bounded by counts. Each bound
# is several times what the largest published models need.
MAX_VALUES = 1024  # in one shard; published: < 100; 5 µs each
MAX_TENSORS = 3072  # in one shard; published: < 1500; 6 µs each
MAX_KEY_BYTES = 256  # the format allows 65535; 1024 keys of that length would be 64 MiB
MAX_NAME_BYTES = 64  # GGML_MAX_NAME
MAX_STRINGS = 1 << 22  # over all arrays of a shard; published: 0.8 million; 0.3 µs each
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 24
DEFAULT_ALIGNMENT = 32
MAX_METADATA_BYTES = 128 << 20  # up to the end of the tensor table; published: < 30 MiB

_WINDOW_BYTES = 256 << 10
_U32, _U64, _ARRAY_HEADER = Struct("<I"), Struct("<Q"), Struct("<IQ")
_TENSOR_TYPES: dict[int, TensorType] = {int(tensor_type): tensor_type for tensor_type in TensorType}
_TENSOR_ROW = [Struct(f"<{num_dims}QIQ") for num_dims in range(MAX_DIMS + 1)]


class ValueType(IntEnum):
    """GGUF metadata value type, and the layout of a scalar (empty for strings and arrays)."""

    layout: Struct

    def __new__(cls, type_id: int, letter: str) -> Self:
        member = int.__new__(cls, type_id)
        member._value_ = type_id
        member.layout = Struct(f"<{letter}")
        return member

    UINT8 = 0, "B"
    INT8 = 1, "b"
    UINT16 = 2, "H"
    INT16 = 3, "h"
    UINT32 = 4, "I"
    INT32 = 5, "i"
    FLOAT32 = 6, "f"
    BOOL = 7, "B"
    STRING = 8, ""
    ARRAY = 9, ""
    UINT64 = 10, "Q"
    INT64 = 11, "q"
    FLOAT64 = 12, "d"


_VALUE_TYPES: dict[int, ValueType] = {int(value_type): value_type for value_type in ValueType}


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


class _Cursor:
    """A position in an open file, read through a small window; each step is checked against the
    file's size first. ``field`` names what is being read, for messages."""

    def __init__(self, fd: int, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.field = "header"
        self._fd = fd
        self._window = bytearray(min(_WINDOW_BYTES, size_bytes))
        self._window_offset = 0
        self._place = 0
        self._filled = 0

    @property
    def offset_bytes(self) -> int:
        """File offset of the next byte."""
        return self._window_offset + self._place

    def fail(self, reason: str, offset_bytes: int | None = None) -> NoReturn:
        """Raise ModelFileError for the field being read."""
        at = self.offset_bytes if offset_bytes is None else offset_bytes
        raise ModelFileError(reason, path=self.path, field=self.field, offset_bytes=at)

    def take(self, num_bytes: int) -> bytearray:
        """The next bytes, at most a window."""
        start = self._require(num_bytes)
        self._place = start + num_bytes
        return self._window[start : self._place]

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        """The next bytes as numbers."""
        start = self._require(layout.size)
        self._place = start + layout.size
        return layout.unpack_from(self._window, start)

    def skip(self, num_bytes: int) -> None:
        """Skip bytes without reading them."""
        if num_bytes > self.size_bytes - self.offset_bytes:
            self.fail(f"{num_bytes} bytes reach past the end of the file ({self.size_bytes} bytes)")
        self._place += num_bytes
        self.check_length()

    def skip_strings(self, count: int) -> None:
        """Skip `count` strings. A hot loop: it may run millions of times."""
        unpack, window, prefix = _U64.unpack_from, self._window, _U64.size
        place, limit = self._place, self._filled - prefix
        for _ in range(count):
            if place > limit:
                self._place = place
                place = self._require(prefix)
                limit = self._filled - prefix
            # A length is never negative, so a wrong one can only move `place` past the end.
            place += prefix + unpack(window, place)[0]
        self._place = place
        self._require(0)
        self.check_length()

    def check_length(self) -> None:
        """Raises: ModelFileError if the metadata is larger than any model's."""
        if self.offset_bytes > MAX_METADATA_BYTES:
            self.fail(f"metadata is larger than {MAX_METADATA_BYTES} bytes")

    def _require(self, num_bytes: int) -> int:
        """Load the next `num_bytes` into the window; returns their offset in it."""
        if self._place + num_bytes <= self._filled:
            return self._place
        offset = self.offset_bytes
        if offset + num_bytes > self.size_bytes:
            self.fail(
                f"reaches past the end of the file ({self.size_bytes} bytes)",
                min(offset, self.size_bytes),
            )
        self.check_length()
        filled = os.preadv(self._fd, [self._window], offset)
        if filled < num_bytes:
            self.fail("the file became shorter while it was read")
        self._window_offset, self._place, self._filled = offset, 0, filled
        return 0


def scan_gguf(fd: int, path: Path, size_bytes: int, *, shard_index: int = 0) -> Scan:
    """Read the metadata and tensor table of an open file.

    Raises: ModelFileError naming the field and the offset of the first error.
    """
    cursor = _Cursor(fd, path, size_bytes)
    try:
        num_tensors, num_values = _read_header(cursor)
        values = _read_values(cursor, num_values)
        alignment = _alignment(cursor, values)
        tensors, table_end = _read_tensors(cursor, num_tensors, alignment, shard_index)
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror}", path=path) from error
    return Scan(values, tensors, table_end)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.take(min(4, cursor.size_bytes)))
    if magic != b"GGUF":
        raise ModelFileError("not a GGUF file", path=cursor.path)
    (version,) = cursor.unpack(_U32)
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            reason = "a big-endian GGUF file; only little-endian ones are read"
        else:
            reason = f"GGUF version {version}; only versions 2 and 3 are read"
        raise UnsupportedModel(reason, path=cursor.path, field="version", offset_bytes=4)
    (num_tensors,), (num_values,) = cursor.unpack(_U64), cursor.unpack(_U64)
    if num_tensors > MAX_TENSORS:
        cursor.fail(f"claims {num_tensors} tensors; at most {MAX_TENSORS} are read", 8)
    if num_values > MAX_VALUES:
        cursor.fail(f"claims {num_values} metadata values; at most {MAX_VALUES} are read", 16)
    return num_tensors, num_values


def _read_name(cursor: _Cursor, max_bytes: int) -> str:
    at = cursor.offset_bytes
    (num_bytes,) = cursor.unpack(_U64)
    if not 0 < num_bytes <= max_bytes:
        cursor.fail(f"a name of {num_bytes} bytes; 1 to {max_bytes} are allowed", at)
    try:
        return cursor.take(num_bytes).decode()
    except UnicodeDecodeError:
        cursor.fail("a name is not valid UTF-8", at)


def _read_values(cursor: _Cursor, num_values: int) -> dict[str, MetadataValue]:
    values: dict[str, MetadataValue] = {}
    num_strings_left = MAX_STRINGS
    for index in range(num_values):
        cursor.field = f"metadata value {index}"
        at = cursor.offset_bytes
        key = _read_name(cursor, MAX_KEY_BYTES)
        cursor.field = one_line(key)
        if key in values:
            cursor.fail("the key occurs twice", at)
        value = _read_value(cursor, num_strings_left)
        if value.is_array and value.value_type is ValueType.STRING:
            num_strings_left -= value.count
        values[key] = value
    return values


def _read_value(cursor: _Cursor, num_strings_left: int) -> MetadataValue:
    at = cursor.offset_bytes
    (type_id,) = cursor.unpack(_U32)
    value_type = _VALUE_TYPES.get(type_id)
    if value_type is None:
        cursor.fail(f"unknown value type {type_id}", at)
    if value_type is ValueType.ARRAY:
        return _read_array(cursor, num_strings_left)
    if value_type is ValueType.STRING:
        (num_bytes,) = cursor.unpack(_U64)
        offset = cursor.offset_bytes
        cursor.skip(num_bytes)
        return MetadataValue(value_type, False, offset, num_bytes)
    offset = cursor.offset_bytes
    (number,) = cursor.unpack(value_type.layout)
    if value_type is ValueType.BOOL:
        if number > 1:
            cursor.fail(f"a bool of value {number}", offset)
        number = bool(number)
    return MetadataValue(value_type, False, offset, 1, number)


def _read_array(cursor: _Cursor, num_strings_left: int) -> MetadataValue:
    at = cursor.offset_bytes
    type_id, count = cursor.unpack(_ARRAY_HEADER)
    offset = cursor.offset_bytes
    value_type = _VALUE_TYPES.get(type_id)
    if value_type is None:
        cursor.fail(f"unknown array element type {type_id}", at)
    if value_type is ValueType.ARRAY:
        cursor.fail("an array of arrays", at)
    if value_type is not ValueType.STRING:
        cursor.skip(count * value_type.layout.size)
        return MetadataValue(value_type, True, offset, count)
    if count > num_strings_left:
        cursor.fail(f"{count} strings; at most {MAX_STRINGS} are read in all arrays", at)
    if count > (cursor.size_bytes - offset) // _U64.size:
        cursor.fail(f"{count} strings reach past the end of the file", at)
    cursor.skip_strings(count)
    return MetadataValue(value_type, True, offset, count)


def _alignment(cursor: _Cursor, values: dict[str, MetadataValue]) -> int:
    value = values.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    cursor.field = "general.alignment"
    alignment = value.scalar
    if value.value_type is not ValueType.UINT32 or not isinstance(alignment, int):
        cursor.fail("is not an unsigned 32-bit integer", value.offset_bytes)
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        cursor.fail(f"{alignment} is not a power of two up to {MAX_ALIGNMENT}", value.offset_bytes)
    return alignment


def _read_tensors(
    cursor: _Cursor, num_tensors: int, alignment: int, shard_index: int
) -> tuple[list[TensorInfo], int]:
    """The tensor table with absolute offsets, and its end."""
    rows: list[tuple[str, tuple[int, ...], TensorType, int, int]] = []
    names: set[str] = set()
    for index in range(num_tensors):
        cursor.field = f"tensor {index}"
        at = cursor.offset_bytes
        name = _read_name(cursor, MAX_NAME_BYTES)
        cursor.field = one_line(name)
        if name in names:
            cursor.fail("the tensor occurs twice", at)
        names.add(name)
        rows.append((name, *_read_tensor(cursor, alignment)))
    table_end = cursor.offset_bytes
    data_start = -(-table_end // alignment) * alignment
    tensors = []
    for name, file_shape, tensor_type, offset, num_bytes in rows:
        absolute = data_start + offset
        if absolute + num_bytes > cursor.size_bytes:
            cursor.field = one_line(name)
            cursor.fail(
                f"{num_bytes} bytes reach past the end of the file ({cursor.size_bytes} bytes)",
                absolute,
            )
        tensors.append(TensorInfo(name, file_shape, tensor_type, shard_index, absolute, num_bytes))
    _refuse_overlaps(cursor, tensors)
    return tensors, table_end


def _read_tensor(cursor: _Cursor, alignment: int) -> tuple[tuple[int, ...], TensorType, int, int]:
    at = cursor.offset_bytes
    (num_dims,) = cursor.unpack(_U32)
    if not 0 < num_dims <= MAX_DIMS:
        cursor.fail(f"{num_dims} dimensions; 1 to {MAX_DIMS} are allowed", at)
    *dims, type_id, offset = cursor.unpack(_TENSOR_ROW[num_dims])
    file_shape = tuple(dims)
    if 0 in file_shape:
        cursor.fail(f"a dimension is zero: {file_shape}", at)
    tensor_type = _TENSOR_TYPES.get(type_id)
    if tensor_type is None:
        raise UnsupportedModel(
            f"unknown tensor type {type_id}", path=cursor.path, field=cursor.field, offset_bytes=at
        )
    try:
        num_bytes = tensor_type.row_bytes(file_shape[0])
    except ValueError as error:
        cursor.fail(str(error), at)
    for dim in file_shape[1:]:
        num_bytes *= dim
    if offset % alignment:
        cursor.fail(f"its offset {offset} is not a multiple of {alignment}", at)
    return file_shape, tensor_type, offset, num_bytes


def _refuse_overlaps(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset_bytes)
    for before, after in pairwise(ordered):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            cursor.field = one_line(after.name)
            cursor.fail(f"overlaps {one_line(before.name)}", after.offset_bytes)
