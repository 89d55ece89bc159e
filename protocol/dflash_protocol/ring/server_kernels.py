"""The server's kernels of the ring: take requests, have them computed, send replies.

`compiled` compiles them and describes their arguments and results.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dflash_protocol.ring import compiled as native
from dflash_protocol.ring import compiled_experts as experts
from dflash_protocol.ring import emit
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.emit import helper, load, load_int32, store
from dflash_protocol.ring.shared_kernels import (
    HEADER,
    STATE,
    array_bytes,
    begin_header,
    copy_header,
    field,
    has_gaps,
    has_times,
    lines,
    publish,
    request_bytes,
)


@helper
def set_flags(table, value):
    """Set the server's sleep flag of all links: 1 = the client must ring."""
    for link_idx in range(load(table + 8 * native.NUM_LINKS)):
        port = load(table + 8 * (native.FIRST_LINK + link_idx))
        emit.store_ordered(field(port, native.SLEEPS), value)


@helper
def find(table):
    """link_idx · MAX_SLOTS + slot_idx of the next new request, or -1: the oldest of the first link
    that has any, round-robin from NEXT_LINK."""
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
    """Check the copy of the header against the link's limits; 0 if it is valid."""
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
    moved = load(header + 8 * ring.MOVED)
    if moved != 0 and (moved != 1 or field(port, native.MOVES) == 0 or payload != ring.PAYLOAD_F32):
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
    """Store in WAITED by how much the request's lag, stamp to now, exceeds the link's least lag.

    Both ends read the same clock, but a time namespace may shift one by a constant.
    """
    sent_s = emit.load_time(port + HEADER + 8 * ring.OTHER_TIME)
    lag_s = 1e-9 * now_ns - sent_s
    least_lag_s = emit.load_time(link + 8 * native.LEAST_LAG)
    if lag_s < least_lag_s:
        least_lag_s = lag_s
        emit.store_time(link + 8 * native.LEAST_LAG, lag_s)
    emit.store_time(port + 8 * native.WAITED, lag_s - least_lag_s)


@helper
def index(address, position):
    """Load an element of an int32 array."""
    return load_int32(address + 4 * position)


@helper
def routing_bound(port):
    """The checks of RoutedBatch.check on the private arrays: 0 if they fail, else one more than the
    largest expert id, at least 1."""
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
    """Copy a slot into the port's private arrays; returns 0 or the violation."""
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
    copy_header(slot, header)
    violation = request_violation(port, sequence)
    if violation != 0:
        store(header + 8 * ring.SEQUENCE, sequence)
        return violation
    num_tokens, num_groups = load(header + 8 * ring.TOKENS), load(header + 8 * ring.GROUPS)
    num_pairs, payload = load(header + 8 * ring.PAIRS), load(header + 8 * ring.PAYLOAD)
    count = num_tokens * field(port, native.HIDDEN_SIZE)
    source, to = slot + ring.HEADER_BYTES, field(port, native.HIDDEN)
    emit.start_checksum(state)
    if load(header + 8 * ring.MOVED) != 0:
        pass
    elif payload == ring.PAYLOAD_BF16:
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
    """Sleep until a bell rings, another entry is ready or time is up; returns `find`'s result."""
    for link_idx in range(load(table + 8 * native.NUM_LINKS)):
        port, entry = load(table + 8 * (native.FIRST_LINK + link_idx)), entries + 8 * link_idx
        if field(port, native.RUNG) != 0:
            emit.silence_bell(load(entry) & 0xFFFFFFFF)
            store(port + 8 * native.RUNG, 0)
    # The flags first, then the words: see `layout`.
    set_flags(table, 1)
    place = find(table)
    if place < 0:
        num_ready = emit.poll(entries, num_entries, timeout_ms)
        place = find(table)
        if num_ready > 0:
            num_links = load(table + 8 * native.NUM_LINKS)
            for link_idx in range(num_links):
                port = load(table + 8 * (native.FIRST_LINK + link_idx))
                # Silenced before the next sleep, off the path of this request.
                found = load(entries + 8 * link_idx) >> native.FOUND_SHIFT
                store(port + 8 * native.RUNG, found)
            note_others(table, entries + 8 * num_links, num_entries - num_links)
    set_flags(table, 0)
    return place


@helper
def note_others(table, entries, num_entries):
    """Store whether poll(2) has found one of these descriptors ready. The first one is not counted:
    it says that CHANGED is set."""
    found = 0
    for index in range(1, num_entries):
        found |= load(entries + 8 * index) >> native.FOUND_SHIFT
    store(load(table + 8 * native.SERVICE) + 8 * native.IS_OTHER_READY, 1 if found != 0 else 0)


