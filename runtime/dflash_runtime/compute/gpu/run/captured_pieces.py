"""Capture launches as several graphs, between which the host has work to do.

A model's forward pass is one function that cannot return half way. While it is captured it runs in
its own thread; that thread and the capturing one take turns.
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

HostWork: TypeAlias = Callable[[], None]
"""What the host does after it has started a piece."""
Pause: TypeAlias = Callable[[HostWork], None]
"""Called by the forward pass: ends the piece before this host work."""


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """A graph, and the host work after it, if any."""

    graph: Graph
    host_work: HostWork | None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step of one context bucket, and the buffers that its graphs use (`kept`)."""

    pieces: list[GraphPiece]
    logits: F32Rows
    kept: list[Buffer]

    def close(self) -> None:
        for piece in self.pieces:
            piece.graph.close()


class _Abandoned(BaseException):
    """Raised in the forward pass to end its thread after a failed capture."""


class _PausableLaunches:
    """Runs `launch_all` in a thread, from one pause to the next.

    States: waiting for `run_to_pause`; running, while the caller waits; done. Owns: the thread.
    """

    def __init__(self, launch_all: Callable[[Pause], None]) -> None:
        self._launch_all = launch_all
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_abandoned = False
        self.is_done = False
        self.host_work: HostWork | None = None
        """Given at the last pause."""
        self._thread = threading.Thread(target=self._run, name="dflash-capture", daemon=True)
        self._thread.start()

    def run_to_pause(self) -> None:
        """Run until the next pause, or the end. Raises: whatever `launch_all` raises."""
        self.host_work = None
        with uninterrupted():  # the device is the other thread's until this ends
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
        # A reference to the pause that is left somewhere must not keep the model alive.
        del self._launch_all, self.host_work

    def _pause(self, host_work: HostWork) -> None:
        self.host_work = host_work
        self._stopped.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        self._go.acquire()
        if self._is_abandoned:
            return
        try:
            self._launch_all(self._pause)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._stopped.release()


def capture_pieces(device: KernelDevice, launch_all: Callable[[Pause], None]) -> list[GraphPiece]:
    """Capture what `launch_all` launches, as one piece up to each call of the pause it is given.

    No kernel runs. Raises: whatever `launch_all` raises; DeviceUnavailable.
    """
    pieces: list[GraphPiece] = []
    launches = _PausableLaunches(launch_all)
    try:
        while not launches.is_done:
            graph = device.capture(launches.run_to_pause)
            pieces.append(GraphPiece(graph, launches.host_work))
    except BaseException:
        for piece in pieces:
            piece.graph.close()
        raise
    finally:
        launches.close()
    return pieces
