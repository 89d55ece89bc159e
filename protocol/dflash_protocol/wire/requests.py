"""Wire format of requests and replies, version 2: encoding, decoding and checks.

A data message is one frame, or several if its arrays are large::

    frame 0   header   64 bytes
              arrays   concatenated, unless they have frames of their own
    frame 1…  an array each

    offset  0  uint64  XXH3 of all that follows, further frames included
            8  uint8   kind: 1 request, 2 reply, 3 failure
            9  uint8   phase, index into _PHASES (request)
           10  uint8   payload type, index into _PAYLOADS
           11  uint8   number of frames that follow
           12  uint32  layer (request)
           16  uint64  sequence
           24  uint64  generation of the link
           32  uint32  num_tokens, num_groups (request), num_pairs (request), zero
           48  float64 deadline in ms (request); compute_s (reply)
           56  float64 sender's clock in s (request); queue_s (reply)

    request   routing = expert_ids [G] ‖ group_starts [G+1] ‖ token_indices [P] int32 ‖ weights [P]
              hidden [T, H] of the header's payload type
    reply     sums [T, H] of the header's payload type
    failure   code ‖ NUL ‖ reason, as UTF-8

Small messages are one frame, since each frame costs both ends and ZeroMQ's threads some µs; large
arrays get their own frames, which are sent without a copy. The header is a packed struct, not
msgpack: it is read and written some thousand times a second, between two layers.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import xxhash

from dflash_protocol.batch import HostHidden, HostSums, RoutedBatch
from dflash_protocol.errors import ProtocolError, one_line
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import (
    PayloadType,
    are_finite,
    is_widened,
    pack,
    unpack,
)
from dflash_protocol.wire.messages import HEADER_LIMIT_BYTES, ExpertRequest, Frames
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters

INLINE_LIMIT_BYTES = 64 << 10
"""Arrays of up to this total size travel in the frame of their header."""
MOST_FRAMES = 3
_REASON_LIMIT_BYTES = 2048

_REQUEST, _REPLY, _FAILURE = 1, 2, 3
_PHASES = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
_PAYLOADS = (PayloadType.F64, PayloadType.F32, PayloadType.F16, PayloadType.BF16)
_HEADER = struct.Struct("<QBBBBIQQIII4xdd")
_CHECKSUM = struct.Struct("<Q")
_NUM_MORE_AT, _SEQUENCE_AT = 11, 16
HEADER_BYTES = _HEADER.size


def largest_frame_bytes(*, max_tokens: int, hidden_size: int, max_pairs: int) -> int:
    """Upper bound of a frame of a valid message, in either version: a header with inline arrays,
    sums, or hidden rows with the routing of `max_pairs` pairs (version 1 sends them as one frame).
    """
    hidden, routing = 4 * max_tokens * hidden_size, 4 * (4 * max_pairs + 1)
    return max(HEADER_BYTES + INLINE_LIMIT_BYTES, HEADER_LIMIT_BYTES, 2 * hidden, hidden + routing)


def seal(
    kind: int,
    sequence: int,
    generation: int,
    *,
    arrays: Sequence[memoryview | bytes],
    num_bytes: int,
    payload: PayloadType = PayloadType.F64,
    phase: Phase = Phase.PREFILL,
    counts: tuple[int, int, int, int] = (0, 0, 0, 0),
    times: tuple[float, float] = (0.0, 0.0),
) -> Frames:
    """Build the frames of a message, checksum included. Large arrays are not copied.

    `num_bytes` is the size of all arrays together.
    """
    num_more = 0 if num_bytes <= INLINE_LIMIT_BYTES else len(arrays)
    layer_id, num_tokens, num_groups, num_pairs = counts
    first = bytearray(
        _HEADER.pack(
            0,
            kind,
            _PHASES.index(phase),
            _PAYLOADS.index(payload),
            num_more,
            layer_id,
            sequence,
            generation,
            num_tokens,
            num_groups,
            num_pairs,
            *times,
        )
    )
    if not num_more:
        first = bytearray().join((first, *arrays))
        _CHECKSUM.pack_into(first, 0, checksum_of([first]))
        return [first]
    frames: Frames = [first, *arrays]
    _CHECKSUM.pack_into(first, 0, checksum_of(frames))
    return frames


def checksum_of(frames: Sequence[bytes | bytearray | memoryview]) -> int:
    """XXH3 of all bytes of a message except the first eight, which hold the checksum."""
    head = memoryview(frames[0])[_CHECKSUM.size :]
    if len(frames) == 1:
        return xxhash.xxh3_64_intdigest(head)
    running = xxhash.xxh3_64(head)
    for frame in frames[1:]:
        running.update(frame)
    return running.intdigest()


def is_single(frame: bytes) -> bool:
    """Whether the header in a message's first frame says that no frames follow."""
    return len(frame) >= HEADER_BYTES and not frame[_NUM_MORE_AT]


