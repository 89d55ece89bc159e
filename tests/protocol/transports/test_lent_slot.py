"""Requests that compiled code makes: the bits of SharedClient's, and bounded waits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.batch import HostHidden, HostSums, RoutedBatch
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, I32Array, I64Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import compiled_experts as w
from dflash_protocol.ring.compiled import ABORTED, LATE, LOST, NOT_FINITE, NOTHING, UNSENT
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.ports import PHASES
from dflash_protocol.transports.shared_client import SharedClient
from support.host_mover import HostMover, MovedRows, MovedSums
from support.processes import environment, stop
from support.routed_batches import ScalingBank, batch_of, moe_layer, naive_sums
from support.shared_pair import NUM_SLOTS, Pair
from support.transport_checks import (
    HIDDEN_SIZE,
    MAX_TOKENS,
    TIMEOUT_S,
    assert_serves,
    example_batch,
    received,
    sums_of,
)

SLICE_S = 1e-9 * w.SLICE_NS
SLACK_S = 1.0
"""For machines that are slow and busy."""


class Asker:
    """What a compiled step has of one link: a lent slot, and the words of its requests."""

    def __init__(self, client: SharedClient, hidden_size: int = HIDDEN_SIZE) -> None:
        self.lent: LentSlot = client.lend()
        self.words: I64Array = np.zeros(w.REQUEST_WORDS, np.int64)
        self.abort: I64Array = np.zeros(1, np.int64)
        self.sums: F64Array = np.empty((MAX_TOKENS, hidden_size))
        self.words[w.BATCH_SUMS] = self.sums.ctypes.data
        self.words[w.REQUEST_ABORT] = self.abort.ctypes.data
        kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)
        post, collect = map(kind, ring_native.client_functions())
        self._post: Callable[[int, int], int] = post
        self._collect: Callable[[int, int], int] = collect
        self._kept: list[object] = []

    def post(
        self, batch: RoutedBatch, out: F64Array, *, deadline_s: float = TIMEOUT_S, layer_id: int = 3
    ) -> int:
        words, routing = self.words, (batch.token_indices, batch.weights)
        arrays = (batch.hidden, batch.expert_ids, batch.group_starts, *routing)
        self._kept = [*arrays, out]
        words[w.BATCH_TOKENS], words[w.BATCH_PAIRS] = batch.num_tokens, batch.num_pairs
        words[w.BATCH_GROUPS] = batch.num_groups
        for word, array in enumerate(arrays, w.BATCH_HIDDEN):
            words[word] = array.ctypes.data
        words[w.REQUEST_LAYER], words[w.BATCH_PHASE] = layer_id, PHASES.index(batch.phase)
        words[w.REQUEST_DEADLINE_NS] = int(deadline_s * 1e9)
        words[w.REQUEST_OUT] = out.ctypes.data
        return self._post(self.lent.port, words.ctypes.data)

    def collect(self) -> int:
        return self._collect(self.lent.port, self.words.ctypes.data)

    def ended(self) -> int:
        """Collect until there is something; each time within a slice."""
        while True:
            started_s = time.monotonic()
            status = self.collect()
            assert time.monotonic() - started_s < SLICE_S + SLACK_S
            if status != NOTHING:
                return status


@pytest.fixture
def pair(run_dir: Path) -> Iterator[Pair]:
    pair = Pair(run_dir)
    yield pair
    pair.close()


def answer(pair: Pair, sums: F64Array | None = None) -> None:
    request = received(pair)
    wanted = sums_of(request.batch) if sums is None else sums
    pair.server.reply(request, HostSums(wanted), 0.25)


@contextlib.contextmanager
def later(work: Callable[[], object], delay_s: float = 0.02) -> Iterator[None]:
    """Do it in another thread in a while."""
    timer = threading.Timer(delay_s, work)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("spin_ns", [0, 10**9])
@pytest.mark.parametrize("num_tokens", [1, 3, MAX_TOKENS])
def test_sums_are_added_to_what_is_there(pair: Pair, num_tokens: int, spin_ns: int) -> None:
    asker = Asker(pair.client)
    asker.words[w.REQUEST_SPIN_NS] = spin_ns
    out = np.random.default_rng(0).standard_normal((2 * MAX_TOKENS, HIDDEN_SIZE))
    expected = out.copy()
    for seed in range(3):
        batch = example_batch(num_tokens, seed=seed)
        rows: I32Array = np.arange(num_tokens, dtype=np.int32)[::-1] * 2
        asker.words[w.REQUEST_ROWS] = rows.ctypes.data if seed == 2 else 0
        expected[rows if seed == 2 else slice(num_tokens)] += sums_of(batch)
        assert asker.post(batch, out) > 0
        with later(lambda: answer(pair)):
            assert asker.ended() == 8 * num_tokens * HIDDEN_SIZE
        assert out.tobytes() == expected.tobytes()
    words, times = asker.words, asker.words.view(np.float64)
    assert words[w.REQUEST_NUM_REPLIES] == 3
    assert words[w.REQUEST_BYTES_RECEIVED] == 3 * 8 * num_tokens * HIDDEN_SIZE
    assert words[w.REQUEST_BYTES_SENT] >= 3 * 4 * num_tokens * HIDDEN_SIZE
    assert words[w.REQUEST_TRIP_NS] >= words[w.REQUEST_WAIT_NS] > 0
    assert times[w.REQUEST_COMPUTE_S] == 0.75
    assert times[w.REQUEST_QUEUE_S] >= 0.0
    asker.lent.give_back()


def test_other_requests_go_on_before_meanwhile_and_after(pair: Pair) -> None:
    assert_serves(pair)
    out = np.zeros((1, HIDDEN_SIZE))
    for _ in range(5):
        asker = Asker(pair.client)
        for seed in range(3):
            sequence = pair.client.submit(1, example_batch(2), deadline_s=TIMEOUT_S)
            assert asker.post(example_batch(1, seed=seed), out) > 0
            for _ in range(2):
                answer(pair)
            assert asker.ended() > 0
            reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
            assert reply.sums.tobytes() == sums_of(example_batch(2)).tobytes()
        asker.lent.give_back()


def test_slots_are_lent_while_there_are_any(pair: Pair) -> None:
    lent = [pair.client.lend() for _ in range(NUM_SLOTS)]
    with pytest.raises(DaemonUnavailable):
        pair.client.lend()
    for each in lent:
        each.give_back()
    pair.client.lend().give_back()


def test_slots_are_lent_between_requests_whose_rows_a_device_moves(run_dir: Path) -> None:
    """Rows in the host's memory and rows of a device, in turns, in the same slots."""
    pair = Pair(run_dir, movers=(HostMover(), HostMover()))
    with contextlib.closing(pair):
        batch = example_batch(2)
        expected = sums_of(batch)
        for _ in range(2 * NUM_SLOTS):
            asker, out = Asker(pair.client), np.zeros((2, HIDDEN_SIZE))
            assert asker.post(batch, out) > 0
            request = received(pair)
            assert not request.batch.rows.is_on_device
            pair.server.reply(request, HostSums(expected), 0.25)
            assert asker.ended() > 0
            assert asker.sums[:2].tobytes() == expected.tobytes()
            asker.lent.give_back()
            moved = replace(batch, rows=MovedRows(batch.hidden))
            sequence = pair.client.submit(3, moved, deadline_s=TIMEOUT_S)
            pair.client.push(sequence)
            request = received(pair)
            assert request.batch.rows.is_on_device
            pair.server.reply(request, MovedSums(expected), 0.25)
            reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
            assert reply.placed.is_on_device
            assert reply.placed.to_host().tobytes() == expected.tobytes()


