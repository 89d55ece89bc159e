"""Capture launches as several graphs, between which the host has work to do.

A pass pauses where the host has to do something (`compute/model.py`); up to there its launches are
one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import Graph, KernelDevice
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.model import HostWork, Pausable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """A graph, and the host work after it, if any."""

    graph: Graph
    host_work: HostWork | None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step of one context bucket, and the buffers that its graphs use (`kept`)."""

    pieces: list[GraphPiece]
    logits: Rows
    kept: list[Buffer]

    def close(self) -> None:
        for piece in self.pieces:
            piece.graph.close()


def capture_pieces(device: KernelDevice, launches: Pausable[T]) -> tuple[list[GraphPiece], T]:
    """Capture a pass, as one piece up to each of its pauses for the host; returns its result too.

    No kernel runs, and no host work is done. Raises: whatever `launches` raises; DeviceUnavailable.
    """
    pieces: list[GraphPiece] = []
    results: list[T] = []
    host_work: HostWork | None = None

    def launch_piece() -> None:
        nonlocal host_work
        host_work = None
        try:
            while host_work is None:
                host_work = next(launches)
        except StopIteration as end:
            results.append(end.value)

    try:
        while not results:
            graph = device.capture(launch_piece)
            pieces.append(GraphPiece(graph, host_work))
    except BaseException:
        for piece in pieces:
            piece.graph.close()
        raise
    finally:
        launches.close()
    return pieces, results[0]
