"""Copies of the fork server are what started programs are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_protocol import __version__
from support import fork_server
from support.fork_server import ForkServer
from support.processes import environment, own_children, run_cli, running_daemon
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

DAEMON = [sys.executable, "-m", "dflash_daemon"]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    if not fork_server.is_possible():
        pytest.skip("this C library has another layout")
    with fork_server.installed() as server:
        yield server


def test_output_and_exit_codes(server: ForkServer) -> None:
    assert server.takes([*DAEMON, "--version"], environment())
    told = subprocess.run([*DAEMON, "--version"], capture_output=True, text=True, env=environment())
    assert (told.returncode, told.stdout) == (0, f"dflash-moe {__version__}\n")
    wrong = subprocess.run([*DAEMON, "--no-such"], stderr=subprocess.PIPE, env=environment())
    assert wrong.returncode == 2
    assert b"--no-such" in wrong.stderr


def test_a_copy_is_our_child_with_its_own_command_and_group(
    server: ForkServer, tmp_path: Path, run_dir: Path
) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")
    with running_daemon(model, f"ipc://{run_dir}/daemon.sock") as process:
        [child] = own_children()
        assert (child.pid, child.ppid()) == (process.pid, os.getpid())
        assert child.cmdline()[:4] == [*DAEMON, str(model)]
        assert os.getpgid(child.pid) == os.getpgid(0)
        process.terminate()
        assert process.wait(30) == 0


def test_the_environment_and_the_folder_are_those_of_the_command(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "dflash.toml").write_text("[no_such_table]\n")
    variables = environment(DFLASH_MOE_EXPERT_COMPUTE_THREADS="many")
    for command, cwd, part in (
        ([*DAEMON, "m.gguf"], None, "many"),
        ([*DAEMON, "m.gguf", "--settings", "dflash.toml"], tmp_path, "no_such_table"),
    ):
        assert server.takes(command, variables)
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 2
        assert part in done.stderr


def test_the_command_line_runs_too(server: ForkServer) -> None:
    assert run_cli("version").stdout == f"dflash-moe {__version__}\n"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ([sys.executable, "-m", "json.tool"], {}),
        (["/usr/bin/env", *DAEMON], {}),
        ([sys.executable, "-I", "-m", "dflash_daemon"], {}),
        (DAEMON, {"XDG_CACHE_HOME": "/elsewhere"}),
        (DAEMON, {"LD_PRELOAD": "/lib/other.so"}),
        (DAEMON, {"PYTHONPATH": "/elsewhere"}),
        (DAEMON, {"DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR": "/elsewhere"}),
    ],
    ids=str,
)
def test_what_differs_in_more_is_started_as_usual(
    server: ForkServer, command: list[str], extra: dict[str, str]
) -> None:
    assert not server.takes(command, {**environment(), **extra})


def test_other_limits_are_inherited_as_usual(server: ForkServer) -> None:
    assert server.takes(DAEMON, environment())
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert not server.takes(DAEMON, environment())
    finally:
        os.sched_setaffinity(0, cores)
