"""Memory for results of operations: taken again as soon as nobody holds the result any more.

A step that is captured must not allocate, so it is tried out before. What the trial took is noted,
and the capture takes the very same arrays in the same order: whether one is free just then, which
may depend on when garbage is collected, does not matter to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice

_Key: TypeAlias = tuple[tuple[int, ...], np.dtype]


class Buffer:
    """An array that is in use as long as this object is referred to."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: DeviceArray) -> None:
        self.array = array


class Place:
    """An array, and who uses it now, if anybody does."""

    __slots__ = ("_user", "array", "key")

    def __init__(self, key: _Key, array: DeviceArray) -> None:
        self.key = key
        self.array = array
        self._user: weakref.ref[Buffer] | None = None

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def use(self) -> Buffer:
        """It is this buffer's from now on, whoever had it before."""
        buffer = Buffer(self.array)
        self._user = weakref.ref(buffer)
        return buffer


Places: TypeAlias = dict[_Key, list[Place]]
"""By what they are taken for."""


class Buffers:
    """Arrays of one device by shape, each used by one Buffer at a time.

    Everything that uses them runs in the order of the device's stream, so that an array may be
    written again while its last reader has not begun yet.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._known: Places = {}
        self._noted: list[Place] | None = None
        self._apart: Places = {}
        self._repeated: _Repetition | None = None

    @property
    def nbytes(self) -> int:
        return sum(place.array.nbytes for known in self._known.values() for place in known)

    @property
    def is_capturing(self) -> bool:
        """What is taken now is noted, or repeated."""
        return self._noted is not None or self._repeated is not None

    @contextmanager
    def noted(self, apart: Places | None = None) -> Iterator[list[Place]]:
        """What is taken meanwhile, in order: for `repeated`. What is taken apart is put in `apart`,
        whose owner keeps it."""
        noted: list[Place] = []
        self._noted = noted
        if apart is not None:
            self._apart = apart
        try:
            yield noted
        finally:
            self._noted, self._apart = None, {}

    @contextmanager
    def repeated(self, noted: Sequence[Place]) -> Iterator[list[Buffer]]:
        """The same operations in the same order take what is `noted`, and nothing is allocated.

        As long as the result is referred to, nobody else is given any of these arrays.
        Raises: RuntimeError if something else is taken.
        """
        repetition = self._repeated = _Repetition(noted)
        try:
            yield repetition.buffers
        finally:
            self._repeated = None

    def take(self, shape: tuple[int, ...], dtype: DTypeLike, *, apart: bool = False) -> Buffer:
        """The first array of this shape that is free, or a new one; `apart`, of those that only
        what is noted now has.

        Raises: DeviceOutOfMemory; RuntimeError as `repeated` says.
        """
        key = shape, np.dtype(dtype)
        if self._repeated is not None:
            return self._repeated.take(key)
        known = (self._apart if apart else self._known).setdefault(key, [])
        place = next((each for each in known if each.is_free), None)
        if place is None:
            place = Place(key, self._device.empty(shape, dtype))
            known.append(place)
        if self._noted is not None:
            self._noted.append(place)
        return place.use()


class _Repetition:
    """What was taken before, taken once more."""

    def __init__(self, noted: Sequence[Place]) -> None:
        self._noted = noted
        self._num_taken = 0
        # Whatever was taken of the same place twice was free in between, and is here again.
        self._buffers = {place: place.use() for place in dict.fromkeys(noted)}

    @property
    def buffers(self) -> list[Buffer]:
        """Each once."""
        return list(self._buffers.values())

    def take(self, key: _Key) -> Buffer:
        """The next one. Raises: RuntimeError if it is another."""
        index = self._num_taken
        expected = self._noted[index].key if index < len(self._noted) else None
        if key != expected:
            raise RuntimeError(
                f"array {index + 1} of a repetition is {_words_of(key)}, "
                f"before it was {'not there' if expected is None else _words_of(expected)}"
            )
        self._num_taken += 1
        return self._buffers[self._noted[index]]


def _words_of(key: _Key) -> str:
    shape, dtype = key
    return f"{dtype} {list(shape)}"


def array_of(buffer: Buffer | None) -> DeviceArray | None:
    """A buffer's array, if there is a buffer."""
    return None if buffer is None else buffer.array
