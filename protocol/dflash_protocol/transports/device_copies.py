"""Requests over a ring whose rows and sums a device of the parent copies to and from the slots."""

from __future__ import annotations

from typing import NamedTuple

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.device_payload import DeviceWindow, DmaCopy
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import AnyArray
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import FAILURE, NOTHING
from dflash_protocol.transports.in_flight import RequestsInFlight, Slot, Waiter
from dflash_protocol.transports.ports import Ports, header_word
from dflash_protocol.wire.transport import Reply


class _Unsent(NamedTuple):
    """A request whose rows are being copied into its slot. When the copy is complete, the request
    is published or, if it was forgotten, its slot is freed."""

    slot: Slot
    head: tuple[int, ...]
    deadline_ms: float
    rows: DmaCopy
    routing: tuple[AnyArray, ...]
    is_forgotten: bool = False


class DeviceCopies:
    """Copies between a window, the ring as the device sees it, and rows and sums on the device.

    Rows are still being copied when `begin` returns. At most one request is not published yet, and
    at most one reply is being read: the window has one digest of each at a time. All methods raise
    DeviceUnavailable if the device fails.
    """

    __slots__ = ("_ports", "_reading", "_receive", "_requests", "_send", "_unsent", "_window")

    def __init__(self, window: DeviceWindow, ports: Ports, requests: RequestsInFlight) -> None:
        self._window = window
        self._ports = ports
        self._requests = requests
        self._unsent: _Unsent | None = None
        self._reading: int | None = None
        """Sequence of the request whose sums are being copied to the device."""
        kernels = ring_native.kernels()
        self._send, self._receive = kernels.send_moved_request, kernels.receive_moved_reply

    def begin(
        self, slot: Slot, head: tuple[int, ...], batch: RoutedBatch, *, deadline_ms: float
    ) -> None:
        """Start to copy a batch's rows into the slot, and publish the request if that is done at
        once. The batch fits the slot; `head` is port, sequence, layer and phase."""
        num_tokens, width = batch.hidden_shape
        slot.expected = self._window.expect_sums((num_tokens, width))
        slot.reading = None
        routing = (batch.expert_ids, batch.group_starts, batch.token_indices, batch.weights)
        self._ports.words[slot.index, ring_native.MOVED_TOKENS] = num_tokens
        rows = self._window.write_rows(slot.request_at, batch.rows)
        self._unsent = _Unsent(slot, head, deadline_ms, rows, routing)
        if rows.has_ended():
            self.publish()

    def publish(self) -> None:
        """Wait for the rows of the unpublished request, if any, and publish it, or free the slot of
        a forgotten one."""
        unsent = self._unsent
        if unsent is None:
            return
        digest = unsent.rows.digest()
        self._unsent = None
        if unsent.is_forgotten:
            self._requests.free.append(unsent.slot)
            return
        status = self._send(*unsent.head, unsent.deadline_ms, digest, *unsent.routing)
        assert status >= 0  # the batch fits the slot
        self._requests.counters.bytes_sent += status

    def push(self, sequence: int) -> None:
        """Publish this request, if it is the unpublished one."""
        unsent = self._unsent
        if unsent is not None and self._requests.pending.get(sequence) is unsent.slot:
            self.publish()

    def poll(self) -> None:
        """Publish a request whose rows are copied, and start to copy sums that have arrived."""
        if self._unsent is not None and self._unsent.rows.has_ended():
            self.publish()
        if self._reading is not None:
            return
        requests = self._requests
        for sequence, slot in requests.pending.items():
            if slot.is_moved:
                status = self._receive(slot.port, sequence, 0, 0, slot.num_tokens)
                if status == NOTHING:
                    continue
                if status < 0:
                    requests.arrived[sequence] = requests.failure(sequence, slot, status)
                else:
                    self._begin_reading(sequence, slot, status)
                return

    def wait(self, sequence: int, slot: Slot, *, waiter: Waiter, deadline_s: float) -> Reply:
        """The reply to a pending request, with its sums on the device.

        Raises: as ClientTransport.wait.
        """
        head, num_tokens = (slot.port, sequence), slot.num_tokens
        if slot.reading is None:
            status = self._receive(*head, 0, 0, num_tokens)
            if status == NOTHING:
                self.publish()
                spin_s = min(waiter.spin_s, max(deadline_s, 0.0))
                status = self._receive(*head, int(spin_s * 1e9), 0, num_tokens)
            if status == NOTHING:
                status = waiter.sleep(self._receive, head, num_tokens, deadline_s=deadline_s)
            if status < 0:
                raise self._requests.failure(sequence, slot, status)
            self._begin_reading(sequence, slot, status)
        self.publish()  # its copy, in the other direction, ends sooner
        return self._end_reading(sequence, slot)

    def keep(self, sequence: int, slot: Slot, wait_ns: int) -> None:
        """If a pending request's reply is there or arrives in `wait_ns`, read it, keep it for the
        request's wait and free the slot."""
        requests = self._requests
        if slot.reading is None:
            status = self._receive(slot.port, sequence, 0, wait_ns, slot.num_tokens)
            if status == NOTHING:
                return
            if status < 0:
                requests.arrived[sequence] = requests.failure(sequence, slot, status)
                return
            self._begin_reading(sequence, slot, status)
        self._keep_read(sequence, slot)

    def forget(self, sequence: int, slot: Slot) -> bool:
        """Drop what is under way for a request. True if its rows are still being copied: it will
        not be published, and `publish` frees its slot."""
        slot.expected = slot.reading = None  # the window keeps memory that a copy still uses
        if self._reading == sequence:
            self._reading = None
        unsent = self._unsent
        if unsent is None or unsent.slot is not slot:
            return False
        self._unsent = unsent._replace(is_forgotten=True)
        return True

    def _begin_reading(self, sequence: int, slot: Slot, num_bytes: int) -> None:
        """Start to copy sums whose header was received."""
        if self._reading is not None:  # the window has one digest at a time
            self._keep_read(self._reading, self._requests.pending[self._reading])
        assert slot.expected is not None
        slot.reading = num_bytes, self._window.read_sums(slot.reply_at, slot.expected)
        self._reading = sequence

    def _end_reading(self, sequence: int, slot: Slot) -> Reply:
        """Wait for the copy of the sums, and free the slot.

        Raises: ProtocolError if their digest is wrong.
        """
        assert slot.reading is not None
        num_bytes, crossing = slot.reading
        digest = crossing.digest()
        self._reading = slot.reading = None
        expected, slot.expected = slot.expected, None
        requests = self._requests
        if digest != header_word(slot.taken, ring.DIGEST):
            raise requests.failure(sequence, slot, FAILURE - ring_native.WRONG_CHECKSUM)
        assert expected is not None
        reply = Reply(expected.sums, 0.0, is_finite=crossing.is_finite())
        requests.complete(sequence, reply, num_bytes)
        return reply

    def _keep_read(self, sequence: int, slot: Slot) -> None:
        """`_end_reading`, with the outcome kept for the request's wait."""
        arrived = self._requests.arrived
        try:
            arrived[sequence] = self._end_reading(sequence, slot)
        except ProtocolError as error:
            arrived[sequence] = error
