"""Which path the next captured step takes to its experts: mailboxes while there are any."""

from __future__ import annotations

from collections.abc import Callable

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import I64Array, Phase
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.mailbox.sessions import MailboxSessions
from dflash_runtime.compute.gpu.run.step_captures import DecodePass, PathCaptures
from dflash_runtime.compute.gpu.run.step_paths import MailboxPath, StepPath


class PathChoice:
    """The path that is always there (`home`), and mailboxes, which come and go with daemons.

    States: without mailboxes; with mailboxes, from `choose` until they end, fail or are refused.
    Used by the thread that runs the model. Owns: the captures of both, and the sessions.
    """

    def __init__(
        self, decode: DecodePass, home: StepPath, sessions: MailboxSessions | None
    ) -> None:
        """`sessions`: None if there can be no mailboxes, as all experts are on the device."""
        self.home = PathCaptures(decode, home)
        self.mailbox: MailboxPath | None = None
        self.sessions = sessions
        self._decode = decode
        self._mailed: PathCaptures | None = None
        """Captures of `mailbox`."""
        self._counted: dict[tuple[Phase, int], I64Array] = {}
        """Selections of steps through mailboxes that are closed."""

    @property
    def current(self) -> PathCaptures:
        """What the next step is replayed from."""
        return self.home if self._mailed is None else self._mailed

    @property
    def _device(self) -> KernelDevice:
        return self._decode.ops.device

    def choose(self) -> None:
        """Use mailboxes if there are any, perhaps of new sessions; else the path at home. No step
        may be running."""
        if self.sessions is None or (self.mailbox is not None and self.mailbox.mail.is_live):
            return
        self.leave_mailboxes()
        moe = self.sessions.present()
        if moe is not None:
            self.mailbox = MailboxPath(moe, self.sessions)
            self._mailed = PathCaptures(self._decode, self.mailbox)

    def leave_mailboxes(self) -> None:
        """Go on without them."""
        self.forget_mailed()
        self._counted = self.take_selections()
        self.mailbox = self._mailed = None

    def forget_mailed(self) -> None:
        """Close captures that go through mailboxes."""
        if self._mailed is not None:
            self._device.synchronize()
            self._mailed.forget()

    def lose_mailboxes(self) -> None:
        """A step through them has failed: go on without them until there are new ones."""
        assert self.mailbox is not None
        assert self.sessions is not None
        self._device.synchronize()
        self.mailbox.mail.fail()
        self.leave_mailboxes()
        self.sessions.count_failure()

    def refuse_mailboxes(self, error: DaemonUnavailable) -> None:
        """Go on without them, and don't use these sessions' again."""
        assert self.sessions is not None
        self.leave_mailboxes()
        self.sessions.refuse(error)

    def choose_memory(self, step_s: Callable[[], float]) -> None:
        """Choose the memory in which mailbox steps are fastest; `step_s` measures them."""
        assert self.sessions is not None

        def captured_anew() -> float:
            self.forget_mailed()
            return step_s()

        try:
            self.sessions.choose_memory(captured_anew)
        except DaemonUnavailable as error:
            self.refuse_mailboxes(error)
        self.forget_mailed()

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        """See CapturedStep.take_selections."""
        counted, self._counted = self._counted, {}
        if self.sessions is not None:
            self.sessions.settle()
        if self.mailbox is not None:
            for key, counts in self.mailbox.moe.take_selections().items():
                counted[key] = counted.get(key, 0) + counts
        return counted

    def close(self) -> None:
        """Close all captures and mailboxes; no step may be running."""
        self.home.forget()
        if self._mailed is not None:
            self._mailed.forget()
        self.mailbox = self._mailed = None
        if self.sessions is not None:
            self.sessions.close()
