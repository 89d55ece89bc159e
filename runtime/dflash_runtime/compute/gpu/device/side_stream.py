"""Streams of a real device beside its main one, their events, and captured graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dflash_protocol.errors import DeviceUnavailable, SettingsError
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, Graph, Grid, Mark, address
from dflash_runtime.compute.gpu.device.driver import Driver


class CupyMark:
    """An event; returned to its pool when it is not referred to any more."""

    def __init__(self, handle: int, unused: list[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class Events:
    """A pool of one device's events."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._unused: list[int] = []

    def record(self, stream: int) -> CupyMark:
        """Record an event in the stream. Raises: DeviceUnavailable."""
        handle = self._unused.pop() if self._unused else self._driver.create_event()
        mark = CupyMark(handle, self._unused)
        self._driver.record_event(handle, stream)
        return mark

    def close(self) -> None:
        """Destroy unused events; the calling thread uses the device."""
        while self._unused:
            self._driver.destroy_event(self._unused.pop())


class CupyGraph:
    """Launches that the driver has captured."""

    def __init__(self, driver: Driver, *, index: int, stream: int, executable: int) -> None:
        self._driver = driver
        self._index = index
        self._stream = stream
        self._executable: int | None = executable

    def replay(self) -> None:
        self.replay_in(self._stream)

    def replay_in(self, stream: int) -> None:
        """Replay in another stream of the driver."""
        if self._executable is None:
            raise SettingsError("the graph is closed")
        self._driver.use(self._index)
        self._driver.launch_graph(self._executable, stream)

    @property
    def launcher(self) -> tuple[int, int, int]:
        assert self._executable is not None
        return self._driver.address_of("launch_graph"), self._executable, self._stream

    def close(self) -> None:
        """Idempotent."""
        if self._executable is not None:
            with suppress(DeviceUnavailable):  # a failed device releases nothing
                self._driver.use(self._index)
                self._driver.destroy_graph(self._executable)
            self._executable = None


class CupySideStream:
    """Implements device.SideStream. Owns: the driver's stream."""

    def __init__(
        self,
        driver: Driver,
        index: int,
        *,
        name: str,
        launch: Callable[..., None],
        priority: int = 0,
    ) -> None:
        """A stream of the driver's device `index`, in which `launch` starts kernels; `name` is for
        messages."""
        self._driver, self._index, self._name = driver, index, name
        self._launch = launch
        driver.use(index)
        self._stream: int | None = driver.create_stream(priority=priority)

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, CupyMark)
        self._driver.wait_for_event(self._begun(), mark.handle)

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        stream = self._begun()
        if source.nbytes != destination.nbytes or not source.flags.c_contiguous:
            raise SettingsError(f"{source.nbytes} bytes do not fill {destination.nbytes}")
        if source.nbytes:
            self._driver.copy(address(destination), address(source), source.nbytes, stream=stream)

    def read(self, destination: AnyArray, source: DeviceArray) -> None:
        stream = self._begun()
        if destination.nbytes != source.nbytes or not destination.flags.c_contiguous:
            raise SettingsError(f"{source.nbytes} bytes do not fill {destination.nbytes}")
        if source.nbytes:
            self._driver.copy(address(destination), address(source), source.nbytes, stream=stream)

    def launch(self, kernel: Any, grid: Grid, block: int, args: ctypes.Structure) -> None:
        self._launch(kernel, grid, block, args, overlaps_previous=False, stream=self._begun())

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CupyGraph)
        graph.replay_in(self._begun())

    @property
    def functions(self) -> tuple[int, int, int, int]:
        stream, address_of = self._begun(), self._driver.address_of
        names = "copy_to_device", "synchronize_stream", "wait_for_event"
        copy, synchronize, wait_for = map(address_of, names)
        return copy, synchronize, wait_for, stream

    def is_empty(self) -> bool:
        return self._driver.is_empty(self._begun())

    def synchronize(self, deadline_s: float | None = None) -> None:
        self._driver.synchronize_stream(self._begun(), deadline_s)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(DeviceUnavailable):  # a failed device releases nothing
                self._driver.use(self._index)
                self._driver.synchronize_stream(stream)
                self._driver.destroy_stream(stream)

    def _begun(self) -> int:
        """The stream, after making its device the calling thread's current one."""
        if self._stream is None:
            raise DeviceUnavailable(f"a stream of {self._name} is closed")
        self._driver.use(self._index)
        return self._stream
