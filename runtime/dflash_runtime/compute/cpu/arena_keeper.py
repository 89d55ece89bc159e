"""A thread beside an arena: it reads the hottest experts when a file was opened, pins some, and has
experts leave memory that other programs need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.compute.expert_arena import ArenaOptions
from dflash_runtime.compute.memory import host_memory

_LOG = logging.getLogger(__name__)

_TURN_S = 1.0
_BETWEEN_READS_S = 0.001
"""In which a batch that waits for the arena gets it."""
_TURNS_OF_ROOM = 10
"""In which there is more memory again before it is taken."""
_LEAST_SHARE = 0.02
"""Of an arena's memory: less is not taken again."""


def _free_bytes() -> int:
    return host_memory().free_bytes


class ArenaKeeper:
    """Looks after an arena until it is closed, which must be before the arena is."""

    def __init__(
        self,
        arena: HostArena,
        options: ArenaOptions,
        *,
        free_bytes: Callable[[], int] = _free_bytes,
    ) -> None:
        """`free_bytes`: of the host's memory, at present; 0 if that is not known."""
        self._arena, self._options, self._free_bytes = arena, options, free_bytes
        self._turns_of_room = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experts-in-memory", daemon=True)

    def start(self) -> None:
        """Begin to read the hottest experts."""
        self._thread.start()

    def close(self) -> None:
        """Waits for reads that have begun. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """What is done in each turn."""
        arena, options = self._arena, self._options
        if options.spare_bytes:
            self._follow_memory(self._free_bytes())
        if options.pins and arena.num_tokens >= options.pins_after and not arena.pins.experts:
            arena.pin_hottest(options.pins)

    def _run(self) -> None:
        for _ in self._arena.read_hottest():
            if self._stop.wait(_BETWEEN_READS_S):
                return
        while not self._stop.wait(_TURN_S):
            self.look()

    def _follow_memory(self, free_bytes: int) -> None:
        """Have half of the spare memory free at least, and take what is free for a while."""
        if not free_bytes:
            return
        arena, spare_bytes = self._arena, self._options.spare_bytes
        before = arena.num_bytes
        more_bytes = free_bytes - arena.empty_bytes - spare_bytes
        has_room = min(more_bytes, arena.most_bytes - before) > _LEAST_SHARE * arena.most_bytes
        self._turns_of_room = self._turns_of_room + 1 if has_room else 0
        if more_bytes >= -spare_bytes // 2 and self._turns_of_room < _TURNS_OF_ROOM:
            return
        self._turns_of_room = 0
        arena.resize(before + more_bytes)
        if arena.pins.experts:
            arena.pin_hottest(self._options.pins)  # of what there is now, half at most
        if arena.num_bytes != before:
            # docs: other programs need the memory of experts, or need it no more; experts without
            # memory are read from the disk when they are used
            _LOG.info(
                "experts have %.0f MiB of memory, before %.0f",
                arena.num_bytes / 2**20,
                before / 2**20,
            )
