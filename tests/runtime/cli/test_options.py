"""Settings as command-line options: what is given reaches the Settings, and the whole program."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings
from dflash_protocol.settings.table import KNOBS, SETTINGS_FILE
from dflash_runtime.cli.generate import generate
from dflash_runtime.cli.options import (
    SettingsCommand,
    server_options,
    settings_options,
    take_settings,
)
from dflash_runtime.cli.serve import serve
from dflash_runtime.compute import DAEMON_MEMORY_ADVICE, MEMORY_ADVICE

PREFIX = "DFLASH_MOE_EXPERT_COMPUTE_"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs change the environment of their process; after a test it is as it was before."""
    for variable in (SETTINGS_FILE, *(knob.variable for knob in KNOBS)):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def taken(*arguments: str) -> Settings:
    """The settings of a command that is given these arguments."""
    found: list[Settings] = []

    @click.command(cls=SettingsCommand)
    @click.option("--other", is_flag=True, help="Of its own.")
    @settings_options
    def command(other: bool, **options: Any) -> None:
        found.append(take_settings(options))
        assert options == {}

    done = CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
    assert done.output == ""
    return found[0]


def test_no_flags_are_the_defaults() -> None:
    assert taken() == taken("--other") == Settings()


def test_flags_of_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "moe.toml"
    file.write_text('ipc_dtype = "f16"\nthreads = 3\nipc_profile = true\n')
    settings = taken(
        "--settings", str(file), "--ipc-mode", "stream", "--threads", "5", "--require-daemons",
        "--no-ipc-profile", "--daemon", "cpu", "--daemon", "cpu@/bin/a,b",
        "--connect", "ipc:///run/a", "--connect", "ipc:///run/b", "--cache-dir", "some",
    )  # fmt: skip
    assert (settings.ipc_mode, settings.threads, settings.ipc_dtype) == ("stream", 5, "f16")
    assert (settings.ipc_required, settings.ipc_profile) == (True, False)
    assert [each.launcher for each in settings.daemons] == ["", "/bin/a,b"]
    assert settings.connect == ("ipc:///run/a", "ipc:///run/b")
    assert settings.cache_dir == "some"
    assert taken("--device", "hip:1").device == Device(DeviceKind.HIP, 1)


def test_the_model_and_what_it_is_opened_with_are_settings_as_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "moe.toml"
    file.write_text(
        'model = "of-the-file.gguf"\ncontext = 20\nlocal_experts = 3\nkv_type = "f16"\n'
        'backend = "reference"\n'
    )
    of_file = taken("--settings", str(file))
    assert (of_file.model, of_file.context, of_file.local_experts) == ("of-the-file.gguf", 20, 3)
    assert (of_file.kv_type, of_file.backend) == ("f16", "reference")
    monkeypatch.setenv(PREFIX + "CONTEXT", "30")
    monkeypatch.setenv(PREFIX + "MODEL", "of-the-variable.gguf")
    assert taken("--settings", str(file)).context == 30
    assert taken("--settings", str(file)).model == "of-the-variable.gguf"
    given = taken("--settings", str(file), "given.gguf", "--context", "auto")
    assert (given.model, given.context, given.local_experts) == ("given.gguf", None, 3)


def test_a_server_takes_its_own_settings_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the file that a variable names, which is hidden from others afterwards."""
    file = tmp_path / "moe.toml"
    file.write_text('port = 1234\nqueue_capacity = 3\nipc_mode = "stream"\n')
    monkeypatch.setenv(SETTINGS_FILE, str(file))
    found: list[Settings] = []

    @click.command(cls=SettingsCommand)
    @server_options
    @settings_options
    def command(**options: Any) -> None:
        found.append(take_settings(options))
        assert options == {}

    CliRunner().invoke(command, ["--port", "99"], standalone_mode=False, catch_exceptions=False)
    [settings] = found
    assert (settings.port, settings.queue_capacity, settings.ipc_mode) == (99, 3, "stream")
    help_text = CliRunner().invoke(command, ["--help"]).output
    assert "[8080]" in help_text
    assert "--api-key-file" in help_text


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^--heartbeat-ms='9'.* 10 "):
        taken("--heartbeat-ms", "9")
    assert taken("--heartbeat-ms", "10").heartbeat_ms == 10


def test_settings_are_taken_and_the_environment_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "moe.toml"
    file.write_text('cpu_tier = "avx2"\n')
    monkeypatch.setenv(PREFIX + "IPC_WORK_DIR", "/run/of-the-variable")
    before = dict(os.environ)
    settings = taken("--settings", str(file), "--cache-dir", "/of-the-flag")
    assert (settings.cache_dir, settings.cpu_tier) == ("/of-the-flag", "avx2")
    assert settings.run_dir == "/run/of-the-variable"
    assert dict(os.environ) == before


@pytest.mark.parametrize("advice", [MEMORY_ADVICE, DAEMON_MEMORY_ADVICE])
@pytest.mark.parametrize("command", [serve, generate])
def test_what_is_advised_where_memory_is_short_can_be_done(
    advice: str, command: click.Command
) -> None:
    named = set(re.findall(r"--[a-z-]+", advice))
    assert named
    assert named <= {flag for option in command.params for flag in option.opts}


@pytest.mark.parametrize(
    "arguments",
    [("-ctk", "q8_0", "-ctv", "Q8_0"), ("-ctk", "q8_0", "-ctv", "q8_0", "--kv-type", "q8_0")],
)
def test_equal_types_of_keys_and_values_are_the_kv_type(arguments: tuple[str, ...]) -> None:
    assert taken(*arguments).kv_type == "q8_0"


@pytest.mark.parametrize(
    "arguments",
    [
        ("-ctk", "q8_0"),
        ("-ctv", "f16", "--kv-type", "f16"),
        ("-ctk", "q8_0", "-ctv", "f16"),
        ("-ctk", "q8_0", "-ctv", "q8_0", "--kv-type", "f16"),
        ("-ctk", "q4_0", "-ctv", "q4_0"),
    ],
)
def test_other_types_of_keys_and_values_are_refused_by_name(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        taken(*arguments)
    text = str(caught.value)
    assert "--kv-type" in text
    assert len(text.splitlines()) == 1
