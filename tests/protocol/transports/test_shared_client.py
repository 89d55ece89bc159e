"""The shared transport where it differs from others: slots, bells, processes that die.

What every transport must do is in test_transports.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.batch import HostHidden, HostSums
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import AnyArray
from dflash_protocol.payloads import PayloadType, pack
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports import shared_server
from dflash_protocol.transports.in_flight import spin_window_s
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.wire.transport import LinkLimits
from support.descriptors import no_descriptor_leak
from support.processes import environment
from support.shared_pair import BATCH, NUM_SLOTS, SHAPE, Pair, submitted
from support.transport_checks import (
    HIDDEN_SIZE,
    MAX_EXPERTS_USED,
    MAX_TOKENS,
    TIMEOUT_S,
    assert_serves,
    example_batch,
    received,
    sums_of,
)


@pytest.fixture
def pair(run_dir: Path) -> Iterator[Pair]:
    made = Pair(run_dir)
    yield made
    made.close()


# -- slots ----------------------------------------------------------------------------------------


def test_when_all_slots_were_given_up_the_link_says_so(pair: Pair) -> None:
    for _ in range(NUM_SLOTS):
        pair.client.forget(submitted(pair))
    with pytest.raises(DaemonUnavailable, match="slots"):
        submitted(pair)
    requests = [received(pair) for _ in range(NUM_SLOTS)]
    with pytest.raises(DaemonUnavailable, match="slots"):
        submitted(pair)
    for request in requests:  # late, but then nobody writes these slots any more
        pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
    assert_serves(pair)


def test_a_request_that_finds_no_slot_waits_no_longer_than_its_deadline(pair: Pair) -> None:
    sequences = [submitted(pair) for _ in range(NUM_SLOTS)]
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"slot\b.* 30 ms"):
        pair.client.submit(0, BATCH, deadline_s=0.03)
    assert time.monotonic() - started_s >= 0.03
    pair.lose()
    with pytest.raises(DaemonUnavailable, match="cpu0: it was ended"):
        pair.client.submit(0, BATCH, deadline_s=600.0)
    for _ in sequences:
        pair.server.reply(received(pair), HostSums(sums_of(BATCH)), 0.0)
    later = submitted(pair)  # makes room by reading what has come
    for sequence in sequences:
        assert pair.client.wait(sequence, deadline_s=0.0).sums.shape == BATCH.hidden.shape
    pair.server.reply(received(pair), HostSums(sums_of(BATCH)), 0.0)
    pair.client.wait(later, deadline_s=0.0)


def test_a_reply_to_a_link_that_is_gone_is_dropped(pair: Pair) -> None:
    submitted(pair)
    request = received(pair)
    pair.server.drop_link("ab")
    assert pair.server.try_receive() is None
    pair.server.reply(request, HostSums(sums_of(BATCH)), 0.0)
    pair.server.fail("ab", request.header.sequence, ProtocolError("late"))
    assert request.batch.hidden.sum() == BATCH.hidden.sum(), "its memory must not be gone"
    with pytest.raises(DeadlineExceeded):
        pair.client.wait(request.header.sequence, deadline_s=0.0)


def test_links_are_served_in_turn(run_dir: Path) -> None:
    """One that always has something waiting does not keep others from being served."""
    with ExitStack() as undo:
        server = SharedServer()
        undo.callback(server.close)
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, lost_fd)
        clients = []
        for number in range(3):
            segment = create_segment(run_dir, SHAPE, generation=number)
            clients.append(SharedClient(segment, lost_fd=lost_fd, lost_reason=str, spin_s=0.0))
            undo.callback(clients[-1].close)
            other = open_segment(run_dir, segment.name, SHAPE, generation=number)
            limits = LinkLimits(HIDDEN_SIZE, MAX_TOKENS, MAX_EXPERTS_USED)
            server.add_link(str(number), other, limits)
            segment.unlink()
        for client in clients:
            for _ in range(NUM_SLOTS):
                client.submit(0, BATCH, deadline_s=9.0)
        order = []
        while (request := server.try_receive()) is not None:
            order.append(int(request.link_id))
            server.reply(request, HostSums(sums_of(BATCH)), 0.0)
        assert order == [0, 1, 2] * NUM_SLOTS
        server.drop_link("1")
        clients[2].submit(0, BATCH, deadline_s=9.0)
        request = server.try_receive()
        assert request is not None
        assert request.link_id == "2"


def test_what_a_link_has_taken_goes_with_it_and_not_with_the_collector_of_garbage(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reconnecting a thousand times: each time the slots' arrays were left."""
    made: list[weakref.ref[object]] = []
    make_link = shared_server._Link.__init__

    def noted(link: shared_server._Link, *arguments: Any) -> None:
        make_link(link, *arguments)
        made.extend(map(weakref.ref, (link, *link.slots)))

    monkeypatch.setattr(shared_server._Link, "__init__", noted)
    pair = Pair(run_dir)
    gc.disable()
    try:
        submitted(pair)
        pair.server.reply(received(pair), HostSums(sums_of(BATCH)), 0.0)
        pair.server.drop_link("ab")
        assert pair.server.try_receive() is None
        assert len(made) == 1 + NUM_SLOTS
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()
        pair.close()


