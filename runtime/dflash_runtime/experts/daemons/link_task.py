"""One daemon's link: starts or finds the daemon, shakes hands, watches it, and revives it.

All of it runs as one task in the supervisor's loop; expert work goes over other sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
import zmq.asyncio

from dflash_protocol.endpoint import is_ipv6
from dflash_protocol.errors import (
    DaemonUnavailable,
    DflashError,
    HandshakeRefused,
    ProtocolError,
    one_line,
)
from dflash_protocol.wire.messages import (
    COMPARING,
    HEADER_LIMIT_BYTES,
    Bye,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    decode_header,
    encode_header,
)
from dflash_runtime.experts.daemons.child import DaemonProcess
from dflash_runtime.experts.daemons.data_path import agree
from dflash_runtime.experts.daemons.handshake import (
    OTHER_WEIGHTS,
    Comparison,
    Greeting,
    check_welcome,
    differ,
    digests,
)
from dflash_runtime.experts.daemons.link import (
    DaemonCounters,
    DaemonLink,
    Session,
    SharedMemory,
)
from dflash_runtime.experts.events import EventKind

_LOG = logging.getLogger(__name__)

_SPAWN_SILENCE_S = 60.0
"""How long a live child may be silent: it imports and binds, on a busy machine."""
_MISSED_HEARTBEATS = 5
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 5.0
_MOST_EARLY_ENDS = 3
"""A daemon that ended this often before it was ever ready is not tried again at start."""
_END_S = 3.0
"""The longest from a child's disconnecting to its end: a driver has to release a device."""
_OTHER_WEIGHTS_S = 30.0
"""Pause after a daemon was found to have other weights: its file has to be replaced by hand, and
each comparison costs both sides some 0.1 s of a core."""
_STABLE_S = 10.0
"""After a session of at least this length, the backoff starts again from its first pause."""
_FOLDER_POLL_S = 0.05
"""Interval of polling for the folder of a daemon's socket."""
_GOODBYE_MS = 200
"""How long a Bye may take to be sent."""

_Received: TypeAlias = "asyncio.Future[list[bytes]]"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a daemon may be silent while connecting, and the interval of heartbeats."""

    connect_silence_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What all links of one engine have in common."""

    greeting: Greeting
    timeouts: Timeouts
    tolerates_absent: bool = False
    """The first attempt at a daemon that is not our child takes no longer than the timeouts; it is
    used once it comes."""
    tries_again: bool = False
    """A daemon that is ended from outside before it is ready is retried a few times."""


class FirstAttempt:
    """How one link's first attempt ends, for `Supervisor.start` to wait on.

    Pending until `report`; the link's task writes it, any thread may wait for `future`.
    """

    def __init__(self, name: str, on_progress: Callable[[str, str, int, int], None] | None) -> None:
        self._name = name
        self._on_progress = on_progress
        self.future: Future[None] = Future()

    @property
    def is_pending(self) -> bool:
        """Whether the outcome is not known yet."""
        return not self.future.done()

    def report(self, error: DflashError | None) -> bool:
        """Settle the outcome, None for success; False if it was settled before."""
        if self.future.done():
            return False
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
        return True

    def report_progress(self, progress: Progress) -> None:
        """Pass progress on to the caller of `start`, while that waits."""
        if self._on_progress is not None and self.is_pending:
            self._on_progress(self._name, progress.stage, progress.num_done, progress.num_total)


class _EndedEarly(DaemonUnavailable):
    """A daemon was there and ended before it was ready: a retry may succeed."""


