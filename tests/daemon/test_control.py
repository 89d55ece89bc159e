"""The control socket: who is welcomed, who is refused and why, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import MoeLayer
from dflash_daemon import control as control_module
from dflash_daemon import service as service_module
from dflash_daemon.control import ControlServer
from dflash_daemon.host import ExpertHost
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.messages import (
    PROTOCOL_VERSIONS,
    Attached,
    Bye,
    ComputeBatch,
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
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.requests import ParentCodec, encode_request, largest_frame_bytes
from dflash_protocol.transport import Reply, TransportCounters
from dflash_protocol.transports.shared_memory import SharedClient
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.reference.experts import ReferenceExpertBank
from dflash_runtime.experts.sharing import Offer, OfferFailed, SharingPlan, make_offer
from dflash_runtime.experts.store import every_expert
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.routed_batches import batch_of
from support.version1_peer import Version1Parent

pytestmark = pytest.mark.asyncio

SHAPE = replace(ODD_SHAPES[0], num_layers=2)
PATIENCE_S = 20.0
CAPACITY = 16
OWNED = OwnedExperts.from_lists({0: [3, 1], 1: [0]})
OTHER = OwnedExperts.from_lists({0: [1, 3], 1: [0]})

M = TypeVar("M", bound=Message)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE, seed=10)


class GateBackend(ReferenceBackend):
    """Loads only while its gate is open, and not at all if it has a failure to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        assert self.gate.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.pop()
        return super().load_experts(file, layer, global_expert_ids)


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
        frames = await asyncio.wait_for(self._socket.recv_multipart(), PATIENCE_S)
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
        """The good request after a failure: a hello, and one expert computed over the link."""
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
        # The parents' sockets are in a context of their own, which ends before the daemon's.
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
            self.service,
            data_port=0,
            max_tokens=CAPACITY,
            device="cpu",
            shared_folder=run_dir,
        )
        self.serving = asyncio.create_task(self.control.run())
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
        )

    async def compute(self, welcome: Welcome, num_tokens: int = 1) -> Reply | ProtocolError:
        """One request over the data socket."""
        hidden: F32Array = np.ones((num_tokens, SHAPE.hidden_size), np.float32)
        batch = batch_of(num_tokens, {(0, 1): 1.0}, hidden=hidden)
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
                deadline_s=PATIENCE_S,
                generation=welcome.generation,
                payload=payload,
            )
            await data.send_multipart([bytes(frame) for frame in frames])
            answer = await asyncio.wait_for(data.recv_multipart(), PATIENCE_S)
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(service_module, "_POLL_S", 0.01)
    monkeypatch.setattr(control_module, "_PROGRESS_S", 0.01)
    logging.getLogger("dflash_daemon").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dflash_daemon").setLevel(logging.NOTSET)


@pytest_asyncio.fixture
async def daemon(model: Path, run_dir: Path) -> AsyncIterator[Daemon]:
    with ExitStack() as undo:
        async with AsyncExitStack() as stopping:
            daemon = Daemon(undo, model, run_dir)
            stopping.push_async_callback(daemon.stop)
            yield daemon


async def test_a_parent_with_the_same_model_is_welcomed_with_what_it_needs(daemon: Daemon) -> None:
    welcome = await daemon.parent().hello(max_tokens=7)
    assert welcome.version == max(PROTOCOL_VERSIONS)
    assert welcome.model_identity == daemon.host.identity
    assert welcome.placement_fingerprint == OWNED.fingerprint
    assert welcome.numeric_class == daemon.backend.numeric_class
    assert (welcome.device, welcome.data_port) == ("cpu", 0)
    assert welcome.max_tokens == 7
    assert welcome.free_memory_bytes > 0
    assert welcome.pairs_per_second > 0.0
    assert len(bytes.fromhex(welcome.link_id)) == 8
    assert isinstance(await daemon.compute(welcome, 7), Reply)
    assert isinstance(await daemon.compute(welcome, 8), ProtocolError)
    assert 0 <= welcome.generation < 1 << 32
    assert welcome.generation != (await daemon.parent().hello()).generation


