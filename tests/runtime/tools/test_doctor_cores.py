"""What ``dflash-moe doctor`` says of cores and threads."""

from __future__ import annotations

import pytest

from dflash_protocol.settings import Settings
from dflash_runtime.compute.topology import Core, Topology
from dflash_runtime.tools.doctor_cores import core_hints, core_lines, examine_cores


def machine(
    num_cores: int,
    *,
    siblings: int = 1,
    clusters: int = 1,
    num_efficient: int = 0,
    quota: float | None = None,
) -> Topology:
    cores = [
        Core(
            tuple(range(siblings * core, siblings * (core + 1))),
            core * clusters // num_cores,
            core >= num_cores - num_efficient,
        )
        for core in range(num_cores)
    ]
    return Topology(tuple(cores), quota)


def text(topology: Topology, *, timed: int | None = None, threads: int = 0) -> str:
    found = examine_cores(Settings(threads=threads), topology, timed=timed)
    return "\n".join([*core_lines(found), *core_hints(found)])


def test_a_plain_machine() -> None:
    found = examine_cores(Settings(), machine(2), timed=None)
    assert (found["physical"], found["processors"], found["quota"]) == (2, 2, None)
    assert (found["prompts"]["threads"], found["decode"]["threads"]) == (2, 2)
    shown = text(machine(2))
    assert "2 physical cores" in shown
    for absent in ("SMT", "cluster", "efficiency", "quota", "timed"):
        assert absent not in shown


def test_a_server() -> None:
    shown = text(machine(32, siblings=2, clusters=4), timed=24)
    assert "32 physical cores with 64 processors (SMT siblings)" in shown
    assert "4 clusters" in shown
    assert "prompts        32 threads: one for each core" in shown
    assert "decode         24 threads: the fastest number for this model" in shown
    assert "timed when a model is opened first" in text(machine(32))


def test_a_hybrid() -> None:
    shown = text(machine(24, num_efficient=16))
    assert "16 of them are efficiency cores" in shown
    assert "prompts        24 threads" in shown
    assert "decode         8 threads: one for each core without efficiency cores; " in shown


@pytest.mark.parametrize(("quota", "threads"), [(2.5, 2), (0.5, 1)])
def test_a_quota(quota: float, threads: int) -> None:
    shown = text(machine(8, quota=quota))
    assert f"{quota:.2f} processors (cgroup), room for {threads} thread" in shown
    assert f"prompts        {threads} thread" in shown
    assert "as many as the quota has room for" in shown
    assert "hint" not in shown


def test_a_number_that_was_set() -> None:
    shown = text(machine(8), timed=4, threads=6)
    for phase in ("prompts", "decode "):
        assert f"{phase}        6 threads: as --threads says" in shown
    assert "more than" not in shown
    assert "9 threads are more than the 8 processors" in text(machine(8), threads=9)
    assert "more than the CPU quota has room for (2)" in text(machine(8, quota=2.0), threads=3)
