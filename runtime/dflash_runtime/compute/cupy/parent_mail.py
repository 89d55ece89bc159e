"""The parent's end of its mailboxes: one a daemon, all of them used by every step or none.

Knows nothing of models: `mail_moe` records what a step asks, and a recorded step rings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ring_segment import Segment
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.compute.cupy.device import KernelDevice, address
from dflash_runtime.compute.cupy.mail_words import MailWords
from dflash_runtime.compute.cupy.mailbox_kernels import (
    MailKernels,
    MailPeer,
    MailProbeArgs,
    MailSide,
)
from dflash_runtime.compute.cupy.mailbox_layout import (
    DAEMON_ABORT_AT,
    DAEMON_DEVICE_AT,
    DEVICE_BYTES,
    HANDLE_BYTES,
    LIMIT_MS_AT,
    PARENT_ABORT_AT,
    PARENT_DEVICE_AT,
    REPLY_MEMORY_AT,
    REQUEST_MEMORY_AT,
    STATE_AT,
    Ask,
    MailLayout,
    MailLines,
    MailState,
    host_lines,
)

_LOG = logging.getLogger(__name__)

_COMPILE_S = 30.0
_ANSWER_S = 5.0
"""Of a daemon's host that is well; it may be computing a chunk."""
_PROBE_ROUNDS = 200
_UNUSED_EPOCHS = 64
"""More than steps can be under way: a new beginning is behind all of them."""


def begin_mailbox(segment: Segment, device: KernelDevice, limit_ms: int) -> None:
    """What a daemon is to know before it makes its end ready."""
    segment.mail_limit_ms = limit_ms
    MailWords(segment).write(LIMIT_MS_AT, limit_ms)
    segment.write_mail(PARENT_DEVICE_AT, device.uuid)


