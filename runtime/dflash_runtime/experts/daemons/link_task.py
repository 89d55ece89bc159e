"""One daemon's link: starts or finds the daemon, shakes hands, watches it, and revives it.

All of it runs as one task in the supervisor's loop; expert work goes over other sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from dflash_protocol.errors import (
    DaemonUnavailable,
    DflashError,
    HandshakeRefused,
    ProtocolError,
)
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    COMPARING,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    decode_header,
)
from dflash_runtime.experts.daemons.child import DaemonProcess
from dflash_runtime.experts.daemons.conversation import Conversation, EndedEarly, unanswered
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
    Handover,
    Session,
    SharedMemory,
)
from dflash_runtime.experts.daemons.offers import check_offer, offer_of, refusal
from dflash_runtime.experts.events import EventKind

_LOG = logging.getLogger(__name__)

_SPAWN_SILENCE_S = 60.0
"""How long a live child may be silent: it imports and binds, on a busy machine."""
_MISSED_HEARTBEATS = 5
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 5.0
_MOST_EARLY_ENDS = 3
"""A daemon that ended this often before it was ever ready is not tried again at start."""
_OTHER_WEIGHTS_S = 30.0
"""Pause after a daemon was found to have other weights: its file has to be replaced by hand, and
each comparison costs both sides some 0.1 s of a core."""
_STABLE_S = 10.0
"""After a session of at least this length, the backoff starts again from its first pause."""
_FOLDER_POLL_S = 0.05
"""Interval of polling for the folder of a daemon's socket."""
_HANDOVER_S = 600.0
"""The longest that a daemon may take to load other experts beside those that it has."""


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
    """How one link's first attempt ends, for the supervisor's caller to wait on.

    `asked` is done once the daemon has said what it offers, or will not; `ready` is pending until
    `report`, which ends both. The link's task writes them, any thread may wait for them.
    """

    def __init__(self, name: str, on_progress: Callable[[str, str, int, int], None] | None) -> None:
        self._name = name
        self._on_progress = on_progress
        self.asked: Future[None] = Future()
        self.ready: Future[None] = Future()

    @property
    def is_pending(self) -> bool:
        """Whether it is not known yet if the daemon is ready."""
        return not self.ready.done()

    def report(self, error: DflashError | None) -> bool:
        """Settle the outcome, None for success; False if it was settled before."""
        if self.ready.done():
            return False
        for future in (self.asked, self.ready):
            if not future.done():
                _settle(future, error)
        return True

    def report_asked(self) -> None:
        """The daemon has answered what it offers."""
        if not self.asked.done():
            self.asked.set_result(None)

    def report_progress(self, progress: Progress) -> None:
        """Pass progress on to the supervisor's caller, while that waits."""
        if self._on_progress is not None and self.is_pending:
            self._on_progress(self._name, progress.stage, progress.num_done, progress.num_total)


