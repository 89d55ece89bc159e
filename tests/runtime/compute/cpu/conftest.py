"""Fixtures of the CPU backend's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_runtime.compute.cpu.compile import kernel_cache


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR", str(folder))
    kernel_cache.prepared_folder.cache_clear()
    yield folder
    kernel_cache.prepared_folder.cache_clear()
