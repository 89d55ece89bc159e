"""The compute thread: what it serves, what it refuses, and that nothing stops it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dflash_daemon import data_paths
from dflash_daemon import service as service_module
from dflash_daemon.service import ComputeService
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array
from dflash_protocol.transports.zmq_stream import StreamClient, StreamServer
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import LinkLimits
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    moe_layer,
    naive_sums,
    numbered_rows,
)

TIMEOUT_S = 20.0
CAPACITY = 64
PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (2, 4): -1.0}
MAX_FRAME_BYTES = largest_frame_bytes(
    max_tokens=CAPACITY, hidden_size=HIDDEN_SIZE, max_pairs=5 * CAPACITY
)


class MoodyBank(ScalingBank):
    """Fails when told to, and computes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(moe_layer())
        self.failure: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.has_entered = threading.Event()

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self.has_entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        super().accumulate(batch, out)


class Rig:
    """A service with one bank, of layer 3, and clients of links that it knows."""

    def __init__(self, undo: ExitStack, data_address: str, *, shares_memory: bool = False) -> None:
        self._undo = undo
        self.bank = MoodyBank()
        self.context = undo.enter_context(zmq.Context())
        self.service = ComputeService(
            self.context,
            data_address,
            max_frame_bytes=MAX_FRAME_BYTES,
            shares_memory=shares_memory,
        )
        self.port = self.service.start()
        undo.callback(self.service.close)
        undo.callback(self.bank.gate.set)
        self.address = data_address.replace("*", str(self.port))

    def add_link(self, link_id: str, *, max_experts_used: int = 8) -> None:
        limits = LinkLimits(HIDDEN_SIZE, CAPACITY, max_experts_used)
        self.service.add_link(link_id, limits, {3: self.bank})

    def client(self, link_id: str | None = None) -> StreamClient:
        link_id = link_id or secrets.token_hex(8)
        self.add_link(link_id)
        never_lost = os.eventfd(0, os.EFD_CLOEXEC)
        self._undo.callback(os.close, never_lost)
        client = StreamClient(
            self.context,
            self.address,
            link_id,
            hidden_size=HIDDEN_SIZE,
            max_frame_bytes=MAX_FRAME_BYTES,
            lost_fd=never_lost,
            lost_reason=lambda: "",
        )
        self._undo.callback(client.close)
        return client


@pytest.fixture(autouse=True)
def quick_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_paths, "_POLL_S", 0.01)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=[False, True], ids=["socket", "socket and rings"])
def rig(undo: ExitStack, run_dir: Path, request: pytest.FixtureRequest) -> Rig:
    endpoint = parse_endpoint(f"ipc://{run_dir}/cpu0")
    undo.callback(IpcClaim(endpoint).close)
    rig = Rig(undo, endpoint.data_address(0), shares_memory=request.param)
    return rig


def send(client: StreamClient, batch: RoutedBatch, *, layer_id: int = 3) -> int:
    return client.submit(layer_id, batch, deadline_s=TIMEOUT_S)


def assert_serves(client: StreamClient) -> None:
    reply = client.wait(send(client, batch_of(3, PAIRS)), deadline_s=TIMEOUT_S)
    np.testing.assert_array_equal(reply.sums, naive_sums(numbered_rows(3), PAIRS))
    assert reply.compute_s >= 0.0


def refusal(client: StreamClient, batch: RoutedBatch, *, layer_id: int = 3) -> ProtocolError:
    sequence = send(client, batch, layer_id=layer_id)
    with pytest.raises(ProtocolError) as caught:
        client.wait(sequence, deadline_s=TIMEOUT_S)
    return caught.value


def test_a_link_is_served_its_own_experts_and_no_others(undo: ExitStack) -> None:
    rig = Rig(undo, "tcp://127.0.0.1:*")
    assert rig.port > 0
    client, poor = rig.client(), rig.client("aa" * 8)
    rig.service.add_link("aa" * 8, LinkLimits(HIDDEN_SIZE, CAPACITY, 8), {})
    error = refusal(poor, batch_of(3, PAIRS))
    assert error.code == "not_owned"
    assert "layer 3" in str(error)
    assert_serves(client)
    assert refusal(client, batch_of(3, PAIRS), layer_id=2).code == "not_owned"
    assert refusal(client, batch_of(3, PAIRS), layer_id=(1 << 32) - 1).code == "not_owned"
    assert_serves(client)


