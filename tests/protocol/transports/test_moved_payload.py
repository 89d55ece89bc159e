"""Payload that devices move through a ring: the same batches and sums, no CPU's copy, and whatever
is written in between is found out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import Hidden, HostHidden, HostSums, Pairs, RoutedBatch, slice_tokens
from dflash_protocol.device_payload import digest_of
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    DeviceUnavailable,
    ProtocolError,
)
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.transports.device_copies import DeviceCopies
from dflash_protocol.wire.transport import ReceivedRequest
from support.examples import examples
from support.host_mover import HostMover, MovedRows, MovedSums
from support.routed_batches import assert_same_batch
from support.shared_pair import NUM_SLOTS, Pair
from support.transport_checks import (
    MAX_EXPERTS_USED,
    MAX_TOKENS,
    TIMEOUT_S,
    received,
    sums_of,
)

HIDDEN = 24
MOST = ring.MOVED_FACTOR * MAX_TOKENS
SHAPE = RingShape(NUM_SLOTS, MOST, HIDDEN, MOST * MAX_EXPERTS_USED)


class MovedPair(Pair):
    """Both ends have a device."""

    def __init__(self, folder: Path, payload: PayloadType = PayloadType.F32) -> None:
        self.client_mover, self.server_mover = HostMover(), HostMover()
        movers = self.client_mover, self.server_mover
        super().__init__(folder, shape=SHAPE, payload=payload, movers=movers)


@pytest.fixture
def pair(run_dir: Path) -> Iterator[MovedPair]:
    made = MovedPair(run_dir)
    yield made
    made.close()
    assert made.client_mover.num_open == made.server_mover.num_open == 0


@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
@pytest.mark.parametrize("is_kept", [False, True])
def test_sums_that_are_not_finite_are_told(
    pair: MovedPair, bad: float | None, is_kept: bool
) -> None:
    """Of a reply that is waited for, and of one that is kept to make room."""
    _, batch = batches(3)
    sequence = pair.client.submit(0, batch, deadline_s=TIMEOUT_S)
    pair.client.push(sequence)
    request = received(pair)
    sums = np.ones((3, HIDDEN))
    if bad is not None:
        sums[2, 5] = bad
    pair.server.reply(request, MovedSums(sums), 0.0)
    if is_kept:
        pair.client.poll()
    reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert reply.placed.is_on_device
    assert reply.is_finite == (bad is None)


def batches(num_tokens: int, seed: int = 0) -> tuple[RoutedBatch, RoutedBatch]:
    """The same batch with rows of the host and of a device."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, MAX_EXPERTS_USED + 1, num_tokens)
    experts = [random.permutation(7)[:count] for count in counts]
    hidden = random.standard_normal((num_tokens, HIDDEN), dtype=np.float32)
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), counts)
    ids = np.concatenate([np.empty(0, np.int32), *experts]).astype(np.int32)
    weights = random.standard_normal(ids.size, dtype=np.float32)

    def grouped(rows: Hidden) -> RoutedBatch:
        return RoutedBatch.group(Phase.PREFILL, rows, Pairs(tokens, ids, weights))

    return grouped(HostHidden(hidden)), grouped(MovedRows(hidden))


def answered(pair: Pair, request: ReceivedRequest, sums: F64Array) -> None:
    pair.server.reply(request, MovedSums(sums), 0.5)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, MAX_TOKENS, MOST])
