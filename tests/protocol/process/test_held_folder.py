"""Folders that are there as long as who made them lives, in whatever pid namespace that is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.held_folder import HeldFolder, remove_if_abandoned
from support.processes import environment, wait_until

HOLD = """
import sys
from pathlib import Path
from dflash_protocol.process.held_folder import HeldFolder
folder = HeldFolder(Path(sys.argv[1]))
(folder.path / "cpu0").touch()
print(folder.path, flush=True)
sys.stdin.read()
folder.close()
"""
OTHER_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def folder(run_dir: Path) -> Iterator[HeldFolder]:
    folder = HeldFolder(run_dir)
    (folder.path / "cpu0").touch()
    yield folder
    folder.close()


def hold(run_dir: Path, *prefix: str) -> subprocess.Popen[str]:
    """A process that holds a folder until it is told to end."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", HOLD, str(run_dir)],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def path_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_folder_is_ours_alone_and_goes_when_it_is_closed(run_dir: Path) -> None:
    folder = HeldFolder(run_dir)
    assert folder.path.parent == run_dir
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "cpu0").touch()
    folder.close()
    assert list(run_dir.iterdir()) == []


def test_what_a_killed_process_held_is_removed_by_the_next(run_dir: Path) -> None:
    with hold(run_dir) as process:
        leftover = path_of(process)
        HeldFolder(run_dir).close()
        assert (leftover / "cpu0").exists(), "it lives"
        process.send_signal(signal.SIGKILL)
    HeldFolder(run_dir).close()
    assert not leftover.exists()


def test_a_number_that_is_in_use_again_keeps_nothing(run_dir: Path) -> None:
    leftover = run_dir / f"d{os.getpid()}-abcdef"
    leftover.mkdir(mode=0o700)
    HeldFolder(run_dir).close()
    assert not leftover.exists()


@pytest.mark.skipif(
    subprocess.run([*OTHER_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no pid namespace can be made here",
)
def test_processes_of_other_pid_namespaces_leave_each_others_folders_alone(
    run_dir: Path, folder: HeldFolder
) -> None:
    """Neither knows the other's number, or it means another process."""
    with hold(run_dir, *OTHER_NAMESPACE) as other:
        theirs = path_of(other)
        assert theirs.name.startswith("d1-"), "it has looked for leftovers by now"
        assert (folder.path / "cpu0").exists()
        HeldFolder(run_dir).close()
        assert (theirs / "cpu0").exists()
        other.communicate("")
    assert not theirs.exists()
    assert (folder.path / "cpu0").exists()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both where the sweeper has removed it, and where it is just about to."""
    real_flock = fcntl.flock
    swept: list[Path] = []
    sweepers: list[int] = []

    def flock(fd: int, operation: int) -> None:
        """The sweeper comes first: it has removed the folder, then it is about to."""
        monkeypatch.setattr(fcntl, "flock", real_flock)
        [path] = run_dir.iterdir()
        swept.append(path)
        if len(swept) == 1:
            remove_if_abandoned(path)
            monkeypatch.setattr(fcntl, "flock", flock)
            real_flock(fd, operation)
        else:
            sweepers.append(os.open(path, os.O_RDONLY))
            real_flock(sweepers[0], operation)
            try:
                real_flock(fd, operation)
            finally:
                path.rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = HeldFolder(run_dir)
    assert len({*swept, folder.path}) == 3
    HeldFolder(run_dir).close()
    assert folder.path.exists(), "and it is held"
    folder.close()
    os.close(sweepers[0])


def test_many_that_come_and_go_at_once_lose_nothing(run_dir: Path) -> None:
    failures: list[object] = []

    def come_and_go() -> None:
        for _ in range(30):
            folder = HeldFolder(run_dir)
            (folder.path / "cpu0").touch()
            if not (folder.path / "cpu0").exists():
                failures.append(folder.path)
            folder.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(run_dir.iterdir()) == []


def test_a_child_does_not_hold_what_we_hold(run_dir: Path) -> None:
    """Nor would it if all that may be inherited were."""
    folder = HeldFolder(run_dir)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE, close_fds=False,
    ) as child:  # fmt: skip
        os.close(folder._lock_fd)  # as if we were killed

        def is_removed() -> bool:
            remove_if_abandoned(folder.path)
            return not folder.path.exists()

        # `Popen` may return just before the system has closed what the child does not inherit.
        wait_until(is_removed, "the child to hold nothing")
        child.communicate(b"")


def test_an_empty_folder_is_removed_by_a_child_only_when_nobody_holds_it(run_dir: Path) -> None:
    folder = HeldFolder(run_dir)
    remove_if_abandoned(folder.path, only_if_empty=True)
    assert folder.path.exists()
    (folder.path / "cpu1").touch()
    os.close(folder._lock_fd)
    remove_if_abandoned(folder.path, only_if_empty=True)
    assert folder.path.exists(), "another child is not done with it"
    (folder.path / "cpu1").unlink()
    remove_if_abandoned(folder.path, only_if_empty=True)
    assert not folder.path.exists()


def test_of_children_that_end_at_once_the_last_one_removes_the_folder(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has removed its socket, and looks at the folder, while the first, which found that
    socket, still has the folder locked."""
    folder = run_dir / "d1-abcdef"
    folder.mkdir(mode=0o700)
    of_second = folder / "socket"
    of_second.touch()
    tried: list[str] = []
    rmdir = Path.rmdir

    def rmdir_of_first(path: Path) -> None:
        monkeypatch.undo()
        try:
            rmdir(path)
        except OSError as error:
            tried.append(type(error).__name__)
            of_second.unlink()
            remove_if_abandoned(path, only_if_empty=True)
            raise

    monkeypatch.setattr(Path, "rmdir", rmdir_of_first)
    remove_if_abandoned(folder, only_if_empty=True)
    assert tried == ["OSError"]
    assert not folder.exists()


def test_what_is_no_folder_of_ours_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "d1-file").touch()
    (run_dir / "d1-link").symlink_to(tmp_path)
    HeldFolder(run_dir).close()
    assert sorted(path.name for path in run_dir.iterdir()) == ["d1-file", "d1-link"]
    assert tmp_path.exists()
    for path in run_dir.iterdir():
        path.unlink()


def test_a_folder_that_cannot_be_made_is_an_error_that_says_where(run_dir: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere: No such file or directory"):
        HeldFolder(run_dir / "nowhere")
