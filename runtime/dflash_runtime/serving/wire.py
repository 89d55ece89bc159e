"""How chunks of a stream are written: server-sent events, with names or without, or JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dflash_protocol.process.output import readable_json

Chunk: TypeAlias = dict[str, Any]
"""One object of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The form of a stream."""

    media_type: str
    encoded: Callable[[Chunk], bytes]
    """The bytes of a chunk. Raises: ValueError for NaN or infinity, which JSON lacks."""
    end: bytes = b""
    """Follows the last chunk, unless that is an error."""
    keep_alive: bytes = b": still here\n\n"
    """Sent when nothing else was for a while; clients skip it."""

    def bytes_of(self, chunks: Sequence[Chunk]) -> bytes:
        """The bytes of chunks. Raises: ValueError for NaN or infinity."""
        return b"".join(map(self.encoded, chunks))


def _json(chunk: Chunk) -> bytes:
    return readable_json(chunk).encode()


def _event(chunk: Chunk) -> bytes:
    return b"data: " + _json(chunk) + b"\n\n"


def _named_event(chunk: Chunk) -> bytes:
    return b"event: " + str(chunk["type"]).encode() + b"\n" + _event(chunk)


_EVENT_STREAM = "text/event-stream; charset=utf-8"

EVENTS = Wire(media_type=_EVENT_STREAM, encoded=_event)
"""Server-sent events."""

EVENTS_UNTIL_DONE = Wire(media_type=_EVENT_STREAM, encoded=_event, end=b"data: [DONE]\n\n")
"""The same with OpenAI's end."""

NAMED_EVENTS = Wire(media_type=_EVENT_STREAM, encoded=_named_event)
"""Server-sent events with names: the ``type`` of each chunk."""

# Space before a line's object is nothing to a JSON parser, where an empty line would be an error.
JSON_LINES = Wire(
    media_type="application/x-ndjson",
    encoded=lambda chunk: _json(chunk) + b"\n",
    keep_alive=b" ",
)
"""A JSON object a line."""
