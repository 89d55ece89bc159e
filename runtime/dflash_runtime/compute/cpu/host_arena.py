"""Experts in as much of the host's memory as there is; the others are read when they are used.

Reads go past the page cache, all of a layer's missing experts at once (kernels/arena_tasks). The
page cache would read them page by page as they are touched, and drop pages of any expert for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.ids import F64Array, I64Array
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import arena_tasks as t
from dflash_runtime.compute.cpu.routers_ahead import RouterAhead
from dflash_runtime.compute.cpu.threads.system import READ_SYSCALLS
from dflash_runtime.compute.expert_arena import ArenaStats
from dflash_runtime.compute.half_lives import HALF_LIVES, CachePolicy

_LOG = logging.getLogger(__name__)

_TURN_S = 0.1

LIMIT_S = 20.0
"""Of a read, after which no more are made."""
_HUNG = list["HostArena"]()
"""Arenas whose memory a read that has not ended may still write."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What a layer's words point to."""

    words: I64Array
    mapped: I64Array
    places: I64Array
    slot_of: I64Array
    keys: F64Array
    chosen_at: I64Array
    shadows: I64Array
    shadow_sizes: I64Array


class HostArena:
    """Implements ExpertArena: slots for experts of some banks, which must not outlive it.

    Batches of these banks are computed one at a time. Owns the slots' memory, and, until it is
    closed, the kernel's queue of reads and descriptors of the file.
    """

    def __init__(
        self,
        file: GgufFile,
        banks: Sequence[CpuExpertBank],
        *,
        num_bytes: int,
        routers: Mapping[int, RouterAhead] | None = None,
        policy: CachePolicy = CachePolicy.AUTO,
    ) -> None:
        """`num_bytes`: of all slots. `routers`: what `routers_ahead` finds for these banks in
        this order; without, steps prefetch nothing. `policy`: which experts leave.

        Raises: OSError where there are no such reads, or not the memory; ValueError for less than
        the largest layer's experts take.
        """
        self._undo = contextlib.ExitStack()
        self._has_warned = False
        places = [bank.places() for bank in banks]
        slot_bytes = max(_slot_bytes(matrices) for each in places for matrices in each)
        self._num_slots = num_bytes // slot_bytes
        most = max(bank.num_experts for bank in banks)
        if self._num_slots < most:
            raise ValueError(
                f"{num_bytes / 2**20:,.0f} MiB are {self._num_slots} experts; a layer has {most}"
            )
        words = self._words = np.zeros(t.NUM_WORDS, np.int64)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._undo.close)
            num_bytes = self._num_slots * slot_bytes
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, num_bytes, flags=flags)
            # A child process must not share pages that a read writes.
            self._memory.madvise(mmap.MADV_DONTFORK)
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            context = self._opened_queue()
            self._descriptors: dict[int, int] = {}
            self._layers = [
                self._layer(file, bank, each) for bank, each in zip(banks, places, strict=True)
            ]
            on_error.pop_all()
        requests = np.zeros(t.MOST_PENDING * t.REQUEST_BYTES // 8 + 1, np.int64)
        pending = np.zeros((t.MOST_PENDING, t.PENDING_WORDS), np.int64)
        events = np.zeros(t.MOST_AT_ONCE * t.EVENT_BYTES // 8, np.int64)
        free = np.arange(t.MOST_PENDING)
        slots = np.zeros((self._num_slots, t.SLOT_WORDS), np.int64)
        memory = np.frombuffer(self._memory, np.uint8)
        chances, misses = np.ones(t.MOST_PREDICTED), np.zeros(len(HALF_LIVES))
        self._arrays = requests, pending, events, free, slots, memory, chances, misses
        words[t.CONTEXT], words[t.NUM_FREE] = context, t.MOST_PENDING
        words[t.REQUESTS], words[t.PENDING] = requests.ctypes.data, pending.ctypes.data
        words[t.EVENTS], words[t.FREE] = events.ctypes.data, free.ctypes.data
        words[t.SLOTS], words[t.NUM_SLOTS] = slots.ctypes.data, self._num_slots
        words[t.MEMORY], words[t.SLOT_BYTES] = memory.ctypes.data, slot_bytes
        words[t.NUM_LAYERS], words[t.CHANCES] = len(banks), chances.ctypes.data
        words[t.LIMIT_NS] = int(LIMIT_S * 1e9)
        words[t.DECIDING], words[t.SHADOW_MISSES] = policy.first, misses.ctypes.data
        if policy is CachePolicy.AUTO:
            words[t.SHADOW_SLOTS] = max(1, self._num_slots // len(banks))
        for layer, following in pairwise(self._layers):
            layer.words[t.NEXT] = following.words.ctypes.data
        self._routers = routers or {}
        for bank, layer in zip(banks, self._layers, strict=True):
            if router := self._routers.get(bank.layer.layer_id):
                layer.words[t.ROUTER] = router.words.ctypes.data
        enter, leave = (each.address for each in t.arena_functions())
        for bank, layer in zip(banks, self._layers, strict=True):
            bank.come_from(layer.words.ctypes.data, (enter, leave))

    def stats(self) -> ArenaStats:
        """Counts so far."""
        words = self._words.tolist()
        return ArenaStats(
            self._num_slots,
            words[t.FOUND],
            words[t.MISSED],
            words[t.FAILED],
            words[t.READ_BYTES],
            words[t.WAITED_NS] * 1e-9,
            words[t.PREFETCHED],
            words[t.PREFETCHED_USED],
            words[t.CHECKED],
            words[t.PREDICTED],
            HALF_LIVES[words[t.DECIDING]],
        )

    def warn(self) -> None:
        """Say, once, that reads have failed."""
        if self._words[t.FAILED] and not self._has_warned:
            self._has_warned = True
            # docs: the disk has failed, or took over 20 s, after which nothing more is read so;
            # look at the system's log. What was not read is used where the file is mapped
            _LOG.warning("reads of experts have failed: %d uses", self._words[t.FAILED])

    def close(self) -> None:
        """No batch may be running, nor come later. Idempotent."""
        self._words[t.IS_BROKEN] = 1
        self._undo.close()

    def _opened_queue(self) -> int:
        """The kernel's queue of reads."""
        if not sys.platform.startswith("linux") or platform.machine() not in READ_SYSCALLS:
            raise OSError("this system has no such reads")
        numbers = READ_SYSCALLS[platform.machine()]
        library, context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
        if library.syscall(numbers["setup"], t.MOST_PENDING, ctypes.byref(context)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        queue = context.value

        def destroy() -> None:
            # It waits for reads that are pending, for as long as they take.
            num_pending = t.MOST_PENDING - int(self._words[t.NUM_FREE])
            events = (ctypes.c_int64 * (num_pending * t.EVENT_BYTES // 8))()
            turn = (ctypes.c_long * 2)(0, int(_TURN_S * 1e9))
            end_s = time.monotonic() + self._words[t.LIMIT_NS] * 1e-9
            while num_pending > 0 and time.monotonic() < end_s:
                arguments = ctypes.c_long(1), ctypes.c_long(num_pending), events, turn
                ended = library.syscall(numbers["getevents"], ctypes.c_ulong(queue), *arguments)
                num_pending -= max(0, ended)
            if num_pending:
                _HUNG.append(self)
            else:
                library.syscall(numbers["destroy"], ctypes.c_ulong(queue))

        self._undo.callback(destroy)
        return queue

    def _layer(
        self, file: GgufFile, bank: CpuExpertBank, experts: list[list[tuple[int, int, int]]]
    ) -> _Layer:
        """`experts`: see CpuExpertBank.places."""
        places = np.zeros((bank.num_experts, 3, t.PLACE_WORDS), np.int64)
        for expert, matrices in enumerate(experts):
            for index, (shard, offset, num_bytes) in enumerate(matrices):
                if shard not in self._descriptors:
                    self._descriptors[shard] = file.opened_directly(shard)
                    self._undo.callback(os.close, self._descriptors[shard])
                places[expert, index] = self._descriptors[shard], offset, num_bytes
        layer = _Layer(
            np.zeros(t.LAYER_WORDS, np.int64),
            bank.addresses.copy(),
            places,
            np.full(bank.num_experts, -1, np.int64),
            np.full((len(HALF_LIVES), bank.num_experts), -math.inf),
            np.zeros(bank.num_experts, np.int64),
            np.zeros(bank.num_experts, np.int64),
            np.zeros(len(HALF_LIVES), np.int64),
        )
        words = layer.words
        words[t.ARENA], words[t.ADDRESSES] = self._words.ctypes.data, bank.addresses.ctypes.data
        words[t.MAPPED], words[t.PLACES] = layer.mapped.ctypes.data, places.ctypes.data
        words[t.NUM_EXPERTS] = bank.num_experts
        words[t.SLOT_OF], words[t.KEYS] = layer.slot_of.ctypes.data, layer.keys.ctypes.data
        words[t.CHOSEN_AT] = layer.chosen_at.ctypes.data
        words[t.SHADOWS] = layer.shadows.ctypes.data
        words[t.SHADOW_SIZES] = layer.shadow_sizes.ctypes.data
        return layer


def _slot_bytes(matrices: Iterable[tuple[int, int, int]]) -> int:
    """What an expert takes at most, wherever its matrices begin in blocks."""
    return sum(-(-num_bytes // t.BLOCK) * t.BLOCK + t.BLOCK for _, _, num_bytes in matrices)