@pytest.mark.parametrize(
    ("wished", "granted"),
    [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f64", "f32"), ("int8", "f32")],
)
async def test_a_payload_type_is_granted_if_it_is_known(
    daemon: Daemon, wished: str, granted: str
) -> None:
    welcome = await daemon.parent().hello(payload=wished)
    assert welcome.payload == granted
    answer = await daemon.compute(welcome)
    assert isinstance(answer, Reply)
    exact = await daemon.compute(await daemon.parent().hello())
    assert isinstance(exact, Reply)
    np.testing.assert_allclose(answer.sums, exact.sums, rtol=0.02, atol=1e-5)
    assert (answer.sums.tobytes() == exact.sums.tobytes()) == (granted == "f32")


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (CAPACITY, CAPACITY), (1 << 61, 16)])
async def test_capacity_is_the_smaller_of_both_sides(
    daemon: Daemon, asked: int, given: int
) -> None:
    assert (await daemon.parent().hello(max_tokens=asked)).max_tokens == given


async def test_another_model_is_refused_naming_both(daemon: Daemon) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(model_identity="f00dfeed" * 8)
    assert refused.code == "model"
    assert daemon.host.identity[:16] in refused.reason
    assert "f00dfeedf00dfeed" in refused.reason
    assert "random qwen3moe" in refused.reason
    await parent.assert_welcome()


async def test_another_reading_of_the_experts_is_refused_naming_both(daemon: Daemon) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(moe_digest="f00dfeed" * 8)
    assert refused.code == "spec"
    assert daemon.host.spec.moe.digest[:16] in refused.reason
    assert "f00dfeedf00dfeed" in refused.reason
    await parent.assert_welcome()


@pytest.mark.parametrize("versions", [(), (99,), tuple(range(3, 60))])
async def test_versions_without_a_common_one_are_refused(
    daemon: Daemon, versions: tuple[int, ...]
) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(versions=versions)
    assert refused.code == "version"
    assert str(PROTOCOL_VERSIONS) in refused.reason
    assert (await parent.hello(versions=(1, *PROTOCOL_VERSIONS, 99))).version == 2


async def test_a_placement_that_does_not_match_its_fingerprint_is_refused(daemon: Daemon) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(placement_fingerprint=OTHER.fingerprint)
    assert refused.code == "malformed"
    assert "does not match its fingerprint" in refused.reason
    assert daemon.host.owned is None, "nothing was loaded"
    await parent.assert_welcome()


@pytest.mark.parametrize("lists", [{7: [0]}, {0: [SHAPE.num_experts]}, {0: [1, 1]}])
async def test_a_placement_of_experts_that_do_not_exist_is_refused(
    daemon: Daemon, lists: dict[int, list[int]]
) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(OwnedExperts.from_lists(lists))
    assert "placement: layer" in refused.reason
    await parent.assert_welcome()


async def test_another_placement_is_refused_once_one_is_loaded(daemon: Daemon) -> None:
    parent = daemon.parent()
    await parent.hello()
    refused = await parent.refused_hello(OTHER)
    assert refused.code == "placement"
    assert OWNED.fingerprint[:16] in refused.reason
    assert OTHER.fingerprint[:16] in refused.reason
    await parent.assert_welcome()


async def test_only_one_of_two_placements_asked_for_at_once_is_loaded(daemon: Daemon) -> None:
    parents = [daemon.parent(), daemon.parent()]
    daemon.backend.gate.clear()
    for parent, owned in zip(parents, (OWNED, OTHER), strict=True):
        await parent.say_hello(owned)
        await parent.expect(Progress)
    daemon.backend.gate.set()
    answers = []
    for parent in parents:
        while isinstance(message := await parent.hear(), Progress):
            pass
        answers.append(message)
    kinds = sorted(type(answer).__name__ for answer in answers)
    assert kinds == ["Refused", "Welcome"]


async def test_the_same_placement_is_welcomed_again_without_loading(daemon: Daemon) -> None:
    first = await daemon.parent().hello()
    banks = daemon.host.banks
    daemon.backend.failures.append(RuntimeError("loaded twice"))
    second = await daemon.parent().assert_welcome()
    assert daemon.host.banks is banks
    assert second.link_id != first.link_id


async def test_an_owner_of_nothing_is_welcome(daemon: Daemon) -> None:
    parent = daemon.parent()
    welcome = await parent.hello(OwnedExperts.from_lists({}))
    assert welcome.pairs_per_second > 0.0
    answer = await daemon.compute(welcome)
    assert isinstance(answer, ProtocolError)
    assert answer.code == "not_owned"


