"""Segments as files: who may open what, and what is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import (
    Segment,
    create_segment,
    open_segment,
    silence_bell,
    sweep_segments,
)
from support.descriptors import no_descriptor_leak
from support.processes import environment

SHAPE = RingShape(2, 3, 5, 7)


@pytest.fixture
def segment(run_dir: Path) -> Iterator[Segment]:
    made = create_segment(run_dir, SHAPE, generation=4)
    yield made
    made.close()


def test_two_mappings_are_one_memory_and_no_name_stays(run_dir: Path, segment: Segment) -> None:
    other = open_segment(run_dir, segment.name, SHAPE, generation=4)
    assert segment.write_nonce(is_client=True) == other.read_nonce(is_client=True)
    assert other.write_nonce(is_client=False) == segment.read_nonce(is_client=False)
    assert other.read_nonce(is_client=True) != other.read_nonce(is_client=False)
    for bell in ("client_bell", "server_bell"):
        os.write(getattr(segment, bell), b"!")
        assert os.read(getattr(other, bell), 10) == b"!"
    segment.unlink()
    assert list(run_dir.iterdir()) == []
    assert segment.read_nonce(is_client=False) == other.read_nonce(is_client=False)
    segment.unlink()
    other.close()
    other.close()


def test_files_are_ours_alone_and_all_their_pages_are_reserved(
    run_dir: Path, segment: Segment
) -> None:
    found = {path.name: path.lstat() for path in run_dir.iterdir()}
    names = [segment.name, f"{segment.name}.client", f"{segment.name}.server"]
    assert sorted(found) == sorted(names)
    assert all(stat.S_IMODE(each.st_mode) == 0o600 for each in found.values())
    memory = found[segment.name]
    assert memory.st_size == SHAPE.segment_bytes
    assert memory.st_blocks * 512 >= SHAPE.segment_bytes
    assert ctypes.string_at(segment.address, 8) == b"DFRING1\0"
    assert segment.address % ring.PAGE_BYTES == 0


def test_making_and_closing_leaves_nothing(run_dir: Path) -> None:
    with no_descriptor_leak():
        names = set()
        for generation in range(3):
            made = create_segment(run_dir, SHAPE, generation=generation)
            other = open_segment(run_dir, made.name, SHAPE, generation=generation)
            names.add(made.name)
            made.close()
            other.close()
        assert len(names) == 3
        assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "generation"),
    [
        (SHAPE, 5),
        (RingShape(1, 3, 5, 7), 4),
        (RingShape(2, 2, 5, 7), 4),  # of the same size
        (RingShape(2, 3, 5, 6), 4),
        (RingShape(2, 300, 500, 7), 4),
    ],
)
def test_another_shape_or_generation_is_refused(
    run_dir: Path, segment: Segment, shape: RingShape, generation: int
) -> None:
    reason = r"expected|generation"
    with no_descriptor_leak(), pytest.raises(ProtocolError, match=reason):
        open_segment(run_dir, segment.name, shape, generation=generation)
    open_segment(run_dir, segment.name, SHAPE, generation=4).close()


def test_a_file_that_was_cut_is_refused_and_not_mapped(run_dir: Path, segment: Segment) -> None:
    os.truncate(run_dir / segment.name, SHAPE.segment_bytes - 1)
    with pytest.raises(ProtocolError, match="expected"):
        open_segment(run_dir, segment.name, SHAPE, generation=4)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "ring-1-1-", f"ring-1-1-{'0' * 32}\n", "ring-1-1-é"],
)
def test_a_name_names_a_segment_of_the_folder_and_nothing_else(run_dir: Path, name: str) -> None:
    with pytest.raises(ProtocolError, match="name"):
        open_segment(run_dir, name, SHAPE, generation=4)


def fresh_name() -> str:
    return f"ring-1-1-{secrets.token_hex(16)}"


@pytest.mark.parametrize("kind", ["nothing", "link", "pipe", "folder", "open to others"])
def test_what_is_no_private_file_of_ours_is_refused(
    run_dir: Path, segment: Segment, kind: str
) -> None:
    path = run_dir / fresh_name()
    if kind == "link":
        path.symlink_to(run_dir / segment.name)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "open to others":
        path.write_bytes((run_dir / segment.name).read_bytes())
        path.chmod(0o604)
    with no_descriptor_leak(), pytest.raises(DaemonUnavailable):
        open_segment(run_dir, path.name, SHAPE, generation=4)
    if kind == "folder":
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["nothing", "link", "file"])
def test_bells_that_are_none_are_refused(run_dir: Path, segment: Segment, kind: str) -> None:
    bell = run_dir / f"{segment.name}.server"
    bell.unlink()
    if kind == "link":
        bell.symlink_to(run_dir / f"{segment.name}.client")
    elif kind == "file":
        bell.touch(0o600)
    with no_descriptor_leak(), pytest.raises(DaemonUnavailable):
        open_segment(run_dir, segment.name, SHAPE, generation=4)


def test_a_folder_that_is_not_ours_alone_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run_dir)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with no_descriptor_leak():
        for folder in (tmp_path / "link", tmp_path / "open", tmp_path / "none"):
            with pytest.raises(DaemonUnavailable, match=str(folder)):
                create_segment(folder, SHAPE, generation=1)
            with pytest.raises(DaemonUnavailable):
                open_segment(folder, fresh_name(), SHAPE, generation=1)
            with pytest.raises(DaemonUnavailable):
                sweep_segments(folder)


def test_a_full_file_system_is_an_error_and_leaves_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is mapped: touching a page that cannot be had would kill the process."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with no_descriptor_leak(), pytest.raises(DaemonUnavailable, match="No space left"):
        create_segment(run_dir, SHAPE, generation=1)
    assert list(run_dir.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_more_than_there_is_memory_for_is_an_error(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = Path("/dev/shm") / f"dflash-test-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    try:
        free = os.statvfs(folder)
        tokens = free.f_frsize * free.f_blocks // 1000
        with pytest.raises(DaemonUnavailable, match="No space left"):
            create_segment(folder, RingShape(1, tokens, 100, 1), generation=1)
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_a_process_without_descriptors_left_is_told(run_dir: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment
resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))
try:
    create_segment(Path(sys.argv[1]), RingShape(1, 1, 1, 1), generation=1)
except DaemonUnavailable as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Too many open files" in result.stdout, result.stderr
    assert list(run_dir.iterdir()) == []


def test_leftovers_of_the_dead_are_swept_and_the_living_are_left_alone(
    run_dir: Path, segment: Segment
) -> None:
    code = """
