"""Handshakes that load: what is loaded when, what is shared, and who has to wait."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import NoReturn

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_daemon import control as control_module
from dflash_daemon.service import ComputeService
from dflash_protocol.errors import DeviceOutOfMemory, ProtocolError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import Bye, Progress, Refused, Welcome, encode_header
from dflash_protocol.wire.transport import Reply
from dflash_runtime.experts.store import HeldPlacement, every_expert
from support.control_rig import OTHER, OWNED, SHAPE, TIMEOUT_S, Daemon, GateBackend
from support.random_models import write_qwen3moe

pytestmark = pytest.mark.asyncio


async def test_another_placement_loads_and_drops_what_makes_the_difference(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dflash_daemon")
    backend, parent = daemon.backend, daemon.parent()
    first = await parent.hello()
    expected = await daemon.sums(first, OWNED.by_layer[0].tolist().index(1))
    assert (backend.loaded, backend.dropped) == ([(0, [3, 1]), (1, [0])], [])
    await parent.say(encode_header(Bye(first.link_id)))
    second = await parent.hello(OTHER)
    assert second.placement_fingerprint == OTHER.fingerprint
    assert backend.dropped == [(0, [3])]
    assert backend.loaded[2:] == [(0, [1, 2])], "the bank of layer 1 serves on"
    assert daemon.host.store.num_experts == 3
    assert [record.args for record in caplog.records] == [
        (OWNED.fingerprint[:16], 0, 3, 0),
        (OTHER.fingerprint[:16], 2, 1, 1),
    ]
    found = await daemon.sums(second, OTHER.by_layer[0].tolist().index(1))
    np.testing.assert_array_equal(found, expected)


async def test_parents_with_different_placements_are_served_at_the_same_time(
    daemon: Daemon,
) -> None:
    """Each by its own local ids; nothing that any of them needs is dropped."""
    first = await daemon.parent().hello()
    second = await daemon.parent().hello(OTHER)
    everything = await daemon.parent().hello(every_expert(daemon.host.spec.moe))
    assert daemon.backend.dropped == []
    for global_expert_id, shared in ((1, (first, second)), (3, (first,)), (2, (second,))):
        expected = await daemon.sums(everything, global_expert_id)
        assert expected.any()
        for welcome in shared:
            owned = OWNED if welcome is first else OTHER
            local_expert_id = owned.by_layer[0].tolist().index(global_expert_id)
            np.testing.assert_array_equal(await daemon.sums(welcome, local_expert_id), expected)


async def test_what_no_link_needs_any_more_goes_when_another_placement_comes(
    daemon: Daemon,
) -> None:
    parent, backend = daemon.parent(), daemon.backend
    first = await parent.hello()
    second = await parent.hello(OTHER)
    for welcome in (first, second):
        await parent.say(encode_header(Bye(welcome.link_id)))
    assert not (await parent.ping(second.link_id)).known
    assert backend.dropped == [], "whoever comes back is served at once"
    num_loaded = len(backend.loaded)
    third = await parent.hello()
    assert len(backend.loaded) == num_loaded
    await parent.hello(OwnedExperts.from_lists({1: [0, 2]}))
    assert backend.dropped == [(0, [2])], "what the third link still uses is kept"
    await parent.say(encode_header(Bye(third.link_id)))
    await parent.hello(OwnedExperts.from_lists({1: [4]}))
    assert backend.dropped[1:] == [(0, [1, 3])]
    assert daemon.host.store.num_experts == 3
    await daemon.parent().assert_welcome()


async def test_a_link_that_was_not_to_be_holds_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello()
    await parent.expect(Progress)
    with monkeypatch.context() as full:
        full.setattr(control_module, "_MAX_LINKS", 0)
        daemon.backend.gate.set()
        assert (await parent.expect(Refused, skipping=(Progress,))).code == "busy"
    await parent.hello(OTHER)
    assert daemon.backend.dropped == [(0, [3])]


@pytest.mark.parametrize("call", ["free_memory_bytes", "numeric_class"])
async def test_a_welcome_that_cannot_be_made_holds_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever fails once the experts are loaded: the parent is told, and they are given back."""

    def fail(self: GateBackend) -> NoReturn:
        raise RuntimeError("the driver does not answer")

    parent = daemon.parent()
    with monkeypatch.context() as failing:
        failing.setattr(GateBackend, call, fail if call == "free_memory_bytes" else property(fail))
        refused = await parent.refused_hello()
    assert refused.code == "internal"
    assert "the driver does not answer" in refused.reason
    assert daemon.service.num_links == 0
    await parent.hello(OTHER)
    assert daemon.backend.dropped == [(0, [3])]


