"""The supervisor: starts, greets, watches and revives daemons, all links in one thread.

One asyncio loop in one thread owns every control socket and every child process for life; the
thread lives as long as the engine, since a child asks the kernel to end it with the thread that
spawned it. Knows nothing of expert work; it only makes and ends sessions on DaemonLinks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
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
from dflash_protocol.ring.segment import Segment
from dflash_protocol.wire.messages import (
    COMPARING,
    HEADER_LIMIT_BYTES,
    Attached,
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
from dflash_runtime.experts.daemons.handshake import (
    OTHER_WEIGHTS,
    Comparison,
    Greeting,
    check_welcome,
    differ,
    digests,
    weights_compared,
)
from dflash_runtime.experts.daemons.link import DaemonCounters, DaemonLink, Session
from dflash_runtime.experts.daemons.sharing import (
    Offer,
    OfferFailed,
    SharingPlan,
    make_offer,
    why_not_shared,
)
from dflash_runtime.experts.event_kinds import EventKind

_LOG = logging.getLogger(__name__)

_SPAWN_SILENCE_S = 60.0
"""A child that is alive may be silent this long: importing and binding on a busy machine."""
_MISSED_HEARTBEATS = 5
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 5.0
_MOST_EARLY_ENDS = 3
"""A daemon that was ended so many times before it was ever ready is not tried again at start."""
_END_S = 3.0
"""Between a child's hanging up and its end, at most: a driver has to give a device back."""
_OTHER_WEIGHTS_S = 30.0
"""Pause after a daemon was found to have other weights: somebody must give it another file, and to
find that again costs both sides some 0.1 s of a core."""
_STABLE_S = 10.0
"""A session that lasted this long was no accident: the pauses begin anew after it."""
_FOLDER_LOOK_S = 0.05
"""Between looks for a folder in which a daemon's socket is to be."""
_GOODBYE_MS = 200
"""How long a goodbye may take to leave."""

_Received: TypeAlias = "asyncio.Future[list[bytes]]"

ProgressCallback = Callable[[str, str, int, int], None]
"""Called with owner name, stage, number done, number in total."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the supervisor waits for what."""

    connect_silence_s: float
    heartbeat_s: float


class _EndedEarly(DaemonUnavailable):
    """A daemon was there and was ended before it was ready: its successor may do better."""


class Supervisor:
    """Runs all links until closed.

    Owns: its thread, the control sockets, the child processes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        links: Sequence[DaemonLink],
        greeting: Greeting,
        *,
        timeouts: Timeouts,
        on_progress: ProgressCallback | None = None,
        tolerates_absent: bool = False,
        tries_again: bool = False,
    ) -> None:
        self.context = zmq.asyncio.Context.shadow(context.underlying)
        self._links = tuple(links)
        self.greeting = greeting
        self.timeouts = timeouts
        self.tolerates_absent = tolerates_absent
        self.tries_again = tries_again
        self._on_progress = on_progress
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._first: dict[str, Future[None]] = {link.name: Future() for link in links}
        self._thread = threading.Thread(target=self._run, name="dflash-supervisor", daemon=True)

    def start(self) -> None:
        """Start and wait until every daemon is ready.

        With `tolerates_absent`, one that others start and that is not there yet is not waited for
        any longer than our timeouts; it is used from when it comes. With `tries_again`, one that
        is ended from outside before it is ready is waited for anew, a few times.
        Raises: the first daemon's DflashError if one cannot be had; everything is then closed.
        """
        self._thread.start()
        try:
            # One that fails is not to wait for others that are slow.
            done, _ = futures.wait(self._first.values(), return_when=futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye, end the children, end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if not self.loop.is_closed():
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._run_links())
        finally:
            for future in self._first.values():
                if not future.done():
                    future.set_exception(DaemonUnavailable("the engine was closed"))

    async def _run_links(self) -> None:
        tasks = [asyncio.create_task(_LinkTask(self, link).run()) for link in self._links]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                # docs: a bug, while ending: report it
                _LOG.error("supervisor: %r", outcome)

    def is_waited_for(self, name: str) -> bool:
        """Whether `start` does not know yet how a link's first attempt ends."""
        return not self._first[name].done()

    def report_first(self, name: str, error: DflashError | None) -> bool:
        """Tell `start` how a link's first attempt ended; False if it has been told already."""
        future = self._first[name]
        if future.done():
            return False
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        return True

    def report_progress(self, name: str, progress: Progress) -> None:
        if self._on_progress is not None and not self._first[name].done():
            self._on_progress(name, progress.stage, progress.num_done, progress.num_total)


