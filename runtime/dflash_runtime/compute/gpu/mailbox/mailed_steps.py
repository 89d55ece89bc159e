"""Which mailboxes a captured step can go through now, if any: those of the present sessions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, one_line
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import MailRoute, RemoteExperts
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper
from dflash_runtime.compute.gpu.launch.mailbox_args import MOST_PEERS
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox import layout as mailbox_layout
from dflash_runtime.compute.gpu.mailbox.layout import mail_layout
from dflash_runtime.compute.gpu.mailbox.moe import MailMoe
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail, is_preparing, is_ready
from dflash_runtime.compute.gpu.ops.ops import CupyOps

_LOG = logging.getLogger(__name__)

_READY_S = 60.0
"""Daemons may have to compile their kernels."""
_LOOK_S = 0.01
_MOST_FAILURES = 10
_EPOCHS_OF_OPENING = 1 << 16
"""More than probes and restarts take."""


class MailedSteps:
    """Owns: what was made for the sessions that are used."""

    def __init__(
        self,
        ops: CupyOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        remote: RemoteExperts,
        keeper: MemoryKeeper,
    ) -> None:
        """`keeper` takes memory that daemons who are lost may still have open."""
        self._keeper = keeper
        self._ops, self._moe, self._resident = ops, moe, resident
        self._remote = remote
        self._layout = mail_layout(moe)
        self._routes: tuple[MailRoute, ...] = ()
        self._present: MailMoe | None = None
        self._refused: tuple[MailRoute, ...] = ()
        """Sessions whose mailboxes were tried and are of no use."""
        self._num_steps = self._num_failures = 0
        self._epoch = 0
        """No step was ever asked for with one after it: a session may be used again."""
        self._uses_peers: bool | None = None
        """Whether lines are best in devices' memory; None: nobody has tried."""

    def await_ready(self) -> bool:
        """Whether there are mailboxes; those that are being made ready are waited for."""
        end_s = time.monotonic() + _READY_S
        while time.monotonic() < end_s:
            routes = self._remote.mail_routes()
            if not any(is_preparing(route) for route in routes):
                return bool(routes)
            time.sleep(_LOOK_S)
        return False

    def present(self) -> MailMoe | None:
        """To be asked when no step is running. None: the host is to ask."""
        if self._present is not None and self._present.mail.is_live:
            return self._present
        self.close()
        routes = self._remote.mail_routes()
        if self._num_failures < _MOST_FAILURES and self._is_usable(routes):
            self._routes = routes
            try:
                self._present = self._opened(routes)
            except DaemonUnavailable as error:
                self.refuse(error)
        return self._present

    def _is_usable(self, routes: tuple[MailRoute, ...]) -> bool:
        is_new = 0 < len(routes) <= MOST_PEERS and routes != self._refused
        return (
            is_new
            and self._epoch < mailbox_layout.LAST_EPOCH
            and all(is_ready(route, self._ops.device) for route in routes)
        )

    def _opened(self, routes: tuple[MailRoute, ...]) -> MailMoe:
        """Raises: DaemonUnavailable."""
        self._epoch += _EPOCHS_OF_OPENING
        mail = ParentMail(
            self._ops.device, self._layout, routes, epoch=self._epoch, keeper=self._keeper
        )
        try:
            if mail.has_peers and self._uses_peers is not False:
                mail.use_peers(True)
            return MailMoe(self._ops, self._moe, self._resident, mail=mail)
        except BaseException:
            mail.close()
            raise

    def refuse(self, error: DaemonUnavailable) -> None:
        """The present sessions' mailboxes are of no use: their hosts are asked instead."""
        # docs (parent): a daemon's GPU does not answer ours by itself; the host asks it, which is
        # slower
        _LOG.warning("no mailbox: %s", one_line(str(error)))
        self._refused = self._routes
        self.close()

    def count_failure(self) -> None:
        """A step has failed, and a session with it. Where that happens again and again, no other is
        tried: each costs a step's limit."""
        self._num_failures += 1
        if self._num_failures == _MOST_FAILURES:
            _LOG.warning("no mailbox: %s", f"{_MOST_FAILURES} steps have failed")

    def choose_memory(self, step_s: Callable[[], float]) -> None:
        """Where steps are the fastest, as `step_s` measures. Raises: DaemonUnavailable."""
        if self._present is None or not self._present.mail.has_peers:
            return
        mail, times_s = self._present.mail, {}
        for uses_peers in (False, True):
            mail.use_peers(uses_peers)
            times_s[uses_peers] = step_s()
        self._uses_peers = times_s[True] <= times_s[False]
        mail.use_peers(self._uses_peers)
        # docs (parent): which memory GPUs ask each other through: the faster one
        _LOG.info(
            "mailboxes: a step takes %.0f µs by the host's memory, %.0f µs by the devices'",
            *(1e6 * times_s[False], 1e6 * times_s[True]),
        )

    def count_step(self) -> None:
        """A step was started."""
        self._num_steps += 1

    def count_tree(self, num_tokens: int) -> None:
        """A step of a tree's tokens has gone through mailboxes."""
        self._remote.count_mailed(self._routes, 1, phase=Phase.VERIFY, num_tokens=num_tokens)

    def is_to_be_checked(self) -> bool:
        """Whether the host is to compute a step instead, so that a daemon's reply can be compared
        with the parent's own; `note_checked` is then told what that has cost."""
        return self._remote.is_step_to_be_checked(self._routes)

    def note_checked(self, elapsed_s: float) -> None:
        self._remote.note_checked_step(elapsed_s)

    def settle(self) -> None:
        """Steps that were started are counted as their owners'."""
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps:
            self._remote.count_mailed(self._routes, num_steps)

    def close(self) -> None:
        """Let go of everything; no step may still run."""
        self.settle()
        if self._present is not None:
            self._epoch = max(self._epoch, self._present.mail.epoch)
            self._present.mail.close()
            if self._epoch >= mailbox_layout.LAST_EPOCH:
                _LOG.warning("no mailbox: %s", "its steps' numbers are used up until a new start")
        self._present, self._routes = None, ()
