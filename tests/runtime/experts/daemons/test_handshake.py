"""A parent finds out whether a daemon's file has its weights, at the handshake and later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import HandshakeRefused
from dflash_protocol.wire.messages import COMPARING, Hello, Ping, Pong, Progress
from dflash_runtime.experts.daemons import link_task
from dflash_runtime.experts.daemons.link_task import Timeouts
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.scripted_daemon import TIMEOUT_S, ScriptedDaemon, welcome_to
from support.supervised import GREETING, OWNED, Parent

OURS, OTHER = "aa" * 32, "bb" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@pytest.fixture
def weights(model: Path) -> Iterator[WeightCheck]:
    with GgufFile.open(model) as file:
        yield WeightCheck(file, read_spec(file).moe)


def parent_of(undo: ExitStack, daemon: ScriptedDaemon, weights: WeightCheck) -> Parent:
    return Parent(
        undo,
        daemon.endpoint.address,
        greeting=replace(GREETING, weights=weights),
        timeouts=Timeouts(TIMEOUT_S, 0.02),
    )


def answer(weights: WeightCheck, hello: Hello) -> dict[str, Any]:
    """What a good daemon with a copy of the file says."""
    made = weights.answer(OWNED, bytes.fromhex(hello.nonce))
    return {"file_stamp": "of a copy", "blocks_digest": made}


def test_the_same_file_and_the_same_blocks_are_welcome(
    undo: ExitStack, daemon: ScriptedDaemon, weights: WeightCheck
) -> None:
    nonces = set()
    for is_same in (True, False):
        parent = parent_of(undo, daemon, weights)
        start = parent.start()
        hello = daemon.expect(Hello, skipping=(Ping,))
        nonces.add(hello.nonce)
        assert hello.file_stamp == weights.stamp()
        if is_same:
            daemon.say(welcome_to(hello, file_stamp=hello.file_stamp))
        else:
            daemon.say(Progress(COMPARING, 0, 1))
            daemon.say(welcome_to(hello, **answer(weights, hello)))
        start.result(TIMEOUT_S)
        assert parent.losses.empty()
        parent.supervisor.close()
    assert len(nonces) == 2


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"file_stamp": "of a copy", "blocks_digest": OTHER}, "weights", "weights: "),
        ({"file_stamp": "of a copy"}, "weights", "weights: .*blocks"),
        ({}, "too_old", ".*weights"),
        (
            {"file_stamp": "x", "file_digest": OTHER},
            "weights",
            f"{OTHER[:16]}.*{OURS[:16]}",
        ),
    ],
    ids=["other blocks", "no answer", "too old", "other digest"],
)
def test_a_daemon_that_has_other_weights_or_does_not_say_is_refused(
    undo: ExitStack,
    daemon: ScriptedDaemon,
    weights: WeightCheck,
    changes: dict[str, Any],
    code: str,
    reason: str,
) -> None:
    weights._file.watch.keep_full_digest(OURS)
    parent = parent_of(undo, daemon, weights)
    start = parent.start()
    hello = daemon.expect(Hello)
    assert hello.file_digest == OURS
    daemon.say(welcome_to(hello, **changes))
    with pytest.raises(HandshakeRefused, match=f"daemon cpu0 at ipc://.*{reason}") as caught:
        start.result(TIMEOUT_S)
    assert caught.value.code == code
    daemon.expect_bye()
    assert parent.link.session is None


def test_version_1_is_used_with_an_event(
    undo: ExitStack, daemon: ScriptedDaemon, weights: WeightCheck
) -> None:
    parent = parent_of(undo, daemon, weights)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello), version=1))
    start.result(TIMEOUT_S)
    assert "version 1 " in parent.next_loss()


def test_a_daemon_that_comes_back_with_other_weights_is_told_once_and_seldom_tried(
    undo: ExitStack, daemon: ScriptedDaemon, weights: WeightCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = parent_of(undo, daemon, weights)
    start = parent.start()
    hello = daemon.expect(Hello)
    daemon.say(welcome_to(hello, file_stamp=hello.file_stamp))
    start.result(TIMEOUT_S)
    daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    assert "knows" in parent.next_loss()
    for pause_s in (0.0, 3600.0):
        again = daemon.expect(Hello, skipping=(Ping,))
        monkeypatch.setattr(link_task, "_OTHER_WEIGHTS_S", pause_s)
        assert again.nonce != hello.nonce
        daemon.say(welcome_to(again, file_stamp="of a copy", blocks_digest=OTHER))
        daemon.expect_bye()
    assert "weights" in parent.next_loss()
    assert daemon.is_silent(0.5)
    assert parent.losses.empty()


def test_a_digest_that_becomes_known_later_ends_the_session(
    undo: ExitStack, daemon: ScriptedDaemon, weights: WeightCheck
) -> None:
    parent = parent_of(undo, daemon, weights)
    start = parent.start()
    hello = daemon.expect(Hello)
    daemon.say(welcome_to(hello, **answer(weights, hello)))
    start.result(TIMEOUT_S)
    daemon.say(Pong(daemon.expect(Ping).sequence, True, 0.0, file_digest=OTHER))
    ping = daemon.expect(Ping)
    assert parent.losses.empty()
    weights._file.watch.keep_full_digest(OURS)
    daemon.say(Pong(ping.sequence, True, 0.0, file_digest=OTHER))
    reason = parent.next_loss()
    assert "weights" in reason
    assert OTHER[:16] in reason
    assert OURS[:16] in reason


def test_a_parent_whose_own_file_was_written_to_sends_no_hello(
    undo: ExitStack, daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "own.gguf", ODD_SHAPES[0], seed=10)
    with GgufFile.open(path) as file:
        weights = WeightCheck(file, read_spec(file).moe)
        with path.open("ab") as out:
            out.write(b"x")
        start = parent_of(undo, daemon, weights).start()
        with pytest.raises(HandshakeRefused, match=r"\bwritten\b") as caught:
            start.result(TIMEOUT_S)
        assert caught.value.code == "file"
        undo.close()
