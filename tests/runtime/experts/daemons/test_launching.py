"""Daemons to spawn: what is refused, and what each is started with."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_protocol.device import CPU
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import DaemonSetting, Settings
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.topology import Core, Topology
from dflash_runtime.experts.daemons import launching
from dflash_runtime.experts.daemons.launching import (
    DaemonChoice,
    budgets_of,
    choose_daemon,
    choose_daemons,
    daemon_names,
    launch_of,
)
from dflash_runtime.experts.daemons.link import Launch
from dflash_runtime.placement.budgets import ExpertBudget

OURS = Path(sys.executable)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter elsewhere: a link to ours, as those of virtual environments are."""
    link = tmp_path / "bin" / "python3"
    link.parent.mkdir()
    link.symlink_to(OURS.resolve())
    return link


def launch(choices: list[DaemonChoice], daemon_idx: int = 0, **changed: object) -> Launch:
    arguments: dict[str, object] = {
        "model_path": Path("/m.gguf"), "backend_name": "cpu", "settings": Settings(), **changed
    }  # fmt: skip
    return launch_of(choices, daemon_idx, **arguments)  # type: ignore[arg-type]


def option(command: tuple[str, ...], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cpu:0", "auto", "cuda:1024"])
def test_an_unknown_device_is_refused_with_the_place_and_the_known_ones(device: str) -> None:
    with pytest.raises(SettingsError, match=f"^daemon='{device}'.* DEVICE.*cpu, cuda:N"):
        choose_daemon(device, 0, Settings())
    setting = DaemonSetting(device, source="moe.toml: daemon[0]")
    with pytest.raises(SettingsError, match=rf"^moe.toml: daemon\[0\]='{device}'.* cpu, "):
        choose_daemon(setting, 0, Settings())
    assert choose_daemon("cpu", 0, Settings()).device == CPU


def test_a_device_without_an_index_has_that_of_the_settings() -> None:
    settings = Settings(ipc_gpu=3)
    asked = ["cuda", "hip:1", "cpu"]
    choices = choose_daemons(asked, settings)
    assert [str(each.device) for each in choices] == ["cuda:3", "hip:1", "cpu"]
    assert [each.name for each in choices] == ["cuda0", "hip1", "cpu2"]
    commands = [launch(choices, index).command for index in range(3)]
    assert [option(command, "--device") for command in commands] == ["cuda:3", "hip:1", "cpu"]
    assert [option(command, "--backend") for command in commands] == ["auto", "auto", "cpu"]


@pytest.mark.parametrize("backend", ["cpu", "reference", "cupy"])
def test_a_parents_backend_is_its_daemons_where_they_compute_alike(backend: str) -> None:
    choices = choose_daemons(["cpu", "cuda:0"], Settings())
    commands = [launch(choices, index, backend_name=backend).command for index in range(2)]
    alike = "auto" if backend == "cupy" else backend
    assert [option(command, "--backend") for command in commands] == [alike, "auto"]


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("/no/such/python", "'/no/such/python': No such file"),
        ("/etc/passwd", "'/etc/passwd'.*executable"),
        ("/tmp", "'/tmp'.*executable"),
        ("no-such-program", "'no-such-program': No such file"),
    ],
)
def test_a_launcher_that_cannot_be_executed_is_refused(launcher: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"launcher {message}"):
        choose_daemon(f"cpu@{launcher}", 0, Settings())
    with pytest.raises(SettingsError, match=f"launcher {message}"):
        choose_daemon("cpu", 0, Settings(ipc_bin=launcher))


def test_a_launcher_is_found_where_programs_are(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(python.parent))
    assert choose_daemon("cpu@python3", 0, Settings()).launcher == python


def test_the_default_launcher_is_that_of_daemons_without_one(python: Path) -> None:
    settings = Settings(ipc_bin=str(python))
    assert choose_daemon("cpu", 0, settings).launcher == python
    assert choose_daemon("cpu@/bin/sh", 0, settings).launcher == Path("/bin/sh")
    assert choose_daemon("cpu", 0, Settings()).launcher is None


