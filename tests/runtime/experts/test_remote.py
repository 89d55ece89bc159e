"""Experts in a daemon: against a real compute thread, and against one that follows a script."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from dflash_daemon import service as service_module
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import Endpoint, IpcClaim, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.messages import (
    ExpertReply,
    ExpertRequest,
    Message,
    RequestFailed,
    Welcome,
    decode_header,
    encode_header,
)
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.routed_batch import RoutedBatch
from dflash_protocol.transports.zmq_stream import LinkLimits, largest_frame_bytes
from dflash_runtime.experts.compute import OwnerKind
from dflash_runtime.experts.link import DaemonLink, Session
from dflash_runtime.experts.remote import RemoteExpertCompute
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    moe_layer,
    naive_sums,
    numbered_rows,
)

PATIENCE_S = 20.0
CAPACITY = 16
NUM_USED = 3
OWNED = OwnedExperts.from_lists({0: range(5)})
PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (2, 4): -1.0}


class GateBank(ScalingBank):
    """Computes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(moe_layer())
        self.gate = threading.Event()
        self.gate.set()
        self.has_entered = threading.Event()

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self.has_entered.set()
        assert self.gate.wait(PATIENCE_S)
        super().accumulate(batch, out)


class Rig:
    """A link and its remote expert compute; somebody else plays the daemon."""

    def __init__(self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float) -> None:
        undo.callback(IpcClaim(endpoint).close)
        self.context = undo.enter_context(zmq.Context())
        self.losses: list[str] = []
        self.link = DaemonLink(
            "cpu0",
            endpoint,
            OWNED,
            launch=None,
            numeric_class="c",
            on_event=lambda kind, name, reason: self.losses.append(reason),
        )
        undo.callback(self.link.close)
        self.remote = RemoteExpertCompute(
            self.link,
            self.context,
            hidden_size=HIDDEN_SIZE,
            num_experts_used=NUM_USED,
            min_deadline_s=min_deadline_s,
        )
        undo.callback(self.remote.close)

    def open_session(
        self, *, max_tokens: int = CAPACITY, pairs_per_second: float = 1e9, link_id: str = ""
    ) -> Session:
        link_id = link_id or secrets.token_hex(8)
        return self.link.mark_ready(
            Welcome(2, link_id, "m", "p", "c", "cpu", 0, max_tokens, 1 << 30, pairs_per_second)
        )

    def compute(self, num_tokens: int, pairs: dict[tuple[int, int], float]) -> F64Array:
        out = np.full((num_tokens, HIDDEN_SIZE), 100.0)
        self.remote.collect(self.remote.submit(0, batch_of(num_tokens, pairs)), out)
        return out

    def assert_right(
        self, num_tokens: int = 3, pairs: dict[tuple[int, int], float] = PAIRS
    ) -> None:
        expected = 100.0 + naive_sums(numbered_rows(num_tokens), pairs)
        np.testing.assert_array_equal(self.compute(num_tokens, pairs), expected)


class ServedRig(Rig):
    """The daemon is a real compute thread."""

    def __init__(self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s)
        self.bank = GateBank()
        self.service = ComputeService(
            self.context,
            endpoint.data_address(0),
            max_frame_bytes=largest_frame_bytes(
                max_tokens=CAPACITY, hidden_size=HIDDEN_SIZE, max_pairs=5 * CAPACITY
            ),
        )
        self.service.set_banks({0: self.bank})
        self.service.start()
        undo.callback(self.service.close)
        undo.callback(self.bank.gate.set)

    def open_session(
        self, *, max_tokens: int = CAPACITY, pairs_per_second: float = 1e9, link_id: str = ""
    ) -> Session:
        session = super().open_session(
            max_tokens=max_tokens, pairs_per_second=pairs_per_second, link_id=link_id
        )
        self.service.add_link(session.welcome.link_id, LinkLimits(HIDDEN_SIZE, max_tokens, 8))
        return session


