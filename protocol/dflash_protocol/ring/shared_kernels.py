"""Functions shared by the client's and server's kernels: port fields, headers, publishing.

Compiled by `compiled`. Bounds come from ports, which are private to this process; data written by
the other process is used only through copies.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dflash_protocol.ring import compiled as native
from dflash_protocol.ring import emit
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.emit import helper, load, store

HEADER, STATE = 8 * native.HEADER, 8 * native.STATE
LINE = ring.LINE_BYTES


@helper
def field(port, index):
    return load(port + 8 * index)


@helper
def lines(num_bytes):
    return (num_bytes + (LINE - 1)) & -LINE


@helper
def array_bytes(payload, num_elements, wide_bytes):
    is_narrow = payload == ring.PAYLOAD_F16 or payload == ring.PAYLOAD_BF16
    return num_elements * (2 if is_narrow else wide_bytes)


@helper
def request_bytes(payload, num_tokens, num_groups, num_pairs, hidden_size):
    hidden_bytes = array_bytes(payload, num_tokens * hidden_size, 4)
    return hidden_bytes + 4 * (2 * num_groups + 1 + 2 * num_pairs)


@helper
def begin_header(port, kind, sequence, payload, num_bytes):
    header = port + HEADER
    for word in range(ring.HEADER_WORDS):
        store(header + 8 * word, 0)
    store(header + 8 * ring.SEQUENCE, sequence)
    store(header + 8 * ring.GENERATION, field(port, native.GENERATION))
    store(header + 8 * ring.KIND, kind)
    store(header + 8 * ring.PAYLOAD, payload)
    store(header + 8 * ring.PAYLOAD_BYTES, num_bytes)
    return header


@helper
def copy_header(source, to):
    for index in range(ring.HEADER_WORDS):
        store(to + 8 * index, load(source + 8 * index))


@helper
def publish(port, slot, word, sequence, num_bytes):
    """Write the header into the slot, then the sequence into its word; ring if the peer sleeps."""
    header = port + HEADER
    store(header + 8 * ring.CHECKSUM, emit.finish_checksum(port + STATE, header))
    copy_header(header, slot)
    emit.store_ordered(word, sequence)
    peer_sleeps = field(port, native.PEER_SLEEPS)
    if emit.load_ordered(peer_sleeps) != 0 and emit.exchange(peer_sleeps, 0) != 0:
        emit.ring_bell(field(port, native.BELL))
    return num_bytes


@helper
def has_gaps(rows):
    num_rows, width = rows.shape
    return (num_rows > 0 and width > 1 and rows.strides[1] != rows.itemsize) or (
        num_rows > 1 and rows.strides[0] != rows.itemsize * width
    )


@helper
def has_times(header):
    """Whether both times are finite; inf - inf and NaN - NaN are NaN."""
    total = emit.load_time(header + 8 * ring.TIME) + emit.load_time(header + 8 * ring.OTHER_TIME)
    return total - total == 0.0


def load_word(address):
    return emit.load_ordered(address)


def checksum(state, header, source, target, num_bytes):
    emit.start_checksum(state)
    emit.copy_words(state, target, source, num_bytes >> 2)
    return emit.finish_checksum(state, header)