def test_our_own_interpreter_is_no_other_even_if_it_is_named(python: Path) -> None:
    """Interpreters of two environments may be links to one file: it is the folder that counts."""
    for name in {OURS.name, "python", "python3"}:
        if (OURS.parent / name).exists():
            assert choose_daemon(f"cpu@{OURS.parent / name}", 0, Settings()).launcher is None
    assert choose_daemon(f"cpu@{python}", 0, Settings()).launcher == python


def test_budgets_are_by_name_and_within_bounds() -> None:
    daemons: list[DaemonSetting | str] = [
        "cpu",
        DaemonSetting("cpu", expert_budget_mb=0, source="moe.toml: daemon[1]"),
        DaemonSetting("cuda:0", name="x", expert_budget_pct=30),
    ]
    budgets = budgets_of(choose_daemons(daemons, Settings()))
    assert budgets == {"cpu1": ExpertBudget(num_mib=0), "x": ExpertBudget(percent=30)}
    assert budgets["cpu1"].source == "moe.toml: daemon[1].expert_budget_mb"
    assert budgets["x"].source == "daemon.expert_budget_pct"
    assert [budgets[name].most_bytes(1000) for name in ("cpu1", "x")] == [0, 300]
    assert ExpertBudget(percent=100).most_bytes(999) == 999
    for key, value in (("mb", -1), ("mb", 1 << 40), ("mb", 1.5), ("pct", 101), ("pct", True)):
        wrong = DaemonSetting("cpu", source="s", **{f"expert_budget_{key}": value})  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match=rf"^s\.expert_budget_{key}={value}: must be "):
            choose_daemon(wrong, 0, Settings())
    both = DaemonSetting("cpu", expert_budget_mb=1, expert_budget_pct=1)
    with pytest.raises(SettingsError, match=r"^daemon: expert_budget_mb and expert_budget_pct"):
        choose_daemon(both, 0, Settings())


def test_names_are_given_and_must_differ() -> None:
    choices = choose_daemons(["cpu", DaemonSetting("cpu", name="x"), "cpu"], Settings())
    endpoints = [parse_endpoint("ipc:///run/a"), parse_endpoint("ipc:///run/b")]
    assert daemon_names(choices, endpoints) == ["cpu0", "x", "cpu2", "link0", "link1"]
    for name in ("cpu0", "link1"):
        twins = choose_daemons(["cpu", DaemonSetting("cpu", name=name)], Settings())
        with pytest.raises(SettingsError, match=f"daemons .*'{name}'"):
            daemon_names(twins, endpoints)


def test_an_interpreter_runs_our_module_and_another_program_takes_the_arguments(
    python: Path,
) -> None:
    choices = choose_daemons(["cpu", f"cpu@{python}", "cpu@/bin/sh"], Settings())
    heads = [launch(choices, index).command[:5] for index in range(3)]
    assert heads == [
        (str(OURS), "-P", "-m", "dflash_daemon", "/m.gguf"),
        (str(python), "-P", "-m", "dflash_daemon", "/m.gguf"),
        ("/bin/sh", "/m.gguf", "--device", "cpu", "--backend"),
    ]


def test_another_environment_may_do_without_our_kernels(python: Path) -> None:
    choices = choose_daemons(["cpu", f"cpu@{python}"], Settings())
    for backend, expected in (("cpu", ["cpu", "auto"]), ("reference", ["reference"] * 2)):
        commands = [launch(choices, index, backend_name=backend).command for index in range(2)]
        assert [option(command, "--backend") for command in commands] == expected


