"""The install script: what it writes, that it may be run again, and that it takes it away."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from support.processes import ROOT
from support.unit_files import UNITS, read_environment_file, write_program

INSTALL = UNITS / "install.py"
UNIT_NAMES = ("dflash-moe.target", "dflash-moe.service", "dflash-moe-daemon@.service")


SEEN = "/opt/dflash-moe"
"""Where the environment lies unless it is said otherwise, as the machine sees it."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What is to become a machine's root: an environment with our program lies there already."""
    write_program(tmp_path / f"root{SEEN}/bin/dflash-moe", sys.executable)
    return tmp_path / "root"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of the machine that the tests run on, with our program in it."""
    folder = tmp_path / "opt"
    write_program(folder / "bin" / "dflash-moe", sys.executable)
    return folder


def run_install(*arguments: str | Path, code: int = 0) -> str:
    """What it said. It must need no library of ours: it is run by the interpreter alone."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(INSTALL), *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def contents(root: Path) -> dict[str, str]:
    """Text of all files below a root but those of the environment."""
    files = [path for path in root.rglob("*") if path.is_file()]
    named = {f"/{path.relative_to(root)}": path for path in files}
    return {n[1:]: path.read_text() for n, path in named.items() if not n.startswith(SEEN)}


def test_it_writes_units_account_and_settings(root: Path) -> None:
    run_install(
        "install", "--root", root, "--model", "/srv/my models/m$1.gguf",
        "--daemon", "cpu", "--daemon", f"gpu=cuda:0@{SEEN}/bin/dflash-moe",
    )  # fmt: skip
    for name in UNIT_NAMES:
        written = root / "etc/systemd/system" / name
        assert written.read_text() == (UNITS / name).read_text()
        assert written.stat().st_mode & 0o777 == 0o644
    assert (root / "etc/sysusers.d/dflash-moe.conf").read_text().count("\nm dflash-moe ") == 2
    settings = root / "etc/dflash-moe"
    assert read_environment_file(settings / "common.env") == {
        "DFLASH_PROGRAM": f"{SEEN}/bin/dflash-moe",
        "DFLASH_MODEL": "/srv/my models/m$1.gguf",
    }
    assert read_environment_file(settings / "daemons.env") == {
        "DFLASH_MOE_EXPERT_COMPUTE_CONNECT": (
            "ipc:///run/dflash-moe/cpu.sock,ipc:///run/dflash-moe/gpu.sock"
        )
    }
    assert read_environment_file(settings / "daemon@cpu.env") == {
        "DFLASH_DEVICE": "cpu",
        "DFLASH_ARGUMENTS": "",
    }
    assert read_environment_file(settings / "daemon@gpu.env") == {
        "DFLASH_DEVICE": "cuda:0",
        "DFLASH_PROGRAM": f"{SEEN}/bin/dflash-moe",
        "DFLASH_ARGUMENTS": "",
    }


def test_running_it_again_changes_nothing_and_keeps_what_people_wrote(root: Path) -> None:
    arguments = ("install", "--root", root, "--model", "/m.gguf", "--daemon", "cpu")
    run_install(*arguments)
    before = contents(root)
    said = run_install(*arguments)
    assert all(line.startswith("unchanged ") for line in said.splitlines()), said
    assert contents(root) == before
    edited = root / "etc/dflash-moe/parent.env"
    edited.write_text("DFLASH_ARGUMENTS=--port 9\n")
    stale = root / "etc/systemd/system/dflash-moe.service"
    stale.write_text("of an older version")
    run_install("install", "--root", root, "--model", "/other.gguf")
    after = contents(root)
    assert after.pop("etc/dflash-moe/parent.env") == "DFLASH_ARGUMENTS=--port 9\n"
    before.pop("etc/dflash-moe/parent.env")
    assert after == before


