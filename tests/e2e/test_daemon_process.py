"""The daemon as a process: endpoints, permissions, signals, and never outliving its parent."""

from __future__ import annotations

import errno
import json
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dflash_daemon.__main__ import main as daemon_main
from dflash_runtime import Engine
from dflash_runtime.cli.main import main as cli_main
from support.descriptors import no_descriptor_leak
from support.environments import write_launcher
from support.placements import write_even_placement
from support.processes import (
    START_S,
    cli_command,
    environment,
    free_port,
    run_main,
    running_daemon,
    wait_for_ends,
    wait_until,
)
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

TRANSPORT = "DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


REFERENCE = ("--backend", "reference")


@pytest.fixture(autouse=True)
def sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on kernels or shared memory, whose libraries take a second to load."""
    monkeypatch.setenv(TRANSPORT, "stream")


def daemon_fails(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_daemon", *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_stops_cleanly_when_told_to(model: Path, run_dir: Path, number: int) -> None:
    with running_daemon(model, f"ipc://{run_dir}/d.sock", REFERENCE) as daemon:
        for name in ("d.sock", "d.sock.data"):
            mode = (run_dir / name).stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
        daemon.send_signal(number)
        assert daemon.wait(timeout=10) == 0
        assert list(run_dir.iterdir()) == []


@pytest.mark.timeout(60)
def test_a_failure_while_it_begins_to_listen_ends_it(
    model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung then: parents could connect to the sockets that it had, and none was answered."""

    def refuse(path: Path, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    listen = f"ipc://{run_dir}/d.sock"
    done = run_main(daemon_main, model, "--listen", listen, *REFERENCE)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"dflash-daemon: error: [Errno 28] No space left on device: '{run_dir}/d.sock'"
    ]


def test_an_endpoint_in_use_is_left_to_its_owner(model: Path, run_dir: Path) -> None:
    endpoint = f"ipc://{run_dir}/d.sock"
    with running_daemon(model, endpoint, REFERENCE):
        code, message = daemon_fails(model, "--listen", endpoint)
        assert code == 1
        assert "in use" in message
        with Engine.open(model, connect=[endpoint], backend="reference") as engine:
            assert len(engine.logits([1, 2, 3])) == 3


