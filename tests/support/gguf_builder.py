"""Builds GGUF files byte by byte, including invalid ones that no other writer produces.

Does not import the packages under test.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL = range(8)
STRING, ARRAY, UINT64, INT64, FLOAT64 = range(8, 13)

_F32, _Q8_0 = 0, 8  # tensor types

_FORMATS = {
    **{UINT8: "<B", INT8: "<b", UINT16: "<H", INT16: "<h", UINT32: "<I", INT32: "<i"},
    **{FLOAT32: "<f", BOOL: "<B", UINT64: "<Q", INT64: "<q", FLOAT64: "<d"},
}


def text(data: str | bytes) -> bytes:
    """A string: its length, then its bytes."""
    encoded = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(encoded)) + encoded


def scalar(type_id: int, number: float) -> bytes:
    """A value with its type."""
    return struct.pack("<I", type_id) + struct.pack(_FORMATS[type_id], number)


def string(data: str | bytes) -> bytes:
    """A string value with its type."""
    return struct.pack("<I", STRING) + text(data)


def array(type_id: int, numbers: Sequence[float], count: int | None = None) -> bytes:
    """An array value with its type; `count` is what it claims to hold."""
    payload = b"".join(struct.pack(_FORMATS[type_id], number) for number in numbers)
    return struct.pack("<IIQ", ARRAY, type_id, len(numbers) if count is None else count) + payload


def strings(items: Sequence[str | bytes], count: int | None = None) -> bytes:
    """An array of strings with its type; `count` is what it claims to hold."""
    claimed = len(items) if count is None else count
    return struct.pack("<IIQ", ARRAY, STRING, claimed) + b"".join(map(text, items))


@dataclass
class GgufBuilder:
    """Collects metadata and tensors, and writes them without checks."""

    architecture: str | None = "qwen3moe"
    version: int = 3
    alignment: int = 32
    num_values: int | None = None
    num_tensors: int | None = None
    values: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.architecture is not None:
            self.add("general.architecture", string(self.architecture))

    def add(self, key: str | bytes, value: bytes) -> Self:
        """A metadata value, encoded with its type."""
        self.values.append(text(key) + value)
        return self

    def add_tensor(
        self,
        name: str | bytes,
        file_shape: Sequence[int],
        type_id: int,
        data: bytes,
        *,
        offset: int | None = None,
    ) -> Self:
        """Append a tensor's data; `offset` overrides the offset that the table states."""
        self.data += bytes(-len(self.data) % self.alignment)
        claimed = len(self.data) if offset is None else offset
        self.tensors.append(
            text(name)
            + struct.pack(f"<I{len(file_shape)}Q", len(file_shape), *file_shape)
            + struct.pack("<IQ", type_id, claimed)
        )
        self.data += data
        return self

    def build(self) -> bytes:
        """The whole file."""
        head = b"GGUF" + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.values) if self.num_values is None else self.num_values,
        )
        head += b"".join(self.values) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + bytes(self.data)

    def write(self, path: Path, *, size_bytes: int | None = None) -> Path:
        """Write the file, extended with a hole or cut to `size_bytes`."""
        with path.open("wb") as file:
            file.write(self.build())
            if size_bytes is not None:
                file.truncate(size_bytes)
        return path


def sound_file() -> GgufBuilder:
    """A small valid file: values of several kinds, tensors ``one`` and ``two``."""
    return (
        GgufBuilder()
        .add("a.uint", scalar(UINT32, 7))
        .add("a.strings", strings(["x", "", "yz"]))
        .add("a.numbers", array(INT32, [1, 2, 3]))
        .add_tensor("one", [4, 2], _F32, struct.pack("<8f", *range(8)))
        .add_tensor("two", [32], _Q8_0, bytes(range(34)))
    )
