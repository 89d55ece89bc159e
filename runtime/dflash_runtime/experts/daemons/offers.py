"""Asks a daemon what it has for a model, before it is given experts, and checks what it says."""

from __future__ import annotations

from collections.abc import Callable

from dflash_adapters.spec import MoeSpec
from dflash_protocol.device import parse_device
from dflash_protocol.errors import HandshakeRefused, ProtocolError, one_line
from dflash_protocol.settings import MAX_THREADS
from dflash_protocol.wire.messages import AskOffer, Offer, Ping, Pong, Progress, Refused
from dflash_runtime.experts.daemons.conversation import Conversation, EndedEarly
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.speed_trial import kinds_of

_UNKNOWN_TYPE = "unknown_type"
"""Code of the refusal of a message that an older daemon does not know."""
_LARGEST_MEMORY = 1 << 56
_LARGEST_EXPERT = 1 << 40
_LONGEST_S = 1e4
_FASTEST = 1e12
_SLOWEST = 1e-3
_LONGEST_CHUNK = 1 << 20
_LONGEST_NAME = 200


async def offer_of(
    conversation: Conversation,
    link: DaemonLink,
    ask: AskOffer,
    *,
    on_progress: Callable[[Progress], None],
) -> Offer | None:
    """What a daemon offers; None if it is an older one, which cannot say.

    Such a daemon does not know the question, and may leave it unanswered: the answer to a Ping
    right behind it then comes first.
    Raises: HandshakeRefused if it has another model; DaemonUnavailable; ProtocolError.
    """
    await conversation.say(ask)
    await conversation.say(Ping(0, ""))
    offer: Offer | None = None
    is_heard = is_answered = has_ponged = False
    while not (is_answered and has_ponged):
        message = await conversation.expect()
        match message:
            case Pong():
                has_ponged, is_answered = True, is_answered or not is_heard
            case Progress():
                on_progress(message)
            case Offer():
                offer, is_answered = message, True
            case Refused(code=code) if code == _UNKNOWN_TYPE:
                is_answered = True
            case Refused():
                raise refusal(message, link)
            case _:
                raise ProtocolError(f"daemon {link.name} answered ask with {message.TYPE}")
        is_heard = True
    return offer


def refusal(refused: Refused, link: DaemonLink) -> HandshakeRefused | EndedEarly:
    """The error for a daemon that refuses us; EndedEarly if it is stopping."""
    said = f"daemon {link.name} at {link.endpoint.address} refused: {refused.reason}"
    if refused.code == "stopping":
        return EndedEarly(said)
    return HandshakeRefused(said, code=one_line(refused.code))


def check_offer(offer: Offer, moe: MoeSpec, daemon_name: str) -> None:
    """Raises: HandshakeRefused if a value is out of range, or is not for each kind of layer."""
    kinds = kinds_of(moe.first_of_kind)
    lists = (offer.expert_bytes, offer.one_s, offer.used_s, offer.chunk_pairs_per_s)
    for what, is_sound in (
        ("device", _is_device(offer.device)),
        ("device_name", len(offer.device_name) <= _LONGEST_NAME),
        ("numeric_class", len(offer.numeric_class) <= _LONGEST_NAME),
        ("total_bytes", offer.total_bytes <= _LARGEST_MEMORY),
        ("free_bytes", offer.free_bytes <= offer.total_bytes),
        ("held_bytes", offer.held_bytes <= _LARGEST_MEMORY),
        ("num_threads", 1 <= offer.num_threads <= MAX_THREADS),
        ("chunk_tokens", 1 <= offer.chunk_tokens <= _LONGEST_CHUNK),
        ("data_port", offer.data_port < 65536),
        ("layer_ids", offer.layer_ids == kinds and all(len(x) == len(kinds) for x in lists)),
        ("expert_bytes", all(1 <= each <= _LARGEST_EXPERT for each in offer.expert_bytes)),
        ("one_s", all(0.0 <= each <= _LONGEST_S for each in offer.one_s)),
        ("used_s", all(0.0 <= each <= _LONGEST_S for each in offer.used_s)),
        (
            "chunk_pairs_per_s",
            all(not each or _SLOWEST <= each <= _FASTEST for each in offer.chunk_pairs_per_s),
        ),
    ):
        if not is_sound:
            raise HandshakeRefused(f"daemon {daemon_name} offers an impossible {what}")


def offer_text(offer: Offer) -> str:
    """An offer for people, in one line."""
    memory = "memory unknown"
    if offer.total_bytes:
        memory = f"{offer.free_bytes / 2**30:.1f} of {offer.total_bytes / 2**30:.1f} GiB free"
    slowest_s = max(offer.used_s, default=0.0)
    speed = f", {slowest_s * 1e6:.0f} us for a layer of a step" if slowest_s else ""
    return f"{one_line(offer.device_name)}, {memory}{speed}"


def _is_device(text: str) -> bool:
    try:
        parse_device(text)
    except ValueError:
        return False
    return True
