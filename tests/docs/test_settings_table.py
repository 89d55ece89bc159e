"""Settings files of the documents can be read, and each setting is an option of the programs."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_protocol.settings.file import DAEMON_KEYS, read_settings_file
from dflash_protocol.settings.table import (
    KNOBS,
    SETTINGS_FLAG,
    knobs_of,
)
from dflash_runtime.cli.main import cli
from support.processes import ROOT, run_cli

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_the_file_of_the_document_can_be_read(tmp_path: Path) -> None:
    example = OPERATIONS.partition("### A settings file")[2].split("```")[1].removeprefix("toml")
    file = tmp_path / "moe.toml"
    file.write_text(example)
    values = read_settings_file(file)
    expected = {"model", "context", "ipc_mode", "ipc_required", "connect", "daemons"}
    assert expected == set(values)
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
    for text in (generate, doctor, daemon):
        assert "[MODEL]" in text
    for flag in [SETTINGS_FLAG, *(knob.flag for knob in KNOBS if not knob.is_argument)]:
        for text in (generate, doctor):
            is_listed = f"  {flag} " in text or f", {flag} " in text
            assert is_listed == (flag in {SETTINGS_FLAG, *of_parents}), flag
        is_listed = f"  {flag} " in daemon or f"  {flag}, " in daemon
        assert is_listed == (flag in {SETTINGS_FLAG, *of_daemons}), flag
    assert "--data-port" in of_daemons - of_parents


def options_of_commands() -> dict[str, set[str]]:
    """Names of all that can be given to each command of `dflash-moe` but its daemon."""
    return {
        name: {parameter.name or "" for parameter in command.params}
        for name, command in cli.commands.items()
    }


OF_ONE_RUN = {
    # What is asked for this time, and how it is shown.
    "prompt", "prompt_file", "token_ids", "chat", "max_tokens", "temperature", "top_k", "top_p",
    "min_p", "seed", "system", "stops", "ignore_eos", "as_json", "with_digest", "phase", "measure",
    "save_path",
    # What is shown, and what is written of it.
    "file", "csv_path", "traces", "slots", "budget_mb", "cache_slots", "half_life", "margin",
    "box", "per_layer",
    # What `bench` measures, and how it writes that.
    "prompts", "written", "depths", "repetitions", "as_csv",
    # Of one trial: see docs/operations.md.
    "mailbox", "rounds",
    # llama.cpp's two names of one setting.
    "keys_type", "values_type",
    # Names the file that has the others.
    "settings_file",
    # Of `pull` and `rm`: a model, and whether to ask.
    "name", "yes",
    # Of `keygen`, which makes files.
    "folder", "force", "comment",
    # Handed on to the daemon.
    "arguments",
}  # fmt: skip


def test_every_option_is_a_setting_but_those_of_one_run() -> None:
    fields = {knob.field for knob in KNOBS}
    options = options_of_commands()
    for name in ("generate", "serve", "inspect"):
        assert "model" in options[name]
    assert set().union(*options.values()) - fields == OF_ONE_RUN


def test_the_model_alone_is_an_argument() -> None:
    assert [knob.field for knob in KNOBS if knob.is_argument] == ["model"]


def test_names_are_used_once() -> None:
    for names in (
        [knob.variable for knob in KNOBS],
        [knob.flag for knob in KNOBS],
        [knob.key for knob in KNOBS],
        [knob.field for knob in KNOBS],
    ):
        assert len(set(names)) == len(names)
