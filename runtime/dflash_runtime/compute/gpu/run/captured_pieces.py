"""Capture launches in pieces: where the host has something to do in between, a piece ends.

A model's forward pass is one function that cannot stop half way, so it runs in a thread of its own
while it is captured, and never at the same time as whoever records it. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import Graph, KernelDevice
from dflash_runtime.compute.gpu.layers.values import F32Rows
from dflash_runtime.interrupts import uninterrupted

Then: TypeAlias = Callable[[], None]
"""What the host does when it has started a piece."""
Pause: TypeAlias = Callable[[Then], None]
"""Ends a piece."""


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """Launches, and what the host does next, if anything."""

    graph: Graph
    then: Then | None


@dataclass(frozen=True, slots=True)
class Capture:
    """A step of one context bucket, and what must stay as it is for it."""

    pieces: list[GraphPiece]
    logits: F32Rows
    kept: list[Buffer]

    def close(self) -> None:
        for piece in self.pieces:
            piece.graph.close()


class _Abandoned(BaseException):
    """Capture has failed: whatever runs must end."""


class _Stretches:
    """Runs `record` from one pause to the next."""

    def __init__(self, record: Callable[[Pause], None]) -> None:
        self._record = record
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_abandoned = False
        self.is_done = False
        self.then: Then | None = None
        """What the last pause was for."""
        self._thread = threading.Thread(target=self._run, name="dflash-record", daemon=True)
        self._thread.start()

    def proceed(self) -> None:
        """Run until the next pause, or the end. Raises whatever `record` raises."""
        self.then = None
        with uninterrupted():  # nobody else may use the device while the other thread does
            self._go.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        with uninterrupted():
            self._is_abandoned = True
            self._go.release()
            self._thread.join()
        # Whoever still has the pause must not keep what was captured with it.
        del self._record, self.then

    def _pause(self, then: Then) -> None:
        self.then = then
        self._stopped.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        self._go.acquire()
        if self._is_abandoned:
            return
        try:
            self._record(self._pause)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._stopped.release()


def capture_pieces(device: KernelDevice, record: Callable[[Pause], None]) -> list[GraphPiece]:
    """What `record` launches, cut where it calls the pause that it is given.

    Nothing is run. Raises: whatever `record` raises; DeviceUnavailable.
    """
    pieces: list[GraphPiece] = []
    stretches = _Stretches(record)
    try:
        while not stretches.is_done:
            graph = device.capture(stretches.proceed)
            pieces.append(GraphPiece(graph, stretches.then))
    except BaseException:
        for piece in pieces:
            piece.graph.close()
        raise
    finally:
        stretches.close()
    return pieces
