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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.ids import F64Array, I64Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels.arena_shadows import NUM_CHOSEN, TWICE
from dflash_runtime.compute.cpu.kernels.arena_tasks import arena_functions
from dflash_runtime.compute.cpu.routers_ahead import RouterAhead
from dflash_runtime.compute.cpu.threads.read_queue import ReadQueue
from dflash_runtime.compute.expert_arena import ArenaOptions, ArenaStats, LookAheadStats, PinStats
from dflash_runtime.compute.half_lives import HALF_LIVES, LEAST_TOKENS, OLDEST, RATES, CachePolicy

_LOG = logging.getLogger(__name__)

_AT_ONCE = 8
"""Experts that are read ahead while batches wait."""

LIMIT_S = 20.0
"""Of a read, after which no more are made."""
_RESIZING = threading.Lock()
"""Memory that one resize gives back, another one must not use meanwhile."""
_HUNG = list["HostArena"]()
"""Arenas whose memory a read that has not ended may still write."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What a layer's words point to."""

    layer_id: int
    expert_ids: I64Array
    """Their global ids."""
    words: I64Array
    mapped: I64Array
    places: I64Array
    slot_of: I64Array
    keys: F64Array
    chosen_at: I64Array
    shadows: I64Array
    shadow_sizes: I64Array
    pins: I64Array


