"""What a process knows of its model's weights, and finds when the file is touched or written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_adapters.gguf import digest as full_digest
from dflash_adapters.gguf import weight_check
from dflash_adapters.gguf.digest import kept_path, whole_digest
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.watch import FileWatch
from dflash_adapters.gguf.weight_blocks import Blocks, Read
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import ModelFileError
from dflash_protocol.placement import OwnedExperts
from support.descriptors import no_descriptor_leak
from support.random_models import ODD_SHAPES, write_qwen3moe

NONCE = b"n" * 16
OWNED = OwnedExperts.from_lists({0: [3, 1], 4: [0]})
TIMEOUT_S = 20.0


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR", str(tmp_path / "cache"))
    with no_descriptor_leak():
        yield write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=3)
    assert "dflash-digest" not in [each.name for each in threading.enumerate()]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is small enough to be hashed at once."""
    monkeypatch.setattr(weight_check, "_AT_ONCE_BYTES", 0)


@pytest.fixture
def file(model: Path) -> Iterator[GgufFile]:
    with GgufFile.open(model) as file:
        yield file


@pytest.fixture
def check(file: GgufFile) -> Iterator[WeightCheck]:
    check = WeightCheck(file, read_spec(file).moe)
    yield check
    check.close()


def overwrite(path: Path, place: int, content: bytes, *, puts_time_back: bool = True) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)
    if puts_time_back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_a_stamp_is_of_one_file_in_one_state(file: GgufFile, check: WeightCheck) -> None:
    stamp = check.stamp()
    assert stamp == check.stamp()
    with GgufFile.open(file.path) as again:
        assert WeightCheck(again, read_spec(again).moe).stamp() == stamp
    copy = file.path.with_name("copy.gguf")
    copy.write_bytes(file.path.read_bytes())
    with GgufFile.open(copy) as other:
        assert WeightCheck(other, read_spec(other).moe).stamp() != stamp
    file.path.chmod(0o400)
    assert check.stamp() != stamp
    file.path.chmod(0o600)
    overwrite(file.path, file.size_bytes - 1, b"\x01", puts_time_back=False)
    with pytest.raises(ModelFileError, match=r"\bwritten\b"):
        check.stamp()


def test_without_a_boot_id_no_two_processes_have_the_same_stamp(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_check, "_BOOT_ID", Path("/nonexistent"))
    moe = read_spec(file).moe
    assert WeightCheck(file, moe).stamp() != WeightCheck(file, moe).stamp()


def test_answers_are_of_the_weights_that_an_owner_uses(file: GgufFile, check: WeightCheck) -> None:
    answer = check.answer(OWNED, NONCE)
    copy = file.path.with_name("copy.gguf")
    copy.write_bytes(file.path.read_bytes())
    moe = read_spec(file).moe
    down, up = moe.layers[4].down, moe.layers[0].up
    assert down.num_bytes > 4096, "of which one block is not all"

    def answer_of_copy(owned: OwnedExperts = OWNED, nonce: bytes = NONCE) -> str:
        with GgufFile.open(copy) as other:
            return WeightCheck(other, moe).answer(owned, nonce)

    assert answer_of_copy() == answer
    assert answer_of_copy(nonce=b"m" * 16) != answer
    # Whole matrices: whatever the block, it differs.
    _, place = up.place_of(2)
    overwrite(copy, place, bytes(up.num_bytes))
    assert answer_of_copy() == answer, "nobody uses that one"
    _, place = down.place_of(0)
    _, others = down.place_of(1)
    data = copy.read_bytes()
    overwrite(copy, place, data[others : others + down.num_bytes])
    assert answer_of_copy() != answer


@pytest.mark.parametrize("num_touches", [1, 3])
def test_an_answer_is_begun_again_when_the_file_is_touched_meanwhile(
    file: GgufFile, check: WeightCheck, num_touches: int
) -> None:
    expected = check.answer(OWNED, NONCE)
    modes = [0o400, 0o600, 0o400][:num_touches]

    def touch(num_done: int, num_total: int) -> None:
        if modes:
            file.path.chmod(modes.pop())

    if num_touches == 1:
        assert check.answer(OWNED, NONCE, touch) == expected
    else:
        with pytest.raises(ModelFileError, match=r"\bread\b"):
            check.answer(OWNED, NONCE, touch)
    assert check.answer(OWNED, NONCE) == expected


