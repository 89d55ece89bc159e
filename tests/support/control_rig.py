"""A daemon's host, compute thread and control socket in this process, and parents that connect."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq
import zmq.asyncio

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_daemon.control import ControlServer
from dflash_daemon.host import ExpertHost
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    PROTOCOL_VERSIONS,
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
from dflash_protocol.wire.requests import ParentCodec, encode_request, largest_frame_bytes
from dflash_protocol.wire.transport import Reply, TransportCounters
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.reference.experts import ReferenceExpertBank
from support.random_models import ODD_SHAPES
from support.routed_batches import batch_of

SHAPE = replace(ODD_SHAPES[0], num_layers=2)
TIMEOUT_S = 20.0
CAPACITY = 16
OWNED = OwnedExperts.from_lists({0: [3, 1], 1: [0]})
OTHER = OwnedExperts.from_lists({0: [1, 2], 1: [0]})

M = TypeVar("M", bound=Message)


class GateBackend(ReferenceBackend):
    """Loads only while its gate is open, and not at all if it has a failure to raise.

    Records the calls to load and to drop experts: layers with global ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.loaded: list[tuple[int, list[int]]] = []
        self.dropped: list[tuple[int, list[int]]] = []

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        assert self.gate.wait(TIMEOUT_S)
        if self.failures:
            raise self.failures.pop()
        self.loaded.append((layer.layer_id, global_expert_ids.tolist()))
        return super().load_experts(file, layer, global_expert_ids)

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        self.dropped.append((layer.layer_id, global_expert_ids.tolist()))
        super().drop_experts(file, layer, global_expert_ids)


class Parent:
    """One parent's control socket."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._socket = daemon.sockets.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(daemon.address)
        daemon.undo.callback(self._socket.close, linger=0)

    async def say(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def hear(self) -> Message:
        frames = await asyncio.wait_for(self._socket.recv_multipart(), TIMEOUT_S)
        assert len(frames) == 1
        return decode_header(frames[0])

    async def expect(self, record: type[M], *, skipping: tuple[type[Message], ...] = ()) -> M:
        while True:
            message = await self.hear()
            if isinstance(message, record):
                return message
            assert isinstance(message, skipping), message

    async def say_hello(self, owned: OwnedExperts = OWNED, **changes: Any) -> None:
        hello = replace(self._daemon.good_hello(owned), **changes)
        await self.say(encode_header(hello), owned.canonical_bytes)

    async def hello(self, owned: OwnedExperts = OWNED, **changes: Any) -> Welcome:
        await self.say_hello(owned, **changes)
        return await self.expect(Welcome, skipping=(Progress,))

    async def refused_hello(self, owned: OwnedExperts = OWNED, **changes: Any) -> Refused:
        await self.say_hello(owned, **changes)
        return await self.expect(Refused, skipping=(Progress,))

    async def ping(self, link_id: str, sequence: int = 1) -> Pong:
        await self.say(encode_header(Ping(sequence, link_id)))
        pong = await self.expect(Pong)
        assert pong.sequence == sequence
        return pong

    async def assert_welcome(self) -> Welcome:
        """Check that the daemon still works after a failure: a hello, then one expert's result."""
        welcome = await self.hello()
        assert (await self.ping(welcome.link_id)).known
        assert isinstance(await self._daemon.compute(welcome), Reply)
        return welcome


class Daemon:
    """Host, compute thread and control socket of a daemon, in this process."""

    def __init__(self, undo: ExitStack, model: Path, run_dir: Path) -> None:
        endpoint = parse_endpoint(f"ipc://{run_dir}/cpu0")
        self.undo = undo
        self.address = endpoint.address
        self.data_address = endpoint.data_address(0)
        undo.callback(IpcClaim(endpoint).close)
        self.backend = GateBackend()
        self.host = ExpertHost(model, self.backend)
        undo.callback(self.host.close)
        self.context = undo.enter_context(zmq.Context())
        # The parents' sockets have a separate context, which ends before the daemon's.
        self.sockets = zmq.asyncio.Context()
        undo.callback(self.sockets.destroy, linger=0)
        self.service = ComputeService(
            self.context,
            self.data_address,
            max_frame_bytes=largest_frame_bytes(
                max_tokens=CAPACITY, hidden_size=SHAPE.hidden_size, max_pairs=64
            ),
            shares_memory=True,
        )
        self.service.start()
        undo.callback(self.service.close)
        undo.callback(self.backend.gate.set)
        self.control = ControlServer(
            self.context,
            self.address,
            self.host,
            service=self.service,
            data_port=0,
            max_tokens=CAPACITY,
            device="cpu",
            shared_folder=run_dir,
        )
        self.serving = asyncio.create_task(self.control.run())
        self.file_stamp = self.host.weights.stamp()
        self.is_stopped = False
        self.num_requests = 0

    def parent(self) -> Parent:
        return Parent(self)

    def good_hello(self, owned: OwnedExperts) -> Hello:
        return Hello(
            versions=PROTOCOL_VERSIONS,
            model_identity=self.host.identity,
            moe_digest=self.host.spec.moe.digest,
            placement_fingerprint=owned.fingerprint,
            numeric_class="whatever",
            max_tokens=1024,
            nonce="5e" * 16,
            file_stamp=self.file_stamp,
        )

    async def sums(self, welcome: Welcome, local_expert_id: int) -> F64Array:
        """The result of an expert of layer 0 for a row of ones. Shapes: result [1, H]."""
        answer = await self.compute(welcome, local_expert_id=local_expert_id)
        assert isinstance(answer, Reply)
        return answer.sums

    async def compute(
        self,
        welcome: Welcome,
        num_tokens: int = 1,
        *,
        local_expert_id: int = 1,
        generation: int | None = None,
    ) -> Reply | ProtocolError:
        """One request over the data socket: rows of ones through an expert of layer 0."""
        hidden: F32Array = np.ones((num_tokens, SHAPE.hidden_size), np.float32)
        batch = batch_of(num_tokens, {(0, local_expert_id): 1.0}, hidden=hidden)
        payload = PayloadType(welcome.payload)
        with self.sockets.socket(zmq.DEALER) as data:
            data.setsockopt(zmq.LINGER, 0)
            data.setsockopt(zmq.ROUTING_ID, bytes.fromhex(welcome.link_id))
            data.connect(self.data_address)
            self.num_requests += 1
            frames = encode_request(
                batch,
                sequence=self.num_requests,
                layer_id=0,
                deadline_s=TIMEOUT_S,
                generation=welcome.generation if generation is None else generation,
                payload=payload,
            )
            await data.send_multipart([bytes(frame) for frame in frames])
            answer = await asyncio.wait_for(data.recv_multipart(), TIMEOUT_S)
        codec = ParentCodec(
            hidden_size=SHAPE.hidden_size,
            generation=welcome.generation,
            payload=payload,
            counters=TransportCounters(),
        )
        read = codec.decode(answer, {self.num_requests: num_tokens})
        assert read is not None
        return read[1]

    async def stop(self) -> None:
        assert self.is_stopped or not self.serving.done(), "whatever came, it is still serving"
        self.is_stopped = True
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
