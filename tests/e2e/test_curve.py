"""Links with keys, end to end: made by keygen, served by a daemon, used by an engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.errors import DaemonUnavailable, SettingsError
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.transports.curve import (
    AUTHORIZED_FILE,
    KNOWN_FILE,
    PUBLIC_FILE,
    SECRET_FILE,
    generate_keys,
    load_keys,
)
from dflash_runtime import Engine
from support.processes import ROOT, environment, free_port, run_cli, running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

KEYS_DIR = "DFLASH_MOE_EXPERT_COMPUTE_KEYS_DIR"
TOKENS = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key folders of a daemon and of a parent, made by the command."""
    folder = tmp_path_factory.mktemp("keys")
    for who in ("daemon", "parent"):
        done = run_cli("keygen", folder / who, "--comment", who)
        assert done.returncode == 0, done.stderr
        public = (folder / who / PUBLIC_FILE).read_text().split()[1]
        assert public in done.stdout
        assert (folder / who / SECRET_FILE).read_text().split()[1] not in done.stdout
    return folder


def own_address() -> str:
    """An address of this machine other than the loopback one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def introduce(folder: Path, host: str) -> None:
    """Copy the public keys, as an operator does."""
    public = {who: (folder / who / PUBLIC_FILE).read_text() for who in ("daemon", "parent")}
    (folder / "daemon" / AUTHORIZED_FILE).write_text(public["parent"])
    (folder / "parent" / KNOWN_FILE).write_text(f"{host} {public['daemon']}")


def settings_with(folder: Path, who: str) -> Settings:
    return load_settings(
        {KEYS_DIR: str(folder / who), "DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS": "20000"}
    )


@pytest.mark.parametrize("beyond", [False, True], ids=["loopback", "beyond"])
def test_a_parent_and_a_daemon_with_keys_work_together(
    model: Path, made: Path, *, beyond: bool
) -> None:
    host = own_address() if beyond else "127.0.0.1"
    introduce(made, host)
    endpoint = f"tcp://{host}:{free_port(host)}"
    with Engine.open(model) as engine:
        expected = engine.logits(TOKENS)
    with (
        running_daemon(model, endpoint, **{KEYS_DIR: str(made / "daemon")}),
        Engine.open(
            model,
            connect=[endpoint],
            # However late a daemon on a busy machine answers, it gets its share.
            settings=replace(settings_with(made, "parent"), fit="off"),
            require_daemons=True,
        ) as engine,
    ):
        np.testing.assert_array_equal(engine.logits(TOKENS), expected)
        assert engine.stats().owners["link0"].bytes_received > 0
        assert engine.stats().events == []


def test_a_parent_without_the_right_key_gets_nothing(
    model: Path, made: Path, tmp_path: Path
) -> None:
    introduce(made, "127.0.0.1")
    generate_keys(tmp_path / "stranger", comment="")
    (tmp_path / "stranger" / KNOWN_FILE).write_text((made / "parent" / KNOWN_FILE).read_text())
    (tmp_path / "fooled").mkdir(mode=0o700)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with running_daemon(model, endpoint, **{KEYS_DIR: str(made / "daemon")}):
        for folder, who in ((tmp_path, "stranger"), (tmp_path, "none")):
            with pytest.raises(DaemonUnavailable, match="link0"):
                Engine.open(model, connect=[endpoint], settings=settings_with(folder, who))
        with Engine.open(
            model, connect=[endpoint], settings=settings_with(made, "parent")
        ) as engine:
            assert len(engine.logits(TOKENS)) == len(TOKENS)
            assert engine.stats().events == []


def test_a_parent_does_not_talk_to_a_daemon_with_another_key(
    model: Path, made: Path, tmp_path: Path
) -> None:
    introduce(made, "127.0.0.1")
    keys = generate_keys(tmp_path / "impostor", comment="")
    assert keys != load_keys(made / "daemon")
    (tmp_path / "impostor" / AUTHORIZED_FILE).write_text(
        (made / "daemon" / AUTHORIZED_FILE).read_text()
    )
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        running_daemon(model, endpoint, **{KEYS_DIR: str(tmp_path / "impostor")}),
        pytest.raises(DaemonUnavailable, match="link0"),
    ):
        Engine.open(model, connect=[endpoint], settings=settings_with(made, "parent"))


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7777", "tcp://*:7777", "tcp://[::]:7777"])
def test_a_daemon_without_keys_does_not_listen_beyond_this_machine(
    model: Path, tmp_path: Path, address: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_daemon", str(model), "--listen", address],
        env=environment(**{KEYS_DIR: str(tmp_path / "none")}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert address in done.stderr
    assert f"dflash-moe keygen {tmp_path / 'none'}" in done.stderr


def test_a_parent_without_keys_does_not_connect_beyond_this_machine(
    model: Path, made: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="dflash-moe keygen"):
        Engine.open(
            model, connect=["tcp://192.0.2.1:7777"], settings=settings_with(tmp_path, "none")
        )
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1 dflash-public-key"):
        Engine.open(model, connect=["tcp://192.0.2.1:7777"], settings=settings_with(made, "parent"))


def test_keygen_replaces_nothing_unasked_and_has_examples(tmp_path: Path) -> None:
    default = {KEYS_DIR: str(tmp_path / "keys")}
    assert run_cli("keygen", **default).returncode == 0
    secret = (tmp_path / "keys" / SECRET_FILE).read_bytes()
    again = run_cli("keygen", **default)
    assert again.returncode == 2
    assert len(again.stderr.splitlines()) == 1
    assert "--force" in again.stderr
    assert (tmp_path / "keys" / SECRET_FILE).read_bytes() == secret
    assert run_cli("keygen", "--force", **default).returncode == 0
    assert (tmp_path / "keys" / SECRET_FILE).read_bytes() != secret
    assert "dflash-moe keygen /etc" in run_cli("keygen", "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["control", "data"])
@pytest.mark.parametrize("kind", ["silent", "garbage", "null", "hello", "stranger"])
def test_a_flood_of_strangers_does_not_stop_a_good_client(kind: str, target: str) -> None:
    """A short run of the bench, whose figures it checks with room for a busy machine."""
    done = subprocess.run(
        [
            sys.executable, "-m", "bench.curve_flood", "--kinds", kind, "--target", target,
            "--seconds", "0.8", "--rounds", "3", "--json",
        ],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["connections_per_s"] > 300
    assert result["slow_down_p50"] < 0.5
