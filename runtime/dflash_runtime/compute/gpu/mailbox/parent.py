"""The parent's end of its mailboxes: one for each daemon, and one for this process's processor if
that has experts; a step uses all of them or none.

`run/mailbox_path.py` launches a step's requests; the captured step rings the daemons' hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ids import I64Array
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute import mailbox_layout
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.compute.gpu.device.device import (
    NANOSECONDS_PER_MS,
    DeviceArray,
    KernelDevice,
    address,
)
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.launch.decode_experts import MOST_PEERS
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryExchange, MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.probe import (
    FAULT_BYTES,
    ProbePlan,
    new_faults,
    probe_args,
    read_faults,
)
from dflash_runtime.compute.gpu.mailbox.processor_peer import LIMIT_MS, ProcessorPeer
from dflash_runtime.compute.mail_trial import FaultKind, TrialBatch
from dflash_runtime.compute.mailbox_layout import (
    CLOSED,
    DEVICE_BYTES,
    HANDLE_BYTES,
    LAYOUT_NUMBER,
    Ask,
    MailLayout,
    MailLines,
    MailState,
    MailWord,
    MailWords,
    host_lines,
)

_LOG = logging.getLogger(__name__)

_COMPILE_S = 30.0
_ANSWER_S = 5.0
"""Longest wait for a daemon's host, which may be computing a chunk."""
_PROBE_ROUNDS = 200
_UNUSED_EPOCHS = 64
"""Epochs skipped by a restart: more than the steps that can be under way."""


def is_ready(route: MailRoute, device: KernelDevice) -> bool:
    """Whether a daemon's end is ready, has our layout, and is on another device than ours: kernels
    that wait for each other cannot share a device."""
    assert route.segment is not None
    try:
        words = MailWords(route.segment)
        state, number = words.read(MailWord.STATE), words.read(MailWord.DAEMON_LAYOUT)
        other = route.segment.read_mail(MailWord.DAEMON_DEVICE, DEVICE_BYTES)
    except DaemonUnavailable:
        return False
    is_usable = number == LAYOUT_NUMBER and other != device.uuid
    return is_usable and state in (MailState.READY, MailState.SEES_PEER)


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
        base = segment.device_mail
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

    @property
    def is_by_processor(self) -> bool:
        """Whether a processor answers, which has neither memory of a device nor probes."""
        terms = self._segment.mail_terms
        return terms is not None and terms.by_processor

    def use_peers(self, uses_peers: bool) -> None:
        """Choose the lines for steps after the next `restart`: in devices' memory if there are any
        and `uses_peers`, else in the host's."""
        self.lines = (self.peer_lines if uses_peers else None) or self._host_lines

    def restart(self, epoch: int) -> None:
        """Set both sides to this epoch, the one before the next step's; no step may be running."""
        self.words.ask(Ask.PEER_EPOCH if self.lines is self.peer_lines else Ask.EPOCH, epoch)
        self.words.await_answer(_ANSWER_S, self._is_live)
        # Not before: kernels of a step that was cut short must find it.
        self.words.write(MailWord.PARENT_ABORT, 0)

    def ring(self, num_tokens: int) -> None:
        """Ask for a step of so many tokens. Raises: DaemonUnavailable if the session is closed."""
        self.words.ask(Ask.STEP, num_tokens)

    def cut(self, epoch: int) -> None:
        """Have the steps from this epoch on fail."""
        with suppress(DaemonUnavailable):  # its session is over
            self.words.write(MailWord.PARENT_ABORT, epoch)

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


