"""Launches that are made once and started again and again, with other addresses perhaps.

To fill in and check a kernel's arguments takes longer than to start it, and the layers of a chunk
are launched with the same ones, chunk after chunk, but for where their rows are.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_runtime.compute.cupy.device import Grid, Kernel, KernelDevice

T = TypeVar("T")

_MOST_KEPT = 1024
"""Objects, some for each layer of a model; of more than that most are gone."""


@dataclass(slots=True, eq=False)
class PreparedLaunch:
    """A kernel and all that it is launched with; `args`, which are copied by each launch, may be
    changed in between."""

    kernel: Kernel
    grid: Grid
    block: int
    args: ctypes.Structure
    shared_bytes: int = 0

    def start(self, device: KernelDevice) -> None:
        """As KernelDevice.launch."""
        device.launch(self.kernel, self.grid, self.block, self.args, shared_bytes=self.shared_bytes)


class Kept(Generic[T]):
    """What was made for an object and a key that is compared: for each object the last one. The
    object may go."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[object], object, T]] = {}

    def has(self, of: object) -> bool:
        """Whether something was made for this object."""
        known = self._known.get(id(of))
        return known is not None and known[0]() is of

    def get(self, of: object, key: object) -> T | None:
        """What was made for just these, if it was."""
        known = self._known.get(id(of))
        if known is None or known[0]() is not of or known[1] != key:
            return None
        return known[2]

    def put(self, of: object, key: object, made: T) -> T:
        """The same."""
        if id(of) not in self._known and len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[id(of)] = weakref.ref(of), key, made
        return made

    def clear(self) -> None:
        """Nothing was made."""
        self._known.clear()
