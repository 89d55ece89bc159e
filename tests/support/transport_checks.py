"""What every transport must do (`CHECKS`), and helpers of the tests of single transports.

A check tests both ends, the parent's ClientTransport and the daemon's ServerTransport, with a fresh
pair of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest

from dflash_protocol.batch import HostSums, RoutedBatch, group_by_expert
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.wire.transport import (
    ClientTransport,
    ReceivedRequest,
    Reply,
    ServerTransport,
)
from support.routed_batches import assert_same_batch

HIDDEN_SIZE = 37
MAX_TOKENS = 11
MAX_EXPERTS_USED = 4
"""Limits that a pair must be connected with; payloads are float32."""

NUM_IN_FLIGHT = 4
"""Requests that a pair must hold while none is served."""

LOST_REASON = "daemon cpu0: it was ended"

TIMEOUT_S = 20.0
"""Upper bound for a message on the slowest machine; waited out only on failure."""
SEED_WITHOUT_PAIRS = 11
"""With it no token of `example_batch(2)` has an expert."""
_RECEIVE_S = 0.5
_MANY = 50
_LONG_S = 600.0


class LinkEnds(Protocol):
    """Two connected ends, both used by the checking thread, unless a check says otherwise."""

    @property
    def client(self) -> ClientTransport: ...

    @property
    def server(self) -> ServerTransport: ...


class TransportPair(LinkEnds, Protocol):
    """What the checks need of a transport."""

    def connect(self) -> ClientTransport:
        """A client of the same server on a link of its own; closed with the pair."""

    def drop(self) -> None:
        """Have the server drop the link of `client`."""

    def lose(self) -> None:
        """Signal the client that the link is lost, for LOST_REASON."""

    def close(self) -> None:
        """Release both ends, and all clients that `connect` has made."""


def example_batch(num_tokens: int, *, seed: int = 0, phase: Phase = Phase.PREFILL) -> RoutedBatch:
    """A batch whose tokens have 0 to MAX_EXPERTS_USED experts each."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, MAX_EXPERTS_USED + 1, num_tokens)
    experts = [random.permutation(7)[:count] for count in counts]
    return group_by_expert(
        random.standard_normal((num_tokens, HIDDEN_SIZE), dtype=np.float32),
        np.repeat(np.arange(num_tokens, dtype=np.int32), counts),
        np.concatenate([np.empty(0, np.int32), *experts]).astype(np.int32),
        weights=random.standard_normal(int(counts.sum()), dtype=np.float32),
        phase=phase,
    )


def sums_of(batch: RoutedBatch) -> F64Array:
    """Sums of a fake daemon, which depend on every array of the batch. Shapes: [T, H]."""
    ids = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    sums = batch.hidden.astype(np.float64) / 3.0
    np.add.at(sums, batch.token_indices, (batch.weights * (ids + 1.0))[:, None])
    return sums


