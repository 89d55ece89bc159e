"""A decode step, captured once as a graph and replayed for every token of a context bucket.

Token ids and positions lie on the device: a step reads the token that the one before it sampled, so
the host may start several without waiting for any. Nothing is allocated or compiled in between.
Sampled tokens are written to mapped memory, which the host polls without calling the driver.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase
from dflash_runtime.compute.backend import NOT_FINITE, DeviceSampling
from dflash_runtime.compute.gpu.device.mapped_array import mapped_array, whole_pages
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.sample_tokens import (
    NUM_OPTIONS,
    UNDECIDED,
    SampleInputs,
    option_values,
)
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.mailbox.routes import MailboxRoutes
from dflash_runtime.compute.gpu.mailbox.sessions import MailboxSessions
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.captured_pieces import Capture, capture_pieces
from dflash_runtime.compute.gpu.run.captured_trees import CapturedTrees
from dflash_runtime.compute.gpu.run.host_routes import HostRoutes
from dflash_runtime.compute.model import Pausable, forward, run_to_end
from dflash_runtime.compute.trees import Tree, TreeResult

_NONE = -1
"""In place of a token that is not sampled yet."""
_POLL_S = 20e-6
"""Pause between polls for a token: short beside a step, long enough for other threads to take the
interpreter's lock."""
_TIMED_STEPS, _TIMED_RUNS = 16, 3
_TIMEOUT_S = 0.5
"""When a step takes longer the driver is asked whether the device has failed."""


