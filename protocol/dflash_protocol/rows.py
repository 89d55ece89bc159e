"""Hidden rows and sums of them, on the host or on a device: one interface for both.

A GPU backend implements it for its memory, this module for arrays of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array

SomeRows: TypeAlias = slice | I32Array
"""Rows of an array: a slice, or indices."""


class Hidden(Protocol):
    """Hidden rows [T, H] float32, on the host or on a device. They and what is made from them are
    used by one thread."""

    @property
    def is_on_device(self) -> bool: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """[T, H]; of any rank before RoutedBatch.check."""

    def to_host(self) -> F32Array:
        """The rows on the host; those of a device are copied at the first call.

        Raises: DeviceUnavailable.
        """

    def chosen(self, rows: SomeRows) -> Hidden:
        """Some of the rows, in this order. A slice of rows on the host is a view; rows of a device
        are copied lazily."""

    def new_sums(self) -> Sums:
        """Zero sums of the same shape, where the rows are."""


class Sums(Protocol):
    """Sums of rows [T, H] float64, on the host or on a device."""

    @property
    def is_on_device(self) -> bool: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """[T, H]."""

    def add(self, sums: Sums, rows: SomeRows | None = None) -> None:
        """Add `sums` to the distinct `rows`, or to all. Takes over `sums`, which must not be used
        afterwards. Raises: DeviceUnavailable."""

    def add_computed(self, hidden: Hidden, rows: I32Array | None, compute: HostCompute) -> None:
        """Add sums that the host computes from `hidden` to the distinct `rows`, or to all.

        Shapes: hidden [T', H]; rows [T']. Raises: DeviceUnavailable, and what `compute` raises.
        """

    def to_host(self) -> F64Array:
        """The sums on the host: their own memory if they are there, else a copy.

        Raises: DeviceUnavailable.
        """


HostCompute: TypeAlias = Callable[[Hidden, F64Array], None]
"""Adds to sums what it computes from rows on the host. Shapes: [T, H]; [T, H]."""


class HostHidden:
    """Implements Hidden: rows in an array of the host."""

    __slots__ = ("_array", "shape")
    is_on_device = False

    def __init__(self, array: F32Array) -> None:
        self._array = array
        self.shape: tuple[int, ...] = array.shape

    def to_host(self) -> F32Array:
        return self._array

    def chosen(self, rows: SomeRows) -> HostHidden:
        return HostHidden(self._array[rows])

    def new_sums(self) -> HostSums:
        return HostSums(np.zeros(self.shape))


class HostSums:
    """Implements Sums in an array of the host, which is not copied."""

    __slots__ = ("_array",)
    is_on_device = False

    def __init__(self, array: F64Array) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def add(self, sums: Sums, rows: SomeRows | None = None) -> None:
        more = sums.to_host()
        if rows is None:
            np.add(self._array, more, out=self._array)
        else:
            self._array[rows] += more

    def add_computed(self, hidden: Hidden, rows: I32Array | None, compute: HostCompute) -> None:
        if rows is None:
            compute(hidden, self._array)
            return
        sums = np.zeros(hidden.shape)
        compute(hidden, sums)
        self._array[rows] += sums

    def to_host(self) -> F64Array:
        return self._array
