"""A daemon that sends on its control socket only what the test tells it to.

Owned and played by the test's thread; the parent under test runs in threads of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from dflash_adapters.spec import MoeSpec
from dflash_protocol.endpoint import Endpoint, IpcClaim, parse_endpoint
from dflash_protocol.wire.messages import (
    AskOffer,
    Bye,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Refused,
    Welcome,
    decode_header,
    encode_header,
)

TIMEOUT_S = 20.0
"""More than any message takes on a slow machine; a passing test never waits this long."""
LINK_ID = "ab" * 8

IDLE_MACHINE: dict[str, Any] = {
    "device": "cpu",
    "data_port": 0,  # 0: an ipc socket beside the control socket
    "free_memory_bytes": 1 << 30,
    "pairs_per_second": 1000.0,
}
"""The fields of a welcome that describe the daemon's machine."""

M = TypeVar("M", bound=Message)


class ListeningSocket:
    """A daemon's control socket, with the claim of its path if it has one.

    Owns: its ZeroMQ context with all sockets in it, and the claim.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._claim = IpcClaim(endpoint) if endpoint.path is not None else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)
        if self._claim is not None:
            self._claim.close()
            self._claim = None


class ScriptedDaemon(ListeningSocket):
    """The daemon's end of a control socket. Answers go to the sender of the last message."""

    def __init__(self, address: str) -> None:
        super().__init__(parse_endpoint(address))
        self._parent = b""
        self.frames: list[bytes] = []
        """Frames after the header of the last message."""

    def expect(
        self,
        record: type[M],
        *,
        skipping: tuple[type[Message], ...] = (),
        within_s: float = TIMEOUT_S,
    ) -> M:
        """The next message, which must be of this kind, but for ones to be skipped.

        The goodbye of a session before this one may come at any time. A question for an offer is
        answered as by an older daemon, unless it is expected.
        """
        end_s = time.monotonic() + within_s
        while True:
            remaining_ms = max(0, int((end_s - time.monotonic()) * 1e3))
            assert self._socket.poll(remaining_ms), f"no {record.TYPE} came within {within_s} s"
            self._parent, header, *self.frames = self._socket.recv_multipart()
            message = decode_header(header)
            if isinstance(message, record):
                return message
            if isinstance(message, AskOffer):
                self.say(Refused("unknown_type", "unknown message type 'ask'"))
                self.say(Pong(self.expect(Ping).sequence, False, 0.0))
                continue
            assert isinstance(message, (Bye, *skipping)), f"{message} came, expected {record.TYPE}"

    def expect_bye(self) -> None:
        """Receive the parent's goodbye; late pings may come before it."""
        end_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end_s:
            if self._socket.poll(max(0, int((end_s - time.monotonic()) * 1e3))):
                message = decode_header(self._socket.recv_multipart()[1])
                if isinstance(message, Bye):
                    return
                assert isinstance(message, Ping), message
        raise AssertionError("no goodbye came")

    def is_silent(self, within_s: float) -> bool:
        """Whether no message except goodbyes arrives within `within_s`."""
        end_s = time.monotonic() + within_s
        while self._socket.poll(max(0, int((end_s - time.monotonic()) * 1e3))):
            if not isinstance(decode_header(self._socket.recv_multipart()[1]), Bye):
                return False
        return True

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.say_frames(encode_header(message))

    def say_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._parent, *frames])

    def let_in(self, **changes: Any) -> Hello:
        """Welcome the next parent and answer its first ping."""
        hello = self.expect(Hello, skipping=(Ping,))
        self.say(welcome_to(hello, **changes))
        self.say(Pong(self.expect(Ping).sequence, True, 0.0))
        return hello


def good_offer(spec: MoeSpec, **changes: Any) -> Offer:
    """The offer of a correct daemon for a model of these experts, with some fields replaced."""
    kinds = tuple(sorted(set(spec.first_of_kind.values())))
    good = Offer(
        device="cpu",
        device_name="a processor",
        numeric_class="class-3d",
        free_bytes=1 << 30,
        total_bytes=1 << 31,
        held_bytes=0,
        num_threads=2,
        can_mail=False,
        layer_ids=kinds,
        expert_bytes=tuple(spec.by_layer_id[each].expert_bytes for each in kinds),
        one_s=(1e-5,) * len(kinds),
        used_s=(2e-5,) * len(kinds),
        chunk_tokens=512,
        chunk_pairs_per_s=(1e6,) * len(kinds),
    )
    return replace(good, **changes)


def welcome_to(hello: Hello, **changes: Any) -> Welcome:
    """The welcome of a correct daemon, with some fields replaced."""
    good = Welcome(
        version=max(hello.versions),
        link_id=LINK_ID,
        model_identity=hello.model_identity,
        placement_fingerprint=hello.placement_fingerprint,
        numeric_class=hello.numeric_class,
        max_tokens=hello.max_tokens,
        **IDLE_MACHINE,
    )
    return replace(good, **changes)
