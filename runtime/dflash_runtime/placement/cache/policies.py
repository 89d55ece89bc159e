"""Cache policies: which of a layer's experts leave when others come.

The functions work on one layer's arrays, all [E]: ``place`` uint8, one of ABSENT, PROBATION,
PROTECTED; ``last_use`` int64, the number of the token that used an expert last; ``uses`` float64,
how often it was used, as its policy counts; ``is_pinned`` uint8. They are plain Python, and may be
compiled. An expert that the current token uses is never evicted.

* LRU: the one that was used the longest ago leaves.
* LFU: uses count half after a half-life; the least used leaves, unless the one that came was used
  less, or more by less than a margin: then that one is not kept.
* SLRU: what comes is on probation; a second use protects it. Protected experts beyond their share
  go back on probation, the one used the longest ago first. The least used of those on probation
  leaves, of equals the one used the longest ago.
* STATIC: none comes or leaves.

Source of SLRU: Karedla, Love, Wherry, "Caching strategies to improve disk system performance",
1994.
"""

from __future__ import annotations

from dflash_protocol.ids import F64Array, I64Array, U8Array

ABSENT, PROBATION, PROTECTED = range(3)


POLICIES = ("lru", "lfu", "slru", "static")
"""Names, numbered by their place."""

LRU, LFU, SLRU, STATIC = range(len(POLICIES))

PROTECTED_SHARE = 0.75
"""Of the slots, for protected experts."""

LARGEST_WEIGHT = 1e100
"""Of a use of LFU, before all uses are scaled down."""


def note_use(
    policy: int,
    expert: int,
    now: int,
    weight: float,
    place: U8Array,
    last_use: I64Array,
    uses: F64Array,
) -> bool:
    """Count a use of an expert, wherever it is; whether it has become protected. `weight`: what a
    use counts now."""
    last_use[expert] = now
    if policy == LFU:
        uses[expert] += weight
        return False
    uses[expert] += 1.0
    if policy == SLRU and place[expert] == PROBATION:
        place[expert] = PROTECTED
        return True
    return False


def demoted(most_protected: int, place: U8Array, last_use: I64Array, is_pinned: U8Array) -> int:
    """The protected expert that goes back on probation, -1: none has to."""
    num_protected, oldest = 0, -1
    for expert in range(place.size):
        if place[expert] == PROTECTED:
            num_protected += 1
            if not is_pinned[expert] and (oldest < 0 or last_use[expert] < last_use[oldest]):
                oldest = expert
    return oldest if num_protected > most_protected else -1


def victim(
    policy: int,
    now: int,
    place: U8Array,
    last_use: I64Array,
    uses: F64Array,
    is_pinned: U8Array,
) -> int:
    """The expert that leaves next, -1: none can."""
    found = -1
    for expert in range(place.size):
        if place[expert] == ABSENT or is_pinned[expert] or last_use[expert] == now:
            continue
        if found < 0:
            found = expert
            continue
        is_first = last_use[expert] < last_use[found]
        if policy == LFU:
            is_first = uses[expert] < uses[found] or (uses[expert] == uses[found] and is_first)
        elif policy == SLRU:
            if place[expert] != place[found]:
                is_first = place[expert] < place[found]
            elif place[expert] == PROBATION and uses[expert] != uses[found]:
                is_first = uses[expert] < uses[found]
        if is_first:
            found = expert
    return found


def is_kept(policy: int, expert: int, leaving: int, margin: float, uses: F64Array) -> bool:
    """Whether an expert that was brought for one use takes the slot of another. `margin`: what its
    uses must have more than the other's, for LFU."""
    if policy == STATIC or leaving < 0:
        return False
    return policy != LFU or bool(uses[expert] > uses[leaving] + margin)
