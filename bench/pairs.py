"""Interleaved measurements: every round runs all sides in a random order, every other round in the
reverse of the order before; statistics of rounds.

Ratios are taken inside a round, then their median, so that drifting machine speed affects all sides
alike. A round in which other programs interrupted a side says little about the sides; rounds are
repeated until enough were quiet.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

SETTLE_S = 0.03
"""Pause before each sample: the previous side's threads may spin for a few milliseconds."""

_QUIET_SWITCHES = 2
_QUIET_SWITCHES_PER_S = 20
"""A busy neighbour interrupts a thread some 300 times a second; an idle system rarely."""


_QUIET_SHARE = 0.05
_TICK_S = 0.01
"""The kernel's unit; a sample may be off by a few on each core."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One side's value in one round, and how much other processes disturbed it: quiet if at most
    1."""

    value: float
    disturbance: float

    @classmethod
    def by_switches(cls, value: float, *, switches: int, wall_s: float) -> Sample:
        """From the number of involuntary context switches of the side."""
        return cls(value, switches / (_QUIET_SWITCHES + _QUIET_SWITCHES_PER_S * wall_s))

    @classmethod
    def by_cpu_time(cls, value: float, *, others_s: float, wall_s: float, cores: int) -> Sample:
        """From the CPU time that other processes used on the side's cores. For sides of several
        processes, which preempt each other all the time."""
        allowed_s = cores * (_QUIET_SHARE * wall_s + 2 * _TICK_S)
        return cls(value, max(0.0, others_s) / allowed_s)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds that count, as each side's values, and their number in all."""

    values: dict[str, list[float]]
    num_quiet: int
    num_run: int

    def label(self) -> str:
        """``9 of 12``, with ``!`` if disturbed rounds had to be used."""
        taken = len(next(iter(self.values.values())))
        return f"{self.num_quiet} of {self.num_run}" + (" !" if taken > self.num_quiet else "")


def interleave(
    sides: Mapping[str, Callable[[int], Sample]],
    rounds: int,
    *,
    timeout_s: float,
    at_most: int = 1000,
    seed: int = 0,
) -> Rounds:
    """Run rounds until `rounds` of them were quiet, or `timeout_s` or `at_most` rounds are over.

    A side is called with the round's number. If too few rounds were quiet, the least disturbed ones
    are used too. An extra first round is dropped: it warms everything up.
    """
    order = list(sides)
    shuffler = random.Random(seed)
    run: list[dict[str, Sample]] = []
    started_s = time.monotonic()

    def quiet() -> list[dict[str, Sample]]:
        return [each for each in run if _disturbance(each) <= 1]

    def is_enough() -> bool:
        if len(run) < rounds:
            return False
        is_late = time.monotonic() - started_s >= timeout_s or len(run) >= at_most
        return is_late or len(quiet()) >= rounds

    number = -1
    while not is_enough():
        if number % 2 == 0:
            shuffler.shuffle(order)
        else:
            order.reverse()
        samples = {}
        for name in order:
            time.sleep(SETTLE_S)
            samples[name] = sides[name](max(number, 0))
        if number >= 0:
            run.append(samples)
        number += 1
    taken = sorted(run, key=_disturbance)[:rounds]
    values = {name: [samples[name].value for samples in taken] for name in sides}
    return Rounds(values, len(quiet()), len(run))


def _disturbance(samples: Mapping[str, Sample]) -> float:
    return max(sample.disturbance for sample in samples.values())


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some samples."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.smallest:.2f}…{self.largest:.2f})"


def median_cell(values: Sequence[float] | None, digits: int = 0, scale: float = 1.0) -> str:
    """A table cell; empty without samples."""
    return f"{scale * statistics.median(values):.{digits}f}" if values else ""


def ratio_cell(ratios: Mapping[str, Mapping[str, float]], side: str) -> str:
    """The median and range of our ratio to a side; empty without samples."""
    return str(Spread(**ratios[side])) if side in ratios else ""


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """``ours / theirs``, pair by pair."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
