"""A link's requests at the parent: the ring's slots that they use, and how it waits for replies."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable

import numpy as np

from dflash_protocol.device_payload import DmaCopy, ExpectedSums
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError, one_line
from dflash_protocol.ids import F64Array
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.compiled import FAILURE, IS_NOT_FINITE, NOTHING
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.transports.ports import (
    HEADER_AT,
    Ports,
    header_word,
    poll_entries,
    violation_error,
)
from dflash_protocol.wire.transport import Reply, TransportCounters

_TIMES = struct.Struct("<2d")
_TIMES_AT = HEADER_AT + 8 * ring.TIME
_SPIN_S = 50e-6
LONG_SPIN_S = 1e-3
"""Longer than a layer of a decode step takes."""
_MANY_CORES = 8
_LONGEST_WAIT_S = 1.0


class Slot:
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


class RequestsInFlight:
    """A link's requests by sequence. Increments `counters`.

    A request is pending; or it has arrived, and its reply or error is kept until its wait; or it is
    not known, since it was waited for or forgotten. A slot is free, pending, or abandoned, which is
    forgotten before its reply.
    """

    __slots__ = (
        "abandoned",
        "arrived",
        "counters",
        "free",
        "last_compute_s",
        "num_slots",
        "pending",
        "sequence",
    )

    def __init__(self, ports: Ports, shape: RingShape, counters: TransportCounters) -> None:
        # Last in, first out: the slot used last is still in both sides' caches.
        self.free = [Slot(ports, shape, index) for index in reversed(range(shape.num_slots))]
        self.pending: dict[int, Slot] = {}
        self.abandoned: dict[int, Slot] = {}
        self.arrived: dict[int, Reply | ProtocolError] = {}
        self.num_slots = shape.num_slots
        self.sequence = 0
        """The sequence used last."""
        self.last_compute_s = 0.0
        """What the last reply took to compute."""
        self.counters = counters

    def next_sequence(self, slot: Slot) -> int:
        """The next sequence that is congruent to the slot's index."""
        last = self.sequence
        return last + 1 + (slot.index - last - 1) % self.num_slots

    def complete(self, sequence: int, reply: Reply, num_bytes: int) -> None:
        """Fill in the reply of a pending request whose sums were received, and free its slot."""
        slot = self.pending.pop(sequence)
        if num_bytes & IS_NOT_FINITE:
            num_bytes ^= IS_NOT_FINITE
            reply.is_finite = False
        reply.compute_s, reply.queue_s = _TIMES.unpack_from(slot.taken, _TIMES_AT)
        self.last_compute_s = reply.compute_s
        self.free.append(slot)
        self.counters.bytes_received += num_bytes

    def failure(self, sequence: int, slot: Slot, status: int) -> ProtocolError:
        """The error of a failure or violation that a pending request has received; frees the slot,
        unless the daemon may still write it."""
        del self.pending[sequence]
        if FAILURE - status == ring_native.STALE:
            self.abandoned[sequence] = slot
        else:
            self.free.append(slot)
        return self.reason(slot, status)

    def reason(self, slot: Slot, status: int) -> ProtocolError:
        """The error of a failure or violation that a slot has received; counts violations."""
        violation = FAILURE - status
        if violation:
            return violation_error(violation, self.counters)
        text = bytes(slot.text[: header_word(slot.taken, ring.PAYLOAD_BYTES)])
        code, _, reason = text.rstrip(b"\0").partition(b"\0")
        return ProtocolError(
            one_line(reason.decode(errors="replace")), code=one_line(code.decode(errors="replace"))
        )

    def take_arrived(self, sequence: int) -> Reply:
        """The reply that is kept for a request.

        Raises: ProtocolError if it failed; DeadlineExceeded if the request is not known.
        """
        outcome = self.arrived.pop(sequence, None)
        if outcome is None:
            raise DeadlineExceeded("no reply: the request is not pending")
        if isinstance(outcome, ProtocolError):
            raise outcome
        return outcome


def spin_window_s() -> float:
    """Default time that a waiter polls the ring before it sleeps.

    0 on a single core, which the other side needs; on many cores long enough for a layer of a
    decode step.
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_cores >= _MANY_CORES:
        return LONG_SPIN_S
    return _SPIN_S if num_cores > 1 else 0.0


class Waiter:
    """Waits for the replies of one link, whose bell is `bell`.

    `lost_fd` becomes readable when the link is lost; `lost_reason` then says why. `before_sleep` is
    called before each sleep.
    """

    __slots__ = ("_before_sleep", "_poller", "entries", "lost_reason", "spin_ns", "spin_s")

    def __init__(
        self,
        bell: int,
        *,
        lost_fd: int,
        lost_reason: Callable[[], str],
        spin_s: float,
        before_sleep: Callable[[], object],
    ) -> None:
        self.spin_s, self.spin_ns = spin_s, int(spin_s * 1e9)
        self.entries = poll_entries(bell, lost_fd, num_more=1)
        """What compiled code sleeps on: the bell and the descriptor of a lost link."""
        self.lost_reason = lost_reason
        self._before_sleep = before_sleep
        self._poller = select.poll()
        self._poller.register(lost_fd, select.POLLIN)

    def sleep(
        self,
        receive: Callable[..., int],
        head: tuple[int, int],
        place: F64Array | int,
        *,
        deadline_s: float,
    ) -> int:
        """Sleep until ``receive(*head, spin_ns, wait_ns, place)`` finds a reply; its status.

        Raises: DeadlineExceeded; DaemonUnavailable if the link is lost.
        """
        self._before_sleep()
        remaining_s, end_s = deadline_s, time.monotonic() + deadline_s
        while True:
            wait_ns = int(min(max(remaining_s, 0.0), _LONGEST_WAIT_S) * 1e9)
            status = receive(*head, 0, wait_ns, place)
            if status != NOTHING:
                return status
            remaining_s = end_s - time.monotonic()
            self.check(remaining_s, deadline_s, "reply")

    def check(self, remaining_s: float, deadline_s: float, what: str) -> None:
        """Raises: DaemonUnavailable if the link is lost; DeadlineExceeded if no time is left."""
        if self._poller.poll(0):
            raise DaemonUnavailable(self.lost_reason())
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no {what} within {deadline_s * 1e3:.0f} ms")
