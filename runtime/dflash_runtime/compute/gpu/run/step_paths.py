"""Paths of a captured step to its routed experts: on the device, asked by the host, or mailboxes.

A path knows what surrounds the launches of a step: what a trial must not do, what is done between
graphs, and how a replay is begun. The launches themselves are those of the experts that it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe
from dflash_runtime.compute.gpu.mailbox.routes import MailboxRoutes
from dflash_runtime.compute.gpu.mailbox.sessions import MailboxSessions
from dflash_runtime.compute.gpu.run.captured_pieces import GraphPiece
from dflash_runtime.compute.gpu.run.host_routes import HostRoutes


class StepPath(Protocol):
    """How the experts of a step are reached. Used by the thread that runs the model."""

    @property
    def needs_host(self) -> bool:
        """Whether the host works between a step's graphs; no other work may take their buffers."""

    def begin(self, position: int) -> None:
        """The next step, at this position, takes this path; no step may be running."""

    def experts(self, phase: Phase) -> DeviceMoe:
        """What a model calls in a pass whose launches follow: of a trial, or captured."""

    def trial(self) -> AbstractContextManager[None]:
        """A context for a pass that asks no remote owner and whose host work is left out; it must
        have ended on the device before the context does."""

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        """Replay a pass of so many tokens. Raises: DaemonUnavailable."""

    def count_step(self) -> None:
        """Count a decode step that was replayed."""

    def is_trusted(self, argmax: I32Array) -> bool:
        """Whether a pass that has ended is right, as far as can be told. Shapes: argmax [T]."""


class LocalPath:
    """Implements StepPath: all experts are on the device."""

    needs_host = False

    def __init__(self, moe: DeviceMoe) -> None:
        self._moe = moe

    def begin(self, position: int) -> None:
        """Nothing."""

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe

    def trial(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        for piece in pieces:
            piece.graph.replay()

    def count_step(self) -> None:
        """Nothing: the device counts."""

    def is_trusted(self, argmax: I32Array) -> bool:
        return True


class HostPath:
    """Implements StepPath for steps of one token: the host asks remote owners, between graphs."""

    needs_host = True

    def __init__(self, moe: DeviceMoe, shared: HostRoutes) -> None:
        """`moe` is what `shared` has models call."""
        self._moe, self._shared = moe, shared

    def begin(self, position: int) -> None:
        self._shared.reset()

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe

    @contextmanager
    def trial(self) -> Iterator[None]:
        yield
        self._shared.reset()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        try:
            for piece in pieces:
                piece.graph.replay()
                if piece.host_work is not None:
                    piece.host_work()
        except BaseException:
            self._shared.abandon()
            raise

    def count_step(self) -> None:
        self._shared.count_step()

    def is_trusted(self, argmax: I32Array) -> bool:
        return True


class MailboxPath:
    """Implements StepPath: kernels ask daemons' kernels, and a lost daemon is noticed afterwards.

    States: live; failed, from the first step that was not answered on: its results and all later
    ones are wrong. Lasts as long as the mailboxes of `moe`.
    """

    needs_host = False

    def __init__(self, moe: MailboxRoutes, sessions: MailboxSessions) -> None:
        self.moe, self.mail = moe, moe.mail
        self._sessions = sessions
        self._epoch_of_position_0 = 0

    def begin(self, position: int) -> None:
        self._epoch_of_position_0 = self.mail.epoch + 1 - position

    def experts(self, phase: Phase) -> DeviceMoe:
        self.mail.kernels.begin()
        return self.moe.block(phase)

    def trial(self) -> AbstractContextManager[None]:
        return self.mail.trial()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        """Every daemon must be prepared for so many tokens."""
        self.mail.ring(num_tokens)
        for piece in pieces:
            piece.graph.replay()

    def count_step(self) -> None:
        self._sessions.count_step()

    def count_tree(self, num_tokens: int) -> None:
        """Count a tree of so many tokens that was replayed."""
        self._sessions.count_tree(num_tokens)

    def has_failed(self, position: int) -> bool:
        """Whether the step of this position has failed, or one before it."""
        failed = self.mail.failed_epoch()
        return failed != 0 and failed <= self._epoch_of_position_0 + position

    def is_trusted(self, argmax: I32Array) -> bool:
        """Not if something is not finite: asking through the host will tell which reply is at
        fault."""
        return not self.mail.failed_epoch() and not bool((argmax == NOT_FINITE).any())
