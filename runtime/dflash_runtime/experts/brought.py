"""Experts that are read from the disk when they are used, as memory does not hold all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import one_line
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.expert_arena import ArenaOptions, ExpertArena

_LOG = logging.getLogger(__name__)

_TRIED_LAYERS = 8
"""Enough to know how long an expert is read."""


def bring(
    backend: ComputeBackend,
    file: GgufFile,
    banks: Mapping[int, ExpertBank],
    *,
    options: ArenaOptions,
) -> ExpertArena | None:
    """Have experts of these banks come into an arena, which the caller closes; None if they are
    used where the file is mapped, as that cannot be. Either is logged."""
    try:
        arena = backend.bring_experts(file, banks, options)
    except (OSError, ValueError) as error:
        # docs: the file's disk, this system, or so little memory allows no reads past the page
        # cache; the operating system reads pages as they are touched, which is much slower
        _LOG.warning("experts are not read from the disk as a whole: %s", one_line(str(error)))
        return None
    if arena is not None:
        stats, num_experts = arena.stats(), sum(bank.num_experts for bank in banks.values())
        # docs: the machine's free memory, its memory cgroup, or --host-memory-mb is smaller than
        # the experts
        _LOG.warning(
            "memory has room for %d of %d experts: the others are read from the disk when they are "
            "used",
            stats.num_slots,
            num_experts,
        )
    return arena


@dataclass(frozen=True, slots=True)
class SharedRoom:
    """Memory of the host for experts of several placements."""

    room_for: Callable[[int], int | None]
    """Of so many bytes of experts, those that may stay in memory; None: all."""
    spare_bytes: Callable[[], int] = lambda: 0
    """See ArenaOptions."""
    most_bytes: int | None = None
    """If a limit was asked for, that with what the process needs besides."""


class Placed(Protocol):
    """A placement whose experts are in memory, or come to an arena."""

    owned: OwnedExperts
    num_users: int
    arena: ExpertArena | None


class SharedArenas:
    """Arenas of placements, of which those in use have equal parts of what is left of a room
    beside experts that are mapped. Used by one thread at a time; closing arenas is up to others."""

    def __init__(
        self, backend: ComputeBackend, file: GgufFile, spec: MoeSpec, *, room: SharedRoom
    ) -> None:
        self._backend, self._file, self._spec, self.room = backend, file, spec, room
        self._sharing: list[ExpertArena] = []
        """Those that had equal parts last."""

    def bytes_beside(self, owned: OwnedExperts, in_use: Sequence[Placed]) -> int | None:
        """Memory for arenas of one more placement and of those in use; None if it needs none, as
        the experts of all fit."""
        room_bytes = self.room.room_for(self._bytes_of([owned, *(x.owned for x in in_use)]))
        return None if room_bytes is None else self._beside_mapped(room_bytes, in_use)

    def bring(
        self, banks: Mapping[int, ExpertBank], num_bytes: int, in_use: Sequence[Placed]
    ) -> ExpertArena | None:
        """An arena for one more placement, beside those in use, which all have `num_bytes`
        together; see `bring`."""
        others = _arenas_of(in_use)
        part_bytes = num_bytes // (len(others) + 1)
        for each in others:
            each.allow(part_bytes)
        # It may get all of it later.
        options = ArenaOptions(num_bytes, spare_bytes=self.room.spare_bytes())
        arena = bring(self._backend, self._file, banks, options=options)
        self._sharing = []  # to be found out again
        if arena is not None:
            arena.allow(part_bytes)
            self._sharing = [*others, arena]
        return arena

    def balance(self, held: Sequence[Placed]) -> None:
        """Of all placements, once others are in use than before."""
        in_use = [each for each in held if each.num_users]
        sharing = _arenas_of(in_use)
        if not sharing or sharing == self._sharing:
            return
        for arena in _arenas_of([each for each in held if not each.num_users]):
            arena.allow(0)
        num_bytes = self._bytes_of([each.owned for each in in_use])
        room_bytes = self.room.room_for(num_bytes)
        if room_bytes is not None:
            num_bytes = self._beside_mapped(room_bytes, in_use) // len(sharing)
        for arena in sharing:
            arena.allow(num_bytes)
        self._sharing = sharing

    def _beside_mapped(self, room_bytes: int, in_use: Iterable[Placed]) -> int:
        mapped = [each.owned for each in in_use if each.arena is None]
        return max(0, room_bytes - self._bytes_of(mapped))

    def _bytes_of(self, placements: Iterable[OwnedExperts]) -> int:
        """Of experts that any of them has."""
        ids: dict[int, set[int]] = {}
        for owned in placements:
            for layer_id, of_layer in owned.by_layer.items():
                ids.setdefault(layer_id, set()).update(of_layer.tolist())
        by_layer_id = self._spec.by_layer_id
        return sum(by_layer_id[layer_id].expert_bytes * len(ids[layer_id]) for layer_id in ids)


def _arenas_of(placements: Iterable[Placed]) -> list[ExpertArena]:
    return [each.arena for each in placements if each.arena is not None]


def with_reads(
    arena: ExpertArena,
    pairs_per_second: float,
    banks: Mapping[int, ExpertBank],
    *,
    trial: Callable[[ExpertBank], int],
) -> float:
    """Pairs a second if all of their experts must be read: no request should be given up sooner.
    `trial` computes some pairs of a bank, and returns how many."""
    tried = [*banks.values()][:_TRIED_LAYERS]
    before, began_s = arena.stats().read_bytes, time.perf_counter()
    num_pairs = sum(map(trial, tried))
    took_s = time.perf_counter() - began_s
    num_read = arena.stats().read_bytes - before
    if not num_read or not num_pairs:
        return pairs_per_second
    largest = max(bank.layer.expert_bytes for bank in tried)
    return 1.0 / (1.0 / pairs_per_second + took_s * largest / num_read)
