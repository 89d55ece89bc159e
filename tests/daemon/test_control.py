"""The control socket: who is welcomed, who is refused and why, over real sockets."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from dflash_protocol.errors import ProtocolError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    COMPARING,
    PROTOCOL_VERSIONS,
    Bye,
    ComputeBatch,
    Hello,
    Pong,
    Progress,
    Refused,
    Welcome,
    encode_header,
)
from dflash_protocol.wire.transport import Reply
from support.control_rig import CAPACITY, OTHER, OWNED, SHAPE, Daemon

pytestmark = pytest.mark.asyncio


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
    assert "fingerprint" in refused.reason
    assert daemon.host.store.num_experts == 0, "nothing was loaded"
    await parent.assert_welcome()


@pytest.mark.parametrize("lists", [{7: [0]}, {0: [SHAPE.num_experts]}, {0: [1, 1]}])
async def test_a_placement_of_experts_that_do_not_exist_is_refused(
    daemon: Daemon, lists: dict[int, list[int]]
) -> None:
    parent = daemon.parent()
    refused = await parent.refused_hello(OwnedExperts.from_lists(lists))
    assert "layer" in refused.reason
    await parent.assert_welcome()


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


async def test_pings_of_a_link_tell_what_the_daemon_has_counted(daemon: Daemon) -> None:
    parent = daemon.parent()
    welcome = await parent.hello()
    pong = await parent.ping(welcome.link_id)
    assert (pong.num_late, pong.num_stale, pong.num_checksum_failures) == (0, 0, 0)
    for number in (1, 2):
        stale = await daemon.compute(welcome, generation=welcome.generation ^ 1)
        assert isinstance(stale, ProtocolError)
        assert (await parent.ping(welcome.link_id)).num_stale == number
    daemon.service.num_late = 3
    daemon.service.counters.checksum_failures = 4
    pong = await daemon.parent().ping(welcome.link_id)
    assert (pong.num_late, pong.num_stale, pong.num_checksum_failures) == (3, 2, 4)
    older = await parent.hello(versions=(1,))
    assert await parent.ping(older.link_id, 5) == Pong(5, True, 0.0)
    assert await parent.ping("ab" * 8, 6) == Pong(6, False, 0.0)


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
        while isinstance(answer := await parent.hear(), Progress):  # the stamp is another file's
            assert answer.stage == COMPARING
        assert isinstance(answer, Refused | Welcome)
    await daemon.parent().assert_welcome()
