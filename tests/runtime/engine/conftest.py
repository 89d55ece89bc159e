"""Emulated GPUs, and a daemon that computes on one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.emulated_gpu import EmulatedGpus, install_emulated_gpus
from support.processes import running_daemon


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/gpu.sock"


@pytest.fixture
def daemon(model: Path, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    with running_daemon(
        model, endpoint, ["--device", "cuda:0"], module="support.emulated_daemon"
    ) as process:
        yield process
