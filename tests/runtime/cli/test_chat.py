"""``dflash-moe chat`` as people see it: in terminals of two sizes, without colours, in pipes."""

from __future__ import annotations

import io
import json
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dflash_runtime.cli.main import main
from dflash_runtime.engine.engine import Engine
from support.hostile_texts import HOSTILE
from support.processes import ROOT, run_main
from support.random_gguf import write_model
from support.random_models import CHAT_TEMPLATE, Qwen3MoeShape
from support.scripted_chat import NUM_POSITIONS, ScriptedEngine, command
from support.terminals import ALT_ENTER, CTRL_C, CTRL_D, UP, Terminal, terminal

PAGE = ROOT / "docs" / "command-line.md"
ESCAPE = b"\x1b"

SKY = """# The sky

It is **blue** because of *Rayleigh scattering*:

1. Sunlight has all colours.
2. Air scatters short waves more than long ones.

```python
def scattered(wave_nm: float) -> float:
    return wave_nm**-4
```

| colour | wave, nm |
|--------|----------|
| blue   | 450      |
| red    | 700      |
"""
THOUGHT = [{"thinks": True}, "The user asks ", "about the sky.", 0.3, "\n</think>\n\n"]
SLOW = ["One ", "two ", 120, "three"]


def pieces(text: str) -> list[str]:
    """A text as tokens."""
    return [text[first : first + 5] for first in range(0, len(text), 5)]


@contextmanager
def chatting(
    folder: Path, *answers: Sequence[Any], columns: int = 80, rows: int = 40, **extra: str
) -> Iterator[Terminal]:
    """A chat with a model that gives these answers, in a terminal."""
    script, template = folder / "script.json", folder / "chat.jinja"
    script.write_text(json.dumps(answers))
    template.write_text("its own")
    run = command(script, "chat", "--chat-template-file", str(template))
    environment = {"XDG_STATE_HOME": str(folder / "state"), **extra}
    with terminal(run, columns=columns, rows=rows, **environment) as opened:
        wait_for_prompt(opened)
        yield opened


def wait_for_prompt(opened: Terminal) -> str:
    """Wait until nothing is written any more; returns the screen."""
    return opened.wait_for(lambda shown: shown.endswith("\n>"))


def ask(opened: Terminal, text: str) -> str:
    """Type a message, and wait until it is answered; returns the screen."""
    opened.send(text)
    first_line = text.partition("\n")[0]
    return opened.wait_for(lambda shown: f"> {first_line}\n" in shown and shown.endswith("\n>"))


def ended(opened: Terminal) -> int:
    opened.press(CTRL_D)
    return opened.wait_for_end()


