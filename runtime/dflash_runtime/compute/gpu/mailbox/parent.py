"""The parent's end of its mailboxes: one a daemon, all of them used by every step or none.

Knows nothing of models: `mail_moe` records what a step asks, and a captured step rings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.compute.gpu.device.device import HostMapping, KernelDevice
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper
from dflash_runtime.compute.gpu.device.mapped_array import whole_pages
from dflash_runtime.compute.gpu.mailbox import layout as mailbox_layout
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailSide
from dflash_runtime.compute.gpu.mailbox.layout import (
    DAEMON_DEVICE_AT,
    DAEMON_LAYOUT_AT,
    DEVICE_BYTES,
    LAYOUT_NUMBER,
    LIMIT_MS_AT,
    PARENT_DEVICE_AT,
    PARENT_LAYOUT_AT,
    STATE_AT,
    Ask,
    MailLayout,
    MailState,
)
from dflash_runtime.compute.gpu.mailbox.link import MailLink
from dflash_runtime.compute.gpu.mailbox.probe import ProbePlan
from dflash_runtime.compute.gpu.mailbox.words import MailWords

_LOG = logging.getLogger(__name__)

_PROBE_ROUNDS = 200
_UNUSED_EPOCHS = 64
"""More than steps can be under way: a new beginning is behind all of them."""


def begin_mailbox(segment: Segment, device: KernelDevice, limit_ms: int) -> None:
    """What a daemon is to know before it makes its end ready."""
    segment.mail_limit_ms = limit_ms
    words = MailWords(segment)
    words.write(LIMIT_MS_AT, limit_ms)
    words.write(PARENT_LAYOUT_AT, LAYOUT_NUMBER)
    segment.write_mail(PARENT_DEVICE_AT, device.uuid)


def is_ready(route: MailRoute, device: KernelDevice) -> bool:
    """Whether a daemon has made its end ready, with our layout, and computes on another device than
    ours: two that wait for each other cannot share one."""
    try:
        words = MailWords(route.segment)
        state, number = words.read(STATE_AT), words.read(DAEMON_LAYOUT_AT)
        other = route.segment.read_mail(DAEMON_DEVICE_AT, DEVICE_BYTES)
    except DaemonUnavailable:
        return False
    is_usable = number == LAYOUT_NUMBER and other != device.uuid
    return is_usable and state in (MailState.READY, MailState.SEES_PEER)


def is_preparing(route: MailRoute) -> bool:
    """Whether a daemon is still at that."""
    try:
        return MailWords(route.segment).read(STATE_AT) == MailState.PREPARING
    except DaemonUnavailable:
        return False


class ParentMail:
    """Mailboxes with these daemons, as long as their sessions last.

    Owns: memory of the device.
    """

    def __init__(
        self,
        device: KernelDevice,
        layout: MailLayout,
        routes: Sequence[MailRoute],
        *,
        epoch: int,
        keeper: MemoryKeeper,
    ) -> None:
        """No step with these daemons has had this epoch, or one after it.

        Raises: DaemonUnavailable if a daemon does not answer, or what comes is damaged; it may
        be well otherwise."""
        self.routes = tuple(routes)
        self._device = device
        self._links = [
            MailLink(
                device,
                layout,
                route.segment,
                name=route.name,
                is_live=route.is_live,
                keeper=keeper,
            )
            for route in routes
        ]
        limit_ms = routes[0].segment.mail_limit_ms
        # What others can write too must not decide what is taken for right.
        self._failed = whole_pages(1, 0).view(np.uint32)
        self._mapping: HostMapping | None = device.map_host(self._failed)
        self._side = MailSide(
            device,
            [link.peer for link in self._links],
            limit_ms,
            failed=self._mapping.device_address,
        )
        self.kernels = MailKernels(self._side)
        self.epoch = epoch
        """Of the step that was asked for last."""
        self._sizes = {1}
        """Tokens of steps that every daemon is ready for."""
        try:
            for link in self._links:
                self._try_media(link)
            self.use_peers(False)
        except BaseException:
            self.close()
            raise

    @property
    def has_peers(self) -> bool:
        """Whether lines may lie in devices' memory."""
        return any(link.peer_lines is not None for link in self._links)

    def use_peers(self, uses_peers: bool) -> None:
        """Lines lie in devices' memory from now on, where they can, or all in the host's. What was
        captured before is of no use. Raises: DaemonUnavailable."""
        for link in self._links:
            link.use_peers(uses_peers)
        self._sizes = {1}
        self.restart()

    def close(self) -> None:
        """Give back memory that was shared; no step may still run."""
        for link in self._links:
            link.close()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(DeviceUnavailable):  # what has failed sees nothing any more
                mapping.close()

    def requests(self, layer_index: int) -> list[int]:
        """Where each daemon is asked for a layer, by its place in the model."""
        return [link.lines.request(layer_index) for link in self._links]

    def replies(self, layer_index: int) -> list[int]:
        """Where each daemon answers for it."""
        return [link.lines.reply(layer_index) for link in self._links]

    @property
    def is_live(self) -> bool:
        """Whether every session is still what it was, and steps have epochs left."""
        return self.epoch < mailbox_layout.LAST_EPOCH and all(
            route.is_live() for route in self.routes
        )

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is run within asks nobody and waits for nobody; the next step is one again, even if
        the trial fails."""
        # A step before may have failed, which nobody has noticed yet.
        blamed = self._side.blamed
        self._side.set_epoch(self.epoch, is_trial=True)
        try:
            yield
        finally:
            self._device.synchronize()
            is_over = self.failed_epoch() != 0
            self._side.set_epoch(self.epoch, is_trial=is_over, blamed=blamed)

    def restart(self) -> None:
        """Steps begin anew, none of which is under way. Raises: DaemonUnavailable."""
        self._device.synchronize()
        self.epoch += _UNUSED_EPOCHS
        self._failed[0] = 0
        for link in self._links:
            link.restart(self.epoch)
        self._side.set_epoch(self.epoch)

    def prepare(self, num_tokens: int) -> None:
        """Have every daemon ready for steps of so many tokens; none may be under way.

        Raises: DaemonUnavailable."""
        if num_tokens in self._sizes:
            return
        for link in self._links:
            link.prepare(num_tokens)
        self._sizes.add(num_tokens)
        self.restart()

    def ring(self, num_tokens: int = 1) -> None:
        """Have every daemon run a step of so many tokens, which it is ready for; the step before
        has ended if it had another number of them.

        Raises: DaemonUnavailable if one is no longer there."""
        self.epoch += 1
        for link in self._links:
            link.words.ask(Ask.STEP, num_tokens)

    def failed_epoch(self) -> int:
        """Of the first step that failed; 0: none has."""
        return int(self._failed[0])

    def fail(self) -> None:
        """A step has failed: whoever is to blame is lost. Nothing may run any more."""
        blamed = self._side.blamed
        reason = f"the mailbox was not answered within {self._side.limit_ms} ms"
        for index, route in enumerate(self.routes):
            if not blamed or index + 1 == blamed:
                route.fail(reason)

    def _try_media(self, link: MailLink) -> None:
        """Raises: DaemonUnavailable."""
        trips_s = {"the host's memory": self._trip_s(link)}
        if not link.stays_in_host:
            link.open_peer()
        if link.peer_lines is not None:
            link.use_peers(True)
            trips_s["the devices' memory"] = self._trip_s(link)
        for memory, trip_s in trips_s.items():
            # docs (parent): its GPU and ours ask each other without any host; what that costs
            _LOG.info(
                "daemon %s: mailbox, a round trip takes %.1f µs through %s",
                *(link.name, 1e6 * trip_s, memory),
            )

    def _trip_s(self, link: MailLink) -> float:
        """Seconds of a round trip, half of them took longer. Raises: DaemonUnavailable."""
        plan = ProbePlan(_PROBE_ROUNDS)
        found = link.probe(plan, epoch=self.epoch, limit_ms=self._side.limit_ms)
        self.epoch += _PROBE_ROUNDS
        num_wrong = found.in_requests.total + found.in_replies.total
        if num_wrong:
            raise DaemonUnavailable(f"{num_wrong} words of a probe did not arrive as sent")
        return float(np.median(found.trips_ns)) * 1e-9
