"""Messages between a program and its process that renders chat templates.

A message is its length, four bytes little-endian, and msgpack: a request is a map, a reply a list
of two texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from struct import Struct
from typing import Any

import msgpack

from dflash_protocol.errors import ProtocolError, SettingsError

LENGTH = Struct("<I")
"""Prefix of each message: its length in bytes."""
READY = b"R"
"""Written once, before any reply."""
LATE_S = 1.0
"""CPU time, and wall time, that a rendering has beyond its deadline."""
MAX_REQUEST_BYTES = 128 << 20
_LONGEST_S = 3600.0
_LARGE_INT = 1
"""Code of our msgpack extension for integers beyond 64 bits, which JSON may have."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What `chat.render_chat` renders. `messages` and `extra` are JSON values."""

    template: str
    messages: Sequence[Any]
    bos_token: str = ""
    eos_token: str = ""
    add_generation_prompt: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The template's other variables: ``tools``, ``enable_thinking``, …"""
    now: datetime = field(default_factory=datetime.now)
    """The template's current time."""
    deadline_s: float = 5.0


class ReplyKind(StrEnum):
    """The kind of a reply's text."""

    TEXT = "text"
    """The rendered conversation."""
    REFUSED = "refused"
    """Why the template, or a limit, refuses these messages."""
    FAILED = "failed"
    """Why the template cannot be used."""


def max_reply_bytes(request_bytes: int) -> int:
    """Maximum size of the reply to a request: the longest text that `chat_sandbox` allows, at four
    bytes a character."""
    return (4 << 20) + 16 * request_bytes


def encode_request(request: ChatRequest) -> bytes:
    """Encode a request, with its length prefix.

    Raises: SettingsError if it is too large, or has values that JSON cannot have.
    """
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    values |= {"now": request.now.isoformat(), "deadline_s": float(request.deadline_s)}
    try:
        body: bytes = msgpack.packb(values, default=_packable, unicode_errors="surrogatepass")
    except ValueError:
        raise SettingsError("the messages cannot be rendered: nested too deeply") from None
    except (TypeError, OverflowError) as error:
        raise SettingsError(f"the messages cannot be rendered: {error}") from None
    if len(body) > MAX_REQUEST_BYTES:
        raise SettingsError(
            f"the messages cannot be rendered: they are larger than {MAX_REQUEST_BYTES >> 20} MiB"
        )
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes | bytearray) -> ChatRequest:
    """Raises: ProtocolError."""
    values = _unpacked(body, strict_map_key=False, ext_hook=_large_int)
    if not isinstance(values, dict) or values.keys() != _KINDS.keys():
        raise ProtocolError("a request to render has other fields")
    for name, kind in _KINDS.items():
        if type(values[name]) is not kind:
            raise ProtocolError(f"a request to render: field {name} has a wrong type")
    if not all(type(name) is str for name in values["extra"]):
        raise ProtocolError("a request to render: a variable's name is not text")
    if not 0 < values["deadline_s"] <= _LONGEST_S:
        raise ProtocolError("a request to render: its deadline is out of bounds")
    try:
        values["now"] = datetime.fromisoformat(values["now"])
    except ValueError:
        raise ProtocolError("a request to render: field now is not a time") from None
    return ChatRequest(**values)


_KINDS: Mapping[str, type] = {
    "template": str,
    "messages": list,
    "bos_token": str,
    "eos_token": str,
    "add_generation_prompt": bool,
    "extra": dict,
    "now": str,
    "deadline_s": float,
}


def encode_reply(kind: ReplyKind, text: str) -> bytes:
    """A reply's message, its length first."""
    body: bytes = msgpack.packb([kind.value, text], unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def decode_reply(body: bytes | bytearray) -> tuple[ReplyKind, str]:
    """Raises: ProtocolError."""
    values = _unpacked(body, max_array_len=2, max_map_len=0, max_bin_len=0, max_ext_len=0)
    match values:
        case [("text" | "refused" | "failed") as kind, str(text)]:
            return ReplyKind(kind), text
    raise ProtocolError("an answer of the process that renders is damaged")


def _unpacked(body: bytes | bytearray, **options: Any) -> Any:
    try:
        return msgpack.unpackb(body, raw=False, unicode_errors="surrogatepass", **options)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        # A map's key may be of a kind that no dict can have.
        raise ProtocolError("a message about rendering is not msgpack within our limits") from error


def _packable(value: object) -> object:
    """Convert a value that msgpack cannot encode."""
    if isinstance(value, int):
        return msgpack.ExtType(
            _LARGE_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        )
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"they hold a {type(value).__name__}, which JSON cannot")


def _large_int(code: int, data: bytes) -> int:
    if code != _LARGE_INT:
        raise ValueError(f"extension {code}")
    return int.from_bytes(data, "little", signed=True)