@helper
def find_soon(table, spin_ns):
    """`find`; if requests come quickly, spin for one. Fruitless spinning ends that."""
    place = find(table)
    if place < 0 and spin_ns > 0 and load(table + 8 * native.IS_QUICK) != 0:
        end_ns = emit.monotonic_ns() + spin_ns
        while place < 0 and emit.monotonic_ns() < end_ns:
            for _ in range(native.NUM_POLLS):
                emit.pause()
                place = find(table)
                if place >= 0:
                    break
        if place < 0:
            store(table + 8 * native.IS_QUICK, 0)
    return place


@helper
def answer(service, link, port):
    """Compute a request that was taken, and send its sums: ANSWERED, COMPUTED, or 0: it is left to
    Python, which then does what this does, and refuses what is to be refused."""
    # Read after the request: one that was sent after a change is served by what Python knows now.
    if emit.load_ordered(service + 8 * native.CHANGED) != 0:
        return 0
    header, hidden_size = port + HEADER, field(port, native.HIDDEN_SIZE)
    layer_id, num_tokens = load(header + 8 * ring.LAYER), load(header + 8 * ring.TOKENS)
    num_pairs, bound = load(header + 8 * ring.PAIRS), field(port, native.ROUTING_BOUND)
    if layer_id >= field(link, native.NUM_LAYERS) or load(header + 8 * ring.MOVED) != 0:
        return 0
    layer = field(link, native.LAYERS) + 8 * experts.LAYER_WORDS * layer_id
    compute, waited_s = (
        field(layer, experts.LAYER_COMPUTE),
        emit.load_time(port + 8 * native.WAITED),
    )
    if (
        compute == 0
        or bound < 1
        or bound > field(layer, experts.LAYER_NUM_EXPERTS)
        or hidden_size != field(layer, experts.LAYER_HIDDEN_SIZE)
        or num_tokens > field(layer, experts.LAYER_MAX_TOKENS)
        or num_pairs > field(layer, experts.LAYER_MAX_PAIRS)
        or waited_s * 1e3 > emit.load_time(header + 8 * ring.TIME)
    ):
        return 0
    started_ns, sums = emit.monotonic_ns(), field(link, native.SUMS)
    emit.store_ordered(service + 8 * native.BUSY_SINCE_NS, started_ns)
    emit.clear(sums, 8 * num_tokens * hidden_size)
    batch = service + 8 * native.BATCH
    store(batch + 8 * experts.BATCH_TOKENS, num_tokens)
    store(batch + 8 * experts.BATCH_GROUPS, load(header + 8 * ring.GROUPS))
    store(batch + 8 * experts.BATCH_PAIRS, num_pairs)
    store(batch + 8 * experts.BATCH_HIDDEN, field(port, native.HIDDEN))
    store(batch + 8 * experts.BATCH_EXPERT_IDS, field(port, native.EXPERT_IDS))
    store(batch + 8 * experts.BATCH_GROUP_STARTS, field(port, native.GROUP_STARTS))
    store(batch + 8 * experts.BATCH_TOKEN_INDICES, field(port, native.TOKEN_INDICES))
    store(batch + 8 * experts.BATCH_WEIGHTS, field(port, native.WEIGHTS))
    store(batch + 8 * experts.BATCH_SUMS, sums)
    store(batch + 8 * experts.BATCH_PHASE, load(header + 8 * ring.PHASE))
    if emit.call(compute, field(layer, experts.LAYER_EXPERTS), batch) == 0:
        return 0
    now_ns = emit.monotonic_ns()
    if now_ns >= load(service + 8 * native.CHECKED_UNTIL_NS):
        return native.COMPUTED
    sequence, payload = load(header + 8 * ring.SEQUENCE), field(link, native.REPLIES)
    times = (1e-9 * (now_ns - started_ns), waited_s)
    # Before the reply, after which its receiver may look.
    num_answered = load(service + 8 * native.NUM_ANSWERED)
    store(service + 8 * native.NUM_ANSWERED, num_answered + 1)
    emit.store_ordered(service + 8 * native.BUSY_SINCE_NS, 0)
    copy_header(header, service + 8 * native.SAVED)
    if reply(port, sequence, payload, times, num_tokens, sums) < 0:
        copy_header(service + 8 * native.SAVED, header)
        store(service + 8 * native.NUM_ANSWERED, num_answered)
        store(service + 8 * native.BUSY_SINCE_NS, started_ns)
        return native.COMPUTED
    return native.ANSWERED