def test_a_link_of_another_width_is_refused(pair: Pair, run_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\b.* 5\b"):
        pair.server.add_link("x", pair.segment, LinkLimits(5, 1, 1))
    assert_serves(pair)


# -- time -----------------------------------------------------------------------------------------


def test_how_long_a_request_lay_there_is_told_to_both_sides(pair: Pair) -> None:
    assert_serves(pair)
    sequence = submitted(pair)
    time.sleep(0.06)
    request = received(pair)
    assert 0.05 < request.waited_s < TIMEOUT_S
    assert not request.is_late
    pair.server.reply(request, HostSums(sums_of(BATCH)), 0.5)
    assert pair.client.wait(sequence, deadline_s=1.0).queue_s == request.waited_s
    pair.client.submit(0, BATCH, deadline_s=0.001)
    time.sleep(0.06)
    assert received(pair).is_late


def is_rung(bell: int) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_bells_ring_only_for_those_who_sleep(pair: Pair) -> None:
    for _ in range(20):
        assert_serves(pair)
    assert not is_rung(pair.segment.server_bell)
    assert not is_rung(pair.segment.client_bell)
    submit = threading.Timer(0.05, lambda: pair.client.submit(0, BATCH, deadline_s=1.0))
    submit.start()
    request = pair.server.receive(TIMEOUT_S)
    submit.join()
    assert request is not None
    assert is_rung(pair.segment.server_bell), "it slept"
    pair.server.reply(request, HostSums(sums_of(BATCH)), 0.0)
    submitted(pair)
    assert pair.server.receive(TIMEOUT_S) is not None, "without sleep"
    assert pair.server.receive(0.01) is None
    assert not is_rung(pair.segment.server_bell), "silenced before the next sleep"


def test_a_server_asleep_wakes_up_for_a_new_link_and_for_others(pair: Pair, run_dir: Path) -> None:
    segment = create_segment(run_dir, SHAPE, generation=9)
    other = open_segment(run_dir, segment.name, SHAPE, generation=9)
    limits = LinkLimits(HIDDEN_SIZE, MAX_TOKENS, MAX_EXPERTS_USED)
    add = threading.Timer(0.05, lambda: pair.server.add_link("cd", other, limits))
    add.start()
    started_s = time.monotonic()
    assert pair.server.receive(TIMEOUT_S) is None
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    add.join()
    readable, writable = os.pipe()
    try:
        assert pair.server.receive(0.01, others=(readable,)) is None
        assert not pair.server.are_others_ready
        os.write(writable, b"!")
        assert pair.server.receive(TIMEOUT_S, others=(readable,)) is None
        assert pair.server.are_others_ready
        assert pair.server.receive(0.01) is None
        assert not pair.server.are_others_ready
    finally:
        os.close(readable)
        os.close(writable)
    segment.close()


def test_a_change_that_was_applied_already_wakes_nobody(pair: Pair) -> None:
    pair.server.drop_link("nobody")
    assert pair.server.try_receive() is None  # applies it
    started_s = time.monotonic()
    assert pair.server.receive(0.1) is None
    assert time.monotonic() - started_s > 0.09
    assert_serves(pair)


def test_arrays_with_gaps_are_not_taken_for_such_without(pair: Pair) -> None:
    wide = example_batch(2)
    gapped = replace(wide, rows=HostHidden(np.repeat(wide.hidden, 2, axis=1)[:, ::2]))
    assert not gapped.hidden.flags.c_contiguous
    sequence = pair.client.submit(0, gapped, deadline_s=1.0)
    request = received(pair)
    np.testing.assert_array_equal(request.batch.hidden, wide.hidden)
    sums = sums_of(wide)
    with pytest.raises(ValueError, match="gaps"):
        pair.server.reply(request, HostSums(np.repeat(sums, 2, axis=1)[:, ::2]), 0.0)
    for wrong in (sums[0], sums[None], sums[:, :-1].copy()):
        with pytest.raises(ValueError, match=r"shape"):
            pair.server.reply(request, HostSums(wrong), 0.0)
    pair.server.reply(request, HostSums(sums), 0.0)
    np.testing.assert_array_equal(pair.client.wait(sequence, deadline_s=1.0).sums, sums)
    with pytest.raises(ValueError, match="unpack"):
        pair.client.submit(0, replace(wide, rows=HostHidden(wide.hidden[0])), deadline_s=1.0)
    assert_serves(pair)


def test_arrays_that_may_not_be_written_can_be_sent(pair: Pair) -> None:
    for name in ("hidden", "expert_ids", "group_starts", "token_indices", "weights"):
        getattr(batch := example_batch(2), name).flags.writeable = False
        sequence = pair.client.submit(0, batch, deadline_s=TIMEOUT_S)
        sums = sums_of(batch)
        sums.flags.writeable = False
        pair.server.reply(received(pair), HostSums(sums), 0.0)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        np.testing.assert_array_equal(reply.sums, sums)


@pytest.mark.parametrize(("compute_s", "is_spun"), [(0.0, True), (60.0, False)])
def test_a_short_deadline_is_spun_out_only_if_spinning_was_of_use(
    run_dir: Path, compute_s: float, is_spun: bool
) -> None:
    """The last reply's compute time says whether the next may come within the spin window."""
    pair = Pair(run_dir, spin_s=30.0)
    try:
        sequence = submitted(pair)
        pair.server.reply(received(pair), HostSums(sums_of(BATCH)), compute_s)
        pair.client.wait(sequence, deadline_s=1.0)
        late = submitted(pair)
        before_s = time.thread_time()
        with pytest.raises(DeadlineExceeded, match=r"reply\b.* 200 ms"):
            pair.client.wait(late, deadline_s=0.2)
        assert (time.thread_time() - before_s > 0.02) == is_spun
        pair.client.forget(late)
        pair.server.reply(received(pair), HostSums(sums_of(BATCH)), 0.0)
        assert_serves(pair)
    finally:
        pair.close()


def test_nobody_spins_where_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert spin_window_s() == 0.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4})
    assert 0.0 < spin_window_s() < 1e-3


