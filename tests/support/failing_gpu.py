"""An emulated GPU whose driver fails: once, at the n-th call, or from there on, as one that has
fallen off its bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable
from support.emulated_device import EmulatedDevice
from support.emulated_device.emulated_device import EmulatedGraph
from support.emulated_device.side_stream import EmulatedSideStream

CALLS: dict[type[Any], tuple[str, ...]] = {
    EmulatedDevice: (
        "empty", "write", "download", "copy", "launch", "capture", "synchronize", "mark",
        "map_host", "new_stream",
    ),
    EmulatedGraph: ("replay",),
    EmulatedSideStream: ("copy", "wait_for", "launch", "synchronize", "is_empty"),
}  # fmt: skip
"""What a driver does, by the class that asks it, but for giving back: nobody can do without."""

ALLOCATIONS: dict[type[Any], tuple[str, ...]] = {EmulatedDevice: ("empty", "map_host")}


def lost() -> DeviceUnavailable:
    return DeviceUnavailable("cuda:0: the GPU has fallen off the bus")


def taken() -> DeviceOutOfMemory:
    return DeviceOutOfMemory("cuda:0", num_bytes=1 << 20, free_bytes=0, total_bytes=1 << 30)


class FailingGpu:
    """Counts the driver's calls of all emulated GPUs, and makes some fail."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        error: Callable[[], Exception] = lost,
        calls: dict[type[Any], tuple[str, ...]] = CALLS,
    ) -> None:
        self.num_calls = 0
        """Since `fail_at`."""
        self._error, self._first, self._last = error, 0, 0
        for kind, names in calls.items():
            for name in names:
                monkeypatch.setattr(kind, name, self._failing(getattr(kind, name)))

    def fail_at(self, call: int, *, is_gone: bool = False) -> None:
        """The `call`-th from now on fails; `is_gone`: and all later ones. 0: none."""
        self.num_calls, self._first = 0, call
        self._last = 1 << 62 if is_gone and call else call

    @property
    def has_failed(self) -> bool:
        return 0 < self._first <= self.num_calls

    def _failing(self, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self._first <= self.num_calls <= self._last:
                raise self._error()
            return method(*args, **options)

        return call
