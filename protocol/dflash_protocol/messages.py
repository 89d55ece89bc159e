"""Messages between parent and daemon: one typed record each, a msgpack header plus raw frames.

A message on the wire is a list of frames: the first is a msgpack map of the record's fields and its
``type``; the rest are raw little-endian arrays whose shapes follow from the header's counts. Every
field is checked for presence, type and bounds when read; nothing is ever unpickled or evaluated.
Knows nothing of sockets.

Two families, on two sockets:

========  ==========================================================================
control   Hello → Progress* → Welcome | Refused;  Ping → Pong;  Bye
data      ExpertRequest → ExpertReply | RequestFailed
========  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_type_hints

import msgpack
import numpy as np

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.routed_batch import RoutedBatch

PROTOCOL_VERSIONS = (2,)
"""Versions this build speaks, best last. Version 1 is the older shape with global ids."""

HEADER_LIMIT_BYTES = 16 << 10
_TEXT_LIMIT = 4096
_INT_LIMIT = 1 << 62

Frames: TypeAlias = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all records; ``TYPE`` is the tag on the wire."""

    TYPE: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Parent → daemon: what the parent runs and what it wants this daemon to hold.

    Frame 1: the owner's experts (OwnedExperts.canonical_bytes).
    """

    TYPE: ClassVar[str] = "hello"
    versions: tuple[int, ...]
    model_identity: str
    moe_digest: str
    placement_fingerprint: str
    numeric_class: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Daemon → parent: still busy getting ready; expires nobody's patience."""

    TYPE: ClassVar[str] = "progress"
    stage: str
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Daemon → parent: ready. ``link_id`` names the parent's data socket from now on.

    ``data_port`` is 0 for ipc endpoints, whose data socket lies beside the control socket.
    ``pairs_per_second`` was measured while warming up.
    """

    TYPE: ClassVar[str] = "welcome"
    version: int
    link_id: str
    model_identity: str
    placement_fingerprint: str
    numeric_class: str
    device: str
    data_port: int
    max_tokens: int
    free_memory_bytes: int
    pairs_per_second: float


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """Daemon → parent: no, and why. ``code`` is for programs, ``reason`` for people."""

    TYPE: ClassVar[str] = "refused"
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Parent → daemon: are you there?"""

    TYPE: ClassVar[str] = "ping"
    sequence: int
    link_id: str


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Daemon → parent: yes; the compute thread has spent ``busy_s`` on its present request.

    ``known`` is false if the daemon has forgotten the link: the parent must say Hello again.
    """

    TYPE: ClassVar[str] = "pong"
    sequence: int
    known: bool
    busy_s: float


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """Parent → daemon: forget this link."""

    TYPE: ClassVar[str] = "bye"
    link_id: str


@dataclass(frozen=True, slots=True)
class ExpertRequest(Message):
    """Parent → daemon: one layer's pairs. Frames: hidden, routing (int32), weights.

    routing = expert_ids [G] ‖ group_starts [G+1] ‖ token_indices [P]; ids are local ids.
    """

    TYPE: ClassVar[str] = "request"
    sequence: int
    layer_id: int
    num_tokens: int
    num_groups: int
    num_pairs: int
    phase: str
    payload: str
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class ExpertReply(Message):
    """Daemon → parent: weighted sums. Frame 1: float64 [T, H]."""

    TYPE: ClassVar[str] = "reply"
    sequence: int
    num_tokens: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed(Message):
    """Daemon → parent: this request was not computed."""

    TYPE: ClassVar[str] = "failed"
    sequence: int
    code: str
    reason: str


_RECORDS: dict[str, type[Message]] = {
    record.TYPE: record
    for record in (
        Hello, Progress, Welcome, Refused, Ping, Pong, Bye,
        ExpertRequest, ExpertReply, RequestFailed,
    )
}  # fmt: skip


def _is_int(value: object) -> bool:
    return type(value) is int and 0 <= value < _INT_LIMIT


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: _is_int,
    float: lambda value: type(value) is float and math.isfinite(value),
    bool: lambda value: type(value) is bool,
    str: lambda value: type(value) is str and len(value) <= _TEXT_LIMIT,
    tuple[int, ...]: lambda value: (
        type(value) is list and len(value) <= 64 and all(map(_is_int, value))
    ),
}
_FIELDS: dict[type[Message], dict[str, Any]] = {
    record: {field.name: get_type_hints(record)[field.name] for field in fields(record)}
    for record in _RECORDS.values()
}


def encode_header(message: Message) -> bytes:
    """The first frame of a message."""
    values = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    values["type"] = message.TYPE
    # Reasons may quote file names, which need not be valid text; the peer would refuse them.
    header: bytes = msgpack.packb(values, unicode_errors="replace")
    return header


def decode_header(frame: bytes | memoryview) -> Message:
    """Read the first frame of a message.

    Raises: ProtocolError if it is too long, not a known record, or a field is missing, unknown, of
    the wrong type or out of bounds.
    """
    if len(frame) > HEADER_LIMIT_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes is longer than {HEADER_LIMIT_BYTES}")
    try:
        values = msgpack.unpackb(
            frame, raw=False, strict_map_key=True, max_map_len=64, max_array_len=64, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError("header is not msgpack within our limits") from error
    if not isinstance(values, dict):
        raise ProtocolError("header is not a map")
    tag = values.pop("type", None)
    record = _RECORDS.get(tag) if isinstance(tag, str) else None
    if record is None:
        shown = repr(tag[:40]) if isinstance(tag, str) else type(tag).__name__
        raise ProtocolError(f"unknown message type {shown}", code="unknown_type")
    expected = _FIELDS[record]
    if values.keys() != expected.keys():
        odd = sorted(map(ascii, values.keys() ^ expected.keys()))
        raise ProtocolError(f"{record.TYPE}: fields missing or unknown: {', '.join(odd)[:200]}")
    for name, kind in expected.items():
        if not _CHECKS[kind](values[name]):
            raise ProtocolError(f"{record.TYPE}: field {name} has a wrong type or value")
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
    return record(**values)


def encode_request(
    batch: RoutedBatch, *, sequence: int, layer_id: int, deadline_s: float
) -> Frames:
    """Frames of one request. The arrays of `batch` are sent as they are, not copied."""
    header = ExpertRequest(
        sequence=sequence,
        layer_id=layer_id,
        num_tokens=batch.num_tokens,
        num_groups=batch.num_groups,
        num_pairs=batch.num_pairs,
        phase=batch.phase.value,
        payload="f32",
        deadline_ms=deadline_s * 1e3,
    )
    routing = np.concatenate((batch.expert_ids, batch.group_starts, batch.token_indices))
    return [encode_header(header), batch.hidden.data, routing.data, batch.weights.data]


def decode_request(
    header: ExpertRequest,
    frames: list[memoryview],
    *,
    hidden_size: int,
    max_tokens: int,
    max_experts_used: int,
) -> RoutedBatch:
    """The batch of a request whose counts and frame sizes fit each other and the link's capacity:
    at most `max_tokens` tokens, and for each of them at most `max_experts_used` pairs.

    Ids are not checked here: only the receiver knows how many experts it has (RoutedBatch.check).
    Raises: ProtocolError before anything is allocated.
    """
    num_tokens, num_groups, num_pairs = header.num_tokens, header.num_groups, header.num_pairs
    if num_tokens > max_tokens:
        raise ProtocolError(
            f"{num_tokens} tokens exceed the capacity of {max_tokens}", code="capacity"
        )
    if num_groups > num_pairs:
        raise ProtocolError("more groups than pairs")
    if header.payload != "f32":
        raise ProtocolError(f"payload type {header.payload[:20]!r} was not negotiated")
    try:
        phase = Phase(header.phase)
    except ValueError:
        raise ProtocolError(f"unknown phase {header.phase[:20]!r}") from None
    # Counts are below 2^62 and Python's integers do not wrap, so these products are exact.
    expected = (4 * num_tokens * hidden_size, 4 * (2 * num_groups + 1 + num_pairs), 4 * num_pairs)
    sizes = tuple(len(frame) for frame in frames)
    if sizes != expected:
        raise ProtocolError(f"frames of {sizes} bytes, header says {expected}")
    if num_pairs > num_tokens * max_experts_used:
        raise ProtocolError(f"{num_pairs} pairs are too many for {num_tokens} tokens")
    routing = np.frombuffer(frames[1], dtype="<i4")
    return RoutedBatch(
        phase=phase,
        hidden=np.frombuffer(frames[0], dtype="<f4").reshape(num_tokens, hidden_size),
        expert_ids=routing[:num_groups],
        group_starts=routing[num_groups : 2 * num_groups + 1],
        token_indices=routing[2 * num_groups + 1 :],
        weights=np.frombuffer(frames[2], dtype="<f4"),
    )


def decode_reply(
    header: ExpertReply, frames: list[memoryview], *, num_tokens: int, hidden_size: int
) -> F64Array:
    """The sums of a reply, a view into its frame. Shapes: result [T, H] float64.

    Raises: ProtocolError if the reply is not of the shape that was asked for.
    """
    if header.num_tokens != num_tokens or [len(f) for f in frames] != [
        8 * num_tokens * hidden_size
    ]:
        raise ProtocolError("the reply has not the shape of its request")
    return np.frombuffer(frames[0], dtype="<f8").reshape(num_tokens, hidden_size)
