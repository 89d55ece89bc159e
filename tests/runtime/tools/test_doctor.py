"""Asking a launcher what it has: whatever it does instead of answering, it is one line."""

from __future__ import annotations

import os

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.tools import doctor

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def said(script: str) -> str:
    return doctor._last_line(["/bin/sh", "-c", script], ENVIRONMENT)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "^it ended with exit code 3: no reason given$"),
        ("echo some >&2; echo why >&2; exit 1", "^it ended with exit code 1: why$"),
        ("kill -9 $$", "^it ended with exit code -9"),
        ("yes | head -c 2000000", "^its report is too long$"),
    ],
)
def test_what_is_no_answer_is_a_reason(script: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        said(script)
    assert said("echo noise; echo answer") == "answer"


def test_a_launcher_that_does_not_end_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(doctor, "_PROBE_S", 0.3)
        with pytest.raises(SettingsError, match="did not answer within"):
            said("sleep 60 & sleep 60")
    assert said("echo answer") == "answer"


def test_what_cannot_be_started_is_said_so() -> None:
    with pytest.raises(SettingsError, match="cannot be started: No such file"):
        doctor._last_line(["/no/such/launcher"], ENVIRONMENT)