def received(pair: LinkEnds) -> ReceivedRequest:
    """The next valid request. Raises: AssertionError if none arrives."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        if (request := pair.server.receive(_RECEIVE_S)) is not None:
            return request
    raise AssertionError("no request came")


def assert_serves(pair: LinkEnds, *, seed: int = 0) -> None:
    """Send one request and check its reply; earlier requests are left unanswered."""
    batch = example_batch(3, seed=seed)
    sequence = pair.client.submit(99, batch, deadline_s=TIMEOUT_S)
    while (request := received(pair)).header.layer_id != 99:
        pass
    assert_same_batch(request.batch, batch)
    pair.server.reply(request, HostSums(sums_of(request.batch)), 0.25)
    _assert_reply(pair.client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=0.25)


def _assert_reply(reply: Reply, batch: RoutedBatch, *, compute_s: float) -> None:
    expected = sums_of(batch)
    assert reply.sums.shape == expected.shape, f"sums came back with shape {reply.sums.shape}"
    assert reply.sums.tobytes() == expected.tobytes(), "sums came back with other bits"
    assert reply.compute_s == compute_s, "another compute time came back"


def _check_echo(pair: TransportPair) -> None:
    """0, 1 and many tokens, or none that has an expert, arrive bit for bit, in every phase, and so
    do their sums."""
    assert example_batch(2, seed=SEED_WITHOUT_PAIRS).num_pairs == 0
    for num_tokens, seed in ((1, 1), (0, 0), (MAX_TOKENS, 3), (2, SEED_WITHOUT_PAIRS)):
        for phase in Phase:
            batch = example_batch(num_tokens, seed=seed, phase=phase)
            sent, came = pair.client.counters.bytes_sent, pair.client.counters.bytes_received
            sequence = pair.client.submit(5, batch, deadline_s=0.75)
            request = received(pair)
            header = request.header
            assert (header.sequence, header.layer_id) == (sequence, 5)
            assert (header.num_tokens, header.payload) == (num_tokens, "f32")
            assert header.deadline_ms == 750.0
            assert 0.0 <= request.waited_s < TIMEOUT_S
            assert_same_batch(request.batch, batch)
            pair.server.reply(request, HostSums(sums_of(request.batch)), 0.125)
            _assert_reply(pair.client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=0.125)
            assert pair.client.counters.bytes_sent >= sent + batch.hidden.nbytes
            assert pair.client.counters.bytes_received >= came + 8 * batch.hidden.size


def _check_any_order(pair: TransportPair) -> None:
    """Several requests in flight; replies may come, and be waited for, in any order."""
    batches = [example_batch(n + 1, seed=n) for n in range(NUM_IN_FLIGHT)]
    sequences = [pair.client.submit(n, b, deadline_s=9.0) for n, b in enumerate(batches)]
    assert sequences == sorted(set(sequences)), "sequences do not ascend"
    requests = [received(pair) for _ in batches]
    assert [r.header.layer_id for r in requests] == [*range(NUM_IN_FLIGHT)], "not as sent"
    for index in (2, 0, 3, 1):
        pair.server.reply(requests[index], HostSums(sums_of(requests[index].batch)), float(index))
    for index in (1, 2, 3, 0):
        reply = pair.client.wait(sequences[index], deadline_s=TIMEOUT_S)
        _assert_reply(reply, batches[index], compute_s=float(index))


def _check_many(pair: TransportPair) -> None:
    """More requests than a transport holds at once, served by another thread meanwhile."""
    batches = [example_batch(n % MAX_TOKENS, seed=n) for n in range(_MANY)]

    def serve() -> None:
        for _ in batches:
            request = received(pair)
            pair.server.reply(request, HostSums(sums_of(request.batch)), 1.0)

    server = threading.Thread(target=serve)
    server.start()
    sequences = [pair.client.submit(0, batch, deadline_s=TIMEOUT_S) for batch in batches]
    for sequence, batch in reversed(list(zip(sequences, batches, strict=True))):
        _assert_reply(pair.client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=1.0)
    server.join()


def _check_sleeping(pair: TransportPair) -> None:
    """A sleeping waiter is woken by the reply, not by its deadline."""
    batch = example_batch(2)

    def serve() -> None:
        for _ in range(3):
            request = received(pair)
            time.sleep(0.05)
            pair.server.reply(request, HostSums(sums_of(request.batch)), 1.0)

    server = threading.Thread(target=serve)
    server.start()
    for _ in range(3):
        started_s = time.monotonic()
        sequence = pair.client.submit(0, batch, deadline_s=_LONG_S)
        _assert_reply(pair.client.wait(sequence, deadline_s=_LONG_S), batch, compute_s=1.0)
        assert 0.05 <= time.monotonic() - started_s < TIMEOUT_S
    server.join()


def _check_forget(pair: TransportPair) -> None:
    """The reply to a forgotten request is neither kept nor counted, arrived or not."""
    num_rounds = 3 * NUM_IN_FLIGHT
    for round_number in range(num_rounds):
        arrived, coming = (
            pair.client.submit(0, example_batch(1), deadline_s=9.0) for _ in range(2)
        )
        requests = [received(pair), received(pair)]
        pair.server.reply(requests[0], HostSums(sums_of(requests[0].batch)), 0.0)
        pair.client.forget(arrived)
        pair.client.forget(coming)
        pair.client.forget(1_000_000_007)
        pair.server.reply(requests[1], HostSums(sums_of(requests[1].batch)), 0.0)
        assert_serves(pair, seed=round_number)
        for sequence in (arrived, coming):
            with pytest.raises(DeadlineExceeded):
                pair.client.wait(sequence, deadline_s=0.0)
    assert pair.client.counters.bytes_received == num_rounds * 3 * HIDDEN_SIZE * 8


def _check_deadline(pair: TransportPair) -> None:
    """A missed deadline raises in time; the late reply does no harm."""
    for deadline_s in (0.0, 0.02):
        sequence = pair.client.submit(0, example_batch(1), deadline_s=deadline_s)
        started_s = time.monotonic()
        reason = f"no reply within {deadline_s * 1e3:.0f} ms"
        with pytest.raises(DeadlineExceeded, match=reason):
            pair.client.wait(sequence, deadline_s=deadline_s)
        assert deadline_s <= time.monotonic() - started_s < TIMEOUT_S
        request = received(pair)
        pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
        assert_serves(pair)
        pair.client.forget(sequence)
    assert_serves(pair)


def _check_lost(pair: TransportPair) -> None:
    """A lost link ends a wait at once; a reply that has arrived before is still returned."""
    batch = example_batch(2)
    answered, pending = (pair.client.submit(0, batch, deadline_s=_LONG_S) for _ in range(2))
    requests = [received(pair), received(pair)]
    pair.server.reply(requests[0], HostSums(sums_of(requests[0].batch)), 0.5)
    timer = threading.Timer(0.05, pair.lose)
    timer.start()
    with pytest.raises(DaemonUnavailable) as caught:
        pair.client.wait(pending, deadline_s=_LONG_S)
    timer.join()
    assert not isinstance(caught.value, DeadlineExceeded), "it sat out its deadline"
    assert str(caught.value) == LOST_REASON
    _assert_reply(pair.client.wait(answered, deadline_s=0.1), batch, compute_s=0.5)


def _check_failed(pair: TransportPair) -> None:
    """The wait for a failed request raises the daemon's code and reason."""
    for reason in ("no experts of layer 1 here", "", "ä" * 5000):
        sequence = pair.client.submit(1, example_batch(1), deadline_s=9.0)
        request = received(pair)
        error = ProtocolError(reason, code="not_owned")
        pair.server.fail(request.link_id, request.header.sequence, error)
        with pytest.raises(ProtocolError) as caught:
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert caught.value.code == "not_owned"
        assert str(caught.value).removesuffix("…") in reason
        assert len(str(caught.value)) >= min(len(reason), 500)
        assert_serves(pair)