# -- payload types --------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [PayloadType.F16, PayloadType.BF16])
def test_narrow_payloads_carry_what_the_stream_carries(run_dir: Path, payload: PayloadType) -> None:
    pair = Pair(run_dir, payload=payload)
    try:
        sequence = submitted(pair)
        request = received(pair)
        assert request.header.payload == payload.value
        kind = np.float16 if payload is PayloadType.F16 else None
        packed, _ = pack(BATCH.hidden, payload)
        wide = packed.view(kind).astype(np.float32) if kind else from_bf16(packed)
        np.testing.assert_array_equal(request.batch.hidden, wide)
        sums = sums_of(BATCH)
        pair.server.reply(request, HostSums(sums), 0.0)
        packed, _ = pack(sums, payload)
        wide = packed.view(kind).astype(np.float32) if kind else from_bf16(packed)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        np.testing.assert_array_equal(reply.sums, wide.astype(np.float64))
        assert pair.client.counters.bytes_sent < 2.5 * BATCH.hidden.size + 16 * BATCH.num_pairs + 4
        assert pair.client.counters.bytes_received == 2 * BATCH.hidden.size
    finally:
        pair.close()


def from_bf16(bits: AnyArray) -> AnyArray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_what_a_narrow_type_cannot_hold_goes_wide_and_is_counted(run_dir: Path) -> None:
    pair = Pair(run_dir, payload=PayloadType.F16)
    try:
        batch = example_batch(3, seed=5)
        batch.hidden[1, 2] = 70_000.0
        sequence = pair.client.submit(1, batch, deadline_s=TIMEOUT_S)
        request = received(pair)
        assert request.header.payload == "f32"
        assert request.batch.hidden[1, 2] == 70_000.0
        np.testing.assert_array_equal(
            request.batch.hidden[0], batch.hidden[0].astype(np.float16).astype(np.float32)
        )
        sums = sums_of(batch)
        sums[2, 1] = -1e300
        pair.server.reply(request, HostSums(sums), 0.0)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert reply.sums[2, 1] == -1e300
        assert (pair.client_counters.widened, pair.server_counters.widened) == (1, 1)
    finally:
        pair.close()


