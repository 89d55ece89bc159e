"""Which mailboxes a recorded step can go through now, if any: those of the present sessions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from dflash_adapters.moe_spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, one_line
from dflash_runtime.compute.backend import MailRoute, OtherExperts
from dflash_runtime.compute.cupy.mail_moe import MailMoe
from dflash_runtime.compute.cupy.mailbox_args import MOST_PEERS
from dflash_runtime.compute.cupy.mailbox_layout import mail_layout
from dflash_runtime.compute.cupy.ops import CupyOps
from dflash_runtime.compute.cupy.parent_mail import ParentMail, is_preparing, is_ready
from dflash_runtime.compute.cupy.resident import ResidentLayer

_LOG = logging.getLogger(__name__)

_READY_S = 60.0
"""Daemons may have to compile their kernels."""
_LOOK_S = 0.01


class MailedSteps:
    """Owns: what was made for the sessions that are used."""

    def __init__(
        self,
        ops: CupyOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        elsewhere: OtherExperts,
    ) -> None:
        self._ops, self._moe, self._resident = ops, moe, resident
        self._elsewhere = elsewhere
        self._layout = mail_layout(moe)
        self._routes: tuple[MailRoute, ...] = ()
        self._present: MailMoe | None = None
        self._uses_peers: bool | None = None
        """Whether lines are best in devices' memory; None: nobody has tried."""

    def await_ready(self) -> bool:
        """Whether there are mailboxes; those that are being made ready are waited for."""
        end_s = time.monotonic() + _READY_S
        while time.monotonic() < end_s:
            routes = self._elsewhere.mail_routes()
            if not any(is_preparing(route) for route in routes):
                return bool(routes)
            time.sleep(_LOOK_S)
        return False

    def present(self) -> MailMoe | None:
        """To be asked when no step is running. None: the host is to ask."""
        if self._present is not None and self._present.mail.is_live:
            return self._present
        self.close()
        device, routes = self._ops.device, self._elsewhere.mail_routes()
        is_usable = 0 < len(routes) <= MOST_PEERS
        if is_usable and all(is_ready(route, device) for route in routes):
            try:
                mail = ParentMail(device, self._layout, routes)
                if mail.has_peers and self._uses_peers is not False:
                    mail.use_peers(True)
                self._present = MailMoe(self._ops, self._moe, self._resident, mail)
                self._routes = routes
            except DaemonUnavailable as error:
                _LOG.warning("no mailbox: %s", one_line(str(error)))
        return self._present

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
        _LOG.info(
            "mailboxes: a step takes %.0f µs by the host's memory, %.0f µs by the devices'",
            *(1e6 * times_s[False], 1e6 * times_s[True]),
        )

    def count_step(self) -> None:
        """A step was started."""
        self._elsewhere.count_mailed(self._routes)

    def close(self) -> None:
        """Let go of everything; no step may still run."""
        if self._present is not None:
            self._present.mail.close()
        self._present, self._routes = None, ()