@pytest.mark.parametrize("knows_all", [True, False], ids=["model", "owner"])
def test_only_ctime_moved_is_looked_into(
    file: GgufFile, check: WeightCheck, knows_all: bool
) -> None:
    check.remember(None if knows_all else OWNED)
    file.path.chmod(0o400)
    file.require_unwritten()
    file.path.chmod(0o600)
    file.path.rename(file.path.with_name("moved.gguf"))
    file.require_unwritten()
    path = file.path.with_name("moved.gguf")
    os.utime(path, ns=(0, path.stat().st_mtime_ns))
    file.require_unwritten()
    _, place = read_spec(file).moe.layers[0].gate.place_of(3)
    overwrite(path, place, bytes(20_000))
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"\bwritten\b"):
            file.require_unwritten()


def test_what_is_kept_to_compare_is_of_the_opened_file(
    file: GgufFile, check: WeightCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = Blocks.digest

    def changed_meanwhile(blocks: Blocks, read: Read, *, alone: bool) -> str:
        file.path.chmod(0o400)
        return digest(blocks, read, alone=alone)

    monkeypatch.setattr(Blocks, "digest", changed_meanwhile)
    with pytest.raises(ModelFileError, match=r"\bread\b"):
        check.remember()


def test_a_large_model_is_hashed_in_the_background(
    file: GgufFile, check: WeightCheck, slow: None
) -> None:
    check.remember()
    check.remember()
    check.start()
    wait_until(lambda: "model" in file.watch._records)
    file.path.chmod(0o400)
    file.require_unwritten()


def test_a_file_that_is_touched_before_its_bytes_are_known_is_not_trusted(
    file: GgufFile, check: WeightCheck, slow: None
) -> None:
    check.remember()
    file.path.chmod(0o400)
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"\bbefore\b"):
            file.require_unwritten()
    check.start()
    time.sleep(0.05)
    with pytest.raises(ModelFileError, match=r"\bbefore\b"):
        file.require_unwritten()


def test_a_look_costs_something_only_every_tenth_of_a_second(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(FileWatch, "require_unwritten", lambda watch: looks.append(now_s[0]))
    for _ in range(100):
        now_s[0] += 0.01
        file.watch.poll()
    assert 9 <= len(looks) <= 11


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of all bytes is made from the beginning, without pauses, and kept."""
    monkeypatch.setattr(weight_check, "_DIGEST_AFTER_S", 0.0)
    monkeypatch.setattr(weight_check, "_SHARE_OF_CORE", 1.0)
    monkeypatch.setattr(weight_check, "_MOST_OF_A_CORE", 1.0)
    monkeypatch.setattr(full_digest, "_SETTLED_S", 0.0)


def test_the_full_digest_is_made_once_and_then_known_from_the_beginning(
    file: GgufFile, check: WeightCheck, at_once: None, tmp_path: Path
) -> None:
    assert check.full_digest == ""
    check.start()
    wait_until(lambda: check.full_digest)
    kept = kept_path(tmp_path / "cache", file.watch.stamps()[0]).read_text().strip()
    assert check.full_digest == whole_digest([kept])
    with GgufFile.open(file.path) as again:
        assert WeightCheck(again, read_spec(again).moe).full_digest == check.full_digest


def test_after_a_touch_the_full_digest_is_made_again_and_finds_a_single_page(
    file: GgufFile, check: WeightCheck, at_once: None
) -> None:
    check.remember(OWNED)
    check.start()
    wait_until(lambda: check.full_digest)
    before = check.full_digest
    file.path.chmod(0o400)
    file.require_unwritten()
    wait_until(lambda: check.full_digest)
    assert check.full_digest == before
    file.path.chmod(0o600)
    _, place = read_spec(file).moe.layers[2].gate.place_of(7)  # in no block of these experts
    overwrite(file.path, place, b"\x00" * 16)
    file.require_unwritten()

    def is_found() -> bool:
        try:
            file.require_unwritten()
        except ModelFileError as error:
            return "written" in error.reason
        return False

    wait_until(is_found)


def test_closing_ends_the_thread_promptly(
    file: GgufFile, check: WeightCheck, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_digest, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(weight_check, "_SHARE_OF_CORE", 1e-7)
    check.start()
    time.sleep(0.02)
    started_s = time.monotonic()
    check.close()
    check.close()
    assert time.monotonic() - started_s < 5.0
    assert check.full_digest == ""


def test_closing_at_once_never_waits(file: GgufFile) -> None:
    moe = read_spec(file).moe
    started_s = time.monotonic()
    for _ in range(50):
        check = WeightCheck(file, moe)
        check.start()
        check.close()
    assert time.monotonic() - started_s < 5.0