def _check_oversize(pair: TransportPair) -> None:
    """More tokens than negotiated are refused, by either end; other requests still work."""

    def send() -> None:
        batch = example_batch(MAX_TOKENS + 1)
        sequence = pair.client.submit(0, batch, deadline_s=9.0)
        assert pair.server.receive(_RECEIVE_S) is None
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)

    reason = rf"\b{MAX_TOKENS + 1} tokens\b.* {MAX_TOKENS}\b"
    for _ in range(2 * NUM_IN_FLIGHT):
        with pytest.raises(ProtocolError, match=reason) as caught:
            send()
        assert caught.value.code == "capacity"
        assert_serves(pair)


def _check_wrong_answer(pair: TransportPair) -> None:
    """Sums of a wrong number of tokens raise ProtocolError."""
    for num_rows in (1, 3, 0):
        sequence = pair.client.submit(0, example_batch(2), deadline_s=9.0)
        pair.server.reply(received(pair), HostSums(np.zeros((num_rows, HIDDEN_SIZE))), 0.0)
        with pytest.raises(ProtocolError):
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        pair.client.forget(sequence)
        assert_serves(pair)


def _check_idle(pair: TransportPair) -> None:
    """A server without requests returns when the time is up."""
    assert_serves(pair)
    for timeout_s in (0.0, 0.05):
        started_s = time.monotonic()
        assert pair.server.receive(timeout_s) is None
        assert time.monotonic() - started_s < TIMEOUT_S


