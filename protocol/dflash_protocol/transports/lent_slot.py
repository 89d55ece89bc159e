"""A slot of a link's ring while compiled code makes requests in it."""

from __future__ import annotations

from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.transports.in_flight import RequestsInFlight, Slot, Waiter
from dflash_protocol.transports.ports import Ports


class LentSlot:
    """A slot that `post` and `collect` use (`ring.compiled_experts`), one request after another,
    until `give_back`. The client makes other requests in its other slots meanwhile.

    Made by SharedClient.lend. Used by one thread at a time, which may be any; lent and given back
    by the client's. Valid until given back, and while the client is open.
    """

    def __init__(
        self, slot: Slot, ports: Ports, *, requests: RequestsInFlight, waiter: Waiter
    ) -> None:
        self._slot, self._requests, self._waiter = slot, requests, waiter
        self._words = ports.words[slot.index]
        self._words[ring_native.NEXT_SEQUENCE] = requests.next_sequence(slot)
        self._words[ring_native.IN_FLIGHT] = 0
        self.port = slot.port
        """The first argument of the functions."""

    @property
    def spin_ns(self) -> int:
        """How long this link's client polls for a reply before it sleeps."""
        return self._waiter.spin_ns

    def error(self, status: int) -> ProtocolError | DaemonUnavailable:
        """What `SharedClient` raises where `post` or `collect` return a status below 0, NOTHING
        excepted; counts violations."""
        if status == ring_native.LOST:
            return DaemonUnavailable(self._waiter.lost_reason())
        if status == ring_native.LATE:
            return DeadlineExceeded("no reply within the deadline")
        if status == ring_native.ABORTED:
            return DaemonUnavailable("the request was given up")
        if status == ring_native.NOT_FINITE:
            return ProtocolError("sums are not finite", code="not_finite")
        if status == ring_native.UNSENT:
            return ProtocolError("a request that the link cannot carry as it is", code="capacity")
        return self._requests.reason(self._slot, status)

    def give_back(self) -> None:
        """Return the slot to the client; a request in flight is abandoned."""
        requests, in_flight = self._requests, int(self._words[ring_native.IN_FLIGHT])
        last = int(self._words[ring_native.NEXT_SEQUENCE]) - requests.num_slots
        requests.sequence = max(requests.sequence, last)
        if in_flight:
            requests.abandoned[in_flight] = self._slot
        else:
            requests.free.append(self._slot)
