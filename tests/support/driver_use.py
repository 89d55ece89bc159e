"""What this process has taken of its GPUs' drivers and not given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.driver import Driver

_PAIRS = {
    "events": ("create_event", "destroy_event"),
    "graphs": ("capture", "destroy_graph"),
    "imported memory": ("import_memory", "close_memory"),
    "mapped memory": ("register_host", "unregister_host"),
    "modules": ("load_module", "unload_module"),
    "shown memory": ("export_memory", "free"),
    "streams": ("create_stream", "destroy_stream"),
}
"""Methods of a Driver that take something and give it back."""


class DriverUse:
    """Counts from now on. What nobody refers to any more counts too: it is lost, not given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._taken: dict[str, set[int]] = {kind: set() for kind in _PAIRS}
        for kind, (take, give) in _PAIRS.items():
            taken = self._taken[kind]
            # The host's memory is given back by its own address, not by the one that kernels see.
            noting = _noting(getattr(Driver, take), taken, is_given=take == "register_host")
            monkeypatch.setattr(Driver, take, noting)
            monkeypatch.setattr(Driver, give, _forgetting(getattr(Driver, give), taken))

    def held(self) -> dict[str, int]:
        """Things of each kind; and bytes of arrays, whoever has taken them when."""
        gc.collect()
        # Not isinstance, which asks objects that only pretend to be there.
        devices = [each for each in gc.get_objects() if type(each) is CupyDevice]
        num_bytes = sum(each._pool.used_bytes() for each in devices if hasattr(each, "_pool"))
        return {
            "bytes of arrays": num_bytes,
            **{kind: len(taken) for kind, taken in self._taken.items()},
        }


def _noting(take: Callable[..., Any], taken: set[int], *, is_given: bool) -> Callable[..., Any]:
    def noting(driver: Driver, *args: Any, **options: Any) -> Any:
        found = take(driver, *args, **options)
        handle = found[0] if isinstance(found, tuple) else found
        taken.add(args[0] if is_given else handle)
        return found

    return noting


def _forgetting(give: Callable[..., Any], taken: set[int]) -> Callable[..., Any]:
    def forgetting(driver: Driver, handle: int) -> None:
        taken.discard(handle)
        give(driver, handle)

    return forgetting