def test_daemons_share_the_cores_unless_they_have_their_own() -> None:
    cores = usable_cores()
    own = DaemonSetting("cpu", cores=str(cores[0]), threads=7)
    choices = choose_daemons(["cpu", own], Settings())
    shared, kept = (launch(choices, index).command for index in range(2))
    assert option(shared, "--threads") == str(max(1, len(cores) // 2))
    assert option(shared, "--cores") is None
    assert (option(kept, "--threads"), option(kept, "--cores")) == ("7", str(cores[0]))
    pinned = launch(choices, settings=Settings(pin_daemons=True)).command
    assert option(pinned, "--cores") == ",".join(map(str, cores[: max(1, len(cores) // 2)]))


def test_only_daemons_with_several_cores_of_their_own_poll_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "usable_cores", lambda: list(range(8)))
    chosen = choose_daemons(["cpu"] * 6, Settings())
    cores = [(), (1, 2), (3,), (4, 5), (5, 6), tuple(range(8))]

    def polls(given: list[int], settings: Settings) -> list[str | None]:
        choices = [replace(chosen[index], cores=cores[index]) for index in given]
        environments = [launch(choices, i, settings=settings) for i in range(len(given))]
        return [
            dict(each.environment).get("DFLASH_MOE_EXPERT_COMPUTE_IPC_SPIN_US")
            for each in environments
        ]

    assert polls([0, 1, 2, 3, 4], Settings()) == [None, "1000", None, None, None]
    assert polls([5], Settings()) == [None]
    assert polls([1], Settings(spin_us=20)) == ["20"]


@pytest.mark.parametrize(
    ("backend_name", "num_cores", "threads"),
    [("cpu", 16, (8, 8)), ("cupy", 16, (7, 8)), ("cupy", 2, (1, 1)), ("cupy", 3, (1, 1))],
)
def test_a_parent_on_a_gpu_keeps_a_core(
    monkeypatch: pytest.MonkeyPatch, backend_name: str, num_cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(
        "dflash_runtime.experts.daemons.launching.usable_cores", lambda: list(range(num_cores))
    )
    choices = choose_daemons(["cpu", "cpu"], Settings())
    commands = [launch(choices, index, backend_name=backend_name).command for index in range(2)]
    assert tuple(int(option(each, "--threads") or 0) for each in commands) == threads


@pytest.mark.parametrize(
    ("quota", "threads"),
    [(None, (4, 4)), (16.0, (4, 4)), (6.0, (3, 3)), (3.0, (1, 1)), (0.5, (1, 1))],
)
def test_daemons_share_a_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: tuple[int, ...]
) -> None:
    machine = Topology(tuple(Core((cpu,), 0, False) for cpu in range(8)), quota)
    monkeypatch.setattr("dflash_runtime.experts.daemons.launching.read_topology", lambda: machine)
    monkeypatch.setattr(
        "dflash_runtime.experts.daemons.launching.usable_cores", lambda: list(range(8))
    )
    choices = choose_daemons(["cpu", DaemonSetting("cpu")], Settings())
    commands = [launch(choices, index).command for index in range(2)]
    assert tuple(int(option(each, "--threads") or 0) for each in commands) == threads
    own = choose_daemons([DaemonSetting("cpu", threads=7)], Settings())
    assert option(launch(own).command, "--threads") == "7"


def test_cores_that_cannot_be_had_are_refused_with_the_place() -> None:
    for cores in ("99999", "x", ","):
        setting = DaemonSetting("cpu", cores=cores, source="moe.toml: daemon[0]")
        with pytest.raises(SettingsError, match=r"^moe.toml: daemon\[0\]='cpu': cores"):
            choose_daemon(setting, 0, Settings())


def test_each_has_an_environment_of_its_own(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/rocm/lib")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    other = DaemonSetting("cpu", str(python), environment=(("CUDA_VISIBLE_DEVICES", "1"),))
    ours, theirs = (
        launch(choose_daemons(["cpu", other], Settings()), index).environment for index in range(2)
    )
    assert ours is not None
    assert theirs is not None
    assert (ours["LD_LIBRARY_PATH"], ours["CUDA_VISIBLE_DEVICES"]) == ("/opt/rocm/lib", "0")
    assert "LD_LIBRARY_PATH" not in theirs
    assert theirs["CUDA_VISIBLE_DEVICES"] == "1"
    assert ours["PATH"] == theirs["PATH"] == os.environ["PATH"]
