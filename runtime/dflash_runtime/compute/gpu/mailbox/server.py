"""A device as the daemon's end of a mailbox: it answers with captured steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.kernels import MailPeer
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryExchange, MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.probe import ProbePlan
from dflash_runtime.compute.gpu.mailbox.served_steps import ServedSteps
from dflash_runtime.compute.mailbox_layout import (
    HANDLE_BYTES,
    Ask,
    Asked,
    MailLayout,
    MailLines,
    MailState,
    MailWord,
    MailWords,
    host_lines,
)

_LOG = logging.getLogger(__name__)


class DeviceEnd:
    """Implements mail_server.MailEnd with a stream of the device of its own.

    `layers`: with their places in the model, experts by local id. `lock` is held while the device's
    main stream is used. `is_alone`: whether no other parent is served, which waiting kernels could
    hold up. `starting` is held while a step is started.
    Owns: the captured steps, and memory shared with the parent; not the segment.
    """

    def __init__(
        self,
        device: KernelDevice,
        segment: Segment,
        layout: MailLayout,
        *,
        layers: Sequence[tuple[int, ResidentLayer]],
        lock: threading.RLock,
        keeper: MemoryKeeper,
        is_alone: Callable[[], bool],
        starting: threading.Lock,
    ) -> None:
        self._segment, self._lock, self._layout = segment, lock, layout
        self._starting, self._base = starting, segment.device_mail
        self._words = MailWords(segment)
        segment.write_mail(MailWord.DAEMON_DEVICE, device.uuid)
        self._steps = ServedSteps(device, self._words, layers=layers, is_alone=is_alone)
        self._memory = MemoryExchange(device, keeper)

    def prepare(self, limit_ms: int) -> None:
        """Compile and capture the step of one token. Raises: DflashError."""
        with self._lock:
            peer = MailPeer(
                own_abort=self._base + MailWord.DAEMON_ABORT,
                other_abort=self._base + MailWord.PARENT_ABORT,
            )
            self._steps.prepare(peer, limit_ms, host_lines(self._layout, self._base))
            with suppress(DeviceUnavailable):  # then lines stay in the host's memory
                own = self._memory.export(self._layout.requests_nbytes)
                self._segment.write_mail(MailWord.REQUEST_MEMORY, own.handle)

    def step_of(self, num_tokens: int) -> Callable[[], object]:
        """See MailEnd.step_of."""
        graph = self._steps.graph_of(num_tokens)

        def start() -> None:
            with self._starting:
                self._steps.replay(graph)

        return start

    def wait(self) -> None:
        """See MailEnd.wait. Without the lock: it waits for the parent."""
        self._steps.synchronize()

    def do(self, asked: Asked) -> None:
        """See MailEnd.do."""
        with self._lock:
            if asked.ask is Ask.PEERS:
                self._see_peer()
            elif asked.ask is Ask.LEAVE:
                self._leave_peer()
            elif asked.ask is Ask.ECHO:
                self._words.answer(asked.number)  # first: its kernel waits for the parent's
                self._echo(asked.argument)
            elif asked.ask is Ask.SIZE:
                self._steps.add_size(asked.argument)
            else:
                self._steps.restart(asked.argument, in_devices=asked.ask is Ask.PEER_EPOCH)

    def close(self) -> None:
        """See MailEnd.close."""
        with suppress(DeviceUnavailable):
            self._steps.synchronize()
        with suppress(DeviceUnavailable), self._lock:
            self._steps.close()
            self._memory.unmap_other()
            is_held = True  # the parent may have it open
            with suppress(DaemonUnavailable):
                is_held = self._words.read(MailWord.PARENT_HOLDS) != 0
            self._memory.give_back(may_be_open=is_held)
        self._steps.forget()

    def _see_peer(self) -> None:
        """Map the parent's memory and capture a step that uses the devices' memory."""
        self._leave_peer()
        own = self._memory.own
        if own is None:
            return
        try:
            handle = self._segment.read_mail(MailWord.REPLY_MEMORY, HANDLE_BYTES)
            other = self._memory.map_other(handle, self._layout.replies_nbytes)
        except DeviceUnavailable as error:
            # docs (daemon): no peer access between the two GPUs: mailboxes lie in the host's memory
            _LOG.info("cannot map the parent's device memory: %s", one_line(str(error)))
            return
        lines = MailLines(self._layout, requests=own.device_address, replies=other.device_address)
        self._steps.add_devices(lines)
        self._words.write(MailWord.STATE, MailState.SEES_PEER)

    def _leave_peer(self) -> None:
        """Unmap the parent's memory, and close the steps that use it."""
        if self._memory.other is None:
            return
        self._steps.drop_devices()
        self._memory.unmap_other()
        self._words.write(MailWord.STATE, MailState.READY)

    def _echo(self, num_rounds: int) -> None:
        """Answer a probe's round trips and write the faults found."""
        plan = ProbePlan(
            num_rounds,
            seed=self._words.read(MailWord.PROBE_SEED),
            follows=self._words.read(MailWord.PROBE_FOLLOWS) != 0,
            longest_pause_ns=self._words.read(MailWord.PROBE_PAUSE),
        )
        self._segment.write_mail(MailWord.PROBE_FAULTS, self._steps.echo(plan))