class LinkTask:
    """One link: start or find its daemon, shake hands, watch the session, and all of it again.

    Runs in the supervisor's thread, inside its loop, until cancelled or the link is given up.
    Owns: its control socket, and the child process if the daemon is one of ours.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        link: DaemonLink,
        options: LinkOptions,
        *,
        first: FirstAttempt,
    ) -> None:
        self._context = context
        self._link = link
        self._options = options
        self._first = first
        self._loop = asyncio.get_running_loop()
        self._process: DaemonProcess | None = None
        self._loss_reported = asyncio.Event()
        self._lost_generation = 0
        self._num_early_ends = 0
        self._was_heard = False
        """Whether the daemon has answered over the present connection."""
        loop = self._loop

        def wake(lost_generation: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(self._note_loss, lost_generation)

        link.set_supervisor_wake(wake)

    async def run(self) -> None:
        backoff_s = 0.0
        try:
            while not self._link.is_given_up:
                started_s = self._loop.time()
                pause_s = 0.0
                try:
                    await self._one_session()
                except DflashError as error:
                    self._note_failure(error)
                    if isinstance(error, HandshakeRefused) and error.code == OTHER_WEIGHTS:
                        pause_s = _OTHER_WEIGHTS_S
                except (OSError, zmq.ZMQError) as error:  # no descriptors, no such address
                    self._note_failure(DaemonUnavailable(f"daemon {self._link.name}: {error}"))
                if self._loop.time() - started_s > _STABLE_S:
                    backoff_s = 0.0
                if self._link.is_given_up:
                    break
                backoff_s = min(max(2 * backoff_s, _BACKOFF_FIRST_S), _BACKOFF_LAST_S)
                await asyncio.sleep(max(pause_s, backoff_s) * random.uniform(0.75, 1.25))
        except Exception as error:
            # docs: a bug, with its traceback: report it. The daemon is not tried again
            _LOG.exception("daemon %s: the supervisor failed", self._link.name)
            self._note_failure(DaemonUnavailable(f"daemon {self._link.name}: {error!r}"))
            raise
        finally:
            if self._process is not None:
                await self._process.stop()

    def _note_loss(self, generation: int) -> None:
        self._lost_generation = max(self._lost_generation, generation)
        self._loss_reported.set()

    def _note_failure(self, error: DflashError) -> None:
        link, options, first = self._link, self._options, self._first
        is_absent = link.launch is None and isinstance(error, DaemonUnavailable)
        if is_absent and options.tolerates_absent:
            if first.report(None):
                link.mark_absent(EventKind.DAEMON_ABSENT, str(error))
        elif first.is_pending:
            if isinstance(error, _EndedEarly) and options.tries_again:
                self._num_early_ends += 1
                if self._num_early_ends < _MOST_EARLY_ENDS:
                    link.mark_absent(EventKind.DAEMON_LOST, str(error))
                    return
                error = DaemonUnavailable(f"{error}, {self._num_early_ends} times")
            first.report(error)
        elif not isinstance(error, DaemonUnavailable) and not _is_busy(error):
            # Trying again does not help: reported once, as an event.
            link.note_refused(str(error))
        # docs: an attempt to connect failed; it is tried again. Where that does not help, since the
        # daemon refused us or we refuse its socket, `daemon NAME is not there` and the event
        # `daemon_refused` say so once
        _LOG.info("daemon %s: %s", link.name, error)

    async def _one_session(self) -> None:
        """Connect, shake hands and watch until the session is lost; raises if none began."""
        link = self._link
        await self._await_folder()
        if link.launch is not None and (self._process is None or self._process.has_ended):
            if self._process is not None:
                await self._process.stop()
            self._process = DaemonProcess(link.launch, link.endpoint)
        self._was_heard = False
        with self._context.socket(zmq.DEALER) as control:
            control.setsockopt(zmq.LINGER, 0)
            control.setsockopt(zmq.MAXMSGSIZE, HEADER_LIMIT_BYTES)
            control.setsockopt(zmq.IPV6, is_ipv6(link.endpoint.address))
            if link.secure is not None:
                link.secure(control)
            control.setsockopt(zmq.RECONNECT_IVL, 20)
            control.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            monitor = control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            # One future for the whole session: a cancelled receive may consume the event.
            disconnected = asyncio.ensure_future(monitor.recv_multipart())
            try:
                control.connect(link.endpoint.address)
                self._first.report_progress(Progress("connect", 0, 1))
                try:
                    welcome = await self._handshake(control, disconnected)
                except DaemonUnavailable:
                    # A child that does not answer is replaced.
                    if self._process is not None:
                        await self._process.stop()
                    raise
                memory = await self._agree(control, disconnected, welcome)
                session = link.mark_ready(welcome, memory)
                self._first.report_progress(Progress("ready", 1, 1))
                self._first.report(None)
                await self._watch(control, disconnected, session)
            finally:
                disconnected.cancel()
                control.disable_monitor()
                monitor.close(linger=0)

    async def _await_folder(self) -> None:
        """Wait until the folder of an ipc endpoint exists; a child's folder is made by us.

        The account that makes the folder decides what is in it.
        Raises: SettingsError if that is another account; DaemonUnavailable after the timeout.
        """
        loop, silence_s = self._loop, self._options.timeouts.connect_silence_s
        end_s = loop.time() + silence_s
        while not self._link.endpoint.is_folder_there() and self._link.launch is None:
            if loop.time() > end_s:
                raise self._unanswered(silence_s)
            await asyncio.sleep(_FOLDER_POLL_S)

    def _unanswered(self, silence_s: float) -> DaemonUnavailable:
        link = self._link
        return DaemonUnavailable(
            # docs: no daemon listens there, or it belongs to another user
            f"daemon {link.name}: nothing answers at {link.endpoint.address} "
            f"({silence_s:.0f} s); is it running?"
        )

    async def _handshake(self, control: zmq.asyncio.Socket, disconnected: _Received) -> Welcome:
        greeting, link = self._options.greeting, self._link
        comparison = Comparison(greeting.weights, link)
        try:
            hello = await comparison.asked_in(greeting.hello(link.owned))
            await control.send_multipart([encode_header(hello), link.owned.canonical_bytes])
            return await self._answer_to(hello, control, disconnected, comparison)
        finally:
            await comparison.close()

    async def _answer_to(
        self,
        hello: Hello,
        control: zmq.asyncio.Socket,
        disconnected: _Received,
        comparison: Comparison,
    ) -> Welcome:
        link = self._link
        silence_s = self._options.timeouts.connect_silence_s
        if self._process is not None:
            silence_s = max(silence_s, _SPAWN_SILENCE_S)
        while True:
            message = await self._next_message(control, disconnected, silence_s)
            if isinstance(message, Progress):
                self._first.report_progress(message)
                if message.stage == COMPARING:
                    comparison.begin()
            elif isinstance(message, Refused):
                said = f"daemon {link.name} at {link.endpoint.address} refused: {message.reason}"
                if message.code == "stopping":
                    raise _EndedEarly(said)
                raise HandshakeRefused(said, code=one_line(message.code))
            elif isinstance(message, Welcome):
                check_welcome(message, hello, link)
                await self._compare(comparison, message, control)
                return message
            else:
                raise ProtocolError(f"daemon {link.name} answered hello with {message.TYPE}")

    async def _compare(
        self, comparison: Comparison, welcome: Welcome, control: zmq.asyncio.Socket
    ) -> None:
        """Raises: HandshakeRefused if the daemon has other weights; it is sent a Bye first."""
        try:
            await comparison.finish(welcome)
        except HandshakeRefused:
            control.setsockopt(zmq.LINGER, _GOODBYE_MS)
            await control.send(encode_header(Bye(welcome.link_id)))
            raise

    async def _agree(
        self, control: zmq.asyncio.Socket, disconnected: _Received, welcome: Welcome
    ) -> SharedMemory | None:
        """Agree on a data path with the daemon: see data_path.agree."""

        async def ask(message: Message) -> Message:
            await control.send_multipart([encode_header(message)])
            silence_s = self._options.timeouts.connect_silence_s
            return await self._next_message(control, disconnected, silence_s)

        return await agree(self._options.greeting.paths, self._link, welcome, ask=ask)

    async def _next_message(
        self, control: zmq.asyncio.Socket, disconnected: _Received, silence_s: float
    ) -> Message:
        """The next control message.

        Raises: DaemonUnavailable after `silence_s` without one, or at once if the child or the
        connection ended: what was sent over it is lost, and a new hello is needed.
        """
        link = self._link
        receive = asyncio.ensure_future(control.recv_multipart())
        waiting: list[asyncio.Future[Any]] = [receive]
        if self._process is not None:
            waiting.append(asyncio.ensure_future(self._process.ended.wait()))
        try:
            await asyncio.wait(
                [*waiting, disconnected], timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if receive.done():
                frames: list[bytes] = receive.result()
                self._was_heard = True
                return decode_header(frames[0])
            if disconnected.done() and self._process is not None:
                # A child disconnects while it exits: its exit status says more.
                await asyncio.wait(waiting[1:], timeout=_END_S)
            if self._process is not None and self._process.has_ended:
                raise (_EndedEarly if self._process.was_told_to_end else DaemonUnavailable)(
                    # docs: its own message stands above, on stderr
                    f"daemon {link.name} {self._process.how_it_ended} before it was ready"
                )
            if disconnected.done():
                # A daemon that never answered may not know our key: trying again would not help.
                raise (_EndedEarly if self._was_heard else DaemonUnavailable)(
                    # docs: it ended, or does not know the parent's key: see its own messages
                    f"daemon {link.name} at {link.endpoint.address} hung up before it was ready"
                )
            raise self._unanswered(silence_s)
        finally:
            for future in waiting:
                future.cancel()

    async def _watch(
        self, control: zmq.asyncio.Socket, disconnected: _Received, session: Session
    ) -> None:
        """Ping until the session ends, and tell the link why it ended."""
        link, heartbeat_s = self._link, self._options.timeouts.heartbeat_s
        watchers = [
            asyncio.create_task(self._pings(control, session, heartbeat_s)),
            asyncio.create_task(self._disconnected(disconnected)),
            asyncio.create_task(self._reported(session)),
        ]
        if self._process is not None:
            watchers.append(asyncio.create_task(self._ended(self._process)))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                link.mark_lost(session.generation, task.result())
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            # The daemon may be well and only the session lost: it should release our experts and
            # drop requests that are no longer waited for.
            with contextlib.suppress(zmq.ZMQError):
                control.setsockopt(zmq.LINGER, _GOODBYE_MS)
                await control.send(encode_header(Bye(session.welcome.link_id)), zmq.NOBLOCK)

    async def _pings(
        self, control: zmq.asyncio.Socket, session: Session, heartbeat_s: float
    ) -> str:
        sequence = 0
        num_missed = 0
        while num_missed < _MISSED_HEARTBEATS:
            sequence += 1
            ping = Ping(sequence, session.welcome.link_id)
            await control.send(encode_header(ping))
            try:
                async with asyncio.timeout(heartbeat_s):
                    frames = await control.recv_multipart()
            except TimeoutError:
                num_missed += 1
                continue
            try:
                pong = decode_header(frames[0])
            except ProtocolError as error:
                return str(error)
            if isinstance(pong, Pong):
                if not pong.known:
                    return "the daemon no longer knows us"
                self._link.daemon_counters = DaemonCounters(
                    pong.num_late, pong.num_stale, pong.num_checksum_failures
                )
                weights = self._options.greeting.weights
                if weights is not None and differ(weights.full_digest, pong.file_digest):
                    return f"its file has other weights: {digests(weights, pong.file_digest)}"
            num_missed = 0
            await asyncio.sleep(heartbeat_s)
        # docs: the daemon hangs, or the machine is stopped; it is tried again
        return f"no heartbeat for {num_missed * heartbeat_s:.1f} s"

    async def _disconnected(self, disconnected: _Received) -> str:
        await asyncio.wait([disconnected])
        # docs: the daemon ended, or the network did; it is tried again
        return "the connection ended"

    async def _reported(self, session: Session) -> str:
        # A late report may belong to an earlier session.
        while self._lost_generation < session.generation:
            self._loss_reported.clear()
            await self._loss_reported.wait()
        return "lost while computing"

    async def _ended(self, process: DaemonProcess) -> str:
        await process.ended.wait()
        return process.how_it_ended


def _is_busy(error: DflashError) -> bool:
    return isinstance(error, HandshakeRefused) and error.code == "busy"
