"""Which path the next captured step takes to its experts: mailboxes while there are any, with the
host's help for owners without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ids import Phase
from dflash_runtime.compute import mailbox_layout
from dflash_runtime.compute.backend import MailedExperts, MailRoute
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_experts import MOST_PEERS
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail, is_ready
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.processor_peer import ProcessorPeer, own_banks
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.host_path import HostPath
from dflash_runtime.compute.gpu.run.mailbox_path import MailboxPath
from dflash_runtime.compute.gpu.run.step_captures import DecodePass, PathCaptures
from dflash_runtime.compute.gpu.run.step_path import StepPath
from dflash_runtime.compute.mailbox_layout import is_preparing, mail_layout
from dflash_runtime.compute.slot_pins import NO_PINS, WarmPins
from dflash_runtime.compute.slot_stats import MailedCounts

_LOG = logging.getLogger(__name__)

_READY_S = 60.0
"""Longest wait for daemons, which may have to compile their kernels."""
_POLL_S = 0.01
_MOST_FAILURES = 10
_EPOCHS_OF_OPENING = 1 << 16
"""Epochs skipped when mailboxes are opened: more than probes and restarts take."""


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
        self._counted: dict[tuple[Phase, int], MailedCounts] = {}
        """What was chosen in steps through mailboxes that are closed."""

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
        if self.sessions is None:
            return
        if self.mailbox is not None and self.sessions.is_current:
            if self.mailbox.mail.is_cut:
                self._restart(self.mailbox.mail)
            return
        self.leave_mailboxes()
        self.mailbox = self.sessions.present()
        if self.mailbox is not None:
            self._mailed = PathCaptures(self._decode, self.mailbox)

    def _restart(self, mail: ParentMail) -> None:
        """After a step that was cut short."""
        try:
            mail.restart()
        except DaemonUnavailable as error:
            self.refuse_mailboxes(error)

    def leave_mailboxes(self) -> None:
        """Go on without them."""
        self.forget_mailed()
        self._counted = self.take_selections()
        self.mailbox = self._mailed = None

    def follow_owners(self) -> None:
        """See CapturedStep.follow_owners."""
        self.home.path.follow_owners()
        if self.sessions is not None:
            self.sessions.follow_owners()

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
        mail, is_cut = self.mailbox.mail, self.mailbox.mail.is_cut
        # The host's work may have taken the time: daemons that answer now are not at fault.
        if not (self.mailbox.needs_host and mail.is_answering()):
            mail.fail()
        self.leave_mailboxes()
        if not is_cut:
            self.sessions.count_failure()

    def refuse_mailboxes(self, error: DaemonUnavailable) -> None:
        """Go on without them, and don't use these sessions' again."""
        assert self.sessions is not None
        self.leave_mailboxes()
        self.sessions.refuse(error)

    def choose_memory(self, step_s: Callable[[], float]) -> None:
        """Choose the memory in which mailbox steps are fastest; `step_s` measures them."""
        assert self.sessions is not None
        if self.mailbox is not None and self.mailbox.needs_host:
            return  # which would count what is asked; devices' memory is mostly the faster

        def captured_anew() -> float:
            self.forget_mailed()
            return step_s()

        try:
            self.sessions.choose_memory(captured_anew)
        except DaemonUnavailable as error:
            self.refuse_mailboxes(error)
        self.forget_mailed()

    def take_selections(self) -> dict[tuple[Phase, int], MailedCounts]:
        """See CapturedStep.take_selections."""
        counted, self._counted = self._counted, {}
        if self.mailbox is not None:
            self.mailbox.settle()
            for key, counts in self.mailbox.take_selections().items():
                counted[key] = counted[key] + counts if key in counted else counts
        return counted

    def close(self) -> None:
        """Close all captures and mailboxes; no step may be running."""
        self.home.forget()
        if self._mailed is not None:
            self._mailed.forget()
        self.mailbox = self._mailed = None
        if self.sessions is not None:
            self.sessions.end()


class MailboxSessions:
    """Opens mailboxes for the daemons' current sessions, and refuses those that failed.

    This process's processor has one too, if it has experts and the host need not ask other owners.
    States: without mailboxes; with those of the daemons that have one, from `present` until a
    session of these ends, another daemon has one, they are refused, or `close`; after
    _MOST_FAILURES failed steps, or once epochs are used up, without mailboxes for good. Used by
    the thread that runs the model; lasts as long as the captured step. Owns: the mailboxes in use,
    and the processor's.
    """

    def __init__(
        self,
        ops: GpuOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        remote: MailedExperts,
        home: HostPath,
        keeper: MemoryKeeper,
        cache_slots: int = 0,
        slot_pins: WarmPins = NO_PINS,
    ) -> None:
        """`home` asks owners that have no mailbox; `keeper` takes memory that a lost daemon may
        still have open. `cache_slots`, `slot_pins`: see `open_backend`."""
        self._keeper = keeper
        self._ops, self._moe, self._resident = ops, moe, resident
        self._remote, self._home = remote, home
        self._own = self._new_own(cache_slots, slot_pins)
        remote.settle_with(self._settle)
        self._present: MailboxPath | None = None
        self._refused: tuple[MailRoute, ...] = ()
        """Sessions whose mailboxes have failed."""
        self._num_failures = 0
        self._epoch = 0
        """The last epoch used with any session, so that a session can be opened again."""
        self._uses_peers: bool | None = None
        """Whether lines in devices' memory are faster; None: not measured."""

    @property
    def num_slots(self) -> int:
        """Experts of a layer that steps keep besides those that live here."""
        fetched = None if self._own is None else self._own.fetched
        return 0 if fetched is None else fetched.num_slots

    @property
    def pinned(self) -> Mapping[int, Sequence[int]]:
        """Those of them that do not leave. Global ids by layer id."""
        return {} if self._own is None else self._own.pins.experts

    def _new_own(self, cache_slots: int, slot_pins: WarmPins) -> ProcessorPeer | None:
        if not own_banks(self._remote):
            return None
        try:
            return ProcessorPeer(
                self._ops.device,
                self._moe,
                self._remote,
                cache_slots=cache_slots,
                slot_pins=slot_pins,
            )
        except DeviceUnavailable as error:
            # docs (parent): no host memory could be locked for it; steps ask the processor through
            # the host, which is slower
            _LOG.warning("no mailbox for this process's processor: %s", one_line(str(error)))
            return None

    def _settle(self) -> None:
        self._home.settle()
        if self._own is not None:
            self._own.count()

    def await_ready(self) -> bool:
        """Whether there are mailboxes; waits for daemons that are preparing theirs."""
        end_s = time.monotonic() + _READY_S
        while time.monotonic() < end_s:
            routes = self._remote.mail_routes()
            segments = [route.segment for route in routes if route.segment is not None]
            if not any(map(is_preparing, segments)):
                return bool(self._usable())
            time.sleep(_POLL_S)
        return False

    def present(self) -> MailboxPath | None:
        """The path of the next step; None: the host must ask for all. No step may be running."""
        if self.is_current:
            return self._present
        self.close()
        routes = self._usable()
        if (
            routes
            and self._num_failures < _MOST_FAILURES
            and self._epoch < mailbox_layout.LAST_EPOCH
        ):
            try:
                self._present = self._opened(routes)
            except DaemonUnavailable as error:
                self.refuse(error, routes)
        return self._present

    @property
    def is_current(self) -> bool:
        """Whether there are mailboxes, of all daemons that can be asked so now."""
        if self._present is None or not self._present.mail.is_live:
            return False
        # Mailboxes in use are not asked again whether they are ready: that word may be damaged, and
        # a step that fails shows what is wrong.
        in_use = self._present.mail.routes
        asks_daemons = any(route.segment is not None for route in in_use)
        if asks_daemons and not self._remote.mail_routes():
            return False
        return not any(route not in in_use for route in self._usable())

    def _usable(self) -> tuple[MailRoute, ...]:
        """Routes of mailboxes that are ready and were not refused; the host asks the other
        owners."""
        routes = [
            route
            for route in self._remote.mail_routes()
            if route not in self._refused and is_ready(route, self._ops.device)
        ]
        if self._own is not None and self._own.route not in self._refused:
            with_own = [self._own.route, *routes]
            asked = {self._remote.device_index, *(each.owner_index for each in with_own)}
            # Where the host asks others, it also computes: both would use the same threads.
            if self._home.owner_indices <= asked and len(with_own) <= MOST_PEERS:
                routes = with_own
        return tuple(routes[:MOST_PEERS])

    def _opened(self, routes: tuple[MailRoute, ...]) -> MailboxPath:
        """Raises: DaemonUnavailable."""
        self._epoch += _EPOCHS_OF_OPENING
        has_own = any(route.segment is None for route in routes)
        if self._own is not None:
            self._own.is_only_peer = len(routes) == 1
        mail = ParentMail(
            self._ops.device,
            mail_layout(self._moe),
            routes,
            epoch=self._epoch,
            keeper=self._keeper,
            own=self._own if has_own else None,
        )
        try:
            if mail.has_peers and self._uses_peers is not False:
                mail.use_peers(True)
            return MailboxPath(
                self._ops,
                self._moe,
                self._resident,
                mail=mail,
                remote=self._remote,
                home=self._home,
            )
        except BaseException:
            mail.close()
            raise

    def refuse(self, error: DaemonUnavailable, routes: Sequence[MailRoute] = ()) -> None:
        """Close the current mailboxes, or those of `routes`, and do not use these sessions' again:
        the hosts are asked."""
        # docs (parent): a daemon's GPU does not answer ours by itself; the host asks it, which is
        # slower
        _LOG.warning("no mailbox: %s", one_line(str(error)))
        # The processor's is at fault only where there is no other.
        if self._present is not None:
            routes = self._present.mail.routes
        daemons = [route for route in routes if route.segment is not None]
        refused = (*self._refused, *(daemons or routes))
        self._refused = tuple(route for route in refused if route.is_live())
        self.close()

    def count_failure(self) -> None:
        """A step has failed, and a session with it. After _MOST_FAILURES no mailboxes are opened
        any more, as each failure costs a step's time limit."""
        self._num_failures += 1
        if self._num_failures == _MOST_FAILURES:
            _LOG.warning("no mailbox: %s", f"{_MOST_FAILURES} steps have failed")

    def choose_memory(self, step_s: Callable[[], float]) -> None:
        """Use the memory in which `step_s` measures the faster step. Raises: DaemonUnavailable."""
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

    def close(self) -> None:
        """Close the current mailboxes; no step may be running."""
        if self._present is not None:
            self._epoch = max(self._epoch, self._present.mail.epoch)
            self._present.close()
            if self._epoch >= mailbox_layout.LAST_EPOCH:
                _LOG.warning("no mailbox: %s", "its steps' numbers are used up until a new start")
        self._present = None

    def follow_owners(self) -> None:
        """Experts have moved within this process; no step is running."""
        if self._own is not None:
            self._own.follow_owners()
        if self._present is not None:
            self._present.follow_owners()

    def end(self) -> None:
        """Close what is left; it is not used again. Idempotent."""
        self.close()
        if self._own is not None:
            self._own.close()
