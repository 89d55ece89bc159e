"""A model's file that is cut short while it is mapped: who reads what is gone ends and says why,
its peers go on, and no token of other weights is written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from dflash_runtime import Engine
from support import undisturbed as rig
from support.disk_engines import needed_mib_of
from support.processes import START_S, cli_command, environment, running_daemon
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, PROMPT

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed

READ = "SIGBUS"
NOTICED = "written"
"""Whoever looks before it reads, or else."""


def cut(path: Path) -> None:
    """Nothing is left but the metadata."""
    os.truncate(path, 4096)


def assert_says_why(code: int, lines: list[str], path: Path) -> None:
    [line] = [line for line in lines if "error:" in line]
    assert str(path) in line
    assert (code, READ in line, NOTICED in line) in (
        (-signal.SIGBUS, True, False),
        (1, False, True),
    )


def test_a_daemon_whose_file_is_cut_ends_and_its_parent_goes_on_with_its_own(
    model: Path, undisturbed: list[int], run_dir: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    endpoint = f"ipc://{run_dir}/daemon.sock"
    with running_daemon(copy, endpoint) as daemon, Engine.open(model, connect=[endpoint]) as engine:
        tokens = []
        for token in engine.generate(PROMPT, NUM_TOKENS):
            tokens.append(token.token_id)
            if len(tokens) == FAULT_AFTER:
                cut(copy)
        assert tokens == undisturbed
        assert [event.kind for event in engine.stats().events] == ["daemon_lost"]
        code = daemon.wait(START_S)
        assert daemon.stderr is not None
        assert_says_why(code, daemon.stderr.read().splitlines(), copy)
        # ZeroMQ leaves its sockets; the next daemon takes their place.
        with running_daemon(model, endpoint):
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_from_disk"),
    [([], False), (["--daemon", "cpu"], False), (["-c", "512"], True)],
    ids=["alone", "with a daemon", "experts from the disk"],
)
def test_a_program_whose_file_is_cut_ends_and_what_it_wrote_was_right(
    model: Path, tmp_path: Path, run_dir: Path, options: list[str], is_from_disk: bool
) -> None:
    """One file for all: nobody can go on, and nothing is computed of what is no longer there."""
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    if is_from_disk:
        options = [*options, "--host-memory-mb", str(needed_mib_of(model, context=512) + 1)]
    command = [
        *cli_command(), "generate", str(copy), "-p", "Once", "-n", "400", "--ignore-eos", *options
    ]  # fmt: skip
    whole = subprocess.run(command, env=environment(), capture_output=True, timeout=4 * START_S)
    assert whole.returncode == 0, whole.stderr
    assert (b"memory has room for" in whole.stderr) == is_from_disk
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        written = process.stdout.read(FAULT_AFTER)
        cut(copy)
        written += process.stdout.read()
        said = process.stderr.read().decode().splitlines()
        code = process.wait(START_S)
    assert len(written) < len(whole.stdout)
    assert whole.stdout.startswith(written.removesuffix(b"\n"))
    assert_says_why(code, [line for line in said if line.startswith("dflash-moe: ")], copy)
    # What both left behind, if both were ended so, is gone once the next parent has started.
    shutil.copy(model, copy)
    again = subprocess.run(command, env=environment(), capture_output=True, timeout=4 * START_S)
    assert again.stdout == whole.stdout
    assert not list(run_dir.iterdir())
