"""Memory for results of operations: taken again as soon as nobody holds the result any more.

A step that is recorded must find every array at the address it had when the step was tried out, and
nothing may be allocated meanwhile. The same operations in the same order take the same arrays here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dflash_runtime.compute.cupy.device import DeviceArray, KernelDevice

_Key: TypeAlias = tuple[tuple[int, ...], np.dtype]


class Buffer:
    """An array that is in use as long as this object is referred to."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: DeviceArray) -> None:
        self.array = array


class Buffers:
    """Arrays of one device by shape, each used by one Buffer at a time.

    Everything that uses them runs in the order of the device's stream, so that an array may be
    written again while its last reader has not begun yet.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._kept: list[Buffer] | None = None
        self._known: dict[_Key, list[tuple[DeviceArray, weakref.ref[Buffer] | None]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for known in self._known.values() for array, _ in known)

    @contextmanager
    def kept(self) -> Iterator[list[Buffer]]:
        """What is taken meanwhile stays in use for as long as the list does."""
        kept: list[Buffer] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """The first array of this shape that is free, or a new one.

        Raises: DeviceOutOfMemory; DeviceUnavailable while launches are recorded, if none is free.
        """
        buffer = self._taken(shape, dtype)
        if self._kept is not None:
            self._kept.append(buffer)
        return buffer

    def _taken(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        known = self._known.setdefault((shape, np.dtype(dtype)), [])
        for index, (array, user) in enumerate(known):
            if user is None or user() is None:
                buffer = Buffer(array)
                known[index] = array, weakref.ref(buffer)
                return buffer
        buffer = Buffer(self._device.empty(shape, dtype))
        known.append((buffer.array, weakref.ref(buffer)))
        return buffer


def array_of(buffer: Buffer | None) -> DeviceArray | None:
    """A buffer's array, if there is a buffer."""
    return None if buffer is None else buffer.array
