"""DaemonLink: the state of one link, shared by the supervisor's thread and the data thread.

The supervisor opens sessions; the data thread uses the current one and may report it lost. The
first report of a lost session counts, further ones are ignored. A session with other experts can be
prepared beside the current one, and take over from it: a handover.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

import zmq

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable, DflashError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.ring.segment import Segment
from dflash_protocol.wire.messages import Offer, Welcome
from dflash_runtime.experts.events import EventKind


@dataclass(frozen=True, slots=True)
class Launch:
    """How to spawn a daemon: the command up to its endpoint and pipe arguments; the child's whole
    environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DaemonCounters:
    """What a daemon reports: requests that it has dropped since its start, of all its parents, and
    what another program's need of its memory means for a session's experts."""

    late: int = 0
    stale: int = 0
    checksum_failures: int = 0
    generation: int = 0
    """Of the session that the rest is of."""
    give_back_bytes: int = 0
    """How much less memory its experts should take."""
    spare_bytes: int = 0
    """How much more they may take."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that a daemon has mapped too, and what both sides agreed on about it."""

    segment: Segment
    moves: bool = False
    """Whether both sides' devices copy rows and sums to and from it, if ours can map it."""
    mails: bool = False
    """Whether the daemon is preparing its end of a mailbox in it."""


@dataclass(frozen=True, slots=True)
class Session:
    """What one successful handshake agreed on. Generations are unique per link."""

    generation: int
    welcome: Welcome
    data_address: str
    memory: SharedMemory | None = None
    """Its segment is to be taken with DaemonLink.take_segment."""


class Handover:
    """Other experts for a daemon, with a session of their own beside the current one.

    Made by `DaemonLink.prepare`. States: being prepared; ready, once the daemon has the experts;
    over: its session is the link's, or it has failed or was withdrawn. Guarded by the link's lock.
    """

    def __init__(self, owned: OwnedExperts) -> None:
        self.owned = owned
        self.ready: Future[None] = Future()
        """Done when the daemon has them, or with the reason why it will not."""
        self.session: Session | None = None
        """From when it is ready until it is over. Owns the segment."""
        self.error: DflashError | None = None
        """Why it has failed, before or after it was ready."""

    def end(self, error: DflashError) -> None:
        """Fail, unless it is over."""
        self.error = self.error or error
        if not self.ready.done():
            self.ready.set_exception(error)
        session, self.session = self.session, None
        if session is not None and session.memory is not None:
            session.memory.segment.close()


class _Sessions:
    """A link's sessions: none yet, one, the last one lost, or none ever again.

    Guarded by the link's lock. Owns: an eventfd, readable exactly while the last session is known
    to be lost, and the current session's segment until it is taken.
    """

    def __init__(self) -> None:
        self.current: Session | None = None
        self.handover: Handover | None = None
        self.last_generation = 0
        self.num_restarts = -1
        """How often the daemon came back; -1 before the first session."""
        self.reason = "not connected yet"
        """Why there is none."""
        self.away_since_s: float | None = None
        self.is_given_up = False
        self.refused = ""
        """Why the last session was refused, until there is one."""
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._untaken: Segment | None = None

    def new(self, endpoint: Endpoint, welcome: Welcome, memory: SharedMemory | None) -> Session:
        """A session that is not begun."""
        self.last_generation += 1
        data_address = endpoint.data_address(welcome.data_port)
        return Session(self.last_generation, welcome, data_address, memory)

    def open(self, session: Session) -> float | None:
        """Begin a session; returns since when the daemon was away."""
        self._untaken = None if session.memory is None else session.memory.segment
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.lost_fd)
        self.current = session
        away_since_s, self.away_since_s = self.away_since_s, None
        return away_since_s

    def end(self, reason: str) -> None:
        """End the current session, if there is one."""
        self.reason = reason
        if self.current is not None:
            self.current = None
            self.close_untaken()
            os.eventfd_write(self.lost_fd, 1)

    def take_segment(self) -> Segment | None:
        segment, self._untaken = self._untaken, None
        return segment

    def close_untaken(self) -> None:
        if (segment := self.take_segment()) is not None:
            segment.close()


