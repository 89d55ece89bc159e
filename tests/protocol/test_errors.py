"""The exception tree is the one that the module draws, and every message is one line."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from dflash_protocol import errors
from dflash_protocol.errors import (
    CheckpointMissing,
    ContextExceeded,
    DaemonUnavailable,
    DeadlineExceeded,
    DeviceOutOfMemory,
    DeviceUnavailable,
    DflashError,
    GrammarError,
    HandshakeRefused,
    KernelCompileError,
    ModelFileError,
    NotFinite,
    ProtocolError,
    PullFailed,
    QueueFull,
    RenderingUnavailable,
    SettingsError,
    UnsupportedModel,
    for_terminal,
    one_line,
)
from support.hostile_texts import HOSTILE, HOSTILE_LONG, assert_harmless

SAMPLES: dict[type[DflashError], DflashError] = {
    DflashError: DflashError("something"),
    SettingsError: SettingsError("threads=0: must be 1 or more"),
    ContextExceeded: ContextExceeded(300, 256),
    GrammarError: GrammarError("the grammar allows no token here"),
    CheckpointMissing: CheckpointMissing(wanted=7, kept=12),
    ModelFileError: ModelFileError("damaged", path="m.gguf", field="a.key", offset_bytes=24),
    UnsupportedModel: UnsupportedModel("unknown architecture", path=Path("m.gguf")),
    ProtocolError: ProtocolError("malformed"),
    HandshakeRefused: HandshakeRefused("another model", code="model"),
    PullFailed: PullFailed("the hub cannot be reached: connection refused"),
    NotFinite: NotFinite("the logits are not finite"),
    DeviceUnavailable: DeviceUnavailable("no cuda driver: libcuda.so.1: cannot open"),
    DeviceOutOfMemory: DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=2),
    KernelCompileError: KernelCompileError("sample.cu(3): error: expected a ';'"),
    RenderingUnavailable: RenderingUnavailable("too many at once"),
    QueueFull: QueueFull("too many requests wait"),
    DaemonUnavailable: DaemonUnavailable("nothing answers"),
    DeadlineExceeded: DeadlineExceeded("no reply within 250 ms"),
}


def drawn_tree() -> dict[str, str]:
    """Parent of every class by name, from the drawing in the module's docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        drawn = re.match(r"^    ([│ ├└─]*)([A-Z]\w+)", line)
        if drawn is None:
            continue
        depth = len(drawn[1]) // 4
        path = [*path[:depth], drawn[2]]
        if depth:
            parents[drawn[2]] = path[-2]
    return parents


def real_tree() -> dict[str, str]:
    return {
        name: member.__bases__[0].__name__
        for name, member in inspect.getmembers(errors, inspect.isclass)
        if issubclass(member, DflashError) and member is not DflashError
    }


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    assert drawn_tree() == real_tree()


def test_every_class_has_a_sample_here() -> None:
    assert {kind.__name__ for kind in SAMPLES} == {"DflashError", *real_tree()}


@pytest.mark.parametrize("error", SAMPLES.values(), ids=lambda error: type(error).__name__)
def test_a_message_is_one_line_to_show_to_a_user(error: DflashError) -> None:
    assert str(error)
    assert len(str(error).splitlines()) == 1


def test_a_model_file_error_names_file_field_and_offset_as_far_as_known() -> None:
    everything = ModelFileError("damaged", path="m.gguf", field="a.key", offset_bytes=0)
    assert str(everything) == "m.gguf: a.key (at byte 0): damaged"
    assert (everything.reason, everything.path) == ("damaged", Path("m.gguf"))
    assert (everything.field, everything.offset_bytes) == ("a.key", 0)
    assert str(ModelFileError("empty", path="m.gguf")) == "m.gguf: empty"


def test_context_exceeded_says_both_amounts() -> None:
    error = ContextExceeded(300, 256)
    assert "300" in str(error)
    assert "256" in str(error)
    assert (error.num_tokens, error.num_positions) == (300, 256)


def test_a_protocol_error_is_malformed_unless_it_says_otherwise() -> None:
    assert ProtocolError("what").code == "malformed"
    assert HandshakeRefused("what", code="model").code == "model"


def test_a_path_with_odd_characters_stays_on_one_line() -> None:
    error = ModelFileError("is empty", path="/models/a\nb\udcff.gguf")
    assert str(error) == "/models/a\\nb\\udcff.gguf: is empty"


def test_a_name_out_of_a_file_cannot_add_lines_to_a_message() -> None:
    """Found by fuzzing: names of tensors are the file's, and may hold anything."""
    error = ModelFileError("is odd", path="m.gguf", field="output\r\n\x0bweight")
    assert str(error) == r"m.gguf: output\r\n\x0bweight: is odd"
    assert error.field == "output\r\n\x0bweight"


def test_somebody_elses_text_is_one_short_line() -> None:
    """Found by fuzzing: a peer's reason filled screens."""
    assert errors.one_line("no\r\n\x1b[31m such thing") == r"no\r\n\x1b[31m such thing"
    assert errors.one_line("x" * 1001) == "x" * 999 + "…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("Größe 😀 de\u0301ja\\x1b", "Größe 😀 de\u0301ja\\x1b"),
        ("a\n\tb\x1b[2J\0\x7f", "a\\n\\tb\\x1b[2J\\x00\\x7f"),
        ("\x9b1m\x85\u2028\u2029", "\\x9b1m\\x85\\u2028\\u2029"),
        (
            "\u202eabc\u2066\u200b\u200f\ufeff\U000e0041",
            "\\u202eabc\\u2066\\u200b\\u200f\\ufeff\\U000e0041",
        ),
        ("\ud800\udfff \u00a0\u3000", "\\ud800\\udfff \\xa0\\u3000"),
        ("a" * 1000, "a" * 1000),
        ("a" * 1001, "a" * 999 + "…"),
        ("\0" * 1000, "\\x00" * 249 + "\\x0…"),
    ],
)
def test_a_text_of_others_is_one_line_that_a_terminal_only_writes(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(shown) == shown


def test_each_character_is_shown_as_it_is_or_escaped() -> None:
    for code in (*range(0x3100), *range(0xD700, 0x11000), *range(0x11000, 0x110000, 97)):
        shown = one_line(chr(code))
        assert shown.isprintable()
        assert shown == chr(code) or shown[0] == "\\"


def test_messages_are_one_line_whatever_they_quote() -> None:
    for error in (
        DflashError(HOSTILE_LONG),
        SettingsError(f"a={HOSTILE}"),
        ModelFileError(HOSTILE, path=f"/a/{HOSTILE}.gguf", field=HOSTILE),
        HandshakeRefused(HOSTILE, code="model"),
        DeviceOutOfMemory(HOSTILE, num_bytes=9, free_bytes=1, total_bytes=2, what=HOSTILE),
    ):
        assert_harmless(str(error))
        assert len(str(error)) <= 4000


def test_a_models_text_keeps_its_lines_and_loses_what_a_terminal_obeys() -> None:
    text = "a\n\tb 👨‍👩‍👧 שלום\u200f"  # joiners and marks of direction belong to texts
    assert for_terminal(text) == text
    assert for_terminal("a\x1b]52;c;AA\x07\r\x9b\x7f\0") == "a\\x1b]52;c;AA\\x07\\r\\x9b\\x7f\\x00"


def test_what_the_machine_does_not_give_is_told_from_other_errors() -> None:
    assert "memory" in str(errors.lack_of(MemoryError()))
    assert "thread" in str(errors.lack_of(RuntimeError("can't start new thread")))
    assert errors.lack_of(RuntimeError("dictionary changed size during iteration")) is None
