"""Parents that share a daemon: one with ever more work than can be done does not starve another."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from dflash_daemon import data_paths
from dflash_daemon.service import ComputeService, compile_none
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import LinkLimits
from support.called_back import called_back
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    moe_layer,
    naive_sums,
    numbered_rows,
)

TIMEOUT_S = 20.0
NUM_ROUNDS = 20
NUM_IN_FLIGHT = 4
CAPACITY = 64
MAX_EXPERTS_USED = 5
SMALL = batch_of(1, {(0, 1): 0.5, (0, 3): 0.25}, phase=Phase.DECODE)
LARGE_PAIRS = {(token_idx, token_idx % 5): 0.5 for token_idx in range(CAPACITY)}
LARGE = batch_of(CAPACITY, LARGE_PAIRS)
DELIVERY_S = 0.02
"""Longer than a request takes from its parent to where the daemon can see it."""
AT_MOST = 2
"""Others' requests between two of one link: its turn comes after one, or two if it just missed
the first."""


class SlowBank(ScalingBank):
    """Large batches take until every parent has a request waiting."""

    def __init__(self) -> None:
        super().__init__(moe_layer())
        self.served: list[bool] = []
        """Whether each request was a large one."""
        self.is_small_there = threading.Event()
        self.has_begun_large = threading.Event()

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        is_large = batch.num_tokens > 1
        self.served.append(is_large)
        if is_large:
            self.has_begun_large.set()
            assert self.is_small_there.wait(TIMEOUT_S)
            time.sleep(DELIVERY_S)
        super().accumulate(batch, out)


class Rig:
    """A service, its bank, and parents with links of either kind."""

    def __init__(self, undo: ExitStack, run_dir: Path, *, is_compiled: bool) -> None:
        endpoint = parse_endpoint(f"ipc://{run_dir}/cpu0")
        undo.callback(IpcClaim(endpoint).close)
        self._undo, self._folder = undo, run_dir
        self._address = endpoint.data_address(0)
        self._context = undo.enter_context(zmq.Context())
        self.bank = SlowBank()
        self._max_frame_bytes = largest_frame_bytes(
            max_tokens=CAPACITY, hidden_size=HIDDEN_SIZE, max_pairs=MAX_EXPERTS_USED * CAPACITY
        )
        self.service = ComputeService(
            self._context,
            self._address,
            max_frame_bytes=self._max_frame_bytes,
            shares_memory=True,
            compile_banks=called_back if is_compiled else compile_none,
        )
        self.service.start()
        undo.callback(self.service.close)
        undo.callback(self.bank.is_small_there.set)

    def client(self, transport: str) -> StreamClient | SharedClient:
        link_id = secrets.token_hex(8)
        limits = LinkLimits(HIDDEN_SIZE, CAPACITY, MAX_EXPERTS_USED)
        self.service.add_link(link_id, limits, {3: self.bank})
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._undo.callback(os.close, lost_fd)
        client: StreamClient | SharedClient
        if transport == "stream":
            client = StreamClient(
                self._context,
                self._address,
                link_id,
                hidden_size=HIDDEN_SIZE,
                max_frame_bytes=self._max_frame_bytes,
                lost_fd=lost_fd,
                lost_reason=lambda: "lost",
            )
        else:
            shape = RingShape(NUM_IN_FLIGHT, CAPACITY, HIDDEN_SIZE, MAX_EXPERTS_USED * CAPACITY)
            segment = create_segment(self._folder, shape, generation=limits.generation)
            opened = open_segment(self._folder, segment.name, shape, generation=limits.generation)
            self.service.attach(link_id, opened)
            segment.unlink()
            client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost")
        self._undo.callback(client.close)
        return client


@pytest.fixture(params=[False, True], ids=["by Python", "by compiled code"])
def rig(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    monkeypatch.setattr(data_paths, "_POLL_S", 0.01)
    with ExitStack() as undo:
        yield Rig(undo, run_dir, is_compiled=request.param)


class Flood:
    """A parent that always has as many large requests in flight as it may."""

    def __init__(self, client: StreamClient | SharedClient) -> None:
        self._client = client
        self._stop = threading.Event()
        self.num_right = 0
        self.has_filled = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        expected = naive_sums(numbered_rows(CAPACITY), LARGE_PAIRS)
        in_flight: deque[int] = deque()
        while in_flight or not self._stop.is_set():
            while len(in_flight) < NUM_IN_FLIGHT and not self._stop.is_set():
                in_flight.append(self._client.submit(3, LARGE, deadline_s=TIMEOUT_S))
            self.has_filled.set()
            reply = self._client.wait(in_flight.popleft(), deadline_s=TIMEOUT_S)
            self.num_right += np.array_equal(reply.sums, expected)

    def stop(self) -> None:
        """Submits no further request; what is in flight is still answered."""
        self._stop.set()

    def end(self) -> None:
        self.stop()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.mark.wide(2)
@pytest.mark.parametrize("small_by", ["shared", "stream"])
@pytest.mark.parametrize("large_by", ["shared", "stream"])
def test_a_flood_of_large_requests_leaves_every_second_turn_to_a_small_parent(
    rig: Rig, large_by: str, small_by: str
) -> None:
    small, bank = rig.client(small_by), rig.bank
    flood = Flood(rig.client(large_by))
    assert flood.has_filled.wait(TIMEOUT_S)
    assert bank.has_begun_large.wait(TIMEOUT_S)  # frames of a stream may still be on their way
    expected = naive_sums(SMALL.hidden, {(0, 1): 0.5, (0, 3): 0.25})
    for _ in range(NUM_ROUNDS):
        sequence = small.submit(3, SMALL, deadline_s=TIMEOUT_S)
        bank.is_small_there.set()
        reply = small.wait(sequence, deadline_s=TIMEOUT_S)
        bank.is_small_there.clear()
        np.testing.assert_array_equal(reply.sums, expected)
    places = [place for place, is_large in enumerate(bank.served) if not is_large]
    bank.is_small_there.set()
    flood.end()
    assert len(places) == NUM_ROUNDS
    between = np.diff(places) - 1
    # A busy machine may hold up a delivery or two for longer than was waited for it.
    assert np.sort(between)[-3] <= AT_MOST, between
    assert np.count_nonzero(between) >= NUM_ROUNDS // 2, "nor does it starve the flood"
    assert flood.num_right == sum(bank.served)


@pytest.mark.parametrize("by", ["shared", "stream"])
def test_floods_of_equal_parents_are_served_in_turn(rig: Rig, by: str) -> None:
    rig.bank.is_small_there.set()
    clients = [rig.client(transport) for transport in (by, "shared", "stream")]
    floods = [Flood(client) for client in clients]
    time.sleep(30 * DELIVERY_S)
    for flood in floods:
        flood.stop()  # all of them before one is waited for, during which others would go on
    for flood in floods:
        flood.end()
    counts = [flood.num_right for flood in floods]
    assert sum(counts) == len(rig.bank.served)
    # At its end each still gets what it had in flight.
    assert max(counts) - min(counts) <= 3 + NUM_IN_FLIGHT, counts
    assert min(counts) >= 5, counts
