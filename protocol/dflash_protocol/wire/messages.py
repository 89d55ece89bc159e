"""Messages between parent and daemon: one typed record each, with a msgpack header.

A header is a msgpack map of a record's fields and its ``type``. Every field is checked for
presence, type and bounds when read; nothing is ever unpickled or evaluated. Knows nothing of
sockets.

Two families, on two sockets:

==========  ==========================================================================
control     Hello → Progress* → Welcome | Refused;  Attach → Attached | Refused;
            Ping → Pong;  Bye
data        ExpertRequest → sums or failure: `requests` has their form on the wire
data, v. 1  ComputeBatch → ComputeStatus: `version1`
==========  ==========================================================================

Hello and Welcome are how versions are agreed upon, so both sides read them before they know what
the other one is: fields they do not know are passed over, and later fields have defaults. So it is
with Pong, in which a daemon may come to say more, and with Attach and Attached. A later field at
its default is not sent, so that a peer which knows no such field, and is strict about it, reads the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_type_hints

import msgpack

from dflash_protocol.errors import ProtocolError

PROTOCOL_VERSIONS = (1, 2)
"""Versions this build speaks, best last. Version 1 is the older shape with global ids."""

HEADER_LIMIT_BYTES = 16 << 10
_TEXT_LIMIT = 4096
_INT_LIMIT = 1 << 62

Frames: TypeAlias = list[bytes | bytearray | memoryview]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all records; ``TYPE`` is the tag on the wire."""

    TYPE: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Parent → daemon: what the parent runs and what it wants this daemon to hold.

    Frame 1: the owner's experts (OwnedExperts.canonical_bytes). `payload` is the type that the
    parent would like rows and sums to travel in (`payloads.NEGOTIABLE`). ``nonce`` chooses blocks
    of the weights that both sides hash (`weight_blocks`); empty: nothing is asked. ``file_stamp``
    is that of the parent's files (`weight_check`), ``file_digest`` that of all their bytes, empty
    while it is not known; all three in hexadecimal digits.
    """

    TYPE: ClassVar[str] = "hello"
    versions: tuple[int, ...]
    model_identity: str
    moe_digest: str
    placement_fingerprint: str
    numeric_class: str
    max_tokens: int
    payload: str = "f32"
    nonce: str = ""
    file_stamp: str = ""
    file_digest: str = ""


COMPARING = "compare"
"""Stage of a Progress: blocks of weights will be compared, and the parent can hash its own now."""


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Daemon → parent: still busy getting ready; expires nobody's timeout."""

    TYPE: ClassVar[str] = "progress"
    stage: str
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Daemon → parent: ready. ``link_id`` names the parent's data socket from now on.

    ``data_port`` is 0 for ipc endpoints, whose data socket lies beside the control socket.
    ``pairs_per_second`` was measured while warming up. Every message of the link carries
    ``generation``; no other link has it. ``payload`` is the wished type if the daemon knows it.
    ``can_share``: the parent may offer memory to share, see Attach. ``can_move``: a device here can
    read and write that by itself. ``mail_bytes``: what a mailbox of the model takes here; 0: none.
    ``file_stamp`` and ``file_digest`` are those of the daemon's files, as in Hello;
    ``blocks_digest`` is that of the blocks that the nonce has chosen; empty if stamps are equal.
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
    generation: int = 0
    payload: str = "f32"
    can_share: bool = False
    can_move: bool = False
    mail_bytes: int = 0
    file_stamp: str = ""
    blocks_digest: str = ""
    file_digest: str = ""


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """Parent → daemon: memory to share, by its name in the folder of the endpoint's socket.

    Its shape is `ring.RingShape` of these counts and the model's width. ``nonce``: what is written
    in it, as hexadecimal digits, so that the daemon can see that it has the same memory.
    ``moves``: a device of the parent will move payload; one of the daemon is to do so too.
    ``mail_bytes``: there is a mailbox behind the slots, for which it must move; 0: none.
    """

    TYPE: ClassVar[str] = "attach"
    link_id: str
    name: str
    num_slots: int
    max_tokens: int
    max_pairs: int
    nonce: str
    moves: bool = False
    mail_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Attached(Message):
    """Daemon → parent: requests may come through that memory now. ``nonce``: our answer in it.
    ``moves``: as Attach says, and as it was wished. ``mails``: the mailbox is being made ready."""

    TYPE: ClassVar[str] = "attached"
    link_id: str
    nonce: str
    moves: bool = False
    mails: bool = False


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

    ``known`` is false if the daemon has forgotten the link: the parent must say Hello again. The
    daemon's own counters, of all its links since it started: requests that it dropped since their
    deadline had passed before they were begun (``num_late``), messages of another link, repeated or
    out of order (``num_stale``), messages that were damaged (``num_checksum_failures``).
    ``file_digest`` as in Welcome: it may become known later.
    """

    TYPE: ClassVar[str] = "pong"
    sequence: int
    known: bool
    busy_s: float
    num_late: int = 0
    num_stale: int = 0
    num_checksum_failures: int = 0
    file_digest: str = ""


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """Parent → daemon: forget this link."""

    TYPE: ClassVar[str] = "bye"
    link_id: str


@dataclass(slots=True)
class ExpertRequest:
    """Parent → daemon: one layer's pairs, by local expert ids. `requests` and the transports have
    forms of their own for it on the wire.

    ``payload`` is the type of the hidden rows. ``deadline_ms`` runs from the request's arrival;
    ``sent_s`` is the sender's own clock, which tells only how requests lie apart.
    """

    # Not frozen, as that would cost every request some µs.
    sequence: int
    layer_id: int
    num_tokens: int
    num_groups: int
    num_pairs: int
    phase: str
    payload: str
    deadline_ms: float
    generation: int = 0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeBatch(Message):
    """Parent → daemon, version 1: one layer's pairs as a rectangle, by global expert ids.

    Frame 1, without gaps: input [T, H] float32, ids [T, S] int32, weights [T, S] float32.
    """

    TYPE: ClassVar[str] = "compute_batch"
    sequence: int
    layer_id: int
    num_tokens: int
    num_selected: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class ComputeStatus(Message):
    """Daemon → parent, version 1: done, or why not. Frame 1 if done: sums [T, H] float32."""

    TYPE: ClassVar[str] = "compute_status"
    sequence: int
    is_done: bool
    reason: str


_RECORDS: dict[str, type[Message]] = {
    record.TYPE: record
    for record in (
        Hello, Progress, Welcome, Refused, Attach, Attached, Ping, Pong, Bye,
        ComputeBatch, ComputeStatus,
    )
}  # fmt: skip
_EXTENSIBLE = (Hello, Welcome, Attach, Attached, Pong)


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
_DEFAULTS: dict[type[Message], dict[str, Any]] = {
    record: {field.name: field.default for field in fields(record) if field.default is not MISSING}
    for record in _EXTENSIBLE
}


def encode_header(message: Message) -> bytes:
    """A message's header."""
    record = type(message)
    values = {name: getattr(message, name) for name in _FIELDS[record]}
    for name, default in _DEFAULTS.get(record, {}).items():
        if values[name] == default:
            del values[name]
    values["type"] = message.TYPE
    # Reasons may quote file names, which need not be valid text; the peer would refuse them.
    header: bytes = msgpack.packb(values, unicode_errors="replace")
    return header


def decode_header(frame: bytes | memoryview) -> Message:
    """Read a message's header.

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
    if record in _DEFAULTS:
        known = {name: value for name, value in values.items() if name in expected}
        values = _DEFAULTS[record] | known
    if values.keys() != expected.keys():
        odd = sorted(map(ascii, values.keys() ^ expected.keys()))
        raise ProtocolError(f"{record.TYPE}: fields missing or unknown: {', '.join(odd)[:200]}")
    for name, kind in expected.items():
        if not _CHECKS[kind](values[name]):
            raise ProtocolError(f"{record.TYPE}: field {name} has a wrong type or value")
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
    return record(**values)