def sequence_of(frames: Sequence[bytes | memoryview]) -> int:
    """The sequence field of a malformed message, 0 if it is too short to have one.

    Use it only to fail a request; no other field of such a message can be trusted.
    """
    if not frames or len(frames[0]) < HEADER_BYTES:
        return 0
    return int.from_bytes(frames[0][_SEQUENCE_AT : _SEQUENCE_AT + 8], "little")


_Header: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, float, float]


def _unseal(
    frames: Sequence[bytes | memoryview],
) -> tuple[_Header, list[memoryview]]:
    """Header and arrays of a message; arrays inline in frame 0 are returned as one piece.

    Raises: ProtocolError if the frames do not fit the header, or, with code ``checksum``, if the
    checksum is wrong.
    """
    if not frames or len(frames[0]) < HEADER_BYTES:
        raise ProtocolError("the message has no header")
    head = memoryview(frames[0])
    header = _HEADER.unpack_from(head)
    if checksum_of(frames) != header[0]:
        raise ProtocolError("the message was damaged: wrong checksum", code="checksum")
    num_more = len(frames) - 1
    if header[4] != num_more or not (math.isfinite(header[11]) and math.isfinite(header[12])):
        raise ProtocolError("the header has a wrong number of frames, or times that are not finite")
    if not num_more:
        return header, [head[HEADER_BYTES:]]
    if len(head) > HEADER_BYTES:
        raise ProtocolError("arrays both in the header's frame and in frames of their own")
    return header, [memoryview(frame) for frame in frames[1:]]


def encode_request(
    batch: RoutedBatch,
    *,
    sequence: int,
    layer_id: int,
    deadline_s: float,
    generation: int = 0,
    payload: PayloadType = PayloadType.F32,
    counters: TransportCounters | None = None,
) -> Frames:
    """Frames of a request. Rows travel as `payload`, or as float32 if that would overflow."""
    hidden, sent_as = pack(batch.hidden, payload)
    expert_ids, token_indices = batch.expert_ids, batch.token_indices
    routing = b"".join(
        (expert_ids.data, batch.group_starts.data, token_indices.data, batch.weights.data)
    )
    num_bytes = len(routing) + hidden.nbytes
    if counters is not None:
        counters.widened += is_widened(sent_as, payload)
        counters.bytes_sent += num_bytes
    return seal(
        _REQUEST,
        sequence,
        generation,
        arrays=(routing, hidden.data),
        num_bytes=num_bytes,
        payload=sent_as,
        phase=batch.phase,
        counts=(layer_id, hidden.shape[0], expert_ids.shape[0], token_indices.shape[0]),
        times=(deadline_s * 1e3, time.monotonic()),
    )


def decode_request(
    frames: Sequence[bytes | memoryview], limits: LinkLimits
) -> tuple[ExpertRequest, RoutedBatch]:
    """Decode a request at the daemon.

    Checks order, that counts and sizes are consistent, and the link's limits: at most `max_tokens`
    tokens, at most `max_experts_used` pairs for each. Ids are checked by the receiver, which knows
    how many experts it has (RoutedBatch.check).
    Raises: ProtocolError before anything is allocated; `sequence_of` tells the request.
    """
    header, arrays = _unseal(frames)
    _, kind, phase_code, payload_code, _, layer_id, sequence, generation = header[:8]
    num_tokens, num_groups, num_pairs, deadline_ms, sent_s = header[8:]
    if kind != _REQUEST:
        raise ProtocolError(f"a message of kind {kind}, expected a request", code="unknown_type")
    if generation != limits.generation:
        raise ProtocolError("the request belongs to another link", code="stale")
    limits.note_sequence(sequence)
    if num_tokens > limits.max_tokens:
        raise ProtocolError(
            f"{num_tokens} tokens exceed the capacity of {limits.max_tokens}", code="capacity"
        )
    if num_groups > num_pairs:
        raise ProtocolError("more groups than pairs")
    if payload_code >= len(_PAYLOADS) or phase_code >= len(_PHASES):
        raise ProtocolError("an unknown phase or payload type")
    sent_as, phase = _PAYLOADS[payload_code], _PHASES[phase_code]
    if sent_as is not PayloadType.F32 and sent_as is not limits.payload:
        raise ProtocolError(f"payload type {sent_as} was not negotiated")
    # Counts are below 2^32 and Python's integers do not wrap, so these products are exact.
    num_ids = 2 * num_groups + 1 + num_pairs
    routing, rows = _split(
        arrays,
        4 * (num_ids + num_pairs),
        sent_as.num_bytes * num_tokens * limits.hidden_size,
    )
    if num_pairs > num_tokens * limits.max_experts_used:
        raise ProtocolError(f"{num_pairs} pairs are too many for {num_tokens} tokens")
    ids = np.frombuffer(routing, "<i4")
    shape = num_tokens, limits.hidden_size
    batch = RoutedBatch(
        phase,
        HostHidden(unpack(rows, sent_as, shape=shape, element=np.float32)),
        ids[:num_groups],
        ids[num_groups : 2 * num_groups + 1],
        ids[2 * num_groups + 1 : num_ids],
        ids[num_ids:].view("<f4"),
    )
    request = ExpertRequest(
        sequence, layer_id, num_tokens, sent_as.value, deadline_ms, generation, sent_s
    )
    return request, batch


