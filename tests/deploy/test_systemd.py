"""The units: clean, closed, and their commands run as systemd would run them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dflash_runtime import Engine
from support.placements import write_even_placement
from support.processes import free_port, wait_until
from support.unit_files import UNITS, Unit

from .conftest import Install

SERVICES = ("dflash-moe.service", "dflash-moe-daemon@.service")
ALL = (*SERVICES, "dflash-moe.target")
MOST_EXPOSED = 4.0
LIGHT = "--backend reference --ipc-transport stream"
"""For daemons that need not compute fast: what kernels are made with takes a second to load."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed here (Debian: apt install systemd)",
)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@needs_systemd
@pytest.mark.parametrize("name", ALL)
def test_systemd_finds_nothing_to_say_about_a_unit(name: str) -> None:
    done = analyze("verify", UNITS / name)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "dflash" in line]
    assert said == []
    assert done.returncode == 0, done.stderr


@needs_systemd
def test_systemd_would_say_something_about_a_bad_unit(tmp_path: Path) -> None:
    text = (UNITS / "dflash-moe.service").read_text()
    bad = tmp_path / "dflash-moe.service"
    bad.write_text(text.replace("WatchdogSec=", "WatchdogSecond="))
    assert "WatchdogSecond" in analyze("verify", bad).stderr


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_is_hardly_exposed(name: str) -> None:
    threshold = f"--threshold={MOST_EXPOSED * 10:.0f}"
    done = analyze("security", "--offline=true", "--no-pager", threshold, UNITS / name)
    exposure = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) <= MOST_EXPOSED
    assert done.returncode == 0


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_is_what_the_documents_say(name: str) -> None:
    unit = Unit.read(UNITS / name)
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "RuntimeDirectory": "dflash-moe",
        "RuntimeDirectoryMode": "0700",
        "RuntimeDirectoryPreserve": "yes",
        "LimitMEMLOCK": "infinity",
        "KillMode": "mixed",
    }
    assert {key: unit.one("Service", key) for key in expected} == expected
    assert int(unit.one("Service", "WatchdogSec")) > 0
    # Kernels are compiled at run time, and what needs a GPU must see it.
    for key in ("MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers", "RemoveIPC"):
        assert unit.all("Service", key) == [], key


def test_services_are_hardened_alike() -> None:
    def hardening(name: str) -> dict[tuple[str, str], list[str]]:
        unit = Unit.read(UNITS / name)
        differ = ("Exec", "Environment", "Timeout", "Watchdog")
        return {
            key: values
            for key, values in unit.values.items()
            if key[0] == "Service" and not key[1].startswith(differ)
        }

    assert hardening(SERVICES[0]) == hardening(SERVICES[1])


def test_the_parent_wants_its_daemons_and_needs_none() -> None:
    parent, daemon = (Unit.read(UNITS / name) for name in SERVICES)
    assert daemon.one("Install", "WantedBy") == "dflash-moe.service"
    assert daemon.one("Unit", "Before") == "dflash-moe.service"
    strong = ("Requires", "Requisite", "BindsTo", "Upholds")
    for unit in (parent, daemon, Unit.read(UNITS / "dflash-moe.target")):
        assert not any(unit.all("Unit", key) for key in strong)
    for unit in (parent, daemon):
        assert unit.one("Unit", "PartOf") == "dflash-moe.target"
    assert parent.one("Install", "WantedBy") == "dflash-moe.target"


