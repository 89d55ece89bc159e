"""Messages about rendering: what goes through as it was, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from datetime import datetime
from typing import Any

import msgpack
import pytest

from dflash_adapters.text.chat_messages import (
    LENGTH,
    MAX_REQUEST_BYTES,
    ChatRequest,
    ReplyKind,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    max_reply_bytes,
)
from dflash_protocol.errors import ProtocolError, SettingsError

NOW = datetime(2025, 2, 3, 4, 5, 6, 7)


def body_of(message: bytes) -> bytes:
    (num_bytes,) = LENGTH.unpack_from(message)
    assert num_bytes == len(message) - LENGTH.size
    return message[LENGTH.size :]


def through(value: Any) -> Any:
    request = ChatRequest("{{ x }}", [value], extra={"x": value}, now=NOW, deadline_s=1.5)
    read = decode_request(body_of(encode_request(request)))
    assert (read.template, read.now, read.deadline_s) == ("{{ x }}", NOW, 1.5)
    assert read.extra["x"] == read.messages[0]
    return read.messages[0]


@pytest.mark.parametrize(
    "value",
    [
        *("", "é😀", "\ud800 alone", "\0", None, True, 0, -1, 2**63, 2**64, -(2**63) - 1, 10**4000),
        *(1.5, float("inf"), [], [[1], {}], {"a": {"b": [None]}}, {1: 2}),
    ],
)
def test_what_json_can_hold_arrives_as_it_was(value: Any) -> None:
    read = through(value)
    assert read == value
    assert type(read) is type(value)


def test_maps_and_lists_of_other_kinds_arrive_as_plain_ones_in_their_order() -> None:
    read = through(OrderedDict(b=1, a=(2, UserDict(c=3))))
    assert read == {"b": 1, "a": [2, {"c": 3}]}
    assert list(read) == ["b", "a"]


def test_what_cannot_be_sent_is_the_callers_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: list[Any] = []
    for _ in range(1100):
        nested = [nested]
    with pytest.raises(SettingsError, match="nested"):
        through(nested)
    with pytest.raises(SettingsError, match=r"\bset\b.*JSON"):
        through({1})
    monkeypatch.setattr("dflash_adapters.text.chat_messages.MAX_REQUEST_BYTES", 1 << 20)
    with pytest.raises(SettingsError, match="1 MiB"):
        through("a" * (1 << 20))
    assert MAX_REQUEST_BYTES <= 1 << 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("template", 1),
        ("template", b"x"),
        ("messages", {}),
        ("messages", None),
        ("extra", []),
        ("extra", {1: 2}),
        ("add_generation_prompt", 1),
        ("now", "yesterday"),
        ("now", 5),
        ("deadline_s", 5),
        ("deadline_s", 0.0),
        ("deadline_s", float("inf")),
        ("deadline_s", float("nan")),
        ("another", 1),
    ],
)
def test_a_request_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    values = msgpack.unpackb(body_of(encode_request(ChatRequest("x", []))))
    with pytest.raises(ProtocolError):
        decode_request(msgpack.packb(values | {field: value}))
    values.pop(field, None)
    if field != "another":
        with pytest.raises(ProtocolError, match="fields"):
            decode_request(msgpack.packb(values))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x81\x90\x01", b"\xc7\x01\x07x"],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(body)
    with pytest.raises(ProtocolError):
        decode_reply(body)


@pytest.mark.parametrize("kind", ReplyKind)
@pytest.mark.parametrize("text", ["", "a\nb é😀", "\udfff"])
def test_a_reply_arrives_as_it_was(kind: ReplyKind, text: str) -> None:
    assert decode_reply(body_of(encode_reply(kind, text))) == (kind, text)


@pytest.mark.parametrize(
    "values",
    [
        *([], ["text"], ["text", "a", "b"], ["other", "a"], ["text", b"a"], ["text", 1]),
        *({"text": "a"}, ["text", ["a"]], "text", 5, None, [["text", "a"]]),
    ],
)
def test_a_damaged_reply_is_refused(values: object) -> None:
    with pytest.raises(ProtocolError):
        decode_reply(msgpack.packb(values))


def test_the_bound_of_a_reply_grows_with_what_was_asked() -> None:
    assert max_reply_bytes(0) >= 4 * (1 << 20)
    assert max_reply_bytes(1 << 20) - max_reply_bytes(0) >= 4 * 4 * (1 << 20)