class _LinkTask:
    """One link's life: start, greet, watch, and again."""

    def __init__(self, supervisor: Supervisor, link: DaemonLink) -> None:
        self._supervisor = supervisor
        self._link = link
        self._process: DaemonProcess | None = None
        self._loss_reported = asyncio.Event()
        self._lost_generation = 0
        self._num_early_ends = 0
        self._was_heard = False
        """Of the connection that there is: the daemon has answered over it."""
        loop = supervisor.loop

        def wake(lost_generation: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(self._note_loss, lost_generation)

        link.set_supervisor_wake(wake)

    async def run(self) -> None:
        backoff_s = 0.0
        try:
            while not self._link.is_given_up:
                started_s = self._supervisor.loop.time()
                pause_s = 0.0
                try:
                    await self._one_session()
                except DflashError as error:
                    self._failed(error)
                    if isinstance(error, HandshakeRefused) and error.code == OTHER_WEIGHTS:
                        pause_s = _OTHER_WEIGHTS_S
                except (OSError, zmq.ZMQError) as error:  # no descriptors, no such address
                    self._failed(DaemonUnavailable(f"daemon {self._link.name}: {error}"))
                if self._supervisor.loop.time() - started_s > _STABLE_S:
                    backoff_s = 0.0
                if self._link.is_given_up:
                    break
                backoff_s = min(max(2 * backoff_s, _BACKOFF_FIRST_S), _BACKOFF_LAST_S)
                await asyncio.sleep(max(pause_s, backoff_s) * random.uniform(0.75, 1.25))
        except Exception as error:
            # docs: a bug, with its traceback: report it. The daemon is not tried again
            _LOG.exception("daemon %s: the supervisor failed", self._link.name)
            self._failed(DaemonUnavailable(f"daemon {self._link.name}: {error!r}"))
            raise
        finally:
            if self._process is not None:
                await self._process.stop()

    def _note_loss(self, generation: int) -> None:
        self._lost_generation = max(self._lost_generation, generation)
        self._loss_reported.set()

    def _failed(self, error: DflashError) -> None:
        link, supervisor = self._link, self._supervisor
        is_absent = link.launch is None and isinstance(error, DaemonUnavailable)
        if is_absent and supervisor.tolerates_absent:
            if supervisor.report_first(link.name, None):
                link.mark_absent(EventKind.DAEMON_ABSENT, str(error))
        elif supervisor.is_waited_for(link.name):
            if isinstance(error, _EndedEarly) and supervisor.tries_again:
                self._num_early_ends += 1
                if self._num_early_ends < _MOST_EARLY_ENDS:
                    link.mark_absent(EventKind.DAEMON_LOST, str(error))
                    return
                error = DaemonUnavailable(f"{error}, {self._num_early_ends} times")
            supervisor.report_first(link.name, error)
        elif not isinstance(error, DaemonUnavailable) and not _is_busy(error):
            # Trying again does not put this right: it is said aloud, once.
            link.note_refused(str(error))
        # docs: an attempt to connect failed; it is tried again. Where that does not help, since the
        # daemon refused us or we refuse its socket, `daemon NAME is not there` and the event
        # `daemon_refused` say so once
        _LOG.info("daemon %s: %s", link.name, error)

    async def _one_session(self) -> None:
        """From connecting to the session's end. Returns if a session was had, raises if not."""
        link = self._link
        await self._folder_is_there()
        if link.launch is not None and (self._process is None or self._process.has_ended):
            if self._process is not None:
                await self._process.stop()
            self._process = DaemonProcess(link.launch, link.endpoint)
        self._was_heard = False
        with self._supervisor.context.socket(zmq.DEALER) as control:
            control.setsockopt(zmq.LINGER, 0)
            control.setsockopt(zmq.MAXMSGSIZE, HEADER_LIMIT_BYTES)
            control.setsockopt(zmq.IPV6, is_ipv6(link.endpoint.address))
            if link.secure is not None:
                link.secure(control)
            control.setsockopt(zmq.RECONNECT_IVL, 20)
            control.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            monitor = control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            # One future for the whole session: a cancelled receive may take the event with it.
            disconnected = asyncio.ensure_future(monitor.recv_multipart())
            try:
                control.connect(link.endpoint.address)
                self._supervisor.report_progress(link.name, Progress("connect", 0, 1))
                try:
                    welcome = await self._handshake(control, disconnected)
                except DaemonUnavailable:
                    # A child that does not answer is of no use any more.
                    if self._process is not None:
                        await self._process.stop()
                    raise
                segment = await self._share(control, disconnected, welcome)
                session = link.mark_ready(welcome, segment)
                self._supervisor.report_progress(link.name, Progress("ready", 1, 1))
                self._supervisor.report_first(link.name, None)
                await self._watch(control, disconnected, session)
            finally:
                disconnected.cancel()
                control.disable_monitor()
                monitor.close(linger=0)

    async def _folder_is_there(self) -> None:
        """Wait for the folder of an ipc endpoint, since whoever makes it decides what is in it.

        That of a child of ours is made for it.
        Raises: SettingsError if that is another account; DaemonUnavailable if it never comes.
        """
        loop, silence_s = self._supervisor.loop, self._supervisor.timeouts.connect_silence_s
        end_s = loop.time() + silence_s
        while not self._link.endpoint.is_folder_there() and self._link.launch is None:
            if loop.time() > end_s:
                raise self._unanswered(silence_s)
            await asyncio.sleep(_FOLDER_LOOK_S)

    def _unanswered(self, silence_s: float) -> DaemonUnavailable:
        link = self._link
        return DaemonUnavailable(
            # docs: no daemon listens there, or it belongs to another user
            f"daemon {link.name}: nothing answers at {link.endpoint.address} "
            f"({silence_s:.0f} s); is it running?"
        )

    async def _handshake(self, control: zmq.asyncio.Socket, disconnected: _Received) -> Welcome:
        greeting, link = self._supervisor.greeting, self._link
        hello = greeting.hello(link.owned)
        async with weights_compared(greeting.weights, link) as comparison:
            hello = await comparison.asked_in(hello)
            await control.send_multipart([encode_header(hello), link.owned.canonical_bytes])
            return await self._answer_to(hello, control, disconnected, comparison)

    async def _answer_to(
        self,
        hello: Hello,
        control: zmq.asyncio.Socket,
        disconnected: _Received,
        comparison: Comparison,
    ) -> Welcome:
        link = self._link
        silence_s = self._supervisor.timeouts.connect_silence_s
        if self._process is not None:
            silence_s = max(silence_s, _SPAWN_SILENCE_S)
        while True:
            message = await self._next_message(control, disconnected, silence_s)
            if isinstance(message, Progress):
                self._supervisor.report_progress(link.name, message)
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
        """Raises: HandshakeRefused if the daemon has other weights, which is told to leave us."""
        try:
            await comparison.finish(welcome)
        except HandshakeRefused:
            control.setsockopt(zmq.LINGER, _GOODBYE_MS)
            await control.send(encode_header(Bye(welcome.link_id)))
            raise

    async def _share(
        self, control: zmq.asyncio.Socket, disconnected: _Received, welcome: Welcome
    ) -> Segment | None:
        """Memory that the daemon is known to have too; None if there is none to be had.

        Raises: HandshakeRefused if it is required; DaemonUnavailable if the daemon is lost.
        """
        greeting, link = self._supervisor.greeting, self._link
        plan = greeting.sharing
        if plan is None:
            return None
        folder = None if link.endpoint.path is None else link.endpoint.path.parent
        reason = why_not_shared(welcome, folder)
        is_surprise = False
        if folder is not None and not reason:
            try:
                offer = await _made_offer(folder, welcome, plan)
                segment = await self._accepted(control, disconnected, offer)
                if not greeting.is_mail_required or segment.peer_mails:
                    return segment
                segment.close()
                raise HandshakeRefused(
                    f"daemon {link.name} cannot have a mailbox with us: each side needs a GPU "
                    "that sees shared memory, and payloads in f32"
                )
            except OfferFailed as error:
                reason = str(error)
                is_surprise = True
        if greeting.is_sharing_required:
            raise HandshakeRefused(f"daemon {link.name} cannot share memory: {reason}")
        level = logging.WARNING if is_surprise else logging.INFO
        # docs: payloads go through sockets, which is slower. A warning if it was expected to work:
        # look at the run directory's free space
        _LOG.log(level, "daemon %s: no shared memory: %s", link.name, reason)
        return None

    async def _accepted(
        self, control: zmq.asyncio.Socket, disconnected: _Received, offer: Offer
    ) -> Segment:
        """Raises: OfferFailed if the daemon does not take it; DaemonUnavailable if it is lost."""
        try:
            await control.send_multipart([encode_header(offer.message)])
            silence_s = self._supervisor.timeouts.connect_silence_s
            answer = await self._next_message(control, disconnected, silence_s)
            if isinstance(answer, Refused):
                raise OfferFailed(answer.reason)
            if not isinstance(answer, Attached):
                raise ProtocolError(f"daemon {self._link.name} answered attach with {answer.TYPE}")
            return offer.accepted(answer)
        except BaseException:
            offer.withdraw()
            raise

    async def _next_message(
        self, control: zmq.asyncio.Socket, disconnected: _Received, silence_s: float
    ) -> Message:
        """The next control message.

        Raises: DaemonUnavailable after `silence_s` without one, or at once if the child ended or
        the connection did: what was sent over it is lost, and only a new hello is of use.
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
                # It hangs up while it ends: how it does says more.
                await asyncio.wait(waiting[1:], timeout=_END_S)
            if self._process is not None and self._process.has_ended:
                raise (_EndedEarly if self._process.was_told_to_end else DaemonUnavailable)(
                    # docs: its own message stands above, on stderr
                    f"daemon {link.name} {self._process.how_it_ended} before it was ready"
                )
            if disconnected.done():
                # One that never said a word may not know our key, and never will.
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
        """Ping until the session ends, and see to it that the link knows why."""
        link, heartbeat_s = self._link, self._supervisor.timeouts.heartbeat_s
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
            # The daemon may be well and only the session lost: it need not keep our place, nor
            # compute what we no longer wait for.
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
                weights = self._supervisor.greeting.weights
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
        # The report may be late, and of a session before this one.
        while self._lost_generation < session.generation:
            self._loss_reported.clear()
            await self._loss_reported.wait()
        return "lost while computing"

    async def _ended(self, process: DaemonProcess) -> str:
        await process.ended.wait()
        return process.how_it_ended


def _is_busy(error: DflashError) -> bool:
    return isinstance(error, HandshakeRefused) and error.code == "busy"


async def _made_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> Offer:
    """Reserving the pages takes a while. Raises: OfferFailed."""
    making = asyncio.ensure_future(asyncio.to_thread(make_offer, folder, welcome, plan))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        # It is made all the same, and nobody else would remove its names.
        with contextlib.suppress(OfferFailed):
            (await making).withdraw()
        raise