async def test_every_expert_of_the_model_can_be_asked_for(daemon: Daemon) -> None:
    welcome = await daemon.parent().hello(every_expert(daemon.host.spec.moe))
    assert isinstance(await daemon.compute(welcome), Reply)


async def test_two_parents_have_links_of_their_own(daemon: Daemon) -> None:
    parents = [daemon.parent(), daemon.parent()]
    welcomes = [await parent.assert_welcome() for parent in parents]
    links = [welcome.link_id for welcome in welcomes]
    assert len(set(links)) == 2
    await parents[0].say(encode_header(Bye(links[0])))
    assert not (await parents[0].ping(links[0])).known
    assert (await parents[1].ping(links[1])).known
    forgotten = await daemon.compute(replace(welcomes[0], generation=0))
    assert isinstance(forgotten, ProtocolError)
    assert forgotten.code == "unknown_link"
    assert isinstance(await daemon.compute(welcomes[1]), Reply)


async def test_pings_say_whether_the_link_is_known(daemon: Daemon) -> None:
    parent = daemon.parent()
    assert not (await parent.ping("ab" * 8, 41)).known
    assert not (await parent.ping("", 42)).known
    welcome = await parent.hello()
    pong = await parent.ping(welcome.link_id, 43)
    assert pong.known
    assert pong.busy_s == 0.0


async def test_a_goodbye_to_an_unknown_link_is_nothing(daemon: Daemon) -> None:
    parent = daemon.parent()
    await parent.say(encode_header(Bye("ab" * 8)))
    await parent.assert_welcome()


GOOD_HELLO = encode_header(Hello(PROTOCOL_VERSIONS, "m", "d", "p", "c", 1))


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "malformed"),
        ([b"garbage"], "malformed"),
        ([b"", b"", b""], "malformed"),
        ([b"\x81\xa4type\xa3odd"], "unknown_type"),
        ([b"\xff" * 16_384], "malformed"),
        ([GOOD_HELLO], "malformed"),
        ([GOOD_HELLO, b"", b""], "malformed"),
        ([encode_header(Pong(1, True, 0.0))], "malformed"),
        ([encode_header(Refused("no", "no"))], "malformed"),
        ([encode_header(ComputeBatch(1, 1, 1, 1, 0)), b""], "malformed"),
        ([b"x"] * 1000, "malformed"),
    ],
)
async def test_garbage_is_refused_with_a_code_and_a_good_hello_is_welcomed(
    daemon: Daemon, frames: list[bytes], code: str
) -> None:
    parent = daemon.parent()
    await parent.say(*frames)
    refused = await parent.expect(Refused)
    assert refused.code == code
    assert len(refused.reason.splitlines()) == 1
    await parent.assert_welcome()


async def test_a_frame_larger_than_any_placement_costs_its_sender_the_connection_only(
    daemon: Daemon,
) -> None:
    good, bad = daemon.parent(), daemon.parent()
    await good.assert_welcome()
    await bad.say(GOOD_HELLO, bytes(1 << 20))
    await good.assert_welcome()


async def test_only_refusals_come_out_of_mutated_hellos(daemon: Daemon) -> None:
    source = random.Random(7)
    parent = daemon.parent()
    await parent.assert_welcome()
    good = [encode_header(daemon.good_hello(OWNED)), OWNED.canonical_bytes]
    for _ in range(300):
        frames = [bytearray(frame) for frame in good]
        frame = source.choice(frames)
        for _ in range(source.randint(1, 3)):
            place = source.randrange(len(frame))
            if source.random() < 0.5:
                frame[place] ^= 1 << source.randrange(8)
            else:
                del frame[place : place + source.randint(0, 5)]
        await parent.say(*map(bytes, frames))
        assert isinstance(await parent.hear(), Refused | Welcome)
    await daemon.parent().assert_welcome()


async def test_a_loading_daemon_reports_progress_and_answers_others(daemon: Daemon) -> None:
    loading, other = daemon.parent(), daemon.parent()
    daemon.backend.gate.clear()
    await loading.say_hello()
    stages = [(await loading.expect(Progress)).stage for _ in range(3)]
    assert set(stages) <= {"compile", "load"}
    assert not (await other.ping("ab" * 8)).known
    daemon.backend.gate.set()
    await loading.expect(Welcome, skipping=(Progress,))


