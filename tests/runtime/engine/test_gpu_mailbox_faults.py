"""Mailboxes whose other side dies, is stopped or writes garbage during a token: the text is right,
no process waits for longer than two steps may take, the remaining ones go on, and no memory is
kept. Between emulated GPUs; between one and a daemon's processor; and, with `-m gpu`, between two
real ones.

Parents have replicas of all experts, which they use when the daemon is lost: with its bits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_runtime.compute.gpu.run import path_choice
from dflash_runtime.compute.mailbox_layout import MailLayout, mail_layout
from dflash_runtime.engine.penalties import Penalties
from support.emulated_device.peer_memory import FREED_WHILE_OPEN
from support.gpu_devices import EMULATED
from support.hostile_writer import KINDS, hostile_writer
from support.mailbox_faults import (
    Damage,
    Readings,
    await_listening,
    damages,
    experts_of,
    held_by,
    held_here,
    mailing,
    parents_die,
    remove_sockets,
    socket_of,
    starting_daemon,
    wait_for_kept_memory,
    wait_for_silence,
    waiting_daemon,
)
from support.mailbox_pairs import GPU, PAIRS, PROCESSOR, QWEN3MOE, RECURRENT, DevicePair

pytestmark = pytest.mark.e2e

WARM_UP = 2
"""Rounds after which drivers, the C library and we have what is kept for good."""
ROUNDS = 20
HARMED_WITHIN_S = 10.0
HARMLESS = ("stale", "hosts' words")
DAMAGES = tuple(damages(MailLayout(1, 1, 1)))


def cases(*names: str, fast: str | None = None) -> list[Any]:
    """Of pairs and models; emulated ones are slow but for one."""
    marks = {name: [] if name == fast else [pytest.mark.slow] for name in names}
    emulated = [
        pytest.param(pair, name, marks=marks[name])
        for pair in (EMULATED, PROCESSOR)
        for name in names
    ]
    return [*emulated, *(pytest.param(GPU, name, marks=pytest.mark.gpu) for name in names)]


on_pairs = partial(pytest.mark.parametrize, ("pair", "model"), indirect=True)


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DevicePair:
    return PAIRS[request.param](monkeypatch)


@pytest.fixture
def model(request: pytest.FixtureRequest, pair: DevicePair, tmp_path: Path) -> Path:
    return pair.model(request.param, tmp_path)


@pytest.fixture
def endpoint(pair: DevicePair, run_dir: Path) -> Iterator[str]:
    with pair.shared_folder(run_dir) as folder:
        endpoint = f"ipc://{folder}/gpu.sock"
        yield endpoint
        remove_sockets(endpoint)


@on_pairs(argvalues=cases(QWEN3MOE, RECURRENT, fast=RECURRENT))
def test_a_daemon_is_killed_within_a_token(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recurrent model's states are those before the step again when that is computed anew."""
    with (
        starting_daemon(pair, model, endpoint) as daemon,
        mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed,
    ):
        mailed.rings.within(pair.pace.fault_at, daemon.process.kill)
        mailed.check_text()
        assert daemon.await_end() == -signal.SIGKILL
        assert mailed.num_losses == 1
        mailed.check_text()