import sys
from pathlib import Path
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment
made = create_segment(Path(sys.argv[1]), RingShape(1, 1, 1, 1), generation=1)
print("made", flush=True)
sys.stdin.read()
"""
    with ExitStack() as undo:
        child = undo.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code, str(run_dir)],
                env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        stranger = run_dir / "ring-of-somebody-else"
        stranger.touch()
        assert sweep_segments(run_dir) == 0
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len(list(run_dir.iterdir())) == 7
        assert sweep_segments(run_dir) == 1
        assert stranger.exists()
        stranger.unlink()
    assert len(list(run_dir.iterdir())) == 3
    open_segment(run_dir, segment.name, SHAPE, generation=4).close()


def test_a_recycled_pid_does_not_keep_a_leftover(run_dir: Path) -> None:
    """The number is this process's; a pipe without memory goes as well."""
    name = f"ring-{os.getpid()}-1-{secrets.token_hex(16)}"
    os.mkfifo(run_dir / f"{name}.client")
    assert sweep_segments(run_dir) == 1
    assert list(run_dir.iterdir()) == []


def test_who_holds_the_lock_lives_whatever_its_number_means_here(run_dir: Path) -> None:
    """As a process of another pid namespace does."""
    made = create_segment(run_dir, SHAPE, generation=1)
    _, _, _, random = made.name.split("-")
    foreign = f"ring-4194305-1-{random}"
    for suffix in ("", ".client", ".server"):
        (run_dir / (made.name + suffix)).rename(run_dir / (foreign + suffix))
    assert sweep_segments(run_dir) == 0
    assert len(list(run_dir.iterdir())) == 3
    for suffix in ("", ".client", ".server"):
        (run_dir / (foreign + suffix)).rename(run_dir / (made.name + suffix))
    made.close()


def test_a_segment_that_is_swept_before_it_is_locked_is_made_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process of another pid namespace, to which our number means nothing."""
    real_flock = fcntl.flock
    sweepers: list[int] = []
    swept: set[str] = set()

    def flock(fd: int, operation: int) -> None:
        """The sweeper comes first: it has removed the file, then it is about to."""
        monkeypatch.setattr(fcntl, "flock", real_flock)
        [path] = run_dir.iterdir()
        is_first = not swept
        swept.add(path.name)
        if is_first:
            assert sweep_segments(run_dir) == 1
            monkeypatch.setattr(fcntl, "flock", flock)
            real_flock(fd, operation)
        else:
            sweepers.append(os.open(path, os.O_RDWR))
            real_flock(sweepers[0], operation)
            try:
                real_flock(fd, operation)
            finally:
                path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    made = create_segment(run_dir, SHAPE, generation=1)
    assert len({*swept, made.name}) == 3
    open_segment(run_dir, made.name, SHAPE, generation=1).close()
    assert sweep_segments(run_dir) == 0
    made.close()
    os.close(sweepers[0])
    assert list(run_dir.iterdir()) == []


def test_a_bell_that_is_full_or_silent_can_be_silenced_and_rung_again(segment: Segment) -> None:
    bell = segment.client_bell
    silence_bell(bell)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(bell, b"!" * 1000)
    silence_bell(bell)
    assert os.write(bell, b"!") == 1, "there is room again"
    with contextlib.suppress(BlockingIOError):
        while True:
            os.read(bell, 1 << 16)
    silence_bell(bell)
    os.write(bell, b"!")
    assert os.read(bell, 10) == b"!"


def test_facts_that_were_tampered_with_are_refused(run_dir: Path, segment: Segment) -> None:
    for word in range(len(SHAPE.facts(4))):
        at = segment.address + ring.FACTS_AT + 8 * word
        before = ctypes.string_at(at, 8)
        ctypes.memmove(at, struct.pack("<q", 1 << 40), 8)
        with pytest.raises(ProtocolError, match="generation"):
            open_segment(run_dir, segment.name, SHAPE, generation=4)
        ctypes.memmove(at, before, 8)