class HostArena:
    """Implements ExpertArena: slots for experts of some banks, which keep it.

    Batches of these banks are computed one at a time. Owns the slots' memory, and, until it is
    closed, the kernel's queue of reads and descriptors of the file.
    """

    def __init__(
        self,
        file: GgufFile,
        banks: Sequence[CpuExpertBank],
        options: ArenaOptions,
        *,
        routers: Mapping[int, RouterAhead] | None = None,
    ) -> None:
        """`options`: those that concern memory, and reads that batches wait for. `routers`: what
        `routers_ahead` finds for these banks, without which steps prefetch nothing.

        Raises: OSError where there are no such reads, or not the memory; ValueError for less than
        the largest layer's experts take.
        """
        self._undo = contextlib.ExitStack()
        self._has_warned = False
        self.pins = PinStats()
        places = [bank.places() for bank in banks]
        slot_bytes = max(_slot_bytes(matrices) for each in places for matrices in each)
        most = max(bank.num_experts for bank in banks)
        self._routers = routers or {}
        num_bytes = options.num_bytes - sum(each.num_bytes for each in self._routers.values())
        if num_bytes < most * slot_bytes:  # a layer's experts need the memory
            self._routers, num_bytes = {}, options.num_bytes
        num_slots = min(num_bytes // slot_bytes, sum(bank.num_experts for bank in banks))
        if num_slots < most:
            raise ValueError(
                f"{num_bytes / 2**20:,.0f} MiB are {num_slots} experts; a layer has {most}"
            )
        self._words = np.zeros(w.NUM_WORDS, np.int64)
        self._words[w.NUM_FREE], self._words[w.SLOT_BYTES] = w.MOST_PENDING, slot_bytes
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._undo.close)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, num_slots * slot_bytes, flags=flags)
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
        self._slots = np.zeros((num_slots, w.SLOT_WORDS), np.int64)
        self._averages = np.zeros(NUM_CHOSEN + 1)
        self._set_words(context, options.policy, num_slots)
        for layer, following in pairwise(self._layers):
            layer.words[w.NEXT] = following.words.ctypes.data
        functions = arena_functions()
        enter, leave = functions.enter.address, functions.leave.address
        for bank, layer in zip(banks, self._layers, strict=True):
            if router := self._routers.get(layer.layer_id):
                layer.words[w.ROUTER] = router.words.ctypes.data
            bank.come_from(layer.words.ctypes.data, (enter, leave), keeps=self)
        self._hottest = list(self._expected(banks, options.shares))

    def stats(self) -> ArenaStats:
        """Counts so far."""
        words, averages = self._words.tolist(), self._averages
        chosen, share, of_twice = averages[NUM_CHOSEN], None, None
        by_half_life = dict[str, float]()
        if chosen > 0 and self._layers[-1].words[w.NUM_CALLS] >= LEAST_TOKENS:
            shares = (1.0 - averages / chosen).tolist()
            share = shares[words[w.DECIDING]]
            of_twice = max(share, shares[TWICE])
            by_half_life = dict(zip((f"{each:g}" for each in HALF_LIVES), shares, strict=False))
        return ArenaStats(
            self.num_slots,
            words[w.FOUND] + words[w.COPIES_FOUND],
            words[w.MISSED] + words[w.COPIES_MISSED],
            words[w.FAILED] + words[w.COPIES_FAILED],
            words[w.READ_BYTES] + words[w.COPIES_READ_BYTES],
            words[w.WAITED_NS] * 1e-9,
            LookAheadStats(
                words[w.CHECKED],
                words[w.PREDICTED],
                words[w.PREFETCHED],
                words[w.PREFETCHED_USED],
            ),
            HALF_LIVES[words[w.DECIDING]],
            share,
            of_twice,
            by_half_life,
            self.pins,
        )

    @property
    def limit_s(self) -> float:
        """How long a read may take."""
        return float(self._words[w.LIMIT_NS]) * 1e-9

    @property
    def address(self) -> int:
        return self._words.ctypes.data

    def place_of(self, layer_id: int, global_expert_id: int) -> tuple[int, int] | None:
        for layer in self._layers:
            if layer.layer_id == layer_id:
                found = np.flatnonzero(layer.expert_ids == global_expert_id)
                return (layer.words.ctypes.data, int(found[0])) if found.size else None
        return None

    @property
    def _slot_bytes(self) -> int:
        return int(self._words[w.SLOT_BYTES])

    @property
    def num_slots(self) -> int:
        """Experts that it has room for at present."""
        return int(self._words[w.NUM_SLOTS])

    @property
    def num_bytes(self) -> int:
        """Memory of these."""
        return self.num_slots * self._slot_bytes

    @property
    def most_bytes(self) -> int:
        """Memory that it may have."""
        return int(self._words[w.MOST_SLOTS]) * self._slot_bytes

    @property
    def empty_bytes(self) -> int:
        """Of `num_bytes`, those that hold no expert yet."""
        is_empty = self._slots[: self.num_slots, w.LAYER] == 0
        return int(np.count_nonzero(is_empty)) * self._slot_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that steps have computed."""
        return int(self._layers[0].words[w.NUM_CALLS])

    def allow(self, num_bytes: int) -> None:
        least = max(len(layer.slot_of) for layer in self._layers)
        num_slots = min(len(self._slots), max(least, num_bytes // self._slot_bytes))
        self._words[w.MOST_SLOTS] = num_slots
        self.resize(self.most_bytes)

    def resize(self, num_bytes: int) -> None:
        """Use so many bytes of the memory that it may have, or what the largest layer needs; the
        operating system gets the rest. Between two batches, which it waits for."""
        with _RESIZING:
            self._resize(num_bytes)

    def _resize(self, num_bytes: int) -> None:
        before, least = self.num_slots, max(len(layer.slot_of) for layer in self._layers)
        most = int(self._words[w.MOST_SLOTS])
        num_slots = min(most, max(least, num_bytes // self._slot_bytes))
        _call(arena_functions().resize, np.array([self._words.ctypes.data, num_slots], np.int64))
        begin = -(-num_slots * self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = before * self._slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        if self._words[w.SHADOW_SLOTS]:
            self._words[w.SHADOW_SLOTS] = max(1, num_slots // len(self._layers))

    def read_hottest(self) -> Iterator[None]:
        """Read the experts that are expected to be used most into empty slots, a few at a time and
        between batches."""
        for first in range(0, len(self._hottest), _AT_ONCE):
            some = self._hottest[first : first + _AT_ONCE]
            words = [self._words.ctypes.data, len(some), *chain(*some)]
            _call(arena_functions().fill, np.array(words, np.int64))
            yield

    def pin_hottest(self, num_experts: int) -> None:
        """Have so many experts of each layer never leave, those that were used most: of the hottest
        layers first, as far as they take half of the slots."""
        room, experts = self.num_slots // 2, dict[int, list[int]]()
        ranked = list[tuple[float, int, I64Array]]()
        for index, layer in enumerate(self._layers):
            keys = layer.keys[-1] - RATES[-1] * layer.words[w.NUM_CALLS]
            hottest = np.argsort(-keys, kind="stable")[:num_experts]
            hottest = hottest[keys[hottest] > -OLDEST]
            ranked.append((float(np.exp(keys[hottest]).sum()), index, hottest))
        for _, index, hottest in sorted(ranked, key=lambda each: -each[0]):
            layer = self._layers[index]
            layer.pins[:] = 0
            layer.pins[hottest[:room]] = 1
            experts[layer.layer_id] = np.sort(layer.expert_ids[hottest[:room]]).tolist()
            room -= len(hottest[:room])
        before = self.pins.found_before, self.pins.missed_before
        if not self.pins.experts:
            before = int(self._words[w.FOUND]), int(self._words[w.MISSED])
        self.pins = PinStats(dict(sorted(experts.items())), *before)

    def warn(self) -> None:
        """Say, once, that reads have failed."""
        num_failed = int(self._words[w.FAILED] + self._words[w.COPIES_FAILED])
        if num_failed and not self._has_warned:
            self._has_warned = True
            # docs: the disk has failed, or took over 20 s, after which nothing more is read so;
            # look at the system's log. What was not read is used where the file is mapped
            _LOG.warning("reads of experts have failed: %d uses", num_failed)

    def before_close(self, callback: Callable[[], None]) -> None:
        """Call it when the arena is closed, before its memory is free."""
        self._undo.callback(callback)

    def close(self) -> None:
        """Ends reads, and waits for a batch that is computed. Later ones find what is there, and
        use the rest where the file is mapped, which must stay. Idempotent."""
        self._words[w.IS_BROKEN] = 1
        _call(arena_functions().fill, np.array([self._words.ctypes.data, 0], np.int64))
        self._undo.close()

    def _opened_queue(self) -> int:
        """The kernel's queue of reads."""
        queue = ReadQueue(w.MOST_PENDING)

        def close() -> None:
            num_pending = w.MOST_PENDING - int(self._words[w.NUM_FREE])
            if not queue.close(num_pending, self.limit_s):
                _HUNG.append(self)

        self._undo.callback(close)
        return queue.context

    def _set_words(self, context: int, policy: CachePolicy, num_slots: int) -> None:
        """The arena's words, but for what is 0 at first."""
        words, num_layers = self._words, len(self._layers)
        requests = np.zeros(w.MOST_PENDING * w.REQUEST_BYTES // 8 + 1, np.int64)
        pending = np.zeros((w.MOST_PENDING, w.PENDING_WORDS), np.int64)
        events = np.zeros(w.MOST_AT_ONCE * w.EVENT_BYTES // 8, np.int64)
        free = np.arange(w.MOST_PENDING)
        chances = np.ones(w.MOST_PREDICTED)
        self._arrays = requests, pending, events, free, chances
        words[w.CONTEXT] = context
        words[w.REQUESTS], words[w.PENDING] = requests.ctypes.data, pending.ctypes.data
        words[w.EVENTS], words[w.FREE] = events.ctypes.data, free.ctypes.data
        words[w.SLOTS], words[w.NUM_SLOTS] = self._slots.ctypes.data, num_slots
        words[w.MOST_SLOTS] = num_slots
        words[w.MEMORY] = np.frombuffer(self._memory, np.uint8).ctypes.data
        words[w.CHANCES] = chances.ctypes.data
        words[w.NUM_LAYERS], words[w.LIMIT_NS] = num_layers, int(LIMIT_S * 1e9)
        words[w.DECIDING], words[w.SHADOW_MISSES] = policy.first, self._averages.ctypes.data
        if policy is CachePolicy.AUTO:
            words[w.SHADOW_SLOTS] = max(1, num_slots // num_layers)

    def _expected(
        self, banks: Iterable[CpuExpertBank], shares: Mapping[int, F64Array]
    ) -> Iterator[tuple[int, int]]:
        """Words of the layer, and number, of the experts that are likeliest to be chosen, as far as
        there are slots. They count as if they had always been chosen so often; others as if they
        never had been, so that a prompt, which uses them all, keeps those of layers that come soon.
        """
        likeliest = list[tuple[float, int, int]]()
        for index, bank in enumerate(banks):
            if (of_layer := shares.get(bank.layer.layer_id)) is not None:
                expected = of_layer[bank.global_expert_ids].tolist()
                likeliest += [(share, index, expert) for expert, share in enumerate(expected)]
        weights = 1.0 / (1.0 - 2.0 ** (-1.0 / np.array(HALF_LIVES)))
        for share, index, expert in sorted(likeliest, reverse=True)[: self.num_slots]:
            if share > 0.0:
                layer = self._layers[index]
                layer.keys[:, expert] = np.log(share * weights)
                yield layer.words.ctypes.data, expert

    def _layer(
        self, file: GgufFile, bank: CpuExpertBank, experts: list[list[tuple[int, int, int]]]
    ) -> _Layer:
        """`experts`: see CpuExpertBank.places."""
        places = np.zeros((bank.num_experts, 3, w.PLACE_WORDS), np.int64)
        for expert, matrices in enumerate(experts):
            for index, (shard, offset, num_bytes) in enumerate(matrices):
                if shard not in self._descriptors:
                    self._descriptors[shard] = file.opened_directly(shard)
                    self._undo.callback(os.close, self._descriptors[shard])
                places[expert, index] = self._descriptors[shard], offset, num_bytes
        layer = _Layer(
            bank.layer.layer_id,
            bank.global_expert_ids,
            np.zeros(w.LAYER_WORDS, np.int64),
            bank.addresses.copy(),
            places,
            np.full(bank.num_experts, -1, np.int64),
            np.full((len(HALF_LIVES), bank.num_experts), -math.inf),
            np.zeros(bank.num_experts, np.int64),
            np.zeros(bank.num_experts, np.int64),
            np.zeros(len(HALF_LIVES) + 1, np.int64),
            np.zeros(bank.num_experts, np.int64),
        )
        words = layer.words
        words[w.ARENA], words[w.ADDRESSES] = self._words.ctypes.data, bank.addresses.ctypes.data
        words[w.MAPPED], words[w.PLACES] = layer.mapped.ctypes.data, places.ctypes.data
        words[w.NUM_EXPERTS] = bank.num_experts
        words[w.SLOT_OF], words[w.KEYS] = layer.slot_of.ctypes.data, layer.keys.ctypes.data
        words[w.CHOSEN_AT] = layer.chosen_at.ctypes.data
        words[w.SHADOWS] = layer.shadows.ctypes.data
        words[w.SHADOW_SIZES] = layer.shadow_sizes.ctypes.data
        words[w.PINS] = layer.pins.ctypes.data
        return layer


def _slot_bytes(matrices: Iterable[tuple[int, int, int]]) -> int:
    """What an expert takes at most, wherever its matrices begin in blocks."""
    return sum(-(-num_bytes // w.BLOCK) * w.BLOCK + w.BLOCK for _, _, num_bytes in matrices)


def _call(function: RowFunction, words: I64Array) -> None:
    """Without the interpreter's lock, as it may wait for a batch."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(function.address)(words.ctypes.data, 0, 0)
