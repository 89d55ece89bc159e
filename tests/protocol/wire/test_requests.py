"""Requests and replies as frames: what comes back, and that nothing damaged is ever used."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import NEGOTIABLE, PayloadType
from dflash_protocol.wire.messages import ExpertRequest, Frames
from dflash_protocol.wire.requests import (
    HEADER_BYTES,
    INLINE_LIMIT_BYTES,
    ParentCodec,
    decode_request,
    encode_failure,
    encode_reply,
    encode_request,
    is_single,
    largest_frame_bytes,
    seal,
    sequence_of,
)
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters
from support.examples import examples
from support.routed_batches import (
    HIDDEN_SIZE,
    assert_same_batch,
    batch_of,
    numbered_rows,
    pair_sets,
)

PAIRS = {(0, 1): 0.5, (1, 1): 0.25, (0, 4): 1.0, (1, 4): -0.5}
GENERATION = 0xDEADBEEF


def limits_of(**changes: object) -> LinkLimits:
    limits = LinkLimits(HIDDEN_SIZE, 8, 5, generation=GENERATION)
    for name, value in changes.items():
        setattr(limits, name, value)
    return limits


def raw(frames: Frames) -> list[bytes]:
    """Frames as they arrive."""
    return [bytes(frame) for frame in frames]


def request_frames(batch: RoutedBatch, sequence: int = 9, **changes: object) -> list[bytes]:
    arguments = {"sequence": sequence, "layer_id": 47, "deadline_s": 0.25}
    return raw(encode_request(batch, **arguments | {"generation": GENERATION} | changes))  # type: ignore[arg-type]


def codec_of(
    payload: PayloadType = PayloadType.F32, counters: TransportCounters | None = None
) -> ParentCodec:
    return ParentCodec(
        hidden_size=HIDDEN_SIZE,
        generation=GENERATION,
        payload=payload,
        counters=counters or TransportCounters(),
    )


def received_request(num_tokens: int = 2, sequence: int = 9) -> ExpertRequest:
    request, _ = decode_request(request_frames(batch_of(num_tokens, {}), sequence), limits_of())
    return request


def reply_frames(sums: F64Array, payload: PayloadType = PayloadType.F32) -> list[bytes]:
    request = received_request(sums.shape[0])
    return raw(encode_reply(request, sums, compute_s=0.5, queue_s=0.25, payload=payload))


def sums_of(codec: ParentCodec, frames: list[bytes], num_tokens: int) -> F64Array:
    answer = codec.decode(frames, {9: num_tokens})
    assert answer is not None
    sequence, reply = answer
    assert sequence == 9
    assert isinstance(reply, Reply)
    return reply.sums


@examples(100)
@given(pair_sets(), st.sampled_from(list(Phase)), st.sampled_from(NEGOTIABLE))
def test_a_request_comes_back_as_it_was(
    pair_set: tuple[int, dict[tuple[int, int], float]], phase: Phase, payload: PayloadType
) -> None:
    # Rows of small whole numbers, which every type holds.
    batch = batch_of(*pair_set, phase=phase)
    counters = TransportCounters()
    frames = request_frames(batch, payload=payload, counters=counters)
    assert len(frames) == 1
    request, received = decode_request(frames, limits_of(payload=payload))
    assert (request.sequence, request.layer_id, request.deadline_ms) == (9, 47, 250.0)
    assert (request.generation, request.num_tokens) == (GENERATION, batch.num_tokens)
    assert request.payload == payload.value
    assert_same_batch(received, batch)
    received.check(hidden_size=HIDDEN_SIZE, num_experts=5)
    assert counters.bytes_sent == len(frames[0]) - HEADER_BYTES
    assert counters.widened == 0


@pytest.mark.parametrize("payload", NEGOTIABLE)
def test_large_arrays_have_frames_of_their_own(payload: PayloadType) -> None:
    hidden = numbered_rows(40, 2048) / np.float32(2048)
    batch = batch_of(40, {(token_idx, 1): 0.5 for token_idx in range(40)}, hidden=hidden)
    limits = limits_of(hidden_size=2048, max_tokens=40, payload=payload)
    frames = encode_request(
        batch, sequence=9, layer_id=0, deadline_s=1.0, generation=GENERATION, payload=payload
    )
    assert len(frames) == 3
    if payload is PayloadType.F32:
        assert np.shares_memory(np.asarray(frames[2]), hidden), "not copied"
    _, received = decode_request(raw(frames), limits)
    np.testing.assert_allclose(received.hidden, hidden, rtol=2.0**-8)
    sums = np.ones((40, 2048))
    request, _ = decode_request(raw(frames), replace(limits, last_sequence=0))
    answer = raw(encode_reply(request, sums, compute_s=0.0, payload=payload))
    codec = ParentCodec(
        hidden_size=2048, generation=GENERATION, payload=payload, counters=TransportCounters()
    )
    assert not is_single(answer[0])
    np.testing.assert_array_equal(sums_of(codec, answer, 40), sums)


def test_sums_are_exact_and_times_travel_along() -> None:
    sums = np.array([[1.0, 2.0, 3.0], [np.pi, -0.0, 1e300]])
    frames = reply_frames(sums)
    assert is_single(frames[0])
    counters = TransportCounters()
    answer = codec_of(counters=counters).decode(frames, {9: 2})
    assert answer is not None
    reply = answer[1]
    assert isinstance(reply, Reply)
    assert reply.sums.tobytes() == sums.tobytes()
    assert (reply.compute_s, reply.queue_s) == (0.5, 0.25)
    assert counters.bytes_received == sums.nbytes


def test_narrow_sums_take_a_quarter_of_the_bytes() -> None:
    sums = np.array([[1.0, -2.5, 3.25]])
    for payload in (PayloadType.F16, PayloadType.BF16):
        counters = TransportCounters()
        frames = reply_frames(sums, payload)
        assert len(frames[0]) == HEADER_BYTES + 6
        np.testing.assert_array_equal(sums_of(codec_of(payload, counters), frames, 1), sums)
        assert counters.widened == 0


def test_messages_that_went_wide_are_counted_on_both_sides() -> None:
    payload = PayloadType.F16
    daemon, parent = TransportCounters(), TransportCounters()
    batch = batch_of(1, {(0, 0): 1.0}, hidden=np.full((1, HIDDEN_SIZE), 7e4, np.float32))
    frames = request_frames(batch, payload=payload, counters=parent)
    request, received = decode_request(frames, limits_of(payload=payload))
    assert request.payload == "f32"
    assert_same_batch(received, batch)
    sums = np.full((1, HIDDEN_SIZE), 1e6)
    answer = raw(encode_reply(request, sums, compute_s=0.0, payload=payload, counters=daemon))
    np.testing.assert_array_equal(sums_of(codec_of(payload, parent), answer, 1), sums)
    assert (daemon.widened, parent.widened) == (1, 2)


def test_a_failure_says_why() -> None:
    error = ProtocolError("too many\ntokens \udcff", code="capacity")
    frames = raw(encode_failure(9, error, generation=GENERATION))
    answer = codec_of().decode(frames, {9: 1})
    assert answer is not None
    assert isinstance(answer[1], ProtocolError)
    assert answer[1].code == "capacity"
    assert str(answer[1]) == r"too many\ntokens \udcff"
    long = raw(encode_failure(9, ProtocolError("x" * 100_000), generation=GENERATION))
    assert len(long[0]) < 4096
    assert codec_of().decode(long, {9: 1}) is not None


def forged(frames: list[bytes], offset: int, form: str, value: float) -> list[bytes]:
    """The message with a field replaced and its checksum made right again."""
    head = bytearray(frames[0])
    struct.pack_into(form, head, offset, value)
    head[:8] = xxhash.xxh3_64_intdigest(b"".join((head[8:], *frames[1:]))).to_bytes(8, "little")
    return [bytes(head), *frames[1:]]


HUGE = (1 << 32) - 1


@pytest.mark.parametrize(
    ("offset", "form", "value", "reason", "code"),
    [
        (8, "B", 2, r"kind 2\b", "unknown_type"),
        (8, "B", 0, r"kind 0\b", "unknown_type"),
        (9, "B", 3, "phase", "malformed"),
        (10, "B", 4, "payload", "malformed"),
        (10, "B", 0, r"\bf64\b.*negotiated", "malformed"),
        (10, "B", 2, r"\bf16\b.*negotiated", "malformed"),
        (11, "B", 1, "header", "malformed"),
        (16, "<Q", 8, r"\b8\b.*\b8\b", "stale"),
        (24, "<Q", 1, "link", "stale"),
        (32, "<I", 9, r"\b9 tokens\b.*capacity.* 8\b", "capacity"),
        (32, "<I", HUGE, "capacity", "capacity"),
        (32, "<I", 1, r"bytes\b.*header", "malformed"),
        (32, "<I", 0, r"bytes\b.*header", "malformed"),
        (36, "<I", 5, r"groups\b.*pairs", "malformed"),
        (36, "<I", HUGE, r"groups\b.*pairs", "malformed"),
        (36, "<I", 1, r"bytes\b.*header", "malformed"),
        (40, "<I", 3, r"bytes\b.*header", "malformed"),
        (40, "<I", HUGE, r"bytes\b.*header", "malformed"),
        (48, "<d", float("nan"), "header", "malformed"),
        (56, "<d", float("inf"), "header", "malformed"),
    ],
)
def test_a_request_that_does_not_hold_together_is_refused_before_anything_is_allocated(
    offset: int, form: str, value: float, reason: str, code: str
) -> None:
    frames = request_frames(batch_of(2, PAIRS))
    bad = forged(frames, offset, form, value)
    limits = limits_of(last_sequence=8)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=reason) as caught:
            decode_request(bad, limits)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.code == code
    limits.last_sequence = 8
    decode_request(frames, limits)


def test_more_pairs_than_the_tokens_can_have_are_refused() -> None:
    frames = request_frames(batch_of(2, PAIRS))
    with pytest.raises(ProtocolError, match=r"\b4 pairs\b.*\b2 tokens"):
        decode_request(frames, limits_of(max_experts_used=1))
    assert decode_request(frames, limits_of(max_experts_used=2))[1].num_pairs == 4


def test_a_sequence_must_be_larger_than_all_before_it() -> None:
    limits = limits_of()
    batch = batch_of(1, {})
    for sequence in (1, 2, 5):
        decode_request(request_frames(batch, sequence), limits)
    for replayed in (5, 3, 1):
        with pytest.raises(ProtocolError, match=rf"\b{replayed}\b.*\b5\b") as caught:
            decode_request(request_frames(batch, replayed), limits)
        assert caught.value.code == "stale"
    decode_request(request_frames(batch, 6), limits)


def test_arrays_in_both_places_are_refused() -> None:
    sealed = seal(1, 1, 0, arrays=(b"1234",), num_bytes=4)
    frames = raw([sealed[0], b"5678"])
    frames = forged(frames, 11, "B", 1)
    with pytest.raises(ProtocolError, match=r"header\b.*frames"):
        decode_request(frames, limits_of(generation=0))


@pytest.mark.parametrize("frames", [[], [b""], [b"x" * (HEADER_BYTES - 1)]])
def test_a_message_without_a_header_is_refused_on_both_sides(frames: list[bytes]) -> None:
    assert sequence_of(frames) == 0
    with pytest.raises(ProtocolError, match="header"):
        decode_request(frames, limits_of())
    with pytest.raises(ProtocolError, match="header"):
        codec_of().decode(frames, {9: 2})


ANSWER = reply_frames(np.ones((2, HIDDEN_SIZE)))


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(32, "<I", 1), (32, "<I", HUGE), (10, "B", 1), (10, "B", 2), (10, "B", 9), (8, "B", 7)],
)
def test_an_answer_that_is_not_what_was_asked_for_is_a_protocol_error(
    offset: int, form: str, value: int
) -> None:
    with pytest.raises(ProtocolError):
        codec_of().decode(forged(ANSWER, offset, form, value), {9: 2})
    sums_of(codec_of(), ANSWER, 2)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_an_answer_of_another_shape_is_a_protocol_error(num_tokens: int) -> None:
    with pytest.raises(ProtocolError, match="shape"):
        codec_of().decode(ANSWER, {9: num_tokens})


def test_answers_that_nobody_waits_for_are_stale() -> None:
    counters = TransportCounters()
    codec = codec_of(counters=counters)
    assert codec.decode(ANSWER, {}) is None
    assert codec.decode(ANSWER, {8: 2, 10: 2}) is None
    assert codec.decode(forged(ANSWER, 24, "<Q", 1), {9: 2}) is None
    assert counters.stale == 3
    assert codec.decode(forged(ANSWER, 16, "<Q", (1 << 64) - 1), {9: 2}) is None
    assert counters.checksum_failures == 0


BIG = batch_of(
    7,
    {(token_idx, expert): 0.5 for token_idx in range(7) for expert in range(5)},
    hidden=numbered_rows(7, 4096),
)
BIG_LIMITS = limits_of(hidden_size=4096)


def damage(source: random.Random, frames: list[bytes]) -> list[bytes]:
    """The message after one accident that changes it."""
    frames = list(frames)
    index = source.randrange(len(frames))
    frame = bytearray(frames[index])
    place = source.randrange(len(frame))
    match source.randrange(6):
        case 0:
            frame[place] ^= 1 << source.randrange(8)
        case 1:
            del frame[place:]
        case 2:
            frame[place:place] = source.randbytes(source.randint(1, 9))
        case 3:
            frame[place] ^= 1 << source.randrange(8)
            frame[source.randrange(len(frame))] ^= 0x80
            if frame == frames[index]:
                frame[0] ^= 1
        case 4:
            other = (place + 8) % len(frame)
            frame[place], frame[other] = frame[other], frame[place]
            if frame == frames[index]:
                frame[0] ^= 1
        case _:
            frames.append(source.randbytes(source.randint(1, 40)))
    if index < len(frames):
        frames[index] = bytes(frame)
    return frames


@examples(300)
@given(st.integers(0, 1 << 32), st.booleans())
def test_whatever_happens_to_a_message_on_its_way_it_is_not_used(seed: int, is_big: bool) -> None:
    source = random.Random(seed)
    batch, limits = (BIG, BIG_LIMITS) if is_big else (batch_of(2, PAIRS), limits_of())
    limits = replace(limits, last_sequence=0)
    good = request_frames(batch)
    assert len(good) == (3 if is_big else 1)
    bad = damage(source, good)
    with pytest.raises(ProtocolError) as caught:
        decode_request(bad, limits)
    assert len(str(caught.value).splitlines()) == 1
    assert limits.last_sequence == 0, "a damaged message says nothing of the order"
    decode_request(good, limits)
    counters = TransportCounters()
    codec = codec_of(counters=counters)
    bad = damage(source, ANSWER)
    try:
        answer = codec.decode(bad, {9: 2})
    except ProtocolError:
        pass
    else:
        assert answer is None or isinstance(answer[1], ProtocolError)
        assert counters.checksum_failures == 1
    sums_of(codec, ANSWER, 2)


@examples(150)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_are_refused_on_both_sides(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode_request(frames, limits_of())
    with contextlib.suppress(ProtocolError):
        assert codec_of().decode(frames, {9: 2}) is None
    assert 0 <= sequence_of(frames) < 1 << 64


def spoiled_counts(source: random.Random, frames: list[bytes]) -> list[bytes]:
    """The message as a hostile peer could have sealed it."""
    fields = ((8, "B"), (9, "B"), (10, "B"), (11, "B"), (12, "<I"), (32, "<I"), (36, "<I"))
    for _ in range(source.randint(1, 3)):
        offset, form = source.choice((*fields, (40, "<I")))
        bound = 1 << 8 if form == "B" else 1 << source.choice((3, 8, 32))
        frames = forged(frames, offset, form, source.randrange(bound))
    if source.random() < 0.3:
        spoiled = list(frames)
        spoiled[-1] = spoiled[-1] + source.randbytes(4 * source.randint(0, 3))
        frames = forged(spoiled, 8, "B", 1)
    return frames


@examples(300)
@given(st.integers(0, 1 << 32))
def test_a_message_with_any_counts_is_read_within_its_bounds_or_refused(seed: int) -> None:
    source = random.Random(seed)
    frames = spoiled_counts(source, request_frames(batch_of(2, PAIRS)))
    try:
        _, batch = decode_request(frames, limits_of())
        batch.check(hidden_size=HIDDEN_SIZE, num_experts=5)
    except ProtocolError:
        return
    assert batch.num_tokens <= 8
    assert batch.num_pairs <= 5 * batch.num_tokens


@examples(60)
@given(pair_sets(), st.sampled_from(NEGOTIABLE))
def test_no_legal_frame_is_longer_than_the_largest(
    pair_set: tuple[int, dict[tuple[int, int], float]], payload: PayloadType
) -> None:
    num_tokens, pairs = pair_set
    batch = batch_of(num_tokens, pairs)
    sums = np.zeros(batch.hidden.shape)
    frames = [*request_frames(batch, payload=payload), *reply_frames(sums)]
    limit = largest_frame_bytes(
        max_tokens=num_tokens, hidden_size=HIDDEN_SIZE, max_pairs=len(pairs)
    )
    assert max(map(len, frames)) <= limit
    assert limit >= HEADER_BYTES + INLINE_LIMIT_BYTES


Spoil = Callable[[list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:2],
        lambda frames: [*frames, b""],
        lambda frames: [frames[0], frames[2], frames[1]],
        lambda frames: [frames[0], frames[1] + frames[2]],
    ],
)
def test_frames_that_are_missing_or_changed_places_are_refused(spoil: Spoil) -> None:
    good = request_frames(BIG)
    limits = replace(BIG_LIMITS, last_sequence=0)
    for bad in (spoil(good), forged(spoil(good), 8, "B", 1)):
        with pytest.raises(ProtocolError):
            decode_request(bad, limits)
    limits.last_sequence = 0
    decode_request(good, limits)
