"""What predictors would have said of a trace, before each layer of each token was computed.

They know the trace so far, and of the present token the layers before:

* STATIC: what the first tenth of the trace used most. Sure of an expert as it was used there.
* LAST: what the layer chose for the last token, then for the one before, and so on. Half as sure
  with each token.
* TRANSITIONS: what followed the experts that the layer before has chosen; for the first layer,
  those of the last layer for the last token. Counts are learnt as the trace goes on, older ones
  counting less. As sure as an expert has followed them, on average.

What the engine predicts by the next layer's router cannot be told from a trace of choices: it
counts that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.placement.cache.simulation import WARM_UP
from dflash_runtime.placement.cache.traces import ExpertTrace, TraceLayer

PREDICTORS = ("static", "last", "transitions")
"""Names, numbered by their place."""

_STATIC, _LAST, _TRANSITIONS = range(len(PREDICTORS))

NUM_BINS = 4
"""Equal parts of how sure a prediction is."""

HALF_LIFE = 128.0
"""Uses of an expert after which what followed it counts half."""

_MOST_COUNTS = 1 << 22
"""Of a layer. Where pairs of experts are more, experts of the layer before share counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What one predictor would have said after the warm-up, of each layer as many experts as a
    token uses, or twice as many.

    Shapes: num_selections [L]; predicted, predicted_by_twice [L]: selections that were among these;
    made, right [L, NUM_BINS]: predictions of as many experts, by how sure they were, and those that
    were chosen.
    """

    num_selections: I64Array
    predicted: I64Array
    predicted_by_twice: I64Array
    made: I64Array
    right: I64Array

    @property
    def recall(self) -> float:
        return float(self.predicted.sum() / max(1, self.num_selections.sum()))

    @property
    def recall_by_twice(self) -> float:
        return float(self.predicted_by_twice.sum() / max(1, self.num_selections.sum()))

    @property
    def precisions(self) -> list[float | None]:
        """Of each bin, the share that was right; None where nothing was predicted."""
        sums = zip(self.right.sum(axis=0).tolist(), self.made.sum(axis=0).tolist(), strict=True)
        return [right / made if made else None for right, made in sums]


def predicted(trace: ExpertTrace) -> dict[str, Prediction]:
    """What each predictor would have said, by name."""
    warm = trace.num_tokens // WARM_UP
    run = _function()
    found: dict[str, list[tuple[I64Array, I64Array]]] = {name: [] for name in PREDICTORS}
    for layer, ids, before in _with_before(trace):
        for kind, name in enumerate(PREDICTORS):
            num_rows = max(1, _MOST_COUNTS // layer.num_experts) if kind == _TRANSITIONS else 1
            num_rows = min(num_rows, int(before.max(initial=0)) + 1)
            shares = np.zeros(layer.num_experts, np.float32)
            if kind == _STATIC:
                shares += np.bincount(ids[:warm].ravel(), minlength=shares.size) / max(1, warm)
            recalled, bins = np.zeros(2, np.int64), np.zeros((2, NUM_BINS), np.int64)
            counts, uses = np.zeros((num_rows, shares.size), np.float32), np.zeros(num_rows)
            run(ids, before, kind, warm, shares, counts, uses, recalled, bins)
            found[name].append((recalled, bins))
    used = [layer.num_experts_used for layer in trace.header.layers]
    return {
        name: Prediction(
            np.array(used, np.int64) * (trace.num_tokens - warm),
            *np.array([recalled for recalled, _ in layers]).T,
            *np.array([bins for _, bins in layers]).transpose(1, 0, 2),
        )
        for name, layers in found.items()
    }


def _with_before(trace: ExpertTrace) -> Iterator[tuple[TraceLayer, I32Array, I32Array]]:
    """Each layer's ids, and those chosen just before: -1 before the first token. Shapes: [N, K]."""
    *_, (_, last) = trace.by_layer()
    before = np.full(last.shape, -1, np.int32)
    before[1:] = last[:-1]
    for layer, ids in trace.by_layer():
        ids = np.ascontiguousarray(ids)
        yield layer, ids, before
        before = ids


def _run(
    ids: I32Array,
    before: I32Array,
    kind: int,
    warm: int,
    shares: F32Array,
    counts: F32Array,
    uses: F64Array,
    recalled: I64Array,
    bins: I64Array,
) -> None:
    """Add what is predicted of one layer to `recalled` [2], the selections among as many experts as
    are used and among twice as many, and to `bins` [2, NUM_BINS], predictions and those that were
    right.

    Shapes: ids [N, K]; before [N, P], negative: none; shares [E]: of STATIC how sure it is, of
    LAST zeros; counts [R, E], uses [R]: what followed each of `before`, modulo R, and how often.
    """
    (num_tokens, num_used), num_experts = ids.shape, shares.size
    decay = 0.5 ** (1.0 / HALF_LIFE)
    scores = np.zeros(num_experts, np.float32)
    rank_of = np.zeros(num_experts, np.int64)
    for token in range(num_tokens):
        for expert in range(num_experts):
            scores[expert] = 0.0 if kind == _TRANSITIONS else shares[expert]
            rank_of[expert] = num_experts
        if kind == _TRANSITIONS:
            for k in range(before.shape[1]):
                row = before[token, k] % uses.size
                if before[token, k] >= 0 and uses[row] > 0.0:
                    share = 1.0 / (uses[row] * before.shape[1])
                    for expert in range(num_experts):
                        scores[expert] += counts[row, expert] * share
        for rank in range(min(2 * num_used, num_experts)):
            best = 0
            for expert in range(1, num_experts):
                if scores[expert] > scores[best]:
                    best = expert
            if scores[best] <= 0.0:
                break
            rank_of[best] = rank
            if token >= warm and rank < num_used:
                is_right = False
                for k in range(num_used):
                    is_right = is_right or ids[token, k] == best
                place = min(NUM_BINS - 1, int(scores[best] * NUM_BINS))
                bins[0, place] += 1
                bins[1, place] += 1 if is_right else 0
            scores[best] = 0.0
        for k in range(num_used):
            rank = rank_of[ids[token, k]]
            if token >= warm:
                recalled[0] += 1 if rank < num_used else 0
                recalled[1] += 1 if rank < 2 * num_used else 0
        if kind == _LAST:
            for expert in range(num_experts):
                shares[expert] *= 0.5
            for k in range(num_used):
                shares[ids[token, k]] = 1.0
        if kind == _TRANSITIONS:
            for k in range(before.shape[1]):
                row = before[token, k] % uses.size
                if before[token, k] >= 0:
                    for expert in range(num_experts):
                        counts[row, expert] *= decay
                    for chosen in range(num_used):
                        counts[row, ids[token, chosen]] += 1.0
                    uses[row] = uses[row] * decay + 1.0


@cache
def _function() -> Callable[..., None]:
    """Compiled, where that is possible."""
    try:
        from dflash_runtime.compute.cpu.compile.compiling import compile_kernel
        from dflash_runtime.compute.cpu.simd.untyped import types
    except ImportError:
        return _run
    ids, numbers = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
    return compile_kernel(
        _run,
        ids,
        ids,
        types.int64,
        types.int64,
        types.Array(types.float32, 1, "C"),
        types.Array(types.float32, 2, "C"),
        types.Array(types.float64, 1, "C"),
        numbers,
        types.Array(types.int64, 2, "C"),
    )