def test_leftovers_of_a_killed_daemon_are_no_obstacle(model: Path, run_dir: Path) -> None:
    endpoint = f"ipc://{run_dir}/d.sock"
    with running_daemon(model, endpoint, REFERENCE) as daemon:
        daemon.kill()
        daemon.wait()
    assert (run_dir / "d.sock").exists()
    with (
        running_daemon(model, endpoint, REFERENCE),
        Engine.open(model, connect=[endpoint], backend="reference") as engine,
    ):
        assert len(engine.logits([1, 2, 3])) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_tcp_on_the_loopback_address_works(model: Path, host: str) -> None:
    try:
        port, data_port = free_port(host), free_port(host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    with running_daemon(model, endpoint, [*REFERENCE, "--data-port", str(data_port)]):
        with Engine.open(model, connect=[endpoint], backend="reference") as engine:
            assert len(engine.logits([1, 2, 3])) == 3
            assert engine.stats().owners["link0"].bytes_received > 0
            socket.create_connection((host, data_port), timeout=10).close()
        code, message = daemon_fails(model, "--listen", endpoint)
        assert (code, "Address already in use" in message) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "tcp://0.0.0.0:7777"], "tcp://0.0.0.0:7777"),
        (["--listen", "ipc:///" + "x" * 101], " 100"),
        (["--listen", "somewhere"], "'somewhere'"),
        (["--device", "tpu:0"], "--device='tpu:0': "),
        (["--device", "cuda:1023"], "device cuda:1023: "),
        (["--threads", "x"], "--threads='x': "),
        (["--ipc-transport", "pigeon"], " auto, device, shared, stream"),
        (["--settings", "/no/such.toml"], "/no/such.toml: No such file"),
        (["--what"], "--what"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_misuse_is_one_line(arguments: list[str], message: str) -> None:
    """All of it is found before the program becomes a daemon."""
    done = run_main(daemon_main, "m.gguf", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "ipc:///no/such/folder/d.sock"], "No such file"),
        (["--device", "hip:0", "--backend", "cpu"], "hip:0"),
        (["--placement", "/no/such/file"], "No such file"),
        (["--lifeline-fd", "77"], "descriptor 77"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_misuse_that_a_daemon_finds_is_one_line(
    model: Path, run_dir: Path, arguments: list[str], message: str
) -> None:
    if "--listen" not in arguments:
        arguments = [*arguments, "--listen", f"ipc://{run_dir}/d.sock"]
    code, line = daemon_fails(model, *arguments)
    assert code == 2
    assert message in line


def test_a_placement_file_is_loaded_at_once(model: Path, run_dir: Path, tmp_path: Path) -> None:
    """And stays loaded, whatever parents ask for."""
    path, placement = write_even_placement(tmp_path, model)
    num_experts = placement.owners[placement.owner_names.index("link0")].num_experts
    num_more = 2 * len(placement.experts_per_layer)
    endpoint = f"ipc://{run_dir}/d.sock"
    with running_daemon(model, endpoint, [*REFERENCE, "--placement", str(path)]) as daemon:
        for local_experts in (4, 2, 4):
            with Engine.open(
                model, connect=[endpoint], local_experts=local_experts, backend="reference"
            ) as engine:
                assert len(engine.logits([1, 2, 3])) == 3
                assert engine.stats().owners["link0"].requests > 0
        daemon.terminate()
        _, said = daemon.communicate(timeout=START_S)
    [line] = [line for line in said.splitlines() if ": placement " in line]
    kept_loaded_dropped = re.findall(r"\d+", line.rpartition(": ")[2])
    assert [int(each) for each in kept_loaded_dropped] == [num_experts, num_more, 0]


def test_daemons_end_with_a_parent_that_is_killed(model: Path) -> None:
    command = [*cli_command(), "generate", str(model), "--token-ids", "1", "-n", "200"]
    with subprocess.Popen(
        [*command, *REFERENCE, "--daemon", "cpu", "--daemon", "cpu"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as parent:
        watched = psutil.Process(parent.pid)

        def both_run() -> bool:
            return len([c for c in watched.children() if "dflash_daemon" in c.cmdline()]) == 2

        wait_until(both_run, "two daemons", within_s=3 * START_S)
        daemons = watched.children()
        parent.kill()
    wait_for_ends(daemons)


@pytest.mark.parametrize("is_impatient", [False, True])
def test_interrupting_the_parent_ends_everything_quietly(model: Path, is_impatient: bool) -> None:
    command = [*cli_command(), "generate", str(model), "--token-ids", "1", "-n", "250"]
    with subprocess.Popen(
        [*command, *REFERENCE, "--daemon", "cpu", "--ignore-eos"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        watched = psutil.Process(parent.pid)
        wait_until(lambda: len(watched.children()) == 1, "the daemon", within_s=3 * START_S)
        daemons = watched.children()
        parent.send_signal(signal.SIGINT)
        if is_impatient:
            wait_until(lambda: presses_again(parent), "the parent to end")
        _, errors = parent.communicate(timeout=START_S)
    assert parent.returncode == 130
    assert errors.splitlines()[-1:] == ["dflash-moe: error: interrupted"]
    assert "Traceback" not in errors
    wait_for_ends(daemons)


def presses_again(process: subprocess.Popen[str]) -> bool:
    """Whether it has ended; else it is interrupted once more."""
    process.send_signal(signal.SIGINT)  # to nobody, once it is known to have ended
    return process.poll() is not None


def test_a_launcher_may_be_another_program(model: Path, tmp_path: Path) -> None:
    """An executable that is no Python gets the daemon's arguments and starts it as it likes."""
    launcher = write_launcher(tmp_path / "launch.sh", Path(sys.executable))
    for program in (launcher, Path(sys.executable)):
        done = run_main(
            cli_main, "generate", model, "--token-ids", "1,2", "-n", "3", "--json",
            *REFERENCE, "--daemon", f"cpu@{program}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["owners"]["cpu0"]["requests"] > 0
        assert record["events"] == []


def test_a_launcher_that_fails_is_reported(model: Path) -> None:
    done = run_main(
        cli_main, "generate", model, "--token-ids", "1", "--daemon", "cpu@/bin/false"
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"\bcpu0\b.* exit code 1\b", done.stderr)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def test_engines_that_are_closed_have_nothing_open(
    model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file neither, which others may want gone: banks of experts are views of it."""
    monkeypatch.setenv(TRANSPORT, "shared")

    def use() -> None:
        with Engine.open(model, daemons=["cpu"], backend=backend) as engine:
            engine.logits([1, 2])

    use()
    with no_descriptor_leak():
        for _ in range(2):
            use()
        assert str(model) not in Path("/proc/self/maps").read_text()
