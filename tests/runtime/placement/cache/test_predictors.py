"""Predictors over traces: beside plain versions of them, and on what trained models choose."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import F64Array, I32Array
from dflash_runtime.placement.cache import predictors
from dflash_runtime.placement.cache.predictors import HALF_LIFE, NUM_BINS, PREDICTORS, predicted
from dflash_runtime.placement.cache.simulation import WARM_UP
from dflash_runtime.placement.cache.traces import PHASES, ExpertTrace, TraceHeader, TraceLayer

SIZES = (12, 3), (9, 2), (16, 4)
"""Of each layer: experts, and how many a token uses."""


def trace_of(chosen: list[I32Array], sizes: tuple[tuple[int, int], ...] = SIZES) -> ExpertTrace:
    """Shapes: chosen [N, K] of each layer."""
    layers = tuple(TraceLayer(index, *each, 10) for index, each in enumerate(sizes))
    ids = np.concatenate(chosen, axis=1).astype(np.uint16)
    header = TraceHeader("ab" * 32, "", "cd" * 32, layers)
    return ExpertTrace(header, np.full(len(ids), len(PHASES) - 1, np.uint8), ids)


def following(num_tokens: int, seed: int) -> ExpertTrace:
    """A hidden state that walks: experts follow each other across layers and tokens, mostly."""
    rng = np.random.default_rng(seed)
    states = rng.integers(0, 6, num_tokens)
    chosen = []
    for num_experts, num_used in SIZES:
        usual = np.array([rng.permutation(num_experts)[:num_used] for _ in range(6)])
        ids = usual[states]
        odd = rng.random(num_tokens) < 0.3
        ids[odd] = [rng.permutation(num_experts)[:num_used] for _ in range(odd.sum())]
        chosen.append(ids.astype(np.int32))
    return trace_of(chosen)


def plain_scores(trace: ExpertTrace, name: str) -> list[list[F64Array]]:
    """How sure a predictor is of each expert, by layer and token."""
    chosen = [ids.tolist() for _, ids in trace.by_layer()]
    num_tokens, warm = trace.num_tokens, trace.num_tokens // WARM_UP
    found = []
    for layer, of_layer in enumerate(chosen):
        num_experts = trace.header.layers[layer].num_experts
        followed: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        rows = []
        for token in range(num_tokens):
            scores = np.zeros(num_experts)
            if name == "static":
                for ids in of_layer[:warm]:
                    scores[ids] += 1
                scores /= warm
            elif name == "last":
                for then in range(token):
                    scores[of_layer[then]] = 0.5 ** (token - 1 - then)
            else:
                before = chosen[layer - 1][token] if layer else chosen[-1][token - 1]
                before = before if layer or token else []
                for each in before:
                    seen = followed[each]
                    weights = [0.5 ** ((len(seen) - 1 - i) / HALF_LIFE) for i in range(len(seen))]
                    for weight, (_, ids) in zip(weights, seen, strict=True):
                        scores[ids] += weight / sum(weights) / len(before)
                for each in before:
                    followed[each].append((token, of_layer[token]))
            rows.append(scores)
        found.append(rows)
    return found


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_predictors_are_what_they_say(
    name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equally likely experts may be ordered either way, so that the shares differ a little."""
    if not is_compiled:
        monkeypatch.setattr(predictors, "_function", lambda: predictors._run)
    trace = following(240, seed=4)
    found = predicted(trace)[name]
    warm = trace.num_tokens // WARM_UP
    for layer, (scores, (_, ids)) in enumerate(
        zip(plain_scores(trace, name), trace.by_layer(), strict=True)
    ):
        num_used = ids.shape[1]
        counts, bins = [0, 0], np.zeros((2, NUM_BINS), np.int64)
        for token in range(warm, trace.num_tokens):
            order = np.argsort(-np.round(scores[token], 5), kind="stable")
            order = order[scores[token][order] > 1e-30]
            counts[0] += np.isin(ids[token], order[:num_used]).sum()
            counts[1] += np.isin(ids[token], order[: 2 * num_used]).sum()
            for expert in order[:num_used]:
                place = min(NUM_BINS - 1, int(scores[token][expert] * NUM_BINS))
                bins[:, place] += 1, expert in ids[token]
        tokens = trace.num_tokens - warm
        assert found.num_selections[layer] == tokens * num_used
        assert found.predicted[layer] == pytest.approx(counts[0], abs=0.02 * tokens)
        assert found.predicted_by_twice[layer] == pytest.approx(counts[1], abs=0.02 * tokens)
        np.testing.assert_allclose(found.made[layer], bins[0], atol=0.03 * tokens)
        np.testing.assert_allclose(found.right[layer], bins[1], atol=0.03 * tokens)
        assert found.made[layer].sum() == bins[0].sum()
        assert found.right[layer].sum() == found.predicted[layer]


def test_what_follows_is_learnt_and_what_stays_is_the_last() -> None:
    """A layer that follows the one before from token to token, and one that never changes."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 12, (600, 1)).astype(np.int32)
    chosen = [first, (5 * first + 2) % 12, np.full((600, 1), 7, np.int32)]
    found = predicted(trace_of(chosen, ((12, 1),) * 3))
    assert found["transitions"].predicted.tolist()[1:] == [540, 540]
    assert found["last"].predicted[2] == found["static"].predicted[2] == 540
    for name in ("static", "last"):
        assert found[name].predicted[1] < 150
    assert found["transitions"].precisions[-1] == 1.0


def test_the_first_layer_follows_the_last_one_of_the_token_before() -> None:
    """And nothing is said of the first token."""
    tokens = np.arange(300, dtype=np.int32)[:, None]
    found = predicted(trace_of([tokens % 7, (3 * tokens) % 7], ((7, 1), (7, 1))))
    assert found["transitions"].predicted.tolist() == [270, 270]
    single = predicted(trace_of([tokens[:1], tokens[:1]], ((7, 1), (7, 1))))
    assert all(each.made.sum() == 0 for each in single.values())


def test_what_followed_is_forgotten() -> None:
    """After a change what follows now is said, though it was rarer overall."""
    first = np.zeros((3000, 1), np.int32)
    second = np.zeros((3000, 1), np.int32)
    second[2000:] = 4
    found = predicted(trace_of([first, second], ((5, 1), (5, 1))))["transitions"]
    assert found.predicted[1] == pytest.approx(2700 - HALF_LIFE, abs=3)


def test_counts_of_many_experts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts before share counts then."""
    trace = following(400, seed=2)
    whole = predicted(trace)["transitions"]
    sizes = []
    run = predictors._function()

    def noted(*arguments: Any) -> None:
        sizes.append(np.size(arguments[5]))
        run(*arguments)

    monkeypatch.setattr(predictors, "_MOST_COUNTS", 32)
    monkeypatch.setattr(predictors, "_function", lambda: noted)
    shared = predicted(trace)["transitions"]
    assert max(sizes) <= 32
    assert 0 < shared.recall < whole.recall


def test_an_empty_trace_predicts_nothing() -> None:
    empty = [np.empty((0, used), np.int32) for _, used in SIZES]
    for each in predicted(trace_of(empty)).values():
        assert each.recall == each.recall_by_twice == 0.0
        assert each.precisions == [None] * NUM_BINS
