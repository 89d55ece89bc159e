"""Fixtures of tests with a link: both ends, and their cleanup in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_daemon import data_paths
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from support.remote_rig import TIMEOUT_S, ScriptedRig, ServedRig
from support.scripted_daemon import ScriptedDaemon


@pytest.fixture(autouse=True)
def quick_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_paths, "_POLL_S", 0.01)


@pytest.fixture
def endpoint(address: str) -> Endpoint:
    return parse_endpoint(address)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def served(undo: ExitStack, endpoint: Endpoint) -> ServedRig:
    return ServedRig(undo, endpoint, min_deadline_s=TIMEOUT_S)


@pytest.fixture
def hurried(undo: ExitStack, endpoint: Endpoint) -> ServedRig:
    return ServedRig(undo, endpoint, min_deadline_s=0.05)


@pytest.fixture
def scripted(undo: ExitStack, endpoint: Endpoint) -> ScriptedRig:
    return ScriptedRig(undo, endpoint, min_deadline_s=0.25)


@pytest.fixture
def address(run_dir: Path) -> str:
    return f"ipc://{run_dir}/cpu0"


@pytest.fixture
def daemon(address: str) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(address) as scripted:
        yield scripted
