"""The ring's kernels: what one call from Python does to a slot.

Compiled by `ring_native`, where arguments and results are described. Bounds follow from ports,
private arrays of this process; of what the other process wrote, only copies are used.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dflash_protocol import ring
from dflash_protocol import ring_native as native
from dflash_protocol import ring_native_emit as emit
from dflash_protocol.ring_native_emit import helper, load, load_int32, store

HEADER, STATE = 8 * native.HEADER, 8 * native.STATE
LINE = ring.LINE_BYTES
MS = 10**6


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
def publish(port, slot, word, sequence, num_bytes):
    """Header into the slot, then the sequence into its word; rings if the other side sleeps."""
    header = port + HEADER
    store(header + 8 * ring.CHECKSUM, emit.finish_checksum(port + STATE, header))
    for index in range(ring.HEADER_WORDS):
        store(slot + 8 * index, load(header + 8 * index))
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


# -- the client -----------------------------------------------------------------------------------


def send_request(
    port,
    sequence,
    layer_id,
    phase,
    payload,
    deadline_ms,
    hidden,
    expert_ids,
    group_starts,
    token_indices,
    weights,
):
    num_tokens, num_groups = hidden.shape[0], expert_ids.shape[0]
    num_pairs, hidden_size = token_indices.shape[0], field(port, native.HIDDEN_SIZE)
    if (
        hidden.shape[1] != hidden_size
        or has_gaps(hidden)
        or group_starts.shape[0] != num_groups + 1
        or weights.shape[0] != num_pairs
        or num_groups > num_pairs
    ):
        return native.BAD_ARRAYS
    if num_tokens > field(port, native.MAX_TOKENS) or num_pairs > field(port, native.MAX_PAIRS):
        return native.TOO_LARGE
    num_bytes = request_bytes(payload, num_tokens, num_groups, num_pairs, hidden_size)
    header = begin_header(port, ring.KIND_REQUEST, sequence, payload, num_bytes)
    store(header + 8 * ring.LAYER, layer_id)
    store(header + 8 * ring.TOKENS, num_tokens)
    store(header + 8 * ring.GROUPS, num_groups)
    store(header + 8 * ring.PAIRS, num_pairs)
    store(header + 8 * ring.PHASE, phase)
    emit.store_time(header + 8 * ring.TIME, deadline_ms)
    emit.store_time(header + 8 * ring.OTHER_TIME, 1e-9 * emit.monotonic_ns())
    slot, state = field(port, native.REQUEST_SLOT), port + STATE
    emit.start_checksum(state)
    to, source, count = slot + ring.HEADER_BYTES, emit.address_of(hidden), num_tokens * hidden_size
    is_large = 0
    if payload == ring.PAYLOAD_BF16:
        is_large = emit.pack_bf16(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        is_large = emit.pack_f16(state, to, source, count)
    else:
        emit.copy_words(state, to, source, count)
    if is_large != 0:
        return native.OUT_OF_RANGE
    to += lines(array_bytes(payload, count, 4))
    emit.copy_words(state, to, emit.address_of(expert_ids), num_groups)
    to += lines(4 * num_groups)
    emit.copy_words(state, to, emit.address_of(group_starts), num_groups + 1)
    to += lines(4 * num_groups + 4)
    emit.copy_words(state, to, emit.address_of(token_indices), num_pairs)
    to += lines(4 * num_pairs)
    emit.copy_words(state, to, emit.address_of(weights), num_pairs)
    return publish(port, slot, field(port, native.REQUEST_WORD), sequence, num_bytes)


@helper
def has_times(header):
    """Whether both are finite: what is not becomes no number when it is taken from itself."""
    total = emit.load_time(header + 8 * ring.TIME) + emit.load_time(header + 8 * ring.OTHER_TIME)
    return total - total == 0.0


@helper
def reply_violation(port, sequence, num_tokens):
    """Of the header's copy; 0 if it is the reply to what was asked, or its failure."""
    header = port + HEADER
    if load(header + 8 * ring.SEQUENCE) != sequence:
        return native.WRONG_SEQUENCE
    if load(header + 8 * ring.GENERATION) != field(port, native.GENERATION):
        return native.WRONG_GENERATION
    kind, num_bytes = load(header + 8 * ring.KIND), load(header + 8 * ring.PAYLOAD_BYTES)
    if kind == ring.KIND_FAILURE:
        if num_bytes < 0 or num_bytes > ring.FAILURE_LIMIT_BYTES or num_bytes & 3 != 0:
            return native.WRONG_BYTES
        return 0
    if kind != ring.KIND_REPLY:
        return native.WRONG_KIND
    if not has_times(header):
        return native.WRONG_TIMES
    payload = load(header + 8 * ring.PAYLOAD)
    if payload != ring.PAYLOAD_F64 and payload != field(port, native.NARROW):
        return native.WRONG_PAYLOAD
    if load(header + 8 * ring.TOKENS) != num_tokens:
        return native.WRONG_COUNTS
    count = num_tokens * field(port, native.HIDDEN_SIZE)
    if num_bytes != array_bytes(payload, count, 8):
        return native.WRONG_BYTES
    return 0