def test_late_replies_end_the_request_and_give_back_its_slot(pair: Pair) -> None:
    asker, out = Asker(pair.client), np.zeros((3, HIDDEN_SIZE))
    assert asker.post(example_batch(3), out, deadline_s=0.12) > 0
    started_s = time.monotonic()
    assert asker.ended() == LATE
    assert 0.05 < time.monotonic() - started_s < 0.12 + SLACK_S
    assert isinstance(asker.lent.error(LATE), DeadlineExceeded)
    assert asker.post(example_batch(3), out) == UNSENT  # the daemon may still write this slot
    asker.lent.give_back()
    assert len(pair.client._requests.free) == NUM_SLOTS - 1
    answer(pair)
    lent = [pair.client.submit(1, example_batch(1), deadline_s=TIMEOUT_S) for _ in range(2)]
    for sequence in lent:
        answer(pair)
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert not out.any()


@pytest.mark.parametrize("spin_ns", [0, 10**10])
def test_an_abort_word_ends_a_wait(pair: Pair, spin_ns: int) -> None:
    asker, out = Asker(pair.client), np.zeros((3, HIDDEN_SIZE))
    asker.words[w.REQUEST_SPIN_NS] = spin_ns
    assert asker.post(example_batch(3), out) > 0

    def abort() -> None:
        asker.abort[0] = 1

    started_s = time.monotonic()
    with later(abort, 0.12):
        assert asker.ended() == ABORTED
    assert time.monotonic() - started_s < 0.12 + SLICE_S + SLACK_S
    assert isinstance(asker.lent.error(ABORTED), DaemonUnavailable)
    asker.lent.give_back()