def _check_two_links(pair: TransportPair) -> None:
    """Each link gets its own replies, though requests of both have the same sequence, and is served
    on when the other one's client is closed."""
    clients = pair.client, pair.connect()
    batches = example_batch(2, seed=1), example_batch(5, seed=2)
    sequences = [
        client.submit(layer_id, batch, deadline_s=TIMEOUT_S)
        for layer_id, (client, batch) in enumerate(zip(clients, batches, strict=True))
    ]
    assert sequences[0] == sequences[1], "links do not number their requests independently"
    requests = sorted((received(pair) for _ in clients), key=lambda r: r.header.layer_id)
    assert requests[0].link_id != requests[1].link_id, "two links have one id"
    for request in reversed(requests):
        pair.server.reply(request, HostSums(sums_of(request.batch)), 1.0)
    for client, sequence, batch in zip(clients, sequences, batches, strict=True):
        _assert_reply(client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=1.0)
    clients[1].submit(3, batches[1], deadline_s=TIMEOUT_S)
    left = received(pair)
    clients[1].close()
    pair.server.reply(left, HostSums(sums_of(left.batch)), 1.0)
    assert_serves(pair)


def _check_dropped_link(pair: TransportPair) -> None:
    """Answering a request whose link was dropped does no harm to the others."""
    other = pair.connect()
    for _ in range(2):
        pair.client.submit(1, example_batch(1), deadline_s=TIMEOUT_S)
    requests = [received(pair), received(pair)]
    sums = sums_of(requests[0].batch)
    pair.drop()
    pair.server.receive(0.0)  # a server may drop links when it looks for requests
    pair.server.reply(requests[0], HostSums(sums), 1.0)
    error = ProtocolError("no link", code="internal")
    pair.server.fail(requests[1].link_id, requests[1].header.sequence, error)
    batch = example_batch(4)
    sequence = other.submit(2, batch, deadline_s=TIMEOUT_S)
    request = received(pair)
    pair.server.reply(request, HostSums(sums_of(request.batch)), 1.0)
    _assert_reply(other.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=1.0)


def _check_answered_once(pair: TransportPair) -> None:
    """A request's first answer counts: further ones reach no request."""
    batch = example_batch(2)
    for _ in range(2 * NUM_IN_FLIGHT):
        sequence = pair.client.submit(0, batch, deadline_s=TIMEOUT_S)
        request = received(pair)
        link_id, number = request.link_id, request.header.sequence
        sums = sums_of(request.batch)
        pair.server.reply(request, HostSums(sums), 1.0)
        pair.server.reply(request, HostSums(2.0 * sums), 2.0)
        pair.server.fail(link_id, number, ProtocolError("too late", code="internal"))
        _assert_reply(pair.client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=1.0)


def _check_pushed(pair: TransportPair) -> None:
    """`push` and `poll` may be called at any time, for requests that are not in flight too."""
    batch = example_batch(3)
    for _ in range(2):
        pair.client.poll()
        pair.client.push(7)
        sequence = pair.client.submit(0, batch, deadline_s=TIMEOUT_S)
        pair.client.push(sequence)
        pair.client.poll()
        request = received(pair)
        pair.server.reply(request, HostSums(sums_of(request.batch)), 1.0)
        pair.client.poll()
        pair.client.push(sequence)
        _assert_reply(pair.client.wait(sequence, deadline_s=TIMEOUT_S), batch, compute_s=1.0)


CHECKS: dict[str, Callable[[TransportPair], None]] = {
    "echo": _check_echo,
    "any order": _check_any_order,
    "many in flight": _check_many,
    "sleeping": _check_sleeping,
    "forget": _check_forget,
    "deadline": _check_deadline,
    "lost": _check_lost,
    "failed": _check_failed,
    "oversize": _check_oversize,
    "wrong answer": _check_wrong_answer,
    "idle": _check_idle,
    "two links": _check_two_links,
    "dropped link": _check_dropped_link,
    "answered once": _check_answered_once,
    "pushed": _check_pushed,
}
