"""Slots of an arena by size: layers whose experts take as much share a pool of slots.

Types differ from layer to layer in most files: with slots of one size those of the smaller experts
would be empty at their ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.kernels import arena_words as w


@dataclass(frozen=True, slots=True)
class PoolKind:
    """What a pool is to be."""

    slot_bytes: int
    num_slots: int
    least: int
    """Experts of its largest layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Slots of one size, some of which may not be in use."""

    kind: PoolKind
    words: I64Array
    """See arena_words.POOL_WORDS."""
    offset: int
    """Of their memory within the arena's."""


def slot_bytes(matrices: Iterable[tuple[int, int, int]]) -> int:
    """What an expert takes at most, wherever its matrices begin in blocks. `matrices`: see
    CpuExpertBank.places."""
    return sum(-(-num_bytes // w.BLOCK) * w.BLOCK + w.BLOCK for _, _, num_bytes in matrices)


def pool_kinds(sizes: Sequence[int], counts: Sequence[int], num_bytes: int) -> list[PoolKind]:
    """Pools, smallest slots first: the same share of the experts in each, and room for all of its
    largest layer. A layer uses the smallest slots that its experts fit in.

    `sizes`, `counts`: what an expert of each layer takes, and how many there are.
    Raises: ValueError for less than the largest layer.
    """
    chosen = sorted(set(sizes))
    while True:
        pool_of = [min(size for size in chosen if size >= each) for each in sizes]
        needed_bytes = sum(map(operator.mul, pool_of, counts))
        kinds = []
        for size in chosen:
            theirs = [count for count, pool in zip(counts, pool_of, strict=True) if pool == size]
            num_slots = min(sum(theirs), sum(theirs) * num_bytes // needed_bytes)
            kinds.append(PoolKind(size, num_slots, max(theirs)))
        tight = [index for index, kind in enumerate(kinds) if kind.num_slots < kind.least]
        if not tight:
            return kinds
        if len(kinds) == 1:
            mib, [kind] = num_bytes / 2**20, kinds
            raise ValueError(
                f"{mib:,.0f} MiB are {kind.num_slots} experts; a layer has {kind.least}"
            )
        del chosen[min(tight[0], len(chosen) - 2)]  # its layers use slots of the next size


def pools_of(kinds: Iterable[PoolKind], memory: int) -> Iterator[Pool]:
    """Pools with all of their slots in use. `memory`: the address of all slots."""
    first = offset = 0
    for kind in kinds:
        words = np.array([first, kind.num_slots, memory + offset, kind.slot_bytes], np.int64)
        yield Pool(kind, words, offset)
        first, offset = first + kind.num_slots, offset + kind.num_slots * kind.slot_bytes
