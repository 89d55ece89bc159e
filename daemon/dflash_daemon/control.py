"""The control socket: handshakes, heartbeats and the end of links, on one asyncio loop that no
work blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from dflash_adapters.gguf.file import FileChange
from dflash_adapters.gguf.weight_blocks import nonce_from
from dflash_daemon.data_paths import MemoryOffers
from dflash_daemon.expert_memory import ExpertMemoryWatch
from dflash_daemon.host import ExpertHost
from dflash_daemon.offers import Offers
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import is_ipv6
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeviceOutOfMemory,
    HandshakeRefused,
    ModelFileError,
    ProtocolError,
    one_line,
)
from dflash_protocol.payloads import NEGOTIABLE, PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire import version1
from dflash_protocol.wire.messages import (
    COMPARING,
    HEADER_LIMIT_BYTES,
    MEASURING,
    PROTOCOL_VERSIONS,
    AskOffer,
    Attach,
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
from dflash_protocol.wire.transport import LinkLimits
from dflash_runtime.compute.memory_watch import LOOK_S
from dflash_runtime.experts.daemons.handshake import OTHER_WEIGHTS
from dflash_runtime.experts.store import HeldPlacement

_LOG = logging.getLogger(__name__)

_MAX_LINKS = 64
_LINK_SILENCE_S = 120.0
"""A link whose parent has not pinged for this long is dropped."""
_SWEEP_S = 0.1
_PROGRESS_S = 0.5
_GENERATION_BITS = 32
_HUNG_S = 10.0
"""A daemon that spends longer than this on one request accepts no new parents."""


class ControlServer:
    """Serves all parents on one ROUTER socket; `secure` sets keys on it. `mails`: parents may have
    mailboxes in memory that they share in `shared_folder`.

    A parent may first send AskOffer. A link begins with Hello, may Attach shared memory, and ends
    with Bye or silence.
    Owns: the socket, and each link's hold on its experts.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        host: ExpertHost,
        *,
        service: ComputeService,
        data_port: int,
        max_tokens: int,
        device: str,
        shared_folder: Path | None = None,
        mails: bool = True,
        secure: Callable[[zmq.Socket[Any]], object] | None = None,
    ) -> None:
        self._host = host
        self._service = service
        self._data_port = data_port
        self._max_tokens = max_tokens
        self._device = device
        self._memory = MemoryOffers(host, shared_folder, mails=mails)
        self._offers = Offers(
            host, device, can_mail=self._memory.can_mail, data_port=data_port, send=self._send
        )
        self._watch = ExpertMemoryWatch(host)
        self._last_seen_s: dict[str, float] = {}
        self._held: dict[str, HeldPlacement] = {}
        self._hellos: dict[bytes, asyncio.Task[None]] = {}
        num_experts = host.spec.moe.num_experts_total
        placement_bytes = 4 * (num_experts + 2 * len(host.spec.moe.layers))
        self._socket = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(HEADER_LIMIT_BYTES, placement_bytes))
        self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
        if secure is not None:
            secure(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise

    async def run(self) -> None:
        """Serve until cancelled."""
        own = [asyncio.create_task(each) for each in (self._sweep(), self._watch_memory())]
        try:
            while True:
                routing_id, *frames = await self._socket.recv_multipart()
                await self._handle(routing_id, frames)
        finally:
            await self._offers.close()
            tasks = (*own, *self._hellos.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close the socket, also if `run` was never called: its context waits for that."""
        self._socket.close()

    async def _handle(self, routing_id: bytes, frames: list[bytes]) -> None:
        try:
            if not frames:
                raise ProtocolError("an empty message")
            message = decode_header(frames[0])
            if isinstance(message, AskOffer):
                self._check_model(message)
                self._offers.start(routing_id, message.numeric_class)
                # At once, before any later message is answered: see AskOffer.
                await self._send(routing_id, Progress(MEASURING, 0, 1))
            elif isinstance(message, Hello):
                if len(frames) != 2:
                    raise ProtocolError("hello comes with one placement frame")
                self._start_hello(routing_id, message, frames[1])
            elif isinstance(message, Ping):
                await self._pong(routing_id, message)
            elif isinstance(message, Attach):
                await self._attach(routing_id, message)
            elif isinstance(message, Bye):
                self._forget(message.link_id)
            else:
                raise ProtocolError(f"{message.TYPE} does not belong on the control socket")
        except ProtocolError as error:
            await self._send(routing_id, Refused(error.code, str(error)[:1000]))

    async def _pong(self, routing_id: bytes, ping: Ping) -> None:
        service, limits = self._service, self._service.limits_of(ping.link_id)
        if limits is not None:
            self._last_seen_s[ping.link_id] = time.monotonic()
        pong = Pong(ping.sequence, limits is not None, service.busy_s)
        if limits is not None and limits.version > 1:  # version 1 has no counters
            give_back_bytes, spare_bytes = self._watch.said_to(service.num_links)
            pong = replace(
                pong,
                num_late=service.num_late,
                num_stale=service.counters.stale,
                num_checksum_failures=service.counters.checksum_failures,
                file_digest=self._host.weights.full_digest,
                give_back_bytes=give_back_bytes,
                spare_bytes=spare_bytes,
            )
        await self._send(routing_id, pong)

    async def _attach(self, routing_id: bytes, attach: Attach) -> None:
        """Serve a link through shared memory that the parent has created.

        Raises: ProtocolError if its sizes are not those negotiated, or it is not the same memory.
        """
        link_id = attach.link_id
        limits = self._service.limits_of(link_id)
        segment, attached = await self._memory.accept(
            attach, limits, lambda: self._held.get(link_id)
        )
        self._service.attach(link_id, segment)
        await self._send(routing_id, attached)

    def _start_hello(self, routing_id: bytes, hello: Hello, placement: bytes) -> None:
        if len(self._hellos) >= _MAX_LINKS or routing_id in self._hellos:
            raise ProtocolError("too many handshakes at once", code="busy")
        task = asyncio.create_task(self._greet(routing_id, hello, placement))
        self._hellos[routing_id] = task
        task.add_done_callback(lambda _: self._hellos.pop(routing_id, None))

    async def _greet(self, routing_id: bytes, hello: Hello, placement: bytes) -> None:
        """Answer a Hello: check it, load the experts, and send Welcome or Refused."""
        try:
            version = self._check(hello)
            owned = OwnedExperts.from_bytes(placement, self._host.experts_per_layer)
            if owned.fingerprint != hello.placement_fingerprint:
                raise ProtocolError("the placement does not match its fingerprint")
            file_stamp = await asyncio.to_thread(self._file_stamp)
            nonce = _nonce_of(hello, version, file_stamp)
            if nonce is not None:  # the parent can hash its blocks while we load
                await self._send(routing_id, Progress(COMPARING, 0, 1))
            loaded = await self._load(routing_id, owned, nonce)
            with loaded.release:
                answer = self._link(hello, version, owned, loaded.held)
                loaded.release.pop_all()  # the link releases them
            if version > 1:  # version 1 has no such fields
                answer = replace(
                    answer,
                    file_stamp=file_stamp,
                    blocks_digest=loaded.blocks_digest,
                    file_digest=self._host.weights.full_digest,
                )
        except (ProtocolError, DeviceOutOfMemory) as error:
            # docs: it has another model, or its request cannot be met; the parent logs the same
            _LOG.warning("refused a parent: %s", error)
            code = error.code if isinstance(error, ProtocolError) else "memory"
            await self._send(routing_id, Refused(code, str(error)[:1000]))
            return
        except DaemonUnavailable as error:  # the daemon is stopping; the parent may retry
            await self._send(routing_id, Refused("stopping", f"loading failed: {error}"[:1000]))
            return
        except Exception as error:
            # docs: a bug, with its traceback: report it. The parent was refused
            _LOG.exception("loading failed")
            await self._send(routing_id, Refused("internal", f"loading failed: {error}"[:1000]))
            return
        await self._send(routing_id, answer)

    def _link(
        self, hello: Hello, version: int, owned: OwnedExperts, held: HeldPlacement
    ) -> Welcome:
        """Create the link of a parent whose experts are loaded; the link takes over `held`.

        Raises: HandshakeRefused if there are too many links; DeviceUnavailable. No link then.
        """
        if self._service.num_links >= _MAX_LINKS:  # parents may have connected during the load
            raise HandshakeRefused(f"{_MAX_LINKS} parents are connected", code="busy")
        limits = LinkLimits(
            hidden_size=self._host.spec.hidden_size,
            max_tokens=min(self._max_tokens, max(1, hello.max_tokens)),
            max_experts_used=self._host.max_experts_used,
            version=version,
            generation=secrets.randbits(_GENERATION_BITS),
            payload=_granted(hello.payload, version),
            local_ids=version1.local_ids_by_layer(owned, self._host.experts_per_layer),
        )
        link_id = secrets.token_hex(8)
        welcome = Welcome(
            version=version,
            link_id=link_id,
            model_identity=self._host.identity,
            placement_fingerprint=owned.fingerprint,
            numeric_class=self._host.backend.class_beside(hello.numeric_class),
            device=self._device,
            data_port=self._data_port,
            max_tokens=limits.max_tokens,
            free_memory_bytes=self._host.backend.free_memory_bytes() or 0,
            pairs_per_second=held.pairs_per_second,
            generation=limits.generation,
            payload=limits.payload.value,
        )
        welcome = self._memory.offered(welcome, limits)
        # Last, since the above may fail: no link may exist that the parent does not know.
        backend, parent_class = self._host.backend, hello.numeric_class
        banks = {
            layer_id: backend.bank_beside(parent_class, bank)
            for layer_id, bank in held.banks.items()
        }
        self._service.add_link(link_id, limits, banks)
        self._held[link_id] = held
        self._watch.forget()
        self._last_seen_s[link_id] = time.monotonic()
        return welcome

    def _check(self, hello: Hello) -> int:
        """The negotiated version. Raises: HandshakeRefused with both sides' values."""
        common = set(hello.versions) & set(PROTOCOL_VERSIONS)
        if not common:
            raise HandshakeRefused(
                f"protocol versions {hello.versions} and {PROTOCOL_VERSIONS} have none in common",
                code="version",
            )
        self._check_model(hello)
        if self._service.busy_s > _HUNG_S:
            raise HandshakeRefused(
                f"computing one request for {self._service.busy_s:.0f} s already", code="busy"
            )
        self._forget_silent_links()
        if self._service.num_links >= _MAX_LINKS:
            raise HandshakeRefused(f"{_MAX_LINKS} parents are connected already", code="busy")
        return max(common)

    def _check_model(self, hello: Hello | AskOffer) -> None:
        """Raises: HandshakeRefused if the models differ, or the daemon's file has changed."""
        change = self._host.file_change()
        if change is FileChange.WRITTEN:
            raise _written()
        known = self._host.weights.full_digest
        if known and hello.file_digest not in ("", known):
            raise HandshakeRefused(
                f"this daemon's file has other weights: the digest of all its bytes is "
                f"{known[:16]}, the parent's {one_line(hello.file_digest)[:16]}",
                code=OTHER_WEIGHTS,
            )
        if hello.model_identity != self._host.identity:
            hint = (
                # docs: the daemon has the model that was under this path before
                "; its file was replaced since it was started: start the daemon again"
                if change is FileChange.REPLACED
                else ""
            )
            raise HandshakeRefused(
                # docs: the files differ; give both sides the same one
                f"this daemon runs model {self._host.identity[:16]} ({self._host.spec.name}), "
                f"asked for is model {hello.model_identity[:16]}{hint}",
                code="model",
            )
        if hello.moe_digest != self._host.spec.moe.digest:
            raise HandshakeRefused(
                f"this daemon reads the experts as {self._host.spec.moe.digest[:16]}, "
                f"the parent as {hello.moe_digest[:16]}: different versions of this program?",
                code="spec",
            )

    def _file_stamp(self) -> str:
        """Raises: HandshakeRefused if the file was written to."""
        try:
            return self._host.weights.stamp()
        except ModelFileError as error:
            raise _written() from error

    async def _load(self, routing_id: bytes, owned: OwnedExperts, nonce: bytes | None) -> _Loaded:
        """In a thread, load experts and hash the blocks that the nonce chooses; meanwhile the
        parent is sent Progress twice a second.

        Raises: as ExpertHost.load; HandshakeRefused if the file was written to.
        """
        state = ("compile", 0, 1)

        def on_progress(stage: str, num_done: int, num_total: int) -> None:
            nonlocal state
            state = (stage, num_done, num_total)

        def work() -> _Loaded:
            with contextlib.ExitStack() as release:
                held = self._host.load(owned, on_progress)
                release.callback(self._host.release, held)
                try:
                    blocks_digest = self._host.answer(owned, nonce, on_progress)
                except ModelFileError as error:
                    raise _written() from error
                return _Loaded(held, blocks_digest, release.pop_all())

        loading = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            while not loading.done():
                await asyncio.wait([loading], timeout=_PROGRESS_S)
                if not loading.done():
                    await self._send(routing_id, Progress(*state))
        except BaseException:
            loading.add_done_callback(_release_unused)  # the thread goes on without us
            raise
        return loading.result()

    def _forget(self, link_id: str) -> None:
        self._service.drop_link(link_id)
        held = self._held.pop(link_id, None)
        if held is not None:
            self._host.release(held)
            self._watch.forget()
        self._last_seen_s.pop(link_id, None)

    async def _watch_memory(self) -> None:
        """Look at the device's memory at intervals."""
        while not self._host.backend.is_host:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._watch.look)

    async def _sweep(self) -> None:
        """Drop links of silent parents at intervals, which releases experts and shared memory."""
        while True:
            await asyncio.sleep(max(_LINK_SILENCE_S, 0.0) / 4 + _SWEEP_S)
            self._forget_silent_links()

    def _forget_silent_links(self) -> None:
        horizon_s = time.monotonic() - _LINK_SILENCE_S
        for link_id in [id_ for id_, seen_s in self._last_seen_s.items() if seen_s < horizon_s]:
            self._forget(link_id)

    async def _send(self, routing_id: bytes, message: Message) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer may be gone
            await self._socket.send_multipart([routing_id, encode_header(message)], zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Experts loaded for a parent whose link is not made yet."""

    held: HeldPlacement
    blocks_digest: str
    release: contextlib.ExitStack
    """Owns `held`: releases it when closed, unless a link has taken it over by `pop_all`."""


def _release_unused(loading: asyncio.Task[_Loaded]) -> None:
    """Release what a handshake that was cancelled meanwhile has loaded."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().release.close()


def _granted(wished: str, version: int) -> PayloadType:
    """A link's payload type: the requested one if known, else float32."""
    known = {payload.value: payload for payload in NEGOTIABLE}
    return known.get(wished, PayloadType.F32) if version > 1 else PayloadType.F32


def _nonce_of(hello: Hello, version: int, file_stamp: str) -> bytes | None:
    """The nonce that selects the weight blocks to compare; None if the parent has the same files or
    does not ask.

    Raises: ProtocolError if it is malformed.
    """
    if version == 1 or not hello.nonce:
        # docs: it is served, without a check that both have the same weights; update it
        _LOG.warning("a parent does not compare weights: it is an older version of this program")
        return None
    nonce = nonce_from(hello.nonce)
    return None if hello.file_stamp == file_stamp else nonce


def _written() -> HandshakeRefused:
    return HandshakeRefused(
        "this daemon's file was written to while it was in use; start the daemon again",
        code="file",
    )