def test_ipc_has_no_port(rig: Rig) -> None:
    assert rig.port == 0


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_no_pairs_give_zeros(rig: Rig, num_tokens: int) -> None:
    client = rig.client()
    reply = client.wait(send(client, batch_of(num_tokens, {})), deadline_s=TIMEOUT_S)
    np.testing.assert_array_equal(reply.sums, np.zeros((num_tokens, HIDDEN_SIZE)), strict=True)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("expert_ids", [1, 5], "expert ids"),
        ("expert_ids", [-1, 4], "expert ids"),
        ("expert_ids", [4, 1], "expert ids"),
        ("token_indices", [0, 3, 2], "token indices"),
        ("token_indices", [-1, 2, 2], "token indices"),
        ("token_indices", [2, 0, 2], "token indices"),
        ("group_starts", [0, 2, 4], "group_starts"),
        ("group_starts", [1, 2, 3], "group_starts"),
        ("group_starts", [0, -2, 3], "group_starts"),
    ],
)
def test_a_batch_that_does_not_hold_together_is_refused_before_it_is_computed(
    rig: Rig, name: str, values: list[int], reason: str
) -> None:
    client = rig.client()
    changes: dict[str, Any] = {name: np.array(values, dtype=np.int32)}
    bad = replace(batch_of(3, PAIRS), **changes)
    error = refusal(client, bad)
    assert error.code == "malformed"
    assert reason in str(error)
    assert not rig.bank.has_entered.is_set()
    assert_serves(client)


@pytest.mark.parametrize("failure", [RuntimeError("secret detail"), MemoryError(), ValueError("x")])
def test_a_failing_kernel_is_an_internal_error_and_the_next_request_is_served(
    rig: Rig, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = rig.client()
    rig.bank.failure = failure
    with caplog.at_level(logging.ERROR):
        error = refusal(client, batch_of(3, PAIRS))
    assert error.code == "internal"
    assert "secret" not in str(error)
    [record] = caplog.records
    assert record.args == (3,)
    assert record.exc_info is not None
    assert record.exc_info[1] is failure
    rig.bank.failure = None
    assert_serves(client)


def test_a_link_is_served_from_when_it_is_added_until_it_is_dropped(rig: Rig) -> None:
    first, second = rig.client("aa" * 8), rig.client("bb" * 8)
    assert rig.service.num_links == 2
    assert rig.service.limits_of("aa" * 8) is not None
    rig.service.drop_link("aa" * 8)
    rig.service.drop_link("never there")
    assert rig.service.limits_of("aa" * 8) is None
    assert rig.service.num_links == 1
    assert refusal(first, batch_of(3, PAIRS)).code == "unknown_link"
    assert_serves(second)
    rig.add_link("aa" * 8)
    assert_serves(first)


def test_every_parent_gets_its_own_sums(rig: Rig) -> None:
    """Clients in threads of their own, many requests in flight from each."""

    def run(seed: int) -> None:
        client, random = clients[seed], np.random.default_rng(seed)
        expected = {}
        for _ in range(20):
            num_tokens = int(random.integers(1, CAPACITY))
            pairs = {(token_idx, int(random.integers(5))): 0.5 for token_idx in range(num_tokens)}
            sequence = send(client, batch_of(num_tokens, pairs))
            expected[sequence] = naive_sums(numbered_rows(num_tokens), pairs)
        for sequence, sums in reversed(expected.items()):
            reply = client.wait(sequence, deadline_s=TIMEOUT_S)
            np.testing.assert_array_equal(reply.sums, sums)

    clients = [rig.client() for _ in range(4)]
    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(run, seed) for seed in range(len(clients))]:
            done.result(TIMEOUT_S)


def test_busy_is_how_long_the_present_request_takes(rig: Rig) -> None:
    client = rig.client()
    assert rig.service.busy_s == 0.0
    rig.bank.gate.clear()
    sequence = send(client, batch_of(3, PAIRS))
    assert rig.bank.has_entered.wait(TIMEOUT_S)
    first, second = rig.service.busy_s, rig.service.busy_s
    assert 0.0 < first < second
    rig.bank.gate.set()
    client.wait(sequence, deadline_s=TIMEOUT_S)
    assert_serves(client)
    rig.service.close()
    assert rig.service.busy_s == 0.0


