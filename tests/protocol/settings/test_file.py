"""Settings files: every key, every wrong one, and whatever else may be in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.device import parse_device
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import load_settings
from dflash_protocol.settings.file import read_settings_file
from dflash_protocol.settings.kinds import (
    DaemonSetting,
    DeviceOrAuto,
    EndpointText,
    OneOf,
    Switch,
    Whole,
)
from dflash_protocol.settings.table import CORES, HOST, KNOBS, OTLP, TOKENS, Knob
from support.examples import examples

SCALARS = [knob for knob in KNOBS if not knob.kind.is_repeatable]


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
    elif knob.kind is HOST:
        value, toml, text = "::1", '"::1"', "::1"
    elif isinstance(knob.kind, DeviceOrAuto):
        value, toml, text = parse_device("hip:2"), '"hip:2"', "hip:2"
    elif isinstance(knob.kind, EndpointText):
        value = text = "ipc:///run/moe/some.sock"
        toml = f'"{text}"'
    elif knob.kind is TOKENS:
        value, toml, text = "7:9", '"7:9"', "7:9"
    elif knob.kind is OTLP:
        value, toml, text = "http://a/b", '"http://a/b"', "http://a/b"
    elif knob.kind is CORES:
        value, toml, text = "0-3,8", '"0-3,8"', "0-3,8"
    file.write_text(f"{knob.key} = {toml}\n")
    assert getattr(load_settings({}, file=file), knob.field) == value
    assert load_settings({}, file=file) == load_settings({knob.variable: text})
    assert load_settings({}, file=file) == load_settings({}, flags={
        knob.field: True if isinstance(knob.kind, Switch) else text
    })  # fmt: skip


@pytest.mark.parametrize("knob", SCALARS, ids=lambda knob: str(knob.key))
def test_a_value_of_another_type_is_refused_with_file_and_key(file: Path, knob: Knob) -> None:
    for toml in ("[1]", "{}", "1.5", "1979-05-27", "-1", "99999999999999"):
        reason = refusal(file, f"{knob.key} = {toml}\n")
        assert reason.startswith(f"{file}: {knob.key}=")
        assert len(reason) > len(f"{file}: {knob.key}={toml}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("heartbeat_ms = true", r"heartbeat_ms=True\b.* 10 .* 60000"),
        ('heartbeat_ms = "50"', r"heartbeat_ms='50'.* 10 .* 60000"),
        ("ipc_required = 1", r"ipc_required=1\b.* true or false"),
        ('ipc_mode = "fast"', "ipc_mode='fast'.* auto, batched, stream"),
        ('cache_dir = "a\\u0000b"', r"cache_dir='a\\x00b'.*path"),
        ('connect = "ipc:///x"', "connect='ipc:///x'.*array"),
        ('connect = ["x"]', r"connect=\['x'\].* ipc:"),
        ("connect = [1]", r"connect=\[1\].*array"),
        ("ipc_modes = 1", r"'ipc_modes'.* ipc_mode\b"),
        ("zzz = 1", r"'zzz'.* docs/operations\.md"),
        ('local_experts = "most"', "local_experts='most'.* auto .* 0"),
        ('cores = "all"', "cores='all'"),
        ('listen = "x"', "listen='x'.* ipc:"),
        ("[server]\nport = 1", "key 'server'"),
        ('daemons = "cpu"', "key 'daemons'"),
        ('"a\\nb" = 1', r"key 'a\\nb'"),
        ("heartbeat_ms = 50\nheartbeat_ms = 60", "Cannot overwrite a value"),
        ("heartbeat_ms 50", "Expected '='"),
        (b"\xff\xfe", "UTF-8"),
        ("x = " + "9" * 6000, "integer string conversion"),
        ("x = " + "[" * 50_000, "nested"),
        (b"#" * ((1 << 20) + 1), "1 MiB"),
        ("daemon = 1", "daemon: .*64 tables"),
        ("daemon = [1]", r"daemon\[0\]=1\b.*table"),
        ("[daemon]", "daemon: .*64 tables"),
        ("[[daemon]]\n" * 65, "daemon: .*64 tables"),
        ("[[daemon]]\nport = 1", r"daemon\[0\].* 'port'.* name, device, launcher"),
        ("[[daemon]]\n[[daemon]]\ndevice = 0", r"daemon\[1\]\.device=0\b.* DEVICE\[@LAUNCHER\]"),
        ('[[daemon]]\ndevice = "cpu@x"', r"daemon\[0\]\.device='cpu@x'"),
        ('[[daemon]]\nname = "a/b"', r"daemon\[0\]\.name='a/b'.*letter"),
        ('[[daemon]]\nname = "local"', r"daemon\[0\]\.name='local'"),
        ("[[daemon]]\nthreads = 0", r"daemon\[0\]\.threads=0\b.* 1 .* 1024"),
        ("[[daemon]]\nexpert_budget_mb = -1", r"daemon\[0\]\.expert_budget_mb=-1: .* 0 to \d"),
        ("[[daemon]]\nexpert_budget_mb = 99999999", r"\[0\]\.expert_budget_mb=9+: .* 16777216"),
        ('[[daemon]]\nexpert_budget_mb = "all"', r"\[0\]\.expert_budget_mb='all': .*auto"),
        ("[[daemon]]\nexpert_budget_pct = 101", r"daemon\[0\]\.expert_budget_pct=101: .* 100"),
        ("[[daemon]]\nexpert_budget_pct = 0.5", r"daemon\[0\]\.expert_budget_pct=0\.5: "),
        ("[[daemon]]\nexpert_budget = 1", r"daemon\[0\]: .*'expert_budget'; .* expert_budget_mb"),
        (
            "[[daemon]]\n[[daemon]]\nexpert_budget_mb = 1\nexpert_budget_pct = 1",
            r"daemon\[1\]: expert_budget_mb and expert_budget_pct",
        ),
        ("[[daemon]]\ncores = [0]", r"daemon\[0\]\.cores=\[0\].*text"),
        ("[[daemon]]\nlauncher = 1", r"daemon\[0\]\.launcher=1\b.*path"),
        ("[[daemon]]\nenv = 1", r"daemon\[0\]\.env=1\b.*table"),
        ('[[daemon]]\nenv = {A = 1}', r"daemon\[0\]\.env=.* A .*text"),
        ('[[daemon]]\nenv = {"A=B" = "x"}', r"daemon\[0\]\.env=.* 'A=B' .*name"),
        ('[[daemon]]\nenv = {A = "x\\u0000"}', r"daemon\[0\]\.env=.* A .*text"),
        (
            '[[daemon]]\nenv = {DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE = "stream"}',
            r"daemon\[0\]\.env\b.*daemon.* "
            "'DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE'",
        ),
        (
            '[[daemon]]\nenv = {DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER = "sse"}',
            r"CPU_TIER\b.* auto, amx",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "bytes",
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_file_and_key(
    file: Path, content: str | bytes, message: str
) -> None:
    reason = refusal(file, content)
    assert str(file) in reason
    assert re.search(message, reason)


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
        expert_budget_mb = 512
        [daemon.env]
        CUDA_VISIBLE_DEVICES = "1"
        DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER = "avx2"

        [[daemon]]
        expert_budget_mb = "auto"
        expert_budget_pct = 0
    """)
    assert load_settings({}, file=file).daemons == (
        DaemonSetting("cpu"),
        DaemonSetting(
            "cuda:1",
            "/opt/cuda-env/bin/python",
            name="second.card",
            cores="0-3,8",
            threads=4,
            expert_budget_mb=512,
            environment=(
                ("CUDA_VISIBLE_DEVICES", "1"),
                ("DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER", "avx2"),
            ),
        ),
        DaemonSetting("cpu", expert_budget_pct=0),
    )
    sources = [each.source for each in load_settings({}, file=file).daemons]
    assert sources == [f"{file}: daemon[{index}]" for index in range(3)]


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