async def test_a_second_hello_while_the_first_is_answered_is_refused_as_busy(
    daemon: Daemon,
) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello()
    await parent.say_hello()
    assert (await parent.expect(Refused, skipping=(Progress,))).code == "busy"
    daemon.backend.gate.set()
    await parent.expect(Welcome, skipping=(Progress,))


async def test_a_failed_load_is_refused_with_its_reason_and_can_be_repeated(
    daemon: Daemon,
) -> None:
    parent = daemon.parent()
    daemon.backend.failures.append(RuntimeError("out of memory"))
    refused = await parent.refused_hello()
    assert refused.code == "internal"
    assert "out of memory" in refused.reason
    assert daemon.host.owned is None
    await parent.assert_welcome()


async def test_a_reason_that_is_not_valid_text_is_still_told(daemon: Daemon) -> None:
    parent = daemon.parent()
    path = os.fsdecode(b"/models/\xff.gguf")
    daemon.backend.failures.append(OSError(f"cannot read {path}"))
    refused = await parent.refused_hello()
    assert "cannot read /models/?.gguf" in refused.reason
    await parent.assert_welcome()


async def test_more_parents_than_the_limit_are_told_so_until_one_leaves(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "_MAX_LINKS", 2)
    parent = daemon.parent()
    first, _ = await parent.hello(), await parent.hello()
    refused = await parent.refused_hello()
    assert refused.code == "busy"
    assert "2 parents are connected already" in refused.reason
    await parent.say(encode_header(Bye(first.link_id)))
    await parent.assert_welcome()


async def test_parents_that_load_at_the_same_time_share_the_limit(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "_MAX_LINKS", 2)
    parents = [daemon.parent() for _ in range(2)]
    late = daemon.parent()
    daemon.backend.gate.clear()
    for parent in parents:
        await parent.say_hello()
        await parent.expect(Progress)
    monkeypatch.setattr(control_module, "_MAX_LINKS", 1)
    daemon.backend.gate.set()
    answers = []
    for parent in parents:
        while isinstance(message := await parent.hear(), Progress):
            pass
        answers.append(message)
    assert sorted(type(answer).__name__ for answer in answers) == ["Refused", "Welcome"]
    assert (await late.refused_hello()).code == "busy"