def test_rows_and_sums_stay_on_devices(pair: MovedPair, num_tokens: int) -> None:
    for seed in range(3):
        batch, of_device = batches(num_tokens, seed)
        sequence = pair.client.submit(4, of_device, deadline_s=TIMEOUT_S)
        request = received(pair)
        assert request.batch.rows.is_on_device
        assert_same_batch(request.batch, batch)
        request.check(hidden_size=HIDDEN, num_experts=7)
        assert request.header.payload == "f32"
        if seed:
            answered(pair, request, sums_of(batch))
        else:  # computed by a host after all
            pair.server.reply(request, HostSums(sums_of(batch)), 0.5)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert reply.placed.is_on_device
        assert reply.sums.tobytes() == sums_of(batch).tobytes()
        assert 0.5 <= reply.compute_s < 0.5 + TIMEOUT_S
    assert pair.client.counters.bytes_received == 3 * 8 * num_tokens * HIDDEN


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_slot_is_lent_when_what_came_before_is_published(
    pair: MovedPair, is_forgotten: bool
) -> None:
    """Compiled code's requests have later numbers. What was forgotten is never published."""
    sequence, sums = submitted(pair, 4)
    if is_forgotten:
        pair.client.forget(sequence)
    lent = [pair.client.lend() for _ in range(NUM_SLOTS - (not is_forgotten))]
    if is_forgotten:
        assert pair.server.try_receive() is None
    else:
        answered(pair, received(pair), sums)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert reply.sums.tobytes() == sums.tobytes()
    for each in lent:
        each.give_back()


def test_requests_of_both_kinds_go_through_one_ring(pair: MovedPair) -> None:
    """More than there are slots, so that replies are read to make room."""
    for round_ in range(2):
        sequences, expected = [], []
        for seed in range(6):
            batch, of_device = batches(3 + seed, seed)
            is_moved = (seed + round_) % 2 == 0
            given_ = of_device if is_moved else batch
            sequences.append(pair.client.submit(1, given_, deadline_s=TIMEOUT_S))
            request = received(pair)
            expected.append(sums_of(request.batch))
            assert request.batch.rows.is_on_device == is_moved
            sums = expected[-1]
            pair.server.reply(request, MovedSums(sums) if is_moved else HostSums(sums), 0.0)
        for sequence, sums in zip(sequences, expected, strict=True):
            reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
            np.testing.assert_array_equal(reply.sums, sums)


def test_rows_of_a_device_go_by_the_host_where_nobody_agreed_on_more(run_dir: Path) -> None:
    batch, of_device = batches(5)
    for payload, movers in (
        (PayloadType.F32, (None, None)),
        (PayloadType.F32, (None, HostMover())),
        (PayloadType.BF16, (HostMover(), HostMover())),
    ):
        pair = Pair(run_dir, shape=SHAPE, payload=payload, movers=movers)
        try:
            sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
            request = received(pair)
            assert not request.batch.rows.is_on_device
            if payload is PayloadType.F32:
                assert_same_batch(request.batch, batch)
            pair.server.reply(request, HostSums(np.ones(batch.hidden.shape)), 0.0)
            assert (pair.client.wait(sequence, deadline_s=TIMEOUT_S).sums == 1).all()
        finally:
            pair.close()
        assert all(mover is None or mover.num_open == 0 for mover in movers)


def test_moved_rows_are_refused_by_who_has_no_device(run_dir: Path) -> None:
    pair = Pair(run_dir, shape=SHAPE, movers=(HostMover(), None))
    try:
        sequence = pair.client.submit(1, batches(5)[1], deadline_s=TIMEOUT_S)
        assert pair.server.try_receive() is None
        with pytest.raises(ProtocolError, match="negotiated") as caught:
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert caught.value.code == "malformed"
    finally:
        pair.close()


def test_what_is_too_large_is_never_written(pair: MovedPair) -> None:
    before = pair.memory.copy()
    for of_device in (
        batches(MOST + 1)[1],
        RoutedBatch(
            Phase.PREFILL,
            MovedRows(np.zeros((2, HIDDEN + 4), np.float32)),
            expert_ids=np.zeros(1, np.int32),
            group_starts=np.array([0, 1], np.int32),
            token_indices=np.zeros(1, np.int32),
            weights=np.ones(1, np.float32),
        ),
    ):
        with pytest.raises(ProtocolError, match="capacity") as caught:
            pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
        assert caught.value.code == "capacity"
    assert (pair.memory == before).all()


