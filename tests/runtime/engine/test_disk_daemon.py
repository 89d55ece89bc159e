"""Daemons on the processor whose experts are larger than the memory that they may have: the texts
of daemons with everything in memory, whatever the disk does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.disk_engines import TRAINED
from support.faults import greedy
from support.processes import running_daemon
from support.undisturbed import settings_with

MODEL = TRAINED[0]
"""Of which a layer's experts take more than a MiB."""
PROMPT = np.random.default_rng(5).integers(0, 256, 60).tolist()
NUM_TOKENS = 8
LITTLE = ("--host-memory-mb", "3")


def opened(model: Path, endpoint: str, **wishes: Any) -> Engine:
    wishes = {"context": 128, "heat": "off", "check_replies": 0, "local_experts": 0, **wishes}
    settings = settings_with(connect=(endpoint,), **wishes)
    return Engine.open(model, backend="cpu", threads=1, settings=settings)


class Said:
    """What a daemon writes to its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        assert process.stderr is not None
        self._thread = threading.Thread(target=self._lines.extend, args=(process.stderr,))
        self._thread.start()

    def all(self) -> str:
        """When it has ended."""
        self._thread.join()
        return "".join(self._lines)


@contextlib.contextmanager
def daemon_of(model: Path, run_dir: Path, *options: str, **extra: str) -> Iterator[Any]:
    """Its endpoint, process, and what it says."""
    endpoint, module = f"ipc://{run_dir}/cpu.sock", "support.disk_daemon"
    options = ("--threads", "1", "--data-port", "0", *options)
    with running_daemon(model, endpoint, options, module=module, **extra) as process:
        yield endpoint, process, Said(process)


def results_of(engine: Engine) -> tuple[list[int], F32Array]:
    return greedy(engine, PROMPT, NUM_TOKENS), engine.logits(PROMPT, 20)


@pytest.fixture(scope="module")
def expected(run_dir: Path) -> tuple[list[int], F32Array]:
    """With everything in memory."""
    with daemon_of(MODEL, run_dir) as (endpoint, process, said):
        with opened(MODEL, endpoint) as engine:
            found = results_of(engine)
            [owner] = engine.stats().owners.values()
            assert owner.pairs > 0
        process.terminate()
        assert "disk" not in said.all()
    return found


def check(engine: Engine, expected: tuple[list[int], F32Array]) -> None:
    tokens, logits = results_of(engine)
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])


def num_fallbacks(engine: Engine) -> int:
    return sum(owner.fallbacks for owner in engine.stats().owners.values())


@pytest.mark.parametrize("transport", ["shm", pytest.param("stream", marks=pytest.mark.slow)])
def test_bits_are_those_of_a_daemon_with_everything_in_memory(
    run_dir: Path, expected: tuple[list[int], F32Array], transport: str
) -> None:
    """Through compiled code and through Python. Where reads fail, it goes on with the mapped file;
    it says what it does."""
    with daemon_of(MODEL, run_dir, *LITTLE) as (endpoint, process, said):
        for fails in (False, True):  # the second finds the placement held
            with opened(MODEL, endpoint, ipc_transport=transport) as engine:
                check(engine, expected)
                if fails:
                    process.send_signal(signal.SIGUSR1)
                    check(engine, expected)
                assert num_fallbacks(engine) == 0
        process.terminate()
        found = said.all()
    assert re.search(r"memory has room for \d+ of 256 experts: the others are read from the", found)
    assert found.count("memory has room") == 1
    assert re.search(r"reads of experts have failed: \d+ uses", found)


def test_a_read_that_does_not_end_has_the_parent_compute_meanwhile(
    run_dir: Path, expected: tuple[list[int], F32Array]
) -> None:
    """Within its deadline; the daemon comes back without reads past the page cache."""
    with daemon_of(MODEL, run_dir, *LITTLE, DFLASHTEST_LIMIT_S="2") as (endpoint, process, said):
        with opened(MODEL, endpoint, deadline_ms=100) as engine:
            check(engine, expected)
            process.send_signal(signal.SIGUSR2)
            check(engine, expected)
            assert num_fallbacks(engine) > 0
            check(engine, expected)
        process.terminate()
        said.all()


@pytest.mark.slow
@pytest.mark.parametrize("is_written", [False, True], ids=["replaced", "written"])
def test_a_file_that_changes(
    run_dir: Path, expected: tuple[list[int], F32Array], tmp_path: Path, is_written: bool
) -> None:
    """Another file under its name is not read; one that is written to ends the daemon, whose
    experts the parent computes."""
    path = Path(shutil.copy(MODEL, tmp_path / "m.gguf"))
    with daemon_of(path, run_dir, *LITTLE) as (endpoint, process, said):
        with opened(MODEL, endpoint) as engine:
            check(engine, expected)
            if is_written:
                with path.open("r+b") as file:
                    file.seek(-4096, os.SEEK_END)
                    file.write(bytes(4096))
                process.wait(timeout=20)
            else:
                (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
                os.replace(tmp_path / "other", path)
            check(engine, expected)
            assert (num_fallbacks(engine) > 0) == is_written
        if not is_written:
            process.terminate()
        said.all()
    for left in run_dir.glob("cpu.sock*"):
        left.unlink()
