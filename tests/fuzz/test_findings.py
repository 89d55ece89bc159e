"""What fuzzing has found once, so that it never comes back."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

from dflash_protocol.errors import ProtocolError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.wire import requests, version1
from dflash_protocol.wire.messages import ExpertRequest
from dflash_protocol.wire.transport import Reply, TransportCounters
from fuzz.data_targets import with_checksum
from fuzz.ring_targets import RingSlots

_NUM_TOKENS, _HIDDEN_SIZE, _SEQUENCE, _GENERATION = 2, 8, 5, 9
# Not a number, and of the kind that processors signal: converting it makes numpy warn.
_SIGNALLING = {
    PayloadType.F32: struct.pack("<Q", 0x7FF0_0000_0000_0001),
    PayloadType.F16: struct.pack("<H", 0x7C01),
    PayloadType.BF16: struct.pack("<H", 0x7FA0),
}


def a_request(payload: PayloadType) -> ExpertRequest:
    return ExpertRequest(
        sequence=_SEQUENCE,
        layer_id=0,
        num_tokens=_NUM_TOKENS,
        payload=payload.value,
        deadline_ms=250.0,
        generation=_GENERATION,
    )


@pytest.mark.parametrize("payload", _SIGNALLING)
def test_a_reply_that_holds_a_signalling_nan_is_read_without_a_warning(
    payload: PayloadType,
) -> None:
    sums = np.ones((_NUM_TOKENS, _HIDDEN_SIZE))
    frames = requests.encode_reply(a_request(payload), sums, compute_s=0.1, payload=payload)
    body = bytes(frames[0])[8:]
    damaged = with_checksum([body[: -len(_SIGNALLING[payload])] + _SIGNALLING[payload]])
    codec = requests.ParentCodec(
        hidden_size=_HIDDEN_SIZE,
        generation=_GENERATION,
        payload=payload,
        counters=TransportCounters(),
    )
    answer = codec.decode(damaged, {_SEQUENCE: _NUM_TOKENS})
    assert answer is not None
    reply = answer[1]
    assert isinstance(reply, Reply)
    assert np.isnan(reply.sums).sum() == 1


def test_a_reply_of_version_1_that_holds_a_signalling_nan_is_read_without_a_warning() -> None:
    sums = np.ones((_NUM_TOKENS, _HIDDEN_SIZE))
    header, rows = version1.encode_reply(a_request(PayloadType.F32), sums)
    damaged = bytes(rows)[:-4] + struct.pack("<I", 0x7FA0_0001)
    codec = version1.Version1ParentCodec(
        hidden_size=_HIDDEN_SIZE, global_ids={}, counters=TransportCounters()
    )
    answer = codec.decode([bytes(header), damaged], {_SEQUENCE: _NUM_TOKENS})
    assert answer is not None
    reply = answer[1]
    assert isinstance(reply, Reply)
    assert np.isnan(reply.sums).sum() == 1


def test_a_reason_out_of_a_ring_is_one_line() -> None:
    """A failure's text is the peer's; with line breaks in it, it could forge lines of our log."""
    with contextlib.closing(RingSlots()) as target:
        target.serve_good()
        line_break = bytes.fromhex("03020000000a00000000000000")
        with pytest.raises(ProtocolError):
            target.feed([b"reply, sealed", b" ", line_break])
        target.serve_good()
