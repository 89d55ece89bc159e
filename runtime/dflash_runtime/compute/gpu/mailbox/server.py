"""The daemon's end of a mailbox: captured steps that are replayed when the parent asks.

Between two steps the thread sleeps and no kernel runs.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceUnavailable,
    DflashError,
    ProtocolError,
    one_line,
)
from dflash_protocol.ring.segment import Segment, silence_bell
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Graph,
    KernelDevice,
    PeerMemory,
    Queue,
    address,
)
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.layout import (
    DAEMON_ABORT_AT,
    DAEMON_DEVICE_AT,
    DAEMON_LAYOUT_AT,
    HANDLE_BYTES,
    LAYOUT_NUMBER,
    LIMIT_MS_AT,
    PARENT_ABORT_AT,
    PARENT_HOLDS_AT,
    PARENT_LAYOUT_AT,
    PROBE_FAULTS_AT,
    PROBE_FOLLOWS_AT,
    PROBE_PAUSE_AT,
    PROBE_SEED_AT,
    REPLY_MEMORY_AT,
    REQUEST_MEMORY_AT,
    STATE_AT,
    Ask,
    MailLayout,
    MailLines,
    MailState,
    host_lines,
)
from dflash_runtime.compute.gpu.mailbox.probe import ProbePlan, new_faults, probe_args
from dflash_runtime.compute.gpu.mailbox.step import MailboxMemory, MailStep
from dflash_runtime.compute.gpu.mailbox.words import Asked, MailWords

_LOG = logging.getLogger(__name__)

_POLL_MS = 250
_LONGEST_LIMIT_MS = 60_000
_MODULUS = 1 << 32
_MOST_STEPS = 64
"""Most steps that can be asked for before any of them is done."""
_CLOSED = 0xFFFFFFFF
"""In place of a failed step's epoch: the mailbox is closed for good."""