def encode_reply(
    request: ExpertRequest,
    sums: F64Array,
    *,
    compute_s: float,
    queue_s: float = 0.0,
    payload: PayloadType = PayloadType.F32,
    counters: TransportCounters | None = None,
) -> Frames:
    """Frames of a reply. Shapes: sums [T, H] float64."""
    packed, sent_as = pack(sums, payload)
    if counters is not None:
        counters.widened += is_widened(sent_as, payload)
        counters.bytes_sent += packed.nbytes
    return seal(
        _REPLY,
        request.sequence,
        request.generation,
        arrays=(packed.data,),
        num_bytes=packed.nbytes,
        payload=sent_as,
        counts=(0, packed.shape[0], 0, 0),
        times=(compute_s, queue_s),
    )


def encode_failure(sequence: int, error: ProtocolError, *, generation: int = 0) -> Frames:
    """Frames of a failure: the request was not computed."""
    text = f"{error.code}\0{error}".encode(errors="replace")[:_REASON_LIMIT_BYTES]
    return seal(_FAILURE, sequence, generation, arrays=(text,), num_bytes=len(text))


class ParentCodec:
    """Version 2 at the parent's end of one link: encodes requests, decodes replies."""

    def __init__(
        self,
        *,
        hidden_size: int,
        generation: int,
        payload: PayloadType,
        counters: TransportCounters,
    ) -> None:
        self._hidden_size = hidden_size
        self._generation = generation
        self._payload = payload
        self._counters = counters
        self.encode = partial(
            encode_request, generation=generation, payload=payload, counters=counters
        )

    def decode(
        self, frames: Sequence[bytes], num_tokens_of: Mapping[int, int]
    ) -> tuple[int, Reply | ProtocolError] | None:
        """The sequence and outcome of a message; None if it answers no pending request.

        `num_tokens_of` has the number of tokens of each pending request, by sequence.
        Raises: ProtocolError if the daemon violates the protocol.
        """
        try:
            header, arrays = _unseal(frames)
        except ProtocolError as error:
            if error.code != "checksum":
                raise
            self._counters.checksum_failures += 1
            sequence = sequence_of(frames)
            return (sequence, error) if sequence in num_tokens_of else None
        _, kind, _, payload_code, _, _, sequence, generation = header[:8]
        num_tokens = num_tokens_of.get(sequence)
        if num_tokens is None or generation != self._generation:
            self._counters.stale += 1
            return None
        if kind == _FAILURE:
            return sequence, _failure(arrays)
        if kind != _REPLY:
            raise ProtocolError(f"the daemon sent a message of kind {kind} on the data socket")
        sent_as = _PAYLOADS[payload_code] if payload_code < len(_PAYLOADS) else PayloadType.F32
        is_negotiated = sent_as is PayloadType.F64 or sent_as is self._payload
        num_bytes = sent_as.num_bytes * num_tokens * self._hidden_size
        if (
            sent_as is PayloadType.F32
            or not is_negotiated
            or header[8] != num_tokens
            or len(arrays) != 1
            or len(arrays[0]) != num_bytes
        ):
            raise ProtocolError("the reply does not have the shape of its request")
        if self._payload is not PayloadType.F32 and sent_as is PayloadType.F64:
            self._counters.widened += 1
        self._counters.bytes_received += num_bytes
        shape = num_tokens, self._hidden_size
        sums = unpack(arrays[0], sent_as, shape=shape, element=np.float64)
        return sequence, Reply(HostSums(sums), header[11], header[12], are_finite(sums))


def _failure(arrays: Sequence[memoryview]) -> ProtocolError:
    """The error in a failure message. Raises: ProtocolError if the message is malformed."""
    if len(arrays) != 1 or len(arrays[0]) > _REASON_LIMIT_BYTES:
        raise ProtocolError("a failure without a reason")
    code, _, reason = bytes(arrays[0]).decode(errors="replace").partition("\0")
    return ProtocolError(one_line(reason), code=one_line(code))


def _split(
    arrays: Sequence[memoryview], first_bytes: int, second_bytes: int
) -> Sequence[memoryview]:
    """The two arrays of these sizes, whether they arrived as one piece or as two.

    Raises: ProtocolError if the sizes differ.
    """
    if len(arrays) == 1 and len(arrays[0]) == first_bytes + second_bytes:
        return arrays[0][:first_bytes], arrays[0][first_bytes:]
    lengths = [len(array) for array in arrays]
    if lengths == [first_bytes, second_bytes]:
        return arrays
    raise ProtocolError(f"arrays of {lengths} bytes, header says {first_bytes} and {second_bytes}")
