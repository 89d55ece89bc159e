"""Settings: every variable, its bounds, and what a wrong one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import (
    Settings,
    load_settings,
)
from dflash_protocol.settings.kinds import OneOf, PathText, Switch, Whole
from dflash_protocol.settings.table import KNOBS, Knob, Reader
from support.examples import examples

PREFIX = "DFLASH_MOE_EXPERT_COMPUTE_"
SCALARS = [knob for knob in KNOBS if knob.reader not in (Reader.SERVER, Reader.CHAT)]
NUMBERS = [
    (knob.name, knob.field, knob.default, knob.kind.smallest, knob.kind.largest)
    for knob in SCALARS
    if isinstance(knob.kind, Whole) and knob.name != "BATCH"  # which has a bound of its own
]
WORDS = [
    (knob.name, knob.field, knob.default, knob.kind.words)
    for knob in SCALARS
    if isinstance(knob.kind, OneOf)
]
SWITCHES = [(knob.name, knob.field) for knob in SCALARS if isinstance(knob.kind, Switch)]
PATHS = [(knob.name, knob.field) for knob in SCALARS if isinstance(knob.kind, PathText)]


def test_defaults_hold_when_nothing_is_set() -> None:
    assert load_settings({"PATH": "/bin", "DFLASH": "1"}) == Settings()


def test_every_default_is_a_value_that_may_be_set() -> None:
    for knob in KNOBS:
        if knob.default not in (None, (), ""):
            assert knob.kind.from_text(knob.kind.to_text(knob.default)) == knob.default


@pytest.mark.parametrize(("variable", "field", "default", "smallest", "largest"), NUMBERS)
def test_a_number_sets_its_field_within_its_bounds(
    variable: str, field: str, default: int | None, smallest: int, largest: int
) -> None:
    for value in (smallest, largest):
        loaded = load_settings({PREFIX + variable: str(value)})
        assert getattr(loaded, field) == value
    for value in (smallest - 1, largest + 1):
        with pytest.raises(SettingsError, match=f"{PREFIX}{variable}='{value}'.*{smallest} to"):
            load_settings({PREFIX + variable: str(value)})
    assert getattr(load_settings({}), field) == default


NO_NUMBERS = ("", "fast", "1.5", "1e3", "0x10", "-", "nan", "1_0", " 7", "+7", "\u0667", "9" * 5000)


@pytest.mark.parametrize("variable", [variable for variable, *_ in NUMBERS])
def test_what_is_no_number_is_refused_with_the_name(variable: str) -> None:
    for text in NO_NUMBERS:
        with pytest.raises(SettingsError, match=PREFIX + variable):
            load_settings({PREFIX + variable: text})


@examples(200)
@given(st.text(max_size=8))
def test_any_text_is_a_number_in_bounds_or_refused(text: str) -> None:
    try:
        loaded = load_settings({PREFIX + "IPC_BATCH_CAPACITY": text})
    except SettingsError as error:
        reason = str(error)
        assert PREFIX + "IPC_BATCH_CAPACITY" in reason
        assert len(reason.splitlines()) == 1
    else:
        assert 1 <= loaded.batch_capacity <= 4096


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DFLASH_MOE_", None),
        (PREFIX + "QUANTUM", None),
        ("DFLASH_MOE_THREADS", PREFIX + "THREADS"),
        (PREFIX + "PORT", "DFLASH_MOE_PORT"),
        (PREFIX + "IPC_DEADLINE", PREFIX + "IPC_DEADLINE_MS"),
        (PREFIX + "heartbeat", PREFIX + "HEARTBEAT_MS"),
        (PREFIX + "X" * 5000, None),
    ],
)
def test_an_unknown_variable_of_ours_is_refused_in_a_short_line_with_the_nearest_names(
    name: str, near: str | None
) -> None:
    with pytest.raises(SettingsError, match=f"'{name[:70]}") as caught:
        load_settings({name: "1"})
    reason = str(caught.value)
    assert len(reason) < 250
    if near is None:
        assert "docs/operations.md" in reason
    else:
        assert re.findall(r"DFLASH_MOE_\w+", reason.partition(f"'{name}'")[2])[0] == near
    assert load_settings({PREFIX + "IPC_DEADLINE_MS": "7"}).deadline_ms == 7


def test_a_number_may_be_left_to_the_program() -> None:
    name = PREFIX + "IPC_SPIN_US"
    assert load_settings({name: "auto"}) == load_settings({name: "Auto"}) == load_settings({})
    with pytest.raises(SettingsError, match=f"{name}='automatic'.* auto "):
        load_settings({name: "automatic"})


@pytest.mark.parametrize(("variable", "field", "default", "words"), WORDS)
def test_a_word_is_one_of_the_known(
    variable: str, field: str, default: str, words: tuple[str, ...]
) -> None:
    for word in words:
        for text in (word, word.upper()):
            assert getattr(load_settings({PREFIX + variable: text}), field) == word
    allowed = ", ".join(words)
    for text in ("", "sse", words[1] + " "):
        with pytest.raises(SettingsError, match=f"{variable}='{text}'.* {allowed}$"):
            load_settings({PREFIX + variable: text})
    assert getattr(load_settings({}), field) == default


def test_a_switch_may_be_left_to_the_program() -> None:
    name = PREFIX + "CPU_MOE"
    assert load_settings({}).cpu_moe is None
    assert load_settings({name: "Auto"}).cpu_moe is None


def test_overrides_are_patterns_with_owners() -> None:
    name = PREFIX + "OVERRIDE_TENSOR"
    loaded = load_settings({name: r"blk\.[01]\.=cpu, a=b=cuda:1"})
    assert loaded.override_tensor == ((r"blk\.[01]\.", "cpu"), ("a=b", "cuda:1"))
    for text in ("exps", "=cpu", "exps=", "(=cpu", "x" * 400 + "=cpu"):
        with pytest.raises(SettingsError, match=name):
            load_settings({name: text})


def test_older_variables_of_placement_are_read() -> None:
    loaded = load_settings({
        "DFLASH_MAX_CONTEXT": "512",
        "DFLASH_EXPERT_BUDGET_MB": "7",
        "DFLASH_EXPERT_BUDGET_PCT": "50",
    })  # fmt: skip
    assert (loaded.context, loaded.expert_budget_mb, loaded.expert_budget_pct) == (512, 7, 50)
    for name in ("QWEN35MOE", "LAGUNA"):
        loaded = load_settings(
            {f"DFLASH_{name}_SWAP_MAX": "3", f"DFLASH_{name}_SWAP_MIN_GAIN": "1"}
        )
        assert (loaded.swap_max, loaded.swap_min_gain) == (3, 1)


@pytest.mark.parametrize(("variable", "field"), SWITCHES)
def test_a_switch_is_on_or_off(variable: str, field: str) -> None:
    for text in ("1", "true", "YES", "On"):
        assert getattr(load_settings({PREFIX + variable: text}), field) is True
    for text in ("0", "false", "no", "OFF"):
        assert getattr(load_settings({PREFIX + variable: text}), field) is False
    for text in ("", "2", "maybe"):
        with pytest.raises(SettingsError, match=f"{variable}='{text}'.* 1 or 0"):
            load_settings({PREFIX + variable: text})


@pytest.mark.parametrize(("variable", "field"), PATHS)
def test_a_path_is_taken_as_it_is_unless_it_would_break_the_line(variable: str, field: str) -> None:
    assert getattr(load_settings({PREFIX + variable: "some where/é"}), field) == "some where/é"
    with pytest.raises(SettingsError, match=variable) as caught:
        load_settings({PREFIX + variable: "two\nlines"})
    assert len(str(caught.value).splitlines()) == 1


def test_a_batch_beyond_its_bound_is_refused_and_the_bound_can_be_raised() -> None:
    assert load_settings({}).stream_batch == 4
    with pytest.raises(SettingsError, match=f"{PREFIX}BATCH=64.* {PREFIX}BATCH_MAX"):
        load_settings({PREFIX + "BATCH": "64"})
    loaded = load_settings({PREFIX + "BATCH": "64", PREFIX + "BATCH_MAX": "64"})
    assert loaded.stream_batch == 64
    assert load_settings({PREFIX + "BATCH_MAX": "2"}).stream_batch == 2


def test_the_older_systems_thread_count_holds_if_ours_is_not_set() -> None:
    assert load_settings({"DFLASH_COLD_THREADS": "3"}).threads == 3
    assert load_settings({"DFLASH_COLD_THREADS": "3", PREFIX + "THREADS": "5"}).threads == 5
    with pytest.raises(SettingsError, match=r"^DFLASH_COLD_THREADS='x'"):
        load_settings({"DFLASH_COLD_THREADS": "x"})


def test_the_older_systems_hotness_files_hold_unless_they_differ() -> None:
    older = "DFLASH_QWEN35MOE_HOTNESS", "DFLASH_LAGUNA_HOTNESS"
    for name in older:
        assert load_settings({name: "a.csv"}).hotness == "a.csv"
    assert load_settings(dict.fromkeys(older, "a.csv")).hotness == "a.csv"
    both = dict(zip(older, ("a.csv", "b.csv"), strict=True))
    with pytest.raises(SettingsError, match="DFLASH_QWEN35MOE_HOTNESS and DFLASH_LAGUNA_HOTNESS"):
        load_settings(both)
    assert load_settings({**both, PREFIX + "HOTNESS": "c.csv"}).hotness == "c.csv"


def test_where_heat_is_kept_is_a_word_in_any_case_or_a_path() -> None:
    assert load_settings({}).heat == "auto"
    for text, value in (("OFF", "off"), ("Auto", "auto"), ("Off.heat", "Off.heat")):
        assert load_settings({PREFIX + "HEAT": text}).heat == value


def test_daemons_of_a_variable() -> None:
    text = "cpu, cuda:0@/opt/cuda-env/bin/python ,hip"
    loaded = load_settings({PREFIX + "DAEMONS": text})
    assert [(each.device, each.launcher) for each in loaded.daemons] == [
        ("cpu", ""), ("cuda:0", "/opt/cuda-env/bin/python"), ("hip", "")
    ]  # fmt: skip
    assert {each.source for each in loaded.daemons} == {PREFIX + "DAEMONS"}
    assert load_settings({PREFIX + "DAEMONS": " "}).daemons == ()


@pytest.mark.parametrize(
    "text", ["cpu,", "cpu@", "CPU", "cuda:", "cuda:x", "@python", "c\npu", "c:0:1"]
)
def test_what_is_no_daemon_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=f"^{PREFIX}DAEMONS=.* DEVICE") as caught:
        load_settings({PREFIX + "DAEMONS": text})
    assert len(str(caught.value).splitlines()) == 1


def test_more_daemons_than_anybody_has_are_refused() -> None:
    assert len(load_settings({PREFIX + "DAEMONS": ",".join(["cpu"] * 64)}).daemons) == 64
    with pytest.raises(SettingsError, match=rf"{PREFIX}DAEMONS\b.* 64\b"):
        load_settings({PREFIX + "DAEMONS": ",".join(["cpu"] * 65)})
    with pytest.raises(SettingsError, match=r"--daemon .*65"):
        load_settings({}, flags={"daemons": ["cpu"] * 65})


def test_endpoints_of_a_variable() -> None:
    loaded = load_settings({PREFIX + "CONNECT": "ipc:///run/a,tcp://127.0.0.1:7000"})
    assert loaded.connect == ("ipc:///run/a", "tcp://127.0.0.1:7000")
    with pytest.raises(SettingsError, match=f"^{PREFIX}CONNECT=.*'http://x'.* ipc:"):
        load_settings({PREFIX + "CONNECT": "ipc:///run/a,http://x"})


def test_where_a_daemon_listens_and_what_it_keeps_to() -> None:
    loaded = load_settings({PREFIX + "LISTEN": "ipc:///run/a", PREFIX + "CORES": "0-3,8"})
    assert (loaded.listen, loaded.cores) == ("ipc:///run/a", "0-3,8")
    assert load_settings({PREFIX + "LISTEN": "", PREFIX + "CORES": ""}) == Settings()
    with pytest.raises(SettingsError, match=f"^{PREFIX}LISTEN='here'.* ipc:"):
        load_settings({PREFIX + "LISTEN": "here"})
    with pytest.raises(SettingsError, match=f"^{PREFIX}CORES='all'"):
        load_settings({PREFIX + "CORES": "all"})


# -- precedence -----------------------------------------------------------------------------------


def test_a_flag_counts_before_a_variable_before_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "moe.toml"
    file.write_text(
        'ipc_mode = "stream"\nipc_dtype = "f16"\nheartbeat_ms = 50\nipc_required = true\n'
        'connect = ["ipc:///file"]\n[[daemon]]\ndevice = "cpu"\nname = "of-file"\n'
    )
    environment = {
        "DFLASH_MOE_SETTINGS_FILE": str(file),
        PREFIX + "IPC_DTYPE": "bf16",
        PREFIX + "HEARTBEAT_MS": "60",
        PREFIX + "CONNECT": "ipc:///variable",
    }
    flags = {"heartbeat_ms": "70", "ipc_required": False, "daemons": ("cpu@a", "cpu@b,c")}
    loaded = load_settings(environment, flags=flags)
    assert (loaded.ipc_transport, loaded.ipc_mode, loaded.ipc_dtype, loaded.heartbeat_ms) == (
        "auto", "stream", "bf16", 70
    )  # fmt: skip
    assert loaded.ipc_required is False
    assert loaded.connect == ("ipc:///variable",)
    assert [each.launcher for each in loaded.daemons] == ["a", "b,c"]
    # What is not given is no value: the next one counts.
    not_given = {"heartbeat_ms": None, "ipc_required": None, "daemons": (), "connect": ()}
    loaded = load_settings(environment, flags=not_given)
    assert (loaded.heartbeat_ms, loaded.ipc_required) == (60, True)
    assert [each.name for each in loaded.daemons] == ["of-file"]


def test_a_file_that_is_named_counts_instead_of_the_variables(tmp_path: Path) -> None:
    named, other = tmp_path / "named.toml", tmp_path / "other.toml"
    named.write_text("heartbeat_ms = 50\n")
    other.write_text("heartbeat_ms = 60\nthreads = 3\n")
    environment = {"DFLASH_MOE_SETTINGS_FILE": str(other)}
    loaded = load_settings(environment, file=named)
    assert (loaded.heartbeat_ms, loaded.threads) == (50, 0)
    assert load_settings(environment).threads == 3
    assert load_settings({"DFLASH_MOE_SETTINGS_FILE": ""}) == Settings()


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({PREFIX + "IPC_MODE": "x"}, {"ipc_mode": "stream"}, f"^{PREFIX}IPC_MODE='x'"),
        ({}, {"ipc_mode": "x"}, "^--ipc-mode='x'.* auto, batched, stream$"),
        ({}, {"threads": "1025"}, "^--threads='1025'.* 0 .* 1024$"),
        ({}, {"daemons": ("cpu", "!")}, "^--daemon='!'.* DEVICE"),
        ({}, {"connect": ("here",)}, "^--connect='here'.* ipc:"),
    ],
)
def test_a_bad_value_is_named_by_where_it_stands_even_if_another_one_counts(
    environment: dict[str, str], flags: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(environment, flags=flags)


@examples(200)
@given(st.sampled_from(KNOBS), st.text(max_size=12))
def test_any_text_of_any_setting_is_a_value_or_refused_in_one_line(knob: Knob, text: str) -> None:
    try:
        value = getattr(load_settings({knob.variable: text}), knob.field)
    except SettingsError as error:
        reason = str(error)
        assert knob.variable in reason
        assert len(reason.splitlines()) == 1
        return
    # What is passed on to a daemon is read there as it was here.
    if knob.reader is Reader.BOTH:
        again = load_settings({knob.variable: knob.kind.to_text(value)})
        assert getattr(again, knob.field) == value


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "HEARTBEAT_MS", "123")
    monkeypatch.setenv(PREFIX + "IPC_WORK_DIR", "/somewhere")
    monkeypatch.setenv(PREFIX + "CACHE_DIR", "/elsewhere")
    loaded = load_settings()
    assert loaded.heartbeat_ms == 123
    assert (loaded.run_dir, loaded.cache_dir) == ("/somewhere", "/elsewhere")