class MailServer:
    """Serves one parent's mailbox with its own thread and its own stream of the device.

    States, in the word STATE_AT: PREPARING, READY, SEES_PEER, FAILED (see MailState); the parent
    may ask once it is READY. `layers`: with their places in the model, experts by local id. `lock`
    is held while the device's main stream is used. `is_alone`: whether no other parent is served,
    which waiting kernels could hold up.
    Owns: the thread, the captured steps, and memory of the device; not the segment.
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
    ) -> None:
        assert segment.window is not None
        self._device, self._segment, self._lock = device, segment, lock
        self._base = segment.window.device_address(segment.shape.mail_at)
        self._layout, self._layers, self._keeper = layout, layers, keeper
        self._is_alone, self._was_alone = is_alone, True
        self._words = MailWords(segment)
        segment.write_mail(DAEMON_DEVICE_AT, device.uuid)
        self._words.write(DAEMON_LAYOUT_AT, LAYOUT_NUMBER)
        self._media: list[MailboxMemory] = []
        """Lines in the host's memory; then those in devices' memory, if it can be mapped."""
        self._medium = 0
        self._own_memory: PeerMemory | None = None
        self._peer_memory: PeerMemory | None = None
        self._queue: Queue | None = None
        self._kernels: MailKernels | None = None
        self._num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-mailbox", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether steps may be under way."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort running steps and end the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with suppress(DaemonUnavailable):
            self._words.write(DAEMON_ABORT_AT, _CLOSED)
            self._segment.ring_mail()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
            self._words.write(STATE_AT, MailState.READY)
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
            self._words.write(STATE_AT, MailState.FAILED)
            self._words.write(DAEMON_ABORT_AT, _CLOSED)
        with suppress(DeviceUnavailable):
            if self._queue is not None:
                self._queue.synchronize()
        with suppress(DeviceUnavailable), self._lock:
            if self._queue is not None:
                self._queue.close()
            for medium in self._media:
                medium.close()
            if self._peer_memory is not None:
                self._peer_memory.close()
            self._give_back_own()
        self._media.clear()
        self._layers = ()  # so that their experts can be dropped
        self._queue = self._kernels = self._own_memory = self._peer_memory = None

    def _give_back_own(self) -> None:
        """Close our exported memory, or keep it for a while if the parent may have it open."""
        if self._own_memory is None:
            return
        is_held = True
        with suppress(DaemonUnavailable):
            is_held = self._words.read(PARENT_HOLDS_AT) != 0
        if is_held:
            self._keeper.keep(self._own_memory)
        else:
            self._own_memory.close()

    def _prepare(self) -> None:
        """Compile and capture the step of one token. Raises: DflashError."""
        number = self._words.read(PARENT_LAYOUT_AT)
        if number != LAYOUT_NUMBER:
            raise ProtocolError(f"the parent knows layout {number}, this daemon {LAYOUT_NUMBER}")
        limit_ms = min(self._words.read(LIMIT_MS_AT), _LONGEST_LIMIT_MS)
        with self._lock:
            peer = MailPeer(
                own_abort=self._base + DAEMON_ABORT_AT, other_abort=self._base + PARENT_ABORT_AT
            )
            # The parent must time out first: it knows which daemon it waits for.
            side = MailSide(self._device, (peer,), limit_ms + limit_ms // 2)
            self._kernels = MailKernels(side)
            self._kernels.prepare_probe(is_echo=True)
            relay = self._device.zeros(self._layout.requests_nbytes, np.uint8)
            to = MailLines(self._layout, requests=address(relay), replies=0)
            self._add_medium(host_lines(self._layout, self._base), (relay, to))
            self._queue = self._device.new_queue()
            with suppress(DeviceUnavailable):  # then lines stay in the host's memory
                self._own_memory = self._device.export_memory(self._layout.requests_nbytes)
                self._segment.write_mail(REQUEST_MEMORY_AT, self._own_memory.handle)

    def _add_medium(self, lines: MailLines, relay: tuple[DeviceArray, MailLines] | None) -> None:
        medium = MailboxMemory(lines, relay)
        self._record(medium, 1)
        self._media.append(medium)

    def _record(self, medium: MailboxMemory, num_tokens: int) -> None:
        """Run a step of so many tokens as a trial, then capture it. The parent must restart after
        that."""
        assert self._kernels is not None
        side, layers = self._kernels.side, self._layers
        for by_all in (False, True):
            step = MailStep(
                self._device,
                self._kernels,
                medium.lines,
                num_tokens=num_tokens,
                by_all=by_all,
                relay=None if medium.relay is None else medium.relay[1],
            )
            side.set_epoch(0, is_trial=True)
            step.launch(layers)
            self._device.synchronize()
            self._words.write(DAEMON_ABORT_AT, 0)
            side.set_epoch(0)
            graph = self._device.capture(partial(step.launch, layers))
            medium.steps[num_tokens, by_all] = step, graph

    def _see_peer(self) -> None:
        """Map the parent's memory and capture a step that uses the devices' memory."""
        self._leave_peer()
        if self._own_memory is None:
            return
        try:
            handle = self._segment.read_mail(REPLY_MEMORY_AT, HANDLE_BYTES)
            self._peer_memory = self._device.import_memory(handle, self._layout.replies_nbytes)
        except DeviceUnavailable as error:
            # docs (daemon): no peer access between the two GPUs: mailboxes lie in the host's memory
            _LOG.info("cannot map the parent's device memory: %s", one_line(str(error)))
            return
        own, other = self._own_memory.device_address, self._peer_memory.device_address
        self._add_medium(MailLines(self._layout, requests=own, replies=other), None)
        self._words.write(STATE_AT, MailState.SEES_PEER)

    def _leave_peer(self) -> None:
        """Unmap the parent's memory, and close the steps that use it."""
        if self._peer_memory is None:
            return
        self._medium = 0
        for medium in self._media[1:]:
            medium.close()
        del self._media[1:]
        self._peer_memory.close()
        self._peer_memory = None
        self._words.write(STATE_AT, MailState.READY)

    def _serve(self) -> None:
        bell = self._segment.mail_bell
        assert bell is not None
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while not self._stop.is_set():
            asked = self._words.asked()
            if asked.number != self._num_done % _MODULUS:
                self._do(asked)
            elif poll.poll(_POLL_MS):
                silence_bell(bell)

    def _do(self, asked: Asked) -> None:
        assert self._queue is not None
        if asked.ask is Ask.STEP:
            # Several may have been asked for since the last poll.
            if (asked.number - self._num_done) % _MODULUS > _MOST_STEPS:
                raise ProtocolError("a mailbox was asked for more steps than can be under way")
            graph = self._graph_of(asked.argument)
            while self._num_done % _MODULUS != asked.number:
                # A parent that has given up may release its memory.
                if not self._words.read(PARENT_ABORT_AT):
                    self._queue.replay(graph)
                self._num_done += 1
        else:
            self._queue.synchronize()  # without the lock: it waits for the parent
            with self._lock:
                if asked.ask is Ask.ECHO:  # answered first: its kernel waits for the parent's
                    self._words.answer(asked.number)
                self._do_other(asked)
            self._num_done = asked.number
        self._words.answer(self._num_done)

    def _graph_of(self, num_tokens: int) -> Graph:
        """The step for a lone parent has every block poll, which occupies the device until a
        request comes; with several parents one block per token polls."""
        medium, is_alone = self._media[self._medium], self._is_alone()
        if is_alone != self._was_alone:
            self._was_alone = is_alone
            # docs (daemon): `alone`, or `one of several`: then kernels that wait for a parent take
            # less of the GPU, and a layer takes a little longer
            _LOG.info("the mailbox's parent is %s", "alone" if is_alone else "one of several")
        captured = medium.steps.get((num_tokens, is_alone))
        if captured is None:
            raise ProtocolError(f"a mailbox step of {num_tokens} tokens was asked for unprepared")
        return captured[1]

    def _do_other(self, asked: Asked) -> None:
        assert self._kernels is not None
        if asked.ask is Ask.PEERS:
            self._see_peer()
            return
        if asked.ask is Ask.LEAVE:
            self._leave_peer()
            return
        if asked.ask is Ask.ECHO:
            self._echo(asked.argument)
            return
        if asked.ask is Ask.SIZE:
            if not 1 <= asked.argument <= MOST_TOKENS:
                raise ProtocolError(f"a mailbox was asked for steps of {asked.argument} tokens")
            if (asked.argument, False) not in self._media[self._medium].steps:
                self._record(self._media[self._medium], asked.argument)
            return
        wanted = int(asked.ask is Ask.PEER_EPOCH)
        if wanted >= len(self._media):
            raise ProtocolError("a mailbox was asked for memory that is not shared")
        self._medium = wanted
        self._words.write(DAEMON_ABORT_AT, 0)
        self._kernels.side.set_epoch(asked.argument)

    def _echo(self, num_rounds: int) -> None:
        """Answer a probe's round trips and write the faults found."""
        assert self._kernels is not None
        device, lines = self._device, self._media[self._medium].lines
        plan = ProbePlan(
            num_rounds,
            seed=self._words.read(PROBE_SEED_AT),
            follows=self._words.read(PROBE_FOLLOWS_AT) != 0,
            longest_pause_ns=self._words.read(PROBE_PAUSE_AT),
        )
        faults = new_faults(device)
        self._kernels.probe(probe_args(device, lines, plan, faults=faults), is_echo=True)
        self._segment.write_mail(PROBE_FAULTS_AT, device.download(faults).tobytes())
