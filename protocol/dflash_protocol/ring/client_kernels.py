"""The client's kernels of the ring: send requests, receive replies.

`compiled` compiles them and describes their arguments and results.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dflash_protocol.ring import compiled as native
from dflash_protocol.ring import compiled_experts as experts
from dflash_protocol.ring import emit
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.emit import helper, load, store
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

MS = 10**6


def send_request(
    port,
    sequence,
    layer_id,
    phase,
    deadline_ms,
    hidden,
    expert_ids,
    group_starts,
    token_indices,
    weights,
):
    if hidden.shape[1] != field(port, native.HIDDEN_SIZE) or has_gaps(hidden):
        return native.BAD_ARRAYS
    head, num_tokens = (sequence, layer_id, phase, deadline_ms), hidden.shape[0]
    routing = (expert_ids, group_starts, token_indices, weights)
    return send(port, head, num_tokens, emit.address_of(hidden), 0, routing)


def send_moved_request(
    port,
    sequence,
    layer_id,
    phase,
    deadline_ms,
    digest,
    expert_ids,
    group_starts,
    token_indices,
    weights,
):
    head, num_tokens = (sequence, layer_id, phase, deadline_ms), field(port, native.MOVED_TOKENS)
    routing = (expert_ids, group_starts, token_indices, weights)
    return send(port, head, num_tokens, 0, digest, routing)


@helper
def send(port, head, num_tokens, source, digest, routing):
    """`source` is the address of a private array of rows; 0: a device has moved them."""
    expert_ids, group_starts, token_indices, weights = routing
    num_groups, num_pairs = expert_ids.shape[0], token_indices.shape[0]
    if group_starts.shape[0] != num_groups + 1 or weights.shape[0] != num_pairs:
        return native.BAD_ARRAYS
    places = (
        source,
        emit.address_of(expert_ids),
        emit.address_of(group_starts),
        emit.address_of(token_indices),
        emit.address_of(weights),
    )
    return send_from(port, head, (num_tokens, num_groups, num_pairs), digest, places)


@helper
def send_from(port, head, counts, digest, places):
    """`places`: addresses of private arrays, that of the rows as in `send`."""
    sequence, layer_id, phase, deadline_ms = head
    num_tokens, num_groups, num_pairs = counts
    source, expert_ids, group_starts, token_indices, weights = places
    if num_tokens < 0 or num_groups < 0 or num_groups > num_pairs:
        return native.BAD_ARRAYS
    if num_tokens > field(port, native.MAX_TOKENS) or num_pairs > field(port, native.MAX_PAIRS):
        return native.TOO_LARGE
    hidden_size = field(port, native.HIDDEN_SIZE)
    payload = field(port, native.SENDS) if source != 0 else ring.PAYLOAD_F32
    num_bytes = request_bytes(payload, num_tokens, num_groups, num_pairs, hidden_size)
    header = begin_header(port, ring.KIND_REQUEST, sequence, payload, num_bytes)
    store(header + 8 * ring.LAYER, layer_id)
    store(header + 8 * ring.TOKENS, num_tokens)
    store(header + 8 * ring.GROUPS, num_groups)
    store(header + 8 * ring.PAIRS, num_pairs)
    store(header + 8 * ring.PHASE, phase)
    emit.store_time(header + 8 * ring.TIME, deadline_ms)
    emit.store_time(header + 8 * ring.OTHER_TIME, 1e-9 * emit.monotonic_ns())
    store(header + 8 * ring.MOVED, 1 if source == 0 else 0)
    store(header + 8 * ring.DIGEST, digest)
    slot, state, count = field(port, native.REQUEST_SLOT), port + STATE, num_tokens * hidden_size
    to = slot + ring.HEADER_BYTES
    emit.start_checksum(state)
    is_large = 0
    if source == 0:
        pass
    elif payload == ring.PAYLOAD_BF16:
        is_large = emit.pack_bf16(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        is_large = emit.pack_f16(state, to, source, count)
    else:
        emit.copy_words(state, to, source, count)
    if is_large != 0:
        return native.OUT_OF_RANGE
    to += lines(array_bytes(payload, count, 4))
    emit.copy_words(state, to, expert_ids, num_groups)
    to += lines(4 * num_groups)
    emit.copy_words(state, to, group_starts, num_groups + 1)
    to += lines(4 * num_groups + 4)
    emit.copy_words(state, to, token_indices, num_pairs)
    to += lines(4 * num_pairs)
    emit.copy_words(state, to, weights, num_pairs)
    return publish(port, slot, field(port, native.REQUEST_WORD), sequence, num_bytes)


@helper
def reply_violation(port, sequence, num_tokens, moved):
    """Check the copy of the header; 0 if it is a valid reply or failure for the request."""
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
    if payload != ring.PAYLOAD_F64 and (moved != 0 or payload != field(port, native.NARROW)):
        return native.WRONG_PAYLOAD
    if load(header + 8 * ring.MOVED) != moved:
        return native.WRONG_PAYLOAD
    if load(header + 8 * ring.TOKENS) != num_tokens:
        return native.WRONG_COUNTS
    count = num_tokens * field(port, native.HIDDEN_SIZE)
    if num_bytes != array_bytes(payload, count, 8):
        return native.WRONG_BYTES
    return 0


@helper
def timeout_ms(now_ns, end_ns):
    """Remaining time for poll(2), rounded up."""
    return max((end_ns - now_ns + (MS - 1)) // MS, 0)


@helper
def sleep_for_reply(port, sequence, wait_ns):
    """Sleep until the reply's word changes, the time is up or another entry is ready; returns the
    word."""
    word, sleeps = field(port, native.REPLY_WORD), field(port, native.SLEEPS)
    entries = field(port, native.ENTRIES)
    if load(entries + 8 * native.CLIENT_RUNG) != 0:
        emit.silence_bell(load(entries) & 0xFFFFFFFF)
        store(entries + 8 * native.CLIENT_RUNG, 0)
    now_ns = emit.monotonic_ns()
    end_ns = now_ns + wait_ns
    # The flag first, then the word: see `layout`.
    emit.store_ordered(sleeps, 1)
    num_ready = 0
    while num_ready == 0 and not is_news(port, sequence, emit.load_ordered(word)):
        if now_ns >= end_ns:
            break
        num_ready = emit.poll(entries, 2, timeout_ms(now_ns, end_ns))
        now_ns = emit.monotonic_ns()
    emit.store_ordered(sleeps, 0)
    if num_ready > 0:
        # Silenced before the next sleep, off the path of this reply.
        store(entries + 8 * native.CLIENT_RUNG, load(entries) >> native.FOUND_SHIFT)
    return emit.load_acquire(word)


@helper
def is_news(port, sequence, found):
    return found == sequence or (
        found != field(port, native.LAST) and found != field(port, native.REFUSED)
    )


def receive_reply(port, sequence, spin_ns, wait_ns, sums):
    to = emit.address_of(sums)
    return receive(port, sequence, spin_ns, wait_ns, sums.shape[0], to)


def receive_moved_reply(port, sequence, spin_ns, wait_ns, num_tokens):
    return receive(port, sequence, spin_ns, wait_ns, num_tokens, 0)


@helper
def receive(port, sequence, spin_ns, wait_ns, num_tokens, to):
    """`to` is the address of a private array for the sums; 0: a device moved them, leave them."""
    word = field(port, native.REPLY_WORD)
    found = emit.load_acquire(word)
    if found != sequence and spin_ns > 0:
        end_ns = emit.monotonic_ns() + spin_ns
        while found != sequence and emit.monotonic_ns() < end_ns:
            for _ in range(native.NUM_POLLS):
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
    copy_header(slot, header)
    violation = reply_violation(port, sequence, num_tokens, 1 if to == 0 else 0)
    if violation != 0:
        return native.FAILURE - violation
    num_bytes, payload = load(header + 8 * ring.PAYLOAD_BYTES), load(header + 8 * ring.PAYLOAD)
    is_failure = load(header + 8 * ring.KIND) == ring.KIND_FAILURE
    source, count = slot + ring.HEADER_BYTES, num_tokens * field(port, native.HIDDEN_SIZE)
    emit.start_checksum(state)
    is_bad = 0
    if is_failure:
        emit.copy_words(state, field(port, native.TEXT), source, num_bytes >> 2)
    elif to == 0:
        pass
    elif payload == ring.PAYLOAD_BF16:
        is_bad = emit.unpack_bf16_sums(state, to, source, count)
    elif payload == ring.PAYLOAD_F16:
        is_bad = emit.unpack_f16_sums(state, to, source, count)
    else:
        is_bad = emit.copy_sums(state, to, source, count)
    if emit.finish_checksum(state, header) != load(header + 8 * ring.CHECKSUM):
        return native.FAILURE - native.WRONG_CHECKSUM
    if is_failure:
        return native.FAILURE
    return num_bytes if is_bad == 0 else num_bytes | native.IS_NOT_FINITE


# -- for compiled callers: see `compiled_experts` -------------------------------------------------


@helper
def increase(request, word, amount):
    store(request + 8 * word, field(request, word) + amount)


@helper
def increase_time(request, word, amount_s):
    emit.store_time(request + 8 * word, emit.load_time(request + 8 * word) + amount_s)


def post(port, request):
    if field(port, native.IN_FLIGHT) != 0:
        return native.UNSENT
    # Consumed even if sending fails.
    sequence = field(port, native.NEXT_SEQUENCE)
    store(port + 8 * native.NEXT_SEQUENCE, sequence + field(port, native.NUM_SLOTS))
    deadline_ms = 1e-6 * field(request, experts.REQUEST_DEADLINE_NS)
    layer_id, phase = field(request, experts.REQUEST_LAYER), field(request, experts.BATCH_PHASE)
    counts = (
        field(request, experts.BATCH_TOKENS),
        field(request, experts.BATCH_GROUPS),
        field(request, experts.BATCH_PAIRS),
    )
    places = (
        field(request, experts.BATCH_HIDDEN),
        field(request, experts.BATCH_EXPERT_IDS),
        field(request, experts.BATCH_GROUP_STARTS),
        field(request, experts.BATCH_TOKEN_INDICES),
        field(request, experts.BATCH_WEIGHTS),
    )
    store(request + 8 * experts.REQUEST_POSTED_NS, emit.monotonic_ns())
    store(request + 8 * experts.REQUEST_WAITING_NS, 0)
    status = send_from(port, (sequence, layer_id, phase, deadline_ms), counts, 0, places)
    if status < 0:
        return native.UNSENT
    store(port + 8 * native.IN_FLIGHT, sequence)
    increase(request, experts.REQUEST_BYTES_SENT, status)
    return status


@helper
def is_aborted(request):
    abort = field(request, experts.REQUEST_ABORT)
    return abort != 0 and emit.load_acquire(abort) != 0


@helper
def wait_for_reply(port, request, sequence):
    """Wait for the word of a reply: 0, or the status that ends `collect`."""
    word, now_ns = field(port, native.REPLY_WORD), emit.monotonic_ns()
    end_ns = field(request, experts.REQUEST_POSTED_NS) + field(request, experts.REQUEST_DEADLINE_NS)
    spin_ns = 0
    if field(request, experts.REQUEST_WAITING_NS) == 0:
        store(request + 8 * experts.REQUEST_WAITING_NS, now_ns)
        spin_ns = min(field(request, experts.REQUEST_SPIN_NS), experts.SLICE_NS)
    end_spinning_ns = min(now_ns + spin_ns, end_ns)
    is_there = is_news(port, sequence, emit.load_acquire(word))
    while not is_there and now_ns < end_spinning_ns:
        for _ in range(native.NUM_POLLS):
            emit.pause()
            is_there = is_news(port, sequence, emit.load_acquire(word))
            if is_there:
                break
        if is_aborted(request):
            return native.ABORTED
        now_ns = emit.monotonic_ns()
    if is_there:
        return 0
    if is_aborted(request):
        return native.ABORTED
    idle, region = field(request, experts.REQUEST_IDLE), field(request, experts.REQUEST_REGION)
    if idle != 0:
        store(idle, emit.load_acquire(region))
    found = sleep_for_reply(port, sequence, max(min(experts.SLICE_NS, end_ns - now_ns), 0))
    if is_news(port, sequence, found):
        return 0
    if is_aborted(request):
        return native.ABORTED
    if load(field(port, native.ENTRIES) + 8) >> native.FOUND_SHIFT != 0:
        return native.LOST
    return native.LATE if emit.monotonic_ns() >= end_ns else native.NOTHING


def collect(port, request):
    sequence = field(port, native.IN_FLIGHT)
    if sequence == 0:
        return native.UNSENT
    status = wait_for_reply(port, request, sequence)
    if status < 0:
        return status
    num_tokens, sums = field(request, experts.BATCH_TOKENS), field(request, experts.BATCH_SUMS)
    status = receive(port, sequence, 0, 0, num_tokens, sums)
    if status != native.FAILURE - native.STALE:  # the request's own slot may still be written
        store(port + 8 * native.IN_FLIGHT, 0)
    if status < 0:
        return status
    if status & native.IS_NOT_FINITE != 0:
        return native.NOT_FINITE
    hidden_size, rows = field(port, native.HIDDEN_SIZE), field(request, experts.REQUEST_ROWS)
    out = field(request, experts.REQUEST_OUT)
    if rows == 0:
        emit.add_doubles(out, sums, num_tokens * hidden_size)
    else:
        for token in range(num_tokens):
            row = emit.load_int32(rows + 4 * token)
            row_bytes = 8 * hidden_size
            emit.add_doubles(out + row_bytes * row, sums + row_bytes * token, hidden_size)
    now_ns, header = emit.monotonic_ns(), port + HEADER
    increase(request, experts.REQUEST_NUM_REPLIES, 1)
    increase(request, experts.REQUEST_BYTES_RECEIVED, status)
    posted_ns = field(request, experts.REQUEST_POSTED_NS)
    increase(request, experts.REQUEST_TRIP_NS, now_ns - posted_ns)
    waiting_ns = field(request, experts.REQUEST_WAITING_NS)
    increase(request, experts.REQUEST_WAIT_NS, now_ns - waiting_ns)
    increase_time(request, experts.REQUEST_COMPUTE_S, emit.load_time(header + 8 * ring.TIME))
    increase_time(request, experts.REQUEST_QUEUE_S, emit.load_time(header + 8 * ring.OTHER_TIME))
    return status