@pytest.mark.e2e
def test_a_daemon_is_ready_when_parents_can_use_it_and_stops_when_told(
    install: Install, model: Path
) -> None:
    machine = install(["--daemon", "cpu"])
    with machine.running("dflash-moe-daemon@cpu.service", watchdog_s=0.4) as daemon:
        ready = machine.manager.wait_for("READY")
        path = machine.runtime / "dflash-moe" / "cpu.sock"
        assert f"ipc://{path}" in ready["STATUS"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
        with Engine.open(model, connect=[f"ipc://{path}"]) as engine:
            assert len(engine.logits([1, 2, 3])) == 3
            assert engine.stats().owners["link0"].requests > 0
            assert engine.stats().events == []
            machine.manager.hear_all(0.05)  # what was said while the engine was opened
            beats = [each for each in machine.manager.hear_all(1.5) if "WATCHDOG" in each]
            assert 3 <= len(beats) <= 12
            statuses = [each["STATUS"] for each in machine.manager.told if "STATUS" in each]
            assert any(each.endswith("parents: 1") for each in statuses)
        daemon.send_signal(signal.SIGTERM)
        machine.manager.wait_for("STOPPING")
        assert daemon.wait(timeout=10) == 0


@pytest.mark.e2e
def test_a_daemon_with_a_placement_is_ready_when_its_experts_are_loaded(
    install: Install, model: Path, tmp_path: Path
) -> None:
    path, placement = write_even_placement(tmp_path, model)
    machine = install(["--daemon", "cpu"])
    machine.write_settings("daemon@cpu.env", f"DFLASH_ARGUMENTS=--placement {path} {LIGHT}\n")
    with machine.running("dflash-moe-daemon@cpu.service") as daemon:
        machine.manager.wait_for("READY")
        *starting, ready = machine.manager.told
        assert all("EXTEND_TIMEOUT_USEC" in each and "READY" not in each for each in starting)
        num_layers = len(placement.experts_per_layer)
        last_layer = f"load {num_layers}/{num_layers}"
        assert starting[-1]["STATUS"] == last_layer
        assert "listening" in ready["STATUS"]
        daemon.terminate()
        assert daemon.wait(timeout=10) == 0


@pytest.mark.e2e
def test_two_daemons_on_one_device_have_settings_of_their_own(install: Install) -> None:
    machine = install(["--daemon", "a=cpu", "--daemon", "b=cpu"])
    machine.write_settings(
        "daemon@b.env", "DFLASH_DEVICE=cpu\nDFLASH_ARGUMENTS=--backend reference\n"
    )
    with (
        machine.running("dflash-moe-daemon@a.service"),
        machine.running("dflash-moe-daemon@b.service"),
    ):
        readies = [machine.manager.wait_for("READY")["STATUS"] for _ in range(2)]
    assert sorted("(reference)" in each for each in readies) == [False, True]
    assert {re.findall(r"(\w+)\.sock", each)[0] for each in readies} == {"a", "b"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "line", ["DFLASH_DEVICE=tpu:0", "DFLASH_MOE_EXPERT_COMPUTE_IPC_SPIN_US=fast"]
)
def test_a_wrong_setting_ends_a_daemon_with_the_code_that_is_not_tried_again(
    install: Install, line: str
) -> None:
    machine = install(["--daemon", "cpu"])
    machine.write_settings("daemon@cpu.env", f"{line}\n")
    with machine.running("dflash-moe-daemon@cpu.service") as daemon:
        assert daemon.wait(timeout=60) == 2
        assert daemon.stderr is not None
        assert line.partition("=")[2] in daemon.stderr.read()
    assert machine.manager.hear(0.01) is None


@pytest.mark.e2e
def test_a_daemon_that_hangs_says_nothing_to_the_watchdog_until_it_is_well(
    install: Install, tmp_path: Path
) -> None:
    """Its compute thread is said to be busy for an hour while a file is there."""
    machine = install(["--daemon", "cpu"])
    machine.write_settings("daemon@cpu.env", f"DFLASH_ARGUMENTS={LIGHT}\n")
    hung = tmp_path / "hung"
    program = tmp_path / "opt/bin/dflash-moe"
    text = program.read_text()
    code = (
        "import sys; from pathlib import Path; from dflash_daemon.service import ComputeService; "
        f'ComputeService.busy_s = property(lambda self: 3600.0 * Path("{hung}").exists()); '
        "from dflash_daemon.__main__ import main; sys.exit(main(sys.argv[2:]))"
    )
    program.write_text(re.sub(r"-c '.*?'", lambda _: f"-c '{code}'", text))
    with machine.running("dflash-moe-daemon@cpu.service", watchdog_s=0.2):
        manager = machine.manager
        manager.wait_for("READY")
        manager.wait_for("WATCHDOG")
        assert manager.wait_for("STATUS")["STATUS"].endswith("parents: 0")
        hung.touch()
        assert "request" in manager.wait_for("STATUS")["STATUS"]
        assert manager.hear_all(1.0) == []
        hung.unlink()
        manager.wait_for("WATCHDOG")


@pytest.mark.e2e
def test_a_daemon_that_a_parent_has_spawned_leaves_the_parents_manager_alone(
    install: Install, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = install([])
    for name, value in machine.manager.environment(watchdog_s=0.1).items():
        monkeypatch.setenv(name, value)
    with Engine.open(model, daemons=["cpu"]) as engine:
        assert len(engine.logits([1, 2, 3])) == 3
        assert engine.stats().owners["cpu0"].requests > 0
    assert machine.manager.hear_all(0.1) == []


def answer_of(url: str) -> int:
    """The status code; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)
    except OSError:
        return 0


@pytest.mark.e2e
@pytest.mark.parametrize("daemons_first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_parent_is_ready_when_it_answers_whoever_starts_first(
    install: Install, daemons_first: bool
) -> None:
    machine = install(["--daemon", "cpu"])
    port = free_port()
    machine.write_settings("parent.env", f"DFLASH_ARGUMENTS=--port {port}\n")
    names = ["dflash-moe-daemon@cpu.service", "dflash-moe.service"]
    first, second = names if daemons_first else reversed(names)
    with machine.running(first), machine.running(second) as last:
        for _ in names:
            machine.manager.wait_for("READY", within_s=90)
        url = f"http://127.0.0.1:{port}"
        assert answer_of(f"{url}/ready") == 200
        assert answer_of(f"{url}/health") == 200
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        last.terminate()
        wait_until(lambda: last.poll() is not None, "the last to end")
        assert last.returncode == 0