def test_a_lost_link_ends_a_wait(pair: Pair) -> None:
    asker, out = Asker(pair.client), np.zeros((3, HIDDEN_SIZE))
    assert asker.post(example_batch(3), out) > 0
    with later(pair.lose):
        assert asker.ended() == LOST
    assert "was ended" in str(asker.lent.error(LOST))
    asker.lent.give_back()


def test_failures_and_wrong_replies_add_nothing(pair: Pair) -> None:
    asker, out = Asker(pair.client), np.zeros((3, HIDDEN_SIZE))
    assert asker.post(example_batch(3), out) > 0
    request = received(pair)
    reason = ProtocolError("no time", code="late")
    pair.server.fail(request.link_id, request.header.sequence, reason)
    error = asker.lent.error(asker.ended())
    assert isinstance(error, ProtocolError)
    assert (error.code, str(error)) == ("late", "no time")
    assert asker.post(example_batch(3), out) > 0
    answer(pair)
    slot_at = pair.shape.reply_slot_at(asker.lent._slot.index)
    pair.memory[slot_at + 200] ^= 1
    error = asker.lent.error(asker.ended())
    assert isinstance(error, ProtocolError)
    assert error.code == "checksum"
    assert pair.client_counters.checksum_failures == 1
    assert asker.post(example_batch(3), out) > 0
    answer(pair, np.full((3, HIDDEN_SIZE), np.nan))
    error = asker.lent.error(asker.ended())
    assert isinstance(error, ProtocolError)
    assert error.code == "not_finite"
    assert not out.any()
    assert asker.collect() == UNSENT
    asker.lent.give_back()
    assert len(pair.client._requests.free) == NUM_SLOTS


def test_what_a_link_cannot_carry_is_not_sent(pair: Pair, run_dir: Path) -> None:
    asker, out = Asker(pair.client), np.zeros((MAX_TOKENS + 1, HIDDEN_SIZE))
    assert asker.post(example_batch(MAX_TOKENS + 1), out) == UNSENT
    assert asker.post(example_batch(1), out) > 0
    assert asker.post(example_batch(1), out) == UNSENT  # one is in flight
    answer(pair)
    assert asker.ended() > 0
    asker.lent.give_back()
    narrow = Pair(run_dir, payload=PayloadType.F16)
    asker = Asker(narrow.client)
    large = example_batch(1)
    large.rows = HostHidden(np.full((1, HIDDEN_SIZE), 1e6, np.float32))
    assert asker.post(large, out) == UNSENT
    assert isinstance(asker.lent.error(UNSENT), ProtocolError)
    assert asker.post(example_batch(1), out) > 0
    answer(narrow)
    assert asker.ended() == 2 * HIDDEN_SIZE
    asker.lent.give_back()
    narrow.close()


def test_statuses_differ() -> None:
    known = {NOTHING, ABORTED, LATE, LOST, NOT_FINITE, UNSENT, ring_native.FAILURE}
    known |= {ring_native.FAILURE - violation for violation in ring_native.VIOLATIONS}
    assert len(known) == 7 + len(ring_native.VIOLATIONS)