def test_it_takes_away_what_it_wrote(root: Path) -> None:
    foreign = root / "etc/systemd/system/other.service"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    place = ("--root", root)
    run_install("install", *place, "--model", "/m.gguf", "--daemon", "cpu")
    run_install("uninstall", *place)
    assert sorted(contents(root)) == [
        "etc/dflash-moe/common.env",
        "etc/dflash-moe/daemon@cpu.env",
        "etc/dflash-moe/parent.env",
        "etc/systemd/system/other.service",
    ]
    run_install("uninstall", *place, "--purge")
    assert sorted(contents(root)) == ["etc/systemd/system/other.service"]
    assert run_install("uninstall", *place, "--purge") == ""
    program = root / "opt/dflash-moe/bin/dflash-moe"
    assert program.exists(), "an environment that we did not make is not ours"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--daemon", "../x"], "--daemon '../x'"),
        (["--daemon", "a b"], "--daemon 'a b'"),
        (["--daemon", "cpu\n"], "--daemon 'cpu\\n'"),
        (["--daemon", "cpu", "--daemon", "cpu"], "name"),
        (["--daemon", "cpu@/no/such/program"], "'/no/such/program'"),
        (["--daemon", "cpu@bin/true"], "'bin/true'"),
        (["--model", "a\nDFLASH_PROGRAM=/evil"], "DFLASH_PROGRAM=/evil"),
        (["--prefix", "/no/such"], "/root/no/such/bin/dflash-moe "),
        (["--daemon", "cpu@/bin/sh"], "'/bin/sh'"),
        (["--wheel", "/no/such.whl"], "/no/such.whl: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    arguments: list[str], message: str, root: Path
) -> None:
    model = [] if "--model" in arguments else ["--model", "/m.gguf"]
    line = run_install("install", "--root", root, *model, *arguments, code=1)
    assert message in line
    assert len(line.splitlines()) == 1
    assert contents(root) == {}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, to be told other folders."""
    spec = importlib.util.spec_from_file_location("install_script", INSTALL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_who_is_not_root_is_told_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for command in ("install", "uninstall"):
        assert script.main([command]) == 1
        assert "--root" in capsys.readouterr().err


def on_this_machine(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The machine's folders are temporary ones; gives what would be run, as it comes."""
    ran: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(script, "_run", lambda *command: ran.append(" ".join(command)))
    for name in ("UNIT_FOLDER", "SETTINGS_FOLDER", "CACHE_FOLDER", "RUN_FOLDER"):
        monkeypatch.setattr(script, name, tmp_path / name)
    monkeypatch.setattr(script, "SYSUSERS", tmp_path / "sysusers.conf")
    return ran