def test_a_request_whose_deadline_passed_before_it_is_begun_is_dropped(rig: Rig) -> None:
    client = rig.client()
    assert_serves(client)
    rig.bank.gate.clear()
    rig.bank.has_entered.clear()
    running = send(client, batch_of(3, PAIRS))
    assert rig.bank.has_entered.wait(TIMEOUT_S)
    late = client.submit(3, batch_of(3, PAIRS), deadline_s=0.05)
    patient = send(client, batch_of(3, PAIRS))
    time.sleep(0.15)
    rig.bank.has_entered.clear()
    rig.bank.gate.set()
    client.wait(running, deadline_s=TIMEOUT_S)
    with pytest.raises(ProtocolError, match=r"\b50 ms") as caught:
        client.wait(late, deadline_s=TIMEOUT_S)
    assert caught.value.code == "late"
    reply = client.wait(patient, deadline_s=TIMEOUT_S)
    np.testing.assert_array_equal(reply.sums, naive_sums(numbered_rows(3), PAIRS))
    assert reply.queue_s > 0.1
    assert rig.service.num_late == 1
    assert_serves(client)


def test_a_compute_thread_that_fails_says_so(
    undo: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the service must not keep answering heartbeats for it."""
    failed = threading.Event()
    context = undo.enter_context(zmq.Context())
    service = ComputeService(
        context, "tcp://127.0.0.1:*", max_frame_bytes=MAX_FRAME_BYTES, on_failure=failed.set
    )
    undo.callback(service.close)
    error = zmq.ZMQError(zmq.ENOTSOCK)

    def receive(self: StreamServer, timeout_s: float) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(StreamServer, "receive", receive)
        logging.getLogger(service_module.__name__).disabled = True
        service.start()
        assert failed.wait(TIMEOUT_S)
        logging.getLogger(service_module.__name__).disabled = False
    assert service.failure is error
    service.close()
    healthy = Rig(undo, "tcp://127.0.0.1:*")
    assert_serves(healthy.client())
    assert healthy.service.failure is None


def test_what_comes_right_behind_a_refused_request_does_not_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = rig.client()
    assert_serves(client)
    time.sleep(0.05)
    monkeypatch.setattr(data_paths, "_POLL_S", 2.0)
    time.sleep(0.05)
    for _ in range(5):
        started_s = time.monotonic()
        too_many = batch_of(CAPACITY + 1, {(0, 1): 1.0})
        bad, good = send(client, too_many), send(client, batch_of(3, PAIRS))
        with pytest.raises(ProtocolError, match="capacity"):
            client.wait(bad, deadline_s=TIMEOUT_S)
        client.wait(good, deadline_s=TIMEOUT_S)
        assert time.monotonic() - started_s < 1.0
    monkeypatch.setattr(data_paths, "_POLL_S", 0.01)


def test_more_pairs_than_the_link_negotiated_are_refused(rig: Rig) -> None:
    client = rig.client("aa" * 8)
    rig.add_link("aa" * 8, max_experts_used=1)
    error = refusal(client, batch_of(2, {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0}))
    assert error.code == "malformed"
    rig.add_link("aa" * 8, max_experts_used=5)
    assert_serves(client)


def test_closing_finishes_the_present_request(rig: Rig) -> None:
    client = rig.client()
    rig.bank.gate.clear()
    sequence = send(client, batch_of(3, PAIRS))
    assert rig.bank.has_entered.wait(TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(rig.service.close)
        assert not closing.done()
        rig.bank.gate.set()
        closing.result(TIMEOUT_S)
    reply = client.wait(sequence, deadline_s=TIMEOUT_S)
    np.testing.assert_array_equal(reply.sums, naive_sums(numbered_rows(3), PAIRS))
    assert "dflash-compute" not in [thread.name for thread in threading.enumerate()]
    rig.service.close()


def test_an_address_in_use_is_reported_by_start(undo: ExitStack) -> None:
    first = Rig(undo, "tcp://127.0.0.1:*")
    second = ComputeService(first.context, first.address, max_frame_bytes=MAX_FRAME_BYTES)
    with pytest.raises(zmq.ZMQError, match="in use"):
        second.start()
    second.close()
    assert_serves(first.client())
