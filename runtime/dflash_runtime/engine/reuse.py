"""Reuse of what an engine's one cache holds, by prompts that begin like a sequence before them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.backend import Chunking
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.engine.checkpoints import StateCheckpoints
from dflash_runtime.engine.prefix import CachedPrefix


class SequenceReuse:
    """The tokens in a cache, and checkpoints of its states where it cannot be cut anywhere.

    States: the positions up to the last `add` are known, until `go_to` or `cut`. Used by one
    thread. Owns: the checkpoints' memory.
    """

    def __init__(
        self, cache: KvCache, num_positions: int, *, chunking: Chunking, can_be_cut: bool
    ) -> None:
        self.checkpoints = StateCheckpoints(cache)
        self._cache = cache
        self._prefix = CachedPrefix(num_positions, invariant_from=chunking.invariant_from)
        self._smallest = chunking.smallest
        self._can_be_cut = can_be_cut
        self._scope = ""

    def enter(self, scope: str) -> None:
        """Drop everything that was computed in another scope."""
        if scope != self._scope:
            self.cut(0)
            self._scope = scope

    def cut(self, first_position: int) -> None:
        """Forget cached positions from this one on, which are about to be overwritten."""
        self._prefix.cut(first_position)
        self.checkpoints.cut(first_position)

    def go_to(self, position: int) -> None:
        """Have the cache go on there: where the last chunk ended, or 0, or a reusable position."""
        self.cut(position)
        self.checkpoints.restore(position)

    def add(self, first_position: int, token_ids: I32Array) -> None:
        """These tokens were computed as one chunk. Shapes: token_ids [T]."""
        self._prefix.add(first_position, token_ids)

    def boundary(self, prompt: I32Array, stop_ids: Collection[int]) -> int:
        """Where the last turn of a prompt begins: worth a state checkpoint, as a later prompt may
        differ only from there on. 0 if there is none, or none is needed. Shapes: prompt [T]."""
        if self._can_be_cut:
            return 0
        ends = np.flatnonzero(np.isin(prompt, list(stop_ids)))
        place = min(int(ends[-1]) + 1 if ends.size else 0, prompt.size - self._smallest)
        return place if place >= self._smallest else 0

    def num_reusable(
        self, prompt: I32Array, chunks: Iterable[tuple[int, int]], *, boundary: int
    ) -> int:
        """Length of the prompt's prefix that is in the cache or restorable from a checkpoint.
        `chunks`: see CachedPrefix.reusable. Shapes: prompt [T]."""
        ranges = self._prefix.reusable(prompt, chunks, boundary=boundary)
        places = {each[-1] for each in ranges} | {self._prefix.num_cached}
        places = {each for each in places if self._cache.can_resume(each)}
        places |= {*self.checkpoints.positions}
        return max(place for place in (0, *places) if any(place in each for each in ranges))

    def save_state(self, num_positions: int) -> None:
        """Save a checkpoint of the state at that many positions, where the last chunk has ended;
        nothing if the cache can be cut anywhere."""
        if not self._can_be_cut:
            self.checkpoints.save(num_positions)
