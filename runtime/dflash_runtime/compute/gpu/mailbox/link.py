"""The parent's end of one mailbox: its lines, requests to the daemon's host besides steps, and the
memory that the two devices share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ids import I64Array
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.gpu.device.device import NANOSECONDS_PER_MS, KernelDevice
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.layout import (
    CLOSED,
    HANDLE_BYTES,
    Ask,
    MailLayout,
    MailLines,
    MailState,
    MailWord,
    MailWords,
    host_lines,
)
from dflash_runtime.compute.gpu.mailbox.memory_exchange import MemoryExchange
from dflash_runtime.compute.gpu.mailbox.probe import (
    FAULT_BYTES,
    ProbePlan,
    new_faults,
    probe_args,
    read_faults,
)
from dflash_runtime.compute.mail_trial import FaultKind, TrialBatch

_LOG = logging.getLogger(__name__)

_COMPILE_S = 30.0
_ANSWER_S = 5.0
"""Longest wait for a daemon's host, which may be computing a chunk."""


class MailLink:
    """Used by one thread. Every request raises DaemonUnavailable if the daemon does not answer.

    States: lines are in the host's memory; may be in the devices' too (`peer_lines`), after
    `open_peer` if each device can map the other's memory; closed. Steps use `lines`.
    Owns: the memory that the devices share, until it is closed.
    """

    def __init__(
        self,
        device: KernelDevice,
        layout: MailLayout,
        segment: Segment,
        *,
        name: str,
        is_live: Callable[[], bool],
        keeper: MemoryKeeper,
    ) -> None:
        assert segment.window is not None
        base = segment.window.device_address(segment.shape.mail_at)
        self.name, self.words = name, MailWords(segment)
        self.peer = MailPeer(
            own_abort=base + MailWord.PARENT_ABORT, other_abort=base + MailWord.DAEMON_ABORT
        )
        self.peer_lines: MailLines | None = None
        """Lines in the devices' memory, if each can map the other's."""
        self.why_no_peer = ""
        self._host_lines = host_lines(layout, base)
        self.lines = self._host_lines
        """The lines in use."""
        self._device, self._segment, self._is_live = device, segment, is_live
        self._memory = MemoryExchange(device, keeper)

    @property
    def stays_in_host(self) -> bool:
        """Devices' memory must not be used."""
        terms = self._segment.mail_terms
        return terms is not None and terms.in_host

    def use_peers(self, uses_peers: bool) -> None:
        """Choose the lines for steps after the next `restart`: in devices' memory if there are any
        and `uses_peers`, else in the host's."""
        self.lines = (self.peer_lines if uses_peers else None) or self._host_lines

    def restart(self, epoch: int) -> None:
        """Set both sides to this epoch, the one before the next step's; no step may be running."""
        self.words.write(MailWord.PARENT_ABORT, 0)
        self.words.ask(Ask.PEER_EPOCH if self.lines is self.peer_lines else Ask.EPOCH, epoch)
        self.words.await_answer(_ANSWER_S, self._is_live)

    def prepare(self, num_tokens: int) -> None:
        """Have the daemon capture steps of so many tokens; call `restart` afterwards."""
        self.words.ask(Ask.SIZE, num_tokens)
        self.words.await_answer(_COMPILE_S, self._is_live)

    def open_peer(self) -> None:
        """Set up lines in the memory of the device that reads them, if each can map the other's."""
        self.why_no_peer = "the other device exports no memory"
        handle = self._segment.read_mail(MailWord.REQUEST_MEMORY, HANDLE_BYTES)
        if not any(handle):
            return
        layout = self._host_lines.layout
        try:
            own = self._memory.export(layout.replies_nbytes)
            self.words.write(MailWord.PARENT_HOLDS, 1)
            other = self._memory.map_other(handle, layout.requests_nbytes)
        except DeviceUnavailable as error:
            self.why_no_peer = one_line(str(error))
            # docs (parent): no peer access between the two GPUs: mailboxes lie in the host's memory
            _LOG.info("cannot map the device memory of %s: %s", self.name, self.why_no_peer)
            self._unmap_other()
            return
        self._segment.write_mail(MailWord.REPLY_MEMORY, own.handle)
        self.words.ask(Ask.PEERS)
        self.words.await_answer(_COMPILE_S, self._is_live)
        self.why_no_peer = "the other device cannot map our memory"
        if self.words.read(MailWord.STATE) != MailState.SEES_PEER:
            return
        self.why_no_peer = ""
        self.peer_lines = MailLines(
            layout, requests=other.device_address, replies=own.device_address
        )

    def probe(
        self, plan: ProbePlan, *, epoch: int, limit_ms: int, first_epoch: int | None = None
    ) -> TrialBatch:
        """Run round trips, with the epochs after this one. `limit_ms`: time limit of each trip.

        Rounds in the result are counted from the one with `first_epoch`; by default the first.
        """
        device, words = self._device, self.words
        side = MailSide(device, (self.peer,), limit_ms)
        kernels = MailKernels(side)
        kernels.prepare_probe(is_echo=False)
        faults, ticks = new_faults(device), device.zeros(plan.num_rounds, np.int64)
        words.write(MailWord.PROBE_SEED, plan.seed)
        words.write(MailWord.PROBE_FOLLOWS, plan.follows)
        words.write(MailWord.PROBE_PAUSE, plan.longest_pause_ns)
        self.restart(epoch)
        side.set_epoch(epoch)
        words.ask(Ask.ECHO, plan.num_rounds)
        words.await_answer(_ANSWER_S, self._is_live)  # its kernel is now waiting for ours
        args = probe_args(device, self.lines, plan, faults=faults, ticks=ticks)
        kernels.probe(args, is_echo=False)
        if first_epoch is None:
            first_epoch = epoch + 1
        num_before = epoch + 1 - first_epoch
        found = device.download(faults)
        in_replies = read_faults(found.tobytes(), first_epoch=first_epoch)
        trips: I64Array = device.download(ticks)
        if in_replies.counts[FaultKind.MISSING] and in_replies.first is not None:
            trips = trips[: max(0, in_replies.first.round_number - num_before)]
        # The daemon writes its faults before it answers this request.
        self.restart(epoch + plan.num_rounds)
        told = self._segment.read_mail(MailWord.PROBE_FAULTS, FAULT_BYTES)
        return TrialBatch(
            trips_ns=trips * NANOSECONDS_PER_MS // device.ticks_per_ms,
            in_requests=read_faults(told, first_epoch=first_epoch),
            in_replies=in_replies,
        )

    def close(self) -> None:
        """Release shared memory, ours once the daemon has closed it; no step may be running."""
        self._unmap_other()
        if self._memory.own is None:
            return
        try:
            self.words.ask(Ask.LEAVE)
            self.words.await_answer(_ANSWER_S, self._is_live)
        except DaemonUnavailable:
            with suppress(DaemonUnavailable):
                self.words.write(MailWord.PARENT_ABORT, CLOSED)
            self._memory.give_back(may_be_open=True)
        else:
            with suppress(DeviceUnavailable):  # a failed device shares nothing any more
                self._memory.give_back(may_be_open=False)

    def _unmap_other(self) -> None:
        self.peer_lines, self.lines = None, self._host_lines
        with suppress(DeviceUnavailable):
            self._memory.unmap_other()
        with suppress(DaemonUnavailable):
            self.words.write(MailWord.PARENT_HOLDS, 0)
