"""What of the host's memory a process may use: the machine's, and its memory cgroups'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.compute.memory import HostMemory, host_memory, is_in_memory, process_room

MIB = 1 << 20
MEMINFO = "MemTotal:  8388608 kB\nMemFree:  100 kB\nMemAvailable:  4194304 kB\n"
GIB_4, GIB_8 = 4096 * MIB, 8192 * MIB


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def version_2(root: Path, **folders: dict[str, str]) -> None:
    """Nested cgroups: the first is the outermost."""
    write(root, {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::/{'/'.join(folders)}\n"})
    folder = "sys/fs/cgroup"
    for name, files in folders.items():
        folder += f"/{name}"
        write(root, {f"{folder}/memory.{file}": text for file, text in files.items()})


def limits(most: int | str, used: int, cached: int = 0, **more: str) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\nshmem 7\n"
    return {"max": str(most), "current": str(used), "stat": stat, **more}


def test_without_a_cgroup_the_machine_limits(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == HostMemory(0, 0)
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert host_memory(tmp_path) == HostMemory(GIB_4, GIB_8)
    version_2(tmp_path, user=limits("max", 3 * MIB))
    assert host_memory(tmp_path) == HostMemory(GIB_4, GIB_8)
    real = host_memory()
    assert 0 < real.free_bytes <= real.total_bytes


def test_what_a_process_has_already_is_its_own(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/status": "Name:\tx\nRssAnon:\t    1024 kB\nRssFile:\t 77 kB\n"})
    assert process_room(tmp_path) == 0  # nothing is known of the machine
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert process_room(tmp_path) == GIB_4 + MIB
    version_2(tmp_path, user=limits(600 * MIB, 500 * MIB, cached=100 * MIB))
    assert process_room(tmp_path) == 201 * MIB


def test_the_tightest_of_nested_cgroups_limits(tmp_path: Path) -> None:
    version_2(tmp_path, a=limits(900 * MIB, 700 * MIB), b=limits(600 * MIB, 100 * MIB))
    assert host_memory(tmp_path) == HostMemory(200 * MIB, 600 * MIB)
    version_2(tmp_path, a=limits(900 * MIB, 100 * MIB), b=limits(600 * MIB, 100 * MIB))
    assert host_memory(tmp_path) == HostMemory(500 * MIB, 600 * MIB)
    version_2(tmp_path, a=limits(GIB_8, 0), b=limits(600 * MIB, 100 * MIB, high=f"{200 * MIB}"))
    assert host_memory(tmp_path) == HostMemory(100 * MIB, 200 * MIB)


def test_cached_files_can_be_given_up(tmp_path: Path) -> None:
    version_2(tmp_path, a=limits(900 * MIB, 890 * MIB, 500 * MIB))
    assert host_memory(tmp_path).free_bytes == 510 * MIB
    version_2(tmp_path, a=limits(900 * MIB, 10 * MIB, 500 * MIB))  # counted a moment apart
    assert host_memory(tmp_path).free_bytes == 900 * MIB
    version_2(tmp_path, a=limits(100 * MIB, 300 * MIB, 50 * MIB))  # limited after it was used
    assert host_memory(tmp_path).free_bytes == 0


def test_version_1_has_names_of_its_own(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker/1f"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/1f\n0::/\n",
            f"{folder}/memory.limit_in_bytes": str(512 * MIB),
            f"{folder}/memory.usage_in_bytes": str(412 * MIB),
            f"{folder}/memory.stat": f"cache 1\ninactive_file 9\ntotal_inactive_file {12 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert host_memory(tmp_path) == HostMemory(112 * MIB, 512 * MIB)


@pytest.mark.parametrize(
    "content", [b"", b"-1", b"max", b"1e9", b"9" * 40, b"\xff\xfe", b"5" * 70_000, "١٢".encode()]
)
def test_what_is_no_number_is_no_limit(tmp_path: Path, content: bytes) -> None:
    version_2(tmp_path, a=limits("max", 0))
    folder = "sys/fs/cgroup/a/memory."
    write(tmp_path, {f"{folder}max": content, f"{folder}high": content})
    assert host_memory(tmp_path) == HostMemory(GIB_4, GIB_8)
    write(tmp_path, {f"{folder}max": f"{MIB}", f"{folder}current": content})
    write(tmp_path, {f"{folder}stat": b"inactive_file " + content + b"\nnonsense\n"})
    assert host_memory(tmp_path) == HostMemory(MIB, MIB)


@given(meminfo=st.binary(max_size=200), cgroup=st.binary(max_size=200), stat=st.binary(max_size=99))
def test_no_content_of_these_files_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, meminfo: bytes, cgroup: bytes, stat: bytes
) -> None:
    root = tmp_path_factory.mktemp("root")
    write(root, {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup})
    write(root, {"sys/fs/cgroup/memory.max": b"4096", "sys/fs/cgroup/memory.stat": stat})
    found = host_memory(root)
    assert 0 <= found.free_bytes <= found.total_bytes


def test_a_cgroup_of_the_system_is_seen(tmp_path: Path) -> None:
    """In a memory cgroup that is made for the test, where the system permits it."""
    mount = Path("/sys/fs/cgroup")
    version_1 = mount / "memory"
    parent = version_1 if version_1.is_dir() else mount
    name = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    folder = parent / f"dflash-test-{os.getpid()}"
    most = 700 * MIB
    code = "from dflash_runtime.compute.memory import host_memory as m; m = m(); "
    code += "print(m.free_bytes, m.total_bytes)"
    try:
        folder.mkdir()
        (folder / name).write_text(str(most))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        join = f"echo $$ > {folder}/cgroup.procs && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["sh", "-c", join], capture_output=True, text=True, timeout=60)
    finally:
        folder.rmdir()
    assert done.returncode == 0, done.stderr
    free_bytes, total_bytes = map(int, done.stdout.split())
    assert total_bytes == most
    assert most - 200 * MIB < free_bytes < most


def test_file_systems_in_memory(tmp_path: Path) -> None:
    path, mounts = tmp_path / "file", tmp_path / "mountinfo"
    path.write_text("")
    device = path.stat().st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    for kind, expected in (("tmpfs", True), ("ext4", False)):
        mounts.write_text(
            f"22 1 9999:1 / / rw - btrfs x rw\n23 1 {place} / /x rw shared:1 - {kind} y rw\n"
        )
        assert is_in_memory(path, mounts) is expected
    mounts.write_bytes(b"\xff - \n - - -\n")
    assert not is_in_memory(path, mounts)
    assert not is_in_memory(path, tmp_path / "none")
