"""The shared-memory transport, parent's end: requests and replies in a ring that both sides map.

One SharedClient for each link; `shared_server` is the other end. A waiter polls the ring for a
short time, then sleeps until its bell rings; nothing passes through ZeroMQ. `ring.layout` draws the
memory and argues why its order of accesses is correct.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.device_payload import DmaCopy, ExpectedSums
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    one_line,
)
from dflash_protocol.ids import AnyArray, F64Array, Phase
from dflash_protocol.payloads import PayloadType, pack_hidden
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import FAILURE, IS_NOT_FINITE, NOTHING, OUT_OF_RANGE
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.ports import (
    HEADER_AT,
    PAYLOAD_CODES,
    PHASES,
    Ports,
    header_word,
    poll_entries,
    violation_error,
)
from dflash_protocol.transports.shared_server import SharedServer as SharedServer
from dflash_protocol.wire.transport import DeviceReply, LinkLimits, Reply, TransportCounters

_SPIN_S, _LONG_SPIN_S = 50e-6, 1e-3
_MANY_CORES = 8
_LONGEST_WAIT_S = 1.0
_FREE_SLOT_POLL_S = 0.01
"""How long a wait for a free slot polls each slot in use."""

_DECODE, _DECODE_CODE = Phase.DECODE, PHASES.index(Phase.DECODE)
_TIMES = struct.Struct("<2d")
_TIMES_AT = HEADER_AT + 8 * ring.TIME


def spin_window_s() -> float:
    """Default time that a waiter polls the ring before it sleeps.

    0 on a single core, which the other side needs; on many cores long enough for a layer of a
    decode step.
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_cores >= _MANY_CORES:
        return _LONG_SPIN_S
    return _SPIN_S if num_cores > 1 else 0.0


