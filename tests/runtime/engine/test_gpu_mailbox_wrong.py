"""Mailboxes with a daemon whose memory has failed: what it answers is NaN, or wrong. Between
emulated GPUs; and, with `-m gpu`, between two real ones.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_protocol.errors import DaemonUnavailable
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.run.path_choice import MailboxSessions
from support.gpu_devices import EMULATED
from support.mailbox_faults import Mailing, mailing, remove_sockets
from support.mailbox_pairs import GPU, PAIRS, QWEN3MOE, DevicePair
from support.mailbox_rig import tokens
from support.talking_process import TalkingProcess, talking_process

pytestmark = pytest.mark.e2e

NAN, ZERO = "255", "0"
"""Bytes that all of a daemon's weights become: scales of NaN, and of zero."""


@pytest.fixture(params=[EMULATED, pytest.param(GPU, marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DevicePair:
    return PAIRS[request.param](monkeypatch)


@pytest.fixture
def endpoint(pair: DevicePair, run_dir: Path) -> Iterator[str]:
    with pair.shared_folder(run_dir) as folder:
        endpoint = f"ipc://{folder}/gpu.sock"
        yield endpoint
        remove_sockets(endpoint)


@contextmanager
def spoilt(
    pair: DevicePair,
    folder: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    byte: str,
    *,
    check_replies: int = 0,
) -> Iterator[tuple[Mailing, TalkingProcess]]:
    """A parent and a daemon that has yet to be told to spoil its memory."""
    model = pair.model(QWEN3MOE, folder)
    extra = {"DFLASHTEST_SPOIL": byte}
    if pair.name == EMULATED:
        extra["DFLASHTEST_EMULATED"] = "1"
    arguments = [str(model), "--listen", endpoint, "--device", pair.devices[1]]
    with talking_process("support.spoilt_daemon", arguments, **extra) as daemon:
        daemon.begin()
        with mailing(
            pair, model, endpoint, monkeypatch, daemon=daemon, check_replies=check_replies
        ) as mailed:
            yield mailed, daemon


def spoil(daemon: TalkingProcess) -> None:
    daemon.process.send_signal(signal.SIGUSR2)
    daemon.await_line("spoilt")


def kinds(engine: Engine) -> list[str]:
    """Of what has happened since the engine was opened."""
    events = [event.kind for event in engine.stats().events]
    return [kind for kind in events if kind != "numeric_class_differs"]


def test_a_step_that_is_not_finite_is_computed_anew_and_the_daemon_is_named(
    pair: DevicePair, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spoilt(pair, tmp_path, endpoint, monkeypatch, NAN) as (mailed, daemon):
        engine, count = mailed.engine, mailed.pace.num_tokens
        assert tokens(engine, count) == mailed.expected
        num_rung = mailed.rings.count
        # In the middle of a text, when the prompt is done.
        mailed.rings.at(mailed.pace.fault_at, lambda: spoil(daemon))
        assert tokens(engine, count) == mailed.expected
        assert "not_finite" in kinds(engine)
        # Each is told; the one that an open breaker lets through ends the session as well.
        told = [event for event in engine.stats().events if "NaN" in event.reason]
        told = [event for event in told if event.kind in ("not_finite", "daemon_lost")]
        assert engine.stats().owners["link0"].not_finite == len(told)
        # That mailbox is not used again in this session, whatever replaces the daemon.
        num_after = mailed.rings.count
        assert num_rung < num_after < num_rung + count
        for _ in range(2):
            assert tokens(engine, count) == mailed.expected
        assert mailed.rings.count == num_after


@pytest.mark.slow
def test_a_mailbox_alone_that_is_at_fault_is_not_used_again(
    pair: DevicePair, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host answers well: no daemon is named."""
    with spoilt(pair, tmp_path, endpoint, monkeypatch, NAN) as (mailed, daemon):
        engine, count = mailed.engine, mailed.pace.num_tokens
        refused: list[str] = []
        refuse = MailboxSessions.refuse

        def noted(steps: MailboxSessions, error: DaemonUnavailable) -> None:
            refused.append(str(error))
            refuse(steps, error)

        monkeypatch.setattr(MailboxSessions, "refuse", noted)
        captured = engine._steps._captured
        assert captured is not None
        token, is_told = captured.token, list[int]()

        def once_not_finite(position: int) -> int | None:
            if not is_told and mailed.rings.count:
                is_told.append(position)
                token(position)
                captured._tokens.sampled[position] = -3  # type: ignore[attr-defined]
            return token(position)

        monkeypatch.setattr(captured, "token", once_not_finite)
        assert tokens(engine, count) == mailed.expected
        assert ["logits" in reason for reason in refused] == [True]
        assert kinds(engine) == []
        num_rung = mailed.rings.count
        assert tokens(engine, count) == mailed.expected
        assert mailed.rings.count == num_rung
        assert daemon.process.poll() is None
        mailed.rings.count += mailed.pace.fault_at  # there was too little to do for all of them


def test_steps_that_are_chosen_go_by_the_host_and_a_wrong_daemon_is_given_up(
    pair: DevicePair, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spoilt(pair, tmp_path, endpoint, monkeypatch, ZERO, check_replies=1) as (mailed, daemon):
        engine, count = mailed.engine, mailed.pace.num_tokens
        assert tokens(engine, count) == mailed.expected
        owner = engine.stats().owners["link0"]
        assert owner.checked > count
        assert (kinds(engine), owner.wrong_replies) == ([], 0)
        num_rung = mailed.rings.count
        assert num_rung >= count - 1, "it went on through the mailbox after each"
        mailed.rings.at(mailed.pace.fault_at, lambda: spoil(daemon))
        for _ in range(3):
            assert tokens(engine, count) == mailed.expected
        assert kinds(engine) == ["wrong_reply"]
        reason = engine.stats().events[-1].reason
        assert reason.startswith("layer ")
        assert engine.stats().owners["link0"].is_lost