class ScriptedRig(Rig):
    """The daemon's data socket is played by the test."""

    def __init__(self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s)
        self.socket = self.context.socket(zmq.ROUTER)
        undo.callback(self.socket.close, linger=0)
        self.socket.bind(endpoint.data_address(0))
        self.parent = b""

    def receive(self) -> ExpertRequest:
        assert self.socket.poll(int(PATIENCE_S * 1e3))
        self.parent, header, *_ = self.socket.recv_multipart()
        message = decode_header(header)
        assert isinstance(message, ExpertRequest)
        return message

    def say(self, message: Message, *frames: bytes) -> None:
        self.socket.send_multipart([self.parent, encode_header(message), *frames])

    def answer(self, compute_s: float) -> ExpertRequest:
        """Receive a request and say that its sums are zero."""
        request = self.receive()
        sums = bytes(8 * request.num_tokens * HIDDEN_SIZE)
        self.say(ExpertReply(request.sequence, request.num_tokens, compute_s), sums)
        return request


@pytest.fixture(autouse=True)
def quick_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_POLL_S", 0.01)


@pytest.fixture
def endpoint(run_dir: Path) -> Endpoint:
    return parse_endpoint(f"ipc://{run_dir}/cpu0")


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def served(undo: ExitStack, endpoint: Endpoint) -> ServedRig:
    return ServedRig(undo, endpoint, min_deadline_s=PATIENCE_S)


@pytest.fixture
def hurried(undo: ExitStack, endpoint: Endpoint) -> ServedRig:
    return ServedRig(undo, endpoint, min_deadline_s=0.05)


@pytest.fixture
def scripted(undo: ExitStack, endpoint: Endpoint) -> ScriptedRig:
    return ScriptedRig(undo, endpoint, min_deadline_s=0.25)


def random_pairs(seed: int, num_tokens: int) -> dict[tuple[int, int], float]:
    random = np.random.default_rng(seed)
    return {
        (token_idx, expert_id): float(random.integers(-8, 9)) / 8
        for token_idx in range(num_tokens)
        for expert_id in range(5)
        if random.random() < 0.3
    }


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
    tickets = [served.remote.submit(0, batch_of(6, pairs)) for pairs in all_pairs]
    for index in (2, 0, 3, 1):
        out = np.zeros((6, HIDDEN_SIZE))
        served.remote.collect(tickets[index], out)
        np.testing.assert_array_equal(out, naive_sums(numbered_rows(6), all_pairs[index]))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_no_pairs_are_legal(served: ServedRig, num_tokens: int) -> None:
    served.open_session()
    served.assert_right(num_tokens, {})
    served.assert_right()
    assert served.losses == []


def test_without_a_session_nothing_is_sent(served: ServedRig) -> None:
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: not connected yet"):
        served.remote.submit(0, batch_of(3, PAIRS))
    served.open_session()
    served.assert_right()


def test_a_late_daemon_is_lost_and_used_again_in_a_new_session(hurried: ServedRig) -> None:
    hurried.open_session()
    hurried.bank.gate.clear()
    ticket = hurried.remote.submit(0, batch_of(3, PAIRS))
    out = np.full((3, HIDDEN_SIZE), 7.0)
    with pytest.raises(DeadlineExceeded, match="no reply within 50 ms"):
        hurried.remote.collect(ticket, out)
    assert (out == 7.0).all(), "a failure leaves the sums as they were"
    assert hurried.losses == ["no reply within 50 ms"]
    assert hurried.link.session is None
    with pytest.raises(DaemonUnavailable, match="cpu0: no reply within 50 ms"):
        hurried.remote.submit(0, batch_of(3, PAIRS))
    hurried.bank.gate.set()
    hurried.open_session(pairs_per_second=0.01)
    hurried.assert_right()
    assert hurried.losses == ["no reply within 50 ms"]
    assert hurried.remote.stats.restarts == 1