class _Slot:
    """State of a slot at the parent."""

    __slots__ = (
        "expected",
        "index",
        "is_moved",
        "num_tokens",
        "port",
        "reading",
        "reply_at",
        "request_at",
        "taken",
        "text",
    )

    def __init__(self, ports: Ports, shape: RingShape, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        """Tokens of the request in the slot."""
        self.is_moved = False
        """Whether a device moves the request's rows, and will move its sums."""
        self.expected: ExpectedSums | None = None
        """Device memory for the sums."""
        self.reading: tuple[int, DmaCopy] | None = None
        """After the reply's header has arrived: payload bytes, and the copy of the sums."""
        self.request_at = shape.request_slot_at(index) + ring.HEADER_BYTES
        self.reply_at = shape.reply_slot_at(index) + ring.HEADER_BYTES
        self.port = ports.address(index)
        self.taken = ports.taken(index)
        self.text = np.zeros(ring.FAILURE_LIMIT_BYTES, np.uint8)
        ports.words[index, ring_native.TEXT] = self.text.ctypes.data


class _Unsent(NamedTuple):
    """A request whose rows are being copied into its slot; published when the copy is complete."""

    slot: _Slot
    head: tuple[int, ...]
    deadline_ms: float
    num_tokens: int
    rows: DmaCopy
    routing: tuple[AnyArray, ...]


class SharedClient:
    """Implements ClientTransport over a segment, which it owns from now on.

    `lost_fd` becomes readable when the supervisor finds the link lost; `lost_reason` then says why.
    `payload` was negotiated; `counters` are incremented; `before_sleep` is called before each
    sleep. More requests than slots may be in flight: replies that have arrived are then read and
    kept, to free their slots.

    Rows that a device moves are still being copied when `submit` returns; the request is published
    by the next call that finds the copy complete or waits for it: `push`, `poll`, `submit`, `wait`.
    A slot is free, pending (waiting for a reply) or abandoned (forgotten before its reply).
    """

    def __init__(
        self,
        segment: Segment,
        *,
        lost_fd: int,
        lost_reason: Callable[[], str],
        payload: PayloadType = PayloadType.F32,
        spin_s: float | None = None,
        counters: TransportCounters | None = None,
        before_sleep: Callable[[], object] = lambda: None,
    ) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self._segment = segment
        self._lost_reason = lost_reason
        self._spin_s = spin_window_s() if spin_s is None else spin_s
        self._spin_ns = int(self._spin_s * 1e9)
        self._is_quick = True
        self._before_sleep = before_sleep
        self._counters = TransportCounters() if counters is None else counters
        shape = segment.shape
        self._payload, self._payload_code = payload, PAYLOAD_CODES[payload]
        narrow = ring.PAYLOAD_F64 if payload is PayloadType.F32 else self._payload_code
        limits = LinkLimits(shape.hidden_size, shape.max_tokens, 0)
        self._ports = Ports(segment, is_client=True, narrow=narrow, limits=limits)
        self._num_slots = shape.num_slots
        self._hidden_size = shape.hidden_size
        self._window = segment.window if payload is PayloadType.F32 else None
        # Last in, first out: the slot used last is still in both sides' caches.
        self._free = [_Slot(self._ports, shape, i) for i in reversed(range(shape.num_slots))]
        self._pending: dict[int, _Slot] = {}
        self._abandoned: dict[int, _Slot] = {}
        self._arrived: dict[int, Reply | ProtocolError] = {}
        self._unsent: _Unsent | None = None
        self._reading: int | None = None
        """Sequence of the request whose sums are being copied to the device."""
        self._sequence = 0
        self._entries = poll_entries(segment.client_bell, lost_fd, num_more=1)
        self._ports.words[:, ring_native.ENTRIES] = self._entries.ctypes.data
        self._poller = select.poll()
        self._poller.register(lost_fd, select.POLLIN)
        kernels = ring_native.kernels()
        self._send, self._receive = kernels.send_request, kernels.receive_reply
        self._send_moved = kernels.send_moved_request
        self._receive_moved = kernels.receive_moved_reply
        self._load_word = kernels.load_word

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        """Send a request; if no slot is free, waits for one, up to the deadline.

        Raises: ProtocolError with code ``capacity`` if the batch exceeds the negotiated size;
        DaemonUnavailable if no slot becomes free, or all belong to abandoned requests: the link
        needs a new segment then.
        """
        self._publish()
        free = self._free
        num_tokens, _ = batch.hidden_shape
        slot = free.pop() if free else self._free_slot(deadline_s)
        last = self._sequence
        # The next sequence congruent to the slot's index.
        sequence = last + 1 + (slot.index - last - 1) % self._num_slots
        self._sequence = sequence  # never reused, even if sending fails
        phase = batch.phase
        phase_code = _DECODE_CODE if phase is _DECODE else PHASES.index(phase)
        deadline_ms = deadline_s * 1e3
        head = (slot.port, sequence, layer_id, phase_code)
        try:
            slot.is_moved = False
            if self._window is not None and batch.rows.is_on_device:
                status = self._move_rows(slot, head, deadline_ms, batch)
                slot.is_moved = True
            else:
                status = self._send(
                    *head,
                    self._payload_code,
                    deadline_ms,
                    batch.hidden,
                    batch.expert_ids,
                    batch.group_starts,
                    batch.token_indices,
                    batch.weights,
                )
                if status < 0:
                    status = self._send_otherwise(head, deadline_ms, batch, status)
        except BaseException:
            self._unsent = None
            free.append(slot)
            raise
        slot.num_tokens = num_tokens
        self._pending[sequence] = slot
        self.bytes_sent += status
        return sequence

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        slot = self._pending.get(sequence)
        if slot is None:
            return self._take_arrived(sequence)
        if slot.is_moved:
            return self._wait_for_moved(sequence, slot, deadline_s)
        # Allocate before the reply arrives, while there is time.
        sums = np.empty((slot.num_tokens, self._hidden_size))
        reply = Reply(sums, 0.0)
        spin_ns = self._spin_ns if self._is_quick else 0
        if deadline_s < self._spin_s:
            spin_ns = min(spin_ns, int(max(deadline_s, 0.0) * 1e9))
        status = self._receive(slot.port, sequence, spin_ns, 0, sums)
        if status == NOTHING:
            self._before_sleep()
            status = self._wait_for_reply(self._receive, (slot.port, sequence), sums, deadline_s)
        if status < 0:
            raise self._failure(sequence, slot, status)
        self._complete(sequence, slot, status, reply)
        return reply

    def forget(self, sequence: int) -> None:
        self._arrived.pop(sequence, None)
        slot = self._pending.pop(sequence, None)
        if slot is None:
            return
        slot.expected = slot.reading = None  # the window keeps memory that a copy still uses
        if self._reading == sequence:
            self._reading = None
        if self._unsent is not None and self._unsent.slot is slot:
            self._unsent = None  # it was never published
            self._free.append(slot)
        else:
            self._abandoned[sequence] = slot

    def push(self, sequence: int) -> None:
        """Publish a request, after waiting for its rows to be copied. Raises: DeviceUnavailable."""
        unsent = self._unsent
        if unsent is not None and self._pending.get(sequence) is unsent.slot:
            self._publish()

    def poll(self) -> None:
        """Advance device copies without waiting: publish a request whose rows are copied, start to
        copy sums that have arrived. Raises: DeviceUnavailable."""
        if self._unsent is not None and self._unsent.rows.has_ended():
            self._publish()
        if self._reading is not None:
            return
        for sequence, slot in self._pending.items():
            if slot.is_moved:
                status = self._receive_moved(slot.port, sequence, 0, 0, slot.num_tokens)
                if status == NOTHING:
                    continue
                if status < 0:
                    self._arrived[sequence] = self._failure(sequence, slot, status)
                else:
                    self._begin_reading(sequence, slot, status)
                return

    def close(self) -> None:
        self._window = self._unsent = self._reading = None
        self._segment.close()

    def _send_otherwise(
        self,
        head: tuple[int, ...],
        deadline_ms: float,
        batch: RoutedBatch,
        status: int,
    ) -> int:
        """Send again rows that are not contiguous, or overflow the negotiated type.

        Raises: ProtocolError if the batch was refused for another reason.
        """
        routing = (batch.expert_ids, batch.group_starts, batch.token_indices, batch.weights)
        hidden = np.ascontiguousarray(batch.hidden)
        if hidden is not batch.hidden:  # rows come from the caller and may not be contiguous
            status = self._send(*head, self._payload_code, deadline_ms, hidden, *routing)
        if status == OUT_OF_RANGE:
            hidden, _ = pack_hidden(hidden, self._payload)
            status = self._send(*head, ring.PAYLOAD_F32, deadline_ms, hidden, *routing)
            self._counters.widened += 1
        if status >= 0:
            return status
        raise self._over_capacity(batch)

    def _move_rows(
        self, slot: _Slot, head: tuple[int, ...], deadline_ms: float, batch: RoutedBatch
    ) -> int:
        """Start a device copy of the rows into the slot; publish if it is complete at once.

        Raises: ProtocolError, before anything is written, if the batch is too large;
        DeviceUnavailable.
        """
        num_tokens, width = batch.hidden_shape
        shape = self._segment.shape
        is_legal = num_tokens <= shape.max_tokens and batch.num_pairs <= shape.max_pairs
        if self._window is None or width != shape.hidden_size or not is_legal:
            raise self._over_capacity(batch)
        slot.expected, slot.reading = self._window.expect_sums((num_tokens, width)), None
        rows = self._window.write_rows(slot.request_at, batch.rows)
        routing = (batch.expert_ids, batch.group_starts, batch.token_indices, batch.weights)
        self._unsent = _Unsent(slot, head, deadline_ms, num_tokens, rows, routing)
        if rows.has_ended():
            self._publish()
        return 0

    def _publish(self) -> None:
        """Wait for the rows of the unpublished request, if any, and publish it."""
        unsent = self._unsent
        if unsent is None:
            return
        digest = unsent.rows.digest()
        self._unsent = None
        status = self._send_moved(
            *unsent.head, unsent.deadline_ms, unsent.num_tokens, digest, *unsent.routing
        )
        assert status >= 0  # sizes were checked in _move_rows
        self.bytes_sent += status

    def _over_capacity(self, batch: RoutedBatch) -> ProtocolError:
        shape = self._segment.shape
        return ProtocolError(
            f"{batch.num_tokens} tokens, {batch.num_pairs} pairs, rows of {batch.hidden_shape[1:]} "
            f"exceed the capacity of {shape.max_tokens}, {shape.max_pairs}, {shape.hidden_size}",
            code="capacity",
        )

    def _wait_for_moved(self, sequence: int, slot: _Slot, deadline_s: float) -> Reply:
        """`wait` for sums that stay on the device."""
        receive, head, num_tokens = self._receive_moved, (slot.port, sequence), slot.num_tokens
        if slot.reading is None:
            status = receive(*head, 0, 0, num_tokens)
            if status == NOTHING:
                self._publish()
                spin_s = min(self._spin_s, max(deadline_s, 0.0))
                status = receive(*head, int(spin_s * 1e9), 0, num_tokens)
            if status == NOTHING:
                self._before_sleep()
                status = self._wait_for_reply(receive, head, num_tokens, deadline_s)
            if status < 0:
                raise self._failure(sequence, slot, status)
            self._begin_reading(sequence, slot, status)
        self._publish()  # its copy, in the other direction, ends sooner
        return self._end_reading(sequence, slot)

    def _begin_reading(self, sequence: int, slot: _Slot, num_bytes: int) -> None:
        """Start to copy sums whose header was received. Raises: DeviceUnavailable."""
        if self._reading is not None:  # the window has one digest at a time
            self._keep_read(self._reading, self._pending[self._reading])
        assert self._window is not None
        assert slot.expected is not None
        slot.reading = num_bytes, self._window.read_sums(slot.reply_at, slot.expected)
        self._reading = sequence

    def _end_reading(self, sequence: int, slot: _Slot) -> Reply:
        """Wait for the copy of the sums, and free the slot.

        Raises: ProtocolError if their digest is wrong; DeviceUnavailable.
        """
        assert slot.reading is not None
        num_bytes, crossing = slot.reading
        digest = crossing.digest()
        self._reading = slot.reading = None
        expected, slot.expected = slot.expected, None
        if digest != header_word(slot.taken, ring.DIGEST):
            raise self._failure(sequence, slot, FAILURE - ring_native.WRONG_CHECKSUM)
        assert expected is not None
        reply = DeviceReply(expected.sums, 0.0, is_finite=crossing.is_finite())
        self._complete(sequence, slot, num_bytes, reply)
        return reply

    def _keep_read(self, sequence: int, slot: _Slot) -> None:
        """`_end_reading`, with the outcome kept for the request's `wait`."""
        try:
            self._arrived[sequence] = self._end_reading(sequence, slot)
        except ProtocolError as error:
            self._arrived[sequence] = error

    def _take_arrived(self, sequence: int) -> Reply:
        outcome = self._arrived.pop(sequence, None)
        if outcome is None:
            raise DeadlineExceeded("no reply: the request is not pending")
        if isinstance(outcome, ProtocolError):
            raise outcome
        return outcome

    def _complete(self, sequence: int, slot: _Slot, num_bytes: int, reply: Reply) -> None:
        """Fill in the reply of a request whose sums were received, and free its slot."""
        if num_bytes & IS_NOT_FINITE:
            num_bytes ^= IS_NOT_FINITE
            reply.is_finite = False
        reply.compute_s, reply.queue_s = _TIMES.unpack_from(slot.taken, _TIMES_AT)
        self._is_quick = reply.compute_s < self._spin_s
        del self._pending[sequence]
        self._free.append(slot)
        self.bytes_received += num_bytes

    def _failure(self, sequence: int, slot: _Slot, status: int) -> ProtocolError:
        """The error of a failure or violation that was received; frees the slot, unless the daemon
        may still write it."""
        del self._pending[sequence]
        violation = FAILURE - status
        if violation == ring_native.STALE:
            self._abandoned[sequence] = slot
        else:
            self._free.append(slot)
        if violation:
            return violation_error(violation, self._counters)
        text = bytes(slot.text[: header_word(slot.taken, ring.PAYLOAD_BYTES)])
        code, _, reason = text.rstrip(b"\0").partition(b"\0")
        return ProtocolError(
            one_line(reason.decode(errors="replace")), code=one_line(code.decode(errors="replace"))
        )

    def _free_slot(self, deadline_s: float) -> _Slot:
        """Wait for a slot whose reply has arrived: an abandoned one, or one whose reply is kept.

        Raises: DeadlineExceeded; DaemonUnavailable if the link or all slots are lost.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            for sequence, slot in list(self._abandoned.items()):
                word = self._segment.address + ring.REPLY_WORDS_AT + 8 * slot.index
                if self._load_word(word) == sequence:
                    self._ports.words[slot.index, ring_native.LAST] = sequence
                    del self._abandoned[sequence]
                    self._free.append(slot)
            if self._free:
                return self._free.pop()
            if not self._pending:
                raise DaemonUnavailable("all slots belong to abandoned requests")
            remaining_s = end_s - time.monotonic()
            for sequence, slot in list(self._pending.items()):
                # Replies arrive in any order, most often in that of the requests.
                wait_s = 0.0 if self._free else min(max(remaining_s, 0.0), _FREE_SLOT_POLL_S)
                self._keep_reply(sequence, slot, int(wait_s * 1e9))
            if not self._free:
                self._check_timeout(remaining_s, deadline_s, "free slot")

    def _keep_reply(self, sequence: int, slot: _Slot, wait_ns: int) -> None:
        """If a reply is there or arrives in `wait_ns`, keep it for its `wait` and free the slot."""
        head = (slot.port, sequence, 0, wait_ns)
        sums = np.empty((0 if slot.is_moved else slot.num_tokens, self._hidden_size))
        if slot.reading is not None:
            self._keep_read(sequence, slot)
            return
        if slot.is_moved:
            status = self._receive_moved(*head, slot.num_tokens)
        else:
            status = self._receive(*head, sums)
        if status == NOTHING:
            return
        if status < 0:
            self._arrived[sequence] = self._failure(sequence, slot, status)
        elif slot.is_moved:
            self._begin_reading(sequence, slot, status)
            self._keep_read(sequence, slot)
        else:
            reply = self._arrived[sequence] = Reply(sums, 0.0)
            self._complete(sequence, slot, status, reply)

    def _wait_for_reply(
        self,
        receive: Callable[..., int],
        head: tuple[int, int],
        place: F64Array | int,
        deadline_s: float,
    ) -> int:
        """Sleep until a reply arrives; returns its status.

        Raises: DeadlineExceeded; DaemonUnavailable if the link is lost.
        """
        remaining_s, end_s = deadline_s, time.monotonic() + deadline_s
        while True:
            wait_ns = int(min(max(remaining_s, 0.0), _LONGEST_WAIT_S) * 1e9)
            status = receive(*head, 0, wait_ns, place)
            if status != NOTHING:
                return status
            remaining_s = end_s - time.monotonic()
            self._check_timeout(remaining_s, deadline_s, "reply")

    def _check_timeout(self, remaining_s: float, deadline_s: float, what: str) -> None:
        """Raises: DaemonUnavailable if the link is lost; DeadlineExceeded if no time is left."""
        if self._poller.poll(0):
            raise DaemonUnavailable(self._lost_reason())
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no {what} within {deadline_s * 1e3:.0f} ms")
