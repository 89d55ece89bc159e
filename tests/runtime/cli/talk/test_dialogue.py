"""A dialogue keeps what was said and answered, and nothing of what failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_adapters.text.answers import Content, Reasoning
from dflash_protocol.errors import ContextExceeded, DaemonUnavailable, SettingsError
from dflash_runtime.cli.talk.commands import HELP, TalkCommands
from dflash_runtime.cli.talk.dialogue import Dialogue, TalkOptions
from dflash_runtime.cli.talk.reading import is_open, unquoted
from dflash_runtime.cli.talk.views import TalkScreen
from support.scripted_chat import NUM_POSITIONS, ScriptedEngine


def dialogue(
    *answers: list[Any], max_tokens: int | None = None, stops: tuple[str, ...] = ()
) -> Dialogue:
    options = TalkOptions(max_tokens=max_tokens, sampling={}, stops=stops)
    return Dialogue(ScriptedEngine([*answers]), options, system="Be brief.")  # type: ignore[arg-type]


def ask(
    talk: Dialogue, question: str = "why?", is_cancelled: Callable[[], bool] = lambda: False
) -> tuple[str, str]:
    """The reasoning and the content of the answer."""
    answer = talk.ask(question, is_cancelled=is_cancelled, on_prefill=lambda done, total: None)
    events = list(answer)
    return (
        "".join(each.text for each in events if isinstance(each, Reasoning)),
        "".join(each.text for each in events if isinstance(each, Content)),
    )


def test_questions_and_answers_are_kept_without_the_reasoning() -> None:
    talk = dialogue(["<think>", "hm", "</think>", "be", "cause"], ["so"])
    assert ask(talk) == ("hm", "because")
    assert ask(talk, "really?") == ("", "so")
    assert talk.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because"},
        {"role": "user", "content": "really?"},
        {"role": "assistant", "content": "so"},
    ]
    assert talk.totals.num_answers == 2
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_an_answer_may_begin_within_the_reasoning_that_the_prompt_opened() -> None:
    assert ask(dialogue([{"thinks": True}, "hm", "</think>", "so"])) == ("hm", "so")


def test_a_model_that_never_ends_its_reasoning_has_no_answer() -> None:
    talk = dialogue(["<think>", "hm ", "hm "], max_tokens=3)
    assert ask(talk) == ("hm hm", "")
    assert (talk.turns, talk.end) == ([], "length")


def test_what_was_written_until_it_was_stopped_is_kept() -> None:
    talk = dialogue(["one ", "two ", "three"])
    pressed = iter([False, False, True])
    assert ask(talk, is_cancelled=lambda: next(pressed)) == ("", "one two ")
    assert talk.end == "cancelled"
    assert talk.turns[-1] == {"role": "assistant", "content": "one two "}
    assert ask(talk)[1] == "one two three"


def test_a_question_without_answer_or_with_an_error_is_not_kept() -> None:
    talk = dialogue(["part", None], ["good"])
    with pytest.raises(DaemonUnavailable):
        ask(talk)
    assert talk.turns == []
    assert ask(talk, is_cancelled=lambda: True) == ("", "")
    assert talk.turns == []
    assert ask(talk)[1] == "good"
    assert len(talk.turns) == 2


def test_a_stop_text_ends_the_answer_wherever_tokens_split_it() -> None:
    talk = dialogue(["so #", "#", "# and on", "never"], stops=("###",))
    assert ask(talk) == ("", "so ")
    assert talk.end == "stop"
    assert talk.turns[-1]["content"] == "so "


def test_a_talk_that_has_no_room_for_an_answer_is_refused_and_kept() -> None:
    talk = dialogue(["x"])
    ask(talk)
    for length in (4 * NUM_POSITIONS, 100 * NUM_POSITIONS):
        with pytest.raises(ContextExceeded):
            ask(talk, "y" * length)
    assert len(talk.turns) == 2
    ask(talk, "z")
    assert len(talk.turns) == 4


def test_an_answer_ends_where_the_context_does() -> None:
    talk = dialogue(["word "] * 2 * NUM_POSITIONS)
    ask(talk)
    assert talk.end == "context"
    assert talk.totals.num_held == NUM_POSITIONS


@pytest.mark.parametrize(
    ("text", "opens", "content", "is_quoted"),
    [
        ("plain", False, "plain", False),
        ('"""', True, "", True),
        ('"""one', True, "one", True),
        ('"""one\ntwo"""', False, "one\ntwo", True),
        ('"""\n/reset\n"""\n', False, "/reset", True),
        ('""""""', False, "", True),
        ('""""', True, '"', True),
        ('  """ x """  ', False, " x ", True),
        ('say """x"""', False, 'say """x"""', False),
    ],
)
def test_quotes_hold_several_lines(text: str, opens: bool, content: str, is_quoted: bool) -> None:
    assert is_open(text) is opens
    if content or not opens:
        assert unquoted(text) == (content, is_quoted)


class Commands:
    """Commands of a dialogue in which one question was answered."""

    def __init__(self, answer: str = "because\x1b[2J") -> None:
        self.talk = dialogue([answer])
        self.screen = TalkScreen(None)
        self.run = TalkCommands(self.talk, self.screen, model="m").run


def test_what_is_no_command_is_a_message() -> None:
    commands = Commands()
    for text in ("hello", "/usr/bin", "//reset", "/", "/2", "a /reset", "/Reset"):
        assert commands.run(text) is None
    with pytest.raises(SettingsError, match=r"^/resett: no such command; /help lists them"):
        commands.run("/resett")


def test_help_names_every_command_in_40_columns() -> None:
    commands = Commands()
    text = "\n".join(commands.run("/help") or [])
    for name in ("help", "reset", "system", "save", "stats", "reasoning"):
        assert f"/{name} " in text
        if name not in ("help", "save"):
            assert commands.run(f"/{name}")
    assert max(map(len, HELP)) <= 40


def test_the_system_prompt_is_shown_changed_and_kept() -> None:
    commands = Commands()
    assert commands.run("/system") == ["Be brief."]
    commands.run("/system Speak\nFrench.")
    commands.run("/reset")
    assert commands.talk.messages == [{"role": "system", "content": "Speak\nFrench."}]


def test_a_talk_is_saved_as_messages_or_markdown_and_overwrites_only_itself(
    tmp_path: Path,
) -> None:
    commands = Commands()
    with pytest.raises(SettingsError, match="nothing was said"):
        commands.run(f"/save {tmp_path}/a.json")
    ask(commands.talk)
    with pytest.raises(SettingsError, match="needs the name"):
        commands.run("/save")
    commands.run(f"/save {tmp_path}/a.json")
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved == {"model": "m", "messages": commands.talk.messages}
    commands.run(f"/save {tmp_path}/a.json")
    (tmp_path / "mine").write_text("x")
    for name, reason in (("mine", "is there already"), ("no/a", "No such file"), ("a\0", "null")):
        with pytest.raises(SettingsError, match=reason):
            commands.run(f"/save {tmp_path}/{name}")
    assert (tmp_path / "mine").read_text() == "x"
    commands.run(f"/save {tmp_path}/a b.md")
    assert (tmp_path / "a b.md").read_text() == (
        "# Talk with m\n\n## System\n\nBe brief.\n\n## You\n\nwhy?\n\n## Model\n\nbecause\x1b[2J\n"
    )