def screens_of_the_page(title: str) -> list[str]:
    """The texts below a heading of the page: what the screen of 80 columns shows, and of 40."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)


def without_seconds(screen: str) -> str:
    return re.sub(r"\d+\.\d s$", "N s", screen, flags=re.MULTILINE)


@pytest.mark.parametrize(("columns", "number"), [(80, 0), (40, 1)])
def test_the_screens_of_the_page_are_what_is_seen(
    tmp_path: Path, columns: int, number: int
) -> None:
    with chatting(tmp_path, [*THOUGHT, *pieces(SKY)], columns=columns) as opened:
        ask(opened, "Why is the sky blue?")
        screen = ask(opened, "/stats")
        assert ended(opened) == 0
        assert max(map(len, screen.splitlines())) <= columns
        assert "#" not in screen
        assert "**blue**" not in screen
    assert without_seconds(screen) == without_seconds(screens_of_the_page("Chat")[number]), screen


def test_a_talk_with_its_commands(tmp_path: Path) -> None:
    long = [f"word {number}. " for number in range(NUM_POSITIONS)]
    with chatting(tmp_path, ["Hel", "lo."], SLOW, [HOSTILE], THOUGHT, ["ok"], long) as opened:
        ask(opened, "Hi")

        # Ctrl-C in mid-answer keeps the talk and what was written.
        opened.press(f"first{ALT_ENTER}second")
        opened.wait_for("· second")
        opened.send("")
        opened.wait_for("One two")
        opened.press("typed ahead")
        opened.press(CTRL_C)
        screen = wait_for_typed(opened, "typed ahead")
        assert "stopped" in screen
        assert screen.count("typed ahead") == 1
        opened.press(CTRL_C)  # at the prompt: leaves the line
        opened.wait_for("Ctrl-D ends the talk")
        wait_for_prompt(opened)
        saved = tmp_path / "talk.json"
        opened.send(f"/save {saved}")
        opened.wait_for("saved:")
        assert json.loads(saved.read_text())["messages"] == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "first\nsecond"},
            {"role": "assistant", "content": "One two "},
        ]

        # What the model writes does not control the terminal.
        wait_for_prompt(opened)
        opened.send("evil")
        opened.wait_for("FORGED")
        wait_for_prompt(opened)
        assert opened.title == ""
        for sequence in (b"\x1b[2J\x1b]0;", b"\x07", b"\x9b31m", b"\x0b", b"\x7f"):
            assert sequence not in opened.written.replace("\x9b".encode(), b"?")

        opened.send("/reasoning")
        opened.wait_for("reasoning is shown")
        wait_for_prompt(opened)
        opened.send("think")
        opened.wait_for("The user asks about the sky.")
        opened.wait_for("no answer; the question is not kept")
        wait_for_prompt(opened)

        opened.send("/reset")
        opened.wait_for("the talk begins anew")
        opened.send('"""/reset\nis a command"""')
        opened.wait_for("ok")
        wait_for_prompt(opened)
        opened.send("/nothing")
        opened.wait_for("error: /nothing: no such command; /help lists them")
        opened.press(UP + UP)
        opened.wait_for(lambda shown: shown.endswith('> """/reset\n· is a command"""'))
        opened.press(CTRL_C)
        wait_for_prompt(opened)
        opened.send("fill it")
        opened.wait_for(f"the context of {NUM_POSITIONS} tokens is full; /reset begins anew")
        wait_for_prompt(opened)
        opened.send("and on")
        opened.wait_for("error: the talk would have")
        assert ended(opened) == 0
    history = tmp_path / "state" / "dflash-moe" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    typed = [json.loads(line) for line in history.read_text().splitlines()]
    assert typed[:2] == ["Hi", "first\nsecond"]


def wait_for_typed(opened: Terminal, text: str) -> str:
    return opened.wait_for(lambda shown: shown.endswith(f"\n> {text}"))


def test_no_color_in_a_terminal_is_plain_text(tmp_path: Path) -> None:
    hostile = HOSTILE.replace("\n", " ")
    with chatting(
        tmp_path, [*THOUGHT, "**blue** ", hostile], SLOW, NO_COLOR="1", columns=40
    ) as opened:
        screen = ask(opened, "why?")
        assert re.search(r"\(thought for \d\.\d s\)\n\*\*blue\*\* A\\x1b\[2J", screen)
        opened.send("slow")
        opened.wait_for("One two")
        opened.press(CTRL_C)
        assert "\nstopped\n" in wait_for_prompt(opened)
        assert ended(opened) == 0
        assert ESCAPE not in opened.written
    assert not (tmp_path / "state").exists()  # no line editing, so no history


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_program_should_the_first_not_stop_the_answer(
    tmp_path: Path,
) -> None:
    with chatting(tmp_path, ["One ", {"stuck": 60}, "two"], columns=80) as opened:
        opened.send("slow")
        opened.wait_for("One")
        opened.press(CTRL_C + CTRL_C)  # pressed twice in haste
        time.sleep(1.2)
        assert opened.process.poll() is None
        opened.press(CTRL_C)
        assert opened.wait_for_end() == 130
        assert opened.lines()[-1] == "dflash-moe: error: interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("is_answering", [False, True])
def test_sigterm_leaves_the_terminal_as_it_was(tmp_path: Path, is_answering: bool) -> None:
    (tmp_path / "state").write_text("no folder")
    with chatting(tmp_path, SLOW) as opened:
        assert "what is typed is not kept: state directory" in opened.text()
        if is_answering:
            opened.send("slow")
            opened.wait_for("One two")
        assert not opened.is_as_before
        opened.process.terminate()
        assert opened.wait_for_end() == 128 + signal.SIGTERM
        assert opened.is_as_before
        assert b"Traceback" not in opened.written
        assert opened.written.rindex(b"\x1b[?25h") > opened.written.rindex(b"\x1b[?25l")


@pytest.mark.slow
def test_a_terminal_may_change_its_size_while_a_long_block_is_written(tmp_path: Path) -> None:
    code = "```python\n" + "".join(f"line_{number} = {number}\n" for number in range(60)) + "```\n"
    answer = [*pieces(code[:400]), 1.0, *pieces(code[400:]), 0.5]
    with chatting(tmp_path, answer, columns=80, rows=100) as opened:
        opened.send("long")
        opened.wait_for("line_15 = 15")
        opened.resize(columns=40, rows=100)
        screen = opened.wait_for(lambda shown: shown.endswith("\n>"))
        for number in range(60):
            assert f"line_{number} = {number}\n" in screen  # twice, if it stood there
        assert ended(opened) == 0


def piped(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    lines: str | bytes,
    *answers: Sequence[Any],
    more: Sequence[str] = (),
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a chat whose messages come from a pipe."""
    data = lines.encode() if isinstance(lines, str) else lines
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    template = folder / "chat.jinja"
    template.write_text("its own")
    with mock.patch.object(Engine, "open", return_value=ScriptedEngine([list(a) for a in answers])):
        done = run_main(main, "chat", "--chat-template-file", template, *more)
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_gets_the_answers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'one\n\n"""two\nlines"""\n/stats\n\xff\xfe bytes\n"""open'
    code, out, err = piped(
        monkeypatch, tmp_path, lines, [*THOUGHT, "**a**\n"], ["b\x1b[31m"], ["c"]
    )
    assert (code, out) == (0, "**a**\nb\x1b[31m\nc\nc\n")  # as generate: a pipe gets it unchanged
    assert err.startswith("talk ")
    code, out, err = piped(monkeypatch, tmp_path, "", ["x"])
    assert (code, out, err) == (0, "", "")


