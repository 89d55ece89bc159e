"""How many experts of each layer stay on the parent's device, under limits of memory.

Minimises a sum over layers of times by number of local experts (see `tables`), which fall, but not
convexly: a whole layer needs no stop for the host. A price of a byte turns the limits into a choice
for each layer alone (Lagrangian relaxation; Everett 1963); what is left is given to the steps that
save most for their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dflash_protocol.ids import F64Array, I64Array

_NUM_PRICES = 16
"""Prices of a byte that are tried first."""
_HALVINGS = 6
"""How often prices between the best one and its neighbours are tried."""
_STARTS = 2
"""How many choices, those that are fastest, are improved."""
_MOST_EXCHANGED = 512
"""Layers times numbers of experts up to which pairs of changes are tried."""
_SLACK = 1.0 + 1e-12


class Shape(StrEnum):
    """Which numbers of local experts a layer may have."""

    WHOLE = "whole"
    """None, or all."""
    PART = "part"
    """Not all."""
    ANY = "any"


@dataclass(frozen=True, slots=True, eq=False)
class SplitProblem:
    """Times and bytes by number of local experts, or of pieces of several.

    Shapes: times [E + 1, L], infinite where a layer has less experts; num_experts, here_bytes,
    there_bytes (bytes of one expert on the parent's device, and at the others) [L].
    """

    times: F64Array
    num_experts: I64Array
    here_bytes: F64Array
    there_bytes: F64Array
    here_limit: float
    there_limit: float

    def is_possible(self, num_local: I64Array) -> bool:
        here = float((num_local * self.here_bytes).sum())
        there = float(((self.num_experts - num_local) * self.there_bytes).sum())
        return here <= self.here_limit * _SLACK and there <= self.there_limit * _SLACK

    def seconds(self, num_local: I64Array) -> float:
        return float(self.times[num_local, np.arange(num_local.size)].sum())


def solve(
    problem: SplitProblem, shape: Shape = Shape.ANY, *, improves: bool = True
) -> I64Array | None:
    """The number of local experts of each layer; None if the limits cannot be kept.

    Deterministic; within a few percent of the optimum (tests compare it with all assignments).
    Shapes: result [L].
    """
    allowed = _restricted(problem, shape)
    starts = _priced(allowed, shape)
    if improves or not starts:
        starts += [each for each in _filled(allowed, shape) if allowed.is_possible(each)]
    best: I64Array | None = None
    best_s = np.inf
    for start in sorted(starts, key=allowed.seconds)[:_STARTS]:
        found = _exchanged(allowed, _improved(allowed, start)) if improves else start
        if (seconds := allowed.seconds(found)) < best_s:
            best, best_s = found, seconds
    return best


def topped_up(
    problem: SplitProblem,
    shape: Shape,
    num_local: I64Array,
    *,
    room: float,
    more_bytes: Callable[[int, int], float],
) -> I64Array:
    """Further experts in what an allocator's rounding leaves free, one after the other those that
    save most time for their bytes.

    `room`: bytes that are left; `more_bytes`: what a layer (its row) takes more for one expert than
    it takes for so many. Shapes: num_local, result [L].
    """
    times, rows = _restricted(problem, shape).times, range(num_local.size)
    found = num_local.copy()
    saved, cost = np.empty(found.size), np.empty(found.size)

    def look_at(row: int) -> None:
        number = int(found[row])
        can_grow = number < problem.num_experts[row] and np.isfinite(times[number + 1, row])
        saved[row] = times[number, row] - times[number + 1, row] if can_grow else 0.0
        cost[row] = more_bytes(row, number) if can_grow else 0.0

    for row in rows:
        look_at(row)
    while True:
        worth = np.where((saved > 0.0) & (cost <= room), saved / (cost + 1.0), 0.0)
        row = int(np.argmax(worth))
        if worth[row] <= 0.0:
            return found
        room -= cost[row]
        found[row] += 1
        look_at(row)


def _restricted(problem: SplitProblem, shape: Shape) -> SplitProblem:
    n = np.arange(len(problem.times))[:, None]
    forbidden = n > problem.num_experts
    if shape is Shape.WHOLE:
        forbidden |= (n != 0) & (n != problem.num_experts)
    elif shape is Shape.PART:
        forbidden |= n == problem.num_experts
    return replace(problem, times=np.where(forbidden, np.inf, problem.times))


def _priced(problem: SplitProblem, shape: Shape) -> list[I64Array]:
    """The best choices that are possible, over prices of a byte and numbers of whole layers."""
    prices = _prices(problem)
    sizes = np.arange(len(problem.times))[:, None] * problem.here_bytes
    tried = {float(price): _at_price(problem, sizes, shape, price) for price in prices}
    for _ in range(_HALVINGS):
        found = sorted(tried)
        best = min(found, key=lambda price: tried[price][0])
        at = found.index(best)
        # What fits, or saves more, begins between two prices.
        for other in (found[max(0, at - 1)], found[min(len(found) - 1, at + 1)]):
            middle = (best + other) / 2
            if middle not in tried:
                tried[middle] = _at_price(problem, sizes, shape, middle)
    choices = sorted(tried.values(), key=lambda each: each[0])
    return [num_local for _, num_local in choices[:1] if num_local is not None]


def _at_price(
    problem: SplitProblem, sizes: F64Array, shape: Shape, price: float
) -> tuple[float, I64Array | None]:
    """The best choice at one price, over numbers of whole layers; None if none is possible.

    `sizes`: bytes of so many local experts. Shapes: sizes [E + 1, L].
    """
    times, num_layers = problem.times, problem.num_experts.size
    layers = np.arange(num_layers)
    here, total = problem.here_bytes, problem.num_experts * problem.here_bytes
    whole_s = times[problem.num_experts, layers]
    costs = price * sizes
    costs += times
    costs[problem.num_experts, layers] = np.inf
    num_part = np.argmin(costs, axis=0)
    part_s = times[num_part, layers]
    gain = costs[num_part, layers] - whole_s - price * total
    order = layers[:0] if shape is Shape.PART else np.argsort(-gain, kind="stable")
    # The first w layers of the order are whole, for all w at once.
    seconds = part_s.sum() + _totals((whole_s - part_s)[order])
    left = problem.num_experts - num_part
    here_sum = (num_part * here).sum() + _totals((left * here)[order])
    there = left * problem.there_bytes
    there_sum = there.sum() - _totals(there[order])
    possible = (here_sum <= problem.here_limit) & (there_sum <= problem.there_limit * _SLACK)
    if not possible.any():
        return np.inf, None
    best = int(np.argmin(np.where(possible, seconds, np.inf)))
    num_part[order[:best]] = problem.num_experts[order[:best]]
    return float(seconds[best]), num_part


def _prices(problem: SplitProblem) -> list[float]:
    """What a byte may be worth: what it saves on average, over numbers of experts and layers."""
    n = np.arange(1, len(problem.times))[:, None]
    saved = (problem.times[0] - problem.times[1:]) / (n * problem.here_bytes)
    saved = np.sort(saved[np.isfinite(saved)])
    if not saved.size:
        return [0.0]
    most = 4.0 * float(np.abs(saved).max())
    places = np.linspace(0, saved.size - 1, _NUM_PRICES).astype(np.int64)
    return [0.0, most, -most, *(saved[places] * (1 + 1e-9)).tolist()]


def _filled(problem: SplitProblem, shape: Shape) -> list[I64Array]:
    """Choices to start from: as many experts as fit, layer by layer, and in equal parts."""
    most = problem.num_experts - (shape is Shape.PART)
    size = problem.num_experts * problem.here_bytes
    front = np.where(np.cumsum(size) <= problem.here_limit, most, 0)
    if shape is Shape.WHOLE:
        return [front]
    part = min(1.0, problem.here_limit / max(1.0, float(size.sum())))
    equal = np.minimum((problem.num_experts * part).astype(np.int64), most)
    rest = problem.here_limit - float((front * problem.here_bytes).sum())
    for layer in np.flatnonzero(front == 0)[:1]:
        front[layer] = min(int(rest // problem.here_bytes[layer]), int(most[layer]))
    return [front, equal, np.zeros_like(most)]


def _improved(problem: SplitProblem, start: I64Array) -> I64Array:
    """Take the change of one layer that saves most for its bytes, while there is one."""
    num_local = start.copy()
    layers = np.arange(start.size)
    n = np.arange(len(problem.times))[:, None]
    here = problem.here_limit * _SLACK - float((num_local * problem.here_bytes).sum())
    there = problem.there_limit * _SLACK - float(
        ((problem.num_experts - num_local) * problem.there_bytes).sum()
    )
    worth = np.zeros(start.size)
    target = num_local.copy()
    stale = layers
    for _ in range(2 * start.size + 64):
        now = num_local[stale]
        change = n - now
        saved = problem.times[now, stale] - problem.times[:, stale]
        fits = (change * problem.here_bytes[stale] <= here) & (
            -change * problem.there_bytes[stale] <= there
        )
        weight = np.abs(change) * np.where(
            change > 0, problem.here_bytes[stale], problem.there_bytes[stale]
        )
        density = np.where(fits & (saved > 1e-12), saved / np.maximum(weight, 1e-9), 0.0)
        # Of equal densities the largest step: fewer of them are needed.
        target[stale] = density.shape[0] - 1 - np.argmax(density[::-1], axis=0)
        worth[stale] = density.max(axis=0)
        best = int(np.argmax(worth))
        if worth[best] <= 0.0:
            break
        step = int(target[best] - num_local[best])
        if (
            step * problem.here_bytes[best] > here or -step * problem.there_bytes[best] > there
        ):  # fitted before others were taken
            stale = layers[best : best + 1]
            continue
        here -= step * problem.here_bytes[best]
        there += step * problem.there_bytes[best]
        num_local[best] = target[best]
        stale = layers[best : best + 1]
    return num_local


def _exchanged(problem: SplitProblem, num_local: I64Array) -> I64Array:
    """Change two layers at a time while that saves something, in models so small that single
    experts count."""
    size, num_layers = problem.times.shape
    if size * num_layers > _MOST_EXCHANGED:
        return num_local
    layers = np.tile(np.arange(num_layers), size)
    n = np.repeat(np.arange(size), num_layers)
    num_local = num_local.copy()
    for _ in range(2 * num_layers):
        change = n - num_local[layers]
        cost = problem.times[n, layers] - problem.times[num_local[layers], layers]
        here = change * problem.here_bytes[layers]
        there = -change * problem.there_bytes[layers]
        free_here = problem.here_limit * _SLACK - float((num_local * problem.here_bytes).sum())
        used_there = float(((problem.num_experts - num_local) * problem.there_bytes).sum())
        free_there = problem.there_limit * _SLACK - used_there
        fits = (here[:, None] + here <= free_here) & (there[:, None] + there <= free_there)
        fits &= layers[:, None] != layers
        both = np.where(fits, cost[:, None] + cost, np.inf)
        one, two = np.unravel_index(int(np.argmin(both)), both.shape)
        if not both[one, two] < -1e-12:
            break
        num_local[layers[one]], num_local[layers[two]] = n[one], n[two]
    return num_local


def _totals(values: F64Array) -> F64Array:
    """Sums of the first w values, for w from 0."""
    return np.concatenate([np.zeros(1), np.cumsum(values)])
