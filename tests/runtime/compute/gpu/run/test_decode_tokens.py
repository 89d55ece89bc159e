"""Tokens that steps sample, as the host reads them, and which mailbox steps have failed."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.gpu.run import decode_tokens
from dflash_runtime.compute.gpu.run.decode_tokens import DecodeTokens
from dflash_runtime.compute.gpu.run.mailbox_path import MailboxPath
from support.emulated_device import EmulatedDevice


def placed(device: EmulatedDevice, token_id: int, position: int, *, num_started: int) -> Any:
    tokens = DecodeTokens(device, capacity=32)
    tokens.place(token_id, position)
    for _ in range(num_started):
        tokens.advance()
    return tokens


def test_a_step_is_given_its_token_and_position() -> None:
    device = EmulatedDevice()
    tokens = placed(device, 7, 5, num_started=2)
    assert device.download(tokens.ids).tolist() == [7]
    assert device.download(tokens.positions).tolist() == [5]
    tokens.sampled[6], tokens.sampled[7] = 9, NOT_FINITE
    assert [tokens.input_of(position) for position in (5, 6)] == [7, 9]
    assert [tokens.wait(position) for position in (6, 7)] == [9, NOT_FINITE]
    assert [tokens.is_finite(position) for position in (6, 7)] == [True, False]
    tokens.close()


def test_a_token_is_waited_for() -> None:
    tokens = placed(EmulatedDevice(), 7, 5, num_started=1)
    thread = threading.Timer(0.02, tokens.sampled.__setitem__, (6, 4))
    thread.start()
    assert tokens.wait(6) == 4
    thread.join()
    tokens.close()


def test_a_step_that_ends_without_a_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_tokens, "_TIMEOUT_S", 0.01)
    tokens = placed(EmulatedDevice(), 7, 5, num_started=1)
    with pytest.raises(DeviceUnavailable, match="token"):
        tokens.wait(6)
    tokens.close()


def test_tokens_of_steps_before_and_of_trials_are_forgotten() -> None:
    device = EmulatedDevice()
    tokens = placed(device, 7, 5, num_started=2)
    tokens.sampled[6], tokens.sampled[7] = 9, 8
    tokens.place(3, 5)
    assert (tokens.sampled[6], tokens.sampled[7]) == (-1, -1)
    with tokens.restored():
        tokens.sampled[6] = 9
        device.write(tokens.ids, np.array([9], np.int32))
        device.write(tokens.positions, np.array([6], np.int32))
    assert tokens.sampled[6] == -1
    assert device.download(tokens.ids).tolist() == [3]
    assert device.download(tokens.positions).tolist() == [5]
    tokens.close()


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_token_of_a_step_that_was_interrupted_is_forgotten(is_trial: bool) -> None:
    """The device has it, but the host was stopped before it had noted the step."""
    tokens = placed(EmulatedDevice(), 7, 5, num_started=1)

    def step() -> None:
        with tokens.restored() if is_trial else nullcontext():
            tokens.sampled[7] = 9
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    tokens.place(3, 5)
    assert (tokens.sampled == -1).all()
    tokens.close()


def test_a_failed_step_and_those_after_it_are_known_by_their_positions() -> None:
    failed = [0]
    mail: Any = SimpleNamespace(epoch=40, failed_epoch=lambda: failed[0], own=None, routes=())
    given: Any = SimpleNamespace(device=SimpleNamespace(upload=None), layers=())
    home: Any = SimpleNamespace(exchanges={})
    path = MailboxPath(given, given, {}, mail=mail, remote=given, home=home)
    path.begin(10)  # steps of positions 10, 11, … have the epochs 41, 42, …
    assert not any(path.has_failed(position) for position in range(10, 20))
    failed[0] = 43
    assert [path.has_failed(position) for position in (10, 11, 12, 13)] == [False] * 2 + [True] * 2
    failed[0], mail.epoch = 0, 43
    path.begin(13)  # the step before went by the host, and this path is gone on with
    failed[0] = 44
    assert [path.has_failed(position) for position in (12, 13)] == [False, True]
