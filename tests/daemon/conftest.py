"""Fixtures of the daemon's tests."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from dflash_daemon import control as control_module
from dflash_daemon import data_paths
from support.control_rig import SHAPE, Daemon
from support.random_models import write_qwen3moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE, seed=10)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_paths, "_POLL_S", 0.01)
    monkeypatch.setattr(control_module, "_PROGRESS_S", 0.01)
    logging.getLogger("dflash_daemon").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("dflash_daemon").setLevel(logging.NOTSET)


@pytest_asyncio.fixture
async def daemon(model: Path, run_dir: Path, quick: None) -> AsyncIterator[Daemon]:
    with ExitStack() as undo:
        async with AsyncExitStack() as stopping:
            daemon = Daemon(undo, model, run_dir)
            stopping.push_async_callback(daemon.stop)
            yield daemon


@pytest_asyncio.fixture
async def own_copy(
    model: Path, run_dir: Path, tmp_path: Path, quick: None
) -> AsyncIterator[Daemon]:
    """A daemon with a file that may be changed."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(model, path)
    with ExitStack() as undo:
        async with AsyncExitStack() as stopping:
            daemon = Daemon(undo, path, run_dir)
            stopping.push_async_callback(daemon.stop)
            yield daemon
