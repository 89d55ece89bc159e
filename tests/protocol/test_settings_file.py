"""Settings files: every key, every wrong one, and whatever else may be in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.device import parse_device
from dflash_protocol.errors import SettingsError
from dflash_protocol.setting_kinds import (
    Cores,
    DaemonSetting,
    DeviceOrAuto,
    EndpointText,
    OneOf,
    Switch,
    Whole,
)
from dflash_protocol.settings import load_settings
from dflash_protocol.settings_file import read_settings_file
from dflash_protocol.settings_table import KNOBS, HostName, Knob
from support.examples import examples

SCALARS = [knob for knob in KNOBS if knob.field not in ("daemons", "connect")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "moe.toml"


def refusal(file: Path, content: str | bytes) -> str:
    """The one line that a file with this content is refused with; a good one is read afterwards."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SettingsError) as caught:
        load_settings({}, file=file)
    reason = str(caught.value)
    assert len(reason.splitlines()) == 1
    assert len(reason) < 500
    file.write_text("threads = 2\n")
    assert load_settings({}, file=file).threads == 2
    return reason


@pytest.mark.parametrize("knob", SCALARS, ids=lambda knob: str(knob.key))
def test_every_key_sets_the_field_that_its_variable_sets(file: Path, knob: Knob) -> None:
    value: object = "/some/path"
    toml, text = '"/some/path"', "/some/path"
    if isinstance(knob.kind, Whole):
        value = knob.kind.smallest + 1
        toml = text = str(value)
    elif isinstance(knob.kind, OneOf):
        value, toml, text = knob.kind.words[1], f'"{knob.kind.words[1]}"', knob.kind.words[1]
    elif isinstance(knob.kind, Switch):
        value, toml, text = True, "true", "1"
    elif isinstance(knob.kind, HostName):
        value, toml, text = "::1", '"::1"', "::1"
    elif isinstance(knob.kind, DeviceOrAuto):
        value, toml, text = parse_device("hip:2"), '"hip:2"', "hip:2"
    elif isinstance(knob.kind, EndpointText):
        value = text = "ipc:///run/moe/some.sock"
        toml = f'"{text}"'
    elif isinstance(knob.kind, Cores):
        value, toml, text = "0-3,8", '"0-3,8"', "0-3,8"
    file.write_text(f"{knob.key} = {toml}\n")
    assert getattr(load_settings({}, file=file), knob.field) == value
    assert load_settings({}, file=file) == load_settings({knob.variable: text})
    assert load_settings({}, file=file) == load_settings({}, flags={
        knob.field: True if isinstance(knob.kind, Switch) else text
    })  # fmt: skip