async def test_what_is_loaded_after_the_end_is_held_for_nobody(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, released = daemon.parent(), asyncio.Event()
    release = daemon.host.release

    def note(held: HeldPlacement) -> None:
        release(held)
        released.set()

    monkeypatch.setattr(daemon.host, "release", note)
    daemon.backend.gate.clear()
    await parent.say_hello()
    await parent.expect(Progress)
    await daemon.stop()
    daemon.backend.gate.set()
    await asyncio.wait_for(released.wait(), TIMEOUT_S)
    await asyncio.to_thread(daemon.host.load, OTHER)
    assert daemon.backend.dropped == [(0, [3])]


async def test_what_a_daemon_was_started_with_stays_whatever_parents_ask_for(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """A parent is served from it; what others ask for besides comes and goes beside it."""
    caplog.set_level(logging.INFO, logger="dflash_daemon")
    parent, backend = daemon.parent(), daemon.backend
    await asyncio.to_thread(daemon.host.keep, OWNED)
    num_loaded = len(backend.loaded)
    first = await parent.hello()
    assert len(backend.loaded) == num_loaded
    expected = await daemon.sums(first, OWNED.by_layer[0].tolist().index(1))
    await parent.say(encode_header(Bye(first.link_id)))
    third = OwnedExperts.from_lists({0: [1], 1: [4]})
    for owned, others in ((OTHER, []), (third, [(0, [2])])):
        welcome = await parent.hello(owned)
        found = await daemon.sums(welcome, owned.by_layer[0].tolist().index(1))
        np.testing.assert_array_equal(found, expected)
        assert backend.dropped == others, "nothing of its own placement"
        await parent.say(encode_header(Bye(welcome.link_id)))
    assert daemon.host.store.holds(OWNED)
    assert [record.args for record in caplog.records] == [
        (OWNED.fingerprint[:16], 0, 3, 0),
        (OTHER.fingerprint[:16], 2, 1, 0),
        (third.fingerprint[:16], 1, 1, 1),
    ]


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_parent_for_whose_experts_there_is_no_room_is_told_what_helps(
    daemon: Daemon, is_kept: bool
) -> None:
    if is_kept:
        await asyncio.to_thread(daemon.host.keep, OWNED)
    daemon.backend.failures.append(
        DeviceOutOfMemory("cuda:0", num_bytes=2000, free_bytes=1000, total_bytes=9000)
    )
    refused = await daemon.parent().refused_hello(OTHER)
    assert refused.code == "memory"
    for field in ("cuda:0", " 2,000 ", " 1,000 ", " 9,000 "):
        assert field in refused.reason
    assert ("--placement" in refused.reason) == is_kept
    await daemon.parent().assert_welcome()


async def test_two_placements_asked_for_at_once_are_loaded_one_after_the_other(
    daemon: Daemon,
) -> None:
    parents = [daemon.parent(), daemon.parent()]
    daemon.backend.gate.clear()
    for parent, owned in zip(parents, (OWNED, OTHER), strict=True):
        await parent.say_hello(owned)
        await parent.expect(Progress)
    daemon.backend.gate.set()
    welcomes = [await parent.expect(Welcome, skipping=(Progress,)) for parent in parents]
    sums = await daemon.sums(welcomes[0], 1)
    np.testing.assert_array_equal(sums, await daemon.sums(welcomes[1], 0))
    assert daemon.host.store.num_experts == 4


async def test_the_same_placement_is_welcomed_again_without_loading(daemon: Daemon) -> None:
    first = await daemon.parent().hello()
    daemon.backend.failures.append(RuntimeError("loaded twice"))
    second = await daemon.parent().assert_welcome()
    assert second.link_id != first.link_id
    assert second.pairs_per_second == first.pairs_per_second


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
    assert daemon.host.store.num_experts == 0
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
    assert "2 parents" in refused.reason
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
    assert "stop" in refused.reason
    assert not daemon.host.store.holds(OWNED)


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
    assert " 11 s" in refused.reason
    await parent.assert_welcome()


async def test_stopping_while_loading_ends_in_order(daemon: Daemon) -> None:
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello()
    await parent.expect(Progress)
    await daemon.stop()
    daemon.backend.gate.set()


# -- the model's file ------------------------------------------------------------------------------


async def test_a_file_that_was_replaced_serves_on_as_what_it_was(own_copy: Daemon) -> None:
    daemon, path = own_copy, own_copy.host.model_path
    before = await daemon.sums(await daemon.parent().hello(), 1)
    other = write_qwen3moe(path.with_name("other.gguf"), SHAPE, seed=99)
    other.replace(path)
    with GgufFile.open(path) as file:
        new_identity = file.identity()
    assert new_identity != daemon.host.identity
    refused = await daemon.parent().refused_hello(model_identity=new_identity)
    assert refused.code == "model"
    assert "file was replaced" in refused.reason
    # Whoever wants what it has gets it, from the file that it has open.
    welcome = await daemon.parent().assert_welcome()
    np.testing.assert_array_equal(await daemon.sums(welcome, 1), before)
    everything = await daemon.parent().hello(every_expert(daemon.host.spec.moe))
    np.testing.assert_array_equal(await daemon.sums(everything, 1), before)


async def test_a_file_that_was_written_to_is_not_served_as_what_it_was(own_copy: Daemon) -> None:
    daemon, path = own_copy, own_copy.host.model_path
    await daemon.parent().hello()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    refused = await daemon.parent().refused_hello()
    assert refused.code == "file"
    assert "written" in refused.reason
