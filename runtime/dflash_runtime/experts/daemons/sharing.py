"""Sharing memory with a daemon: the parent makes a segment, the daemon proves that it mapped it.

Happens between a daemon's welcome and the session (link_task.py).
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
from dflash_runtime.experts.daemons.link import SharedMemory

_DEFAULT_BYTES = 128 << 20
_FEWEST_SLOTS = 2
"""With fewer, a daemon would idle while its last reply is read."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """How segments are made. One takes up to 128 MiB, or `max_bytes` if that is more. `moves`: our
    device copies payload by DMA; if the daemon's does too, the whole segment is page-locked."""

    hidden_size: int
    num_experts_used: int
    max_bytes: int
    moves: bool = False
    mail_bytes: int = 0
    """Size of a mailbox; 0 if our device cannot have one."""
    begin_mail: Callable[[Segment], None] = lambda segment: None
    """Called with a segment that has a mailbox."""

    def shape(self, max_tokens: int, mail_bytes: int = 0) -> RingShape | None:
        """The shape for requests of up to `max_tokens`, or fewer if they do not fit; None if not a
        single token fits.
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
    """Memory cannot be shared with a daemon; the message says why. The session goes on without."""


class Offer:
    """A segment that is made for one daemon and not confirmed yet.

    Owns: the segment, until `accepted` returns it or `withdraw` closes it.
    """

    def __init__(self, segment: Segment, link_id: str, *, moves: bool = False) -> None:
        self._segment = segment
        self._link_id = link_id
        self._moves = moves
        self._nonce = segment.write_nonce(is_client=True)

    @property
    def message(self) -> Attach:
        """The message to the daemon."""
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

    def accepted(self, answer: Attached) -> SharedMemory:
        """The memory, if the nonce that the daemon says it wrote can be read here.

        Raises: OfferFailed if not.
        """
        written = self._segment.read_nonce(is_client=False).hex().encode()
        is_same = hmac.compare_digest(answer.nonce.encode(), written)
        if answer.link_id != self._link_id or not is_same:
            raise OfferFailed("the daemon mapped other memory than ours")
        self._segment.unlink()
        moves = self._moves and answer.moves
        return SharedMemory(self._segment, moves=moves, mails=moves and answer.mails)

    def withdraw(self) -> None:
        """Close the segment."""
        self._segment.close()


def make_offer(folder: Path, welcome: Welcome, plan: SharingPlan) -> Offer:
    """Make a segment for a daemon. Raises: OfferFailed if that fails."""
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
    """Why memory cannot be shared; empty if it can be tried."""
    if folder is None:
        return "its endpoint is not a path on this machine"
    if not ring_native.is_available():
        return "numba is missing here"
    return "" if welcome.can_share else "the daemon does not offer it"
