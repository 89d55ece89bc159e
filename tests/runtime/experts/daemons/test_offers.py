"""Links whose experts are given later: the daemon is asked first, and then told."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused, ProtocolError
from dflash_protocol.wire.messages import (
    MEASURING,
    AskOffer,
    Hello,
    Offer,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
)
from dflash_runtime.experts.daemons.link_task import Timeouts
from dflash_runtime.experts.daemons.offers import check_offer
from support.examples import examples
from support.hostile_texts import HOSTILE, assert_harmless
from support.routed_batches import moe_layer
from support.scripted_daemon import (
    IDLE_MACHINE,
    LINK_ID,
    TIMEOUT_S,
    ScriptedDaemon,
    good_offer,
)
from support.supervised import GREETING, OWNED, Parent, thread_names

MOE = MoeSpec((moe_layer(layer_id=0), moe_layer(layer_id=2)))
OFFER = good_offer(MOE)
HURRIED = Timeouts(0.2, TIMEOUT_S)


def parent_of(undo: ExitStack, *addresses: str, **options: Any) -> Parent:
    """One whose links have no experts yet."""
    return Parent(undo, *addresses, greeting=replace(GREETING, moe=MOE), owned=None, **options)


def tell(daemon: ScriptedDaemon, offer: Offer = OFFER) -> None:
    """Answer a question as the daemon does."""
    daemon.expect(AskOffer)
    daemon.say(Progress(MEASURING, 0, 1))
    daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    daemon.say(Progress(MEASURING, 1, 2), offer)


def give(parent: Parent, daemon: ScriptedDaemon) -> None:
    start = parent.start()
    parent.link.give(OWNED)
    assert daemon.let_in().placement_fingerprint == OWNED.fingerprint
    start.result(TIMEOUT_S)
    assert parent.link.session is not None


def test_experts_are_given_after_the_offer(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent = parent_of(undo, daemon.endpoint.address)
    asking = parent.ask()
    question = daemon.expect(AskOffer)
    assert question == AskOffer(
        GREETING.model_identity, GREETING.moe_digest, numeric_class=GREETING.numeric_class
    )
    assert not asking.done()
    daemon.say(OFFER)
    assert not asking.done()
    daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    asking.result(TIMEOUT_S)
    assert parent.link.offer == OFFER
    assert daemon.is_silent(0.05), "there is nothing to be said before experts are given"
    assert parent.link.session is None
    give(parent, daemon)
    assert parent.losses.empty()


def test_the_offers_of_all_daemons_are_awaited(undo: ExitStack, run_dir: Path) -> None:
    daemons = [undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/{name}")) for name in ("a", "b")]
    parent = parent_of(undo, *(daemon.endpoint.address for daemon in daemons))
    asking = parent.ask()
    tell(daemons[1], replace(OFFER, num_threads=7))
    assert not asking.done()
    tell(daemons[0])
    asking.result(TIMEOUT_S)
    offers = [link.offer for link in parent.links]
    assert [offer and offer.num_threads for offer in offers] == [2, 7]


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_older_daemon_cannot_say_and_is_used(
    undo: ExitStack, daemon: ScriptedDaemon, is_refused: bool
) -> None:
    """It refuses what it does not know, or answers only what stands behind it."""
    parent = parent_of(undo, daemon.endpoint.address)
    asking = parent.ask()
    daemon.expect(AskOffer)
    if is_refused:
        daemon.say(Refused("unknown_type", "unknown message type 'ask'"))
    daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    asking.result(TIMEOUT_S)
    assert parent.link.offer is None
    give(parent, daemon)


def test_a_daemon_that_comes_back_is_not_asked_again(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = parent_of(undo, address)
    asking = parent.ask()
    tell(daemon)
    asking.result(TIMEOUT_S)
    give(parent, daemon)
    daemon.close()
    parent.next_loss()
    with ScriptedDaemon(address) as again:
        again.expect(Hello)
    assert parent.link.offer == OFFER


def test_a_daemon_that_goes_between_offer_and_experts_is_found_again(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = parent_of(undo, address, tries_again=True)
    asking = parent.ask()
    tell(daemon)
    asking.result(TIMEOUT_S)
    daemon.close()
    parent.next_loss()
    with ScriptedDaemon(address) as again:
        tell(again, replace(OFFER, free_bytes=1))
        end_s = time.monotonic() + TIMEOUT_S
        while parent.link.offer == OFFER and time.monotonic() < end_s:
            time.sleep(0.001)
        assert parent.link.offer is not None
        assert parent.link.offer.free_bytes == 1
        give(parent, again)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "tpu"},
        {"device": "cuda:5000"},
        {"device_name": "x" * 201},
        {"numeric_class": "x" * 201},
        {"free_bytes": OFFER.total_bytes + 1},
        {"total_bytes": (1 << 56) + 1},
        {"total_bytes": 0},
        {"held_bytes": (1 << 62) - 1},
        {"num_threads": 0},
        {"num_threads": 1 << 40},
        {"chunk_tokens": 0},
        {"chunk_tokens": 1 << 30},
        {"data_port": 65536},
        {"layer_ids": ()},
        {"layer_ids": (2,)},
        {"layer_ids": (0, 2)},
        {"expert_bytes": ()},
        {"expert_bytes": (0,)},
        {"expert_bytes": ((1 << 40) + 1,)},
        {"one_s": (1e-5, 1e-5)},
        {"one_s": (-1e-9,)},
        {"used_s": (1e5,)},
        {"chunk_pairs_per_s": (1e13,)},
        {"chunk_pairs_per_s": (5e-324,)},
    ],
)
def test_an_impossible_offer_is_refused(
    undo: ExitStack, daemon: ScriptedDaemon, changes: dict[str, Any]
) -> None:
    asking = parent_of(undo, daemon.endpoint.address).ask()
    tell(daemon, replace(OFFER, **changes))
    with pytest.raises(HandshakeRefused, match=r"cpu0 .*impossible"):
        asking.result(TIMEOUT_S)
    assert "dflash-supervisor" not in thread_names()


@examples(60)
@given(st.data())
def test_whatever_is_offered_is_taken_or_refused(data: st.DataObject) -> None:
    numbers = st.integers(0, (1 << 62) - 1)
    changes: dict[str, Any] = {}
    for field in fields(Offer):
        good = getattr(OFFER, field.name)
        strange: st.SearchStrategy[Any] = numbers
        if isinstance(good, str):
            strange = st.text(max_size=300) | st.just(HOSTILE)
        elif isinstance(good, bool):
            strange = st.booleans()
        elif isinstance(good, tuple):
            of_list = st.floats(allow_nan=False, allow_infinity=False)
            items = numbers if isinstance(good[0], int) else of_list
            strange = st.lists(items, max_size=64).map(tuple)
        changes[field.name] = data.draw(st.just(good) | strange)
    offer = Offer(**changes)
    try:
        check_offer(offer, MOE, "cpu0")
    except HandshakeRefused as error:
        assert_harmless(str(error))
    else:
        assert offer.free_bytes <= offer.total_bytes
        assert len(offer.layer_ids) == len(offer.one_s) == len(offer.expert_bytes) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (Refused("model", "another model"), HandshakeRefused, "model"),
        (Refused("internal", "measuring failed"), HandshakeRefused, "internal"),
        (Refused("stopping", "measuring failed"), DaemonUnavailable, None),
        (
            Welcome(2, LINK_ID, "m", "p", "c", max_tokens=1, **IDLE_MACHINE),
            ProtocolError,
            "malformed",
        ),
    ],
    ids=["model", "internal", "stopping", "welcome"],
)
def test_another_answer_ends_the_start(
    undo: ExitStack,
    daemon: ScriptedDaemon,
    answer: Refused | Welcome,
    kind: type[Exception],
    code: str | None,
) -> None:
    asking = parent_of(undo, daemon.endpoint.address).ask()
    daemon.expect(AskOffer)
    daemon.say(answer)
    with pytest.raises(kind) as caught:
        asking.result(TIMEOUT_S)
    assert getattr(caught.value, "code", None) == code
    assert "dflash-supervisor" not in thread_names()


@pytest.mark.parametrize("is_there", [True, False])
def test_silence_ends_the_start_within_the_timeout(
    undo: ExitStack, run_dir: Path, is_there: bool
) -> None:
    address = f"ipc://{run_dir}/silent"
    if is_there:
        undo.enter_context(ScriptedDaemon(address))
    asking = parent_of(undo, address, timeouts=HURRIED).ask()
    with pytest.raises(DaemonUnavailable, match=r"cpu0: nothing answers"):
        asking.result(TIMEOUT_S)


def test_progress_without_an_end_is_not_an_offer(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    asking = parent_of(undo, daemon.endpoint.address, timeouts=HURRIED).ask()
    daemon.expect(AskOffer)
    daemon.say(Progress(MEASURING, 0, 1), Pong(0, False, 0.0))
    with pytest.raises(DaemonUnavailable, match=r"cpu0: nothing answers"):
        asking.result(TIMEOUT_S)


def test_an_absent_daemon_has_no_offer_and_joins_later(undo: ExitStack, run_dir: Path) -> None:
    address = f"ipc://{run_dir}/later"
    parent = parent_of(undo, address, timeouts=HURRIED, tolerates_absent=True)
    parent.ask().result(TIMEOUT_S)
    assert parent.link.offer is None
    parent.next_loss()
    parent.link.give(OWNED)
    parent.start().result(TIMEOUT_S)
    assert parent.link.session is None
    with ScriptedDaemon(address) as daemon:
        daemon.let_in()
        parent.wait_for_session(1)


def test_closing_before_experts_are_given_leaves_nothing(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = parent_of(undo, daemon.endpoint.address)
    asking = parent.ask()
    tell(daemon)
    asking.result(TIMEOUT_S)
    parent.supervisor.close()
    assert "dflash-supervisor" not in thread_names()
    parent.link.give(OWNED)  # to no effect
    assert parent.link.session is None