@pytest.mark.parametrize("knob", SCALARS, ids=lambda knob: str(knob.key))
@pytest.mark.parametrize("toml", ["[1]", "{}", "1.5", "1979-05-27", "-1", "99999999999999"])
def test_a_value_of_another_type_is_refused_with_file_and_key(
    file: Path, knob: Knob, toml: str
) -> None:
    reason = refusal(file, f"{knob.key} = {toml}\n")
    assert reason.startswith(f"{file}: {knob.key}=")
    assert ": must be " in reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("heartbeat_ms = true", "heartbeat_ms=True: must be a whole number from 10 to 60000"),
        ('heartbeat_ms = "50"', "heartbeat_ms='50': must be a whole number"),
        ("ipc_required = 1", "ipc_required=1: must be true or false"),
        ('ipc_mode = "fast"', "ipc_mode='fast': must be one of auto, batched, stream"),
        ('cache_dir = "a\\u0000b"', "cache_dir='a\\x00b': must be a path of printable"),
        ('connect = "ipc:///x"', "connect='ipc:///x': must be an array of strings"),
        ('connect = ["x"]', "connect=['x']: endpoint 'x' is neither"),
        ("connect = [1]", "connect=[1]: must be an array of strings"),
        ("ipc_modes = 1", "unknown key 'ipc_modes'; did you mean ipc_mode"),
        ("zzz = 1", "unknown key 'zzz'; docs/operations.md lists them all"),
        ('local_experts = "most"', "local_experts='most': must be auto or a whole number from 0"),
        ('cores = "all"', "cores='all': must be numbers and ranges with commas"),
        ('listen = "x"', "listen='x': endpoint 'x' is neither"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ('daemons = "cpu"', "unknown key 'daemons'"),
        ('"a\\nb" = 1', "unknown key 'a\\nb'"),
        ("heartbeat_ms = 50\nheartbeat_ms = 60", "Cannot overwrite a value"),
        ("heartbeat_ms 50", "Expected '='"),
        (b"\xff\xfe", "not UTF-8 text"),
        ("x = " + "9" * 6000, "integer string conversion"),
        ("x = " + "[" * 50_000, "nested too deeply"),
        (b"#" * ((1 << 20) + 1), "larger than 1 MiB"),
        ("daemon = 1", "daemon: must be at most 64 tables"),
        ("daemon = [1]", "daemon[0]=1: must be a table"),
        ("[daemon]", "daemon: must be at most 64 tables"),
        ("[[daemon]]\n" * 65, "daemon: must be at most 64 tables"),
        ("[[daemon]]\nport = 1", "daemon[0]: unknown key 'port'; known are name, device, launcher"),
        ("[[daemon]]\n[[daemon]]\ndevice = 0", "daemon[1].device=0: must be DEVICE[@LAUNCHER]"),
        ('[[daemon]]\ndevice = "cpu@x"', "daemon[0].device='cpu@x': must be"),
        ('[[daemon]]\nname = "a/b"', "daemon[0].name='a/b': must be a letter"),
        ('[[daemon]]\nname = "local"', "daemon[0].name='local': must be"),
        ("[[daemon]]\nthreads = 0", "daemon[0].threads=0: must be a whole number from 1 to 1024"),
        ("[[daemon]]\ncores = [0]", "daemon[0].cores=[0]: must be text"),
        ("[[daemon]]\nlauncher = 1", "daemon[0].launcher=1: must be a path"),
        ("[[daemon]]\nenv = 1", "daemon[0].env=1: must be a table of variables"),
        ('[[daemon]]\nenv = {A = 1}', "the value of A must be text"),
        ('[[daemon]]\nenv = {"A=B" = "x"}', "'A=B' is no name of a variable"),
        ('[[daemon]]\nenv = {A = "x\\u0000"}', "the value of A must be text"),
        (
            '[[daemon]]\nenv = {DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE = "stream"}',
            "a spawned daemon does not read it: unknown variable "
            "'DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE'; did you mean",
        ),
        (
            '[[daemon]]\nenv = {DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER = "sse"}',
            "must be one of auto, amx",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "bytes",
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_file_and_key(
    file: Path, content: str | bytes, message: str
) -> None:
    reason = refusal(file, content)
    assert str(file) in reason
    assert message in reason


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.toml: No such file"):
        load_settings({}, file=tmp_path / "nothing.toml")
    with pytest.raises(SettingsError, match="Is a directory"):
        load_settings({}, file=tmp_path)


def test_daemons_have_launcher_device_environment_and_cores_of_their_own(file: Path) -> None:
    file.write_text("""
        [[daemon]]

        [[daemon]]
        name = "second.card"
        device = "cuda:1"
        launcher = "/opt/cuda-env/bin/python"
        cores = "0-3,8"
        threads = 4
        [daemon.env]
        CUDA_VISIBLE_DEVICES = "1"
        DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER = "avx2"
    """)
    assert load_settings({}, file=file).daemons == (
        DaemonSetting("cpu"),
        DaemonSetting(
            "cuda:1",
            "/opt/cuda-env/bin/python",
            name="second.card",
            cores="0-3,8",
            threads=4,
            environment=(
                ("CUDA_VISIBLE_DEVICES", "1"),
                ("DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER", "avx2"),
            ),
        ),
    )
    sources = [each.source for each in load_settings({}, file=file).daemons]
    assert sources == [f"{file}: daemon[0]", f"{file}: daemon[1]"]


@examples(300)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from(
                [*(knob.key for knob in KNOBS), "daemon", "[[daemon]]", "=", " ", "\n", '"', "[",
                 "]", "{", "}", "1", "true", "cpu", "env", "device", "\\u0000", "'", ",", "#"]
            ),
            max_size=20,
        ).map(lambda parts: "".join(parts).encode()),
    )
)  # fmt: skip
def test_any_content_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        values = read_settings_file(path)
    except SettingsError as error:
        reason = str(error)
        assert len(reason.splitlines()) == 1
        assert str(path) in reason
    else:
        assert set(values) <= {knob.field for knob in KNOBS}
