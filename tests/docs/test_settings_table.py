"""The table of settings in docs/operations.md says what the table in the code says."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_protocol.setting_kinds import Switch
from dflash_protocol.settings_file import DAEMON_KEYS, read_settings_file
from dflash_protocol.settings_table import (
    KNOBS,
    SETTINGS_FILE,
    SETTINGS_FLAG,
    SETTINGS_HELP,
    Knob,
    knobs_of,
)
from support.processes import ROOT, run_cli

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
HEAD = "| variable | flag | key | default | must be | meaning |"


def row(knob: Knob) -> str:
    flag = f"{knob.flag}`, `--no-{knob.flag[2:]}" if isinstance(knob.kind, Switch) else knob.flag
    default = f"`{knob.default_text}`" if knob.default_text else "none"
    cells = [f"`{knob.variable}`", f"`{flag}`", f"`{knob.key}`", default, knob.kind.allowed]
    return "| " + " | ".join([*cells, knob.help]) + " |"


def test_the_table_of_the_document_is_the_table_of_the_code() -> None:
    file_row = f"| `{SETTINGS_FILE}` | `{SETTINGS_FLAG}` |  | none | a path | {SETTINGS_HELP} |"
    expected = [HEAD, "|---|---|---|---|---|---|", file_row, *map(row, KNOBS)]
    lines = OPERATIONS.splitlines()
    assert HEAD in lines
    first = lines.index(HEAD)
    assert lines[first : first + len(expected)] == expected
    assert not lines[first + len(expected)].startswith("|")


def test_the_file_of_the_document_can_be_read(tmp_path: Path) -> None:
    example = OPERATIONS.partition("### A settings file")[2].split("```")[1].removeprefix("toml")
    file = tmp_path / "moe.toml"
    file.write_text(example)
    values = read_settings_file(file)
    assert {"ipc_mode", "ipc_required", "connect", "daemons"} == set(values)
    for key in DAEMON_KEYS:
        assert f"\n{key} = " in example


def test_every_file_of_settings_that_is_shown_can_be_read(tmp_path: Path) -> None:
    shown = [
        (path.name, example)
        for path in sorted((ROOT / "docs").glob("*.md"))
        for example in re.findall(
            r"^```toml\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE
        )
    ]
    assert len(shown) > 1
    for name, example in shown:
        file = tmp_path / "moe.toml"
        file.write_text(example)
        values = read_settings_file(file)
        assert values, name


def test_every_setting_is_an_option_of_the_programs_that_read_it() -> None:
    generate = run_cli("generate", "--help").stdout
    doctor = run_cli("doctor", "--help").stdout
    daemon = run_cli("daemon", "--help").stdout
    of_parents = {knob.flag for knob in knobs_of(daemon=False)}
    of_daemons = {knob.flag for knob in knobs_of(daemon=True)}
    for flag in [SETTINGS_FLAG, *(knob.flag for knob in KNOBS)]:
        for text in (generate, doctor):
            assert (f"  {flag} " in text) == (flag in {SETTINGS_FLAG, *of_parents}), flag
        is_listed = f"  {flag} " in daemon or f"  {flag}, " in daemon
        assert is_listed == (flag in {SETTINGS_FLAG, *of_daemons}), flag
    assert "--data-port" in of_daemons - of_parents


def test_names_are_used_once() -> None:
    for names in (
        [knob.variable for knob in KNOBS],
        [knob.flag for knob in KNOBS],
        [knob.key for knob in KNOBS],
        [knob.field for knob in KNOBS],
    ):
        assert len(set(names)) == len(names)
