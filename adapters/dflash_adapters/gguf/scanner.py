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

from itertools import pairwise
from pathlib import Path
from struct import Struct

from dflash_adapters.gguf.cursor import U32, U64, Cursor
from dflash_adapters.gguf.types import SCALAR_FORMATS, MetadataValue, Scan, TensorInfo, ValueType
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

_ARRAY_HEADER = Struct("<IQ")
_TENSOR_TYPES: dict[int, TensorType] = {int(tensor_type): tensor_type for tensor_type in TensorType}
_TENSOR_ROW = [Struct(f"<{num_dims}QIQ") for num_dims in range(MAX_DIMS + 1)]


def scan_gguf(fd: int, path: Path, size_bytes: int, *, shard_index: int = 0) -> Scan:
    """Read the metadata and tensor table of an open file.

    Raises: ModelFileError naming the field and the offset of the first error.
    """
    try:
        return _scan(Cursor(fd, path, size_bytes), shard_index)
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror}", path=path) from error


def _scan(cursor: Cursor, shard_index: int) -> Scan:
    num_tensors, num_values = _read_header(cursor)
    values = _read_values(cursor, num_values)
    alignment = _alignment(cursor, values)
    tensors, table_end = _read_tensors(cursor, num_tensors, alignment, shard_index)
    return Scan(values, tensors, table_end)


def _read_header(cursor: Cursor) -> tuple[int, int]:
    magic = bytes(cursor.take(min(4, cursor.size_bytes)))
    if magic != b"GGUF":
        raise ModelFileError("not a GGUF file", path=cursor.path)
    (version,) = cursor.unpack(U32)
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            reason = "a big-endian GGUF file; only little-endian ones are read"
        else:
            reason = f"GGUF version {version}; only versions 2 and 3 are read"
        raise UnsupportedModel(reason, path=cursor.path, field="version", offset_bytes=4)
    (num_tensors,), (num_values,) = cursor.unpack(U64), cursor.unpack(U64)
    if num_tensors > MAX_TENSORS:
        cursor.fail(f"claims {num_tensors} tensors; at most {MAX_TENSORS} are read", 8)
    if num_values > MAX_VALUES:
        cursor.fail(f"claims {num_values} metadata values; at most {MAX_VALUES} are read", 16)
    return num_tensors, num_values


def _read_name(cursor: Cursor, max_bytes: int) -> str:
    at = cursor.offset_bytes
    (num_bytes,) = cursor.unpack(U64)
    if not 0 < num_bytes <= max_bytes:
        cursor.fail(f"a name of {num_bytes} bytes; 1 to {max_bytes} are allowed", at)
    try:
        return cursor.take(num_bytes).decode()
    except UnicodeDecodeError:
        cursor.fail("a name is not valid UTF-8", at)


def _read_values(cursor: Cursor, num_values: int) -> dict[str, MetadataValue]:
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


def _read_value(cursor: Cursor, num_strings_left: int) -> MetadataValue:
    at = cursor.offset_bytes
    (type_id,) = cursor.unpack(U32)
    if (scalar := SCALAR_FORMATS.get(type_id)) is not None:
        value_type, layout = scalar
        offset = cursor.offset_bytes
        (number,) = cursor.unpack(layout)
        if value_type is ValueType.BOOL:
            if number > 1:
                cursor.fail(f"a bool of value {number}", offset)
            number = bool(number)
        return MetadataValue(value_type, False, offset, 1, number)
    if type_id == ValueType.STRING:
        (num_bytes,) = cursor.unpack(U64)
        offset = cursor.offset_bytes
        cursor.skip(num_bytes)
        return MetadataValue(ValueType.STRING, False, offset, num_bytes)
    if type_id == ValueType.ARRAY:
        return _read_array(cursor, num_strings_left)
    cursor.fail(f"unknown value type {type_id}", at)


def _read_array(cursor: Cursor, num_strings_left: int) -> MetadataValue:
    at = cursor.offset_bytes
    type_id, count = cursor.unpack(_ARRAY_HEADER)
    offset = cursor.offset_bytes
    if (scalar := SCALAR_FORMATS.get(type_id)) is not None:
        value_type, layout = scalar
        cursor.skip(count * layout.size)
        return MetadataValue(value_type, True, offset, count)
    if type_id == ValueType.ARRAY:
        cursor.fail("an array of arrays", at)
    if type_id != ValueType.STRING:
        cursor.fail(f"unknown array element type {type_id}", at)
    if count > num_strings_left:
        cursor.fail(f"{count} strings; at most {MAX_STRINGS} are read in all arrays", at)
    if count > (cursor.size_bytes - offset) // U64.size:
        cursor.fail(f"{count} strings reach past the end of the file", at)
    cursor.skip_strings(count)
    return MetadataValue(ValueType.STRING, True, offset, count)


def _alignment(cursor: Cursor, values: dict[str, MetadataValue]) -> int:
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
    cursor: Cursor, num_tensors: int, alignment: int, shard_index: int
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


def _read_tensor(cursor: Cursor, alignment: int) -> tuple[tuple[int, ...], TensorType, int, int]:
    at = cursor.offset_bytes
    (num_dims,) = cursor.unpack(U32)
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


def _refuse_overlaps(cursor: Cursor, tensors: list[TensorInfo]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset_bytes)
    for before, after in pairwise(ordered):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            cursor.field = one_line(after.name)
            cursor.fail(f"overlaps {one_line(before.name)}", after.offset_bytes)