@on_pairs(argvalues=cases(QWEN3MOE, RECURRENT, fast=RECURRENT))
def test_a_daemon_is_killed_while_tokens_decide_what_may_follow(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that is computed anew is sampled by the rules of its own position."""
    penalties = Penalties(presence=1.0, frequency=0.5)
    with (
        starting_daemon(pair, model, endpoint) as daemon,
        mailing(pair, model, endpoint, monkeypatch, daemon=daemon, penalties=penalties) as mailed,
    ):
        mailed.rings.within(pair.pace.fault_at, daemon.process.kill)
        mailed.check_text()
        assert daemon.await_end() == -signal.SIGKILL
        assert mailed.num_losses == 1
        mailed.check_text()


@on_pairs(argvalues=cases(QWEN3MOE, RECURRENT))
def test_a_daemon_stands_still_within_a_token_and_comes_back(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        starting_daemon(pair, model, endpoint) as daemon,
        mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed,
    ):
        stop = partial(daemon.process.send_signal, signal.SIGSTOP)
        mailed.rings.within(pair.pace.fault_at, stop)
        mailed.check_text()
        assert mailed.num_losses == 1
        daemon.process.send_signal(signal.SIGCONT)
        mailed.await_use()
        mailed.check_text()
        assert mailed.num_losses == 1


@pytest.mark.slow
@on_pairs(argvalues=cases(QWEN3MOE, RECURRENT, fast=QWEN3MOE))
def test_a_parent_that_dies_within_a_token_costs_its_daemon_nothing(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with starting_daemon(pair, model, endpoint) as daemon:
        await_listening(daemon)
        for _ in parents_die(pair, model, endpoint, pair.pace.dying_steps[:1]):
            assert daemon.process.poll() is None
        with mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed:
            mailed.check_text()
            assert not mailed.num_losses
        daemon.process.terminate()
        assert daemon.await_end() == 0, daemon.said
        assert FREED_WHILE_OPEN not in daemon.said


@pytest.mark.parametrize(
    ("pair", "model", "names"),
    [
        pytest.param(EMULATED, QWEN3MOE, DAMAGES[:1], id="emulated-qwen3moe-a word"),
        pytest.param(PROCESSOR, QWEN3MOE, DAMAGES[1:2], id="processor-qwen3moe-a word"),
        *(
            pytest.param(*case.values, DAMAGES, marks=case.marks)
            for case in cases(QWEN3MOE, RECURRENT)
        ),
    ],
    indirect=["pair", "model"],
)
def test_what_is_damaged_in_a_mailbox_is_computed_anew(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    """In the host's memory: that of devices is out of reach of other processes."""
    pair.hide_memory()
    pieces = damages(mail_layout(experts_of(model)))
    with (
        starting_daemon(pair, model, endpoint) as daemon,
        mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed,
    ):
        for num_before, name in enumerate(names):
            Damage(pieces[name]).do(mailed, monkeypatch)
            assert mailed.num_losses == num_before + 1, name
            assert daemon.process.poll() is None
            mailed.await_use()


@on_pairs(argvalues=cases(QWEN3MOE))
def test_what_another_process_of_the_account_writes_into_a_mailbox_becomes_no_token(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All the time, from wherever a step is. It does not go as far as to forge: a word with a check
    that belongs to it and to the very step is taken for right (docs/security.md)."""
    pair.hide_memory()
    with (
        starting_daemon(pair, model, endpoint) as daemon,
        mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed,
    ):
        for kind in KINDS:
            mailed.await_use()
            num_before = mailed.num_losses
            assert mailed.rings.segment is not None
            shape = mailed.rings.segment.shape
            with hostile_writer(
                daemon.pid, kind, mail_at=shape.mail_at, mail_bytes=shape.mail_bytes
            ):
                end_s = time.monotonic() + HARMED_WITHIN_S
                while mailed.num_losses == num_before and time.monotonic() < end_s:
                    mailed.check_text()
            # Words that are not read again do no harm; of the others, some were read.
            assert mailed.num_losses > num_before or kind in HARMLESS, kind
            assert daemon.process.poll() is None, daemon.said
        mailed.await_use()
        mailed.check_text()


@pytest.mark.timeout(900)
@on_pairs(argvalues=cases(QWEN3MOE))
def test_parents_that_die_leave_nothing_in_their_daemon(
    pair: DevicePair, model: Path, endpoint: str
) -> None:
    steps = list(islice(cycle(pair.pace.dying_steps), WARM_UP + ROUNDS))
    with starting_daemon(pair, model, endpoint) as daemon:
        await_listening(daemon)
        watched = psutil.Process(daemon.pid)
        folder = socket_of(endpoint).parent
        readings = Readings(pair, watched, folder, partial(held_by, daemon))
        for number, _ in enumerate(parents_die(pair, model, endpoint, steps), 1):
            if number in (WARM_UP, len(steps)):
                wait_for_silence(pair.pace, watched)
            if number == WARM_UP:
                readings.begin()
        print("left by parents:", readings.end())


@pytest.mark.timeout(900)
@on_pairs(argvalues=cases(RECURRENT))
def test_daemons_that_die_leave_nothing_in_their_parent(
    pair: DevicePair,
    model: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It gives up after ten steps that failed, as a rule.
    monkeypatch.setattr(path_choice, "_MOST_FAILURES", 2 * (WARM_UP + ROUNDS))
    folder = socket_of(endpoint).parent
    readings = Readings(pair, psutil.Process(), folder, partial(held_here, pair))
    with ExitStack() as started:
        daemon = started.enter_context(starting_daemon(pair, model, endpoint))
        with mailing(pair, model, endpoint, monkeypatch, daemon=daemon) as mailed:
            for number in range(1, WARM_UP + ROUNDS + 1):
                following = started.enter_context(waiting_daemon(pair, model, endpoint))
                mailed.rings.within(pair.pace.fault_at, daemon.process.kill)
                mailed.check_text()
                assert daemon.await_end() == -signal.SIGKILL
                assert mailed.num_losses == number
                daemon.close()
                remove_sockets(endpoint)
                following.begin()
                await_listening(following)
                mailed.await_use()
                daemon = following
                if number == WARM_UP:
                    wait_for_kept_memory()
                    readings.begin()
            wait_for_kept_memory()
            print("left by daemons:", readings.end())
