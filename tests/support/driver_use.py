"""Counts resources that this process got from its GPU drivers and has not released."""

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
"""Methods of a Driver that acquire a resource, and those that release it."""


class DriverUse:
    """Counts from its creation. Resources that are unreachable but not released count as held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._taken: dict[str, set[int]] = {kind: set() for kind in _PAIRS}
        for kind, (take, give) in _PAIRS.items():
            taken = self._taken[kind]
            # Host memory is released by its host address, not by the address that kernels use.
            noting = _noting(getattr(Driver, take), taken, is_given=take == "register_host")
            monkeypatch.setattr(Driver, take, noting)
            monkeypatch.setattr(Driver, give, _forgetting(getattr(Driver, give), taken))

    def held(self) -> dict[str, int]:
        """The number of held resources of each kind, and bytes of all arrays."""
        gc.collect()
        # Not isinstance, which would call into weak proxies.
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
