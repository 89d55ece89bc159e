"""Whatever is written into the shared memory: served rightly, or refused and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import HostSums
from dflash_protocol.errors import DeadlineExceeded, ProtocolError
from dflash_protocol.ring import layout as ring
from support.examples import examples
from support.shared_pair import BATCH, NUM_SLOTS, SHAPE, Pair, submitted
from support.transport_checks import (
    MAX_EXPERTS_USED,
    MAX_TOKENS,
    TIMEOUT_S,
    assert_serves,
    received,
    sums_of,
)


@pytest.fixture
def pair(run_dir: Path) -> Iterator[Pair]:
    made = Pair(run_dir)
    yield made
    made.close()


REQUEST, REPLY = SHAPE.request_slot_at(0), SHAPE.reply_slot_at(0)
REQUEST_BYTES = ring.HEADER_BYTES + 4 * BATCH.hidden.size + 16 * BATCH.num_pairs + 4 * 64
REPLY_BYTES = ring.HEADER_BYTES + 8 * BATCH.hidden.size


def outcome(pair: Pair, sequence: int) -> str:
    """What became of a request whose slot was tampered with; never a wrong answer."""
    request = pair.server.try_receive()
    if request is not None:  # what was changed did not matter
        for name in ("hidden", "expert_ids", "group_starts", "token_indices", "weights"):
            np.testing.assert_array_equal(getattr(request.batch, name), getattr(BATCH, name))
        pair.server.reply(request, HostSums(sums_of(BATCH)), 0.0)
    try:
        reply = pair.client.wait(sequence, deadline_s=0.0)
    except ProtocolError as error:
        return error.code
    except DeadlineExceeded:
        return "nothing"
    np.testing.assert_array_equal(reply.sums, sums_of(BATCH))
    return "served"


@pytest.mark.parametrize(
    ("word", "value", "code"),
    [
        (ring.SEQUENCE, 1, "stale"),
        (ring.SEQUENCE, -1, "stale"),
        (ring.GENERATION, 2, "stale"),
        (ring.KIND, ring.KIND_REPLY, "malformed"),
        (ring.KIND, 0, "malformed"),
        (ring.LAYER, -1, "malformed"),
        (ring.TOKENS, MAX_TOKENS + 1, "capacity"),
        (ring.TOKENS, 1 << 62, "capacity"),
        (ring.TOKENS, -1, "malformed"),
        (ring.TOKENS, 2, "malformed"),
        (ring.TOKENS, 0, "malformed"),
        (ring.GROUPS, BATCH.num_pairs + 1, "malformed"),
        (ring.GROUPS, -1, "malformed"),
        (ring.GROUPS, 0, "malformed"),
        (ring.PAIRS, 1 << 62, "capacity"),
        (ring.PAIRS, MAX_TOKENS * MAX_EXPERTS_USED, "malformed"),
        (ring.PAIRS, -1, "malformed"),
        (ring.PHASE, 3, "malformed"),
        (ring.PHASE, -1, "malformed"),
        (ring.PAYLOAD, ring.PAYLOAD_BF16, "malformed"),
        (ring.PAYLOAD, ring.PAYLOAD_F64, "malformed"),
        (ring.PAYLOAD, 77, "malformed"),
        (ring.PAYLOAD_BYTES, 0, "malformed"),
        (ring.PAYLOAD_BYTES, 1 << 62, "malformed"),
        (ring.TIME, 0x7FF0 << 48, "malformed"),
        (ring.OTHER_TIME, 0x7FF8 << 48, "malformed"),
        (ring.CHECKSUM, 0, "checksum"),
        (ring.LAYER, 2, "checksum"),
        (ring.MOVED, 1, "malformed"),
        (ring.DIGEST, 1, "checksum"),
        (14, 1, "checksum"),
    ],
)
def test_a_header_that_is_wrong_is_answered_with_the_reason_and_counted(
    pair: Pair, word: int, value: int, code: str
) -> None:
    sequence = submitted(pair)
    pair.words[REQUEST // 8 + word] = value
    assert outcome(pair, sequence) == code
    counters = pair.server_counters
    assert (counters.checksum_failures, counters.stale) == (code == "checksum", code == "stale")
    assert_serves(pair)


mutations = st.one_of(
    st.tuples(st.just("bit"), st.integers(0, 8 * REQUEST_BYTES - 1), st.none()),
    st.tuples(
        st.just("word"),
        st.integers(0, ring.HEADER_WORDS - 1),
        st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 40),
    ),
    st.tuples(
        st.just("bytes"), st.integers(0, REQUEST_BYTES - 64), st.binary(min_size=1, max_size=64)
    ),
)


@examples(300)
@given(st.lists(mutations, min_size=1, max_size=4), st.booleans())
def test_whatever_becomes_of_a_slot_it_is_served_rightly_or_refused(
    run_dir: Path, changes: list[tuple[str, int, int | bytes | None]], of_reply: bool
) -> None:
    """Requests are changed before the server looks, replies before the client does."""
    pair = Pair(run_dir)
    try:
        sequence = submitted(pair)
        if of_reply:
            request = received(pair)
            pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
        base = REPLY if of_reply else REQUEST
        for kind, place, value in changes:
            if kind == "bit":
                pair.memory[base + place // 8] ^= 1 << place % 8
            elif kind == "word":
                pair.words[base // 8 + place] = value
            else:
                assert isinstance(value, bytes)
                pair.memory[base + place : base + place + len(value)] = list(value)
        assert outcome(pair, sequence) in ("served", "stale", "malformed", "capacity", "checksum")
        assert_serves(pair)
        assert_serves(pair)
    finally:
        pair.close()


@examples(100)
@given(
    st.sampled_from([ring.REQUEST_WORDS_AT, ring.REPLY_WORDS_AT]),
    st.integers(0, NUM_SLOTS - 1),
    st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 9),
    st.booleans(),
)
def test_a_word_that_does_not_fit_its_place_is_counted_and_serves_nobody(
    run_dir: Path, words_at: int, slot_idx: int, value: int, is_submitted: bool
) -> None:
    pair = Pair(run_dir)
    try:
        sequence = submitted(pair) if is_submitted else 0
        pair.words[words_at // 8 + slot_idx] = value
        for _ in range(5):
            request = pair.server.try_receive()
            if request is not None:
                assert is_submitted
                pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
        assert pair.server_counters.stale <= 1
        if is_submitted:
            try:
                reply = pair.client.wait(sequence, deadline_s=0.0)
                np.testing.assert_array_equal(reply.sums, sums_of(BATCH))
            except (ProtocolError, DeadlineExceeded):
                pair.client.forget(sequence)
    finally:
        pair.close()


def test_a_replayed_request_is_not_computed_twice(pair: Pair) -> None:
    sequence = submitted(pair)
    slot = pair.memory[REQUEST : REQUEST + REQUEST_BYTES].copy()
    assert outcome(pair, sequence) == "served"
    later = submitted(pair)
    assert outcome(pair, later) == "served"
    pair.memory[REQUEST : REQUEST + REQUEST_BYTES] = slot
    pair.words[ring.REQUEST_WORDS_AT // 8] = sequence
    assert pair.server.try_receive() is None
    assert pair.server.try_receive() is None
    assert pair.server_counters.stale == 1
    # The old content under the next sequence, which the client would use.
    pair.words[ring.REQUEST_WORDS_AT // 8] = later + NUM_SLOTS
    assert pair.server.try_receive() is None
    assert pair.server_counters.stale == 2


def test_a_request_that_is_published_again_before_its_reply_waits(pair: Pair) -> None:
    sequence = submitted(pair)
    request = received(pair)
    hidden = request.batch.hidden.copy()
    pair.words[ring.REQUEST_WORDS_AT // 8] = sequence + NUM_SLOTS
    pair.words[REQUEST // 8 + ring.SEQUENCE] = sequence + NUM_SLOTS
    pair.memory[REQUEST + ring.HEADER_BYTES :][:64] = 7
    assert pair.server.try_receive() is None
    np.testing.assert_array_equal(request.batch.hidden, hidden)
    pair.server.reply(request, HostSums(sums_of(request.batch)), 0.0)
    assert pair.server.try_receive() is None
    assert pair.server_counters.checksum_failures == 1


def test_a_batch_stays_as_it_was_checked_whatever_is_written_later(pair: Pair) -> None:
    submitted(pair)
    request = received(pair)
    pair.memory[ring.SLOTS_AT :] = 0xFF
    for name in ("hidden", "expert_ids", "group_starts", "token_indices", "weights"):
        np.testing.assert_array_equal(getattr(request.batch, name), getattr(BATCH, name))


@pytest.mark.parametrize(
    ("word", "value", "code"),
    [
        (ring.SEQUENCE, 1, "stale"),
        (ring.GENERATION, 0, "stale"),
        (ring.KIND, ring.KIND_REQUEST, "malformed"),
        (ring.KIND, ring.KIND_FAILURE, "checksum"),
        (ring.TOKENS, 4, "malformed"),
        (ring.PAYLOAD, ring.PAYLOAD_F16, "malformed"),
        (ring.PAYLOAD, ring.PAYLOAD_F32, "malformed"),
        (ring.PAYLOAD_BYTES, REPLY_BYTES, "malformed"),
        (ring.TIME, 0x7FF0 << 48, "malformed"),
        (ring.CHECKSUM, 1, "checksum"),
    ],
)
def test_a_wrong_reply_is_an_error_where_it_is_waited_for(
    pair: Pair, word: int, value: int, code: str
) -> None:
    sequence = submitted(pair)
    pair.server.reply(received(pair), HostSums(sums_of(BATCH)), 0.0)
    pair.words[REPLY // 8 + word] = value
    with pytest.raises(ProtocolError) as caught:
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert caught.value.code == code
    counters = pair.client_counters
    assert (counters.checksum_failures, counters.stale) == (code == "checksum", code == "stale")
    assert_serves(pair)


@pytest.mark.parametrize("num_bytes", [-4, 2, ring.FAILURE_LIMIT_BYTES + 4, 1 << 62])
def test_a_failure_of_impossible_length_is_not_read(pair: Pair, num_bytes: int) -> None:
    sequence = submitted(pair)
    received(pair)
    pair.server.fail("ab", sequence, ProtocolError("no"))
    pair.words[REPLY // 8 + ring.PAYLOAD_BYTES] = num_bytes
    with pytest.raises(ProtocolError, match="bytes"):
        pair.client.wait(sequence, deadline_s=TIMEOUT_S)
    assert_serves(pair)
