"""The shared-memory transport, daemon's end: one SharedServer for the rings of all links.

Owned by the compute thread, which serves it together with a StreamServer.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dflash_protocol.batch import HostHidden, HostSums, RoutedBatch, Sums
from dflash_protocol.device_payload import DeviceWindow, ReadRows
from dflash_protocol.errors import DeviceUnavailable, ProtocolError, one_line
from dflash_protocol.ids import F32Array, F64Array, I64Array
from dflash_protocol.payloads import PayloadType, pack
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import ANSWERED, COMPUTED, OUT_OF_RANGE
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.ring.segment import Segment, silence_bell
from dflash_protocol.transports.ports import (
    PAYLOAD_CODES,
    PAYLOAD_NAMES,
    PHASES,
    Ports,
    header_word,
    poll_entries,
    violation_error,
)
from dflash_protocol.wire.messages import ExpertRequest
from dflash_protocol.wire.transport import LinkLimits, ReceivedRequest, TransportCounters

# ROUTING_BOUND, WAITED, then words of the header: sequence, layer, T to payload type, two times.
_TAKEN = struct.Struct("<qdq16xq40s2d")
_SHAPE = struct.Struct("<5q")
_NUM_REQUESTS_KEPT = 32
_STATUS = (1 << ring_native.STATUS_BITS) - 1


def _nanoseconds(time_s: float) -> int:
    """A time for compiled code; infinity becomes the latest."""
    return min(int(time_s * 1e9), sys.maxsize) if time_s < math.inf else sys.maxsize


@dataclass(slots=True, eq=False)
class _RingRequest(ReceivedRequest):
    """A request with its slot."""

    slot: _Slot | None = None
    moved: ReadRows | None = None
    """The rows, if a device moves them."""


class _Slot:
    """A slot at the daemon, with private arrays for its request, valid until that is answered."""

    def __init__(self, link: _Link, ports: Ports, index: int) -> None:
        self.link = link
        self.port = ports.address(index)
        self.bytes = ports.taken(index)
        self.request: _RingRequest | None = None
        """The request that was taken and is not answered yet."""
        shape = link.segment.shape
        self.request_at = shape.request_slot_at(index) + ring.HEADER_BYTES
        self.reply_at = shape.reply_slot_at(index) + ring.HEADER_BYTES
        # Pages that no request needs are never touched, and so take no memory.
        self._hidden: F32Array = np.empty(shape.max_tokens * shape.hidden_size, np.float32)
        self._indices = [np.empty(shape.max_pairs + extra, np.int32) for extra in (0, 1, 0)]
        self._weights: F32Array = np.empty(shape.max_pairs, np.float32)
        arrays = (self._hidden, *self._indices, self._weights)
        for field, array in enumerate(arrays, ring_native.HIDDEN):
            ports.words[index, field] = array.ctypes.data
        self._requests: dict[bytes, _RingRequest] = {}

    def forget(self) -> None:
        """Drop the request and the cached records."""
        self.request = None
        self._requests.clear()

    @property
    def sequence(self) -> int:
        return header_word(self.bytes, ring.SEQUENCE)

    def take(self) -> ReceivedRequest:
        """The request that compiled code has copied to the port and the private arrays.

        Records are cached by shape and updated in place; making them anew would take a fifth of a
        decode step's time in here. Like the arrays, they are valid until the request is answered.
        """
        bound, waited_s, sequence, layer_id, shape, deadline_ms, sent_s = _TAKEN.unpack_from(
            self.bytes
        )
        request = self._requests.get(shape)
        if request is None:
            request = self._new_request(*_SHAPE.unpack(shape))
            if len(self._requests) >= _NUM_REQUESTS_KEPT:
                self._requests.clear()
            self._requests[shape] = request
        header = request.header
        header.sequence, header.layer_id = sequence, layer_id
        header.deadline_ms, header.sent_s = deadline_ms, sent_s
        request.waited_s, request.routing_bound = waited_s, bound
        request.computed = None
        window = self.link.segment.window
        if window is not None and header_word(self.bytes, ring.MOVED):
            request = _moved(request, window, self.request_at)
        self.request = request
        return request

    def _new_request(
        self, num_tokens: int, num_groups: int, num_pairs: int, phase: int, payload: int
    ) -> _RingRequest:
        segment = self.link.segment
        hidden_size = segment.shape.hidden_size
        expert_ids, group_starts, token_indices = self._indices
        hidden = self._hidden[: num_tokens * hidden_size]
        batch = RoutedBatch(
            phase=PHASES[phase],
            rows=HostHidden(hidden.reshape(num_tokens, hidden_size)),
            expert_ids=expert_ids[:num_groups],
            group_starts=group_starts[: num_groups + 1],
            token_indices=token_indices[:num_pairs],
            weights=self._weights[:num_pairs],
        )
        header = ExpertRequest(
            sequence=0,
            layer_id=0,
            num_tokens=num_tokens,
            payload=PAYLOAD_NAMES[payload],
            deadline_ms=0.0,
            generation=segment.generation,
        )
        return _RingRequest(self.link.link_id, header, batch, slot=self)


def _moved(request: _RingRequest, window: DeviceWindow, at: int) -> _RingRequest:
    """The request with its rows read from the slot by a device."""
    num_tokens, hidden_size = request.batch.hidden_shape
    rows = window.read_rows(at, (num_tokens, hidden_size))
    return replace(request, batch=replace(request.batch, rows=rows), moved=rows)


class _Link:
    """A link at the daemon. Owns the segment; keeps its compiled experts alive."""

    def __init__(
        self,
        link_id: str,
        segment: Segment,
        limits: LinkLimits,
        experts: CompiledExperts | None,
    ) -> None:
        self.link_id = link_id
        self.segment = segment
        self.payload = limits.payload
        narrow = PAYLOAD_CODES[limits.payload]
        self.reply_code = ring.PAYLOAD_F64 if limits.payload is PayloadType.F32 else narrow
        self._ports = Ports(segment, is_client=False, narrow=narrow, limits=limits)
        self.address = self._ports.address(0)
        self.slots = [_Slot(self, self._ports, index) for index in range(segment.shape.num_slots)]
        self._ports.words[0, ring_native.REPLIES] = self.reply_code
        self.set_experts(experts)

    def set_experts(self, experts: CompiledExperts | None) -> None:
        """What compiled code computes from now on; not while it runs."""
        self._experts = experts
        words, hidden_size = self._ports.words[0], self.segment.shape.hidden_size
        self._sums: F64Array = np.empty((experts.max_tokens if experts else 0, hidden_size))
        words[ring_native.NUM_LAYERS] = len(experts.layers) if experts else 0
        words[ring_native.LAYERS] = experts.layers.ctypes.data if experts else 0
        words[ring_native.SUMS] = self._sums.ctypes.data

    def sums(self, num_tokens: int) -> HostSums:
        """Those that compiled code has computed last. Shapes: [T, H]."""
        return HostSums(self._sums[:num_tokens])

    def close(self) -> None:
        """Close the segment and break the cycle of slots and requests, so that their arrays, which
        are megabytes for a large model, are freed at once and not by the garbage collector."""
        for slot in self.slots:
            slot.forget()
        self.slots = []
        self.segment.close()


class _Table:
    """What compiled code looks at: the ports of all links, and what to sleep on.

    Made anew when a link is added or dropped, or other descriptors are to be waited for.
    """

    __slots__ = ("_words", "address", "entries", "entries_address", "others", "slots")

    def __init__(
        self, links: list[_Link], service: int, changed_fd: int, others: tuple[int, ...]
    ) -> None:
        self.others = others
        self._words: I64Array = np.array(
            [len(links), 0, 0, service, *(link.address for link in links)], np.int64
        )
        self.address = int(self._words.ctypes.data)
        self.slots: list[_Slot] = []
        """Indexed by link_idx · MAX_SLOTS + slot_idx; padding is never accessed."""
        for link in links:
            self.slots += link.slots + link.slots[:1] * (ring.MAX_SLOTS - len(link.slots))
        bells = (link.segment.server_bell for link in links)
        self.entries = poll_entries(*bells, changed_fd, *others)
        self.entries_address = int(self.entries.ctypes.data)


class SharedServer:
    """The daemon's end of all rings. Implements ServerTransport.

    Requests of links with compiled experts are answered without Python, as long as they come and
    need none; `receive` returns all others.

    Owned by the compute thread; `add_link`, `set_experts`, `drop_link` and `interrupt` may be
    called from any thread and take effect before the owner's next request; so may `busy_s`. One
    thread can serve this and a socket: `receive` returns when either is ready. `counters` are
    incremented.
    """

    def __init__(self, *, counters: TransportCounters | None = None) -> None:
        self._counters = TransportCounters() if counters is None else counters
        kernels = ring_native.kernels()
        self._serve, self._send_reply = kernels.serve, kernels.send_reply
        self._links: dict[str, _Link] = {}
        self._changes: deque[Callable[[], None]] = deque()
        self._changed_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._words: I64Array = np.zeros(ring_native.SERVICE_WORDS, np.int64)
        self._table = self._new_table(())
        self.served = ""
        """The link of the request that the last `receive` has returned or answered, if any."""

    def add_link(
        self,
        link_id: str,
        segment: Segment,
        limits: LinkLimits,
        *,
        experts: CompiledExperts | None = None,
    ) -> None:
        """Serve a segment, which the server owns from now on; replaces a link of the same id.
        Compiled code answers the requests for `experts`.

        Raises: ValueError if limits and segment differ in the width of a row.
        """
        if limits.hidden_size != segment.shape.hidden_size:
            raise ValueError(
                f"rows of {limits.hidden_size} in a ring for {segment.shape.hidden_size}"
            )

        def change() -> None:
            self._drop(link_id)
            self._links[link_id] = _Link(link_id, segment, limits, experts)

        self._changes.append(change)
        self.interrupt()

    def set_experts(self, link_id: str, experts: CompiledExperts | None) -> None:
        """Replace the compiled experts of a link, if there is such a link."""

        def change() -> None:
            if link_id in self._links:
                self._links[link_id].set_experts(experts)

        self._changes.append(change)
        self.interrupt()

    def drop_link(self, link_id: str) -> None:
        """Stop serving a link; its pending requests need no answer."""
        self._changes.append(partial(self._drop, link_id))
        self.interrupt()

    def interrupt(self) -> None:
        """Have `receive` return before it begins another request."""
        os.eventfd_write(self._changed_fd, 1)
        # Last: who sees it finds the descriptor written, and silences it.
        self._words[ring_native.CHANGED] = 1

    @property
    def busy_s(self) -> float:
        """How long compiled code has been computing a request; 0 if it is not."""
        since_ns = int(self._words[ring_native.BUSY_SINCE_NS])
        return max(time.monotonic() - 1e-9 * since_ns, 0.0) if since_ns else 0.0

    @property
    def num_answered(self) -> int:
        """Requests that were answered without Python."""
        return int(self._words[ring_native.NUM_ANSWERED])

    def allow_replies(self, until_s: float) -> None:
        """Until this time of the monotonic clock compiled code sends what it has computed; after
        it, and at first, `receive` returns such requests with their sums."""
        self._words[ring_native.CHECKED_UNTIL_NS] = _nanoseconds(until_s)

    def try_receive(self, *, spin_s: float = 0.0) -> ReceivedRequest | None:
        """The next valid request, spinning up to `spin_s` for it; None if there is none, or an
        invalid one was answered. It and its batch are valid until it is answered."""
        return self._take_next(spin_s, 0)

    def receive(
        self,
        timeout_s: float,
        *,
        spin_s: float = 0.0,
        others: tuple[int, ...] = (),
        until_s: float = 0.0,
    ) -> ReceivedRequest | None:
        """`try_receive`, then sleep until a request arrives, one of the descriptors `others` is
        readable, or the time is up.

        If requests were answered without Python, returns None when no other comes soon, one of
        `others` is readable, or one was answered after `until_s` of the monotonic clock.
        """
        if others != self._table.others:
            self._table = self._new_table(others)
        self._words[ring_native.RETURN_NS] = _nanoseconds(until_s)
        return self._take_next(spin_s, math.ceil(timeout_s * 1e3))

    @property
    def are_others_ready(self) -> bool:
        """Whether the last `receive` has found one of the `others` readable."""
        return bool(self._words[ring_native.IS_OTHER_READY])

    def _take_next(self, spin_s: float, timeout_ms: int) -> ReceivedRequest | None:
        if self._words[ring_native.CHANGED]:
            self._apply_changes()
        table, words = self._table, self._words
        found = self._serve(
            table.address, int(spin_s * 1e9), table.entries_address, table.entries.size, timeout_ms
        )
        if found < 0:
            self.served = ""
            return None
        slot, status = table.slots[found >> ring_native.STATUS_BITS], found & _STATUS
        self.served = slot.link.link_id
        if status == ANSWERED:
            return None
        if status not in (0, COMPUTED):
            self.served = ""
            self._refuse(slot, status)
            return None
        request = slot.take()
        if status == COMPUTED:
            request.computed = slot.link.sums(request.header.num_tokens)
            request.started_s = 1e-9 * int(words[ring_native.BUSY_SINCE_NS])
        words[ring_native.BUSY_SINCE_NS] = 0
        return request

    def reply(self, request: ReceivedRequest, sums: Sums, compute_s: float) -> None:
        """Send a request's sums, unless its link was dropped. Shapes: sums [T, H] float64.

        If a device moved the rows, it moves the sums too, which this waits for.
        Raises: ValueError if the sums have another shape, or are on a device and the rows were not.
        """
        assert isinstance(request, _RingRequest)
        slot = request.slot
        if slot is None or slot.request is not request:
            return
        link, sequence, waited_s = slot.link, request.header.sequence, request.waited_s
        if request.moved is not None:
            self._move_reply(slot, request, request.moved, sums, compute_s)
            return
        if sums.is_on_device:
            raise ValueError(f"sums of shape {sums.shape} on a device, whose rows were not")
        on_host = sums.to_host()
        if on_host.ndim != 2:
            raise ValueError(f"sums of shape {on_host.shape}")
        status = self._send_reply(
            slot.port, sequence, link.reply_code, compute_s, waited_s, on_host
        )
        if status == OUT_OF_RANGE:
            wide, _ = pack(on_host, link.payload)
            status = self._send_reply(
                slot.port, sequence, ring.PAYLOAD_F64, compute_s, waited_s, wide
            )
            self._counters.widened += 1
        if status < 0:
            raise ValueError(
                f"sums of shape {sums.shape}, or with gaps, for a link of {link.segment.shape}"
            )
        slot.request = None

    def _move_reply(
        self,
        slot: _Slot,
        request: _RingRequest,
        rows: ReadRows,
        sums: Sums,
        compute_s: float,
    ) -> None:
        """Copy sums into the slot by the device, and publish them if the rows' digest was right."""
        window, sequence = slot.link.segment.window, request.header.sequence
        if window is None or sums.shape != rows.shape:
            raise ValueError(f"sums of shape {sums.shape} for rows of {rows.shape}")
        started_s = time.monotonic()
        try:
            if not sums.is_on_device:
                on_device = rows.new_sums()
                on_device.add(sums)
                sums = on_device
            digest = window.write_sums(slot.reply_at, sums)
            is_whole = rows.digest() == header_word(slot.bytes, ring.DIGEST)
        except DeviceUnavailable as error:
            self._fail(slot, sequence, ProtocolError(one_line(str(error)), code="internal"))
            return
        if not is_whole:
            self._refuse(slot, ring_native.WRONG_CHECKSUM)
            return
        compute_s += time.monotonic() - started_s  # the first wait for the device was here
        ring_native.kernels().send_moved_reply(
            slot.port, sequence, compute_s, request.waited_s, rows.shape[0], digest
        )
        slot.request = None

    def fail(self, link_id: str, sequence: int, error: ProtocolError) -> None:
        """Send the reason why a request was not computed."""
        link = self._links.get(link_id)
        if link is None:
            return
        slot = link.slots[sequence % len(link.slots)]
        if slot.request is not None and slot.request.header.sequence == sequence:
            self._fail(slot, sequence, error)

    def close(self) -> None:
        """Drop all links."""
        self._apply_changes()
        for link_id in list(self._links):
            self._drop(link_id)
        self._table = self._new_table(())
        os.close(self._changed_fd)

    def _apply_changes(self) -> None:
        # Cleared first: what changes from now on is found the next time.
        self._words[ring_native.CHANGED] = 0
        silence_bell(self._changed_fd)
        while self._changes:
            self._changes.popleft()()
        self._table = self._new_table(self._table.others)

    def _drop(self, link_id: str) -> None:
        link = self._links.pop(link_id, None)
        if link is not None:
            link.close()

    def _new_table(self, others: tuple[int, ...]) -> _Table:
        links, service = list(self._links.values()), int(self._words.ctypes.data)
        return _Table(links, service, self._changed_fd, others)

    def _refuse(self, slot: _Slot, violation: int) -> None:
        error = violation_error(violation, self._counters)
        if violation != ring_native.STALE:  # a stale sequence names no request to answer
            self._fail(slot, slot.sequence, error)

    def _fail(self, slot: _Slot, sequence: int, error: ProtocolError) -> None:
        if slot.request is not None and slot.request.moved is not None:
            with contextlib.suppress(DeviceUnavailable):
                slot.request.moved.abandon()
        slot.request = None
        text = f"{error.code}\0{str(error)[:1000]}".encode(errors="replace")
        text = text[: ring.FAILURE_LIMIT_BYTES]
        data = np.frombuffer(text + bytes(-len(text) % 4), np.uint8)
        ring_native.kernels().send_failure(slot.port, sequence, data)
