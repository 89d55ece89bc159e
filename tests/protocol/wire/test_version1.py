"""Version 1: rectangles cover a ragged batch exactly, and nothing hostile is taken for one."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import ComputeBatch, Ping, decode_header, encode_header
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters
from dflash_protocol.wire.version1 import (
    Version1ParentCodec,
    decode_request,
    encode_failure,
    encode_reply,
    local_ids_by_layer,
    rectangles,
    sequence_of,
)
from support.examples import examples
from support.routed_batches import (
    HIDDEN_SIZE,
    assert_same_batch,
    batch_of,
    numbered_rows,
    pair_sets,
    pairs_of,
)

OWNED = OwnedExperts.from_lists({3: [6, 1, 4, 0, 7]})
LOCAL_IDS = local_ids_by_layer(OWNED, {3: 9})


def limits_of(**changes: object) -> LinkLimits:
    limits = LinkLimits(HIDDEN_SIZE, 8, 5, version=1, local_ids=LOCAL_IDS)
    return replace(limits, **changes)  # type: ignore[arg-type]


def codec_of(counters: TransportCounters | None = None) -> Version1ParentCodec:
    return Version1ParentCodec(
        hidden_size=HIDDEN_SIZE,
        global_ids=OWNED.by_layer,
        counters=counters or TransportCounters(),
    )


def raw_request(
    hidden: F32Array, ids: I32Array, weights: F32Array, **changes: object
) -> list[bytes]:
    payload = hidden.tobytes() + ids.tobytes() + weights.tobytes()
    header = ComputeBatch(9, 3, hidden.shape[0], ids.shape[1], len(payload))
    return [encode_header(replace(header, **changes)), payload]  # type: ignore[arg-type]


IDS = np.array([[6, 1], [0, 6]], dtype=np.int32)
WEIGHTS = np.array([[0.5, 0.25], [1.0, -0.5]], dtype=np.float32)


def test_local_ids_are_where_the_owner_has_its_global_ones() -> None:
    assert list(LOCAL_IDS) == [3]
    assert LOCAL_IDS[3].tolist() == [3, 1, -1, -1, 2, -1, 0, 4, -1]


@examples(100)
@given(pair_sets(), st.integers(1, 4))
def test_rectangles_hold_every_pair_once_and_go_there_and_back(
    pair_set: tuple[int, dict[tuple[int, int], float]], max_tokens: int
) -> None:
    num_tokens, weights = pair_set
    # Pairs of weight zero are not sent back; version 1 ignores them.
    pairs = {place: weight or 1.0 for place, weight in weights.items()}
    found: dict[tuple[int, int], float] = {}
    limits = limits_of()
    pieces = rectangles(batch_of(num_tokens, pairs), max_tokens)
    for sequence, (rows, piece) in enumerate(pieces, 1):
        assert 1 <= piece.num_tokens <= max_tokens
        frames = codec_of().encode(piece, sequence=sequence, layer_id=3, deadline_s=1.0)
        request, received = decode_request([bytes(frame) for frame in frames], limits)
        phase = Phase.DECODE if piece.num_tokens == 1 else Phase.PREFILL
        assert_same_batch(received, replace(piece, phase=phase))
        assert (request.sequence, request.layer_id) == (sequence, 3)
        np.testing.assert_array_equal(received.hidden, numbered_rows(num_tokens)[rows])
        for (row, expert_id), weight in pairs_of(received).items():
            place = int(rows[row]), expert_id
            assert place not in found
            found[place] = weight
    assert found == pairs


def test_a_rectangle_of_global_ids_is_read_as_the_batch_it_means() -> None:
    _, batch = decode_request(raw_request(numbered_rows(2), IDS, WEIGHTS), limits_of())
    expected = {(0, 0): 0.5, (0, 1): 0.25, (1, 3): 1.0, (1, 0): -0.5}
    assert pairs_of(batch) == expected
    batch.check(hidden_size=HIDDEN_SIZE, num_experts=5)


def test_pairs_of_weight_zero_are_ignored_whoever_owns_them() -> None:
    weights = WEIGHTS.copy()
    weights[0] = 0.0
    ids = IDS.copy()
    ids[0] = 2
    _, batch = decode_request(raw_request(numbered_rows(2), ids, weights), limits_of())
    assert pairs_of(batch) == {(1, 3): 1.0, (1, 0): -0.5}
    assert batch.num_tokens == 2


HUGE = (1 << 62) - 1


@pytest.mark.parametrize(
    ("changes", "reason", "code"),
    [
        ({"num_tokens": 0}, "0 tokens", "malformed"),
        ({"num_tokens": 9}, "9 tokens", "malformed"),
        ({"num_tokens": HUGE}, "tokens", "malformed"),
        ({"num_selected": 0}, "0 experts a token", "malformed"),
        ({"num_selected": HUGE}, "experts a token", "malformed"),
        ({"num_selected": 1}, "must be", "malformed"),
        ({"payload_bytes": 7}, "header says 7", "malformed"),
        ({"layer_id": 4}, "no experts of layer 4", "not_owned"),
        ({"sequence": 8}, "came after 8", "stale"),
    ],
)
def test_a_rectangle_that_does_not_hold_together_is_refused(
    changes: dict[str, int], reason: str, code: str
) -> None:
    limits = limits_of(last_sequence=8)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=reason) as caught:
            decode_request(raw_request(numbered_rows(2), IDS, WEIGHTS, **changes), limits)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.code == code
    limits.last_sequence = 8
    decode_request(raw_request(numbered_rows(2), IDS, WEIGHTS), limits)


@pytest.mark.parametrize(
    ("bad_id", "reason", "code"),
    [
        (-1, "global expert ids", "malformed"),
        (9, "global expert ids", "malformed"),
        (1 << 30, "global expert ids", "malformed"),
        (2, "not here", "not_owned"),
    ],
)
def test_experts_that_do_not_exist_or_are_not_here_are_refused(
    bad_id: int, reason: str, code: str
) -> None:
    ids = IDS.copy()
    ids[1, 0] = bad_id
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode_request(raw_request(numbered_rows(2), ids, WEIGHTS), limits_of())
    assert caught.value.code == code


def test_an_expert_that_a_token_names_twice_is_found_out() -> None:
    ids = IDS.copy()
    ids[0] = 6
    _, batch = decode_request(raw_request(numbered_rows(2), ids, WEIGHTS), limits_of())
    with pytest.raises(ProtocolError):
        batch.check(hidden_size=HIDDEN_SIZE, num_experts=5)


def test_sums_come_back_in_float32_and_failures_with_their_reason() -> None:
    request, _ = decode_request(raw_request(numbered_rows(2), IDS, WEIGHTS), limits_of())
    sums = np.array([[1.0, 2.0, np.pi], [0.0, -1.0, 1e300]])
    counters = TransportCounters()
    codec = codec_of(counters)
    frames = [bytes(frame) for frame in encode_reply(request, sums)]
    answer = codec.decode(frames, {9: 2})
    assert answer is not None
    assert isinstance(answer[1], Reply)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(answer[1].sums, sums.astype(np.float32))
    assert answer[1].sums.dtype == np.float64
    assert counters.bytes_received == 24
    [failure] = encode_failure(9, ProtocolError("no luck"))
    refused = codec.decode([bytes(failure)], {9: 2})
    assert refused is not None
    assert str(refused[1]) == "no luck"
    assert codec.decode(frames, {8: 2}) is None
    assert counters.stale == 1
    for bad in ([], [frames[0]], [frames[0], b"x" * 23], [*frames, b""]):
        with pytest.raises(ProtocolError):
            codec.decode(bad, {9: 2})
    with pytest.raises(ProtocolError, match="the daemon sent ping"):
        codec.decode([encode_header(Ping(9, "00"))], {9: 2})


@examples(200)
@given(st.integers(0, 1 << 32))
def test_only_protocol_errors_come_out_of_mutated_requests(seed: int) -> None:
    source = random.Random(seed)
    frames = raw_request(numbered_rows(2), IDS, WEIGHTS)
    for _ in range(source.randint(1, 3)):
        index = source.randrange(len(frames))
        frame = bytearray(frames[index])
        place = source.randrange(len(frame) + 1)
        match source.randrange(4):
            case 0 if place < len(frame):
                frame[place] ^= 1 << source.randrange(8)
            case 1:
                del frame[place:]
            case 2:
                frame[place:place] = source.randbytes(4)
            case _:
                frames.append(bytes(frame))
        frames[index] = bytes(frame)
    try:
        _, batch = decode_request(frames, limits_of())
        batch.check(hidden_size=HIDDEN_SIZE, num_experts=5)
    except ProtocolError:
        assert sequence_of(frames) >= 0
        return
    assert isinstance(decode_header(frames[0]), ComputeBatch)
    assert batch.num_tokens <= 8
