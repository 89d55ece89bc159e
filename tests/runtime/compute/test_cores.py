"""Which cores are used for computing."""

from __future__ import annotations

import os

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.cores import (
    most_beside_device,
    parse_cores,
    share_of_cores,
    usable_cores,
)
from dflash_runtime.compute.topology import Core, Topology


def test_there_is_a_core_here() -> None:
    assert set(usable_cores()) <= os.sched_getaffinity(0)
    assert usable_cores()


@pytest.mark.parametrize(
    ("num_cores", "threads_each", "quota", "most"),
    [
        (1, 1, None, 1),
        (4, 1, None, 3),
        (8, 1, None, 7),
        (16, 1, None, 14),
        (64, 1, None, 62),
        (8, 2, None, 14),  # others have second hardware threads
        (16, 1, 4.0, 3),
    ],
)
def test_what_steps_beside_a_device_leave_to_others(
    num_cores: int, threads_each: int, quota: float | None, most: int
) -> None:
    each = [tuple(range(threads_each * n, threads_each * (n + 1))) for n in range(num_cores)]
    topology = Topology(tuple(Core(processors, 0, False) for processors in each), quota)
    assert most_beside_device(topology) == most


def test_lists_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    assert parse_cores("3") == [3]
    assert parse_cores("0-2,8,1") == [0, 1, 2, 8]
    for wrong in ("", "a", "1-", "-1", "1,,2", "5-3", "9-10", "1.5", "²", "0-9999999"):
        with pytest.raises(SettingsError, match="cores"):
            parse_cores(wrong)


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_shares_cover_all_cores(num_cores: int, num_parts: int) -> None:
    cores = list(range(10, 10 + num_cores))
    parts = [share_of_cores(cores, part_idx, num_parts) for part_idx in range(num_parts)]
    assert all(parts)
    assert sorted({core for part in parts for core in part}) == cores
    if num_parts <= num_cores:
        assert sum(map(len, parts)) == num_cores
