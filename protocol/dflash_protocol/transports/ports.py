"""Ports: a process's private records of a segment's slots, which compiled code works on.

A port is an array of int64 for each slot and side: addresses, negotiated limits, and a copy of the
header of the last message taken. `ring.compiled` defines its words.
"""

from __future__ import annotations

import struct

import numpy as np

from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import I64Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import PORT_WORDS
from dflash_protocol.ring.segment import Segment
from dflash_protocol.wire.transport import LinkLimits, TransportCounters

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
PAYLOAD_CODES = {
    PayloadType.F32: ring.PAYLOAD_F32,
    PayloadType.F16: ring.PAYLOAD_F16,
    PayloadType.BF16: ring.PAYLOAD_BF16,
    PayloadType.F64: ring.PAYLOAD_F64,
}
PAYLOAD_NAMES = {code: payload.value for payload, code in PAYLOAD_CODES.items()}

_LINE_WORDS = ring.LINE_BYTES // 8
_WORD = struct.Struct("<q")


class Ports:
    """The ports of all of a segment's slots, for one side.

    `narrow` is the payload type allowed besides the wide one; if the segment has a device window,
    rows may also be moved by a device.
    """

    def __init__(
        self, segment: Segment, *, is_client: bool, narrow: int, limits: LinkLimits
    ) -> None:
        shape, base = segment.shape, segment.address
        moves = segment.window is not None
        max_tokens = shape.max_tokens if moves else min(shape.max_tokens, limits.max_tokens)
        words = np.zeros(shape.num_slots * PORT_WORDS + _LINE_WORDS, np.int64)
        first = -words.ctypes.data // 8 % _LINE_WORDS
        words = words[first : first + shape.num_slots * PORT_WORDS]
        self.words: I64Array = words.reshape(shape.num_slots, PORT_WORDS)
        """[slots, PORT_WORDS]; must live as long as compiled code uses its address."""
        self.words.view(np.float64)[:, ring_native.LEAST_LAG] = np.inf
        flags = [base + ring.CLIENT_SLEEPS_AT, base + ring.SERVER_SLEEPS_AT]
        sleeps, peer_sleeps = flags if is_client else reversed(flags)
        peer_bell = segment.server_bell if is_client else segment.client_bell
        for slot_idx in range(shape.num_slots):
            facts = {
                ring_native.REQUEST_SLOT: base + shape.request_slot_at(slot_idx),
                ring_native.REPLY_SLOT: base + shape.reply_slot_at(slot_idx),
                ring_native.REQUEST_WORD: base + ring.REQUEST_WORDS_AT + 8 * slot_idx,
                ring_native.REPLY_WORD: base + ring.REPLY_WORDS_AT + 8 * slot_idx,
                ring_native.SLEEPS: sleeps,
                ring_native.PEER_SLEEPS: peer_sleeps,
                ring_native.GENERATION: segment.generation,
                ring_native.NUM_SLOTS: shape.num_slots,
                ring_native.SLOT_IDX: slot_idx,
                ring_native.MAX_TOKENS: max_tokens,
                ring_native.HIDDEN_SIZE: shape.hidden_size,
                ring_native.MAX_PAIRS: shape.max_pairs,
                ring_native.MAX_EXPERTS_USED: limits.max_experts_used,
                ring_native.NARROW: narrow,
                ring_native.BELL: peer_bell,
                ring_native.MOVES: int(moves),
            }
            for field, value in facts.items():
                self.words[slot_idx, field] = value

    def address(self, slot_idx: int) -> int:
        return int(self.words[slot_idx].ctypes.data)

    def taken(self, slot_idx: int) -> memoryview:
        """View of ROUTING_BOUND, WAITED and, from `HEADER_AT` on, the copy of the header."""
        return self.words[slot_idx, ring_native.ROUTING_BOUND : ring_native.STATE].data.cast("B")


def poll_entries(*fds: int, num_more: int = 0) -> I64Array:
    """poll(2) entries that wait for these descriptors to become readable, then `num_more` zeros."""
    entries = [fd | ring_native.POLLIN for fd in fds]
    return np.array(entries + [0] * num_more, np.int64)


HEADER_AT = 8 * (ring_native.HEADER - ring_native.ROUTING_BOUND)


def header_word(taken: memoryview, word: int) -> int:
    """A word of the header's copy in `taken`."""
    value: int = _WORD.unpack_from(taken, HEADER_AT + 8 * word)[0]
    return value


def violation_error(violation: int, counters: TransportCounters) -> ProtocolError:
    """The error of a violation; also increments its counter."""
    code, reason = ring_native.VIOLATIONS[violation]
    if code == "checksum":
        counters.checksum_failures += 1
    elif code == "stale":
        counters.stale += 1
    return ProtocolError(reason, code=code)
