"""Device arrays that numpy can read and write, so that tests of the emulation run on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import KernelDevice


class ReadableArray(NDArrayOperatorsMixin):
    """Implements device.DeviceArray with numpy's interface.

    numpy works on a copy on the host, which is copied back after a write.
    """

    __slots__ = ("__weakref__", "_device", "raw")

    def __init__(self, device: KernelDevice, raw: Any) -> None:
        self.raw = raw
        """The device's own array."""
        self._device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.shape)

    @property
    def dtype(self) -> Any:
        return self.raw.dtype

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)

    @property
    def size(self) -> int:
        return int(self.raw.size)

    @property
    def flags(self) -> Any:
        return self.raw.flags

    @property
    def data(self) -> Any:
        return self.raw.data

    @property
    def device(self) -> Any:
        return self.raw.device

    def get(self) -> AnyArray:
        """As CuPy calls it: a copy on the host."""
        copy: AnyArray = self.raw.get()
        return copy

    def reshape(self, *shape: Any) -> ReadableArray:
        return ReadableArray(self._device, self.raw.reshape(*shape))

    def view(self, dtype: DTypeLike) -> ReadableArray:
        return ReadableArray(self._device, self.raw.view(dtype))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return ReadableArray(self._device, self.raw[key])
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        whole = self._device.download(self)
        whole[key] = value
        self._device.write(self, whole)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        host = self._device.download(self)
        return host if dtype is None else host.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        given = [np.asarray(each) if isinstance(each, ReadableArray) else each for each in inputs]
        return getattr(ufunc, method)(*given, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy looks these up before `__array__`
            raise AttributeError(name)
        return getattr(np.asarray(self), name)
