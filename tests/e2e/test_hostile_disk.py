"""Disks and memory file systems without room, at each place that a program of ours writes to:
work goes on without what cannot be kept, or one line says which file it is; nothing stays behind.

Keys, caches, results and other small files: tests of their own modules.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from dflash_runtime import Engine
from dflash_runtime.cli.main import _run
from dflash_runtime.engine import planning
from support import undisturbed as rig
from support.environments import cache_with_our_kernels
from support.faults import fill, greedy, small_file_system
from support.planned_gpu import GPU, made_up_box
from support.processes import START_S, cli_command, environment, run_cli, wait_until
from support.serving import NO_TLS, running_server
from support.undisturbed import NUM_TOKENS, PROMPT

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed

CACHE_DIR = "DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR"
WORK_DIR = "DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR"


def generate(model: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    prompt = ",".join(map(str, PROMPT))
    return run_cli(
        "generate", model, "--token-ids", prompt, "-n", str(NUM_TOKENS), "--json", *arguments,
        **extra,
    )  # fmt: skip


def sizes(folder: Path) -> dict[Path, int]:
    """Of all files there that have any content."""
    found = {path: path.lstat().st_size for path in folder.rglob("*") if path.is_file()}
    return {path: size for path, size in found.items() if size}


def assert_right(done: subprocess.CompletedProcess[str], undisturbed: list[int]) -> list[str]:
    """Tokens are; returns what was said."""
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == undisturbed
    return [line for line in done.stderr.splitlines() if line.startswith("dflash-")]


# Logs


@pytest.mark.parametrize("log", ["full", pytest.param("closed", marks=pytest.mark.slow)])
def test_a_daemon_whose_log_cannot_be_written_serves(
    model: Path, undisturbed: list[int], run_dir: Path, log: str
) -> None:
    """It was there, and answered nobody: the line that it listens had failed."""
    listen = f"ipc://{run_dir}/d.sock"
    redirection = {"full": "2>/dev/full", "closed": "2>&-"}[log]
    command = [*cli_command(), "daemon", str(model), "--listen", listen]
    with subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command], env=environment()
    ) as process:
        try:
            wait_until((run_dir / "d.sock").exists, "the daemon to listen")
            with Engine.open(model, connect=[listen]) as engine:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                assert engine.stats().events == []
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(START_S)
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("log", ["2>/dev/full", "2>&-"])
def test_a_server_and_a_command_whose_log_cannot_be_written_do_their_work(
    model: Path, undisturbed: list[int], log: str
) -> None:
    prompt = ",".join(map(str, PROMPT))
    command = [*cli_command(), "generate", str(model), "--token-ids", prompt, "--daemon", "cpu"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {log}', "sh", *command, "-n", str(NUM_TOKENS), "--json"],
        env=environment(), capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert_right(done, undisturbed)
    port = "18473"  # what port it has would stand in its log
    command = [*cli_command(), "serve", str(model), "--port", port]
    with subprocess.Popen(
        ["sh", "-c", f'exec "$@" {log}', "sh", *command], env=environment()
    ) as process:

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", verify=NO_TLS).status_code == 200
            return False

        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(is_ready, "the server to be ready", pause_s=0.1)
            body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, verify=NO_TLS, timeout=START_S)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(START_S)
    assert code == 0


@pytest.mark.parametrize("arguments", [["inspect", "--json"], ["doctor", "--json"]])
@pytest.mark.slow
def test_json_that_cannot_be_written_is_an_error_in_one_line(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >/dev/full', "sh", *cli_command(), *arguments],
        env=environment(), capture_output=True, text=True, timeout=4 * START_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"dflash-moe: error: .*No space left on device\n", done.stderr)


# Folders


@pytest.mark.slow
@pytest.mark.parametrize("num_inodes", [2, 3, 4, 5, 7, 8])
def test_a_run_folder_without_room_for_a_file_is_an_error_that_names_it_or_costs_nothing_but_time(
    model: Path, undisturbed: list[int], tmp_path: Path, num_inodes: int
) -> None:
    """Room for one more of: the folder, the lock, each of two sockets, a segment, its bells."""
    folder = Path("/tmp") / f"{tmp_path.parent.name[-8:]}-{num_inodes}"  # sockets' names are short
    folder.mkdir(mode=0o700)
    try:
        with small_file_system(folder, 256 << 20, num_inodes=num_inodes) as is_mounted:
            if not is_mounted:
                pytest.skip("may not mount a tmpfs")
            done = generate(model, "--daemon", "cpu", **{WORK_DIR: str(folder)})
            assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()
    if num_inodes >= 5:
        said = assert_right(done, undisturbed)
        assert len(said) == (num_inodes < 8)
        assert all(str(folder) in line for line in said)
    else:
        assert done.returncode in (1, 2)
        lines = [line for line in done.stderr.splitlines() if "error: " in line]
        assert str(folder) in lines[0]
        assert "No space left on device" in lines[0]
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_cache_without_room_is_one_line_and_time(
    model: Path, undisturbed: list[int], tmp_path: Path
) -> None:
    """One kernel of many fits: what was thought to be kept is not."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    with small_file_system(folder, 160 << 10) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        done = generate(model, **{CACHE_DIR: str(folder)})
        said = assert_right(done, undisturbed)
        assert not [path for path in folder.rglob("*") if re.search(r"\.tmp\.|^\.", path.name)]
        [line] = [line for line in said if "kernels" in line]
        assert "No space left on device" in line
        assert len(said) <= 2  # the ring's code is another