# -- processes that die ---------------------------------------------------------------------------

CLIENT = """
import os, sys
from pathlib import Path
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import open_segment
from support.transport_checks import *
from dflash_protocol.transports.shared_client import SharedClient
shape = RingShape(2, MAX_TOKENS, HIDDEN_SIZE, MAX_TOKENS * MAX_EXPERTS_USED)
segment = open_segment(Path(sys.argv[1]), sys.argv[2], shape, generation=1)
client = SharedClient(segment, lost_fd=0, lost_reason=str, spin_s=float(sys.argv[3]))
sequence = client.submit(1, example_batch(3, seed=5), deadline_s=600.0)
print("waiting", flush=True)
client.wait(sequence, deadline_s=600.0)
"""


@pytest.mark.parametrize("spin_s", ["0.0", "600.0"])
def test_a_parent_killed_while_it_waits_harms_nobody(
    pair: Pair, run_dir: Path, spin_s: str
) -> None:
    segment = create_segment(run_dir, SHAPE, generation=1)
    command = [sys.executable, "-c", CLIENT, str(run_dir), segment.name, spin_s]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waiting\n"
        segment.unlink()
        pair.server.add_link("dead", segment, LinkLimits(HIDDEN_SIZE, MAX_TOKENS, MAX_EXPERTS_USED))
        request = received(pair)
        assert request.link_id == "dead"
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
    pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
    assert_serves(pair)
    pair.server.drop_link("dead")
    assert_serves(pair)


def test_a_parent_whose_daemon_was_killed_learns_it_through_the_lost_fd(run_dir: Path) -> None:
    """The read end of the daemon's standard output ends with it, as a pidfd would."""
    code = """
import sys, time
from pathlib import Path
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import open_segment
from support.transport_checks import *
shape = RingShape(2, MAX_TOKENS, HIDDEN_SIZE, MAX_TOKENS * MAX_EXPERTS_USED)
segment = open_segment(Path(sys.argv[1]), sys.argv[2], shape, generation=1)
print("ready", flush=True)
time.sleep(600)
"""
    segment = create_segment(run_dir, SHAPE, generation=1)
    command = [sys.executable, "-c", code, str(run_dir), segment.name]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        segment.unlink()
        client = SharedClient(segment, lost_fd=child.stdout.fileno(), lost_reason=lambda: "it died")
        sequence = client.submit(0, BATCH, deadline_s=600.0)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(DaemonUnavailable, match="it died"):
            client.wait(sequence, deadline_s=600.0)
        client.close()


def test_nothing_is_left_of_many_links(run_dir: Path) -> None:
    def one() -> None:
        pair = Pair(run_dir)
        assert_serves(pair)
        submitted(pair)
        received(pair)
        pair.close()

    one()
    with no_descriptor_leak():
        mappings = num_mappings()
        for _ in range(20):
            one()
        assert num_mappings() == mappings
    assert list(run_dir.iterdir()) == []


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/ring-")