def test_a_loss_that_others_noticed_wakes_the_waiter_at_once(served: ServedRig) -> None:
    session = served.open_session()
    served.bank.gate.clear()
    ticket = served.remote.submit(0, batch_of(3, PAIRS))
    out = np.zeros((3, HIDDEN_SIZE))
    with ThreadPoolExecutor(1) as data_thread:
        waiter = data_thread.submit(served.remote.collect, ticket, out)
        assert served.bank.has_entered.wait(PATIENCE_S)
        served.link.mark_lost(session.generation, "was ended by SIGKILL")
        with pytest.raises(DaemonUnavailable, match="cpu0: was ended by SIGKILL") as caught:
            waiter.result(PATIENCE_S / 2)
    assert not isinstance(caught.value, DeadlineExceeded)
    assert served.losses == ["was ended by SIGKILL"]
    assert not out.any()
    served.bank.gate.set()
    served.open_session()
    served.assert_right()


def test_a_ticket_of_an_older_session_is_not_waited_for(served: ServedRig) -> None:
    old = served.open_session()
    ticket = served.remote.submit(0, batch_of(3, PAIRS))
    served.link.mark_lost(old.generation, "the connection ended")
    served.open_session()
    served.assert_right()
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="cpu0: the connection ended"):
        served.remote.collect(ticket, out)
    assert not out.any()
    assert served.losses == ["the connection ended"], "the new session is not at fault"
    assert served.link.session is not None
    served.assert_right()


def test_a_daemon_that_refuses_is_lost_with_its_reason(served: ServedRig) -> None:
    session = served.open_session()
    served.assert_right()
    served.service.drop_link(session.welcome.link_id)
    out = np.zeros((3, HIDDEN_SIZE))
    ticket = served.remote.submit(0, batch_of(3, PAIRS))
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: say hello"):
        served.remote.collect(ticket, out)
    assert not out.any()
    assert len(served.losses) == 1
    served.open_session()
    served.assert_right()


def test_a_daemon_whose_queue_is_full_is_lost_at_once(undo: ExitStack, endpoint: Endpoint) -> None:
    rig = Rig(undo, endpoint, min_deadline_s=PATIENCE_S)
    rig.open_session()  # nobody listens

    def submit_many() -> None:
        for _ in range(10_000):
            rig.remote.submit(0, batch_of(1, {(0, 0): 1.0}))

    with pytest.raises(DaemonUnavailable, match="queue is full"):
        submit_many()
    assert len(rig.losses) == 1
    assert rig.link.session is None


@pytest.mark.parametrize(
    "sizes",
    [[], [8 * 2 * HIDDEN_SIZE - 8], [8 * 3 * HIDDEN_SIZE], [8 * 2 * HIDDEN_SIZE, 0]],
)
def test_an_answer_of_the_wrong_shape_is_a_loss(scripted: ScriptedRig, sizes: list[int]) -> None:
    scripted.open_session()
    ticket = scripted.remote.submit(0, batch_of(3, PAIRS))
    request = scripted.receive()
    assert request.num_tokens == 2
    scripted.say(ExpertReply(request.sequence, 2, 0.0), *(bytes(size) for size in sizes))
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: the reply has not the shape"):
        scripted.remote.collect(ticket, out)
    assert not out.any()
    assert len(scripted.losses) == 1
    scripted.open_session()
    again = scripted.remote.submit(0, batch_of(3, PAIRS))
    scripted.answer(0.0)
    scripted.remote.collect(again, out)