def test_rows_that_were_damaged_are_not_answered(pair: MovedPair) -> None:
    batch, of_device = batches(6)
    for place in (0, 4 * HIDDEN + 1, 4 * 6 * HIDDEN - 1):
        sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
        request = received(pair)
        at = SHAPE.request_slot_at(sequence % NUM_SLOTS)
        pair.memory[at + ring.HEADER_BYTES + place] ^= 4
        answered(pair, request, sums_of(request.batch))
        with pytest.raises(ProtocolError, match="damaged") as caught:
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert caught.value.code == "checksum"
    assert pair.server_counters.checksum_failures == 3
    assert_is_served(pair, batch, of_device)


def test_what_is_written_once_rows_were_read_changes_nothing(pair: MovedPair) -> None:
    batch, of_device = batches(6)
    sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
    request = received(pair)
    assert request.batch.hidden.tobytes() == batch.hidden.tobytes()
    pair.memory[ring.SLOTS_AT :] = 0xFF
    answered(pair, request, sums_of(request.batch))
    reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert reply.sums.tobytes() == sums_of(batch).tobytes()


def test_sums_that_were_damaged_are_an_error(pair: MovedPair) -> None:
    batch, of_device = batches(6)
    for place in (0, 8 * 6 * HIDDEN - 1):
        sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
        answered(pair, received(pair), sums_of(batch))
        at = SHAPE.reply_slot_at(sequence % NUM_SLOTS)
        pair.memory[at + ring.HEADER_BYTES + place] ^= 1
        with pytest.raises(ProtocolError, match="damaged") as caught:
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert caught.value.code == "checksum"
    assert pair.client_counters.checksum_failures == 2
    assert_is_served(pair, batch, of_device)


