"""The shared-memory transport, parent's end: requests and replies in a ring that both sides map.

One SharedClient for each link; `shared_server` is the other end. `in_flight` has its requests and
slots and how it waits, `device_copies` what a device copies; nothing passes through ZeroMQ.
`ring.layout` draws the memory and argues why its order of accesses is correct.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dflash_protocol.batch import HostSums, RoutedBatch
from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.ids import Phase
from dflash_protocol.payloads import PayloadType, pack
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import NOTHING, OUT_OF_RANGE
from dflash_protocol.ring.segment import Segment
from dflash_protocol.transports.device_copies import DeviceCopies
from dflash_protocol.transports.in_flight import RequestsInFlight, Slot, Waiter, spin_window_s
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.ports import PAYLOAD_CODES, PHASES, Ports
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters

_FREE_SLOT_POLL_S = 0.01
"""How long a wait for a free slot polls each slot in use."""

_DECODE, _DECODE_CODE = Phase.DECODE, PHASES.index(Phase.DECODE)


class SharedClient:
    """Implements ClientTransport over a segment, which it owns from now on.

    `lost_fd` becomes readable when the supervisor finds the link lost; `lost_reason` then says why.
    `payload` was negotiated; `counters` are incremented; `before_sleep` is called before each
    sleep. More requests than slots may be in flight: replies that have arrived are then read and
    kept, to free their slots.

    Rows that a device moves are still being copied when `submit` returns; the request is published
    by the next call that finds the copy complete or waits for it: `push`, `poll`, `submit`, `wait`.
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
        shape = segment.shape
        self._segment = segment
        self._hidden_size = shape.hidden_size
        self._payload = payload
        self.counters = TransportCounters() if counters is None else counters
        is_wide = payload is PayloadType.F32
        self._ports = Ports(
            segment,
            is_client=True,
            narrow=ring.PAYLOAD_F64 if is_wide else PAYLOAD_CODES[payload],
            limits=LinkLimits(shape.hidden_size, shape.max_tokens, 0),
        )
        self._requests = RequestsInFlight(self._ports, shape, self.counters)
        self._waiter = Waiter(
            segment.client_bell,
            lost_fd=lost_fd,
            lost_reason=lost_reason,
            spin_s=spin_window_s() if spin_s is None else spin_s,
            before_sleep=before_sleep,
        )
        self._ports.words[:, ring_native.ENTRIES] = self._waiter.entries.ctypes.data
        self._ports.words[:, ring_native.SENDS] = PAYLOAD_CODES[payload]
        self._copies: DeviceCopies | None = None
        if segment.window is not None and is_wide:
            self._copies = DeviceCopies(segment.window, self._ports, self._requests)
        kernels = ring_native.kernels()
        self._send, self._receive = kernels.send_request, kernels.receive_reply

    def submit(self, layer_id: int, batch: RoutedBatch, *, deadline_s: float) -> int:
        """Send a request; if no slot is free, waits for one, up to the deadline.

        Raises: ProtocolError with code ``capacity`` if the batch exceeds the negotiated size;
        DaemonUnavailable if no slot becomes free, or all belong to abandoned requests: the link
        needs a new segment then.
        """
        copies, requests = self._copies, self._requests
        if copies is not None:
            copies.publish()
        free = requests.free
        num_tokens, _ = batch.rows.shape
        slot = free.pop() if free else self._free_slot(deadline_s)
        # Never reused, even if sending fails.
        sequence = requests.sequence = requests.next_sequence(slot)
        phase = batch.phase
        phase_code = _DECODE_CODE if phase is _DECODE else PHASES.index(phase)
        deadline_ms = deadline_s * 1e3
        try:
            if copies is not None and batch.rows.is_on_device:
                self._check_capacity(batch)
                head = (slot.port, sequence, layer_id, phase_code)
                copies.begin(slot, head, batch, deadline_ms=deadline_ms)
                slot.is_moved = True
            else:
                slot.is_moved = False
                status = self._send(
                    slot.port,
                    sequence,
                    layer_id,
                    phase_code,
                    deadline_ms,
                    batch.rows.to_host(),
                    batch.expert_ids,
                    batch.group_starts,
                    batch.token_indices,
                    batch.weights,
                )
                if status < 0:
                    head = (slot.port, sequence, layer_id, phase_code)
                    status = self._send_otherwise(slot, head, deadline_ms, batch, status)
                self.counters.bytes_sent += status
        except BaseException:
            # A copy of the rows may have begun.
            if copies is None or not copies.forget(sequence, slot):
                free.append(slot)
            raise
        slot.num_tokens = num_tokens
        requests.pending[sequence] = slot
        return sequence

    def wait(self, sequence: int, *, deadline_s: float) -> Reply:
        requests, waiter = self._requests, self._waiter
        slot = requests.pending.get(sequence)
        if slot is None:
            return requests.take_arrived(sequence)
        if slot.is_moved:
            assert self._copies is not None
            return self._copies.wait(sequence, slot, waiter=waiter, deadline_s=deadline_s)
        # Allocate before the reply arrives, while there is time.
        sums = np.empty((slot.num_tokens, self._hidden_size))
        reply = Reply(HostSums(sums), 0.0)
        spin_ns = waiter.spin_ns if requests.last_compute_s < waiter.spin_s else 0
        if deadline_s < waiter.spin_s:
            spin_ns = min(spin_ns, int(max(deadline_s, 0.0) * 1e9))
        status = self._receive(slot.port, sequence, spin_ns, 0, sums)
        if status == NOTHING:
            status = waiter.sleep(self._receive, (slot.port, sequence), sums, deadline_s=deadline_s)
        if status < 0:
            raise requests.failure(sequence, slot, status)
        requests.complete(sequence, reply, status)
        return reply

    def forget(self, sequence: int) -> None:
        requests = self._requests
        requests.arrived.pop(sequence, None)
        slot = requests.pending.pop(sequence, None)
        if slot is None:
            return
        if self._copies is None or not self._copies.forget(sequence, slot):
            requests.abandoned[sequence] = slot

    def lend(self) -> LentSlot:
        """A slot for compiled code to make requests in, with rows in the host's memory, until it is
        given back. Waits for rows of a request that a device is still copying, and publishes it.

        Raises: DaemonUnavailable if none is free; DeviceUnavailable.
        """
        if self._copies is not None:
            self._copies.publish()
        if not self._requests.free:
            raise DaemonUnavailable("no slot of the ring can be lent")
        slot = self._requests.free.pop()
        return LentSlot(slot, self._ports, requests=self._requests, waiter=self._waiter)

    def push(self, sequence: int) -> None:
        if self._copies is not None:
            self._copies.push(sequence)

    def poll(self) -> None:
        if self._copies is not None:
            self._copies.poll()

    def close(self) -> None:
        self._copies = None
        self._segment.close()

    def _send_otherwise(
        self,
        slot: Slot,
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
            status = self._send(*head, deadline_ms, hidden, *routing)
        if status == OUT_OF_RANGE:
            hidden, _ = pack(hidden, self._payload)
            words = self._ports.words[slot.index]
            words[ring_native.SENDS] = ring.PAYLOAD_F32
            status = self._send(*head, deadline_ms, hidden, *routing)
            words[ring_native.SENDS] = PAYLOAD_CODES[self._payload]
            self.counters.widened += 1
        if status >= 0:
            return status
        raise self._over_capacity(batch)

    def _check_capacity(self, batch: RoutedBatch) -> None:
        """Raises: ProtocolError if the batch is too large for a slot."""
        shape = self._segment.shape
        num_tokens, width = batch.hidden_shape
        is_legal = num_tokens <= shape.max_tokens and batch.num_pairs <= shape.max_pairs
        if width != shape.hidden_size or not is_legal:
            raise self._over_capacity(batch)

    def _over_capacity(self, batch: RoutedBatch) -> ProtocolError:
        shape = self._segment.shape
        return ProtocolError(
            f"{batch.num_tokens} tokens, {batch.num_pairs} pairs, rows of {batch.hidden_shape[1:]} "
            f"exceed the capacity of {shape.max_tokens}, {shape.max_pairs}, {shape.hidden_size}",
            code="capacity",
        )

    def _free_slot(self, deadline_s: float) -> Slot:
        """Wait for a slot whose reply has arrived: an abandoned one, or one whose reply is kept.

        Raises: DeadlineExceeded; DaemonUnavailable if the link or all slots are lost.
        """
        requests, load_word = self._requests, ring_native.kernels().load_word
        end_s = time.monotonic() + deadline_s
        while True:
            for sequence, slot in list(requests.abandoned.items()):
                word = self._segment.address + ring.REPLY_WORDS_AT + 8 * slot.index
                if load_word(word) == sequence:
                    self._ports.words[slot.index, ring_native.LAST] = sequence
                    del requests.abandoned[sequence]
                    requests.free.append(slot)
            if requests.free:
                return requests.free.pop()
            if not requests.pending:
                raise DaemonUnavailable("all slots belong to abandoned requests")
            remaining_s = end_s - time.monotonic()
            for sequence, slot in list(requests.pending.items()):
                if sequence not in requests.pending:
                    continue  # kept to make way for the one before
                # Replies arrive in any order, most often in that of the requests.
                wait_s = 0.0 if requests.free else min(max(remaining_s, 0.0), _FREE_SLOT_POLL_S)
                self._keep_reply(sequence, slot, int(wait_s * 1e9))
            if not requests.free:
                self._waiter.check(remaining_s, deadline_s, "free slot")

    def _keep_reply(self, sequence: int, slot: Slot, wait_ns: int) -> None:
        """If a reply is there or arrives in `wait_ns`, keep it for its `wait` and free the slot."""
        if slot.is_moved:
            assert self._copies is not None
            self._copies.keep(sequence, slot, wait_ns)
            return
        requests = self._requests
        sums = np.empty((slot.num_tokens, self._hidden_size))
        status = self._receive(slot.port, sequence, 0, wait_ns, sums)
        if status == NOTHING:
            return
        if status < 0:
            requests.arrived[sequence] = requests.failure(sequence, slot, status)
        else:
            reply = requests.arrived[sequence] = Reply(HostSums(sums), 0.0)
            requests.complete(sequence, reply, status)
