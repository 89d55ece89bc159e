"""Reads an untrusted file sequentially through a small window.

Every step is checked against the file's size first. Numbers are little-endian, strings are prefixed
by their length.
"""

from __future__ import annotations

import os
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

from dflash_protocol.errors import ModelFileError

MAX_METADATA_BYTES = 128 << 20  # up to the end of the tensor table; published: < 30 MiB

U32 = Struct("<I")
U64 = Struct("<Q")

_WINDOW_BYTES = 256 << 10


class Cursor:
    """A position in an open file. ``field`` names what is being read, for messages."""

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
        unpack, window, prefix = U64.unpack_from, self._window, U64.size
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