@helper
def timeout_ms(now_ns, end_ns):
    """For poll(2): what is left, rounded up."""
    return max((end_ns - now_ns + (MS - 1)) // MS, 0)


@helper
def sleep_for_reply(port, sequence, wait_ns):
    """Until the word is another than those we know, the time is up, or something else is to be
    looked at."""
    word, sleeps = field(port, native.REPLY_WORD), field(port, native.SLEEPS)
    entries = field(port, native.ENTRIES)
    if load(entries + 8 * native.CLIENT_RUNG) != 0:
        emit.silence_bell(load(entries) & 0xFFFFFFFF)
        store(entries + 8 * native.CLIENT_RUNG, 0)
    now_ns = emit.monotonic_ns()
    end_ns = now_ns + wait_ns
    # First the flag, then the look: see the argument in `ring`.
    emit.store_ordered(sleeps, 1)
    num_ready = 0
    while num_ready == 0 and not is_news(port, sequence, emit.load_ordered(word)):
        if now_ns >= end_ns:
            break
        num_ready = emit.poll(entries, 2, timeout_ms(now_ns, end_ns))
        now_ns = emit.monotonic_ns()
    emit.store_ordered(sleeps, 0)
    if num_ready > 0:
        # To be silenced before the next sleep, when nobody waits for that.
        store(entries + 8 * native.CLIENT_RUNG, load(entries) >> native.FOUND_SHIFT)
    return emit.load_acquire(word)


@helper
def is_news(port, sequence, found):
    return found == sequence or (
        found != field(port, native.LAST) and found != field(port, native.REFUSED)
    )


def receive_reply(port, sequence, spin_ns, wait_ns, sums):
    word = field(port, native.REPLY_WORD)
    found = emit.load_acquire(word)
    if found != sequence and spin_ns > 0:
        end_ns = emit.monotonic_ns() + spin_ns
        while found != sequence and emit.monotonic_ns() < end_ns:
            for _ in range(native.NUM_LOOKS):
                emit.pause()
                found = emit.load_acquire(word)
                if found == sequence:
                    break
    if wait_ns > 0 and not is_news(port, sequence, found):
        found = sleep_for_reply(port, sequence, wait_ns)
    if found != sequence:
        if is_news(port, sequence, found):
            store(port + 8 * native.REFUSED, found)
            return native.FAILURE - native.STALE
        return native.NOTHING
    store(port + 8 * native.LAST, sequence)
    slot, header, state = field(port, native.REPLY_SLOT), port + HEADER, port + STATE
    for index in range(ring.HEADER_WORDS):
        store(header + 8 * index, load(slot + 8 * index))
    violation = reply_violation(port, sequence, sums.shape[0])
    if violation != 0:
        return native.FAILURE - violation
    num_bytes, payload = load(header + 8 * ring.PAYLOAD_BYTES), load(header + 8 * ring.PAYLOAD)
    is_failure = load(header + 8 * ring.KIND) == ring.KIND_FAILURE
    source, to = slot + ring.HEADER_BYTES, emit.address_of(sums)
    count = sums.shape[0] * field(port, native.HIDDEN_SIZE)
    emit.start_checksum(state)
    if is_failure:
        emit.copy_words(state, field(port, native.TEXT), source, num_bytes >> 2)
    elif payload == ring.PAYLOAD_BF16:
        emit.unpack_bf16_sums(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        emit.unpack_f16_sums(state, to, source, count)
    else:
        emit.copy_words(state, to, source, 2 * count)
    if emit.finish_checksum(state, header) != load(header + 8 * ring.CHECKSUM):
        return native.FAILURE - native.WRONG_CHECKSUM
    return native.FAILURE if is_failure else num_bytes


# -- the server -----------------------------------------------------------------------------------


@helper
def set_flags(table, value):
    """Of all links: whether they must ring."""
    for link_idx in range(load(table + 8 * native.NUM_LINKS)):
        port = load(table + 8 * (native.FIRST_LINK + link_idx))
        emit.store_ordered(field(port, native.SLEEPS), value)


@helper
def find(table):
    """link_idx · MAX_SLOTS + slot_idx of a slot that holds something new, or -1: of the first link
    that has one, beginning with the link whose turn it is, its oldest."""
    num_links = load(table + 8 * native.NUM_LINKS)
    first = load(table + 8 * native.NEXT_LINK)
    for turn in range(num_links):
        link_idx = (first + turn) % num_links
        port = load(table + 8 * (native.FIRST_LINK + link_idx))
        num_slots = field(port, native.NUM_SLOTS)
        oldest = best = -1
        for slot_idx in range(num_slots):
            found = emit.load_acquire(field(port, native.REQUEST_WORD))
            if (
                field(port, native.BUSY) == 0
                and found != field(port, native.LAST)
                and found != field(port, native.REFUSED)
                and (best < 0 or found < oldest)
            ):
                oldest, best = found, slot_idx
            port += 8 * native.PORT_WORDS
        if best >= 0:
            return link_idx * ring.MAX_SLOTS + best
    return -1


@helper
def request_violation(port, sequence):
    """Of the header's copy; 0 if sizes are right and within the link's limits."""
    header = port + HEADER
    if load(header + 8 * ring.SEQUENCE) != sequence:
        return native.WRONG_SEQUENCE
    if load(header + 8 * ring.GENERATION) != field(port, native.GENERATION):
        return native.WRONG_GENERATION
    if load(header + 8 * ring.KIND) != ring.KIND_REQUEST:
        return native.WRONG_KIND
    num_tokens, num_groups = load(header + 8 * ring.TOKENS), load(header + 8 * ring.GROUPS)
    num_pairs, payload = load(header + 8 * ring.PAIRS), load(header + 8 * ring.PAYLOAD)
    if num_tokens < 0 or num_groups < 0 or num_groups > num_pairs:
        return native.WRONG_COUNTS
    if num_tokens > field(port, native.MAX_TOKENS) or num_pairs > field(port, native.MAX_PAIRS):
        return native.OVER_CAPACITY
    if num_pairs > num_tokens * field(port, native.MAX_EXPERTS_USED):
        return native.WRONG_COUNTS
    phase = load(header + 8 * ring.PHASE)
    if phase < 0 or phase >= native.NUM_PHASES or load(header + 8 * ring.LAYER) < 0:
        return native.WRONG_PHASE
    if payload != ring.PAYLOAD_F32 and payload != field(port, native.NARROW):
        return native.WRONG_PAYLOAD
    if not has_times(header):
        return native.WRONG_TIMES
    hidden_size = field(port, native.HIDDEN_SIZE)
    num_bytes = request_bytes(payload, num_tokens, num_groups, num_pairs, hidden_size)
    if load(header + 8 * ring.PAYLOAD_BYTES) != num_bytes:
        return native.WRONG_BYTES
    return 0


@helper
def note_waiting(link, port, now_ns):
    """How long the request lay there: what its time from stamp to now is above the least such time
    of the link. Both ends read one clock, but a container may shift its own by a constant."""
    sent_s = emit.load_time(port + HEADER + 8 * ring.OTHER_TIME)
    lag_s = 1e-9 * now_ns - sent_s
    least_lag_s = emit.load_time(link + 8 * native.LEAST_LAG)
    if lag_s < least_lag_s:
        least_lag_s = lag_s
        emit.store_time(link + 8 * native.LEAST_LAG, lag_s)
    emit.store_time(port + 8 * native.WAITED, lag_s - least_lag_s)


@helper
def index(address, position):
    """An int32 of an array."""
    return load_int32(address + 4 * position)


@helper
def routing_bound(port):
    """As RoutedBatch.check: one more than the largest expert id of what was taken, at least 1; 0 if
    the private arrays do not hold together."""
    header = port + HEADER
    num_tokens, num_groups = load(header + 8 * ring.TOKENS), load(header + 8 * ring.GROUPS)
    num_pairs, ids = load(header + 8 * ring.PAIRS), field(port, native.EXPERT_IDS)
    starts, tokens = field(port, native.GROUP_STARTS), field(port, native.TOKEN_INDICES)
    if index(starts, 0) != 0 or index(starts, num_groups) != num_pairs:
        return 0
    last_id, first = -1, 0
    for group in range(num_groups):
        expert_id, end = index(ids, group), index(starts, group + 1)
        if expert_id <= last_id or end <= first or end > num_pairs:
            return 0
        last_token = -1
        for pair in range(first, end):
            token = index(tokens, pair)
            if token <= last_token or token >= num_tokens:
                return 0
            last_token = token
        last_id, first = expert_id, end
    return max(last_id + 1, 1)


@helper
def take(table, port, spin_ns):
    """Copy what a slot holds into the port's private arrays; 0, or the violation."""
    sequence = emit.load_acquire(field(port, native.REQUEST_WORD))
    slot_idx, num_slots = field(port, native.SLOT_IDX), field(port, native.NUM_SLOTS)
    slot, header, state = field(port, native.REQUEST_SLOT), port + HEADER, port + STATE
    store(port + 8 * native.REFUSED, sequence)
    if (
        sequence <= field(port, native.LAST)
        or sequence >= ring.SEQUENCE_LIMIT
        or sequence % num_slots != slot_idx
    ):
        store(header + 8 * ring.SEQUENCE, sequence)
        return native.STALE
    for index in range(ring.HEADER_WORDS):
        store(header + 8 * index, load(slot + 8 * index))
    violation = request_violation(port, sequence)
    if violation != 0:
        store(header + 8 * ring.SEQUENCE, sequence)
        return violation
    num_tokens, num_groups = load(header + 8 * ring.TOKENS), load(header + 8 * ring.GROUPS)
    num_pairs, payload = load(header + 8 * ring.PAIRS), load(header + 8 * ring.PAYLOAD)
    count = num_tokens * field(port, native.HIDDEN_SIZE)
    source, to = slot + ring.HEADER_BYTES, field(port, native.HIDDEN)
    emit.start_checksum(state)
    if payload == ring.PAYLOAD_BF16:
        emit.unpack_bf16(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        emit.unpack_f16(state, to, source, count)
    else:
        emit.copy_words(state, to, source, count)
    source += lines(array_bytes(payload, count, 4))
    emit.copy_words(state, field(port, native.EXPERT_IDS), source, num_groups)
    source += lines(4 * num_groups)
    emit.copy_words(state, field(port, native.GROUP_STARTS), source, num_groups + 1)
    source += lines(4 * num_groups + 4)
    emit.copy_words(state, field(port, native.TOKEN_INDICES), source, num_pairs)
    source += lines(4 * num_pairs)
    emit.copy_words(state, field(port, native.WEIGHTS), source, num_pairs)
    if emit.finish_checksum(state, header) != load(header + 8 * ring.CHECKSUM):
        return native.WRONG_CHECKSUM
    store(port + 8 * native.LAST, sequence)
    store(port + 8 * native.BUSY, 1)
    store(port + 8 * native.ROUTING_BOUND, routing_bound(port))
    link, now_ns = port - 8 * native.PORT_WORDS * slot_idx, emit.monotonic_ns()
    note_waiting(link, port, now_ns)
    is_quick = now_ns - field(link, native.REPLIED_NS) < max(native.QUICK_NS, spin_ns)
    store(table + 8 * native.IS_QUICK, 1 if is_quick else 0)
    return 0


@helper
def sleep_for_request(table, entries, num_entries, timeout_ms):
    """What `find` finds when some bell is rung or something else is ready, or the time is up."""
    for link_idx in range(load(table + 8 * native.NUM_LINKS)):
        port, entry = load(table + 8 * (native.FIRST_LINK + link_idx)), entries + 8 * link_idx
        if field(port, native.RUNG) != 0:
            emit.silence_bell(load(entry) & 0xFFFFFFFF)
            store(port + 8 * native.RUNG, 0)
    # First the flags, then the look: see the argument in `ring`.
    set_flags(table, 1)
    place = find(table)
    if place < 0:
        num_ready = emit.poll(entries, num_entries, timeout_ms)
        place = find(table)
        if num_ready > 0:
            for link_idx in range(load(table + 8 * native.NUM_LINKS)):
                port = load(table + 8 * (native.FIRST_LINK + link_idx))
                # To be silenced before the next sleep, when nobody waits for that.
                found = load(entries + 8 * link_idx) >> native.FOUND_SHIFT
                store(port + 8 * native.RUNG, found)
    set_flags(table, 0)
    return place


def next_request(table, spin_ns, entries, num_entries, timeout_ms):
    place = find(table)
    if place < 0 and spin_ns > 0 and load(table + 8 * native.IS_QUICK) != 0:
        end_ns = emit.monotonic_ns() + spin_ns
        while place < 0 and emit.monotonic_ns() < end_ns:
            for _ in range(native.NUM_LOOKS):
                emit.pause()
                place = find(table)
                if place >= 0:
                    break
    if place < 0 and timeout_ms > 0:
        place = sleep_for_request(table, entries, num_entries, timeout_ms)
    if place < 0:
        return native.NOTHING
    link_idx, slot_idx = place // ring.MAX_SLOTS, place % ring.MAX_SLOTS
    store(table + 8 * native.NEXT_LINK, link_idx + 1)
    port = load(table + 8 * (native.FIRST_LINK + link_idx))
    violation = take(table, port + 8 * native.PORT_WORDS * slot_idx, spin_ns)
    return (place << native.STATUS_BITS) | violation


def send_reply(port, sequence, payload, compute_s, queue_s, sums):
    num_tokens, hidden_size = sums.shape[0], field(port, native.HIDDEN_SIZE)
    if (
        sums.shape[1] != hidden_size
        or has_gaps(sums)
        or num_tokens > field(port, native.MAX_TOKENS)
    ):
        return native.BAD_ARRAYS
    count = num_tokens * hidden_size
    num_bytes = array_bytes(payload, count, 8)
    header = begin_header(port, ring.KIND_REPLY, sequence, payload, num_bytes)
    store(header + 8 * ring.TOKENS, num_tokens)
    emit.store_time(header + 8 * ring.TIME, compute_s)
    emit.store_time(header + 8 * ring.OTHER_TIME, queue_s)
    slot, state = field(port, native.REPLY_SLOT), port + STATE
    to, source, is_large = slot + ring.HEADER_BYTES, emit.address_of(sums), 0
    emit.start_checksum(state)
    if payload == ring.PAYLOAD_BF16:
        is_large = emit.pack_bf16_sums(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        is_large = emit.pack_f16_sums(state, to, source, count)
    else:
        emit.copy_words(state, to, source, 2 * count)
    if is_large != 0:
        return native.OUT_OF_RANGE
    store(port + 8 * native.BUSY, 0)
    status = publish(port, slot, field(port, native.REPLY_WORD), sequence, num_bytes)
    link = port - 8 * native.PORT_WORDS * field(port, native.SLOT_IDX)
    store(link + 8 * native.REPLIED_NS, emit.monotonic_ns())
    return status


def send_failure(port, sequence, text):
    num_bytes = text.shape[0]
    if num_bytes > ring.FAILURE_LIMIT_BYTES or num_bytes & 3 != 0:
        return native.BAD_ARRAYS
    begin_header(port, ring.KIND_FAILURE, sequence, 0, num_bytes)
    slot, state = field(port, native.REPLY_SLOT), port + STATE
    emit.start_checksum(state)
    emit.copy_words(state, slot + ring.HEADER_BYTES, emit.address_of(text), num_bytes >> 2)
    store(port + 8 * native.BUSY, 0)
    return publish(port, slot, field(port, native.REPLY_WORD), sequence, num_bytes)


# -- both -----------------------------------------------------------------------------------------


def load_word(address):
    return emit.load_ordered(address)


def checksum(state, header, source, target, num_bytes):
    emit.start_checksum(state)
    emit.copy_words(state, target, source, num_bytes >> 2)
    return emit.finish_checksum(state, header)
