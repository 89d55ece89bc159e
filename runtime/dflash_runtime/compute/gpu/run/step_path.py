"""Paths of a captured step to its routed experts, and the graphs that they replay.

A pass pauses where the host has to do something (`compute/model.py`): its launches up to there are
one graph. A path knows what surrounds the launches: what a trial must not do, what is done between
graphs, and how a replay is begun. The launches themselves are those of the experts that it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.gpu.device.device import Graph, KernelDevice
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe
from dflash_runtime.compute.model import HostWork, Pausable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """A graph, and the host work after it, if any."""

    graph: Graph
    host_work: HostWork | None


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


class StepPath:
    """How the experts of a step are reached. Used by the thread that runs the model.

    What is defined here suits experts on the device: nothing surrounds the launches.
    """

    @property
    def needs_host(self) -> bool:
        """Whether the host works between a step's graphs; no other work may take their buffers."""
        return False

    def experts(self, phase: Phase) -> DeviceMoe:
        """What a model calls in a pass whose launches follow: of a trial, or captured."""
        raise NotImplementedError

    def begin(self, position: int) -> None:
        """The next step, at this position, takes this path; no step may be running."""

    def trial(self) -> AbstractContextManager[None]:
        """A context for a pass that asks no remote owner and whose host work is left out; it must
        have ended on the device before the context does."""
        return nullcontext()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        """Replay a pass of so many tokens. Raises: DaemonUnavailable."""
        for piece in pieces:
            piece.graph.replay()

    def replayed(self, pieces: Sequence[GraphPiece]) -> Callable[[], None]:
        """A function that runs a captured step of one token. It raises as `run`."""
        return partial(self.run, pieces)

    def count_step(self) -> None:
        """Count a decode step that was replayed, unless the device counts."""

    def follow_owners(self) -> None:
        """See CapturedStep.follow_owners."""

    def is_trusted(self, argmax: I32Array) -> bool:
        """Whether a pass that has ended is right, as far as can be told. Shapes: argmax [T]."""
        return True

    def close(self) -> None:
        """Release what it owns; no step may be running."""


class LocalPath(StepPath):
    """All experts are on the device."""

    def __init__(self, moe: DeviceMoe) -> None:
        self._moe = moe

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe
