"""What the machine's files say of cores, caches and quotas, whatever is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.compute.cores import (
    ThreadCounts,
    default_counts,
    most_threads,
    usable_cores,
)
from dflash_runtime.compute.topology import (
    MOST_PROCESSORS,
    Core,
    Topology,
    parse_processors,
    read_topology,
)

CPUS = "sys/devices/system/cpu"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))


def write(root: Path, path: str, text: str | bytes) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())


def add_caches(root: Path, cpu: int, *, own: str, last: str) -> None:
    """L1d, L1i, L2 and L3; the order of their folders says nothing."""
    for index, (level, kind, shared) in enumerate(
        [(1, "Data", own), (3, "Unified", last), (2, "Unified", own), (1, "Instruction", own)]
    ):
        cache = f"{CPUS}/cpu{cpu}/cache/index{index}"
        write(root, f"{cache}/level", str(level))
        write(root, f"{cache}/type", kind)
        write(root, f"{cache}/shared_cpu_list", shared)


def as_numbers(topology: Topology) -> list[tuple[tuple[int, ...], int, bool]]:
    return [(core.processors, core.cluster, core.is_efficient) for core in topology.cores]


# -- cores ----------------------------------------------------------------------------------------


def test_a_server_with_siblings_and_two_clusters_that_are_numbered_in_turns(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, *range(8))
    for cpu in range(8):
        core, odd = cpu % 4, cpu % 2
        write(root, f"{CPUS}/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 4}")
        last = ",".join(str(each) for each in range(odd, 8, 2))
        add_caches(root, cpu, own=f"{core},{core + 4}", last=last)
    found = read_topology(root)
    assert as_numbers(found) == [
        ((0, 4), 0, False), ((2, 6), 0, False), ((1, 5), 1, False), ((3, 7), 1, False)
    ]  # fmt: skip
    assert (found.num_processors, found.num_clusters, found.num_fast_cores) == (8, 2, 4)
    assert usable_cores(root) == [0, 2, 1, 3]
    assert default_counts(found) == ThreadCounts(4, 4)


def test_processors_that_this_process_may_not_use_are_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 1, 2, 4, 5, 9)
    for cpu, siblings in ((1, "1,5"), (2, "2,6"), (5, "1,5"), (4, "4")):
        write(root, f"{CPUS}/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert as_numbers(read_topology(root)) == [
        ((1, 5), 0, False), ((2,), 0, False), ((4,), 0, False), ((9,), 0, False)
    ]  # fmt: skip


def test_intels_lists_name_efficiency_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(12))
    for cpu in range(12):
        siblings = f"{cpu & ~1}-{cpu | 1}" if cpu < 4 else str(cpu)
        write(root, f"{CPUS}/cpu{cpu}/topology/thread_siblings_list", siblings)
        add_caches(root, cpu, own=siblings, last="0-9" if cpu < 10 else "10-11")
    write(root, "sys/devices/cpu_core/cpus", "0-3")
    write(root, "sys/devices/cpu_atom/cpus", "4-9")
    write(root, "sys/devices/cpu_lowpower/cpus", "10-11")
    found = read_topology(root)
    assert [core.is_efficient for core in found.cores] == [False] * 2 + [True] * 8
    assert (len(found.cores), found.num_clusters) == (10, 2)
    assert default_counts(found) == ThreadCounts(prompts=10, decode=2)
    allow(monkeypatch, 4, 5, 6)  # bound to them: then they are all there is
    assert default_counts(read_topology(root)) == ThreadCounts(3, 3)


@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ((1024, 1024, 446, 446), 2),
        ((1024, 980, 775, 160), 2),
        ((1024, 1010, 950, 990), 0),  # as favoured cores of one kind differ
        ((1024, 400, "x", 400), 0),  # not known of all
        ((1024, 0, 1024, 1024), 0),
    ],
)
def test_slow_cores_are_efficiency_cores(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    speeds: tuple[object, ...],
    slow: int,
) -> None:
    allow(monkeypatch, *range(4))
    for cpu, speed in enumerate(speeds):
        write(root, f"{CPUS}/cpu{cpu}/{name}", str(speed))
    found = read_topology(root)
    assert sum(core.is_efficient for core in found.cores) == slow
    assert default_counts(found) == ThreadCounts(4, 4 - slow)


HOSTILE: list[str | bytes] = [
    "", "x", "-", "0-", "-1", "3-0", "0,,1", "0-99999999999999999999", "1e3", "²", "0x3",
    b"\xff\xfe", b"0\x000", "0" * 70_000, "0," * 40_000, "99999", "1-3",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_is_in_the_files_each_processor_counts_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes
) -> None:
    allow(monkeypatch, 0, 7)
    for cpu in (0, 7):
        folder = f"{CPUS}/cpu{cpu}"
        write(root, f"{folder}/topology/thread_siblings_list", text)
        write(root, f"{folder}/cache/index0/level", text)
        write(root, f"{folder}/cache/index1/level", "3")
        write(root, f"{folder}/cache/index1/shared_cpu_list", text)
        write(root, f"{folder}/cpu_capacity", text)
    write(root, "sys/devices/cpu_atom/cpus", text)
    write(root, "proc/self/cgroup", text)
    write(root, "sys/fs/cgroup/cpu.max", text)
    found = read_topology(root)
    assert sorted(cpu for core in found.cores for cpu in core.processors) == [0, 7]
    assert found.quota is None
    assert default_counts(found).prompts == len(found.cores)


def test_without_any_file_every_processor_is_a_core(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 3, 5)
    assert read_topology(root) == Topology((Core((3,), 0, False), Core((5,), 0, False)), None)
    write(root, f"{CPUS}/cpu3/topology/thread_siblings_list/a-folder", "")
    assert len(read_topology(root).cores) == 2


def test_this_machine_has_a_core() -> None:
    found = read_topology()
    processors = {cpu for core in found.cores for cpu in core.processors}
    assert processors == os.sched_getaffinity(0)
    assert 1 <= default_counts(found).decode <= default_counts(found).prompts <= len(processors)


# -- lists ----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, MOST_PROCESSORS - 1), min_size=1, max_size=50))
def test_lists_are_what_they_were_made_of(processors: set[int]) -> None:
    ranges = [f"{cpu}" if cpu % 2 else f"{cpu}-{cpu}" for cpu in sorted(processors)]
    assert parse_processors(",".join(ranges)) == frozenset(processors)


@given(st.integers(0, MOST_PROCESSORS - 1), st.integers(0, MOST_PROCESSORS - 1))
def test_ranges_ascend(first: int, last: int) -> None:
    found = parse_processors(f"{first}-{last}\n")
    assert found == (frozenset(range(first, last + 1)) if first <= last else None)


@given(st.text(alphabet="0123456789,- \nx²", max_size=40) | st.text(max_size=20))
def test_a_list_is_parsed_or_refused(text: str) -> None:
    found = parse_processors(text)
    if found is not None:
        assert found
        assert all(0 <= cpu < MOST_PROCESSORS for cpu in found)
        assert text.strip().isascii()


# -- quotas ---------------------------------------------------------------------------------------


@pytest.fixture
def four_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    allow(monkeypatch, *range(4))
    return root


def quota_of(root: Path) -> float | None:
    return read_topology(root).quota


def test_the_tightest_quota_counts(four_cores: Path) -> None:
    write(four_cores, "proc/self/cgroup", "0::/pods/one/main")
    assert quota_of(four_cores) is None
    for path, text, quota in [
        ("pods/one/main/cpu.max", "max 100000", None),
        ("pods/cpu.max", "350000 100000", 3.5),
        ("pods/one/main/cpu.max", "400000 100000", 3.5),
        ("pods/one/cpu.max", "125000 50000", 2.5),
        ("cpu.max", "100000 0", 2.5),
        ("cpu.max", "0 100000", 2.5),
    ]:
        write(four_cores, f"sys/fs/cgroup/{path}", text)
        assert quota_of(four_cores) == quota


@pytest.mark.parametrize("path", ["/", "/../../other", "/host/path/not/mounted/here", "no-slash"])
def test_in_a_container_the_mount_is_its_own_cgroup(four_cores: Path, path: str) -> None:
    write(four_cores, "proc/self/cgroup", f"0::{path}")
    write(four_cores, "sys/fs/cgroup/cpu.max", "150000 100000")
    write(four_cores, "sys/other/cpu.max", "10000 100000")
    assert quota_of(four_cores) == 1.5


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_version_1(four_cores: Path, mount: str) -> None:
    write(
        four_cores,
        "proc/self/cgroup",
        "12:cpuset:/docker/a\n5:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n0::/docker/a",
    )
    folder = f"sys/fs/cgroup/{mount}"
    write(four_cores, f"{folder}/cpu.cfs_quota_us", "-1")
    write(four_cores, f"{folder}/cpu.cfs_period_us", "100000")
    assert quota_of(four_cores) is None
    write(four_cores, f"{folder}/docker/a/cpu.cfs_quota_us", "200000")
    write(four_cores, f"{folder}/docker/a/cpu.cfs_period_us", "100000")
    assert quota_of(four_cores) == 2.0


@pytest.mark.parametrize(
    ("quota", "num_threads"),
    [(None, 4), (0.1, 1), (1.0, 1), (1.5, 1), (1.9, 2), (2.5, 2), (3.75, 4), (64.0, 4)],
)
def test_threads_that_a_quota_has_room_for(quota: float | None, num_threads: int) -> None:
    cores = tuple(Core((cpu,), 0, False) for cpu in range(4))
    assert default_counts(Topology(cores, quota)) == ThreadCounts(num_threads, num_threads)
    assert (most_threads(Topology(cores, quota)) is None) == (quota is None)


def test_a_quota_leaves_efficiency_cores_to_prompts() -> None:
    cores = tuple(Core((cpu,), 0, cpu >= 2) for cpu in range(8))
    assert default_counts(Topology(cores, 6.0)) == ThreadCounts(prompts=6, decode=2)