DAEMON = """
import math, random, sys, time
from pathlib import Path
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import open_segment
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.wire.transport import LinkLimits
from support.called_back import called_back
from support.routed_batches import ScalingBank, moe_layer

class Slow(ScalingBank):
    def accumulate(self, batch, out):
        if random.random() < 0.02:
            time.sleep(random.random() * 1e-3)
        super().accumulate(batch, out)

shape = RingShape(2, 4, 8, 20)
segment = open_segment(Path(sys.argv[1]), sys.argv[2], shape, generation=3)
server = SharedServer()
experts = called_back({3: Slow(moe_layer(hidden_size=8))}, max_tokens=4, max_experts_used=5)
server.add_link("ab", segment, LinkLimits(8, 4, 5, generation=3), experts=experts)
server.allow_replies(math.inf)
print("ready", flush=True)
while True:
    request = server.receive(60.0, spin_s=float(sys.argv[3]), others=(0,), until_s=math.inf)
    assert request is None
    if server.are_others_ready:
        break
print(server.num_answered, flush=True)
server.close()
"""
NUM_TRIPS = 10_000


@contextlib.contextmanager
def compiled_daemon(
    run_dir: Path, spin_s: float
) -> Iterator[tuple[SharedClient, subprocess.Popen[str]]]:
    """A process that answers without Python, but for a bank that now and then takes longer."""
    shape = RingShape(2, 4, 8, 20)
    lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
    segment = create_segment(run_dir, shape, generation=3)
    client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost", spin_s=spin_s)
    command = [sys.executable, "-c", DAEMON, str(run_dir), segment.name, str(spin_s)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        segment.unlink()
        try:
            yield client, child
        finally:
            child.kill()
            client.close()
            os.close(lost_fd)


@pytest.mark.parametrize("spin_s", [0.0, pytest.param(50e-6, marks=pytest.mark.slow)])
def test_many_requests_from_compiled_code_to_compiled_code(run_dir: Path, spin_s: float) -> None:
    choose, bank = random.Random(1), ScalingBank(moe_layer(hidden_size=8))
    examples = []
    for _ in range(50):
        num_tokens = choose.randint(1, 4)
        pairs = {
            (token, expert): choose.randint(-8, 8) / 8
            for token in range(num_tokens)
            for expert in choose.sample(range(bank.num_experts), choose.randint(0, 5))
        }
        hidden = np.array([[choose.randint(-9, 9) for _ in range(8)] for _ in range(num_tokens)])
        hidden = hidden.astype(np.float32)
        examples.append((batch_of(num_tokens, pairs, hidden=hidden), naive_sums(hidden, pairs)))
    with compiled_daemon(run_dir, spin_s) as (client, child):
        askers = [Asker(client, 8), Asker(client, 8)]
        for trip in range(NUM_TRIPS // 2):
            expected: F64Array = np.zeros((4, 8))
            out: F64Array = np.zeros((4, 8))
            for asker in askers:
                asker.words[w.REQUEST_SPIN_NS] = asker.lent.spin_ns
                batch, sums = choose.choice(examples)
                expected[: batch.num_tokens] += sums
                assert asker.post(batch, out) > 0
            if trip % 64 == 0:
                time.sleep(choose.random() * 1e-3)
            for asker in askers:
                assert asker.ended() > 0
            assert out.tobytes() == expected.tobytes()
        for asker in askers:
            assert asker.words[w.REQUEST_NUM_REPLIES] == NUM_TRIPS // 2
            asker.lent.give_back()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        assert child.stdout.readline() == f"{NUM_TRIPS}\n"
        assert child.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_daemon_that_is_stopped_or_killed_makes_a_request_late(
    run_dir: Path, number: signal.Signals
) -> None:
    with compiled_daemon(run_dir, 50e-6) as (client, child):
        asker, out = Asker(client, 8), np.zeros((1, 8))
        batch = batch_of(1, {(0, 1): 1.0}, hidden=np.ones((1, 8), np.float32))
        for _ in range(100):
            assert asker.post(batch, out) > 0
            assert asker.ended() > 0
        if number == signal.SIGKILL:
            child.kill()
            child.wait(TIMEOUT_S)
        else:
            stop(child.pid)
        before = out.copy()
        assert asker.post(batch, out, deadline_s=0.15) > 0
        assert asker.ended() == LATE
        assert out.tobytes() == before.tobytes()
        asker.lent.give_back()
