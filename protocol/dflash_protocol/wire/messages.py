"""Control messages between parent and daemon: a frozen dataclass each, encoded as msgpack.

A header is a msgpack map of the record's fields and its ``type``. Every field is checked for
presence, type and bounds when read; nothing is ever unpickled or evaluated.

Two families, on two sockets:

==========  ==========================================================================
control     AskOffer → Progress* → Offer | Refused;
            Hello → Progress* → Welcome | Refused;  Attach → Attached | Refused;
            Ping → Pong;  Bye
data        ExpertRequest → sums or failure; wire format in `requests`
data, v. 1  ComputeBatch → ComputeStatus; wire format in `version1`
==========  ==========================================================================

Hello and Welcome negotiate the version, so each side reads them before it knows the other's:
unknown fields are ignored, and fields added later have defaults. The same holds for AskOffer,
Offer, Pong, Attach and Attached. A field at its default is not sent, so that an older peer, which
may be strict, reads the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_type_hints

import msgpack

from dflash_protocol.errors import ProtocolError

PROTOCOL_VERSIONS = (1, 2)
"""Versions this build speaks, best last. Version 1 is the older one, with global expert ids."""

HEADER_LIMIT_BYTES = 16 << 10
MOST_ITEMS = 64
"""Longest list in a header."""
_TEXT_LIMIT = 4096
_INT_LIMIT = 1 << 62

Frames: TypeAlias = list[bytes | bytearray | memoryview]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all records; ``TYPE`` is the tag on the wire."""

    TYPE: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class AskOffer(Message):
    """Parent → daemon: what does it have for the parent's model? Comes before any Hello.

    The parent sends a Ping right behind it. A daemon answers the question first, at least with
    Progress; an older one, which does not know it, with Refused of code ``unknown_type``, or not at
    all.
    ``file_digest`` and ``numeric_class``, the parent's, as in Hello.
    """

    TYPE: ClassVar[str] = "ask"
    model_identity: str
    moe_digest: str
    file_digest: str = ""
    numeric_class: str = ""


