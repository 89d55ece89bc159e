"""A link and its remote expert compute, with a daemon's end that computes or follows a script."""

from __future__ import annotations

import secrets
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import zmq

from dflash_daemon.service import ComputeService
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import Endpoint, IpcClaim
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import ExpertRequest, Frames, Welcome
from dflash_protocol.wire.requests import (
    decode_request,
    encode_failure,
    encode_reply,
    largest_frame_bytes,
)
from dflash_protocol.wire.transport import LinkLimits
from dflash_runtime.experts.daemons.data_path import open_data_path
from dflash_runtime.experts.daemons.link import DaemonLink, Session
from dflash_runtime.experts.remote.remote import RemoteExpertCompute
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    begin,
    finish,
    moe_layer,
    naive_sums,
    numbered_rows,
)

TIMEOUT_S = 20.0
CAPACITY = 16
NUM_USED = 3
OWNED = OwnedExperts.from_lists({0: range(5)})
PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (2, 4): -1.0}
TWO_PAIRS = {(0, 0): 1.0, (0, 1): 1.0}


class GateBank(ScalingBank):
    """Computes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(moe_layer())
        self.gate = threading.Event()
        self.gate.set()
        self.has_entered = threading.Event()

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self.has_entered.set()
        assert self.gate.wait(TIMEOUT_S)
        super().accumulate(batch, out)


class Rig:
    """A link and its remote expert compute; a subclass or the test plays the daemon."""

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
        undo.callback(IpcClaim(endpoint).close)
        self.context = undo.enter_context(zmq.Context())
        self.losses: list[str] = []
        """Reasons of all events of the link, except those of new sessions."""
        self.kinds: list[str] = []
        self.link = DaemonLink(
            "cpu0",
            endpoint,
            OWNED,
            launch=None,
            numeric_class="c",
            on_event=self._on_event,
        )
        undo.callback(self.link.close)
        of_path = {"spin_s", "before_sleep", "mover"} & options.keys()
        open_path = partial(
            open_data_path,
            self.link,
            context=self.context,
            hidden_size=HIDDEN_SIZE,
            num_experts_used=NUM_USED,
            **{name: options.pop(name) for name in of_path},
        )
        self.remote = RemoteExpertCompute(
            self.link, open_path, min_deadline_s=min_deadline_s, **options
        )
        undo.callback(self.remote.close)

    def _on_event(self, kind: str, name: str, reason: str) -> None:
        assert name == "cpu0"
        if kind == "daemon_back":  # every session except the first
            return
        self.kinds.append(kind)
        self.losses.append(reason)

    def open_session(
        self,
        *,
        max_tokens: int = CAPACITY,
        pairs_per_second: float = 1e9,
        link_id: str = "",
        payload: PayloadType = PayloadType.F32,
    ) -> Session:
        return self.link.mark_ready(
            Welcome(
                version=2,
                link_id=link_id or secrets.token_hex(8),
                model_identity="m",
                placement_fingerprint="p",
                numeric_class="c",
                device="cpu",
                data_port=0,
                max_tokens=max_tokens,
                free_memory_bytes=1 << 30,
                pairs_per_second=pairs_per_second,
                payload=payload.value,
            )
        )

    def compute(self, num_tokens: int, pairs: dict[tuple[int, int], float]) -> F64Array:
        out = np.full((num_tokens, HIDDEN_SIZE), 100.0)
        finish(self.remote, begin(self.remote, batch_of(num_tokens, pairs)), out)
        return out

    def assert_right(
        self, num_tokens: int = 3, pairs: dict[tuple[int, int], float] = PAIRS
    ) -> None:
        expected = 100.0 + naive_sums(numbered_rows(num_tokens), pairs)
        np.testing.assert_array_equal(self.compute(num_tokens, pairs), expected)


class ServedRig(Rig):
    """The daemon's end is a real compute thread."""

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s, **options)
        self.bank = GateBank()
        self.service = ComputeService(
            self.context,
            endpoint.data_address(0),
            max_frame_bytes=largest_frame_bytes(
                max_tokens=CAPACITY, hidden_size=HIDDEN_SIZE, max_pairs=5 * CAPACITY
            ),
        )
        self.service.start()
        undo.callback(self.service.close)
        undo.callback(self.bank.gate.set)

    def open_session(self, **options: Any) -> Session:
        session = super().open_session(**options)
        welcome = session.welcome
        self.service.add_link(
            welcome.link_id,
            LinkLimits(HIDDEN_SIZE, welcome.max_tokens, 8, payload=PayloadType(welcome.payload)),
            {0: self.bank},
        )
        return session


class ScriptedRig(Rig):
    """The test plays the daemon's end of the data socket."""

    def __init__(
        self, undo: ExitStack, endpoint: Endpoint, *, min_deadline_s: float, **options: Any
    ) -> None:
        super().__init__(undo, endpoint, min_deadline_s=min_deadline_s, **options)
        self.socket = self.context.socket(zmq.ROUTER)
        undo.callback(self.socket.close, linger=0)
        self.socket.bind(endpoint.data_address(0))
        self.parent = b""

    def receive(self) -> ExpertRequest:
        assert self.socket.poll(int(TIMEOUT_S * 1e3))
        self.parent, *frames = self.socket.recv_multipart()
        return decode_request(frames, LinkLimits(HIDDEN_SIZE, CAPACITY, NUM_USED))[0]

    def say(self, frames: Frames) -> None:
        self.socket.send_multipart([self.parent, *frames])

    def answer(self, compute_s: float, *, num_tokens: int | None = None) -> ExpertRequest:
        """Receive a request and reply with sums of zero."""
        request = self.receive()
        sums = np.zeros((request.num_tokens if num_tokens is None else num_tokens, HIDDEN_SIZE))
        self.say(encode_reply(request, sums, compute_s=compute_s))
        return request

    def fail(self, code: str, reason: str) -> None:
        """Receive a request and reply with an error."""
        self.say(encode_failure(self.receive().sequence, ProtocolError(reason, code=code)))


def deadlines(scripted: ScriptedRig, phase: Phase, compute_s: float) -> float:
    """Send one request of two pairs, answer it, and return its deadline in ms."""
    ticket = begin(scripted.remote, batch_of(1, TWO_PAIRS, phase=phase))
    request = scripted.answer(compute_s)
    finish(scripted.remote, ticket, np.zeros((1, HIDDEN_SIZE)))
    return request.deadline_ms


def random_pairs(seed: int, num_tokens: int) -> dict[tuple[int, int], float]:
    random = np.random.default_rng(seed)
    return {
        (token_idx, expert_id): float(random.integers(-8, 9)) / 8
        for token_idx in range(num_tokens)
        for expert_id in range(5)
        if random.random() < 0.3
    }