class GraphStep:
    """Implements backend.CapturedStep for one sequence. Used by the thread that runs the model.

    Three routes to experts: all on the device (one graph); asked by the host (`shared`, whose block
    is `moe`: a graph in pieces); asked by the device through mailboxes (`sessions`), preferred to
    the host's while their daemons are there. A mailbox step that fails is recomputed through the
    host, and so are the steps after it until there are mailboxes again.
    Sampling is captured separately, so that greedy steps do not pay for it.
    Trees of draft tokens are captured too, unless the host must ask.
    Owns: graphs of each context bucket used so far, and mapped memory of the host.
    """

    def __init__(
        self,
        ops: GpuOps,
        model: GpuModel,
        cache: DeviceKvCache,
        *,
        moe: DeviceMoe,
        shared: HostRoutes | None = None,
        sessions: MailboxSessions | None = None,
    ) -> None:
        device = ops.device
        self._ops = ops
        self._model = model
        self._cache = cache
        self._moe = moe
        self._token_ids = device.zeros(1, np.int32)
        self._positions = device.zeros(1, np.int32)
        # One more: the step of the last position samples a token too.
        self._tokens = whole_pages(cache.capacity + 1, _NONE)
        self._mapping = device.map_host(self._tokens)
        self._history = mapped_array(device, self._mapping, self._tokens)
        self._sampling = SampleInputs(
            device.zeros(NUM_OPTIONS, np.float64), device.zeros(self._tokens.size, np.float64)
        )
        self._is_sampling = False
        self._shared = shared
        self._sessions = sessions
        self._mail: MailboxRoutes | None = None
        """Mailboxes that the next step goes through; None: the host asks."""
        self._left_to_host_s: float | None = None
        """When a tree was last left to the host to check daemons; its cost is noted at the next."""
        self._is_trial = False
        """Steps are only timed, and not counted."""
        self._counted: dict[tuple[Phase, int], I64Array] = {}
        """Selections of steps through mailboxes that are closed."""
        self._first_epoch = self._first_id = 0
        """Epoch and token of the step set by the last `begin`."""
        self._captures: dict[tuple[int, bool, MailboxRoutes | None], Capture] = {}
        self._trees = CapturedTrees(ops, model, cache)
        self._last: Rows | None = None
        self._first = self._position = 0
        self._is_closed = False

    @property
    def needs_host(self) -> bool:
        return self._shared is not None and self._mail is None

    @property
    def counts_itself(self) -> bool:
        return self._shared is not None

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        counted, self._counted = self._counted, {}
        if self._sessions is not None:
            self._sessions.settle()
        if self._mail is not None:
            for key, counts in self._mail.take_selections().items():
                counted[key] = counted.get(key, 0) + counts
        return counted

    def prepare(self) -> None:
        self._capture_all()
        if self._sessions is not None and self._sessions.await_ready():
            self._choose_route()
            self._choose_memory(self._sessions)
            self._capture_all()

    def _choose_memory(self, sessions: MailboxSessions) -> None:
        """Choose the memory in which mailbox steps are fastest."""
        self._is_trial = True
        try:
            sessions.choose_memory(self._step_s)
        except DaemonUnavailable as error:
            self._forget_mail()
            sessions.refuse(error)
        finally:
            self._is_trial = False
        self._forget_captures()

    def _step_s(self) -> float:
        """Seconds of a step: the fastest of several timed runs."""
        self._forget_captures()
        num_steps = min(self._cache.capacity, _TIMED_STEPS)
        times_s = []
        for _ in range(_TIMED_RUNS):
            self._begin(0, 0)
            self._capture()
            began_s = time.perf_counter()
            for _ in range(num_steps):
                self.start()
            self._ops.device.synchronize()
            if self._mail is not None and self._mail.mail.failed_epoch():
                raise DaemonUnavailable("a step that was tried has failed")
            times_s.append((time.perf_counter() - began_s) / num_steps)
        self._cache.begin_step(0)
        return min(times_s)

    def _capture_all(self) -> None:
        capacity, position = self._cache.capacity, 0
        while position < capacity:
            self._place(0, position)
            for is_sampling in (True, False):
                self._is_sampling = is_sampling
                self._capture()
            position = context_bucket(position + 1)
        self.begin(0, 0)

    def choose_by(self, options: DeviceSampling | None) -> None:
        vocab_size = self._model.spec.vocab_size
        values = option_values(options, vocab_size=vocab_size)
        self._ops.device.write(self._sampling.options, values)
        self._is_sampling = options is not None

    def expect(self, first_position: int, numbers: F64Array) -> None:
        places = self._sampling.numbers[first_position : first_position + numbers.size]
        self._ops.device.write(places, numbers)

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position of the next step.

        Raises: ContextExceeded, DeviceUnavailable; CheckpointMissing.
        """
        self._cache.check_fits(position, 1)
        self._choose_route()
        self._begin(token_id, position)

    def _begin(self, token_id: int, position: int) -> None:
        self._cache.begin_step(position)
        self._place(token_id, position)

    def _choose_route(self) -> None:
        """Use mailboxes if there are any, perhaps of new sessions; else the host."""
        if self._sessions is None or (self._mail is not None and self._mail.mail.is_live):
            return
        self._forget_mail()
        self._mail = self._sessions.present()

    def _forget_mail(self) -> None:
        self._forget_captures()
        self._counted = self.take_selections()
        self._mail = None

    def _forget_captures(self) -> None:
        """Close captures that go through mailboxes."""
        if self._mail is not None:
            self._ops.device.synchronize()
        self._trees.forget(mailed_only=True)
        for key in [key for key in self._captures if key[2] is not None]:
            self._captures.pop(key).close()

    def _place(self, token_id: int, position: int) -> None:
        device = self._ops.device
        device.synchronize()  # surplus steps may still write their tokens
        if self._shared is not None:
            self._shared.reset()
        self._tokens[self._first + 1 : self._position + 1] = _NONE
        self._first_id = token_id
        self._first_epoch = 0 if self._mail is None else self._mail.mail.epoch + 1
        device.write(self._token_ids, np.array([token_id], np.int32))
        device.write(self._positions, np.array([position], np.int32))
        self._first = self._position = position

    def start(self) -> None:
        """Start a step; its sampled token is the input of the next one, at the next position.

        Raises: ContextExceeded if there is no room for it; DaemonUnavailable.
        """
        self._cache.check_fits(self._position, 1)
        capture = self._capture()
        self._last = capture.logits
        if self._mail is not None:
            self._start_mailed(self._mail, capture)
            return
        try:
            for piece in capture.pieces:
                piece.graph.replay()
                if piece.host_work is not None:
                    piece.host_work()
        except BaseException:
            if self._shared is not None:
                self._shared.abandon()
            raise
        if self._shared is not None:
            self._shared.count_step()
        self._cache.count_step()
        self._position += 1

    def _start_mailed(self, mail: MailboxRoutes, capture: Capture) -> None:
        """A lost daemon is noticed in `token`."""
        assert self._sessions is not None
        mail.mail.ring()
        for piece in capture.pieces:
            piece.graph.replay()
        if not self._is_trial:
            self._sessions.count_step()
        self._cache.count_step()
        self._position += 1

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """Through mailboxes at most MOST_TOKENS tokens; None for more."""
        if self._left_to_host_s is not None and self._sessions is not None:
            self._sessions.note_checked(time.monotonic() - self._left_to_host_s)
            self._left_to_host_s = None
        self._choose_route()
        if self._mail is None:
            if self._shared is not None:
                return None
            return self._trees.run(token_ids, tree, features, moe=self._moe)
        if token_ids.size > MOST_TOKENS:
            return None
        if self._is_to_be_checked():
            self._left_to_host_s = time.monotonic()
            return None
        return self._verify_mailed(self._mail, token_ids, tree, features)

    def _verify_mailed(
        self, mail: MailboxRoutes, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """None: a daemon has not answered, or there is no memory; the host must ask instead."""
        assert self._sessions is not None
        self._ops.device.synchronize()  # surplus steps have another size
        try:
            if not mail.mail.failed_epoch():
                mail.mail.prepare(token_ids.size)
                moe = mail.block(Phase.VERIFY)
                result = self._trees.run(token_ids, tree, features, moe=moe, mail=mail.mail)
                if result is not None:
                    self._sessions.count_tree(token_ids.size)
                if not mail.mail.failed_epoch():
                    return result
        except DaemonUnavailable as error:
            self._forget_mail()
            self._sessions.refuse(error)
            return None
        self._lose_mail(mail, self._sessions)
        return None

    def _lose_mail(self, mail: MailboxRoutes, sessions: MailboxSessions) -> None:
        """A mailbox step has failed: go on through the host until there are mailboxes again."""
        self._ops.device.synchronize()
        mail.mail.fail()
        self._forget_mail()
        sessions.count_failure()

    def _redo_failed(self, position: int) -> None:
        """If the mailbox step of this position has failed, recompute it and all after it through
        the host; everything they had written is overwritten.

        Raises: DaemonUnavailable if a lost daemon's experts have no fallback.
        """
        mail = self._mail
        if mail is None:
            return
        failed = mail.mail.failed_epoch()
        if not failed or failed > self._first_epoch + position - self._first:
            return
        end, token_id = self._position, self._first_id
        if position > self._first:
            token_id = int(self._tokens[position])
        assert self._sessions is not None
        self._lose_mail(mail, self._sessions)
        self._begin(token_id, position)
        while self._position < end:
            self.start()

    def _computed_by_host(self, position: int) -> int:
        """Recompute the step of this position through the host, which checks each reply by itself,
        and start the steps after it again. Returns the sampled token.

        If only the mailboxes' logits were not finite, these mailboxes are not used any more.
        Raises: DaemonUnavailable if a lost daemon's experts have no fallback.
        """
        mail, end, began_s = self._mail, self._position, time.monotonic()
        assert mail is not None
        assert self._sessions is not None
        token_id = self._first_id if position == self._first else int(self._tokens[position])
        was_finite = self._tokens[position + 1] != NOT_FINITE
        self._mail = None
        try:
            self._begin(token_id, position)
            self.start()
            self.token(position + 1)
        finally:
            self._mail = mail
        found = int(self._tokens[position + 1])
        is_lost = not mail.mail.is_live
        if is_lost or (found != NOT_FINITE and not was_finite):
            self._forget_mail()
            if not is_lost:
                self._sessions.refuse(
                    DaemonUnavailable("logits of a step through it are not finite")
                )
        if found >= 0 and self._position < end:
            self._begin(found, position + 1)
            while self._position < end:
                self.start()
        if was_finite:
            self._sessions.note_checked(time.monotonic() - began_s)
        return found

    def _is_to_be_checked(self) -> bool:
        """Whether to recompute the step whose token is asked for through the host, as a check."""
        return (
            self._sessions is not None and not self._is_trial and self._sessions.is_to_be_checked()
        )

    def token(self, position: int) -> int | None:
        """Wait for the token sampled for a position; None: the host must sample it.

        Raises: DeviceUnavailable if the device has failed.
        """
        assert self._first < position <= self._position
        tokens, timeout_at_s = self._tokens, 0.0
        while (token_id := int(tokens[position])) == _NONE:
            now_s = time.monotonic()
            if not timeout_at_s:
                timeout_at_s = now_s + _TIMEOUT_S
            elif now_s > timeout_at_s:
                self._ops.device.synchronize()
                if tokens[position] == _NONE:
                    raise DeviceUnavailable(
                        # docs: the device failed without its driver saying so; look at the system's
                        # log
                        f"{self._ops.device.name}: a step has ended without a token"
                    )
            time.sleep(_POLL_S)
        if self._mail is not None:
            self._redo_failed(position - 1)
            if self._mail is None:
                return self.token(position)
            if token_id == NOT_FINITE or self._is_to_be_checked():
                token_id = self._computed_by_host(position - 1)
        return None if token_id == UNDECIDED else token_id

    def logits(self) -> F32Array:
        """Wait for the logits of the step started last. Shapes: result [V]."""
        assert self._last is not None
        if self._mail is not None:
            self._ops.device.synchronize()
            self._redo_failed(self._position - 1)
            is_known = self._tokens[self._position] != NOT_FINITE
            if self._mail is not None and (not is_known or self._is_to_be_checked()):
                self._computed_by_host(self._position - 1)
        logits: F32Array = self._ops.device.download(self._last.array)[0]
        return logits

    def close(self) -> None:
        """Release everything, even if this object is still referred to. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(DeviceUnavailable):  # a device that has failed writes nothing any more
            self._ops.device.synchronize()
        for capture in self._captures.values():
            capture.close()
        self._captures.clear()
        self._trees.forget()
        self._mail = None
        if self._sessions is not None:
            self._sessions.close()
        self._mapping.close()
        if self._shared is not None:
            self._shared.close()
        del self._ops, self._model, self._cache, self._moe, self._shared, self._last, self._sessions
        del self._token_ids, self._positions, self._sampling, self._trees

    def _capture(self) -> Capture:
        """The capture for the next step's context bucket, made when first needed."""
        bucket = context_bucket(self._position + 1)
        key = bucket, self._is_sampling, self._mail
        if key not in self._captures:
            self._captures[key] = self._captured(bucket)
        return self._captures[key]

    def _captured(self, bucket: int) -> Capture:
        """Run the step once, which compiles and allocates what it needs, then capture it."""
        device, buffers, shared = self._ops.device, self._ops.steps.buffers, self._shared
        mail = None if self._mail is None else self._mail.mail
        if mail is not None:
            shared = None
        before = [device.download(array) for array in (self._token_ids, self._positions)]
        with buffers.noted() as noted, nullcontext() if mail is None else mail.trial():
            if shared is not None:
                shared.begin_trial()
            with self._ops.step_experts.uncounted():
                run_to_end(self._launch_step(bucket))
        device.synchronize()
        self._tokens[self._position + 1] = _NONE
        for array, values in zip((self._token_ids, self._positions), before, strict=True):
            device.write(array, values)
        if shared is None:
            with buffers.repeated(noted):
                pieces, logits = capture_pieces(device, self._launch_step(bucket))
            return Capture(pieces, logits, [])
        # Other work may run between pieces, so a step in pieces keeps its buffers to itself.
        with buffers.repeated(noted) as kept:
            shared.begin_capture()
            try:
                pieces, logits = capture_pieces(device, self._launch_step(bucket))
            finally:
                shared.end_capture()
        return Capture(pieces, logits, kept)

    def _launch_step(self, bucket: int) -> Pausable[Rows]:
        moe = self._moe
        if self._mail is not None:
            self._mail.mail.kernels.begin()
            moe = self._mail.block(Phase.DECODE)
        step = PlacedStep.of_arrays(
            self._token_ids, self._positions, self._cache, Phase.DECODE, bucket
        )
        hidden = yield from forward(self._model, step, moe)
        history: Any = self._history
        return self._model.choose_tokens(
            hidden,
            token_ids=self._token_ids,
            positions=self._positions,
            history=history,
            sampling=self._sampling if self._is_sampling else None,
        )