def test_on_a_machine_systemd_is_told_what_there_is(
    script: ModuleType, tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = on_this_machine(script, tmp_path, monkeypatch)
    place = ["--prefix", str(prefix)]
    arguments = ["install", *place, "--model", "/m.gguf", "--daemon", "cpu", "--daemon", "gpu=cpu"]
    assert script.main([*arguments, "--now"]) == 0
    units = "dflash-moe.target dflash-moe.service"
    daemons = "dflash-moe-daemon@cpu.service dflash-moe-daemon@gpu.service"
    assert ran == [
        f"systemd-sysusers {tmp_path}/sysusers.conf",
        "systemctl daemon-reload",
        f"systemctl enable {units} {daemons}",
        "systemctl restart dflash-moe.target",
    ]
    wants = tmp_path / "UNIT_FOLDER" / "dflash-moe.service.wants"
    wants.mkdir()  # as `systemctl enable` does
    for unit in daemons.split():
        (wants / unit).touch()
    ran.clear()
    assert script.main(["uninstall", *place]) == 0
    assert ran == [
        f"systemctl disable --now {units} {daemons}",
        "systemctl daemon-reload",
    ]
    ran.clear()
    assert script.main(["uninstall", *place]) == 0
    assert ran == ["systemctl daemon-reload"]


def test_without_a_model_it_takes_the_demo_model(
    script: ModuleType, tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = prefix / "bin/python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT / 'runtime'}:{ROOT / 'protocol'}:{ROOT / 'adapters'}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    on_this_machine(script, tmp_path, monkeypatch)
    assert script.main(["install", "--prefix", str(prefix)]) == 0
    settings = read_environment_file(tmp_path / "SETTINGS_FOLDER" / "common.env")
    assert Path(settings["DFLASH_MODEL"]).name == "dflash-demo.gguf"
    assert Path(settings["DFLASH_MODEL"]).is_file()
    # One that the machine to be will not have is none.
    below = tmp_path / "root" / prefix.relative_to("/")
    shutil.copytree(prefix, below)
    line = run_install("install", "--root", tmp_path / "root", "--prefix", prefix, code=1)
    assert re.match(r".*error: .*--model\b", line)


def test_a_command_that_fails_is_named(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "dflash-moe.target").touch()

    def fails(*command: str) -> None:
        raise subprocess.CalledProcessError(3, command)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(script, "UNIT_FOLDER", tmp_path)
    monkeypatch.setattr(script, "_run", fails)
    assert script.main(["uninstall"]) == 1
    assert re.search(r"\b3: systemctl disable --now", capsys.readouterr().err)


MACHINE = ("/opt", "/etc", "/usr/local", "/var/cache", "/run/dflash-moe")


def state_of_the_machine() -> dict[str, int]:
    """Every file of the folders that an installation writes to, with when it was changed."""
    found = {}
    for top in MACHINE:
        for folder, _, names in os.walk(top):
            if "__pycache__" not in folder and not folder.startswith("/var/cache/apt"):
                for path in (os.path.join(folder, name) for name in names):
                    with contextlib.suppress(OSError):
                        found[path] = os.lstat(path).st_mtime_ns
    return found


def test_everything_goes_below_the_root(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip and venv would be told; the slow test has them do it."""
    wheel, root = tmp_path / "some.whl", tmp_path / "root"
    wheel.write_bytes(b"a wheel")
    before, ran = state_of_the_machine(), []

    def instead(*command: str) -> None:
        ran.append(command)
        if "venv" in command:
            write_program(Path(command[-1]) / "bin/dflash-moe", sys.executable)
            (Path(command[-1]) / "bin/python").symlink_to(sys.executable)

    monkeypatch.setattr(script, "_run", instead)
    arguments = ["--root", str(root), "--wheel", str(wheel), "--model", "/m.gguf"]
    assert script.main(["install", *arguments, "--daemon", "cpu"]) == 0
    assert ran[0][-1] == f"{root}{SEEN}"
    assert [command[0] for command in ran[1:]] == [f"{root}{SEEN}/bin/python"] * 2
    assert read_environment_file(root / "etc/dflash-moe/common.env")["DFLASH_PROGRAM"] == (
        f"{SEEN}/bin/dflash-moe"
    )
    assert script.main(["uninstall", "--root", str(root), "--purge"]) == 0
    assert [path for path in root.rglob("*") if not path.is_dir()] == []
    assert state_of_the_machine() == before


@pytest.mark.slow
@pytest.mark.e2e
def test_it_installs_the_wheel_and_a_newer_one(tmp_path: Path, wheel: Path) -> None:
    """The real wheel, without its dependencies: they are this environment's."""
    wheel = Path(shutil.copy(wheel, tmp_path))
    root, before = tmp_path / "root", state_of_the_machine()
    arguments = ("install", "--root", root, "--wheel", wheel, "--pip-option=--no-deps")
    assert f"installed {root}{SEEN}" in run_install(*arguments)
    model = read_environment_file(root / "etc/dflash-moe/common.env")["DFLASH_MODEL"]
    assert model.startswith(f"{SEEN}/lib/")
    assert (root / model[1:]).is_file()
    program = (root / SEEN[1:] / "bin/dflash-moe").read_text()
    assert program.startswith(f"#!{SEEN}/bin/python"), "it is started by the machine to be"
    assert f"unchanged {root}{SEEN}" in run_install(*arguments)
    with zipfile.ZipFile(wheel, "a") as changed:
        changed.comment = b"another build of the same version"
    assert f"installed {root}{SEEN}" in run_install(*arguments)
    run_install("uninstall", "--root", root, "--purge")
    assert not (root / SEEN[1:]).exists()
    assert state_of_the_machine() == before
