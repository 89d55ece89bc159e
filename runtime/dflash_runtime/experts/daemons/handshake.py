"""The parent's side of a handshake: its hello, checks of the welcome, and comparing weights.

Messages only; link_task sends and receives them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from dataclasses import dataclass, replace

from dflash_adapters.gguf.weight_blocks import NONCE_BYTES, nonce_from
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import (
    DaemonUnavailable,
    HandshakeRefused,
    ModelFileError,
    one_line,
)
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import PROTOCOL_VERSIONS, AskOffer, Hello, Welcome
from dflash_runtime.experts.daemons.data_path import PathPlan
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.events import EventKind

OTHER_WEIGHTS = "weights"
"""Code of the refusal of a daemon with other weights."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a parent tells every daemon about itself and its model, and requires of it."""

    model_identity: str
    moe_digest: str
    numeric_class: str
    max_tokens: int
    payload: PayloadType = PayloadType.F32
    """Type of rows and sums on the wire, for daemons that support it."""
    paths: PathPlan = PathPlan()  # noqa: RUF009 - frozen
    weights: WeightCheck | None = None
    """For comparing a daemon's file with ours; None: not compared."""

    moe: MoeSpec | None = None
    """For checking what daemons offer; None: not checked."""

    def ask(self) -> AskOffer:
        """The question to a daemon what it has for our model."""
        digest = "" if self.weights is None else self.weights.full_digest
        return AskOffer(
            self.model_identity,
            self.moe_digest,
            file_digest=digest,
            numeric_class=self.numeric_class,
        )

    def hello(self, owned: OwnedExperts) -> Hello:
        """The hello to a daemon that is to hold these experts."""
        return Hello(
            versions=PROTOCOL_VERSIONS,
            model_identity=self.model_identity,
            moe_digest=self.moe_digest,
            placement_fingerprint=owned.fingerprint,
            numeric_class=self.numeric_class,
            max_tokens=self.max_tokens,
            payload=self.payload.value,
        )


class Comparison:
    """Compares a daemon's weights with ours, during one handshake.

    By digests of the whole files if both know them, else by hashes of blocks that a nonce chooses,
    unless both have the very same files. Used in the supervisor's loop, blocks are hashed in a
    thread. To be closed.
    """

    def __init__(self, weights: WeightCheck | None, link: DaemonLink, owned: OwnedExperts) -> None:
        """`owned`: the experts whose weights are compared."""
        self._weights = weights
        self._link = link
        self._owned = owned
        self._nonce = self._stamp = ""
        self._hashing: asyncio.Future[str] | None = None
        self._is_over = threading.Event()

    async def asked_in(self, hello: Hello) -> Hello:
        """The hello with the comparison's nonce and our file's stamp and digest.

        Raises: HandshakeRefused if our own file was written to.
        """
        weights = self._weights
        if weights is None:
            return hello
        self._nonce = secrets.token_hex(NONCE_BYTES)
        try:
            self._stamp = await asyncio.to_thread(weights.stamp)
        except ModelFileError as error:
            raise HandshakeRefused(str(error), code="file") from error
        return replace(
            hello, nonce=self._nonce, file_stamp=self._stamp, file_digest=weights.full_digest
        )

    def begin(self) -> None:
        """Start to hash our blocks, while the daemon hashes its. May be called twice."""
        if self._weights is not None and self._hashing is None:
            self._hashing = asyncio.ensure_future(asyncio.to_thread(self._hash, self._weights))

    async def finish(self, welcome: Welcome) -> None:
        """Compare with the daemon's answer.

        Raises: HandshakeRefused if it has other weights, did not answer, or our own file was
        written to.
        """
        weights, link = self._weights, self._link
        if weights is None:
            return
        if welcome.version == 1:
            link.note(
                EventKind.WEIGHTS_UNCHECKED,
                "it speaks version 1 of the protocol, in which weights are not compared",
            )
            return
        daemon = f"daemon {link.name} at {link.endpoint.address}"
        if not welcome.file_stamp:
            raise HandshakeRefused(
                # docs: an older daemon: upgrade it to this version of the program
                f"{daemon} is too old: it cannot show that its file has our weights; "
                "upgrade it to this version of the program",
                code="too_old",
            )
        if differ(weights.full_digest, welcome.file_digest):
            reason = digests(weights, welcome.file_digest)
            raise HandshakeRefused(f"{daemon} has other weights: {reason}", code=OTHER_WEIGHTS)
        if welcome.file_stamp == self._stamp:
            return  # the very same file
        self.begin()
        assert self._hashing is not None
        try:
            ours = await asyncio.shield(self._hashing)
        except ModelFileError as error:
            raise HandshakeRefused(str(error), code="file") from error
        if ours != welcome.blocks_digest:
            raise HandshakeRefused(
                # docs: the daemon's file is another one, or damaged: give both sides the same file,
                # and compare `dflash-moe inspect --digest` of both
                f"{daemon} has other weights: blocks of its file were compared with ours; "
                "give both sides the same file",
                code=OTHER_WEIGHTS,
            )

    async def close(self) -> None:
        """Stop hashing and wait for its end."""
        self._is_over.set()
        if self._hashing is not None:
            await asyncio.gather(self._hashing, return_exceptions=True)

    def _hash(self, weights: WeightCheck) -> str:
        def on_group(num_done: int, num_total: int) -> None:
            if self._is_over.is_set():
                raise DaemonUnavailable(f"daemon {self._link.name}: the handshake has ended")

        return weights.answer(self._owned, nonce_from(self._nonce), on_group)


def differ(ours: str, theirs: str) -> bool:
    """Whether both digests are known and differ."""
    return bool(ours) and bool(theirs) and ours != theirs


def digests(weights: WeightCheck, theirs: str) -> str:
    """Both full digests, abbreviated, for messages."""
    return (
        f"the digest of all its bytes is {one_line(theirs)[:16]}, ours {weights.full_digest[:16]}"
    )


def check_welcome(welcome: Welcome, hello: Hello, link: DaemonLink) -> None:
    """Check a welcome against our hello. Raises: HandshakeRefused, with both sides' values, if the
    daemon differs from what was asked for, or a value is out of range."""
    name = link.name
    for what, ours, theirs in (
        ("model", hello.model_identity, welcome.model_identity),
        ("placement", hello.placement_fingerprint, welcome.placement_fingerprint),
    ):
        if ours != theirs:
            raise HandshakeRefused(f"daemon {name} has {what} {theirs[:16]}, ours is {ours[:16]}")
    if welcome.version not in hello.versions:
        raise HandshakeRefused(f"daemon {name} chose protocol version {welcome.version}")
    data_ports = range(1) if link.endpoint.path is not None else range(1, 65536)
    for what, is_sound in (
        ("link_id", re.fullmatch("([0-9a-f]{2}){1,32}", welcome.link_id) is not None),
        ("data_port", welcome.data_port in data_ports),
        ("max_tokens", 1 <= welcome.max_tokens <= hello.max_tokens),
        ("payload", welcome.payload in (hello.payload, PayloadType.F32.value)),
        ("pairs_per_second", 1e-2 <= welcome.pairs_per_second <= 1e12),
    ):
        if not is_sound:
            raise HandshakeRefused(f"daemon {name} offers an impossible {what}")
