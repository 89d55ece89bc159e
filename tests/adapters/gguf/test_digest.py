"""The digest of a model's files: what sha256sum says, kept until something happens to them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_adapters.gguf import digest as full_digest
from dflash_adapters.gguf.digest import file_digests, kept_digests, kept_path, read_kept
from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError
from support.descriptors import no_descriptor_leak
from support.random_models import ODD_SHAPES, write_qwen3moe

CHUNK = 1 << 15


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(full_digest, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(full_digest, "_SETTLED_S", 0.0)
    return write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=3)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def reads(file: GgufFile, folder: Path | None, expected: str) -> Iterator[list[int]]:
    chunks: list[int] = []
    assert file_digests(file.watch, folder, chunks.append) == [expected]
    yield chunks


def test_it_is_what_sha256sum_says_and_is_read_once(model: Path, tmp_path: Path) -> None:
    expected = sha256(model)
    with no_descriptor_leak(), GgufFile.open(model) as file:
        assert kept_digests(file.watch, tmp_path) is None
        with reads(file, tmp_path, expected) as chunks:
            assert sum(chunks) == model.stat().st_size
            assert max(chunks) == CHUNK
        with reads(file, tmp_path, expected) as chunks:
            assert chunks == []
        assert kept_digests(file.watch, tmp_path) == [expected]
        with reads(file, None, expected) as chunks:
            assert len(chunks) > 1
        model.chmod(0o400)  # moves ctime
        with reads(file, tmp_path, expected) as chunks:
            assert len(chunks) > 1
    assert len([*(tmp_path / "digests").iterdir()]) == 2


def test_it_is_read_from_the_disk_where_it_is_not_in_the_cache(model: Path) -> None:
    expected = sha256(model)
    with GgufFile.open(model) as file, model.open("rb") as other:
        os.fdatasync(other.fileno())
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with reads(file, None, expected) as chunks:
            assert len(chunks) > 1


@pytest.mark.parametrize(
    "damage", [b"", b"0" * 64, b"0" * 63 + b"\n", b"0" * 65 + b"\n", b"G" * 64]
)
def test_what_is_kept_and_damaged_is_made_again(model: Path, tmp_path: Path, damage: bytes) -> None:
    with GgufFile.open(model) as file:
        path = kept_path(tmp_path, file.watch.stamps()[0])
        path.parent.mkdir()
        path.write_bytes(damage)
        assert read_kept(path) is None
        with reads(file, tmp_path, sha256(model)) as chunks:
            assert chunks
        assert read_kept(path) == sha256(model)


def test_that_of_a_file_that_has_just_changed_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_digest, "_SETTLED_S", 3600.0)
    with GgufFile.open(model) as file, reads(file, tmp_path, sha256(model)):
        assert kept_digests(file.watch, tmp_path) is None


def test_a_folder_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "digests").write_text("in the way")
    with GgufFile.open(model) as file, reads(file, tmp_path, sha256(model)) as chunks:
        assert chunks


def test_a_file_that_changes_meanwhile_has_none(model: Path, tmp_path: Path) -> None:
    def change(num_bytes: int) -> None:
        model.chmod(0o400)

    with GgufFile.open(model) as file:
        with pytest.raises(ModelFileError, match=r"\bread\b"):
            file_digests(file.watch, tmp_path, change)
        assert kept_digests(file.watch, tmp_path) is None


def test_one_reads_while_another_waits_for_it(model: Path, tmp_path: Path) -> None:
    has_begun, is_waited_for, chunks = threading.Event(), threading.Event(), list[int]()

    def hold(num_bytes: int) -> None:
        has_begun.set()
        assert is_waited_for.wait(20.0)

    with GgufFile.open(model) as file, GgufFile.open(model) as other:
        reading = threading.Thread(target=file_digests, args=(file.watch, tmp_path, hold))
        reading.start()
        assert has_begun.wait(20.0)

        def wait() -> None:
            is_waited_for.set()
            reading.join(20.0)

        found = file_digests(other.watch, tmp_path, chunks.append, wait=wait)
        assert (found, chunks) == ([sha256(model)], [])


def test_old_ones_make_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_digest, "_MOST_KEPT", 2)
    with GgufFile.open(model) as file:
        for mode in (0o400, 0o600, 0o400, 0o600):
            model.chmod(mode)
            file_digests(file.watch, tmp_path, lambda num_bytes: None)
        assert kept_digests(file.watch, tmp_path) == [sha256(model)]
    assert len([*(tmp_path / "digests").iterdir()]) == 2
