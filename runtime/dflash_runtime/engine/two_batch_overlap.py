"""Two-batch overlap: two micro-batches of a chunk go through the layers, one behind the other.

::

    first    attention 0, send | . . . . . . . . . | sums 0, attention 1, send | . . .
    second   . . . . . . . . . | attention 0, send | . . . . . . . . . . . . . | sums 0, …
    remote   . . . . . . . . . | first's experts 0 . . | second's experts 0 . . | first's …

A model's forward is one loop, so each micro-batch runs its own: the first in the caller's thread,
the second in a thread that lives as long as the chunk. Exactly one of them runs at a time. A turn
ends within a layer's experts, after requests to remote owners were sent and before their replies
are waited for. So the second reaches a layer after the first, and finds the first's keys, values
and recurrent states there as those of an earlier chunk. What the two share needs no lock.

An exception in one micro-batch ends the other before `TwoBatchOverlap.run` raises it; requests in
flight are abandoned then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dflash_adapters.ops import MoeBlock
from dflash_protocol.batch import Hidden, Sums
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.interrupts import uninterrupted

_FIRST, _SECOND = 0, 1
_LONGEST_TURN_S = 1800.0
"""A turn may wait for requests, of at most 600 s each, and compute what a lost daemon did not."""

T = TypeVar("T")


class _PeerFailed(Exception):
    """Ends a micro-batch after the other one has failed; caught within this module."""


class PolledExperts(RemoteExperts, Protocol):
    """Remote experts whose requests in flight advance when polled."""

    def poll(self) -> None:
        """Advance all requests in flight without waiting."""


class TwoBatchOverlap:
    """Implements backend.RemoteExperts: delegates to `remote`, and between the begin and the finish
    of a layer's experts lets the other micro-batch run.

    Used by one thread at a time.
    """

    def __init__(self, remote: PolledExperts) -> None:
        self._remote = remote
        self._pair: _Pair[Any] | None = None
        self.local_experts_mask, self.count_local = remote.local_experts_mask, remote.count_local
        self.count_selections, self.abandon = remote.count_selections, remote.abandon
        self.mail_routes, self.count_mailed = remote.mail_routes, remote.count_mailed
        self.is_step_to_be_checked = remote.is_step_to_be_checked
        self.note_checked_step = remote.note_checked_step

    @property
    def may_offload(self) -> bool:
        """Whether `to_offload` may name an expert."""
        return self._remote.may_offload

    def to_offload(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """None for micro-batches, as each would copy the weights."""
        if self._pair is not None:
            return None
        return self._remote.to_offload(layer_id, topk_ids, expert_s=expert_s)

    def begin(
        self,
        layer_id: int,
        hidden: Hidden,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
    ) -> Any:
        """Send the layer's requests."""
        if self._pair is not None:
            self._remote.poll()
        return self._remote.begin(
            layer_id, hidden, topk_ids, topk_weights, phase=phase, offloaded=offloaded
        )

    def finish(self, ticket: Any, out: F64Array | None = None) -> Sums:
        """Wait for the sums, after a turn of the other micro-batch if there are two."""
        if self._pair is not None:
            try:
                self._remote.poll()
                self._pair.pass_on()
            except BaseException:
                self.abandon(ticket)
                raise
        return self._remote.finish(ticket, out)

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run two micro-batches and return both results. Each computes its routed experts with
        the block of `overlapped`.

        Raises: what one of them has raised, or KeyboardInterrupt, once both have ended.
        """
        if self._pair is not None:
            raise RuntimeError("a micro-batch was split again")
        pair = self._pair = _Pair(second)
        try:
            return pair.run(first)
        finally:
            self._pair = None

    def overlapped(self, moe: MoeBlock[AnyArray]) -> MoeBlock[AnyArray]:
        """The same block for a micro-batch: each call ends a turn, even if no request was sent."""

        def block(
            layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
        ) -> AnyArray:
            pair = self._pair
            assert pair is not None
            num_turns = pair.num_turns_of_holder
            self._remote.poll()  # the device is busy until experts are chosen
            sums = moe(layer_id, hidden, topk_ids, topk_weights)
            if pair.num_turns_of_holder == num_turns:
                pair.pass_on()
            return sums

        return block


class _Pair(Generic[T]):
    """One chunk's micro-batches, and whose turn it is.

    `_holder` has the turn. It passes the turn on by setting `_holder` and opening the other's gate;
    a gate opened once too often causes one more check of `_holder`. KeyboardInterrupt comes to the
    caller's thread at any moment, perhaps during the other's turn, which is then waited for, since
    it uses what both share. Further interrupts are held back meanwhile: `Thread.join`, interrupted,
    takes the thread to have ended (bpo-45274).
    """

    def __init__(self, second: Callable[[], T]) -> None:
        self._second = second
        self._holder = _FIRST
        self._num_turns = [0, 0]
        self._gates = threading.Lock(), threading.Lock()
        for gate in self._gates:
            gate.acquire()
        self._first_has_ended = self._second_has_ended = False
        self._has_failed = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        """What the second micro-batch raised."""
        self._thread = threading.Thread(
            target=self._run_second, name="dflash-micro-batch", daemon=True
        )

    @property
    def num_turns_of_holder(self) -> int:
        """How often the running micro-batch has passed its turn on."""
        return self._num_turns[self._holder]

    def run(self, first: Callable[[], T]) -> tuple[T, T]:
        """Run both; see TwoBatchOverlap.run."""
        try:
            try:
                self._thread.start()
                result = first()
            except BaseException:
                self._has_failed = True
                raise
            finally:
                self._finish_second()
        except _PeerFailed:
            pass
        error, self._error = self._error, None  # its frames refer to self
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames include this one
        return result, self._result.pop()

    def pass_on(self) -> None:
        """End a turn; returns when the next one begins.

        Raises: _PeerFailed; DeviceUnavailable if the other micro-batch does not end its turn.
        """
        me = self._holder
        self._num_turns[me] += 1
        if not (self._second_has_ended if me == _FIRST else self._first_has_ended):
            try:
                self._give(1 - me)
                self._await(me)
            except BaseException:
                self._has_failed = True
                self._regain(me)
                raise
        if self._has_failed:
            raise _PeerFailed

    def _run_second(self) -> None:
        try:
            self._await(_SECOND)
            if not self._has_failed:
                self._result.append(self._second())
        except _PeerFailed:
            pass
        except BaseException as error:
            self._error, self._has_failed = error, True
        finally:
            del self._second  # releases what it refers to
            self._second_has_ended = True
            self._give(_FIRST)

    def _finish_second(self) -> None:
        """Run the second micro-batch to its end after the first has ended, or failed.

        Raises: KeyboardInterrupt if one came meanwhile, once it has ended; DeviceUnavailable if it
        does not end.
        """
        with uninterrupted():
            self._first_has_ended = True
            self._give(_SECOND)
            while self._thread.is_alive() and not self._second_has_ended:
                if not self._gates[_FIRST].acquire(timeout=_LONGEST_TURN_S):
                    raise DeviceUnavailable("a micro-batch of a prompt did not end in time")
                self._give(_SECOND)  # if it was just passing its turn on
            if self._thread.is_alive():
                self._thread.join(_LONGEST_TURN_S)

    def _give(self, to: int) -> None:
        self._holder = to
        with suppress(RuntimeError):  # already open
            self._gates[to].release()

    def _await(self, me: int) -> None:
        """Wait for my turn. Raises: DeviceUnavailable after `_LONGEST_TURN_S`."""
        while self._holder != me:
            if not self._gates[me].acquire(timeout=_LONGEST_TURN_S):
                raise DeviceUnavailable("a micro-batch of a prompt waited for the other too long")

    def _regain(self, me: int) -> None:
        """Wait until the turn that was passed on comes back, ignoring interrupts and timeouts."""
        with uninterrupted(), suppress(DeviceUnavailable):  # another exception is being raised
            if self._holder != me:
                self._give(1 - me)  # the interrupt may have come before
                self._await(me)
