"""Experts in a daemon: against a real compute thread, and against one that follows a script."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded
from dflash_protocol.ids import Phase
from dflash_protocol.wire.requests import encode_reply
from dflash_runtime.experts.telemetry import OwnerKind
from support.faults import no_more_descriptors
from support.remote_rig import (
    CAPACITY,
    PAIRS,
    TIMEOUT_S,
    TWO_PAIRS,
    Rig,
    ScriptedRig,
    ServedRig,
    deadlines,
    random_pairs,
)
from support.routed_batches import HIDDEN_SIZE, batch_of, begin, finish, naive_sums, numbered_rows


@pytest.mark.parametrize("max_tokens", [1, 4, CAPACITY])
def test_sums_are_the_naive_ones_for_any_pairs_and_capacity(
    served: ServedRig, max_tokens: int
) -> None:
    served.open_session(max_tokens=max_tokens)
    for seed in range(10):
        num_tokens = 1 + 7 * seed
        pairs = random_pairs(seed, num_tokens) or {(0, 0): 1.0}
        served.assert_right(num_tokens, pairs)
    assert served.losses == []


def test_only_used_rows_are_sent(served: ServedRig) -> None:
    served.open_session()
    served.assert_right(50, {(7, 1): 1.0, (49, 1): 0.5})
    stats = served.remote.stats
    assert (stats.kind, stats.num_experts) == (OwnerKind.DAEMON, 5)
    assert (stats.requests, stats.tokens, stats.pairs) == (1, 2, 2)
    routing = 4 * (1 + 2 + 2)
    assert stats.bytes_sent == 2 * HIDDEN_SIZE * 4 + routing + 2 * 4
    assert stats.bytes_received == 2 * HIDDEN_SIZE * 8
    assert stats.wait_s > 0.0
    assert stats.restarts == 0


def test_more_rows_than_the_daemon_takes_at_once_go_in_several_requests(
    served: ServedRig,
) -> None:
    served.open_session(max_tokens=4)
    pairs = {(token_idx, token_idx % 5): 1.0 for token_idx in range(10)}
    served.assert_right(10, pairs)
    assert served.remote.stats.requests == 3
    assert served.remote.stats.tokens == served.remote.stats.pairs == 10


def test_several_batches_may_be_in_flight_and_collected_in_any_order(served: ServedRig) -> None:
    served.open_session(max_tokens=2)
    all_pairs = [random_pairs(seed, 6) for seed in range(4)]
    tickets = [begin(served.remote, batch_of(6, pairs)) for pairs in all_pairs]
    for index in (2, 0, 3, 1):
        out = np.zeros((6, HIDDEN_SIZE))
        finish(served.remote, tickets[index], out)
        np.testing.assert_array_equal(out, naive_sums(numbered_rows(6), all_pairs[index]))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_no_pairs_are_legal(served: ServedRig, num_tokens: int) -> None:
    served.open_session()
    served.assert_right(num_tokens, {})
    served.assert_right()
    assert served.losses == []


def test_without_a_session_nothing_is_sent(served: ServedRig) -> None:
    with pytest.raises(DaemonUnavailable, match=r"daemon cpu0: .*connected"):
        begin(served.remote, batch_of(3, PAIRS))
    served.open_session()
    served.assert_right()


def test_a_late_daemon_is_lost_and_used_again_in_a_new_session(hurried: ServedRig) -> None:
    hurried.open_session()
    hurried.bank.gate.clear()
    ticket = begin(hurried.remote, batch_of(3, PAIRS))
    out = np.full((3, HIDDEN_SIZE), 7.0)
    with pytest.raises(DeadlineExceeded, match=r"reply\b.*\b50 ms"):
        finish(hurried.remote, ticket, out)
    assert (out == 7.0).all(), "a failure leaves the sums as they were"
    assert [" 50 ms" in reason for reason in hurried.losses] == [True]
    assert hurried.link.session is None
    with pytest.raises(DaemonUnavailable, match=r"cpu0: .*reply\b.*\b50 ms"):
        begin(hurried.remote, batch_of(3, PAIRS))
    hurried.bank.gate.set()
    hurried.open_session(pairs_per_second=0.01)
    hurried.assert_right()
    assert [" 50 ms" in reason for reason in hurried.losses] == [True]
    assert hurried.remote.stats.restarts == 1


def test_a_loss_that_others_noticed_wakes_the_waiter_at_once(served: ServedRig) -> None:
    session = served.open_session()
    served.bank.gate.clear()
    ticket = begin(served.remote, batch_of(3, PAIRS))
    out = np.zeros((3, HIDDEN_SIZE))
    with ThreadPoolExecutor(1) as data_thread:
        waiter = data_thread.submit(finish, served.remote, ticket, out)
        assert served.bank.has_entered.wait(TIMEOUT_S)
        served.link.mark_lost(session.generation, "was ended by SIGKILL")
        with pytest.raises(DaemonUnavailable, match="cpu0: was ended by SIGKILL") as caught:
            waiter.result(TIMEOUT_S / 2)
    assert not isinstance(caught.value, DeadlineExceeded)
    assert served.losses == ["was ended by SIGKILL"]
    assert not out.any()
    served.bank.gate.set()
    served.open_session()
    served.assert_right()


def test_a_ticket_of_an_older_session_is_not_waited_for(served: ServedRig) -> None:
    old = served.open_session()
    ticket = begin(served.remote, batch_of(3, PAIRS))
    served.link.mark_lost(old.generation, "the connection ended")
    served.open_session()
    served.assert_right()
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="cpu0: the connection ended"):
        finish(served.remote, ticket, out)
    assert not out.any()
    assert served.losses == ["the connection ended"], "the new session is not at fault"
    assert served.link.session is not None
    served.assert_right()


def test_a_daemon_that_refuses_is_lost_with_its_reason(served: ServedRig) -> None:
    session = served.open_session()
    served.assert_right()
    served.service.drop_link(session.welcome.link_id)
    out = np.zeros((3, HIDDEN_SIZE))
    ticket = begin(served.remote, batch_of(3, PAIRS))
    with pytest.raises(DaemonUnavailable, match=r"daemon cpu0: .*hello"):
        finish(served.remote, ticket, out)
    assert not out.any()
    assert len(served.losses) == 1
    served.open_session()
    served.assert_right()


def test_a_daemon_whose_queue_is_full_is_lost_at_once(undo: ExitStack, endpoint: Endpoint) -> None:
    rig = Rig(undo, endpoint, min_deadline_s=TIMEOUT_S)
    rig.open_session()  # nobody listens

    def submit_many() -> None:
        for _ in range(10_000):
            begin(rig.remote, batch_of(1, {(0, 0): 1.0}))

    with pytest.raises(DaemonUnavailable, match="queue"):
        submit_many()
    assert len(rig.losses) == 1
    assert rig.link.session is None


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_an_answer_of_the_wrong_shape_is_a_loss(scripted: ScriptedRig, num_tokens: int) -> None:
    scripted.open_session()
    ticket = begin(scripted.remote, batch_of(3, PAIRS))
    assert scripted.answer(0.0, num_tokens=num_tokens).num_tokens == 2
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match=r"daemon cpu0: .*shape"):
        finish(scripted.remote, ticket, out)
    assert not out.any()
    assert len(scripted.losses) == 1
    scripted.open_session()
    again = begin(scripted.remote, batch_of(3, PAIRS))
    scripted.answer(0.0)
    finish(scripted.remote, again, out)


def test_sums_are_left_alone_when_only_the_last_piece_fails(scripted: ScriptedRig) -> None:
    scripted.open_session(max_tokens=1)
    ticket = begin(scripted.remote, batch_of(2, {(0, 0): 1.0, (1, 0): 1.0}))
    scripted.say(encode_reply(scripted.receive(), np.ones((1, HIDDEN_SIZE)), compute_s=0.0))
    scripted.fail("internal", "computing failed inside the daemon")
    out = np.zeros((2, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="computing failed inside"):
        finish(scripted.remote, ticket, out)
    assert not out.any()


@pytest.mark.parametrize("code", ["checksum", "late", "internal", "stale"])
def test_a_request_may_fail_without_the_session_being_lost(
    scripted: ScriptedRig, code: str
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    ticket = begin(scripted.remote, batch_of(3, PAIRS))
    scripted.fail(code, "no luck")
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: no luck"):
        finish(scripted.remote, ticket, np.zeros((3, HIDDEN_SIZE)))
    assert scripted.link.session is not None
    assert scripted.losses == ["no luck"]
    stats = scripted.remote.stats
    assert stats.checksum_failures == (code == "checksum")
    assert stats.deadline_failures == (code == "late")
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800, "nothing is in flight"


def test_a_reply_that_was_damaged_on_its_way_is_not_used(scripted: ScriptedRig) -> None:
    scripted.open_session()
    ticket = begin(scripted.remote, batch_of(3, PAIRS))
    sums = np.ones((2, HIDDEN_SIZE))
    [frame] = encode_reply(scripted.receive(), sums, compute_s=0.0)
    scripted.say([bytes(frame[:-1]) + b"\x01"])
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="damaged"):
        finish(scripted.remote, ticket, out)
    assert not out.any()
    assert scripted.remote.stats.checksum_failures == 1
    assert scripted.link.session is not None
    deadlines(scripted, Phase.DECODE, 0.0)


def test_an_answer_that_comes_twice_is_used_once(scripted: ScriptedRig) -> None:
    scripted.open_session()
    for _ in range(2):
        ticket = begin(scripted.remote, batch_of(1, TWO_PAIRS))
        frames = encode_reply(scripted.receive(), np.ones((1, HIDDEN_SIZE)), compute_s=0.0)
        scripted.say(frames)
        scripted.say(frames)
        out = np.zeros((1, HIDDEN_SIZE))
        finish(scripted.remote, ticket, out)
        assert (out == 1.0).all()
    assert scripted.remote.stats.stale == 1


def test_a_session_for_which_there_is_no_descriptor_is_given_up_and_the_next_one_used(
    served: ServedRig,
) -> None:
    served.open_session()
    with (
        no_more_descriptors(),
        pytest.raises(DaemonUnavailable, match=r"cpu0: .*Too many open files"),
    ):
        begin(served.remote, batch_of(3, PAIRS))
    assert served.link.session is None
    assert len(served.losses) == 1
    served.open_session()
    served.assert_right()
