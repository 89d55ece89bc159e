"""Two halves of a chunk on their way through the layers, one behind the other.

::

    first    attention 0, asks | . . . . . . . . . | sums 0, attention 1, asks | . . .
    second   . . . . . . . . . | attention 0, asks | . . . . . . . . . . . . . | sums 0, …
    others   . . . . . . . . . | first's experts 0 . . | second's experts 0 . . | first's …

A model's forward is one loop, so each half has one of its own: the first in the caller's thread,
the second in a thread that lives as long as the chunk. Exactly one of them runs at a time. A turn
ends in the middle of a layer's experts, when others have been asked and before anybody waits for
them; so the second half comes to a layer when the first has been there, whose keys, values and
recurrent states are for it those of the chunk before. What the two have in common need not be
locked.

Whatever ends one half ends the other, before `TwoBatchOverlap.run` raises; what others were asked
for is abandoned then.
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
"""A turn waits for requests, the longest of which has 600 s, and computes what was lost."""

T = TypeVar("T")


class _OtherHasFailed(Exception):
    """Ends a half, and is seen by nobody else."""


class AskedExperts(RemoteExperts, Protocol):
    """Others that go on with what they were asked for when they are given time."""

    def poll(self) -> None:
        """Do what can be done without waiting, for whoever has asked."""


class TwoBatchOverlap:
    """Implements backend.RemoteExperts by those who are asked, and has halves take turns meanwhile.

    Used by one thread at a time.
    """

    def __init__(self, others: AskedExperts) -> None:
        self._others = others
        self._pair: _Pair[Any] | None = None
        self.local_experts_mask, self.count_local = others.local_experts_mask, others.count_local
        self.count_selections, self.abandon = others.count_selections, others.abandon
        self.mail_routes, self.count_mailed = others.mail_routes, others.count_mailed
        self.is_step_to_be_checked = others.is_step_to_be_checked
        self.note_checked_step = others.note_checked_step

    @property
    def may_offload(self) -> bool:
        """As RemoteExperts.may_offload."""
        return self._others.may_offload

    def to_offload(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """As RemoteExperts.to_offload; None for halves, each of which would have them copied."""
        if self._pair is not None:
            return None
        return self._others.to_offload(layer_id, topk_ids, expert_s=expert_s)

    def start(
        self,
        layer_id: int,
        hidden: Hidden,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
    ) -> Any:
        """As RemoteExperts.start."""
        if self._pair is not None:
            self._others.poll()
        return self._others.start(
            layer_id, hidden, topk_ids, topk_weights, phase=phase, offloaded=offloaded
        )

    def finish(self, started: Any, out: F64Array | None = None) -> Sums:
        """As RemoteExperts.finish; before that it is the other half's turn, if there are halves."""
        if self._pair is not None:
            try:
                self._others.poll()
                self._pair.pass_on()
            except BaseException:
                self.abandon(started)
                raise
        return self._others.finish(started, out)

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """What both return; each calls layers' experts as `passing` has made them of a block that
        asks these others.

        Raises: what one of them has raised, or KeyboardInterrupt, when both have ended.
        """
        if self._pair is not None:
            raise RuntimeError("a half is cut in halves")
        pair = self._pair = _Pair(second)
        try:
            return pair.run(first)
        finally:
            self._pair = None

    def passing(self, moe: MoeBlock[AnyArray]) -> MoeBlock[AnyArray]:
        """The same for a half: a turn ends within each call, also if nobody is asked in it."""

        def block(
            layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
        ) -> AnyArray:
            pair = self._pair
            assert pair is not None
            num_turns = pair.num_turns_of_holder
            self._others.poll()  # the device has much to do until experts are chosen
            sums = moe(layer_id, hidden, topk_ids, topk_weights)
            if pair.num_turns_of_holder == num_turns:
                pair.pass_on()
            return sums

        return block


class _Pair(Generic[T]):
    """One chunk's halves, and whose turn it is.

    Whoever has the turn gives it away: `_holder` says who has it, and opening that one's gate wakes
    it up. A gate that was opened once too often only has it look once more. An interrupt, which
    comes to the caller's thread alone and at any moment, may find the turn with the other half; it
    is waited for then, as what both use must not be left while somebody uses it. Further ones are
    held back meanwhile: `Thread.join`, interrupted, takes the thread to have ended (bpo-45274).
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
        """Of the second half."""
        self._thread = threading.Thread(target=self._run_second, name="dflash-half", daemon=True)

    @property
    def num_turns_of_holder(self) -> int:
        """How often the half that runs has given its turn away."""
        return self._num_turns[self._holder]

    def run(self, first: Callable[[], T]) -> tuple[T, T]:
        """As TwoBatchOverlap.run."""
        try:
            try:
                self._thread.start()
                result = first()
            except BaseException:
                self._has_failed = True
                raise
            finally:
                self._finish_second()
        except _OtherHasFailed:
            pass
        error, self._error = self._error, None  # which refers to frames that refer to this
        if error is not None:
            try:
                raise error
            finally:
                del error  # as its frames are this one too
        return result, self._result.pop()

    def pass_on(self) -> None:
        """End a turn; returns when the next one begins.

        Raises: _OtherHasFailed; DeviceUnavailable if the other half does not come to an end.
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
            raise _OtherHasFailed

    def _run_second(self) -> None:
        try:
            self._await(_SECOND)
            if not self._has_failed:
                self._result.append(self._second())
        except _OtherHasFailed:
            pass
        except BaseException as error:
            self._error, self._has_failed = error, True
        finally:
            del self._second  # with all that it refers to
            self._second_has_ended = True
            self._give(_FIRST)

    def _finish_second(self) -> None:
        """The first half has ended: the second one ends too, with its work done unless one failed.

        Raises: KeyboardInterrupt if there was one meanwhile, when it has ended; DeviceUnavailable
        if it does not.
        """
        with uninterrupted():
            self._first_has_ended = True
            self._give(_SECOND)
            while self._thread.is_alive() and not self._second_has_ended:
                if not self._gates[_FIRST].acquire(timeout=_LONGEST_TURN_S):
                    raise DeviceUnavailable("half of a chunk has not come to an end")
                self._give(_SECOND)  # if it was just giving its turn away
            if self._thread.is_alive():
                self._thread.join(_LONGEST_TURN_S)

    def _give(self, half: int) -> None:
        self._holder = half
        with suppress(RuntimeError):  # it is open
            self._gates[half].release()

    def _await(self, half: int) -> None:
        """Wait for a turn. Raises: DeviceUnavailable if it never comes."""
        while self._holder != half:
            if not self._gates[half].acquire(timeout=_LONGEST_TURN_S):
                raise DeviceUnavailable("half of a chunk waits for the other in vain")

    def _regain(self, half: int) -> None:
        """Wait for the turn that was given away, whatever comes."""
        with uninterrupted(), suppress(DeviceUnavailable):  # something is on its way already
            if self._holder != half:
                self._give(1 - half)  # which may not have been done
                self._await(half)