@pytest.mark.parametrize(
    ("word", "value", "code"),
    [
        (ring.MOVED, 0, "malformed"),
        (ring.MOVED, 2, "malformed"),
        (ring.PAYLOAD, ring.PAYLOAD_F32, "malformed"),
        (ring.TOKENS, 1, "malformed"),
        (ring.DIGEST, 5, "checksum"),
        (ring.CHECKSUM, 5, "checksum"),
    ],
)
def test_a_reply_is_moved_if_its_request_was(
    pair: MovedPair, word: int, value: int, code: str
) -> None:
    batch, of_device = batches(6)
    sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
    answered(pair, received(pair), sums_of(batch))
    pair.words[SHAPE.reply_slot_at(sequence % NUM_SLOTS) // 8 + word] = value
    with pytest.raises(ProtocolError) as caught:
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert caught.value.code == code
    # And the other way round.
    sequence = pair.client.submit(1, batch, deadline_s=TIMEOUT_S)
    pair.server.reply(received(pair), HostSums(sums_of(batch)), 0.0)
    pair.words[SHAPE.reply_slot_at(sequence % NUM_SLOTS) // 8 + ring.MOVED] = 1
    with pytest.raises(ProtocolError) as caught:
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert caught.value.code == "malformed"
    assert_is_served(pair, batch, of_device)


mutations = st.one_of(
    st.tuples(st.just("bit"), st.integers(0, 8 * (ring.HEADER_BYTES + 16 * HIDDEN) - 1), st.none()),
    st.tuples(
        st.just("word"),
        st.integers(0, ring.HEADER_WORDS - 1),
        st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 40),
    ),
)


@examples(300)
@given(st.lists(mutations, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_whatever_becomes_of_a_slot_it_is_served_rightly_or_refused(
    run_dir: Path, changes: list[tuple[str, int, int | None]], of_reply: bool, is_read: bool
) -> None:
    """Requests are changed before they are taken or, with `is_read`, while they are computed."""
    pair = MovedPair(run_dir)
    batch, of_device = batches(4, seed=3)
    found = ""
    try:
        sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
        at = (SHAPE.reply_slot_at if of_reply else SHAPE.request_slot_at)(sequence % NUM_SLOTS)
        request = received(pair) if of_reply or is_read else None
        if of_reply:
            assert request is not None
            answered(pair, request, sums_of(batch))
        for kind, place, value in changes:
            if kind == "bit":
                pair.memory[at + place // 8] ^= 1 << place % 8
            else:
                assert value is not None
                pair.words[at // 8 + place] = value
        if not of_reply:
            request = request or pair.server.try_receive()
            if request is not None:
                with np.errstate(invalid="ignore"):  # damaged rows may be anything
                    answered(pair, request, sums_of(request.batch))
        try:
            reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
            assert reply.sums.tobytes() == sums_of(batch).tobytes()
        except ProtocolError as error:
            found = error.code
        assert found in ("", "stale", "malformed", "capacity", "checksum")
        assert_is_served(pair, batch, of_device)
    finally:
        pair.close()


def assert_is_served(pair: Pair, batch: RoutedBatch, of_device: RoutedBatch) -> None:
    """A good request of each kind, in each slot."""
    for _ in range(NUM_SLOTS):
        for each in (of_device, batch):
            sequence = pair.client.submit(2, each, deadline_s=TIMEOUT_S)
            while (request := received(pair)).header.layer_id != 2:
                pass
            sums = sums_of(request.batch)
            pair.server.reply(
                request, MovedSums(sums) if each is of_device else HostSums(sums), 0.0
            )
            reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
            assert reply.sums.tobytes() == sums_of(batch).tobytes()


def test_a_device_that_fails_fails_one_request_at_the_daemon(pair: MovedPair) -> None:
    batch, of_device = batches(6)
    sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
    request = received(pair)
    sums = sums_of(request.batch)
    pair.server_mover.has_failed = True
    answered(pair, request, sums)
    with pytest.raises(ProtocolError, match="off the bus") as caught:
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert caught.value.code == "internal"
    pair.server_mover.has_failed = False
    assert_is_served(pair, batch, of_device)


def test_a_device_that_fails_at_the_parent_leaves_its_slot_free(pair: MovedPair) -> None:
    batch, of_device = batches(6)
    pair.client_mover.has_failed = True
    for _ in range(NUM_SLOTS + 1):
        with pytest.raises(DeviceUnavailable):
            pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
    pair.client_mover.has_failed = False
    assert_is_served(pair, batch, of_device)


def test_a_link_that_is_lost_gives_its_windows_back(pair: MovedPair) -> None:
    sequence = pair.client.submit(1, batches(6)[1], deadline_s=TIMEOUT_S)
    received(pair)
    pair.server.drop_link("ab")
    assert pair.server.try_receive() is None
    assert pair.server_mover.num_open == 0
    pair.lose()
    with pytest.raises(DaemonUnavailable, match="it was ended"):
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    pair.client.close()
    assert pair.client_mover.num_open == 0


def submitted(pair: MovedPair, seed: int) -> tuple[int, F64Array]:
    """A request whose rows are on their way still, and what will be answered."""
    batch, of_device = batches(6, seed)
    pair.client_mover.is_slow = True
    sequence = pair.client.submit(seed, of_device, deadline_s=TIMEOUT_S)
    assert pair.server.try_receive() is None
    return sequence, sums_of(batch)


def test_a_request_is_published_when_its_rows_are_there(pair: MovedPair) -> None:
    """By whoever looks then, waits for it, waits for another, or submits the next."""
    first, _ = submitted(pair, 1)
    pair.client.poll()
    assert pair.server.try_receive() is None
    pair.client_mover.is_slow = False
    pair.client.poll()
    assert received(pair).header.sequence == first
    second, _ = submitted(pair, 2)
    pair.client.push(first)
    assert pair.server.try_receive() is None
    num_bytes = pair.client.counters.bytes_sent
    pair.client.push(second)
    assert received(pair).header.sequence == second
    assert pair.client.counters.bytes_sent > num_bytes


def test_who_waits_for_a_reply_has_published_all_requests(pair: MovedPair) -> None:
    first, sums = submitted(pair, 1)
    pair.client.push(first)
    request = received(pair)
    second, _ = submitted(pair, 2)
    with pytest.raises(DeadlineExceeded):
        pair.client.wait(first, deadline_s=0.0)
    assert received(pair).header.sequence == second
    answered(pair, request, sums)
    assert pair.client.wait(first, deadline_s=TIMEOUT_S).sums.tobytes() == sums.tobytes()


def test_sums_are_taken_in_before_anybody_waits(pair: MovedPair) -> None:
    """One at a time, and whoever waits for another gets that one."""
    sent, requests = [], []
    for seed in (1, 2):
        sequence, sums = submitted(pair, seed)
        pair.client.push(sequence)
        sent.append((sequence, sums))
        requests.append(received(pair))
    pair.client.poll()
    assert pair.client.counters.bytes_received == 0
    for request, (_, sums) in zip(requests, sent, strict=True):
        answered(pair, request, sums)
    for _ in range(2):  # whose header is taken once
        pair.client.poll()
    for sequence, sums in reversed(sent):
        assert pair.client.wait(sequence, deadline_s=TIMEOUT_S).sums.tobytes() == sums.tobytes()
    pair.client_mover.is_slow = False
    assert_is_served(pair, *batches(6))


def test_room_is_made_although_a_later_request_is_being_read(pair: MovedPair) -> None:
    """Reading an earlier reply ends the reading that is under way."""
    sent, requests = [], []
    for seed in (1, 2):
        sent.append(submitted(pair, seed))
        pair.client.push(sent[-1][0])
        requests.append(received(pair))
    for request, (_, sums) in reversed(list(zip(requests, sent, strict=True))):
        answered(pair, request, sums)
        pair.client.poll()
    sent.append(submitted(pair, 3))
    pair.client.push(sent[2][0])
    answered(pair, received(pair), sent[2][1])
    for sequence, sums in sent:
        assert pair.client.wait(sequence, deadline_s=TIMEOUT_S).sums.tobytes() == sums.tobytes()


def test_sums_that_were_damaged_are_found_when_they_are_waited_for(pair: MovedPair) -> None:
    for is_header in (False, True):
        sequence, sums = submitted(pair, 1)
        pair.client.push(sequence)
        answered(pair, received(pair), sums)
        slot = SHAPE.reply_slot_at(sequence % NUM_SLOTS)
        at = slot + 8 * ring.TOKENS if is_header else slot + ring.HEADER_BYTES + 17
        pair.memory[at] ^= 1
        pair.client.poll()
        with pytest.raises(ProtocolError) as caught:
            pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert caught.value.code == ("malformed" if is_header else "checksum")
    pair.client_mover.is_slow = False
    assert_is_served(pair, *batches(6))


def test_requests_are_forgotten_at_any_stage(pair: MovedPair) -> None:
    """On their way, published, answered and being read; every slot is there again."""
    for stage in range(4):
        for _ in range(NUM_SLOTS):
            sequence, sums = submitted(pair, 1)
            if stage > 0:
                pair.client.push(sequence)
                request = received(pair)
            if stage > 1:
                answered(pair, request, sums)
            if stage > 2:
                pair.client.poll()
            pair.client.forget(sequence)
            pair.client.push(sequence)
            if stage == 1:  # it comes too late
                answered(pair, request, sums)
            with pytest.raises(DeadlineExceeded):
                pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        pair.client_mover.is_slow = False
        assert_is_served(pair, *batches(6))


@examples(60)
@given(
    st.integers(0, 12), st.integers(1, 14), st.integers(0, 1000), st.sampled_from([0.0, 0.75, 1.0])
)
def test_batches_of_devices_are_grouped_and_cut_as_those_of_the_host(
    num_tokens: int, max_tokens: int, seed: int, share: float
) -> None:
    batch, of_device = batches(num_tokens, seed)
    whole_from = math.ceil(share * num_tokens)
    used, rows = RoutedBatch.group_used(
        batch.phase, batch.rows, batch.pairs(), whole_from=whole_from
    )
    used_of_device, same_rows = RoutedBatch.group_used(
        of_device.phase, of_device.rows, of_device.pairs(), whole_from=whole_from
    )
    assert used_of_device.rows.is_on_device
    assert (rows is None) == (same_rows is None)
    assert (rows is None) == (np.unique(batch.token_indices).size >= whole_from)
    if rows is not None and same_rows is not None:
        np.testing.assert_array_equal(rows, same_rows)
    assert_same_batch(used_of_device, used)
    cut, same = (list(slice_tokens(each, max_tokens)) for each in (used, used_of_device))
    assert [first for first, _ in cut] == [first for first, _ in same]
    for (_, piece), (_, piece_of_device) in zip(cut, same, strict=True):
        assert_same_batch(piece_of_device, piece)


def test_the_digest_is_told_by_every_word_and_its_place() -> None:
    random = np.random.default_rng(0)
    data = random.integers(0, 256, 8 * 64).astype(np.uint8)
    expected = digest_of(data)
    found = {expected}
    for place in range(data.size):
        changed = data.copy()
        changed[place] ^= 1 << int(random.integers(8))
        found.add(digest_of(changed))
    words, num_swaps = data.view(np.uint64), 0
    for first in range(0, 64, 9):
        for second in range(first + 1, 64, 7):
            swapped = words.copy()
            swapped[[first, second]] = words[[second, first]]
            found.add(digest_of(swapped.view(np.uint8)))
            num_swaps += 1
    assert len(found) == 1 + data.size + num_swaps
    assert digest_of(np.empty(0, np.uint8)) == 0
    assert digest_of(np.zeros(64, np.uint8)) != digest_of(np.zeros(128, np.uint8))


def submit_interrupted(
    pair: MovedPair, monkeypatch: pytest.MonkeyPatch, of_device: RoutedBatch
) -> None:
    """Submit a request and be interrupted while its rows are being copied."""
    pair.client_mover.is_slow = True
    begin = DeviceCopies.begin

    def interrupted(copies: DeviceCopies, *args: Any, **options: Any) -> None:
        begin(copies, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopies, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)


def test_a_request_whose_sending_was_interrupted_is_never_published(
    pair: MovedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that happened when the copy of its rows had begun."""
    submit_interrupted(pair, monkeypatch, batches(5)[1])
    batch, of_device = batches(4, seed=1)
    sequence = pair.client.submit(1, of_device, deadline_s=TIMEOUT_S)
    assert pair.server.try_receive() is None
    pair.client.push(sequence)
    request = received(pair)
    assert request.header.sequence == sequence
    assert_same_batch(request.batch, batch)
    answered(pair, request, sums_of(batch))
    assert (
        pair.client.wait(sequence, deadline_s=TIMEOUT_S).sums.tobytes() == sums_of(batch).tobytes()
    )


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_slot_is_used_again_once_its_copy_is_complete(
    pair: MovedPair, is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a forgotten request that are still being copied do not damage the next one's."""
    batch, of_device = batches(6)
    for _ in range(NUM_SLOTS + 1):
        if is_interrupted:
            submit_interrupted(pair, monkeypatch, batches(6, seed=1)[1])
        else:
            sequence, _ = submitted(pair, 1)
            pair.client.forget(sequence)
        sequence = pair.client.submit(2, batch, deadline_s=TIMEOUT_S)
        pair.client_mover.end_copies()
        request = pair.server.try_receive()
        assert request is not None
        assert_same_batch(request.batch, batch)
        pair.server.reply(request, HostSums(sums_of(batch)), 0.0)
        reply = pair.client.wait(sequence, deadline_s=TIMEOUT_S)
        assert reply.sums.tobytes() == sums_of(batch).tobytes()
    pair.client_mover.is_slow = False
    assert_is_served(pair, batch, of_device)