def test_sums_are_left_alone_when_only_the_last_piece_fails(scripted: ScriptedRig) -> None:
    scripted.open_session(max_tokens=1)
    ticket = scripted.remote.submit(0, batch_of(2, {(0, 0): 1.0, (1, 0): 1.0}))
    first, last = scripted.receive(), scripted.receive()
    scripted.say(ExpertReply(first.sequence, 1, 0.0), np.ones(HIDDEN_SIZE).tobytes())
    scripted.say(RequestFailed(last.sequence, "internal", "computing failed inside the daemon"))
    out = np.zeros((2, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="computing failed inside"):
        scripted.remote.collect(ticket, out)
    assert not out.any()


TWO_PAIRS = {(0, 0): 1.0, (0, 1): 1.0}


def deadlines(scripted: ScriptedRig, phase: Phase, compute_s: float) -> float:
    """Deadline in ms of one request of two pairs, which is answered."""
    ticket = scripted.remote.submit(0, batch_of(1, TWO_PAIRS, phase=phase))
    request = scripted.answer(compute_s)
    scripted.remote.collect(ticket, np.zeros((1, HIDDEN_SIZE)))
    return request.deadline_ms


def test_a_deadline_is_four_times_the_predicted_time_of_all_pairs_in_flight(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    tickets = [scripted.remote.submit(0, batch_of(1, TWO_PAIRS)) for _ in range(3)]
    requests = [scripted.answer(0.2) for _ in tickets]
    assert [round(request.deadline_ms) for request in requests] == [800, 1600, 2400]
    for ticket in tickets:
        scripted.remote.collect(ticket, np.zeros((1, HIDDEN_SIZE)))
    assert round(deadlines(scripted, Phase.PREFILL, 0.2)) == 800, "nothing is in flight any more"


def test_rates_are_measured_for_each_phase(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.6)) == 800
    # A fifth of the way from 0.1 s a pair to the measured 0.3 s.
    assert round(deadlines(scripted, Phase.PREFILL, 0.6)) == 1120
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 640


def test_a_fast_daemon_still_gets_the_shortest_deadline(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=1e9)
    assert round(deadlines(scripted, Phase.DECODE, 1e-9)) == 250


def test_no_deadline_is_longer_than_ten_minutes(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=0.01)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 600_000


def test_what_was_measured_outlives_a_session(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.open_session(pairs_per_second=20.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 640
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 400, "never measured"


def test_a_daemon_that_was_too_slow_is_given_twice_the_time_in_its_next_session(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=25.0)
    ticket = scripted.remote.submit(0, batch_of(1, TWO_PAIRS))
    assert round(scripted.receive().deadline_ms) == 320
    with pytest.raises(DeadlineExceeded, match="no reply within 320 ms"):
        scripted.remote.collect(ticket, np.zeros((1, HIDDEN_SIZE)))
    scripted.open_session(pairs_per_second=25.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 640


def test_an_abandoned_ticket_is_no_longer_in_flight_and_its_reply_is_dropped(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    late, early = (scripted.remote.submit(0, batch_of(1, TWO_PAIRS)) for _ in range(2))
    scripted.answer(0.0)
    scripted.answer(0.0)
    scripted.remote.abandon(late)
    out = np.zeros((1, HIDDEN_SIZE))
    scripted.remote.collect(early, out)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    assert scripted.losses == []


def test_abandoning_a_ticket_of_an_older_session_is_nothing(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    ticket = scripted.remote.submit(0, batch_of(1, TWO_PAIRS))
    scripted.receive()
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.remote.abandon(ticket)
    scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    scripted.remote.abandon(ticket)
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 800


def test_restarts_are_counted_although_nothing_was_sent_since(scripted: ScriptedRig) -> None:
    for _ in range(3):
        session = scripted.open_session()
        scripted.link.mark_lost(session.generation, "the connection ended")
    assert scripted.remote.stats.restarts == 2


def test_a_new_session_starts_from_its_own_rate_and_an_empty_queue(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    scripted.remote.submit(0, batch_of(1, TWO_PAIRS))
    scripted.receive()
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.open_session(pairs_per_second=20.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.1)) == 400


@pytest.mark.parametrize(
    "compute_s",
    [
        1e300,
        -1e300,
        -0.0,
    ],
)
def test_an_absurd_compute_time_neither_breaks_nor_freezes_the_parent(
    scripted: ScriptedRig, compute_s: float
) -> None:
    scripted.open_session()
    deadlines(scripted, Phase.DECODE, compute_s)
    for _ in range(3):
        deadline_ms = deadlines(scripted, Phase.DECODE, 0.001)
        assert 250.0 <= deadline_ms <= 3_600_000.0
    assert scripted.losses == []
