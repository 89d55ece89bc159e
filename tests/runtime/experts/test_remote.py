"""Experts in a daemon: against a real compute thread, and against one that follows a script."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dflash_daemon import service as service_module
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import Endpoint, IpcClaim, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.messages import ExpertRequest, Frames, Welcome
from dflash_protocol.payloads import NEGOTIABLE, PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.requests import (
    decode_request,
    encode_failure,
    encode_reply,
    largest_frame_bytes,
)
from dflash_protocol.routed_batch import RoutedBatch
from dflash_protocol.transport import LinkLimits
from dflash_runtime.experts.compute import OwnerKind
from dflash_runtime.experts.link import DaemonLink, Session
from dflash_runtime.experts.modes import ExecutionMode
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

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
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
            **options,
        )
        undo.callback(self.remote.close)

    def open_session(
        self,
        *,
        max_tokens: int = CAPACITY,
        pairs_per_second: float = 1e9,
        link_id: str = "",
        payload: PayloadType = PayloadType.F32,
    ) -> Session:
        return self.link.mark_ready(
            Welcome(
                version=2,
                link_id=link_id or secrets.token_hex(8),
                model_identity="m",
                placement_fingerprint="p",
                numeric_class="c",
                device="cpu",
                data_port=0,
                max_tokens=max_tokens,
                free_memory_bytes=1 << 30,
                pairs_per_second=pairs_per_second,
                payload=payload.value,
            )
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

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s, **options)
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

    def open_session(self, **options: Any) -> Session:
        session = super().open_session(**options)
        welcome = session.welcome
        self.service.add_link(
            welcome.link_id,
            LinkLimits(HIDDEN_SIZE, welcome.max_tokens, 8, payload=PayloadType(welcome.payload)),
        )
        return session


class ScriptedRig(Rig):
    """The daemon's data socket is played by the test."""

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s, **options)
        self.socket = self.context.socket(zmq.ROUTER)
        undo.callback(self.socket.close, linger=0)
        self.socket.bind(endpoint.data_address(0))
        self.parent = b""

    def receive(self) -> ExpertRequest:
        assert self.socket.poll(int(PATIENCE_S * 1e3))
        self.parent, *frames = self.socket.recv_multipart()
        return decode_request(frames, LinkLimits(HIDDEN_SIZE, CAPACITY, NUM_USED))[0]

    def say(self, frames: Frames) -> None:
        self.socket.send_multipart([self.parent, *frames])

    def answer(self, compute_s: float, *, num_tokens: int | None = None) -> ExpertRequest:
        """Receive a request and say that its sums are zero."""
        request = self.receive()
        sums = np.zeros((request.num_tokens if num_tokens is None else num_tokens, HIDDEN_SIZE))
        self.say(encode_reply(request, sums, compute_s=compute_s))
        return request

    def fail(self, code: str, reason: str) -> None:
        """Receive a request and say that it is not computed."""
        self.say(encode_failure(self.receive().sequence, ProtocolError(reason, code=code)))


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


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_an_answer_of_the_wrong_shape_is_a_loss(scripted: ScriptedRig, num_tokens: int) -> None:
    scripted.open_session()
    ticket = scripted.remote.submit(0, batch_of(3, PAIRS))
    assert scripted.answer(0.0, num_tokens=num_tokens).num_tokens == 2
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
    scripted.say(encode_reply(scripted.receive(), np.ones((1, HIDDEN_SIZE)), compute_s=0.0))
    scripted.fail("internal", "computing failed inside the daemon")
    out = np.zeros((2, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="computing failed inside"):
        scripted.remote.collect(ticket, out)
    assert not out.any()


@pytest.mark.parametrize("code", ["checksum", "late", "internal", "stale"])
def test_a_request_may_fail_without_the_session_being_lost(
    scripted: ScriptedRig, code: str
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    ticket = scripted.remote.submit(0, batch_of(3, PAIRS))
    scripted.fail(code, "no luck")
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: no luck"):
        scripted.remote.collect(ticket, np.zeros((3, HIDDEN_SIZE)))
    assert scripted.link.session is not None
    assert scripted.losses == ["no luck"]
    stats = scripted.remote.stats
    assert stats.checksum_failures == (code == "checksum")
    assert stats.deadline_failures == (code == "late")
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800, "nothing is in flight"


def test_a_session_of_which_request_after_request_fails_is_given_up(scripted: ScriptedRig) -> None:
    scripted.open_session()
    for number in range(5):
        if number == 2:  # one that succeeds in between
            deadlines(scripted, Phase.DECODE, 0.0)
        assert scripted.link.session is not None
        ticket = scripted.remote.submit(0, batch_of(3, PAIRS))
        scripted.fail("internal", "no luck")
        with pytest.raises(DaemonUnavailable, match="no luck"):
            scripted.remote.collect(ticket, np.zeros((3, HIDDEN_SIZE)))
    assert scripted.link.session is None
    assert len(scripted.losses) == 5


def test_a_reply_that_was_damaged_on_its_way_is_not_used(scripted: ScriptedRig) -> None:
    scripted.open_session()
    ticket = scripted.remote.submit(0, batch_of(3, PAIRS))
    sums = np.ones((2, HIDDEN_SIZE))
    [frame] = encode_reply(scripted.receive(), sums, compute_s=0.0)
    scripted.say([bytes(frame[:-1]) + b"\x01"])
    out = np.zeros((3, HIDDEN_SIZE))
    with pytest.raises(DaemonUnavailable, match="was damaged"):
        scripted.remote.collect(ticket, out)
    assert not out.any()
    assert scripted.remote.stats.checksum_failures == 1
    assert scripted.link.session is not None
    deadlines(scripted, Phase.DECODE, 0.0)


def test_an_answer_that_comes_twice_is_used_once(scripted: ScriptedRig) -> None:
    scripted.open_session()
    for _ in range(2):
        ticket = scripted.remote.submit(0, batch_of(1, TWO_PAIRS))
        frames = encode_reply(scripted.receive(), np.ones((1, HIDDEN_SIZE)), compute_s=0.0)
        scripted.say(frames)
        scripted.say(frames)
        out = np.zeros((1, HIDDEN_SIZE))
        scripted.remote.collect(ticket, out)
        assert (out == 1.0).all()
    assert scripted.remote.stats.stale == 1


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


MODES = [ExecutionMode.BATCHED, ExecutionMode.STREAM, ExecutionMode.AUTO]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("payload", NEGOTIABLE)
@pytest.mark.parametrize("stream_tokens", [1, 3, 4])
def test_no_mode_changes_a_bit(
    undo: ExitStack,
    endpoint: Endpoint,
    mode: ExecutionMode,
    payload: PayloadType,
    stream_tokens: int,
) -> None:
    rig = ServedRig(
        undo, endpoint, min_deadline_s=PATIENCE_S, mode=mode, stream_tokens=stream_tokens
    )
    rig.bank = LargeBank()
    rig.service.set_banks({0: rig.bank})
    reference: dict[int, F64Array] = {}
    for max_tokens in (CAPACITY, 5):
        session = rig.open_session(max_tokens=max_tokens, payload=payload)
        for seed in range(12):  # enough for `auto` to try both
            num_tokens = 1 + 6 * (seed % 6)
            pairs = random_pairs(seed % 6, num_tokens) or {(0, 0): 1.0}
            out = rig.compute(num_tokens, pairs)
            expected = reference.setdefault(seed % 6, out)
            assert out.tobytes() == expected.tobytes()
        rig.link.mark_lost(session.generation, "next")
    assert rig.losses == ["next", "next"]
    assert (rig.remote.stats.widened > 0) == (payload is PayloadType.F16)


class LargeBank(GateBank):
    """Some of its sums are more than float16 holds."""

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        super().accumulate(batch, out)
        out[batch.hidden[:, 0] > 60.0] *= 1e3


def test_streaming_sends_slices_of_a_few_tokens_and_bounds_what_is_in_flight(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    rig = ScriptedRig(undo, endpoint, min_deadline_s=PATIENCE_S, mode=ExecutionMode.STREAM)
    rig.open_session(max_tokens=1024)
    pairs = {(token_idx, token_idx % 5): 1.0 for token_idx in range(150)}
    ticket = rig.remote.submit(0, batch_of(150, pairs))
    requests = [rig.receive() for _ in range(16)]
    assert not rig.socket.poll(50), "no more than the window"
    with ThreadPoolExecutor(1) as data_thread:
        out = np.zeros((150, HIDDEN_SIZE))
        waiter = data_thread.submit(rig.remote.collect, ticket, out)
        for request in reversed(requests):  # in any order
            rig.say(encode_reply(request, sums_like(request), compute_s=0.0))
        sizes = [request.num_tokens for request in requests]
        while sum(sizes) < 150:
            request = rig.receive()
            sizes.append(request.num_tokens)
            rig.say(encode_reply(request, sums_like(request), compute_s=0.0))
        waiter.result(PATIENCE_S)
    assert sizes == [4] * 37 + [2]
    expected = np.repeat(np.arange(1, 39), [4] * 37 + [2])
    np.testing.assert_array_equal(out[:, 0], expected)
    assert rig.remote.stats.requests == 38


def sums_like(request: ExpertRequest) -> F64Array:
    """Sums that say which request they answer."""
    return np.full((request.num_tokens, HIDDEN_SIZE), float(request.sequence))


@pytest.mark.parametrize("mode", MODES)
def test_one_token_is_the_same_in_every_mode(
    undo: ExitStack, endpoint: Endpoint, mode: ExecutionMode
) -> None:
    rig = ServedRig(undo, endpoint, min_deadline_s=PATIENCE_S, mode=mode)
    rig.open_session()
    for number in range(1, 9):
        rig.assert_right(1, {(0, 1): 0.5, (0, 4): 0.25})
        assert rig.remote.stats.requests == number


class SlowBank(GateBank):
    """Every request takes a while, whatever it holds."""

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        time.sleep(0.002)
        super().accumulate(batch, out)


def test_auto_soon_leaves_the_slower_mode_and_never_sends_all_of_a_batch_in_it(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    """Where every request costs 2 ms, 16 slices are 32 ms and one batch is 2 ms."""
    rig = ServedRig(undo, endpoint, min_deadline_s=PATIENCE_S, mode=ExecutionMode.AUTO)
    rig.bank = SlowBank()
    rig.service.set_banks({0: rig.bank})
    session = rig.open_session(max_tokens=64)
    rig.service.add_link(session.welcome.link_id, LinkLimits(HIDDEN_SIZE, 64, 8))
    pairs = {(token_idx, token_idx % 5): 0.5 for token_idx in range(64)}
    numbers = []
    for _ in range(10):
        before = rig.remote.stats.requests
        rig.assert_right(64, pairs)
        numbers.append(rig.remote.stats.requests - before)
    assert [numbers[0], numbers[2], *numbers[4:]] == [1] * 8
    assert all(4 < number <= 12 for number in (numbers[1], numbers[3])), numbers


def test_what_work_costs_is_counted_by_phase(served: ServedRig) -> None:
    served.open_session(max_tokens=2)
    served.assert_right(3, PAIRS)
    decoding = batch_of(1, TWO_PAIRS, phase=Phase.DECODE)
    for _ in range(3):
        served.remote.collect(served.remote.submit(0, decoding), np.zeros((1, HIDDEN_SIZE)))
    stats = served.remote.stats
    prefill, decode = stats.phases[Phase.PREFILL], stats.phases[Phase.DECODE]
    assert (prefill.requests, prefill.tokens, prefill.pairs) == (1, 2, 3)
    assert (decode.requests, decode.tokens, decode.pairs) == (3, 3, 6)
    for name in ("requests", "tokens", "pairs", "bytes_sent", "bytes_received"):
        assert getattr(prefill, name) + getattr(decode, name) == getattr(stats, name)
    for each in (prefill, decode):
        assert min(each.pack_s, each.send_s, each.wait_s, each.receive_s, each.combine_s) > 0
        assert each.compute_s > 0
        record = each.as_record()
        assert 0 < record["p50_s"] <= record["p99_s"] < PATIENCE_S
    assert decode.round_trips.num_samples == 3
    record_of_owner = stats.as_record()
    assert record_of_owner["kind"] == "daemon"
    json.dumps(record_of_owner)