def is_ready(route: MailRoute, device: KernelDevice) -> bool:
    """Whether a daemon has made its end ready, and computes on another device than ours: two that
    wait for each other cannot share one."""
    try:
        state = MailWords(route.segment).read(STATE_AT)
        other = route.segment.read_mail(DAEMON_DEVICE_AT, DEVICE_BYTES)
    except DaemonUnavailable:
        return False
    return state in (MailState.READY, MailState.SEES_PEER) and other != device.uuid


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
    ) -> None:
        """No step with these daemons has had this epoch, or one after it.

        Raises: DaemonUnavailable if a daemon does not answer, or what comes is damaged; it may
        be well otherwise."""
        self.routes = tuple(routes)
        self._device, self._layout = device, layout
        self._words = [MailWords(route.segment) for route in routes]
        bases = [_base(route) for route in routes]
        peers = [
            MailPeer(own_abort=base + PARENT_ABORT_AT, other_abort=base + DAEMON_ABORT_AT)
            for base in bases
        ]
        self._host_lines = [host_lines(layout, base) for base in bases]
        self._lines = self._host_lines.copy()
        self._peer_lines: list[MailLines | None] = []
        self._asks = [Ask.EPOCH] * len(bases)
        self._undo = ExitStack()
        self._side = MailSide(device, peers, routes[0].segment.mail_limit_ms)
        self.kernels = MailKernels(self._side)
        self.epoch = epoch
        """Of the step that was asked for last."""
        try:
            for index in range(len(self.routes)):
                self._peer_lines.append(self._find_medium(index))
            self.use_peers(False)
        except BaseException:
            self.close()
            raise

    @property
    def has_peers(self) -> bool:
        """Whether lines may lie in devices' memory."""
        return any(lines is not None for lines in self._peer_lines)

    def use_peers(self, uses_peers: bool) -> None:
        """Lines lie in devices' memory from now on, where they can, or all in the host's. What was
        recorded before is of no use. Raises: DaemonUnavailable."""
        for index, lines in enumerate(self._peer_lines):
            is_near = uses_peers and lines is not None
            self._asks[index] = Ask.PEER_EPOCH if is_near else Ask.EPOCH
            self._lines[index] = lines if is_near and lines is not None else self._host_lines[index]
        self.restart()

    def close(self) -> None:
        """Give back memory that was shared; no step may still run."""
        with suppress(DeviceUnavailable):  # what has failed shares nothing any more
            self._undo.close()

    def requests(self, layer_index: int) -> list[int]:
        """Where each daemon is asked for a layer, by its place in the model."""
        return [lines.request(layer_index) for lines in self._lines]

    def replies(self, layer_index: int) -> list[int]:
        """Where each daemon answers for it."""
        return [lines.reply(layer_index) for lines in self._lines]

    @property
    def is_live(self) -> bool:
        """Whether every session is still what it was."""
        return all(route.is_live() for route in self.routes)

    def begin_trial(self) -> None:
        """What is run now asks nobody and waits for nobody."""
        self._side.set_epoch(self.epoch, is_trial=True)

    def end_trial(self) -> None:
        """The next step is one again."""
        self._device.synchronize()
        # A step before the trial may have failed, which nobody has noticed yet.
        self._side.set_epoch(self.epoch, is_trial=self.failed_epoch() != 0)

    def restart(self) -> None:
        """Steps begin anew, none of which is under way. Raises: DaemonUnavailable."""
        self._device.synchronize()
        self.epoch += _UNUSED_EPOCHS
        for route, words, ask in zip(self.routes, self._words, self._asks, strict=True):
            words.write(PARENT_ABORT_AT, 0)
            words.ask(ask, self.epoch)
            words.await_answer(_ANSWER_S, route.is_live)
        self._side.set_epoch(self.epoch)

    def ring(self) -> None:
        """Have every daemon run a step. Raises: DaemonUnavailable if one is no longer there."""
        self.epoch += 1
        for words in self._words:
            words.ask(Ask.STEP)

    def failed_epoch(self) -> int:
        """Of the first step that failed; 0: none has."""
        try:
            return self._words[0].read(PARENT_ABORT_AT)
        except DaemonUnavailable:
            return 1  # nobody would tell

    def fail(self) -> None:
        """A step has failed: whoever is to blame is lost. Nothing may run any more."""
        words = self._device.download(self._side.state)
        blamed = int(words[_BLAMED])
        reason = f"the mailbox was not answered within {self._side.limit_ms} ms"
        for index, route in enumerate(self.routes):
            if not blamed or index + 1 == blamed:
                route.fail(reason)

    def _find_medium(self, index: int) -> MailLines | None:
        """Lines in the devices' memory, if both see it. Raises: DaemonUnavailable."""
        by_memory_s = {"the host's memory": self._probe(index)}
        lines = self._open_peer(index)
        if lines is not None:
            self._lines[index], self._asks[index] = lines, Ask.PEER_EPOCH
            by_memory_s["the devices' memory"] = self._probe(index)
        for memory, trip_s in by_memory_s.items():
            _LOG.info(
                "daemon %s: mailbox, a round trip takes %.1f µs through %s",
                *(self.routes[index].name, 1e6 * trip_s, memory),
            )
        return lines

    def _open_peer(self, index: int) -> MailLines | None:
        """Lines in the memory of whichever device reads them; None if one cannot see the other's.

        Raises: DaemonUnavailable.
        """
        route, words, layout = self.routes[index], self._words[index], self._layout
        handle = route.segment.read_mail(REQUEST_MEMORY_AT, HANDLE_BYTES)
        if not any(handle):
            return None
        try:
            own = self._device.export_memory(layout.replies_nbytes)
            self._undo.callback(own.close)
            other = self._device.import_memory(handle)
            self._undo.callback(other.close)
        except DeviceUnavailable as error:
            _LOG.info("our device does not see that of %s: %s", route.name, one_line(str(error)))
            return None
        route.segment.write_mail(REPLY_MEMORY_AT, own.handle)
        words.ask(Ask.PEERS)
        words.await_answer(_COMPILE_S, route.is_live)
        if words.read(STATE_AT) != MailState.SEES_PEER:
            return None
        return MailLines(layout, requests=other.device_address, replies=own.device_address)

    def _probe(self, index: int) -> float:
        """Seconds of a round trip, half of them took longer. Raises: DaemonUnavailable."""
        words, is_live = self._words[index], self.routes[index].is_live
        side = MailSide(self._device, (self._side.peers[index],), self._side.limit_ms)
        wrong, ticks = self._device.zeros(1, np.uint32), self._device.zeros(_PROBE_ROUNDS, np.int64)
        lines = self._lines[index]
        args = MailProbeArgs(
            requests=lines.requests,
            replies=lines.replies,
            wrong=address(wrong),
            ticks=address(ticks),
            num_requests=self._layout.request_lines,
            num_replies=self._layout.reply_lines,
            num_rounds=_PROBE_ROUNDS,
        )
        kernels = MailKernels(side)
        kernels.prepare_probe(is_echo=False)
        words.write(PARENT_ABORT_AT, 0)
        words.ask(self._asks[index], self.epoch)
        words.await_answer(_ANSWER_S, is_live)
        side.set_epoch(self.epoch)
        words.ask(Ask.ECHO, _PROBE_ROUNDS)
        words.await_answer(_ANSWER_S, is_live)  # it waits for us from now on
        kernels.probe(args, is_echo=False)
        num_wrong = int(self._device.download(wrong)[0])
        if num_wrong:
            raise DaemonUnavailable(f"{num_wrong} lines of a probe did not arrive as sent")
        self.epoch += _PROBE_ROUNDS
        return float(np.median(self._device.download(ticks))) * 1e-3 / self._device.ticks_per_ms


_BLAMED = 4
"""In the words of MailSide.state: the peer that did not answer, plus one."""


def _base(route: MailRoute) -> int:
    """Of the mailbox, as our device sees it."""
    window = route.segment.window
    assert window is not None
    return window.device_address(route.segment.shape.mail_at)
