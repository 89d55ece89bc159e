"""The layout of a ring: sizes follow from the shape, and nothing overlaps."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape

shapes = st.builds(
    RingShape,
    num_slots=st.integers(1, ring.MAX_SLOTS),
    max_tokens=st.integers(1, 300),
    hidden_size=st.integers(1, 300),
    max_pairs=st.integers(1, 2000),
)


def test_words_and_flags_of_the_two_sides_share_no_cache_lines() -> None:
    words_bytes = 8 * ring.MAX_SLOTS
    regions = [
        (ring.FACTS_AT, struct.calcsize(ring.FACTS_FORMAT)),
        (ring.CLIENT_NONCE_AT, ring.NONCE_BYTES),
        (ring.SERVER_NONCE_AT, ring.NONCE_BYTES),
        (ring.REQUEST_WORDS_AT, words_bytes),
        (ring.CLIENT_SLEEPS_AT, 8),
        (ring.REPLY_WORDS_AT, words_bytes),
        (ring.SERVER_SLEEPS_AT, 8),
        (ring.SLOTS_AT, 0),
    ]
    for (at, size), (following, _) in itertools.pairwise(regions):
        assert at % ring.LINE_BYTES == 0
        assert at + size <= following // ring.LINE_BYTES * ring.LINE_BYTES


@given(shapes)
def test_slots_follow_one_another_and_hold_the_largest_message(shape: RingShape) -> None:
    places = [
        *((shape.request_slot_at(n), shape.request_slot_bytes) for n in range(shape.num_slots)),
        *((shape.reply_slot_at(n), shape.reply_slot_bytes) for n in range(shape.num_slots)),
    ]
    ends = [at + size for at, size in places]
    assert [at for at, _ in places] == [ring.SLOTS_AT, *ends[:-1]]
    assert ends[-1] == shape.segment_bytes
    assert all(at % ring.PAGE_BYTES == 0 for at, _ in places)
    pairs_bytes = 4 * shape.max_pairs
    arrays = (4 * shape.max_tokens * shape.hidden_size, pairs_bytes, pairs_bytes + 4, pairs_bytes)
    begin = ring.HEADER_BYTES + sum((size + 63) // 64 * 64 for size in arrays)
    assert shape.request_slot_bytes >= begin + pairs_bytes
    sums_bytes = 8 * shape.max_tokens * shape.hidden_size
    assert shape.reply_slot_bytes >= ring.HEADER_BYTES + max(sums_bytes, ring.FAILURE_LIMIT_BYTES)


def test_a_header_has_its_words_where_they_are_drawn() -> None:
    header = struct.Struct("<9q2d5q")
    assert header.size == ring.HEADER_BYTES
    values = [0] * ring.HEADER_WORDS
    values[ring.SEQUENCE], values[ring.CHECKSUM] = 7, 9
    times = {ring.TIME: 0.5, ring.OTHER_TIME: 0.25}
    packed = header.pack(*(times.get(index, value) for index, value in enumerate(values)))
    assert struct.unpack_from("<q", packed, 8 * ring.SEQUENCE) == (7,)
    assert struct.unpack_from("<q", packed, 8 * ring.CHECKSUM) == (9,)
    assert struct.unpack_from("<2d", packed, 8 * ring.TIME) == (0.5, 0.25)


def test_facts_tell_shapes_and_generations_apart() -> None:
    shape = RingShape(2, 3, 4, 5)
    others = [RingShape(1, 3, 4, 5), RingShape(2, 4, 4, 5), RingShape(2, 3, 5, 5)]
    facts = {each.facts(1) for each in [shape, *others, RingShape(2, 3, 4, 6)]}
    assert len(facts | {shape.facts(2)}) == 6
    struct.pack(ring.FACTS_FORMAT, *shape.facts(ring.SEQUENCE_LIMIT - 1))


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((0, 1, 1, 1), "0 slots"),
        ((17, 1, 1, 1), "17 slots"),
        ((1, 0, 1, 1), "no tokens"),
        ((1, 1, 0, 1), "no tokens"),
        ((1, 1, 1, -1), "no tokens"),
        ((1, 1 << 40, 1 << 40, 1), "segment"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(counts: tuple[int, int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RingShape(*counts)