# What is counted, measured and planned


@pytest.mark.slow
def test_a_full_disk_keeps_nothing_of_it_and_costs_no_token(
    model: Path, undisturbed: list[int], tmp_path: Path
) -> None:
    done = generate(model)
    assert_right(done, undisturbed)
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with small_file_system(disk) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        cache = cache_with_our_kernels(disk / "cache")
        fill(disk)
        before = sizes(disk)
        settings = tmp_path / "settings.toml"  # with a budget there is something to plan
        settings.write_text('[[daemon]]\ndevice = "cpu"\nexpert_budget_pct = 50\n')
        options = ["--heat", disk / "m.heat", "--expert-stats", disk / "run.heat"]
        options += ["--settings", settings, "--cache-dir", cache]
        with running_server(model, *map(str, options)) as server:
            url = f"{server.url}/v1/completions"
            body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
            answer = httpx.post(url, json=body, verify=NO_TLS, timeout=START_S)
            plan = server.get("/status").json()["plan"]
        assert server.process.returncode == 0
        assert sizes(disk) == before
    # The bytes of an incomplete last character are the terminal's alone.
    text = json.loads(done.stdout)["text"]
    assert answer.json()["choices"][0]["text"] in (text, text.removesuffix("\ufffd"))
    told = [line for line in server.lines if "No space left on device" in line]
    for name in ("box-", "m.heat", "run.heat"):
        assert len([line for line in told if f"/{name}" in line]) == 1, server.lines
    # What was decided is said.
    planned = [line for line in server.lines if "plan: " in line]
    for text in (plan["name"], plan["reason"], *(each["name"] for each in plan["budgets"])):
        assert any(text in line for line in planned)


@pytest.mark.parametrize("command", [["plan"], ["stats", "--csv"]], ids=str)
def test_a_full_disk_leaves_an_older_file_whole(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.setattr(planning, "box_of_machine", lambda *_, **__: made_up_box(GPU))
    disk, heat = tmp_path / "disk", tmp_path / "m.heat"
    disk.mkdir(mode=0o700)
    arguments = ["--token-ids", "1,2,3", "-n", "3", "--heat", str(heat)]
    assert _run(["generate", str(model), *arguments]) == 0
    with small_file_system(disk) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        out = disk / "out"
        if command == ["plan"]:
            command = ["plan", str(model), "--heat", "off", "--save", str(out)]
        else:
            command = ["stats", str(heat), "--csv", str(out)]
        assert _run(command) == 0
        content = out.read_bytes()
        filler = fill(disk)
        capfd.readouterr()
        assert _run(command) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert str(out) in line
        assert "No space left on device" in line
        assert out.read_bytes() == content
        assert {*disk.iterdir()} == {out, filler}