class DaemonLink:
    """One daemon as the parent sees it.

    States: connected (`session` is set), lost or absent (None, the supervisor keeps trying), given
    up (None for good).
    It has no session before its experts are given: to the constructor, or later to `give`.
    `on_event` is called with kind, name and reason of an event, without the link's lock.

    Owns: an eventfd that is readable exactly while the last session is known to be lost.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        owned: OwnedExperts | None = None,
        *,
        launch: Launch | None,
        numeric_class: str,
        on_event: Callable[[EventKind, str, str], None],
        secure: Callable[[zmq.Socket[Any]], object] | None = None,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self._owned = owned
        self.launch = launch
        self.offer: Offer | None = None
        """What the daemon said before it was given experts; None: it was not asked, or cannot say.
        """
        self.secure = secure
        """Sets the keys of a socket of this link before it connects; None if it needs none."""
        self.daemon_counters = DaemonCounters()
        """The last heartbeat's; replaced as a whole by the supervisor."""
        self._lock = threading.Lock()
        self._sessions = _Sessions()
        self._numeric_class = numeric_class
        self._on_event = on_event
        self._wake_supervisor: Callable[[int], None] = lambda generation: None

    @property
    def is_given(self) -> bool:
        """Whether its experts are known, with which a session can be opened."""
        return self._owned is not None

    @property
    def owned(self) -> OwnedExperts:
        """The daemon's experts; to be used once they are given."""
        assert self._owned is not None, "no experts were given yet"
        return self._owned

    def give(self, owned: OwnedExperts) -> None:
        """Set the daemon's experts, once, and have the supervisor open a session."""
        assert self._owned is None, "experts were given before"
        self._owned = owned
        self._wake_supervisor(0)

    @property
    def session(self) -> Session | None:
        """The current session, or None."""
        return self._sessions.current

    @property
    def lost_fd(self) -> int:
        """Readable exactly while the last session is known to be lost."""
        return self._sessions.lost_fd

    @property
    def is_given_up(self) -> bool:
        """The daemon is not used again: there are no further sessions."""
        return self._sessions.is_given_up

    @property
    def restarts(self) -> int:
        """Times the daemon came back after it was lost."""
        return max(0, self._sessions.num_restarts)

    def lost_reason(self) -> str:
        with self._lock:
            return self._why_lost()

    def _why_lost(self) -> str:
        return f"daemon {self.name}: {self._sessions.reason}"

    def set_supervisor_wake(self, wake: Callable[[int], None]) -> None:
        """Set `wake`, which is called, from any thread, with the generation of a lost session, or
        with 0 when experts are given, or a handover begins or ends."""
        self._wake_supervisor = wake

    def mark_ready(
        self,
        welcome: Welcome,
        memory: SharedMemory | None = None,
        *,
        owned: OwnedExperts | None = None,
    ) -> Session:
        """Open a new session; the link owns the memory's segment until it is taken. `owned`: what
        the daemon was told to hold.

        Raises: DaemonUnavailable if the daemon was given up, or other experts since.
        """
        with self._lock:
            sessions = self._sessions
            is_outdated = owned is not None and owned is not self._owned
            if sessions.is_given_up or is_outdated:
                if memory is not None:
                    memory.segment.close()
                raise DaemonUnavailable(self._why_lost())
            sessions.num_restarts += 1
            session = sessions.new(self.endpoint, welcome, memory)
            away_since_s = sessions.open(session)
        self._sessions.refused = ""
        if away_since_s is not None:
            self.note(EventKind.DAEMON_BACK, f"away for {monotonic() - away_since_s:.1f} s")
        if welcome.numeric_class != self._numeric_class:
            reason = f"daemon {welcome.numeric_class}, parent {self._numeric_class}"
            self.note(EventKind.NUMERIC_CLASS_DIFFERS, reason)
        return session

    def mark_lost(self, generation: int, reason: str) -> None:
        """End the session of that generation, if it is the current one."""
        with self._lock:
            sessions = self._sessions
            if sessions.current is None or sessions.current.generation != generation:
                return
            sessions.away_since_s = monotonic()
            sessions.end(reason)
        self.note(EventKind.DAEMON_LOST, reason)
        self._wake_supervisor(generation)

    def mark_absent(self, kind: EventKind, reason: str) -> None:
        """Report a daemon that cannot be reached, when there was no session to lose."""
        with self._lock:
            if self._sessions.away_since_s is None:
                self._sessions.away_since_s = monotonic()
        self.note(kind, reason)

    def give_up(self, reason: str) -> None:
        """After a wrong reply: end the session, and have no other for the rest of the link's
        life. A daemon that is our child is ended."""
        with self._lock:
            sessions = self._sessions
            if sessions.is_given_up:
                return
            sessions.is_given_up = True
            generation = sessions.last_generation
            sessions.end(reason)
        self.note(EventKind.WRONG_REPLY, reason)
        self._wake_supervisor(generation)

    # -- handovers --------------------------------------------------------------------------------

    @property
    def handover(self) -> Handover | None:
        """What is being prepared, or ready; None if nothing is."""
        return self._sessions.handover

    def prepare(self, owned: OwnedExperts) -> Handover:
        """Have the supervisor give the daemon other experts, beside those that it has, until
        `take_over` or `end_handover`. One at a time.

        Raises: DaemonUnavailable without a session.
        """
        with self._lock:
            sessions = self._sessions
            if sessions.current is None:
                raise DaemonUnavailable(self._why_lost())
            assert sessions.handover is None, "another handover is not over"
            handover = sessions.handover = Handover(owned)
        self._wake_supervisor(0)
        return handover

    def mark_prepared(
        self, handover: Handover, welcome: Welcome, memory: SharedMemory | None
    ) -> Session:
        """The daemon has a handover's experts; the handover owns the memory's segment.

        Raises: DaemonUnavailable if it is over.
        """
        with self._lock:
            if handover is not self._sessions.handover:
                if memory is not None:
                    memory.segment.close()
                raise DaemonUnavailable(f"daemon {self.name}: its other experts are not wanted")
            session = handover.session = self._sessions.new(self.endpoint, welcome, memory)
            handover.ready.set_result(None)
        return session

    def take_over(self, handover: Handover) -> None:
        """Use a handover's experts from now on, and its session instead of the current one.

        If either was lost, the daemon is lost, until the supervisor has a session with the new
        experts. Called by the data thread, with no request in flight.
        """
        with self._lock:
            sessions, current, self._owned = self._sessions, self._sessions.current, handover.owned
            session = handover.session
            if session is not None and current is not None:
                handover.session = current = None
                sessions.close_untaken()
                sessions.open(session)
            else:
                handover.end(DaemonUnavailable(self._why_lost()))
            if sessions.handover is handover:
                sessions.handover = None
        if current is not None:
            self.mark_lost(current.generation, f"its other experts: {handover.error}")
        self._wake_supervisor(0)

    def end_handover(self, handover: Handover, error: DflashError) -> None:
        """Fail or withdraw a handover, unless it is over."""
        with self._lock:
            if handover is not self._sessions.handover:
                return
            self._sessions.handover = None
            handover.end(error)
        self._wake_supervisor(0)

    def take_segment(self, session: Session) -> Segment | None:
        """The session's shared memory; the caller owns it from now on.

        Raises: DaemonUnavailable if the session is over.
        """
        with self._lock:
            if self._sessions.current is not session:
                raise DaemonUnavailable(self._why_lost())
            return self._sessions.take_segment()

    def note(self, kind: EventKind, reason: str) -> None:
        """Report an event, which by itself changes nothing here."""
        self._on_event(kind, self.name, reason)

    def note_refused(self, reason: str) -> None:
        """Report why no session can be opened; each reason once until there is one again."""
        if reason != self._sessions.refused:
            self._sessions.refused = reason
            self.note(EventKind.DAEMON_REFUSED, reason)

    def close(self) -> None:
        """Release the eventfd and a segment that was not taken. The link is unusable afterwards."""
        if self._sessions.handover is not None:
            self.end_handover(self._sessions.handover, DaemonUnavailable("the engine was closed"))
        self._sessions.close_untaken()
        os.close(self._sessions.lost_fd)
