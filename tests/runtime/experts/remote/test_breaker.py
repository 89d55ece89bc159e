"""The circuit breaker alone, on a clock of the test's: examples, and every order of events."""

from __future__ import annotations

import itertools
import re

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_runtime.experts.remote.breaker import BreakerState, CircuitBreaker

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
LONGEST_PAUSE_S = 30.0


class Rig:
    """A breaker, its clock and what it reported."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.transitions: list[tuple[BreakerState, str]] = []
        self.breaker = CircuitBreaker(lambda *transition: self.transitions.append(transition))

    def fail(self, *, cost_s: float = 0.0, is_probe: bool = False) -> None:
        self.breaker.note_failure(self.now_s, "no luck", cost_s=cost_s, is_probe=is_probe)

    def succeed(self, *, is_probe: bool = False) -> None:
        self.breaker.note_success(self.now_s, is_probe=is_probe)

    def may_send(self) -> bool:
        return self.breaker.lets_through(self.now_s)

    def open(self) -> None:
        for _ in range(3):
            assert self.may_send()
            self.fail()
        assert self.breaker.state is OPEN

    def pause_s(self) -> float:
        """How long nothing is let through from now on; the next request is the probe then."""
        began_s = self.now_s
        while not self.may_send():
            self.now_s += 1 / 64
        assert self.breaker.state is HALF_OPEN
        return self.now_s - began_s


def test_it_opens_after_three_failures_in_a_row_and_says_so_once() -> None:
    rig = Rig()
    rig.fail()
    rig.fail()
    assert rig.may_send()
    rig.fail()
    assert not rig.may_send()
    assert rig.breaker.num_opened == 1
    assert re.search(r"\b3 requests\b.*: no luck", rig.breaker.reason)
    [(state, reason)] = rig.transitions
    assert state is OPEN
    assert re.search(rf"{re.escape(rig.breaker.reason)}.*\b0\.5 s\b", reason)


def test_a_success_in_between_begins_the_count_anew() -> None:
    rig = Rig()
    for _ in range(2):
        rig.fail()
        rig.fail()
        rig.succeed()
    assert rig.breaker.state is CLOSED
    assert rig.transitions == []


def test_it_opens_after_five_failures_within_ten_seconds_whatever_succeeds() -> None:
    rig = Rig()
    for number in range(5):
        assert rig.breaker.state is CLOSED
        rig.succeed()
        rig.now_s += 2.5 * (number > 0)
        rig.fail()
    assert rig.breaker.state is OPEN
    assert re.search(r"\b5 requests\b.*\b10 s\b", rig.breaker.reason)


def test_failures_now_and_then_are_borne() -> None:
    rig = Rig()
    for _ in range(100):
        rig.fail()
        rig.succeed()
        rig.now_s += 2.6
    assert rig.breaker.state is CLOSED


def test_a_probe_that_succeeds_closes_it() -> None:
    rig = Rig()
    rig.open()
    assert rig.pause_s() == 0.5
    assert not rig.may_send(), "one request at a time"
    rig.succeed(is_probe=True)
    assert rig.may_send()
    assert [state for state, _ in rig.transitions] == [OPEN, HALF_OPEN, CLOSED]


def test_every_probe_that_fails_doubles_the_pause_up_to_half_a_minute() -> None:
    rig = Rig()
    rig.open()
    pauses_s = []
    for _ in range(9):
        pauses_s.append(rig.pause_s())
        rig.fail(is_probe=True)
    assert pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert rig.breaker.num_opened == 10


def test_pauses_go_on_doubling_for_one_that_only_answers_probes() -> None:
    rig = Rig()
    pauses_s = []
    for _ in range(4):
        rig.open()
        pauses_s.append(rig.pause_s())
        rig.succeed(is_probe=True)
    assert pauses_s == [0.5, 1.0, 2.0, 4.0]


def test_after_ten_calm_seconds_all_is_forgotten() -> None:
    rig = Rig()
    rig.open()
    rig.pause_s()
    rig.succeed(is_probe=True)
    assert not rig.breaker.is_calm(rig.now_s + 10.0)
    rig.now_s += 10.1
    assert rig.breaker.is_calm(rig.now_s)
    rig.open()
    assert rig.pause_s() == 0.5


def test_two_failures_long_ago_do_not_count_in_a_row() -> None:
    rig = Rig()
    rig.fail()
    rig.fail()
    rig.now_s += 3600.0
    rig.fail()
    assert rig.breaker.state is CLOSED


def test_what_cost_much_is_not_tried_again_soon() -> None:
    rig = Rig()
    for _ in range(3):
        rig.fail(cost_s=20.0)
    assert rig.pause_s() == 80.0


def test_requests_from_before_it_opened_prove_nothing() -> None:
    rig = Rig()
    rig.open()
    rig.succeed()
    rig.fail()
    assert rig.breaker.state is OPEN
    assert rig.pause_s() == 0.5
    rig.succeed()
    rig.fail()
    assert rig.breaker.state is HALF_OPEN
    rig.succeed(is_probe=True)
    assert rig.breaker.state is CLOSED


def test_after_a_probe_that_was_given_up_the_next_request_is_the_probe() -> None:
    rig = Rig()
    rig.open()
    rig.pause_s()
    rig.breaker.note_probe_abandoned()
    assert rig.breaker.state is OPEN
    assert rig.may_send()
    assert rig.breaker.state is HALF_OPEN


def test_one_that_never_answers_costs_its_deadline_ever_more_seldom() -> None:
    """A step a millisecond for ten minutes, each request a deadline of 250 ms."""
    rig = Rig()
    waited_s, is_probe = 0.0, False
    for _ in range(600_000):
        rig.now_s += 1e-3
        if rig.may_send():
            is_probe = rig.breaker.state is HALF_OPEN
            rig.now_s += 0.25
            waited_s += 0.25
            rig.fail(cost_s=0.25, is_probe=is_probe)
    assert waited_s < 8.0  # of 600 s; without a breaker it would be 150,000 s


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, what is promised holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.num_in_flight = 0
        self.has_probe = False
        self.opened_s = 0.0

    @rule(seconds=st.sampled_from([1e-4, 0.1, 0.4, 0.6, 3.0, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now_s += seconds

    @rule()
    def send(self) -> None:
        before = self.rig.breaker.state
        is_let_through = self.rig.may_send()
        after = self.rig.breaker.state
        if before is CLOSED:
            assert is_let_through
            assert after is CLOSED
        elif before is HALF_OPEN:
            assert not is_let_through, "there is a probe already"
        elif is_let_through:
            assert after is HALF_OPEN
            assert self.rig.now_s - self.opened_s >= 0.5
            self.has_probe = True
            return
        else:
            assert after is OPEN
            assert self.rig.now_s - self.opened_s < LONGEST_PAUSE_S
        self.num_in_flight += is_let_through

    def _take(self, data: st.DataObject) -> bool:
        """Some request in flight ends; whether it is the probe."""
        is_probe = self.has_probe and (not self.num_in_flight or data.draw(st.booleans()))
        if is_probe:
            self.has_probe = False
        else:
            self.num_in_flight -= 1
        return is_probe

    @precondition(lambda self: self.num_in_flight or self.has_probe)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        before, is_probe = self.rig.breaker.state, self._take(data)
        self.rig.succeed(is_probe=is_probe)
        assert self.rig.breaker.state is (CLOSED if is_probe else before)

    @precondition(lambda self: self.num_in_flight or self.has_probe)
    @rule(data=st.data(), cost_s=st.sampled_from([0.0, 0.25, 5.0]))
    def fail(self, data: st.DataObject, cost_s: float) -> None:
        before, is_probe = self.rig.breaker.state, self._take(data)
        self.rig.fail(cost_s=cost_s, is_probe=is_probe)
        after = self.rig.breaker.state
        if before is not CLOSED:
            assert after is (OPEN if is_probe else before)
        if after is OPEN and before is not OPEN:
            self.opened_s = self.rig.now_s

    @precondition(lambda self: self.has_probe)
    @rule()
    def give_up_the_probe(self) -> None:
        self.has_probe = False
        self.rig.breaker.note_probe_abandoned()
        assert self.rig.breaker.state is OPEN

    @invariant()
    def a_probe_is_under_way_exactly_while_half_open(self) -> None:
        assert self.has_probe == (self.rig.breaker.state is HALF_OPEN)

    @invariant()
    def every_transition_is_reported_and_is_one_of_the_drawing(self) -> None:
        states = [CLOSED, *(state for state, _ in self.rig.transitions)]
        assert states[-1] is self.rig.breaker.state
        legal = {(CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, OPEN), (HALF_OPEN, CLOSED)}
        assert set(itertools.pairwise(states)) <= legal
        assert self.rig.breaker.num_opened <= states.count(OPEN)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
