"""Replays of traces: policies against plain versions of them, and the bound that none passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import I32Array
from dflash_runtime.placement.cache import policies as p
from dflash_runtime.placement.cache import simulation
from dflash_runtime.placement.cache.simulation import BELADY, Replay, replayed
from dflash_runtime.placement.cache.traces import ExpertTrace, TraceHeader, TraceLayer
from support.examples import examples

E, K = 24, 3


def trace_of(ids: I32Array, num_experts: int = E, expert_bytes: int = 10) -> ExpertTrace:
    """Of one layer. Shapes: ids [N, K]."""
    layers = (TraceLayer(0, num_experts, ids.shape[1], expert_bytes),)
    header = TraceHeader("ab" * 32, "", "cd" * 32, layers)
    return ExpertTrace(header, np.ones(len(ids), np.uint8), ids.astype(np.uint16))


def skewed(num_tokens: int, seed: int, num_experts: int = E) -> I32Array:
    """Experts of changing popularity."""
    rng = np.random.default_rng(seed)
    tokens = []
    for token in range(num_tokens):
        if token % 60 == 0:
            popularity = rng.dirichlet(np.full(num_experts, 0.3)) + 1e-6
        tokens.append(rng.choice(num_experts, K, replace=False, p=popularity / popularity.sum()))
    return np.array(tokens, np.int32)


def plain_lru(ids: I32Array, num_slots: int) -> list[list[bool]]:
    last: dict[int, int] = {}
    found = []
    for token, chosen in enumerate(ids.tolist()):
        found.append([expert in last for expert in chosen])
        new = [expert for expert in chosen if expert not in last]
        last |= {expert: token for expert in chosen if expert in last}
        for expert in new:
            if len(last) == num_slots:
                del last[min(last, key=lambda each: (last[each], each))]
            last[expert] = token
    return found


def plain_lfu(ids: I32Array, num_slots: int, half_life: float, margin: float) -> list[list[bool]]:
    uses: dict[int, float] = dict.fromkeys(range(E), 0.0)
    last = dict.fromkeys(range(E), -1)
    held: set[int] = set()
    found = []
    for token, chosen in enumerate(ids.tolist()):
        uses = {expert: count * 0.5 ** (1 / half_life) for expert, count in uses.items()}
        found.append([expert in held for expert in chosen])
        for expert in chosen:
            uses[expert] += 1
            last[expert] = token
        for expert in chosen:
            if expert in held:
                continue
            if len(held) == num_slots:
                others = held - {*chosen}
                leaving = min(others, key=lambda each: (uses[each], last[each], each), default=None)
                if leaving is None or uses[expert] <= uses[leaving] + margin:
                    continue
                held.remove(leaving)
            held.add(expert)
    return found


def least_misses(ids: I32Array, num_slots: int) -> int:
    """Of all ways to keep experts, by trying them: for short traces of few experts."""
    states = {frozenset[int](): 0}
    for chosen in ids.tolist():
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            now = misses + sum(expert not in held for expert in chosen)
            reachable = held | {*chosen}
            for kept in _subsets(sorted(reachable), num_slots):
                following[kept] = min(following.get(kept, 1 << 30), now)
        states = following
    return min(states.values())


def _subsets(experts: list[int], size: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for expert in experts:
        found += [each | {expert} for each in found if len(each) < size]
    return found


def hits_of(replay: Replay) -> int:
    return int(replay.hits.sum())


@pytest.fixture(params=["compiled", "plain"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        plain = simulation._Functions(simulation._replay, simulation._next_uses, simulation._belady)
        monkeypatch.setattr(simulation, "_functions", lambda: plain)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(("num_slots", "margin"), [(3, 0.0), (8, 1.0), (20, 0.5), (24, 0.0)])
def test_policies_are_what_they_say(num_slots: int, margin: float) -> None:
    ids = skewed(400, seed=num_slots)
    found = replayed(trace_of(ids), [num_slots], half_life=50.0, margin=margin)
    warm = len(ids) // simulation.WARM_UP
    assert hits_of(found["lru"]) == int(np.sum(plain_lru(ids, num_slots)[warm:]))
    assert hits_of(found["lfu"]) == int(np.sum(plain_lfu(ids, num_slots, 50.0, margin)[warm:]))
    hottest = np.argsort(-np.bincount(ids[:warm].ravel(), minlength=E), kind="stable")[:num_slots]
    assert hits_of(found["static"]) == int(np.isin(ids[warm:], hottest).sum())
    assert not found["static"].brought.any()
    for name, replay in found.items():
        # The static set is there from the first token on.
        assert hits_of(replay) <= hits_of(found[BELADY]) + (E if name == "static" else 0)
        assert replay.num_selections.sum() == (len(ids) - warm) * K
        assert replay.brought_bytes == 10 * replay.brought.sum()
        assert replay.brought.sum() <= replay.num_selections.sum() - hits_of(replay)
    if num_slots == E:
        assert found["slru"].hit_share > 0.99


@examples(60)
@given(st.integers(0, 1 << 30), st.integers(2, 3))
def test_no_way_to_keep_experts_misses_less_than_the_bound(seed: int, num_slots: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(5)[:2] for _ in range(9)], np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WARM_UP", 100)
        found = replayed(trace_of(ids, num_experts=5), [num_slots])[BELADY]
    assert ids.size - hits_of(found) == least_misses(ids, num_slots)


@examples(60)
@given(st.integers(0, 1 << 30), st.integers(K, E), st.integers(1, 120))
def test_no_policy_holds_more_than_it_has_room_for(
    seed: int, num_slots: int, num_tokens: int
) -> None:
    ids = skewed(num_tokens, seed)
    for policy in range(len(p.POLICIES)):
        state = simulation._State(E)
        hits, brought = np.zeros((2, *ids.shape), np.uint8)
        simulation._replay(
            ids, policy, num_slots, np.array([1.0, 0.0]), *state.arrays, hits, brought
        )
        there, num_protected = state.place != p.ABSENT, (state.place == p.PROTECTED).sum()
        assert there.sum() <= num_slots
        assert not (hits & brought).any()
        if policy != p.STATIC:
            assert there.sum() == min(num_slots, np.unique(ids).size)
        if policy == p.SLRU:
            assert num_protected <= int(num_slots * p.PROTECTED_SHARE)
        if policy in (p.LRU, p.SLRU):
            assert there[ids[-1]].all()  # the newest are never evicted


def test_pinned_experts_stay() -> None:
    ids = skewed(300, seed=1)
    for policy in (p.LRU, p.LFU, p.SLRU):
        state = simulation._State(E)
        place, _, _, is_pinned = state.arrays
        place[[20, 21]] = p.PROTECTED
        is_pinned[[20, 21]] = 1
        hits, brought = np.zeros((2, *ids.shape), np.uint8)
        simulation._replay(ids, policy, 6, np.array([1.0, 0.0]), *state.arrays, hits, brought)
        assert (place[[20, 21]] == p.PROTECTED).all()
        assert (place != p.ABSENT).sum() == 6


def test_uses_of_long_traces_stay_finite() -> None:
    ids = skewed(500, seed=2)
    state = simulation._State(E)
    hits, brought = np.zeros((2, *ids.shape), np.uint8)
    simulation._replay(ids, p.LFU, 6, np.array([2.0**4, 0.0]), *state.arrays, hits, brought)
    assert np.isfinite(state.arrays[2]).all()


def test_slots_for_less_than_a_token_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="2 slots, a token uses 3"):
        replayed(trace_of(skewed(20, 0)), [2])


def test_an_empty_trace_has_no_hits() -> None:
    found = replayed(trace_of(skewed(0, 0).reshape(0, K)), [4])
    assert all(replay.hit_share == 0.0 for replay in found.values())
