"""Copies between the host and a device: how fast, from where."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import U8Array
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import DeviceArray, address
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns
from dflash_runtime.engine.measuring.timing import medians
from dflash_runtime.placement.box import CopySpeed

COPY_BYTES = 256 << 20
_SOURCE_BYTES = 2 << 30
"""Of the mapped file, from which copies are taken in turns: many times what a processor's caches
hold."""
_COLUMNS = 2048
_IN_FLIGHT = 2
"""Transfers from the mapped file at a time: while a layer of a prompt is computed the next one's
experts are copied, so that the start of a transfer costs nothing."""


class TimedCopies:
    """Copies of a fixed size to and from one device. Used by one thread.

    Owns: locked memory, device memory and copying threads, until `close`.
    """

    def __init__(self, backend: CupyBackend, sources: Sequence[U8Array]) -> None:
        """`sources`: parts of a mapped file, read before; so many bytes are copied at a time, then
        the following ones, and all of them again.

        Raises: DeviceUnavailable, DeviceOutOfMemory among them.
        """
        device, rows = backend.device, max(1, COPY_BYTES // (8 * _COLUMNS))
        self._backend, self._device, self.num_bytes = backend, device, rows * 8 * _COLUMNS
        with ExitStack() as undo:
            self._locked = MappedBlock(device, [((rows, _COLUMNS), np.float64)])
            undo.callback(self._locked.close)
            self._stream = device.new_stream()
            undo.callback(self._stream.close)
            self._copier = FileCopier(device)
            undo.callback(self._copier.close)
            self._target = device.empty(self.num_bytes, np.uint8)
            self._residual = device.zeros((rows, _COLUMNS), np.float32)
            self._runs = cycle(self._runs_of(sources))
            self._undo = undo.pop_all()

    def _runs_of(self, sources: Sequence[U8Array]) -> list[FileRuns]:
        """The sources, cut where the target ends."""
        found, runs, first = [], list[tuple[U8Array, DeviceArray]](), 0
        for source in sources:
            if runs and first + source.size > self.num_bytes:
                found.append(FileRuns.of(runs))
                runs, first = [], 0
            size = min(source.size, self.num_bytes)
            runs.append((source[:size], self._target[first : first + size]))
            first += size
        return [*found, FileRuns.of(runs)]

    @property
    def _flat(self) -> U8Array:
        flat: U8Array = self._locked.host[0].reshape(-1).view(np.uint8)
        return flat

    def from_locked_s(self) -> tuple[float]:
        """One copy from locked memory to the device, in seconds."""
        began_s = time.perf_counter()
        self._stream.write(self._target, self._flat)
        self._stream.synchronize()
        return (time.perf_counter() - began_s,)

    def from_pages_s(self) -> tuple[float]:
        """Copies from the mapped file to their end, with as many threads as the engine, as seconds
        of `num_bytes`."""
        began_s = time.perf_counter()
        transfers = [self._copier.begin(next(self._runs)) for _ in range(_IN_FLIGHT)]
        for each in transfers:
            each.wait()
        elapsed_s = time.perf_counter() - began_s
        return (elapsed_s * self.num_bytes / sum(each.num_bytes for each in transfers),)

    def to_host_s(self) -> tuple[float]:
        """A kernel writes locked memory, as it does for rows of chunks."""
        target = self._locked.device[0]
        began_s = time.perf_counter()
        self._backend.ops.payload.kernels.move(
            address(self._target), address(target), target.shape, itemsize=8, side=self._stream
        )
        self._stream.synchronize()
        return (time.perf_counter() - began_s,)

    def kernel_reads_s(self) -> tuple[float]:
        """A kernel reads locked memory."""
        self._device.synchronize()
        began_s = time.perf_counter()
        self._backend.ops.elementwise.add_sums(self._residual, self._locked.device[0])
        self._device.synchronize()
        return (time.perf_counter() - began_s,)

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._undo.close()


def measure_copies(name: str, copies: TimedCopies, *, limit_s: float) -> CopySpeed:
    """Each kind of copy alone."""
    timers = copies.from_locked_s, copies.from_pages_s, copies.to_host_s, copies.kernel_reads_s
    found = medians(timers, limit_s=limit_s)
    rates = [copies.num_bytes / max(seconds, 1e-9) for (seconds,) in found]
    from_locked, from_page_cache, to_host, kernel_reads = rates
    return CopySpeed(name, from_locked, from_page_cache, to_host, kernel_reads)


def parts_of_experts(file: GgufFile, layers: Sequence[MoeLayer]) -> list[U8Array]:
    """Mapped bytes of the first experts, matrix by matrix: the hottest experts are on the device,
    so that those that are copied for a prompt lie scattered between them."""
    parts, left = list[U8Array](), _SOURCE_BYTES
    for layer in layers:
        for global_expert_id in range(layer.num_experts):
            for each in layer.projections:
                if left <= 0:
                    return parts
                parts.append(file.region(*each.place_of(global_expert_id), each.num_bytes))
                left -= each.num_bytes
    return parts