MEASURING = "measure"
"""Stage of a Progress: the daemon measures how fast it computes the model's experts."""


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Daemon → parent: what it has for experts of this model, and how fast it computes them.

    ``free_bytes`` are free where its experts would lie, less what computing them needs;
    ``held_bytes`` are taken by experts of this model, of any parent; ``total_bytes`` is 0 if the
    memory is unknown. ``can_mail``: it can answer a device of the parent through a mailbox.

    Layers of one kind have experts of the same types and shapes (`MoeSpec.first_of_kind`).
    ``layer_ids`` are the first layers of each kind, ascending, the others have an entry for each of
    these; a time or rate of 0 was not measured. ``expert_bytes``: memory of one expert there.
    ``one_s`` and ``used_s``: seconds that a token of a decode step takes with one expert of a
    layer, and with as many as the model uses. ``chunk_pairs_per_s``: (token, expert) pairs a second
    of a chunk of ``chunk_tokens`` prompt tokens that choose all of the model's experts alike.
    ``data_port`` as in Welcome; 0 of a tcp endpoint: an older daemon. A request there, from a link
    that does not exist, is answered by a failure of code ``unknown_link``: the parent times some.
    """

    TYPE: ClassVar[str] = "offer"
    device: str
    device_name: str
    numeric_class: str
    free_bytes: int
    total_bytes: int
    held_bytes: int
    num_threads: int
    can_mail: bool
    layer_ids: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    one_s: tuple[float, ...]
    used_s: tuple[float, ...]
    chunk_tokens: int
    chunk_pairs_per_s: tuple[float, ...]
    data_port: int = 0


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Parent → daemon: the parent's model, and the experts that this daemon is to hold.

    Frame 1: the owner's experts (OwnedExperts.canonical_bytes). `payload` is the type requested
    for rows and sums (`payloads.NEGOTIABLE`). ``nonce`` selects blocks of the weights that both
    sides hash (`weight_blocks`); empty: no check. ``file_stamp`` is that of the parent's files
    (`weight_check`), ``file_digest`` the digest of all their bytes, empty until it is known. All
    three are hexadecimal.
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
"""Stage of a Progress: weight blocks will be compared; the parent can start hashing its own."""


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Daemon → parent: still loading; restarts the parent's timeout."""

    TYPE: ClassVar[str] = "progress"
    stage: str
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Daemon → parent: ready. ``link_id`` is the routing id of the parent's data socket.

    ``data_port`` is 0 for ipc endpoints, whose data socket lies beside the control socket.
    ``pairs_per_second`` was measured during warm-up. ``generation`` is unique to the link; every
    message carries it. ``payload`` is the requested type if the daemon knows it.
    ``can_share``: the parent may offer shared memory, see Attach. ``can_move``: a device of the
    daemon can read and write that memory. ``mail_bytes``: size of a mailbox for this model, which
    the daemon's processor answers if no device can; 0: none. ``file_stamp`` and ``file_digest`` are
    those of the daemon's files, as in Hello; ``blocks_digest`` covers the blocks that the nonce
    selects; empty if the stamps are equal.
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
    """Parent → daemon: a shared-memory segment, by its name in the folder of the endpoint's socket.

    Its shape is `ring.RingShape` of these counts and the model's width. ``nonce``: the bytes
    written in it, hexadecimal, by which the daemon knows that it has mapped the same memory.
    ``moves``: a device of the parent copies payload by DMA; one of the daemon is to do so too.
    ``mail_bytes``: size of the mailbox behind the slots, which requires ``moves``, or that the
    daemon's processor answers; 0: none.
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
    """Daemon → parent: the segment is mapped and requests may come through it.

    ``nonce``: the daemon's bytes in it. ``moves``: whether a device of the daemon copies payload.
    ``mails``: the daemon is preparing the mailbox.
    """

    TYPE: ClassVar[str] = "attached"
    link_id: str
    nonce: str
    moves: bool = False
    mails: bool = False


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """Daemon → parent: handshake refused. ``code`` is for programs, ``reason`` for people."""

    TYPE: ClassVar[str] = "refused"
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Parent → daemon: heartbeat."""

    TYPE: ClassVar[str] = "ping"
    sequence: int
    link_id: str


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Daemon → parent: heartbeat. The compute thread has spent ``busy_s`` on its present request.

    ``known`` is false if the daemon no longer has the link: the parent must send Hello again.
    Counters over all links since the daemon started: requests dropped because their deadline had
    passed before they were started (``num_late``); messages of another link, repeated or out of
    order (``num_stale``); messages with a wrong checksum (``num_checksum_failures``).
    ``file_digest`` as in Welcome; it may become known later.
    ``give_back_bytes``: how much less memory the link's experts should take, since another program
    needs the device's; ``spare_bytes``: how much more they may take. The parent then has the daemon
    hold others, by a Hello, and ends this link.
    """

    TYPE: ClassVar[str] = "pong"
    sequence: int
    known: bool
    busy_s: float
    num_late: int = 0
    num_stale: int = 0
    num_checksum_failures: int = 0
    file_digest: str = ""
    give_back_bytes: int = 0
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """Parent → daemon: close this link."""

    TYPE: ClassVar[str] = "bye"
    link_id: str


@dataclass(slots=True)
class ExpertRequest:
    """Parent → daemon: what a request says besides its batch.

    `requests` and the shared ring each encode it in their own way. ``payload`` is the type of the
    hidden rows. ``deadline_ms`` runs from the request's arrival; ``sent_s`` is the sender's clock,
    of which only differences have a meaning.
    """

    # Not frozen: that would cost some µs a request.
    sequence: int
    layer_id: int
    num_tokens: int
    payload: str
    deadline_ms: float
    generation: int = 0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeBatch(Message):
    """Parent → daemon, version 1: S experts for each of T tokens, by global expert ids.

    Frame 1, contiguous: input [T, H] float32, ids [T, S] int32, weights [T, S] float32.
    """

    TYPE: ClassVar[str] = "compute_batch"
    sequence: int
    layer_id: int
    num_tokens: int
    num_selected: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class ComputeStatus(Message):
    """Daemon → parent, version 1: success or failure. Frame 1 on success: sums [T, H] float32."""

    TYPE: ClassVar[str] = "compute_status"
    sequence: int
    is_done: bool
    reason: str


_RECORDS: dict[str, type[Message]] = {
    record.TYPE: record
    for record in (
        AskOffer, Offer, Hello, Progress, Welcome, Refused, Attach, Attached, Ping, Pong, Bye,
        ComputeBatch, ComputeStatus,
    )
}  # fmt: skip
_EXTENSIBLE = (AskOffer, Offer, Hello, Welcome, Attach, Attached, Pong)


def _is_int(value: object) -> bool:
    return type(value) is int and 0 <= value < _INT_LIMIT


def _is_float(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _list_of(is_item: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        type(value) is list and len(value) <= MOST_ITEMS and all(map(is_item, value))
    )


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: _is_int,
    float: _is_float,
    bool: lambda value: type(value) is bool,
    str: lambda value: type(value) is str and len(value) <= _TEXT_LIMIT,
    tuple[int, ...]: _list_of(_is_int),
    tuple[float, ...]: _list_of(_is_float),
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
    """Encode a message as msgpack, without fields that are at their default."""
    record = type(message)
    values = {name: getattr(message, name) for name in _FIELDS[record]}
    for name, default in _DEFAULTS.get(record, {}).items():
        if values[name] == default:
            del values[name]
    values["type"] = message.TYPE
    # Reasons may quote file names that are not valid UTF-8, which the peer would refuse.
    header: bytes = msgpack.packb(values, unicode_errors="replace")
    return header


def decode_header(frame: bytes | memoryview) -> Message:
    """Decode and check a header.

    Raises: ProtocolError if it is too long or of an unknown type, or a field is missing, unknown,
    of the wrong type or out of bounds.
    """
    if len(frame) > HEADER_LIMIT_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes is longer than {HEADER_LIMIT_BYTES}")
    try:
        values = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_map_len=64,
            max_array_len=MOST_ITEMS,
            max_ext_len=0,
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
