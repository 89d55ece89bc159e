"""Typed access to the metadata of one scanned file: every getter checks type and range.

Strings and arrays are read from the file on demand.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from dflash_adapters.gguf.scanner import MetadataValue, ValueType
from dflash_protocol.errors import ModelFileError, one_line
from dflash_protocol.ids import AnyArray, F32Array, I64Array

MAX_STRING_BYTES = 4 << 20  # the longest published string, a chat template, is under 64 KiB
MAX_ARRAY_LENGTH = 1 << 20  # the longest published array, token scores, has 262144 entries
_U32_MAX = 2**32 - 1
_I64_MAX = 2**63 - 1
_WINDOW_BYTES = 256 << 10

_FLOATS = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})
_INTEGERS = frozenset(ValueType) - _FLOATS - {ValueType.BOOL, ValueType.STRING, ValueType.ARRAY}


class Metadata:
    """Metadata of an open file. A getter without a default requires its key.

    Raises: ModelFileError naming the key, from every getter.
    """

    def __init__(self, path: Path, file: io.FileIO, values: dict[str, MetadataValue]) -> None:
        self._metadata_path = path
        self._file = file
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the key is present, of any type."""
        return key in self._values

    def get_uint(self, key: str, default: int | None = None, *, maximum: int = _U32_MAX) -> int:
        """An integer of any width within 0 … `maximum`."""
        if default is not None and key not in self._values:
            return default
        value = self._require(key)
        number = value.scalar
        if value.is_array or value.value_type not in _INTEGERS or not isinstance(number, int):
            self._fail(key, value, "is not an integer")
        if not 0 <= number <= maximum:
            self._fail(key, value, f"{number} is outside 0 … {maximum}")
        return number

    def get_float(self, key: str, default: float | None = None) -> float:
        """A finite 32- or 64-bit float."""
        if default is not None and key not in self._values:
            return default
        value = self._require(key)
        number = value.scalar
        if value.is_array or value.value_type not in _FLOATS or not isinstance(number, float):
            self._fail(key, value, "is not a float")
        if not math.isfinite(number):
            self._fail(key, value, f"{number} is not finite")
        return number

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """A bool."""
        if default is not None and key not in self._values:
            return default
        value = self._require(key)
        if value.is_array or not isinstance(value.scalar, bool):
            self._fail(key, value, "is not a bool")
        return value.scalar

    def get_str(
        self, key: str, default: str | None = None, *, max_bytes: int = MAX_STRING_BYTES
    ) -> str:
        """A string of at most `max_bytes` bytes of UTF-8."""
        if default is not None and key not in self._values:
            return default
        value = self._require(key)
        if value.is_array or value.value_type is not ValueType.STRING:
            self._fail(key, value, "is not a string")
        if value.count > max_bytes:
            self._fail(key, value, f"a string of {value.count} bytes; at most {max_bytes} are read")
        try:
            return self._read(key, value.offset_bytes, value.count).decode()
        except UnicodeDecodeError:
            self._fail(key, value, "is not valid UTF-8")

    def array_length(self, key: str) -> int:
        """Elements of an array of any type."""
        return self._array(key).count

    def get_uint_array(self, key: str, *, maximum: int = _U32_MAX) -> I64Array:
        """An array of integers of any width within 0 … `maximum`. Shapes: [array_length] int64."""
        value = self._array(key)
        if value.value_type not in _INTEGERS:
            self._fail(key, value, "is not an array of integers")
        numbers = self._read_array(key, value)
        maximum = min(maximum, _I64_MAX)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() <= maximum):
            self._fail(key, value, f"an element is outside 0 … {maximum}")
        return numbers.astype(np.int64)

    def get_uint_per_layer(
        self, key: str, num_layers: int, *, maximum: int = _U32_MAX
    ) -> tuple[int, ...]:
        """An array of one integer a layer, within 0 … `maximum`."""
        self._array(key, num_layers)
        return tuple(self.get_uint_array(key, maximum=maximum).tolist())

    def get_bool_per_layer(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """An array of one bool a layer, which may be stored as integers."""
        value = self._array(key, num_layers)
        if value.value_type is not ValueType.BOOL:
            return tuple(map(bool, self.get_uint_per_layer(key, num_layers, maximum=1)))
        return tuple((self._read_array(key, value).view(np.uint8) != 0).tolist())

    def get_float_array(self, key: str) -> F32Array:
        """An array of finite floats. Shapes: [array_length] float32."""
        value = self._array(key)
        if value.value_type not in _FLOATS:
            self._fail(key, value, "is not an array of floats")
        with np.errstate(over="ignore"):
            numbers = self._read_array(key, value).astype(np.float32)
        if not np.isfinite(numbers).all():
            self._fail(key, value, "an element is not finite")
        return numbers

    def is_array(self, key: str) -> bool:
        """Whether the key is present and an array."""
        return key in self._values and self._values[key].is_array

    def ignore(self, keys: Iterable[str]) -> None:
        """Treat these keys as missing from now on."""
        for key in keys:
            self._values.pop(key, None)

    def strings(self, key: str) -> Iterator[bytes]:
        """Iterate over the strings of an array, undecoded, reading a window at a time."""
        value = self._array(key)
        if value.value_type is not ValueType.STRING:
            self._fail(key, value, "is not an array of strings")
        return self._strings(key, value)

    def _strings(self, key: str, value: MetadataValue) -> Iterator[bytes]:
        window_offset, place, window = value.offset_bytes, 0, b""
        for _ in range(value.count):
            if place + 8 > len(window):
                window_offset, place = window_offset + place, 0
                window = self._read(key, window_offset, _WINDOW_BYTES, at_least=8)
            num_bytes = int.from_bytes(window[place : place + 8], "little")
            if num_bytes > MAX_STRING_BYTES:
                self._fail(key, value, f"a string of {num_bytes} bytes; too long to be read")
            end = place + 8 + num_bytes
            if end > len(window):
                window_offset, end = window_offset + place, 8 + num_bytes
                place = 0
                window = self._read(key, window_offset, max(_WINDOW_BYTES, end), at_least=end)
            yield window[place + 8 : end]
            place = end

    def _require(self, key: str) -> MetadataValue:
        value = self._values.get(key)
        if value is None:
            raise ModelFileError(
                "required key is missing", path=self._metadata_path, field=one_line(key)
            )
        return value

    def _array(self, key: str, num_layers: int | None = None) -> MetadataValue:
        """The array, which must have an entry for each of `num_layers` if given."""
        value = self._require(key)
        if not value.is_array:
            self._fail(key, value, "is not an array")
        if num_layers not in (None, value.count):
            self._fail(key, value, f"has {value.count} entries for {num_layers} layers")
        return value

    def _read_array(self, key: str, value: MetadataValue) -> AnyArray:
        if value.count > MAX_ARRAY_LENGTH:
            self._fail(key, value, f"{value.count} elements; at most {MAX_ARRAY_LENGTH} are read")
        layout = value.value_type.layout
        data = self._read(key, value.offset_bytes, value.count * layout.size)
        return np.frombuffer(data, dtype=np.dtype(layout.format))

    def _read(
        self, key: str, offset_bytes: int, num_bytes: int, *, at_least: int | None = None
    ) -> bytes:
        try:
            data = os.pread(self._file.fileno(), num_bytes, offset_bytes)
        except OSError as error:
            raise ModelFileError(
                f"cannot be read: {error.strerror}", path=self._metadata_path, field=one_line(key)
            ) from error
        if len(data) < (num_bytes if at_least is None else at_least):
            raise ModelFileError(
                "the file became shorter while it was read",
                path=self._metadata_path,
                field=one_line(key),
                offset_bytes=offset_bytes + len(data),
            )
        return data

    def _fail(self, key: str, value: MetadataValue, reason: str) -> NoReturn:
        raise ModelFileError(
            reason, path=self._metadata_path, field=one_line(key), offset_bytes=value.offset_bytes
        )
