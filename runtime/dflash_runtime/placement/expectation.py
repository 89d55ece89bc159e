"""How many of a token's experts each owner is expected to have, and how long the slowest takes.

A layer's K experts are drawn without replacement, each with its own probability (conditional
Bernoulli sampling: independent draws, given that there are K; Chen, Dempster, Liu 1994). Counts of
independent draws are Poisson-binomial, and computed expert by expert.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F64Array, I64Array

_REPEATS = 3.0
"""Neighbouring tokens of a prompt choose alike: they choose as many different experts as a third of
them would if they were independent, in routing planted as that of Qwen3-30B-A3B
(`bench.planted_routing`), where 45 % of the selections repeat at the next token. Where nothing
persists, this is 16 % too few, for 512 tokens and the 88 coldest of 128 experts."""


def chosen_by_prompt(shares: F64Array, num_rows: int) -> F64Array:
    """Probabilities that so many tokens of a prompt choose an expert at least once.

    Shapes: shares, those of one token, and result alike.
    """
    return np.asarray(1.0 - (1.0 - shares) ** max(1.0, num_rows / _REPEATS))


def counts_by_owner(
    shares: F64Array, owner_of_expert: I64Array, *, num_owners: int, most: int
) -> F64Array:
    """Probabilities that an owner has 0 … `most` of the experts drawn independently.

    Shapes: shares, owner_of_expert [L, E], where a share of 0 stands for no expert; result [owners,
    L, most + 1].
    """
    num_layers, num_experts = shares.shape
    counts = np.zeros((num_owners * num_layers, most + 1))
    counts[:, 0] = 1.0
    places = owner_of_expert.T * num_layers + np.arange(num_layers)  # [E, L]
    chosen = np.ascontiguousarray(shares.T)[:, :, None]
    others = 1.0 - chosen
    for index in range(num_experts):
        before = counts.take(places[index], axis=0)
        more = before * others[index]
        more[:, 1:] += before[:, :-1] * chosen[index]
        counts[places[index]] = more
    return counts.reshape(num_owners, num_layers, most + 1)


def counts_in_prefixes(shares: F64Array, num_used: I64Array) -> F64Array:
    """Probabilities that k of the K chosen experts are among the first n of a layer.

    Shapes: shares [L, E] in order, num_used [L] (K); result [E + 1, L, max(K) + 1], by n, layer and
    k.
    """
    num_layers, num_experts = shares.shape
    most = int(num_used.max())
    first = np.zeros((num_experts + 1, num_layers, most + 1))
    first[0, :, 0] = 1.0
    last = np.zeros_like(first)
    last[num_experts, :, 0] = 1.0
    for n in range(num_experts):
        first[n + 1] = _with_one_more(first[n], shares[:, n, None])
        back = num_experts - 1 - n
        last[back] = _with_one_more(last[back + 1], shares[:, back, None])
    others = num_used[:, None] - np.arange(most + 1)  # K - k
    taken = np.take_along_axis(last, np.broadcast_to(np.maximum(others, 0), first.shape), axis=2)
    first *= np.where(others >= 0, taken, 0.0)
    first /= first.sum(axis=2, keepdims=True)
    return first


def expected_longest(counts: F64Array, times: F64Array, num_used: I64Array) -> F64Array:
    """The expected time of each layer's slowest owner.

    Shapes: counts [owners, L, K + 1] as from `counts_by_owner`, times the same by number of
    experts; num_used [L]; result [L]. Exact: the probability that all owners end by a time is that
    of counts that end by it.
    """
    num_owners, num_layers, width = counts.shape
    limits = np.sort(np.moveaxis(times, 0, 1).reshape(num_layers, -1), axis=1)  # [L, T]
    shape = (num_layers, limits.shape[1], width)
    total = np.zeros(shape)
    total[..., 0] = 1.0
    for owner in range(num_owners):
        in_time = times[owner][:, None, :] <= limits[:, :, None]
        own = np.where(in_time, counts[owner][:, None, :], 0.0)
        combined = np.zeros(shape)
        for k in range(width):
            combined[..., k:] += own[..., k, None] * total[..., : width - k]
        total = combined
    reached = np.take_along_axis(total, np.broadcast_to(num_used[:, None, None], shape)[..., :1], 2)
    reached = reached[..., 0] / reached[:, -1]
    return np.asarray((limits * np.diff(reached, axis=1, prepend=0.0)).sum(axis=1))


def checked_shares(shares: F64Array, num_used: I64Array) -> F64Array:
    """Shares with the right sums: each in 0..1, a layer's sum its K.

    A layer with less than K positive shares cannot have it. Shapes: shares [L, E], num_used [L].
    """
    result = np.maximum(np.nan_to_num(shares, posinf=0.0), 0.0)
    result *= num_used[:, None] / np.maximum(result.sum(axis=1, keepdims=True), 1e-300)
    for _ in range(64):  # what is cut off at 1 goes to the others
        result = np.minimum(result, 1.0)
        free = np.where(result < 1.0, result, 0.0)
        missing = num_used[:, None] - np.where(result < 1.0, 0.0, 1.0).sum(axis=1, keepdims=True)
        sums = free.sum(axis=1, keepdims=True)
        if (np.abs(sums - missing) <= 1e-12 * num_used[:, None]).all():
            break
        result = np.where(result < 1.0, free * (missing / np.maximum(sums, 1e-300)), 1.0)
    return np.minimum(result, 1.0)


def _with_one_more(counts: F64Array, share: F64Array) -> F64Array:
    """Counts after one more draw. Shapes: counts [L, K + 1], share [L, 1]."""
    more = counts * (1.0 - share)
    more[:, 1:] += counts[:, :-1] * share
    return more