def test_an_error_ends_a_chat_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lines, answer, code, reason in (
        ("x\ny\n", ["part", None], 1, "cpu0: it has ended"),
        ("/nothing\n", ["x"], 2, "/nothing: no such command; /help lists them"),
        ("x" * ((4 << 20) + 1), ["x"], 2, "a message has more than 4194304 characters"),
        ("x" * 100_000, ["x"], 2, "a prompt of .* tokens does not fit the context of 400"),
    ):
        found, _, err = piped(monkeypatch, tmp_path, lines, answer)
        assert found == code
        assert re.fullmatch(f"(?s).*dflash-moe: error: {reason}[^\n]*\n", err)


SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", SHAPE, seed=1, tokenizer="bytes")
    done = run_main(main, "chat", model, "--backend", "reference")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "dflash-moe: error: this model has no chat template: give one with --chat-template-file, "
        "or continue a text with dflash-moe generate\n"
    )


def test_a_real_model_answers_turn_after_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"tokenizer.chat_template": CHAT_TEMPLATE}
    model = write_model(tmp_path / "m.gguf", SHAPE, seed=1, tokenizer="bytes", keys=keys)
    lines = io.BytesIO(b"one\ntwo\n/stats\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines, encoding="utf-8"))
    done = run_main(
        main, "chat", model, "--backend", "reference", "-n", "8", "--seed", "1", "--system", "Be."
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert re.search(r"^answer +8 tokens", done.stderr, re.MULTILINE)
    kept = re.search(r"^prompt +(\d+) tokens, (\d+) kept", done.stderr, re.MULTILINE)
    assert kept is not None
