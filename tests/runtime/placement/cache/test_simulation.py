"""Replays of traces: policies against plain versions of them, and the bound that none passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.placement.cache import policies as p
from dflash_runtime.placement.cache import simulation
from dflash_runtime.placement.cache.simulation import BELADY, STEPS, Replay, StepState, replayed
from dflash_runtime.placement.cache.step_slots import slot_of
from dflash_runtime.placement.cache.traces import PHASES, ExpertTrace, TraceHeader, TraceLayer
from support.examples import examples
from support.plain_slots import PlainSlots

E, K = 24, 3
DECODE = PHASES.index(Phase.DECODE)


def trace_of(ids: I32Array, num_experts: int = E, expert_bytes: int = 10) -> ExpertTrace:
    """Of one layer. Shapes: ids [N, K]."""
    layers = (TraceLayer(0, num_experts, ids.shape[1], expert_bytes),)
    header = TraceHeader("ab" * 32, "", "cd" * 32, layers)
    return ExpertTrace(header, np.full(len(ids), DECODE, np.uint8), ids.astype(np.uint16))


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


def plain_slots(static: list[int], num_slots: int, half_life: float, margin: float) -> PlainSlots:
    """Slots of steps beside experts that live there."""
    own_ids = np.arange(E, dtype=np.int32)
    own_ids[static] = -1
    return PlainSlots(own_ids, num_slots, 0.5 ** (1 / half_life), margin)


def plain_step(plain: PlainSlots, chosen: list[int]) -> tuple[list[bool], int]:
    """What is found, and the expert that is read; -1: none."""
    found = (plain.local_ids[chosen] < 0).tolist()
    read = plain.step(chosen)
    return found, -1 if read is None else read[2]


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
        monkeypatch.setattr(simulation, "_functions", lambda: simulation.PLAIN)


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
        early = E if name in ("static", STEPS) else 0
        assert hits_of(replay) <= hits_of(found[BELADY]) + early
        assert replay.num_selections.sum() == (len(ids) - warm) * K
        assert replay.brought_bytes == 10 * replay.brought.sum()
        assert replay.brought.sum() <= replay.num_selections.sum() - hits_of(replay)
    if num_slots == E:
        assert found["slru"].hit_share > 0.99


@pytest.mark.usefixtures("functions")
def test_a_half_life_is_of_lfu_alone() -> None:
    """Found: uses of SLRU were scaled down with weights that only LFU has."""
    ids = skewed(900, seed=8)
    short, long = (replayed(trace_of(ids), [8], half_life=each) for each in (1.0, 500.0))
    assert hits_of(short["slru"]) == hits_of(long["slru"])
    assert hits_of(short["lfu"]) != hits_of(long["lfu"])


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("num_slots", "half_life", "margin"), [(1, 50.0, 0.0), (4, 4.0, 0.25), (7, 64.0, 1.0)]
)
def test_slots_of_steps_are_what_they_say(num_slots: int, half_life: float, margin: float) -> None:
    """Long enough that uses are forgotten, and slots are equal."""
    ids, static = skewed(900, seed=num_slots), [0, 5, 6]
    rng = np.random.default_rng(num_slots)
    ids[300:500] = [rng.permutation(6)[:K] for _ in range(200)]  # the others' uses fade
    plain = plain_slots(static, num_slots, half_life, margin)
    expected = [plain_step(plain, chosen) for chosen in ids.tolist()]
    state = StepState(E, np.array(static), num_slots)
    hits, brought = np.zeros((2, *ids.shape), np.uint8)
    rates = np.array([0.5 ** (1.0 / half_life), margin], np.float32)
    simulation._functions().replay_steps(
        ids, np.full(len(ids), DECODE, np.uint8), rates, *state.arrays, hits, brought
    )
    np.testing.assert_array_equal(hits, [found for found, _ in expected])
    read = np.where(brought.any(axis=1), (brought * (ids + 1)).sum(axis=1) - 1, -1)
    np.testing.assert_array_equal(read, [each for _, each in expected])
    assert state.slots.tolist() == plain.slots
    np.testing.assert_array_equal(state.scores, plain.scores)
    assert {*np.flatnonzero(state.place == p.PROBATION)} == {*plain.slots}


def test_uses_that_have_nearly_faded_are_equal() -> None:
    """The first of such slots is taken, as a kernel orders what it has added one to."""
    slots, rates = np.array([4, 5, 6], np.int32), np.array([0.5, 0.0], np.float32)
    scores = np.zeros(E, np.float32)
    for uses, slot in (([1.0, 3e-8, 1e-8], 1), ([1.0, 3e-3, 1e-3], 2), ([4.0, 3.0, 5.0], -1)):
        scores[slots] = uses
        assert slot_of(9, np.array([7, 8, 9], np.int32), slots, scores, rates) == slot


@pytest.mark.parametrize("half_life", [None, 16.0])
def test_slots_of_steps_take_room_from_the_static_set(half_life: float | None) -> None:
    """And one more, for what is not kept."""
    ids = skewed(600, seed=3)
    found = replayed(trace_of(ids), [9], cache_slots=4, half_life=half_life)[STEPS]
    warm = len(ids) // simulation.WARM_UP
    hottest = np.argsort(-np.bincount(ids[:warm].ravel(), minlength=E), kind="stable")[:4]
    plain = plain_slots(hottest.tolist(), 4, half_life or 64.0, 0.0)
    steps = [plain_step(plain, chosen) for chosen in ids.tolist()][warm:]
    assert hits_of(found) == sum(sum(each) for each, _ in steps)
    assert found.brought.sum() == sum(read >= 0 for _, read in steps)
    assert found.step_slots is not None
    assert found.step_slots.tolist() == [4]


def test_slots_of_steps_are_there_where_there_is_room() -> None:
    trace = trace_of(skewed(100, seed=4))
    assert STEPS not in replayed(trace, [9], cache_slots=0)
    assert STEPS not in replayed(trace, [9], cache_slots=8)
    assert STEPS in replayed(trace, [9], cache_slots=7)
    whole = replayed(trace, [E], cache_slots=30)[STEPS]
    assert whole.hit_share == 1.0
    assert whole.step_slots is not None
    assert whole.step_slots.tolist() == [0]


@pytest.mark.usefixtures("functions")
def test_steps_alone_change_their_slots() -> None:
    """Prompts do not look into them; drafts do."""
    ids = np.array([[7, 8, 9]] * 3, np.int32)
    rates, prompt = np.array([0.5, 0.0], np.float32), PHASES.index(Phase.PREFILL)
    for phase, found in ((prompt, [0, 0, 0]), (PHASES.index(Phase.VERIFY), [0, 1, 0])):
        state = StepState(E, np.array([0]), 2)
        hits, brought = np.zeros((2, *ids.shape), np.uint8)
        phases = np.array([phase, DECODE, phase], np.uint8)
        simulation._functions().replay_steps(ids, phases, rates, *state.arrays, hits, brought)
        assert hits.tolist() == [[0, 0, 0], [0, 0, 0], found]
        assert brought.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
        assert state.slots.tolist() == [8, -1]
        assert state.scores[7:10].tolist() == [1.0, 1.0, 1.0]


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
