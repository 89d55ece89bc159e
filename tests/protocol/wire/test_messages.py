"""Messages: each record comes back as it was, and nothing else ever comes out of hostile bytes."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import MISSING, fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import ProtocolError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    HEADER_LIMIT_BYTES,
    PROTOCOL_VERSIONS,
    AskOffer,
    Bye,
    ComputeBatch,
    ComputeStatus,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    decode_header,
    encode_header,
)
from support.examples import examples

EXAMPLES: list[Message] = [
    AskOffer("ab12", "cd34", "0f"),
    Offer(
        *("cuda:1", "A GPU", "cupy-1/sm_90", 1 << 34, 1 << 36, 77, 4, True),
        *((0, 3), (2883584, 3000000), (1e-5, 2e-5), (5e-5, 6e-5), 4096, (1e6, 0.0), 40001),
    ),
    Hello((1, 2), "ab12", "cd34", "ef56", "cpu-1", 1024, "bf16"),
    Progress("load", 3, 48),
    Welcome(2, "00ff", "ab12", "ef56", "cpu-1", "cpu", 40001, 512, 1 << 34, 12345.5, 77, "f16"),
    Refused("model", "this daemon runs another model"),
    Ping(7, "00ff"),
    Pong(7, True, 0.25, 3, 2, 1),
    Bye("00ff"),
    ComputeBatch(9, 47, 2, 2, 56),
    ComputeStatus(9, False, "too many tokens"),
]
EXTENSIBLE = (AskOffer, Offer, Hello, Welcome, Pong)
"""What is read before it is known which version the other side speaks, or may grow."""

BY_KIND: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, (1 << 62) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    tuple[int, ...]: st.lists(st.integers(0, (1 << 62) - 1), max_size=64).map(tuple),
    tuple[float, ...]: st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=64).map(
        tuple
    ),
}


def kinds_of(record: type[Message]) -> dict[str, Any]:
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


def packed(message: Message, **changes: object) -> bytes:
    """The header with some fields replaced."""
    values = msgpack.unpackb(encode_header(message)) | changes
    header: bytes = msgpack.packb(values)
    return header


def refuse(frame: bytes, reason: str) -> ProtocolError:
    """Decoding raises a ProtocolError of one line; a good header is read afterwards."""
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode_header(frame)
    assert len(str(caught.value).splitlines()) == 1
    for example in EXAMPLES:
        assert decode_header(encode_header(example)) == example
    return caught.value


def name_of(message: Message) -> str:
    return type(message).__name__


def test_every_record_has_an_example_here() -> None:
    tags = [example.TYPE for example in EXAMPLES]
    assert len(set(tags)) == len(tags)
    error = refuse(msgpack.packb({"type": "no such record"}), "type")
    assert error.code == "unknown_type"
    assert 2 in PROTOCOL_VERSIONS


@examples(120)
@given(st.data())
def test_records_come_back_as_they_were(data: st.DataObject) -> None:
    record = type(data.draw(st.sampled_from(EXAMPLES)))
    values = {name: data.draw(BY_KIND[kind]) for name, kind in kinds_of(record).items()}
    message = record(**values)
    frame = encode_header(message)
    for received in (frame, memoryview(frame)):
        decoded = decode_header(received)
        assert type(decoded) is record
        assert decoded == message


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_no_field_may_be_missing_and_none_unknown(message: Message) -> None:
    values = msgpack.unpackb(encode_header(message))
    later = {field.name for field in fields(message) if field.default is not MISSING}
    for name in kinds_of(type(message)).keys() - (later if isinstance(message, EXTENSIBLE) else ()):
        fewer = {key: value for key, value in values.items() if key != name}
        refuse(msgpack.packb(fewer), f"{message.TYPE}: .*'{name}'")
    if isinstance(message, EXTENSIBLE):
        return
    refuse(packed(message, odd=1), f"{message.TYPE}: .*'odd'")
    refuse(packed(message, TYPE="x"), "'TYPE'")


@pytest.mark.parametrize(
    "message", [each for each in EXAMPLES if isinstance(each, EXTENSIBLE)], ids=name_of
)
def test_what_may_grow_is_read_whatever_the_other_side_adds_or_lacks(message: Message) -> None:
    assert decode_header(packed(message, odd=[1, {"x": 2}], odder="?")) == message
    later = {f.name: f.default for f in fields(message) if f.default is not MISSING}
    assert isinstance(message, Offer) or later.keys() & {"payload", "num_late", "file_digest"}
    older = msgpack.unpackb(encode_header(message))
    for name in later:
        older.pop(name, None)
    plain = replace(message, **later)
    assert decode_header(msgpack.packb(older)) == plain
    assert msgpack.unpackb(encode_header(plain)) == older


WRONG: dict[Any, list[object]] = {
    int: [-1, 1 << 62, (1 << 64) - 1, -(1 << 63), 1.0, True, "1", b"1", None, [1], {}],
    float: [float("nan"), float("inf"), float("-inf"), 1, True, "1.0", b"", None, [1.0]],
    bool: [0, 1, 1.0, "true", None, [True]],
    str: ["x" * 4097, b"bytes", 1, None, ["x"], {"x": "y"}, msgpack.ExtType(5, b"")],
    tuple[float, ...]: [1.0, None, "1", [1], [True], ["1"], [float("nan")], [[1.0]], [0.5] * 65],
    tuple[int, ...]: [1, None, "12", [-1], [1.0], [True], ["1"], [1 << 62], [[1]], list(range(65))],
}


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_every_field_has_its_type_and_bounds(message: Message) -> None:
    for name, kind in kinds_of(type(message)).items():
        for value in WRONG[kind]:
            with pytest.raises(ProtocolError) as caught:
                decode_header(packed(message, **{name: value}))
            assert name in str(caught.value) or "msgpack" in str(caught.value)
    assert decode_header(encode_header(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",  # never used by msgpack
        b"\x81",  # a map of one, cut short
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa4type\xdd\x7f\xff\xff\xff",
        b"\x91" * 10_000 + b"\xc0",  # lists in lists
        b"\x81\xa1x" * 5_000 + b"\xc0",
        b"\x81\xa4type\xa2\xff\xfe",  # not UTF-8
        b"\x81\xa4type\xd4\x01x",  # extension types
        b"\x81\xa4type\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa4type\xc7\x00\xff",
        b"\x81\x01\xa4ping",  # keys that are no strings
        b"\x81\xc0\xa4ping",
        b"\x81\x91\x01\xa4ping",
        b"\xde\x00\x41" + b"".join(b"\xa2" + f"{i:02}".encode() + b"\xc0" for i in range(65)),
    ],
)
def test_what_is_not_msgpack_within_our_limits_is_refused(frame: bytes) -> None:
    tracemalloc.start()
    try:
        refuse(frame, "msgpack")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_bytes_after_the_header_are_refused() -> None:
    refuse(encode_header(EXAMPLES[0]) + b"\xc0", "msgpack")


@pytest.mark.parametrize("value", [None, 5, "hello", [], [["type", "ping"]], True, 1.5])
def test_a_header_that_is_no_map_is_refused(value: object) -> None:
    refuse(msgpack.packb(value), "map")


@pytest.mark.parametrize("tag", [None, 5, b"ping", [], {}, "", "PING", "message", "x" * 4000])
def test_an_unknown_type_is_refused_under_a_code_of_its_own(tag: object) -> None:
    error = refuse(msgpack.packb({"type": tag, "sequence": 1}), "type")
    assert error.code == "unknown_type"
    assert len(str(error)) < 100


def test_a_key_of_bytes_is_an_unknown_field() -> None:
    refuse(msgpack.packb({"type": "bye", b"link_id": "x"}), "bye: .*fields")


def test_a_key_cannot_break_the_line_of_its_error() -> None:
    refuse(packed(EXAMPLES[6], **{"o\nd\x1bd": 1}), r"'o\\nd\\x1bd'")


def test_a_header_longer_than_the_limit_is_not_even_parsed() -> None:
    longest = packed(Bye("x"), link_id="x" * 4096)
    assert decode_header(longest) == Bye("x" * 4096)
    refuse(longest + b" " * (HEADER_LIMIT_BYTES + 1 - len(longest)), "16384")


def test_a_reason_that_quotes_an_undecodable_file_name_still_travels() -> None:
    reason = "loading failed: /models/\udcff.gguf: damaged"
    received = decode_header(encode_header(Refused("internal", reason)))
    assert received == Refused("internal", "loading failed: /models/?.gguf: damaged")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@examples(120)
@given(st.sampled_from(EXAMPLES), st.data())
def test_any_value_in_any_field_is_right_or_refused(message: Message, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["type", *kinds_of(type(message))]))
    value = data.draw(ANYTHING)
    try:
        decoded = decode_header(packed(message, **{name: value}))
    except ProtocolError:
        return
    assert type(decoded) is type(message)
    found = getattr(decoded, name) if name != "type" else decoded.TYPE
    assert found == (tuple(value) if isinstance(value, list) else value)


@examples(150)
@given(st.binary(max_size=64) | ANYTHING.map(msgpack.packb))
def test_any_bytes_are_a_record_or_refused(frame: bytes) -> None:
    try:
        decode_header(frame)
    except ProtocolError as error:
        reason = str(error)
        assert len(reason.splitlines()) == 1


OWNED = OwnedExperts.from_lists({0: [3, 0, 1], 2: [2]})


def fuzz_corpus() -> list[list[bytes]]:
    messages = [[encode_header(each)] for each in EXAMPLES]
    messages[0].append(OWNED.canonical_bytes)
    return messages


def mutate(source: random.Random, frames: list[bytes], corpus: list[list[bytes]]) -> list[bytes]:
    """One to four small accidents."""
    frames = list(frames)
    for _ in range(source.randint(1, 4)):
        index = source.randrange(len(frames))
        frame = bytearray(frames[index])
        place = source.randrange(len(frame) + 1)
        match source.randrange(8):
            case 0 if frame:
                frame[place % len(frame)] ^= 1 << source.randrange(8)
            case 1 if frame:
                frame[place % len(frame)] = source.choice((0x00, 0x7F, 0x80, 0xC1, 0xCF, 0xFF))
            case 2:
                frame[place:place] = source.randbytes(source.randint(1, 9))
            case 3:
                del frame[place : place + source.randint(1, 9)]
            case 4:
                del frame[place:]
            case 5:
                other = source.choice(source.choice(corpus))
                frame[place:] = other[min(place, len(other)) :]
            case 6:
                frames.insert(index, bytes(frame))
            case _:
                frames.append(source.choice(source.choice(corpus)))
        frames[index] = bytes(frame)
    return frames


def receive(frames: list[bytes]) -> None:
    """Everything that either side does with a message before it trusts it."""
    message = decode_header(frames[0])
    rest = [memoryview(frame) for frame in frames[1:]]
    match message:
        case Hello():
            for frame in rest:
                OwnedExperts.from_bytes(frame, {0: 4, 2: 3})


def fuzz(seed: int, rounds: int) -> None:
    source, corpus = random.Random(seed), fuzz_corpus()
    refused = 0
    for _ in range(rounds):
        frames = mutate(source, source.choice(corpus), corpus)
        try:
            receive(frames)
        except ProtocolError as error:
            refused += 1
            reason = str(error)
            assert len(reason.splitlines()) == 1, frames
    assert 0.5 * rounds < refused < rounds
    for frames in corpus:
        receive(frames)


def test_only_protocol_errors_come_out_of_mutated_messages() -> None:
    fuzz(seed=2026, rounds=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_only_protocol_errors_come_out_of_very_many_mutated_messages(seed: int) -> None:
    fuzz(seed, rounds=100_000)
