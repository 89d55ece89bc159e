"""Help of every command: whole sentences, examples, and the name that people type."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from dflash_daemon.__main__ import main as daemon_main
from dflash_protocol.settings.table import KNOBS, SETTINGS_HELP
from dflash_runtime.cli.main import cli
from dflash_runtime.cli.options import SettingOption
from support.processes import run_main

COMMANDS = sorted(set(cli.commands) - {"daemon"})


def help_of(*command: str, width: int = 80) -> str:
    """What ``--help`` of a command shows on a terminal of so many columns."""
    if command == ("daemon",):
        return run_main(daemon_main, "--help", COLUMNS=str(width)).stdout
    done = CliRunner().invoke(
        cli, [*command, "--help"], prog_name="dflash-moe", terminal_width=width
    )
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("command", [(), ("daemon",), *((name,) for name in COMMANDS)])
def test_nothing_is_cut_off(command: tuple[str, ...], width: int) -> None:
    text = help_of(*command, width=width)
    assert text.lower().startswith(f"usage: {' '.join(('dflash-moe', *command))} ")
    lines = text.splitlines()[1:]  # after the usage, where dots stand for more arguments
    assert not [line for line in lines if line.rstrip().endswith(("...", "…"))]
    assert "dflash-daemon" not in text
    if command:
        name = re.escape(command[0])
        assert re.search(rf"(?im)^ *examples:\n +dflash-moe {name}\b", text)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_list_of_commands_says_what_each_does_to_the_end(name: str) -> None:
    command = cli.commands[name]
    shown = " ".join(help_of().split())
    assert command.short_help is not None
    assert f"{name} {command.short_help}" in shown
    assert command.short_help.endswith(".")


def test_every_flag_is_explained_by_whole_sentences() -> None:
    texts = {knob.variable: knob.help for knob in KNOBS} | {"settings": SETTINGS_HELP}
    own = [
        (name, parameter)
        for name in COMMANDS
        for parameter in cli.commands[name].params
        if isinstance(parameter, click.Option) and not isinstance(parameter, SettingOption)
    ]
    texts |= {f"{name} {option.opts[-1]}": option.help or "" for name, option in own}
    assert len(texts) > len(KNOBS)
    assert {what: text for what, text in texts.items() if not re.match(r"[A-Z].*\.$", text)} == {}


def test_help_does_not_wait_for_what_commands_need() -> None:
    code = "import sys, dflash_runtime.cli.main; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
