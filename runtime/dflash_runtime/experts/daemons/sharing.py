"""Sharing memory with a daemon: the parent makes a segment, the daemon proves that it has the same.

Used by the supervisor between a daemon's welcome and the session. Knows nothing of sockets.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring.layout import MAX_SLOTS, MOVED_FACTOR, RingShape
from dflash_protocol.ring.segment import Segment, create_segment
from dflash_protocol.wire.messages import Attach, Attached, Welcome

_DEFAULT_BYTES = 128 << 20
_FEWEST_SLOTS = 2
"""With less, a daemon would stand still while its last reply is read."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """What segments are made for. One takes up to 128 MiB, or `max_bytes` if that is more; all of
    it is locked for devices where both sides move payload by them, which `moves` says of ours."""

    hidden_size: int
    num_experts_used: int
    max_bytes: int
    moves: bool = False
    mail_bytes: int = 0
    """Of a mailbox, if our device can have one."""
    begin_mail: Callable[[Segment], None] = lambda segment: None
    """To be called with a segment that has one."""

    def shape(self, max_tokens: int, mail_bytes: int = 0) -> RingShape | None:
        """Of a segment for requests of up to `max_tokens`, or of fewer if there is not the room.

        None if there is none for a single token.
        """
        while max_tokens >= 1:
            max_pairs = max_tokens * self.num_experts_used
            one = RingShape(1, max_tokens, self.hidden_size, max_pairs)
            slot_bytes = one.request_slot_bytes + one.reply_slot_bytes
            num_slots = min(MAX_SLOTS, max(self.max_bytes, _DEFAULT_BYTES) // slot_bytes)
            if num_slots >= _FEWEST_SLOTS:
                return RingShape(num_slots, max_tokens, self.hidden_size, max_pairs, mail_bytes)
            max_tokens //= 2
        return None


class OfferFailed(Exception):
    """No memory is shared with a daemon that is well otherwise; says why."""


class Offer:
    """A segment that is made for one daemon and not known to be shared yet.

    Owns: the segment, until `accepted` gives it away or `withdraw` closes it.
    """

    def __init__(self, segment: Segment, link_id: str, *, moves: bool = False) -> None:
        self._segment = segment
        self._link_id = link_id
        self._moves = moves
        self._nonce = segment.write_nonce(is_client=True)

    @property
    def message(self) -> Attach:
        """What to tell the daemon."""
        shape = self._segment.shape
        return Attach(
            link_id=self._link_id,
            name=self._segment.name,
            num_slots=shape.num_slots,
            max_tokens=shape.max_tokens,
            max_pairs=shape.max_pairs,
            nonce=self._nonce.hex(),
            moves=self._moves,
            mail_bytes=shape.mail_bytes,
        )

    def accepted(self, answer: Attached) -> Segment:
        """The segment, if what the daemon says it wrote can be read here.

        Raises: OfferFailed if not.
        """
        written = self._segment.read_nonce(is_client=False).hex().encode()
        is_same = hmac.compare_digest(answer.nonce.encode(), written)
        if answer.link_id != self._link_id or not is_same:
            raise OfferFailed("the daemon has other memory than we")
        self._segment.peer_moves = self._moves and answer.moves
        self._segment.peer_mails = self._segment.peer_moves and answer.mails
        self._segment.unlink()
        return self._segment

    def withdraw(self) -> None:
        """Close the segment."""
        self._segment.close()


def make_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> Offer:
    """Raises: OfferFailed if no memory can be had."""
    moves = plan.moves and welcome.can_move
    mails = moves and welcome.mail_bytes == plan.mail_bytes
    mail_bytes = plan.mail_bytes if mails else 0
    shape = plan.shape(welcome.max_tokens * (MOVED_FACTOR if moves else 1), mail_bytes)
    if shape is None:
        raise OfferFailed(f"{plan.max_bytes} bytes do not hold a single token")
    try:
        segment = create_segment(folder, shape, generation=welcome.generation)
    except DaemonUnavailable as error:
        raise OfferFailed(str(error)) from error
    if mail_bytes:
        try:
            plan.begin_mail(segment)
        except BaseException:
            segment.close()
            raise
    return Offer(segment, welcome.link_id, moves=moves)


def why_not_shared(welcome: Welcome, folder: Path | None) -> str:
    """Why a session cannot share memory; empty if it can be tried."""
    if folder is None:
        return "its endpoint is not a path on this machine"
    if not ring_native.is_available():
        return "numba is missing here"
    return "" if welcome.can_share else "the daemon does not offer it"
