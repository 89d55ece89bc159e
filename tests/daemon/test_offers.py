"""What a daemon says of itself before a parent gives it experts."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NoReturn

import pytest

from dflash_daemon import offers as offers_module
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.wire.messages import (
    MEASURING,
    AskOffer,
    Offer,
    Ping,
    Pong,
    Progress,
    Refused,
    encode_header,
)
from dflash_runtime.experts.daemons.offers import check_offer
from support.control_rig import OWNED, Daemon, GateBackend, Parent

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def often(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "_PROGRESS_S", 0.01)


def question(daemon: Daemon, **changes: Any) -> AskOffer:
    moe_digest, identity = daemon.host.spec.moe.digest, daemon.host.identity
    return AskOffer(**({"model_identity": identity, "moe_digest": moe_digest} | changes))


async def offer_to(daemon: Daemon, parent: Parent) -> Offer:
    await parent.say(encode_header(question(daemon)))
    return await parent.expect(Offer, skipping=(Progress,))


async def test_a_parent_learns_of_memory_and_speed_before_anything_is_loaded(
    daemon: Daemon,
) -> None:
    offer = await offer_to(daemon, daemon.parent())
    spec = daemon.host.spec.moe
    check_offer(offer, spec, "cpu0")
    assert (offer.device, offer.numeric_class) == ("cpu", daemon.backend.numeric_class)
    assert 0 < offer.free_bytes <= offer.total_bytes
    assert (offer.held_bytes, offer.can_mail) == (0, False)
    assert offer.layer_ids == (0,)
    assert offer.expert_bytes == (spec.layers[0].expert_bytes,)
    assert min(*offer.one_s, *offer.used_s, *offer.chunk_pairs_per_s) > 0.0
    assert daemon.host.store.num_experts == daemon.service.num_links == 0
    assert daemon.backend.dropped == list(reversed(daemon.backend.loaded)), "all is given back"
    await daemon.parent().assert_welcome()


async def test_the_question_is_answered_before_what_comes_behind_it(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say(encode_header(question(daemon)))
    await parent.say(encode_header(Ping(3, "")))
    assert (await parent.expect(Progress)).stage == MEASURING
    assert not (await parent.expect(Pong, skipping=(Progress,))).known
    daemon.backend.gate.set()
    await parent.expect(Offer, skipping=(Progress,))


async def test_speed_is_measured_once_whoever_asks(daemon: Daemon) -> None:
    first, *others = await asyncio.gather(*(offer_to(daemon, daemon.parent()) for _ in range(8)))
    num_loaded = len(daemon.backend.loaded)
    assert num_loaded == daemon.host.spec.num_layers
    assert {each.used_s for each in others} == {first.used_s}
    await daemon.parent().hello()
    assert (await offer_to(daemon, daemon.parent())).one_s == first.one_s
    assert len(daemon.backend.loaded) == num_loaded + len(OWNED.by_layer)


async def test_experts_of_other_parents_are_told_and_stay(daemon: Daemon) -> None:
    welcome = await daemon.parent().hello()
    before = await daemon.sums(welcome, 1)
    offer = await offer_to(daemon, daemon.parent())
    assert offer.held_bytes == OWNED.num_experts * offer.expert_bytes[0]
    held = {(layer_id, each) for layer_id, ids in OWNED.by_layer.items() for each in ids.tolist()}
    dropped = {(layer_id, each) for layer_id, ids in daemon.backend.dropped for each in ids}
    assert not held & dropped
    assert (await daemon.sums(welcome, 1)).tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_identity": "another"}, "model"),
        ({"moe_digest": "other"}, "spec"),
        ({"file_digest": "bb" * 32}, "weights"),
    ],
)
async def test_a_parent_with_another_model_is_told_nothing(
    daemon: Daemon, changes: dict[str, str], code: str
) -> None:
    daemon.host._file.watch.keep_full_digest("aa" * 32)
    parent = daemon.parent()
    await parent.say(encode_header(question(daemon, **changes)))
    assert (await parent.expect(Refused)).code == code
    assert daemon.backend.loaded == []
    await offer_to(daemon, parent)


async def test_a_second_question_waits_for_the_answer_to_the_first(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    for _ in range(2):
        await parent.say(encode_header(question(daemon)))
    assert (await parent.expect(Refused, skipping=(Progress,))).code == "busy"
    daemon.backend.gate.set()
    await parent.expect(Offer, skipping=(Progress,))


async def test_what_fails_refuses_one_parent(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("the driver does not answer")

    parent = daemon.parent()
    with monkeypatch.context() as failing:
        failing.setattr(GateBackend, "expert_memory", fail)
        await parent.say(encode_header(question(daemon)))
        refused = await parent.expect(Refused, skipping=(Progress,))
    assert refused.code == "internal"
    assert "the driver does not answer" in refused.reason
    await offer_to(daemon, parent)


async def test_without_memory_for_a_trial_the_speed_is_told_later(daemon: Daemon) -> None:
    lack = DeviceOutOfMemory("cuda:0", num_bytes=2, free_bytes=1, total_bytes=1, what="experts")
    daemon.backend.failures.append(lack)
    parent = daemon.parent()
    offer = await offer_to(daemon, parent)
    assert offer.used_s == offer.chunk_pairs_per_s == (0.0,)
    check_offer(offer, daemon.host.spec.moe, "cpu0")
    assert min((await offer_to(daemon, parent)).used_s) > 0.0


async def test_only_refusals_come_out_of_mutated_questions(daemon: Daemon) -> None:
    source = random.Random(7)
    parent = daemon.parent()
    await offer_to(daemon, parent)
    good = encode_header(question(daemon))
    for _ in range(200):
        frame = bytearray(good)
        for _ in range(source.randint(1, 4)):
            frame[source.randrange(len(frame))] = source.randrange(256)
        await parent.say(bytes(frame[: source.randint(1, len(frame))]))
    await parent.say(encode_header(Ping(77, "")))
    while not isinstance(message := await parent.hear(), Pong):
        assert isinstance(message, (Refused, Progress, Offer)), message
    await daemon.parent().assert_welcome()


async def test_a_daemon_stops_while_it_measures(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say(encode_header(question(daemon)))
    await parent.expect(Progress)
    await daemon.stop()
    daemon.backend.gate.set()


async def test_a_cancelled_trial_gives_back_what_it_loaded(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say(encode_header(question(daemon)))
    await parent.expect(Progress)
    daemon.host.cancel_loading()
    daemon.backend.gate.set()
    assert (await parent.expect(Refused, skipping=(Progress,))).code == "stopping"
    assert daemon.backend.dropped == list(reversed(daemon.backend.loaded))