async def test_a_cancelled_load_is_given_up_after_the_present_layer(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello()
    while (await parent.expect(Progress)).stage != "load":
        pass
    daemon.host.cancel_loading()
    daemon.backend.gate.set()
    refused = await parent.expect(Refused, skipping=(Progress,))
    assert "told to stop while loading" in refused.reason
    assert daemon.host.owned is None


async def test_a_parent_that_was_silent_for_long_makes_room(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = daemon.parent()
    silent = await parent.hello()
    monkeypatch.setattr(control_module, "_LINK_SILENCE_S", -1.0)
    await parent.hello()
    assert not (await parent.ping(silent.link_id)).known


async def test_a_daemon_that_hangs_takes_no_new_parents(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = daemon.parent()
    await parent.hello()
    with monkeypatch.context() as hanging:
        hanging.setattr(ComputeService, "busy_s", property(lambda self: 11.0))
        refused = await parent.refused_hello()
        assert (await parent.ping("ab" * 8)).busy_s == 11.0
    assert refused.code == "busy"
    assert "computing one request for 11 s already" in refused.reason
    await parent.assert_welcome()


async def test_stopping_while_loading_ends_in_order(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello()
    await parent.expect(Progress)
    await daemon.stop()
    daemon.backend.gate.set()


async def test_a_parent_of_version_1_is_welcomed_and_served_by_global_ids(daemon: Daemon) -> None:
    """What it is told is what a parent of ours is, but for the rounding to float32."""
    hello = daemon.good_hello(OWNED)
    old_hello = {
        name: getattr(hello, name)
        for name in (
            "model_identity",
            "moe_digest",
            "placement_fingerprint",
            "numeric_class",
            "max_tokens",
        )
    }
    hidden: F32Array = np.ones((2, SHAPE.hidden_size), np.float32)
    # Local expert 1 of layer 0 is global expert 1, and local expert 0 is global expert 3.
    ids, weights = np.array([[1], [3]], np.int32), np.array([[1.0], [0.5]], np.float32)
    strange = np.array([[1], [0]], np.int32)

    def play() -> tuple[F32Array | str, F32Array | str, F32Array | str]:
        endpoint = parse_endpoint(daemon.address)
        with Version1Parent(endpoint, old_hello, OWNED.canonical_bytes) as parent:
            return (
                parent.compute(0, hidden, strange, weights),
                parent.compute(0, hidden[:, 1:], ids, weights),
                parent.compute(0, hidden, ids, weights),
            )

    not_owned, malformed, sums = await asyncio.to_thread(play)
    assert not_owned == "an expert that is not here"
    assert isinstance(malformed, str)
    assert isinstance(sums, np.ndarray)
    exact = await daemon.compute(await daemon.parent().hello())
    assert isinstance(exact, Reply)
    np.testing.assert_array_equal(sums[0], exact.sums[0].astype(np.float32))
    assert sums[1].any()
    await daemon.parent().assert_welcome()


# -- shared memory --------------------------------------------------------------------------------


PLAN = SharingPlan(SHAPE.hidden_size, SHAPE.num_experts_used, 1 << 20)


def offer_for(welcome: Welcome, run_dir: Path) -> Offer:
    assert welcome.can_share
    return make_offer(run_dir, welcome, PLAN)


async def test_a_link_computes_through_shared_memory(daemon: Daemon, run_dir: Path) -> None:
    parent = daemon.parent()
    welcome = await parent.hello()
    offer = offer_for(welcome, run_dir)
    await parent.say(encode_header(offer.message))
    segment = offer.accepted(await parent.expect(Attached))
    assert not list(run_dir.glob("ring-*"))  # both have it: its name is gone
    lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
    client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost")
    try:
        hidden: F32Array = np.ones((3, SHAPE.hidden_size), np.float32)
        batch = batch_of(3, {(0, 1): 1.0, (2, 0): 0.5}, hidden=hidden)
        for _ in range(3):
            sequence = client.submit(0, batch, deadline_s=PATIENCE_S)
            reply = await asyncio.to_thread(client.wait, sequence, deadline_s=PATIENCE_S)
            assert np.abs(reply.sums[0]).max() > 0
            assert not reply.sums[1].any()
        assert isinstance(await daemon.compute(welcome), Reply)  # the socket is served beside it
    finally:
        client.close()
        os.close(lost_fd)
    await parent.say(encode_header(Bye(welcome.link_id)))
    assert not (await parent.ping(welcome.link_id)).known


@pytest.mark.parametrize(
    "changes",
    [
        {"link_id": "00"},
        {"name": "ring-1-1-" + 32 * "0"},
        {"name": "../model.gguf"},
        {"name": ""},
        {"num_slots": 0},
        {"num_slots": 17},
        {"num_slots": 1 << 61},
        {"max_tokens": 0},
        {"max_tokens": CAPACITY + 1},
        {"max_pairs": 0},
        {"max_pairs": 1 << 61},
        {"nonce": ""},
        {"nonce": 32 * "0"},
        {"nonce": 32 * "é"},
    ],
)
async def test_memory_that_was_not_agreed_on_is_refused(
    daemon: Daemon, run_dir: Path, changes: dict[str, Any]
) -> None:
    parent = daemon.parent()
    welcome = await parent.hello()
    offer = offer_for(welcome, run_dir)
    try:
        await parent.say(encode_header(replace(offer.message, **changes)))
        await parent.expect(Refused)
    finally:
        offer.withdraw()
    await parent.assert_welcome()


async def test_an_answer_from_other_memory_is_not_believed(daemon: Daemon, run_dir: Path) -> None:
    parent = daemon.parent()
    welcome = await parent.hello()
    offer = offer_for(welcome, run_dir)
    try:
        await parent.say(encode_header(offer.message))
        answer = await parent.expect(Attached)
        for changed in ({"nonce": 32 * "0"}, {"nonce": "é"}, {"link_id": "00"}):
            with pytest.raises(OfferFailed, match="other memory"):
                offer.accepted(replace(answer, **changed))
    finally:
        offer.withdraw()


async def test_no_memory_is_offered_where_there_is_no_room(daemon: Daemon, run_dir: Path) -> None:
    welcome = await daemon.parent().hello()
    with pytest.raises(OfferFailed, match="cannot share memory"):
        make_offer(run_dir / "nowhere", welcome, PLAN)
