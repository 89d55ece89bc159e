"""The daemon's end of a mailbox: a step that is recorded once, and started when it is asked for.

Between two steps nothing of it runs, neither here nor on the device.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dflash_adapters.moe_spec import MoeSpec
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceUnavailable,
    DflashError,
    ProtocolError,
    one_line,
)
from dflash_protocol.ring_segment import Segment, silence_bell
from dflash_runtime.compute.cupy.decode_experts import Choice, MailReply, Rows
from dflash_runtime.compute.cupy.device import Graph, KernelDevice, PeerMemory, Queue, address
from dflash_runtime.compute.cupy.mail_words import Asked, MailWords
from dflash_runtime.compute.cupy.mailbox_kernels import (
    MailKernels,
    MailPeer,
    MailProbeArgs,
    MailSide,
)
from dflash_runtime.compute.cupy.mailbox_layout import (
    DAEMON_ABORT_AT,
    DAEMON_DEVICE_AT,
    HANDLE_BYTES,
    LIMIT_MS_AT,
    PARENT_ABORT_AT,
    REPLY_MEMORY_AT,
    REQUEST_MEMORY_AT,
    STATE_AT,
    Ask,
    MailLayout,
    MailLines,
    MailState,
    host_lines,
    mail_layout,
)
from dflash_runtime.compute.cupy.resident import ResidentLayer
from dflash_runtime.compute.cupy.steps import Steps

_LOG = logging.getLogger(__name__)

_POLL_MS = 250
_LONGEST_LIMIT_MS = 60_000
_MOST_ROUNDS = 1 << 12
_MODULUS = 1 << 32
_MOST_STEPS = 64
"""That can be asked for before any of them is done."""
_CLOSED = 0xFFFFFFFF
"""In place of the number of a step that failed: none ever will again."""


class MailServer:
    """Serves one parent's mailbox by a thread of its own, and a stream of the device.

    The parent may ask as soon as `STATE_AT` says that it is ready. `layers`, by layer id, have
    experts of ours by their local ids; `lock` is held while the device's own stream is used.
    Owns: the thread, the recorded step, and memory of the device; not the segment.
    """

    def __init__(
        self,
        device: KernelDevice,
        segment: Segment,
        moe: MoeSpec,
        *,
        layers: Mapping[int, ResidentLayer],
        lock: threading.RLock,
    ) -> None:
        assert segment.window is not None
        self._device, self._segment, self._lock = device, segment, lock
        self._base = segment.window.device_address(segment.shape.mail_at)
        self._layout: MailLayout = mail_layout(moe)
        self._moe, self._layers = moe, layers
        self._words = MailWords(segment)
        segment.write_mail(DAEMON_DEVICE_AT, device.uuid)
        self._media: list[_Medium] = []
        """Lines in the host's memory; and those in devices', if that can be had."""
        self._medium = 0
        self._own_memory: PeerMemory | None = None
        self._peer_memory: PeerMemory | None = None
        self._queue: Queue | None = None
        self._kernels: MailKernels | None = None
        self._num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, having given up what runs. Twice does nothing."""
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
                _LOG.warning("the mailbox is of no use: %s", one_line(str(error)))
        except Exception:
            _LOG.exception("the mailbox has failed")
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
                medium.graph.close()
            for memory in (self._peer_memory, self._own_memory):
                if memory is not None:
                    memory.close()
        self._media.clear()
        self._layers = {}  # whose experts others may want to drop
        self._queue = self._kernels = self._own_memory = self._peer_memory = None

    def _prepare(self) -> None:
        """Compile and record the step. Raises: DflashError."""
        limit_ms = min(self._words.read(LIMIT_MS_AT), _LONGEST_LIMIT_MS)
        with self._lock:
            peer = MailPeer(
                own_abort=self._base + DAEMON_ABORT_AT, other_abort=self._base + PARENT_ABORT_AT
            )
            # The parent is to give up first, who knows whom it waits for.
            side = MailSide(self._device, (peer,), limit_ms + limit_ms // 2)
            self._kernels = MailKernels(side)
            self._kernels.prepare_probe(is_echo=True)
            self._record(host_lines(self._layout, self._base))
            self._queue = self._device.new_queue()
            with suppress(DeviceUnavailable):  # the host's memory is there in any case
                self._own_memory = self._device.export_memory(self._layout.requests_nbytes)
                self._segment.write_mail(REQUEST_MEMORY_AT, self._own_memory.handle)

    def _record(self, lines: MailLines) -> None:
        """A step that goes through these lines, tried before."""
        assert self._kernels is not None
        side = self._kernels.side
        step = _Step(self._device, self._kernels, lines)
        layers = [
            (index, self._layers[layer.layer_id])
            for index, layer in enumerate(self._moe.layers)
            if layer.layer_id in self._layers
        ]
        side.set_epoch(0, is_trial=True)
        step.launch(layers)
        self._device.synchronize()
        self._words.write(DAEMON_ABORT_AT, 0)
        side.set_epoch(0)
        graph = self._device.capture(lambda: step.launch(layers))
        self._media.append(_Medium(lines, graph, step))

    def _see_peer(self) -> None:
        """Have a step that goes through the devices' memory."""
        if self._own_memory is None:
            return
        if self._peer_memory is not None:  # that of a mailbox before
            self._medium = 0
            for medium in self._media[1:]:
                medium.graph.close()
            del self._media[1:]
            self._peer_memory.close()
            self._peer_memory = None
            self._words.write(STATE_AT, MailState.READY)
        try:
            handle = self._segment.read_mail(REPLY_MEMORY_AT, HANDLE_BYTES)
            self._peer_memory = self._device.import_memory(handle)
        except DeviceUnavailable as error:
            _LOG.info("our device does not see the parent's memory: %s", one_line(str(error)))
            return
        own, other = self._own_memory.device_address, self._peer_memory.device_address
        self._record(MailLines(self._layout, requests=own, replies=other))
        self._words.write(STATE_AT, MailState.SEES_PEER)

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
            # Several may have been asked for since we looked.
            if (asked.number - self._num_done) % _MODULUS > _MOST_STEPS:
                raise ProtocolError("a mailbox was asked for more steps than can be under way")
            while self._num_done % _MODULUS != asked.number:
                self._queue.replay(self._media[self._medium].graph)
                self._num_done += 1
        else:
            self._queue.synchronize()  # which waits for the parent, and others must not
            with self._lock:
                if asked.ask is Ask.ECHO:  # which waits for the parent: it is to know that
                    self._words.answer(asked.number)
                self._do_other(asked)
            self._num_done = asked.number
        self._words.answer(self._num_done)

    def _do_other(self, asked: Asked) -> None:
        assert self._kernels is not None
        if asked.ask is Ask.PEERS:
            self._see_peer()
            return
        if asked.ask is Ask.ECHO:
            lines = self._media[self._medium].lines
            args = MailProbeArgs(
                requests=lines.requests,
                replies=lines.replies,
                num_requests=self._layout.request_lines,
                num_replies=self._layout.reply_lines,
                num_rounds=min(asked.argument, _MOST_ROUNDS),
            )
            self._kernels.probe(args, is_echo=True)
            return
        wanted = int(asked.ask is Ask.PEER_EPOCH)
        if wanted >= len(self._media):
            raise ProtocolError("a mailbox was asked for memory that is not shared")
        self._medium = wanted
        self._words.write(DAEMON_ABORT_AT, 0)
        self._kernels.side.set_epoch(asked.argument)


class _Step:
    """What is recorded: every layer of which there are experts here, one after the other."""

    def __init__(self, device: KernelDevice, kernels: MailKernels, lines: MailLines) -> None:
        self._device, self._kernels, self._lines = device, kernels, lines
        # Others may compute at the same time, in another stream: nothing is shared with them.
        self._steps = Steps(device)
        self._choices: dict[int, Choice] = {}
        self._rows: dict[int, Rows] = {}

    def launch(self, layers: list[tuple[int, ResidentLayer]]) -> None:
        """Shapes: layers by their place in the model."""
        self._kernels.begin()
        reply = address(self._kernels.side.state)
        for index, resident in layers:
            layer = resident.layer
            rows = self._rows.get(layer.hidden_size)
            choice = self._choices.get(layer.num_experts_used)
            if rows is None:
                rows = self._rows[layer.hidden_size] = self._steps.new_rows(1, layer.hidden_size)
            if choice is None:
                shape = 1, layer.num_experts_used
                choice = self._choices[layer.num_experts_used] = Choice(
                    self._device.empty(shape, np.int32), self._device.empty(shape, np.float32)
                )
            request, to = self._lines.request(index), MailReply(self._lines.reply(index), reply)
            self._kernels.take(layer, rows, choice, request=request)
            self._steps.answer(resident, rows, choice, to=to)


@dataclass(frozen=True, slots=True)
class _Medium:
    """Memory that lines go through, and a step that was recorded for it, whose buffers it uses."""

    lines: MailLines
    graph: Graph
    step: _Step
