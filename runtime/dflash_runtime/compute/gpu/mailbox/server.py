"""The daemon's end of a mailbox: it does what the parent asks for, a captured step most often.

Between two steps the thread sleeps and no kernel runs.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceUnavailable,
    DflashError,
    ProtocolError,
    one_line,
)
from dflash_protocol.ring.segment import Segment, silence_bell
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.kernels import MailPeer
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryExchange, MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.probe import ProbePlan
from dflash_runtime.compute.gpu.mailbox.served_steps import ServedSteps
from dflash_runtime.compute.mailbox_layout import (
    CLOSED,
    HANDLE_BYTES,
    LAYOUT_NUMBER,
    MODULUS,
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

_POLL_MS = 250
_LONGEST_LIMIT_MS = 60_000
_MOST_STEPS = 64
"""Most steps that can be asked for before any of them is done."""


class MailServer:
    """Serves one parent's mailbox with its own thread and its own stream of the device.

    States, in MailWord.STATE: PREPARING, READY, SEES_PEER, FAILED (see MailState); the parent may
    ask once it is READY. `layers`: with their places in the model, experts by local id. `lock` is
    held while the device's main stream is used. `is_alone`: whether no other parent is served,
    which waiting kernels could hold up. `starting` is held while a step is started.
    Owns: the thread, the captured steps, and memory shared with the parent; not the segment.
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
        assert segment.window is not None
        self._segment, self._lock, self._layout = segment, lock, layout
        self._starting = starting
        self._base = segment.window.device_address(segment.shape.mail_at)
        self._words = MailWords(segment)
        segment.write_mail(MailWord.DAEMON_DEVICE, device.uuid)
        self._words.write(MailWord.DAEMON_LAYOUT, LAYOUT_NUMBER)
        self._steps = ServedSteps(device, self._words, layers=layers, is_alone=is_alone)
        self._memory = MemoryExchange(device, keeper)
        self._num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-mailbox", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether steps may be under way."""
        return self._thread.is_alive()

    def synchronize(self) -> None:
        """Wait for all steps that were started; any thread may. Raises: DeviceUnavailable."""
        self._steps.synchronize()

    def close(self) -> None:
        """Abort running steps and end the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with suppress(DaemonUnavailable):
            self._words.write(MailWord.DAEMON_ABORT, CLOSED)
            self._segment.ring_mail()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
            self._words.write(MailWord.STATE, MailState.READY)
            self._serve()
        except DflashError as error:
            if not self._stop.is_set():
                # docs (daemon): it could not be made ready; the parent's host asks instead
                _LOG.warning("mailbox unavailable: %s", one_line(str(error)))
        except Exception:
            # docs (daemon): a bug, with its traceback: report it. The parent's host asks
            # instead
            _LOG.exception("mailbox failed")
        finally:
            self._end()

    def _end(self) -> None:
        with suppress(DaemonUnavailable):
            self._words.write(MailWord.STATE, MailState.FAILED)
            self._words.write(MailWord.DAEMON_ABORT, CLOSED)
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

    def _prepare(self) -> None:
        """Compile and capture the step of one token. Raises: DflashError."""
        number = self._words.read(MailWord.PARENT_LAYOUT)
        if number != LAYOUT_NUMBER:
            raise ProtocolError(f"the parent knows layout {number}, this daemon {LAYOUT_NUMBER}")
        limit_ms = min(self._words.read(MailWord.LIMIT_MS), _LONGEST_LIMIT_MS)
        with self._lock:
            peer = MailPeer(
                own_abort=self._base + MailWord.DAEMON_ABORT,
                other_abort=self._base + MailWord.PARENT_ABORT,
            )
            # The parent must time out first: it knows which daemon it waits for.
            limit_ms += limit_ms // 2
            self._steps.prepare(peer, limit_ms, host_lines(self._layout, self._base))
            with suppress(DeviceUnavailable):  # then lines stay in the host's memory
                own = self._memory.export(self._layout.requests_nbytes)
                self._segment.write_mail(MailWord.REQUEST_MEMORY, own.handle)

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

    def _serve(self) -> None:
        bell = self._segment.mail_bell
        assert bell is not None
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while not self._stop.is_set():
            asked = self._words.asked()
            if asked.number != self._num_done % MODULUS:
                self._do(asked)
            elif poll.poll(_POLL_MS):
                silence_bell(bell)

    def _do(self, asked: Asked) -> None:
        if asked.ask is Ask.STEP:
            # Several may have been asked for since the last poll.
            if (asked.number - self._num_done) % MODULUS > _MOST_STEPS:
                raise ProtocolError("a mailbox was asked for more steps than can be under way")
            graph = self._steps.graph_of(asked.argument)
            while self._num_done % MODULUS != asked.number:
                # A parent that has given up may release its memory.
                if not self._words.read(MailWord.PARENT_ABORT):
                    with self._starting:
                        self._steps.replay(graph)
                self._num_done += 1
        else:
            self._steps.synchronize()  # without the lock: it waits for the parent
            with self._lock:
                if asked.ask is Ask.ECHO:  # answered first: its kernel waits for the parent's
                    self._words.answer(asked.number)
                self._do_other(asked)
            self._num_done = asked.number
        self._words.answer(self._num_done)

    def _do_other(self, asked: Asked) -> None:
        if asked.ask is Ask.PEERS:
            self._see_peer()
        elif asked.ask is Ask.LEAVE:
            self._leave_peer()
        elif asked.ask is Ask.ECHO:
            self._echo(asked.argument)
        elif asked.ask is Ask.SIZE:
            self._steps.add_size(asked.argument)
        else:
            self._steps.restart(asked.argument, in_devices=asked.ask is Ask.PEER_EPOCH)

    def _echo(self, num_rounds: int) -> None:
        """Answer a probe's round trips and write the faults found."""
        plan = ProbePlan(
            num_rounds,
            seed=self._words.read(MailWord.PROBE_SEED),
            follows=self._words.read(MailWord.PROBE_FOLLOWS) != 0,
            longest_pause_ns=self._words.read(MailWord.PROBE_PAUSE),
        )
        self._segment.write_mail(MailWord.PROBE_FAULTS, self._steps.echo(plan))
