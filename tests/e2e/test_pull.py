"""``dflash-moe pull``, ``list`` and ``rm`` as processes, with a hub on loopback: killed, pressed,
on a full disk, without a network, or with a silent hub, they leave one line and no wrong file."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_runtime.engine.demo_model import demo_model_path
from support.faults import fill, small_file_system
from support.loopback_hub import (
    REPOSITORY,
    LoopbackHub,
    assert_nothing_named,
    assert_refused,
    gguf_like,
    hub_environment,
    linked,
    loopback_hub,
    partial,
    repository_folder,
)
from support.processes import cli_command, environment, run_cli, wait_until

FILE = "Some-Model-Q4_K_M.gguf"
NAME = f"{REPOSITORY}:Q4_K_M"
SIZE = 1_500_000
CONTENT = gguf_like(SIZE)

pytestmark = pytest.mark.e2e


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with loopback_hub(files={FILE: CONTENT}) as running:
        yield running


def pull(hub: LoopbackHub, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return run_cli("pull", NAME, **hub_environment(hub, folder, **extra))


def start(hub: LoopbackHub, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*cli_command(), "pull", NAME],
        env=environment(**hub_environment(hub, folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_bytes(folder: Path, num_bytes: int) -> None:
    path = partial(folder, CONTENT)
    wait_until(lambda: path.exists() and path.stat().st_size >= num_bytes, "bytes to come")


@contextmanager
def mapped_by_another(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has mapped a file, as a server has."""
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); print(flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        yield user
        user.communicate(b"\n")


def test_a_model_is_fetched_used_and_removed_by_name(tmp_path: Path) -> None:
    content = demo_model_path().read_bytes()
    with loopback_hub(files={FILE: content, "mmproj-F16.gguf": gguf_like(99)}) as hub:
        hub.token = "secret"
        variables = hub_environment(hub, tmp_path, HF_TOKEN="secret")
        done = run_cli("pull", NAME, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{linked(tmp_path, FILE)}\n"
        assert linked(tmp_path, FILE).read_bytes() == content
    # The hub is gone: nothing below needs it.
    shown = json.loads(run_cli("inspect", NAME, "--json", **variables).stdout)
    assert shown["path"] == str(linked(tmp_path, FILE))
    with mapped_by_another(linked(tmp_path, FILE)) as user:
        refused = run_cli("rm", NAME, "--yes", **variables)
    assert refused.returncode == 2
    assert f"(process {user.pid})" in refused.stderr
    assert linked(tmp_path, FILE).read_bytes() == content
    assert run_cli("rm", NAME, "--yes", **variables).returncode == 0
    assert not repository_folder(tmp_path).exists()


def test_a_pull_that_was_killed_goes_on_where_it_ended(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.pace_s = 0.05
    with start(hub, tmp_path) as process:
        wait_for_bytes(tmp_path, 100_000)
        process.kill()
        process.communicate()
    assert_nothing_named(tmp_path)
    kept = partial(tmp_path, CONTENT).stat().st_size
    assert kept < SIZE
    hub.pace_s = 0.0
    done = pull(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.ranges() == ["", f"bytes={kept}-"]
    assert linked(tmp_path, FILE).read_bytes() == CONTENT
    assert not partial(tmp_path, CONTENT).exists()


def test_two_at_once_do_not_write_to_one_file(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.pace_s = 0.5
    with start(hub, tmp_path) as first:
        wait_for_bytes(tmp_path, 1)
        second = pull(hub, tmp_path)
        removed = run_cli("rm", NAME, "--yes", **hub_environment(hub, tmp_path))
        hub.pace_s = 0.0
        first.communicate()
    assert second.returncode == 1
    assert "another process is fetching" in second.stderr
    assert removed.returncode == 2
    assert "is being fetched by another process" in removed.stderr
    assert first.returncode == 0
    assert linked(tmp_path, FILE).read_bytes() == CONTENT


def test_ctrl_c_is_one_line_and_what_came_is_kept(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.pace_s = 0.05
    with start(hub, tmp_path) as process:
        wait_for_bytes(tmp_path, 100_000)
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        stdout, stderr = process.communicate(timeout=20)
    assert time.monotonic() - began_s < 10
    assert process.returncode == 130
    assert stdout == ""
    # click ends the line of a ^C.
    assert stderr.split("\n", 1)[1].strip() == "dflash-moe: error: interrupted"
    assert_nothing_named(tmp_path)
    assert partial(tmp_path, CONTENT).stat().st_size >= 100_000


def test_a_wrong_hash(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.sends[FILE] = CONTENT[:-1] + b"!"
    assert_refused(pull(hub, tmp_path), tmp_path, "its hash is", "it is not kept")
    assert not partial(tmp_path, CONTENT).exists()


def test_a_disk_that_fills_while_a_file_comes(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with small_file_system(tmp_path / "hf", 2 << 20) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        hub.pace_s = 0.05
        with start(hub, tmp_path) as process:
            wait_for_bytes(tmp_path, 100_000)
            filler = fill(tmp_path / "hf")
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert stdout == ""
        assert "No space left on device" in stderr.splitlines()[-1]
        assert_nothing_named(tmp_path)
        filler.unlink()
        hub.pace_s = 0.0
        assert pull(hub, tmp_path).returncode == 0
        assert linked(tmp_path, FILE).read_bytes() == CONTENT


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening
        hub = LoopbackHub(url=f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert_refused(pull(hub, tmp_path), tmp_path, "the hub cannot be reached")


def test_a_silent_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.is_silent = True
    began_s = time.monotonic()
    done = pull(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_refused(done, tmp_path, "the hub did not answer within 1 s")
    assert time.monotonic() - began_s < 20


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at once", "within the file"])
def test_a_hub_that_sends_a_byte_now_and_then(hub: LoopbackHub, tmp_path: Path, when: str) -> None:
    """Each byte is within the library's deadline."""
    hub.trickles = when == "at once"
    hub.trickles_bytes = when != "at once"
    done = pull(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_refused(done, tmp_path, "the hub sent", "bytes in 6 s")


def test_a_hub_that_lies_about_the_length(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.says_length = 10**15
    assert_refused(pull(hub, tmp_path), tmp_path, f"sends {10**15:,} bytes, its list says")