@helper
def is_python_due(table, service, entries, num_entries):
    """Whether to return to Python before the next request; looks at descriptors at intervals."""
    now_ns = emit.monotonic_ns()
    if (
        emit.load_ordered(service + 8 * native.CHANGED) != 0
        or now_ns >= load(service + 8 * native.RETURN_NS)
        or load(service + 8 * native.IS_OTHER_READY) != 0
    ):
        return True
    if now_ns < load(service + 8 * native.LOOK_NS):
        return False
    store(service + 8 * native.LOOK_NS, now_ns + native.LOOK_EVERY_NS)
    num_links = load(table + 8 * native.NUM_LINKS)
    others, num_others = entries + 8 * num_links, num_entries - num_links
    if emit.poll(others, num_others, 0) <= 0:
        return False
    note_others(table, others, num_others)
    return True


def serve(table, spin_ns, entries, num_entries, timeout_ms):
    service = load(table + 8 * native.SERVICE)
    store(service + 8 * native.IS_OTHER_READY, 0)
    place, found = find_soon(table, spin_ns), native.NOTHING
    if place < 0 and timeout_ms > 0:
        place = sleep_for_request(table, entries, num_entries, timeout_ms)
    while place >= 0:
        link_idx, slot_idx = place // ring.MAX_SLOTS, place % ring.MAX_SLOTS
        store(table + 8 * native.NEXT_LINK, link_idx + 1)
        link = load(table + 8 * (native.FIRST_LINK + link_idx))
        port = link + 8 * native.PORT_WORDS * slot_idx
        status = take(table, port, spin_ns)
        if status == 0:
            status = answer(service, link, port)
        found = (place << native.STATUS_BITS) | status
        if status != native.ANSWERED or is_python_due(table, service, entries, num_entries):
            break
        place = find_soon(table, spin_ns)
    return found


def send_reply(port, sequence, payload, compute_s, queue_s, sums):
    num_tokens, hidden_size = sums.shape[0], field(port, native.HIDDEN_SIZE)
    if (
        sums.shape[1] != hidden_size
        or has_gaps(sums)
        or num_tokens > field(port, native.MAX_TOKENS)
    ):
        return native.BAD_ARRAYS
    times = (compute_s, queue_s)
    return reply(port, sequence, payload, times, num_tokens, emit.address_of(sums))


@helper
def reply(port, sequence, payload, times, num_tokens, source):
    """Send sums from a private array; `times` are compute_s and queue_s."""
    count = num_tokens * field(port, native.HIDDEN_SIZE)
    begin_reply(port, sequence, payload, times[0], times[1], num_tokens)
    slot, state = field(port, native.REPLY_SLOT), port + STATE
    to, is_large = slot + ring.HEADER_BYTES, 0
    emit.start_checksum(state)
    if payload == ring.PAYLOAD_BF16:
        is_large = emit.pack_bf16_sums(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        is_large = emit.pack_f16_sums(state, to, source, count)
    else:
        emit.copy_words(state, to, source, 2 * count)
    if is_large != 0:
        return native.OUT_OF_RANGE
    return publish_reply(port, sequence)


def send_moved_reply(port, sequence, compute_s, queue_s, num_tokens, digest):
    if num_tokens < 0 or num_tokens > field(port, native.MAX_TOKENS):
        return native.BAD_ARRAYS
    header = begin_reply(port, sequence, ring.PAYLOAD_F64, compute_s, queue_s, num_tokens)
    store(header + 8 * ring.MOVED, 1)
    store(header + 8 * ring.DIGEST, digest)
    emit.start_checksum(port + STATE)
    return publish_reply(port, sequence)


@helper
def begin_reply(port, sequence, payload, compute_s, queue_s, num_tokens):
    num_bytes = array_bytes(payload, num_tokens * field(port, native.HIDDEN_SIZE), 8)
    header = begin_header(port, ring.KIND_REPLY, sequence, payload, num_bytes)
    store(header + 8 * ring.TOKENS, num_tokens)
    emit.store_time(header + 8 * ring.TIME, compute_s)
    emit.store_time(header + 8 * ring.OTHER_TIME, queue_s)
    return header


@helper
def publish_reply(port, sequence):
    slot, num_bytes = field(port, native.REPLY_SLOT), load(port + HEADER + 8 * ring.PAYLOAD_BYTES)
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
