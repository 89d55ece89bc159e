"""Lines for people: nothing that is quoted in them makes lines of its own, or moves a terminal."""

from __future__ import annotations

import json
import logging

import pytest

from dflash_protocol.process.output import OneLineFormatter, ascii_json, log_to_stderr, noun, say
from support.hostile_texts import FORGED, HOSTILE, HOSTILE_LONG, assert_harmless


def test_a_record_is_one_line() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "daemon %s", (HOSTILE_LONG,), None)
    line = OneLineFormatter("dflash-moe").format(record)
    assert_harmless(line)
    assert "\n" not in line
    assert line.startswith("dflash-moe: daemon A\\x1b[2J")


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        try:
            raise ValueError(f"first\n{FORGED}\ndflash-moe: error: {HOSTILE}")
        except ValueError as error:
            raise RuntimeError(HOSTILE) from error
    except RuntimeError as error:
        exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), exc_info)
    first, *rest = OneLineFormatter("dflash-moe").format(record).split("\n")
    assert first == "dflash-moe: failed"
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert any("RuntimeError: A\\x1b[2J" in line for line in rest)


def test_what_is_said_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"ready: {HOSTILE}", program="dflash-moe")
    said = capsys.readouterr().err
    assert_harmless(said)
    assert said.count("\n") == 1


def test_json_is_printable_ascii_and_reads_the_same() -> None:
    value = {"name": HOSTILE, HOSTILE: [1.5, None, "\ud800é"]}
    text = ascii_json(value)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON"):
        ascii_json(float("nan"))


def test_a_log_that_goes_somewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [mine])
    log_to_stderr("dflash-moe")
    assert logging.root.handlers == [mine]
    monkeypatch.setattr(logging.root, "handlers", [])
    log_to_stderr("dflash-moe")
    (handler,) = logging.root.handlers
    assert isinstance(handler.formatter, OneLineFormatter)


def test_one_is_singular_and_all_else_plural() -> None:
    assert [noun(number, "request") for number in (0, 1, 2, 100)] == [
        "requests", "request", "requests", "requests",
    ]  # fmt: skip
