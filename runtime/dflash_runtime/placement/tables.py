"""The time of every layer by how many of its experts stay on the parent's device.

For one order of a layer's experts, the first n of which stay, and one group of owners that compute
the others: then the time of a request is a sum over layers, and a plan chooses n for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from dflash_protocol.ids import F64Array
from dflash_runtime.placement.cost import LOCAL, CostModel, ExpertArrays
from dflash_runtime.placement.expectation import IntArray, counts_in_prefixes, expected_longest


class Order(StrEnum):
    """Which experts of a layer stay first."""

    HOTTEST = "hottest"
    COLDEST = "coldest"
    EVEN = "even"
    """Hot and cold ones in turns, so that any number of them has its part of the selections."""


class OrderedExperts:
    """The experts of all layers in one order, with what follows from it alone.

    Shapes: `order` [L, E], expert ids, those that do not exist last; `rank` [L, E], the place of
    each id in it; `chosen_here` [E + 1, L, K +
    1], see `counts_in_prefixes`; `pairs_here` [E + 1, L], a prompt token's pairs among the first n.
    """

    def __init__(self, arrays: ExpertArrays, order: Order) -> None:
        self.arrays = arrays
        self.order = _ordered(arrays, order)
        self.rank = np.argsort(self.order, axis=1, kind="stable")
        decode = np.take_along_axis(arrays.decode, self.order, axis=1)
        self._prefill = np.take_along_axis(arrays.prefill, self.order, axis=1)
        self.chosen_here = counts_in_prefixes(decode, arrays.num_used)
        self.pairs_here = _sums(self._prefill)
        self._distinct: dict[int, F64Array] = {}

    def distinct_elsewhere(self, rows: int) -> F64Array:
        """How many experts but the first n so many prompt tokens are expected to choose.

        Shapes: result [E + 1, L].
        """
        if rows not in self._distinct:
            sums = _sums(1.0 - (1.0 - self._prefill) ** rows)
            self._distinct[rows] = sums[-1] - sums
        return self._distinct[rows]


def request_times(
    model: CostModel, experts: OrderedExperts, *, others: Sequence[int], parts: Sequence[float]
) -> F64Array:
    """Seconds that experts take in the model's request, by layer and number of local experts n.

    `others`: indices of the owners of all but the first n; `parts`: the part of these that each
    has. Shapes: result [E + 1, L], infinite where a layer has less than n experts.
    """
    arrays = model.arrays
    steps = _step_times(model, experts, others, parts)
    pairs = np.zeros((len(model.sides), *experts.pairs_here.shape))
    pairs[LOCAL] = experts.pairs_here
    away = np.maximum(arrays.num_used - experts.pairs_here, 0.0)
    n = np.arange(len(away))[:, None]
    away[n >= arrays.num_experts] = 0.0
    for index, part in zip(others, parts, strict=True):
        pairs[index] += part * away
    part_of_cpus = sum(
        part for index, part in zip(others, parts, strict=True) if index in model.remote_cpus
    )
    asked, copied = model.prompt_layers_s(
        pairs, lambda rows: part_of_cpus * experts.distinct_elsewhere(rows), model.request.prompt
    )
    times = model.request.written * steps + np.minimum(asked, copied)
    times[n > arrays.num_experts] = np.inf
    return np.asarray(times)


def _step_times(
    model: CostModel, experts: OrderedExperts, others: Sequence[int], parts: Sequence[float]
) -> F64Array:
    """Shapes: result [E + 1, L]."""
    arrays = model.arrays
    here = model.step_times[LOCAL]
    there = _group_times(model, others, parts)
    remaining = np.maximum(arrays.num_used[:, None] - np.arange(here.shape[1]), 0)
    slowest = np.maximum(
        here * model.local_factor, np.take_along_axis(there, remaining, axis=1)
    )  # [L, K + 1]
    steps = np.einsum("nlk,lk->nl", experts.chosen_here, slowest)
    if any(not model.sides[index].by_device for index in others):
        steps += model.stop_s
    alone = here[np.arange(len(here)), arrays.num_used]
    n = np.arange(len(steps))[:, None]
    return np.where(n >= arrays.num_experts, alone, steps)


def _group_times(model: CostModel, others: Sequence[int], parts: Sequence[float]) -> F64Array:
    """The expected time of the slowest of several owners, by how many experts are chosen among
    theirs, which are dealt at random. Shapes: result [L, K + 1]."""
    if len(others) == 1:
        return model.step_times[others[0]]
    # Layers with experts of one size take the same time.
    _, first, layers = np.unique(model.arrays.file_bytes, return_index=True, return_inverse=True)
    times = np.stack([model.step_times[index][first] for index in others])
    width = times.shape[2]
    factorials = np.cumprod(np.maximum(np.arange(width), 1.0))
    counts = np.power(np.array(parts)[:, None], np.arange(width)) / factorials
    counts = np.broadcast_to(counts[:, None, :], times.shape)
    result = np.zeros(times.shape[1:])
    for k in range(1, width):
        result[:, k] = expected_longest(counts, times, np.full(len(result), k))
    return np.asarray(result[layers])


def _ordered(arrays: ExpertArrays, order: Order) -> IntArray:
    """Shapes: result [L, E]."""
    hottest = arrays.hottest
    if order is Order.HOTTEST:
        return hottest
    if order is Order.COLDEST:
        # Of equals, that with the largest id first: the reverse of the other order.
        backwards = hottest[:, ::-1]
        missing = ~np.take_along_axis(arrays.exists, backwards, axis=1)
        return np.take_along_axis(backwards, np.argsort(missing, axis=1, kind="stable"), axis=1)
    # Van der Corput's sequence: its first n numbers are spread evenly, for every n.
    width = hottest.shape[1]
    ranks = [int(f"{rank:b}"[::-1], 2) / 2 ** len(f"{rank:b}") for rank in range(width)]
    return _spread(hottest, arrays.num_experts, ranks)


def _spread(hottest: IntArray, num_experts: IntArray, places: Sequence[float]) -> IntArray:
    """Each layer's experts in the order in which `places`, of 0..1, visit their ranks."""
    result = hottest.copy()
    for size in np.unique(num_experts).tolist():
        rows = num_experts == size
        by_place = np.argsort(places[:size], kind="stable")  # rank -> position in the sequence
        visited = np.argsort(by_place, kind="stable")
        result[rows, :size] = hottest[rows][:, visited]
    return result


def _sums(values: F64Array) -> F64Array:
    """Sums of the first n values of each row. Shapes: values [L, E], result [E + 1, L]."""
    sums = np.zeros((values.shape[1] + 1, len(values)))
    np.cumsum(values.T, axis=0, out=sums[1:])
    return sums
