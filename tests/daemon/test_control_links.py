"""Kinds of links that a handshake leads to: shared memory, and parents of version 1."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import HostHidden, Pairs, RoutedBatch
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.ids import F32Array, Phase
from dflash_protocol.ring.layout import MOVED_FACTOR
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.wire.messages import Attached, Bye, Refused, Welcome, encode_header
from dflash_protocol.wire.transport import Reply
from dflash_runtime.experts.daemons.data_path import (
    OfferFailed,
    SegmentOffer,
    SharingPlan,
    make_offer,
)
from support.control_rig import CAPACITY, OWNED, SHAPE, TIMEOUT_S, Daemon, GateBackend
from support.host_mover import HostMover, MovedRows
from support.routed_batches import batch_of
from support.version1_peer import Version1Parent

pytestmark = pytest.mark.asyncio


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


PLAN = SharingPlan(SHAPE.hidden_size, SHAPE.num_experts_used, 1 << 20)


def offer_for(welcome: Welcome, run_dir: Path) -> SegmentOffer:
    assert welcome.can_share
    return make_offer(run_dir, welcome, PLAN)


async def test_a_link_computes_through_shared_memory(daemon: Daemon, run_dir: Path) -> None:
    parent = daemon.parent()
    welcome = await parent.hello()
    offer = offer_for(welcome, run_dir)
    await parent.say(encode_header(offer.message))
    segment = offer.accepted(await parent.expect(Attached)).segment
    assert not list(run_dir.glob("ring-*"))  # both have it: its name is gone
    lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
    client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost")
    try:
        hidden: F32Array = np.ones((3, SHAPE.hidden_size), np.float32)
        batch = batch_of(3, {(0, 1): 1.0, (2, 0): 0.5}, hidden=hidden)
        for _ in range(3):
            sequence = client.submit(0, batch, deadline_s=TIMEOUT_S)
            reply = await asyncio.to_thread(client.wait, sequence, deadline_s=TIMEOUT_S)
            assert np.abs(reply.sums[0]).max() > 0
            assert not reply.sums[1].any()
        assert isinstance(await daemon.compute(welcome), Reply)  # the socket is served beside it
    finally:
        client.close()
        os.close(lost_fd)
    await parent.say(encode_header(Bye(welcome.link_id)))
    assert not (await parent.ping(welcome.link_id)).known


async def test_devices_of_both_sides_move_what_is_sent(
    daemon: Daemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = HostMover(), HostMover()
    monkeypatch.setattr(GateBackend, "mover", theirs)
    parent = daemon.parent()
    welcome = await parent.hello()
    assert welcome.can_move
    offer = make_offer(run_dir, welcome, replace(PLAN, moves=True))
    assert offer.message.max_tokens == MOVED_FACTOR * CAPACITY
    await parent.say(encode_header(offer.message))
    memory = offer.accepted(await parent.expect(Attached))
    segment = memory.segment
    assert memory.moves
    assert theirs.num_open == 1
    segment.open_window(ours)
    lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
    client = SharedClient(segment, lost_fd=lost_fd, lost_reason=lambda: "lost")
    num_tokens = MOVED_FACTOR * CAPACITY
    tokens = np.arange(num_tokens, dtype=np.int32)
    hidden = np.random.default_rng(0).standard_normal((num_tokens, SHAPE.hidden_size), np.float32)
    try:
        found = []
        for rows in (MovedRows(hidden), HostHidden(hidden)):
            pairs = Pairs(tokens, tokens % 2, np.ones(num_tokens, np.float32))
            batch = RoutedBatch.group(Phase.PREFILL, rows, pairs)
            sequence = client.submit(0, batch, deadline_s=TIMEOUT_S)
            reply = await asyncio.to_thread(client.wait, sequence, deadline_s=TIMEOUT_S)
            assert reply.placed.is_on_device == rows.is_on_device
            found.append(reply.sums)
        assert found[0].tobytes() == found[1].tobytes()
        assert np.abs(found[0]).max() > 0
    finally:
        client.close()
        os.close(lost_fd)
    assert ours.num_open == 0
    await parent.say(encode_header(Bye(welcome.link_id)))
    assert not (await parent.ping(welcome.link_id)).known
    while theirs.num_open:  # the compute thread lets go when it looks next
        await asyncio.sleep(0.01)


async def test_a_device_that_cannot_see_the_memory_moves_nothing(
    daemon: Daemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = HostMover()
    monkeypatch.setattr(GateBackend, "mover", mover)
    parent = daemon.parent()
    welcome = await parent.hello()
    mover.has_failed = True
    offer = make_offer(run_dir, welcome, replace(PLAN, moves=True))
    await parent.say(encode_header(offer.message))
    memory = offer.accepted(await parent.expect(Attached))
    assert not memory.moves
    memory.segment.close()


async def test_nothing_is_moved_for_who_does_not_ask_or_rounds(
    daemon: Daemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (await daemon.parent().hello()).can_move
    mover = HostMover()
    monkeypatch.setattr(GateBackend, "mover", mover)
    assert not (await daemon.parent().hello(payload="bf16")).can_move
    parent = daemon.parent()
    offer = offer_for(await parent.hello(), run_dir)
    await parent.say(encode_header(offer.message))
    memory = offer.accepted(await parent.expect(Attached))
    assert not memory.moves
    assert not mover.num_open
    memory.segment.close()


class BrokenMail:
    """A device's mailbox that can be agreed on, and then not be served."""

    def num_bytes(self, moe: MoeSpec) -> int:
        del moe
        return 4096

    def serve(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")


async def test_a_mailbox_that_cannot_be_served_is_refused_and_the_daemon_goes_on(
    daemon: Daemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = HostMover()
    monkeypatch.setattr(GateBackend, "mover", mover)
    monkeypatch.setattr(GateBackend, "answering", BrokenMail())
    parent = daemon.parent()
    plan = replace(PLAN, moves=True, mail_bytes=4096)
    offer = make_offer(run_dir, await parent.hello(), plan)
    try:
        await parent.say(encode_header(offer.message))
        refused = await parent.expect(Refused)
    finally:
        offer.withdraw()
    assert refused.code == "transport"
    assert "can't start new thread" in refused.reason
    assert not mover.num_open
    await parent.assert_welcome()


@pytest.mark.parametrize(
    "changes",
    [
        {"link_id": "00"},
        {"moves": True, "max_tokens": MOVED_FACTOR * CAPACITY},
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
        for changed in (
            replace(answer, nonce=32 * "0"),
            replace(answer, nonce="é"),
            replace(answer, link_id="00"),
        ):
            with pytest.raises(OfferFailed, match="memory"):
                offer.accepted(changed)
    finally:
        offer.withdraw()


async def test_no_memory_is_offered_where_there_is_no_room(daemon: Daemon, run_dir: Path) -> None:
    welcome = await daemon.parent().hello()
    with pytest.raises(OfferFailed, match="nowhere"):
        make_offer(run_dir / "nowhere", welcome, PLAN)
