"""Damage to sound input: bytes, numbers, lengths and fields, by one seeded generator.

Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16]
NUMBERS += [2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53 + 1, 2**61]
NUMBERS += [2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
"""Whole numbers at which arithmetic on sizes goes wrong."""

ODD_VALUES: list[Any] = [
    *NUMBERS,
    *(-1, -(2**31), -(2**63), 0.0, -0.0, 1.5, 1e308, float("inf"), float("nan")),
    *(None, True, False, "", "f32", "f16", "prefill", "decode", "x" * 40, "x" * 5000, "\n", "\0"),
    *("\N{GRINNING FACE}", [], [0], [2**62], [1, 2], [[]], [None], list(range(70)), {}, {"": 0}),
]
"""Values of every kind, to stand where another kind belongs. What cannot be encoded is left out
by whoever encodes."""

_MAX_GROWTH = 4096
"""An input that grows by more is cut: a case must stay fast."""


class Mutator:
    """A case's source of chances: the same seed and case number give the same damage."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.random = random.Random()

    def start(self, case: int) -> None:
        """Begin the damage of one case."""
        self.random.seed(self._seed << 40 | case)

    def below(self, limit: int) -> int:
        """A number in 0..limit-1; 0 if there is none."""
        return int(self.random.random() * limit)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choose(self, options: Sequence[T]) -> T:
        return options[int(self.random.random() * len(options))]

    def damage(self, data: bytes, donor: bytes = b"") -> bytes:
        """`data` with one to a few faults in it. `donor` is another sound input to splice in."""
        damaged = bytearray(data)
        limit = len(data) + _MAX_GROWTH
        while True:
            place = self.below(len(damaged) + 1)
            _STEPS[self.below(len(_STEPS))](self, damaged, place, donor)
            del damaged[limit:]
            if self.chance(0.5):
                return bytes(damaged)

    def damage_fields(self, fields: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """A copy of a map with a few values or keys wrong. `other` is a map to take some from."""
        damaged = dict(fields)
        while damaged:
            key = self.choose(list(damaged))
            step = self.below(8)
            if step < 5:
                damaged[key] = self._other_value(damaged[key])
            elif step == 5:
                del damaged[key]
            elif step == 6 and other:
                taken = self.choose(list(other))
                damaged[taken] = other[taken]
            else:
                damaged[self.choose(["", key + "x", key[:-1], "type", "\N{GRINNING FACE}"])] = 0
            if self.chance(0.6):
                break
        return damaged

    def _other_value(self, value: Any) -> Any:
        if type(value) is int and self.chance(0.4):
            return value + self.choose([-1, 1, 2, -value, value, 2**32, 2**62])
        if type(value) is list and value and self.chance(0.6):
            changed = list(value)
            place = self.below(len(changed))
            step = self.below(4)
            if step == 0:
                changed[place] = self._other_value(changed[place])
            elif step == 1:
                del changed[place]
            elif step == 2:
                changed.insert(place, changed[self.below(len(changed))])
            else:
                changed[place] = self.choose(ODD_VALUES)
            return changed
        if type(value) is str and value and self.chance(0.4):
            return value[: self.below(len(value))] + self.choose(["", "\0", "\n", "x" * 4097])
        return self.choose(ODD_VALUES)


def _flip_bit(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    if place < len(data):
        data[place] ^= 1 << mutator.below(8)


def _set_bytes(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    count = 1 + mutator.below(4)
    data[place : place + count] = mutator.random.getrandbits(8 * count).to_bytes(count, "little")


def _insert(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    count = 1 + mutator.below(8)
    data[place:place] = mutator.random.getrandbits(8 * count).to_bytes(count, "little")


def _delete(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    del data[place : place + 1 + mutator.below(16)]


def _number(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    """A number that matters over what is there, of any width, in either order of bytes."""
    number = mutator.choose(NUMBERS)
    packed = struct.pack("<Q" if mutator.chance(0.6) else ">Q", number)
    width = mutator.choose((1, 2, 4, 8))
    data[place : place + width] = packed[:width] if packed[0] or not number else packed[-width:]


def _lie(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    """A number that is there, off by a little: lengths and counts that no longer fit."""
    width = mutator.choose((1, 2, 4, 8))
    there = int.from_bytes(data[place : place + width], "little")
    wrong = (there + mutator.choose((-8, -4, -1, 1, 2, 4, 8))) % (1 << 8 * width)
    data[place : place + width] = wrong.to_bytes(width, "little")


def _repeat(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    stretch = data[place : place + 1 + mutator.below(64)]
    data[place:place] = stretch * mutator.choose((1, 1, 2, 50))


def _move(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    length = 1 + mutator.below(32)
    stretch = data[place : place + length]
    del data[place : place + length]
    to = mutator.below(len(data) + 1)
    data[to:to] = stretch


def _cut(mutator: Mutator, data: bytearray, place: int, _: bytes) -> None:
    del data[place:]


def _splice(mutator: Mutator, data: bytearray, place: int, donor: bytes) -> None:
    """The beginning of this, the end of another."""
    if mutator.chance(0.5):
        data[place:] = donor[place:]
    else:
        data[place:] = donor[mutator.below(len(donor) + 1) :]


# Cuts and splices ruin most of an input, so they come less often than the finer faults.
_STEPS: list[Callable[[Mutator, bytearray, int, bytes], None]] = [
    _flip_bit,
    _flip_bit,
    _flip_bit,
    _set_bytes,
    _set_bytes,
    _insert,
    _delete,
    _number,
]
_STEPS += [_number, _number, _lie, _lie, _repeat, _move, _cut, _splice]
