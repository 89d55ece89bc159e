"""What a thread that copies experts of an arena reads them with (kernels/lent_runs)."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels import lent_runs as r
from dflash_runtime.compute.cpu.threads.read_queue import ReadQueue
from dflash_runtime.compute.expert_arena import ExpertArena

_HUNG = list["RunReader"]()
"""Readers whose memory a read that has not ended may still write."""


class RunReader:
    """The words of one thread's reader, whose arena must outlive it; without a queue, where the
    system refuses one, what does not lie in the arena is taken from where the file is mapped.

    Owns: the queue and the memory, until it is closed.
    """

    def __init__(self, arena: ExpertArena) -> None:
        self._arena = arena
        self._memory = mmap.mmap(
            -1, r.NUM_CELLS * r.CELL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # A child process must not share pages that a read writes.
        self._memory.madvise(mmap.MADV_DONTFORK)
        requests = np.zeros((r.NUM_CELLS + 1) * w.REQUEST_BYTES // 8, np.int64)
        cells = np.zeros((r.NUM_CELLS, r.CELL_WORDS), np.int64)
        events = np.zeros(r.NUM_CELLS * w.EVENT_BYTES // 8, np.int64)
        self._arrays = requests, cells, events
        self.words: I64Array = np.zeros(r.READER_WORDS, np.int64)
        """Shapes: [READER_WORDS]."""
        words = self.words
        words[r.ARENA], words[r.REQUESTS] = arena.address, requests.ctypes.data
        words[r.MEMORY] = np.frombuffer(self._memory, np.uint8).ctypes.data
        words[r.CELLS], words[r.EVENTS] = cells.ctypes.data, events.ctypes.data
        words[r.IS_BROKEN] = 1
        self._queue: ReadQueue | None = None
        with contextlib.suppress(OSError):
            self._queue = ReadQueue(r.NUM_CELLS)
            words[r.CONTEXT], words[r.IS_BROKEN] = self._queue.context, 0

    def close(self) -> None:
        """Its thread has ended. Idempotent."""
        self.words[r.IS_BROKEN] = 1
        queue, self._queue = self._queue, None
        num_pending = int(self.words[r.NUM_PENDING])
        if queue is not None and not queue.close(num_pending, self._arena.limit_s):
            _HUNG.append(self)
