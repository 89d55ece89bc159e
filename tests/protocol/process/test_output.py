"""Lines for people: nothing that is quoted in them makes lines of its own, or moves a terminal."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from dflash_protocol.process.output import (
    FIELDS,
    REQUESTS,
    JsonFormatter,
    OneLineFormatter,
    ascii_json,
    log_to_stderr,
    noun,
    say,
)
from support.hostile_texts import FORGED, HOSTILE, HOSTILE_LONG, assert_harmless

PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_daemon", "dflash_runtime")


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


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Levels and handlers as they were afterwards."""
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers)
    loggers = [logging.getLogger(name) for name in (*PACKAGES, REQUESTS)]
    levels = [each.level for each in (logging.root, *loggers)]
    yield
    for each, level in zip((logging.root, *loggers), levels, strict=True):
        each.setLevel(level)


@pytest.mark.usefixtures("own_log")
def test_lines_of_json_are_objects_whatever_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    logging.root.handlers = []  # pytest adds its own before each test
    log_to_stderr("dflash-moe", is_json=True)
    log = logging.getLogger("dflash_runtime.x")
    log.warning("daemon %s", HOSTILE, extra={FIELDS: {"tokens": 3, "key": HOSTILE}})
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        log.exception("failed")
    say(HOSTILE, program="dflash-moe")
    say("error: no", program="dflash-moe", level="error")
    text = capsys.readouterr().err
    assert text.isascii()
    first, second, third, fourth = (json.loads(line) for line in text.splitlines())
    assert {*first} == {"time", "level", "program", "logger", "message", "tokens", "key"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["level"], first["program"]) == ("warning", "dflash-moe")
    assert (first["logger"], first["tokens"], first["key"]) == ("dflash_runtime.x", 3, HOSTILE)
    assert_harmless(first["message"])
    assert second["level"] == "error"
    assert second["traceback"][0] == "Traceback (most recent call last):"
    assert [third["level"], fourth["level"]] == ["info", "error"]
    assert fourth["message"] == "error: no"


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("auto", ["warning", "requests"]),
        ("debug", ["debug", "info", "warning", "requests"]),
        ("info", ["info", "warning", "requests"]),
        ("warning", ["warning"]),
        ("error", []),
    ],
)
def test_a_level_is_of_our_lines_and_not_of_libraries(
    capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    logging.root.handlers = []
    log_to_stderr("dflash-moe", level="debug" if level == "auto" else "auto")
    log_to_stderr("dflash-moe", level=level)
    ours = logging.getLogger("dflash_runtime.engine.x")
    ours.debug("debug")
    ours.info("info")
    ours.warning("warning")
    logging.getLogger(REQUESTS).info("requests")
    logging.getLogger("numba").info("a library's")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"dflash-moe: {each}" for each in shown]


def test_the_json_of_one_line_needs_a_finite_number() -> None:
    with pytest.raises(ValueError, match="JSON"):
        JsonFormatter("x").line("a", level="info", time_s=0.0, value=float("nan"))


def test_one_is_singular_and_all_else_plural() -> None:
    assert [noun(number, "request") for number in (0, 1, 2, 100)] == [
        "requests", "request", "requests", "requests",
    ]  # fmt: skip
