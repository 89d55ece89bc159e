"""Compiled kernels on disk: found again, bounded, and never believed when they are damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache

KEYS = [bytes([number]) * 32 for number in range(4)]


def test_what_was_put_is_found_by_another_process(tmp_path: Path) -> None:
    BinaryCache(tmp_path).put(KEYS[0], b"code")
    assert BinaryCache(tmp_path).get(KEYS[0]) == b"code"
    assert BinaryCache(tmp_path).get(KEYS[1]) is None
    assert [path.name for path in tmp_path.iterdir()] == [KEYS[0].hex()]  # nothing half written


def test_it_lies_in_the_cache_folder_that_is_given(tmp_path: Path) -> None:
    BinaryCache(cache_dir=str(tmp_path / "cache")).put(KEYS[0], b"code")
    assert BinaryCache(cache_dir=str(tmp_path / "cache")).get(KEYS[0]) == b"code"
    assert BinaryCache(cache_dir=str(tmp_path / "other")).get(KEYS[0]) is None
    assert (tmp_path / "cache/gpu-kernels" / KEYS[0].hex()).is_file()


@pytest.mark.parametrize("content", [b"", b"short", b"0" * 40])
def test_a_damaged_file_is_removed(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BinaryCache(tmp_path)
    cache.put(KEYS[0], b"code")
    (tmp_path / KEYS[0].hex()).write_bytes(content)
    assert cache.get(KEYS[0]) is None
    assert str(tmp_path / KEYS[0].hex()) in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_was_used_last_is_kept(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path, max_bytes=300)
    for age_s, key in enumerate(KEYS[:3]):
        cache.put(key, bytes(50))
        os.utime(tmp_path / key.hex(), (age_s, age_s))
    assert cache.get(KEYS[0]) is not None  # used now
    cache.put(KEYS[3], bytes(50))
    found = [key for key in KEYS if cache.get(key) is not None]
    assert found == [KEYS[0], KEYS[2], KEYS[3]]
    cache.put(KEYS[1], bytes(400))  # more than all of it
    assert cache.get(KEYS[1]) is None


def test_what_is_new_is_kept_though_the_clock_was_set_back(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path, max_bytes=200)
    in_an_hour_s = time.time() + 3600
    for key in KEYS[:2]:
        cache.put(key, bytes(50))
        os.utime(tmp_path / key.hex(), (in_an_hour_s, in_an_hour_s))
    cache.put(KEYS[2], bytes(50))
    assert cache.get(KEYS[2]) == bytes(50)


def test_the_folder_is_scanned_once_and_then_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[Path] = []
    iterdir = Path.iterdir

    def noting(folder: Path) -> Iterator[Path]:
        scanned.append(folder)
        return iterdir(folder)

    BinaryCache(tmp_path).put(b"of another process", bytes(168))
    monkeypatch.setattr(Path, "iterdir", noting)
    cache = BinaryCache(tmp_path, max_bytes=1000)
    for number in range(8):  # 200 bytes and 8 of 100
        cache.put(bytes([number]), bytes(68))
    assert scanned == [tmp_path]
    cache.put(bytes([8]), bytes(68))
    assert scanned == [tmp_path] * 2
    assert cache.get(b"of another process") is None
    for number in range(9, 11):  # there is room again
        cache.put(bytes([number]), bytes(68))
    assert scanned == [tmp_path] * 2


def test_a_scan_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_folder: Path) -> Iterator[Path]:
        raise FileNotFoundError("removed by another process")

    cache = BinaryCache(tmp_path, max_bytes=200)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", failing)
        for key in KEYS[:3]:
            cache.put(key, bytes(50))
    cache.put(KEYS[3], bytes(50))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200


def test_without_a_folder_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = BinaryCache(file / "folder")
    cache.put(KEYS[0], b"code")
    assert cache.get(KEYS[0]) is None
    assert str(file) in caplog.text
