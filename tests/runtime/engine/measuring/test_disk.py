"""The disk is read past the page cache, a bounded number of bytes; what cannot be read is left
out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.engine.measuring import disk
from dflash_runtime.engine.measuring.disk import DEPTHS, measure_disk

SIZE = 8 << 20


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; wherever it lies counts as a disk."""
    monkeypatch.setattr(disk, "is_in_memory", lambda path: False)
    place = tmp_path / "file"
    place.write_bytes(os.urandom(SIZE))
    return place


def test_rates_by_pending_reads(path: Path) -> None:
    seen: list[str] = []
    curve = measure_disk(
        path, expert_bytes=5000, limit_s=1.0, report=lambda what, *_: seen.append(what)
    )
    assert curve is not None
    assert [depth for depth, _ in curve.points] == list(DEPTHS)
    assert all(rate > 0.0 for _, rate in curve.points)
    assert len(seen) == len(DEPTHS)


def test_file_systems_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[int, int]] = []
    opened, advise = os.open, os.posix_fadvise

    def without_direct(place: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(place, flags, *args, **options)

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        dropped.append((offset, length))
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "open", without_direct)
    monkeypatch.setattr(os, "posix_fadvise", noted)
    assert measure_disk(path, expert_bytes=4096, limit_s=0.05) is not None
    assert {length for _, length in dropped} == {4096}  # only what is read is dropped


def test_bytes_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, num_bytes = os.preadv, 0

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal num_bytes
        num_bytes += len(buffers[0])
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(disk, "_MOST_BYTES", 1 << 20)
    measure_disk(path, expert_bytes=4096, limit_s=100.0)
    assert 0 < num_bytes <= 1 << 20


def test_files_that_tell_nothing(path: Path) -> None:
    assert measure_disk(path.with_name("none"), expert_bytes=4096, limit_s=0.1) is None
    assert measure_disk(path, expert_bytes=SIZE // 10, limit_s=0.1) is None