class ParentMail:
    """Mailboxes with these daemons, for as long as their sessions last, and with `own`, if given,
    whose route comes first. Used by one thread.

    Each step has an epoch, one more than the last one's; `restart` skips some. After `fail` the
    mailboxes are not used again. Owns: the links and memory of the device.
    """

    def __init__(
        self,
        device: KernelDevice,
        layout: MailLayout,
        routes: Sequence[MailRoute],
        *,
        epoch: int,
        keeper: MemoryKeeper,
        own: ProcessorPeer | None = None,
    ) -> None:
        """`epoch`: larger than that of any earlier step with these daemons.

        Raises: DaemonUnavailable if a daemon does not answer, or probes arrive damaged; its
        session may be fine otherwise."""
        self.routes = tuple(routes)
        self._device = device
        segments = [(route, route.segment) for route in routes if route.segment is not None]
        self._links = [
            MailLink(
                device,
                layout,
                segment,
                name=route.name,
                is_live=route.is_live,
                keeper=keeper,
            )
            for route, segment in segments
        ]
        self._peers: list[MailLink | ProcessorPeer] = [*self._links]
        if own is not None:
            own.prepare(1)
            self._peers.insert(0, own)
        terms = [segment.mail_terms for _, segment in segments]
        limits_ms = [each.limit_ms for each in terms if each is not None]
        # Memory of our own: a word that peers can write must not decide that a step is right.
        self._block = MappedBlock(device, [((1,), np.uint32)])
        self._failed = self._block.host[0]
        self._side = MailSide(
            device,
            [each.peer for each in self._peers],
            max(limits_ms, default=LIMIT_MS),
            failed=address(self._block.device[0]),
        )
        self.kernels = MailKernels(self._side)
        self._asked = device.zeros((layout.num_layers, MOST_PEERS), np.uint32)
        self.epoch = epoch
        """Epoch of the last step that was asked for."""
        self.is_cut = False
        """Whether the last step was cut short, until a restart."""
        self._sizes = {1}
        """Step sizes, in tokens, that every daemon is ready for."""
        try:
            for link in self._links:
                if not link.is_by_processor:
                    self._try_media(link)
            self.use_peers(False)
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> ProcessorPeer | None:
        """This process's processor, if it is one of the peers."""
        first = self._peers[0]
        return first if isinstance(first, ProcessorPeer) else None

    @property
    def has_peers(self) -> bool:
        """Whether any link has lines in devices' memory."""
        return any(link.peer_lines is not None for link in self._links)

    def use_peers(self, uses_peers: bool) -> None:
        """Put lines in devices' memory where possible, or all in the host's. Captures made before
        must not be replayed. Raises: DaemonUnavailable."""
        for link in self._links:
            link.use_peers(uses_peers)
        self._sizes = {1}
        self.restart()

    def close(self) -> None:
        """Release shared memory; no step may be running."""
        for link in self._links:
            link.close()
        with suppress(DeviceUnavailable):  # a failed device maps nothing any more
            self._block.close()

    def requests(self, layer_index: int) -> list[int]:
        """Address of each peer's request lines for a layer, by its place in the model."""
        return [each.lines.request(layer_index) for each in self._peers]

    def replies(self, layer_index: int) -> list[int]:
        """Address of each peer's reply lines for it."""
        return [each.lines.reply(layer_index) for each in self._peers]

    @property
    def slow_peers(self) -> Collection[int]:
        """Peers that compute on the host, whose memory and bus they need for that."""
        return [index for index, route in enumerate(self.routes) if route.is_by_processor]

    def asked(self, layer_index: int) -> DeviceArray:
        """Whether each of a layer's peers was asked for something. Shapes: [MOST_PEERS] uint32."""
        asked: DeviceArray = self._asked[layer_index]
        return asked

    @property
    def is_live(self) -> bool:
        """Whether every session still lasts, and there are epochs left."""
        return self.epoch < mailbox_layout.LAST_EPOCH and all(
            route.is_live() for route in self.routes
        )

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A context in which kernels neither ask nor wait; the epoch is restored at its end, even
        if the trial fails."""
        # A failure of an earlier step that is not noticed yet must not be lost.
        blamed = self._side.blamed
        self._side.set_epoch(self.epoch, is_trial=True)
        try:
            yield
        finally:
            self._device.synchronize()
            is_over = self.failed_epoch() != 0
            self._side.set_epoch(self.epoch, is_trial=is_over, blamed=blamed)

    def restart(self) -> None:
        """Set all sides to a new epoch; no step may be running. Raises: DaemonUnavailable."""
        self._device.synchronize()
        self.epoch += _UNUSED_EPOCHS
        self._failed[0] = 0
        for each in self._peers:
            each.restart(self.epoch)
        self._side.set_epoch(self.epoch)
        self.is_cut = False

    def prepare(self, num_tokens: int) -> None:
        """Have every peer get ready for steps of so many tokens; no step may be running.

        Raises: DaemonUnavailable."""
        if num_tokens in self._sizes:
            return
        for each in self._peers:
            each.prepare(num_tokens)
        self._sizes.add(num_tokens)
        self.restart()

    def ring(self, num_tokens: int = 1) -> None:
        """Ask every peer to run a step of so many tokens, for which it is prepared. A step of
        another size must have ended.

        Raises: DaemonUnavailable if a session is closed."""
        self.epoch += 1
        for each in self._peers:
            each.ring(num_tokens)

    def cut(self) -> None:
        """Have the step under way fail, whose launches end here: daemons stop waiting for it.
        `restart` before the next one."""
        self.is_cut = True
        self._failed[0] = self.epoch
        for each in self._peers:
            each.cut(self.epoch)

    def is_answering(self) -> bool:
        """Whether every peer is ready for another step; no step of ours may be running."""
        try:
            self.restart()
        except DaemonUnavailable:
            return False
        return True

    def failed_epoch(self) -> int:
        """Epoch of the first step that failed; 0: none has."""
        return int(self._failed[0])

    def fail(self) -> None:
        """Mark the daemon that did not answer as lost, or all if it is not known. No step may be
        running."""
        blamed = self._side.blamed
        reason = f"the mailbox was not answered within {self._side.limit_ms} ms"
        for index, route in enumerate(self.routes):
            if not blamed or index + 1 == blamed:
                route.fail(reason)

    def _try_media(self, link: MailLink) -> None:
        """Probe each kind of memory and log round trips. Raises: DaemonUnavailable."""
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
        """Median of a round trip, in seconds. Raises: DaemonUnavailable."""
        plan = ProbePlan(_PROBE_ROUNDS)
        found = link.probe(plan, epoch=self.epoch, limit_ms=self._side.limit_ms)
        self.epoch += _PROBE_ROUNDS
        num_wrong = found.in_requests.total + found.in_replies.total
        if num_wrong:
            raise DaemonUnavailable(f"{num_wrong} words of a probe did not arrive as sent")
        return float(np.median(found.trips_ns)) * 1e-9
