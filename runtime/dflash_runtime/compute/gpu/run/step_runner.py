"""Decode steps, started one after the other, and again where mailboxes were at fault; and trees of
draft tokens, verified through mailboxes or with all experts here.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.run.decode_tokens import DecodeTokens
from dflash_runtime.compute.gpu.run.mailbox_path import MailboxPath
from dflash_runtime.compute.gpu.run.path_choice import PathChoice
from dflash_runtime.compute.gpu.run.step_captures import Capture, DecodePass, PathCaptures
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.compute.trees import Tree, TreeResult

_TIMED_STEPS, _TIMED_RUNS = 16, 3


class StepRunner:
    """Starts steps of one sequence, through the path that `begin` was given.

    Used by the thread that runs the model. `tokens` says which steps are started.
    """

    def __init__(self, decode: DecodePass, *, captures: PathCaptures) -> None:
        self.tokens: DecodeTokens = decode.tokens
        self._device, self._cache = decode.ops.device, decode.cache
        self._sampling, self._captures = decode.sampling, captures
        self._last: Capture | None = None
        """Of the step started last."""

    def begin(self, captures: PathCaptures, token_id: int, position: int) -> None:
        """Set token, position and path of the next step.

        Raises: CheckpointMissing, DeviceUnavailable.
        """
        self._cache.begin_step(position)
        self.tokens.place(token_id, position)
        self.go_on(captures)

    def go_on(self, captures: PathCaptures) -> None:
        """Take this path from the next step on; no step may be running."""
        self._captures = captures
        captures.path.begin(self.tokens.position)

    def start(self) -> None:
        """Start a step, and count it. Raises: as CapturedStep.start."""
        self._run()
        self._captures.path.count_step()

    def start_to(self, position: int) -> None:
        """Start the steps before this position that are not started; of steps by rules the last one
        may be missing, whose rules are still there."""
        while self.tokens.position < position:
            self.start()
            if self._sampling.is_ruled:
                self.sample()

    def capture(self) -> None:
        """Capture the next step, if it is not."""
        self._captures.next_step()

    def _run(self) -> None:
        self._cache.check_fits(self.tokens.position, 1)
        capture = self._captures.next_step()
        self._last = capture
        self._cache.count_step()  # also of a step that fails: it has overwritten an older state
        capture.replay()
        self.tokens.advance()

    def sample(self) -> None:
        """Sample the token of the step by rules that was started last."""
        assert self._last is not None
        assert self._last.sampling is not None
        self._last.sampling.replay()

    def time_step(self, choice: PathChoice) -> float:
        """Seconds of a step through mailboxes: the fastest of several runs, none of them counted.

        Raises: DaemonUnavailable if one fails.
        """
        num_steps = min(self._cache.capacity, _TIMED_STEPS)
        times_s = []
        for _ in range(_TIMED_RUNS):
            self.begin(choice.current, 0, 0)
            self.capture()
            began_s = time.perf_counter()
            for _ in range(num_steps):
                self._run()
            self._device.synchronize()
            if choice.mailbox is not None and choice.mailbox.mail.failed_epoch():
                raise DaemonUnavailable("a step that was tried has failed")
            times_s.append((time.perf_counter() - began_s) / num_steps)
        self._cache.begin_step(0)
        return min(times_s)

    def logits(self) -> F32Array:
        """Logits of the step started last; waits for it. Shapes: result [V]."""
        assert self._last is not None
        logits: F32Array = self._device.download(self._last.logits.array)[0]
        return logits


class MailboxRedo:
    """Steps through mailboxes that are run again, through the host: failed and checked ones.

    Everything they had written is overwritten. Used by the thread that runs the model.
    """

    def __init__(self, runner: StepRunner, choice: PathChoice) -> None:
        self._runner, self._choice = runner, choice

    def checked_token(self, position: int) -> int:
        """Wait for the token sampled for a position, in a step that is known to be right, as far
        as can be told: see DecodeTokens.wait.

        Raises: DaemonUnavailable if a lost daemon's experts have no fallback; DeviceUnavailable.
        """
        if self._is_redone(position - 1):  # a step that was cut short samples none
            return self._runner.tokens.wait(position)
        token_id = self._runner.tokens.wait(position)
        mailbox = self._choice.mailbox
        if mailbox is None:
            return token_id
        if self._is_redone(position - 1):
            return self._runner.tokens.wait(position)
        if token_id == NOT_FINITE or mailbox.is_to_be_checked():
            token_id = self._computed_by_host(position - 1)
        return token_id

    def check_last(self) -> None:
        """The same for the logits of the step started last; it must have ended."""
        mailbox, position = self._choice.mailbox, self._runner.tokens.position
        if mailbox is None or self._is_redone(position - 1):
            return
        if not self._runner.tokens.is_finite(position) or mailbox.is_to_be_checked():
            self._computed_by_host(position - 1)

    def _is_redone(self, position: int) -> bool:
        """If the step of this position has failed, lose the mailboxes, recompute it and all after
        it through the host."""
        choice, tokens = self._choice, self._runner.tokens
        if choice.mailbox is None or not choice.mailbox.has_failed(position):
            return False
        end, token_id = tokens.position, tokens.input_of(position)
        choice.lose_mailboxes()
        self._runner.begin(choice.current, token_id, position)
        self._runner.start_to(end)
        return True

    def _computed_by_host(self, position: int) -> int:
        """Recompute the step of this position through the host, which checks each reply by itself,
        and start the steps after it again. Returns the sampled token.

        If only the mailboxes' logits were not finite, these mailboxes are not used any more.
        """
        choice, runner, tokens = self._choice, self._runner, self._runner.tokens
        mailbox = choice.mailbox
        assert mailbox is not None
        end, began_s = tokens.position, time.monotonic()
        was_finite = tokens.is_finite(position + 1)
        runner.begin(choice.home, tokens.input_of(position), position)
        runner.start_to(position + 1)
        found = tokens.wait(position + 1)
        if not mailbox.mail.is_live:
            choice.leave_mailboxes()
        elif found != NOT_FINITE and not was_finite:
            choice.refuse_mailboxes(DaemonUnavailable("logits of a step through it are not finite"))
        if found >= 0 and tokens.position < end:
            runner.begin(choice.current, found, position + 1)
            runner.start_to(end)
        else:
            runner.go_on(choice.current)
        if was_finite:
            mailbox.note_checked(time.monotonic() - began_s)
        return found


class TreeSteps:
    """Runs trees of draft tokens, unless the host must ask for their experts.

    Now and then a tree is left to the host to check daemons' replies; what that costs is noted at
    the next one. Used by the thread that runs the model.
    """

    def __init__(self, device: KernelDevice, choice: PathChoice) -> None:
        self._device, self._choice = device, choice
        self._left_to_host: tuple[MailboxPath, float] | None = None
        """The path whose last tree was left to the host, and when, until its cost is noted."""

    def run(self, token_ids: I32Array, tree: Tree, features: Collection[int]) -> TreeResult | None:
        """See CapturedStep.verify. Through mailboxes at most MOST_TOKENS tokens; None for more, or
        where the host has to ask for some experts."""
        choice = self._choice
        if self._left_to_host is not None:
            mailbox, began_s = self._left_to_host
            mailbox.note_checked(time.monotonic() - began_s)
            self._left_to_host = None
        choice.choose()
        if choice.mailbox is None:
            if choice.home.path.needs_host:
                return None
            return choice.home.trees.run(token_ids, tree, features)
        if token_ids.size > MOST_TOKENS or choice.mailbox.needs_host:
            return None
        if choice.mailbox.is_to_be_checked():
            self._left_to_host = choice.mailbox, time.monotonic()
            return None
        return self._mailed(choice.mailbox, token_ids, tree, features)

    def _mailed(
        self, mailbox: MailboxPath, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """None: a daemon has not answered, or there is no memory; the host must ask instead."""
        choice, mail = self._choice, mailbox.mail
        self._device.synchronize()  # surplus steps have another size
        try:
            if not mail.failed_epoch():
                mail.prepare(token_ids.size)
                result = choice.current.trees.run(token_ids, tree, features)
                if result is not None:
                    mailbox.count_tree(token_ids.size)
                if not mail.failed_epoch():
                    return result
        except DaemonUnavailable as error:
            choice.refuse_mailboxes(error)
            return None
        choice.lose_mailboxes()
        return None