def _settle(future: Future[None], error: DflashError | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Connected:
    """A session, the socket on which it was agreed, and what closes that."""

    session: Session
    conversation: Conversation
    undo: contextlib.ExitStack

    async def leave(self) -> None:
        """Say goodbye, and close the socket."""
        with self.undo:
            await self.conversation.say_goodbye(self.session.welcome.link_id)


class LinkTask:
    """One link: start or find its daemon, shake hands, watch the session, and all of it again.

    Before its experts are known, the daemon is asked what it has for them. A handover to other
    experts is prepared over a socket of its own, while the session before it goes on.

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
        self._woken = asyncio.Event()
        self._lost_generation = 0
        self._num_early_ends = 0
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
        self._woken.set()

    def _note_failure(self, error: DflashError) -> None:
        link, options, first = self._link, self._options, self._first
        is_absent = link.launch is None and isinstance(error, DaemonUnavailable)
        if is_absent and options.tolerates_absent:
            if first.report(None):
                link.mark_absent(EventKind.DAEMON_ABSENT, str(error))
        elif first.is_pending:
            if isinstance(error, EndedEarly) and options.tries_again:
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
        silence_s = self._options.timeouts.connect_silence_s
        if self._process is not None:
            silence_s = max(silence_s, _SPAWN_SILENCE_S)
        with contextlib.ExitStack() as undo:
            conversation = undo.enter_context(
                Conversation.opened(self._context, link, self._process, silence_s=silence_s)
            )
            self._first.report_progress(Progress("connect", 0, 1))
            try:
                await self._until_given(conversation)
                owned = link.owned
                welcome = await self._handshake(conversation, owned)
            except DaemonUnavailable:
                # A child that does not answer is replaced.
                if self._process is not None:
                    await self._process.stop()
                raise
            memory = await self._agree(conversation, welcome)
            try:
                session = link.mark_ready(welcome, memory, owned=owned)
            except DaemonUnavailable:
                await conversation.say_goodbye(welcome.link_id)
                raise
            self._first.report_progress(Progress("ready", 1, 1))
            self._first.report(None)
            connected: _Connected | None = _Connected(session, conversation, undo.pop_all())
        while connected is not None:
            with connected.undo:
                connected = await self._watch(connected)

    async def _await_folder(self) -> None:
        """Wait until the folder of an ipc endpoint exists; a child's folder is made by us.

        The account that makes the folder decides what is in it.
        Raises: SettingsError if that is another account; DaemonUnavailable after the timeout.
        """
        loop, silence_s = self._loop, self._options.timeouts.connect_silence_s
        end_s = loop.time() + silence_s
        while not self._link.endpoint.is_folder_there() and self._link.launch is None:
            if loop.time() > end_s:
                raise unanswered(self._link, silence_s)
            await asyncio.sleep(_FOLDER_POLL_S)

    async def _until_given(self, conversation: Conversation) -> None:
        """If the daemon's experts are not known yet: ask what it has, and wait for them."""
        link, greeting = self._link, self._options.greeting
        if link.is_given:
            return
        offer = await offer_of(
            conversation, link, greeting.ask(), on_progress=self._first.report_progress
        )
        if offer is not None and greeting.moe is not None:
            check_offer(offer, greeting.moe, link.name)
        link.offer = offer
        self._first.report_asked()
        # The caller decides; it closes the supervisor if it fails.
        await conversation.outcome_of(self._until(lambda: link.is_given), None)

    async def _until(self, holds: Callable[[], bool]) -> str:
        """Wait until something holds that whoever changes it wakes us for; returns ""."""
        while not holds():
            self._woken.clear()
            await self._woken.wait()
        return ""

    async def _handshake(self, conversation: Conversation, owned: OwnedExperts) -> Welcome:
        greeting = self._options.greeting
        comparison = Comparison(greeting.weights, self._link, owned)
        try:
            hello = await comparison.asked_in(greeting.hello(owned))
            await conversation.say(hello, owned.canonical_bytes)
            return await self._answer_to(hello, conversation, comparison)
        finally:
            await comparison.close()

    async def _answer_to(
        self, hello: Hello, conversation: Conversation, comparison: Comparison
    ) -> Welcome:
        link = self._link
        while True:
            message = await conversation.expect()
            if isinstance(message, Progress):
                self._first.report_progress(message)
                if message.stage == COMPARING:
                    comparison.begin()
            elif isinstance(message, Refused):
                raise refusal(message, link)
            elif isinstance(message, Welcome):
                check_welcome(message, hello, link)
                await self._compare(comparison, message, conversation)
                return message
            else:
                raise ProtocolError(f"daemon {link.name} answered hello with {message.TYPE}")

    async def _compare(
        self, comparison: Comparison, welcome: Welcome, conversation: Conversation
    ) -> None:
        """Raises: HandshakeRefused if the daemon has other weights; it is sent a Bye first."""
        try:
            await comparison.finish(welcome)
        except HandshakeRefused:
            await conversation.say_goodbye(welcome.link_id)
            raise

    async def _agree(self, conversation: Conversation, welcome: Welcome) -> SharedMemory | None:
        """Agree on a data path with the daemon: see data_path.agree."""

        async def ask(message: Message) -> Message:
            await conversation.say(message)
            return await conversation.expect(self._options.timeouts.connect_silence_s)

        return await agree(self._options.greeting.paths, self._link, welcome, ask=ask)

    async def _watch(self, connected: _Connected) -> _Connected | None:
        """Ping until the session ends, and tell the link why it ended. Returns what has taken over
        from it, if that is why."""
        link, session = self._link, connected.session
        reported = self._until(lambda: self._lost_generation >= session.generation)
        over = asyncio.create_task(self._end_of(session, connected.conversation, reported))
        following = asyncio.create_task(self._following())
        taken_over: _Connected | None = None
        try:
            await asyncio.wait([over, following], return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                link.mark_lost(session.generation, over.result() or "lost while computing")
            if following.done() or link.session is not None:
                taken_over = await following
        finally:
            over.cancel()
            following.cancel()
            _, outcome = await asyncio.gather(over, following, return_exceptions=True)
            if isinstance(outcome, _Connected) and outcome is not taken_over:
                await outcome.leave()
            if taken_over is None and (handover := link.handover) is not None:
                link.end_handover(handover, DaemonUnavailable(link.lost_reason()))
            # The daemon may be well and only the session lost: it should release our experts and
            # drop requests that are no longer waited for.
            await connected.conversation.say_goodbye(session.welcome.link_id)
        return taken_over

    async def _end_of(
        self, session: Session, conversation: Conversation, other: Coroutine[Any, Any, str]
    ) -> str:
        """Ping until the session ends, or something else does; returns why."""
        heartbeat_s = self._options.timeouts.heartbeat_s
        watchers = [
            asyncio.create_task(other),
            asyncio.create_task(self._pings(conversation, session, heartbeat_s)),
            asyncio.create_task(self._disconnected(conversation)),
        ]
        if self._process is not None:
            watchers.append(asyncio.create_task(self._ended(self._process)))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _following(self) -> _Connected:
        """What takes over from the current session; handovers that fail before are ended."""
        link = self._link
        while True:
            await self._until(lambda: link.handover is not None)
            handover = link.handover
            if handover is None:
                continue
            try:
                return await self._handed_over(handover)
            except DflashError as error:
                failure = error
            except (OSError, zmq.ZMQError) as error:
                failure = DaemonUnavailable(f"daemon {link.name}: {error}")
            link.end_handover(handover, failure)
            # docs: the daemon could not be given other experts beside those that it has, for lack
            # of memory for example, or they are no longer wanted; it goes on with those
            _LOG.info("daemon %s keeps its experts: %s", link.name, failure)

    async def _handed_over(self, handover: Handover) -> _Connected:
        """Prepare a handover, and wait until its session is the link's.

        Raises: DflashError if it fails or is withdrawn; OSError; zmq.ZMQError.
        """
        link, silence_s = self._link, self._options.timeouts.connect_silence_s
        with contextlib.ExitStack() as undo:
            conversation = undo.enter_context(
                Conversation.opened(self._context, link, self._process, silence_s=silence_s)
            )
            try:
                async with asyncio.timeout(_HANDOVER_S):
                    welcome = await self._handshake(conversation, handover.owned)
            except TimeoutError:
                reason = f"it has loaded other experts for {_HANDOVER_S:.0f} s"
                raise DaemonUnavailable(f"daemon {link.name}: {reason}") from None
            try:
                memory = await self._agree(conversation, welcome)
                session = link.mark_prepared(handover, welcome, memory)
                decided = self._until(lambda: link.handover is not handover)
                reason = await self._end_of(session, conversation, decided)
                if reason:
                    link.end_handover(handover, DaemonUnavailable(f"daemon {link.name}: {reason}"))
                if handover.error is not None:
                    raise handover.error
                if reason:  # it has taken over just before
                    link.mark_lost(session.generation, reason)
                    raise DaemonUnavailable(link.lost_reason())
            except BaseException:
                await conversation.say_goodbye(welcome.link_id)
                raise
            return _Connected(session, conversation, undo.pop_all())

    async def _pings(self, conversation: Conversation, session: Session, heartbeat_s: float) -> str:
        sequence = 0
        num_missed = 0
        while num_missed < _MISSED_HEARTBEATS:
            sequence += 1
            await conversation.say(Ping(sequence, session.welcome.link_id))
            try:
                async with asyncio.timeout(heartbeat_s):
                    header = await conversation.hear()
            except TimeoutError:
                num_missed += 1
                continue
            try:
                pong = decode_header(header)
            except ProtocolError as error:
                return str(error)
            if isinstance(pong, Pong):
                if not pong.known:
                    return "the daemon no longer knows us"
                self._link.daemon_counters = DaemonCounters(
                    pong.num_late,
                    pong.num_stale,
                    pong.num_checksum_failures,
                    session.generation,
                    pong.give_back_bytes,
                    pong.spare_bytes,
                )
                weights = self._options.greeting.weights
                if weights is not None and differ(weights.full_digest, pong.file_digest):
                    return f"its file has other weights: {digests(weights, pong.file_digest)}"
            num_missed = 0
            await asyncio.sleep(heartbeat_s)
        # docs: the daemon hangs, or the machine is stopped; it is tried again
        return f"no heartbeat for {num_missed * heartbeat_s:.1f} s"

    async def _disconnected(self, conversation: Conversation) -> str:
        await conversation.disconnected()
        # docs: the daemon ended, or the network did; it is tried again
        return "the connection ended"

    async def _ended(self, process: DaemonProcess) -> str:
        await process.ended.wait()
        return process.how_it_ended


def _is_busy(error: DflashError) -> bool:
    return isinstance(error, HandshakeRefused) and error.code == "busy"
