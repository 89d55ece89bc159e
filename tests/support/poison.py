"""Poisons a device's result buffers before each checked run: reading a value that this run has not
written gives NaNs or invalid ids."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import DTypeLike

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice

_POISON = 0xFF


class Poison:
    """Fills the arrays that a device's `empty` returns, and fills them again on demand.

    Works with any KernelDevice, without support in the product.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._empty, self._zeros, self._upload = device.empty, device.zeros, device.upload
        self._has_content = False
        self._results: list[weakref.ref[DeviceArray]] | None = None
        self._methods = {
            "empty": self._poisoned,
            "zeros": self._zeroed,
            "upload": self._uploaded,
        }
        vars(device).update(self._methods)

    def begin(self) -> None:
        """Weights are loaded: arrays from `empty` are result buffers from now on."""
        self._results = []

    def again(self) -> None:
        """Poison all result buffers. No result may be needed any more, and nothing may run."""
        assert self._results is not None
        self._results = [each for each in self._results if each() is not None]
        for reference in self._results:
            array = reference()
            if array is not None:
                self._spoil(array)

    def close(self) -> None:
        """Restore the device."""
        for name in self._methods:
            del vars(self._device)[name]

    def _spoil(self, array: DeviceArray) -> None:
        if array.nbytes:
            poison = np.full(array.nbytes, _POISON, np.uint8)
            self._device.write(array, poison.view(array.dtype).reshape(array.shape))

    def _poisoned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        array = self._empty(shape, dtype)
        if not self._has_content:
            self._spoil(array)
            if self._results is not None:
                self._results.append(weakref.ref(array))
        return array

    def _zeroed(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        self._has_content = True
        try:
            return self._zeros(shape, dtype)
        finally:
            self._has_content = False

    def _uploaded(self, array: AnyArray) -> DeviceArray:
        self._has_content = True
        try:
            return self._upload(array)
        finally:
            self._has_content = False
