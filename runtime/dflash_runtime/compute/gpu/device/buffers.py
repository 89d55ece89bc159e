"""Memory for results of operations, reused as soon as a result is not referred to any more.

A capture must not allocate, so a step is run once as a trial before it is captured. The arrays that
the trial takes are noted, and the capture takes the same ones in the same order, whether they are
free at that moment (which depends on garbage collection) or not.
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
    """An array; in use as long as this object is referred to."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: DeviceArray) -> None:
        self.array = array


class Place:
    """An array, and a weak reference to the Buffer that uses it, if any."""

    __slots__ = ("_user", "array", "key")

    def __init__(self, key: _Key, array: DeviceArray) -> None:
        self.key = key
        self.array = array
        self._user: weakref.ref[Buffer] | None = None

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def use(self) -> Buffer:
        """A new Buffer for the array, which replaces an earlier one."""
        buffer = Buffer(self.array)
        self._user = weakref.ref(buffer)
        return buffer


Places: TypeAlias = dict[_Key, list[Place]]
"""Places by shape and type."""


class Buffers:
    """Arrays of one device by shape, each used by one Buffer at a time.

    All kernels that use them run in the order of the device's main stream, so an array may be
    reused before its last reader has begun.
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
        """Whether `noted` or `repeated` is active."""
        return self._noted is not None or self._repeated is not None

    @contextmanager
    def noted(self, apart: Places | None = None) -> Iterator[list[Place]]:
        """Note what is taken, in order, for `repeated`. Arrays taken with ``apart=True`` are kept
        in `apart`, which belongs to the caller."""
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
        """The same operations in the same order take the noted arrays; nothing is allocated.

        As long as the result is referred to, these arrays are in use.
        Raises: RuntimeError if a different shape or type is taken.
        """
        repetition = self._repeated = _Repetition(noted)
        try:
            yield repetition.buffers
        finally:
            self._repeated = None

    def take(self, shape: tuple[int, ...], dtype: DTypeLike, *, apart: bool = False) -> Buffer:
        """The first free array of this shape and type, or a new one; with `apart` from the places
        given to `noted`.

        Raises: DeviceOutOfMemory; RuntimeError inside `repeated`.
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
    """Hands out noted arrays a second time."""

    def __init__(self, noted: Sequence[Place]) -> None:
        self._noted = noted
        self._num_taken = 0
        # A place noted twice was free in between, so one Buffer can serve both.
        self._buffers = {place: place.use() for place in dict.fromkeys(noted)}

    @property
    def buffers(self) -> list[Buffer]:
        """Without duplicates."""
        return list(self._buffers.values())

    def take(self, key: _Key) -> Buffer:
        """The next noted array. Raises: RuntimeError if it has another shape or type."""
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
