"""Choosing how many threads decode steps use: with made-up times, and on a model's real steps."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.settings import Settings
from dflash_runtime.compute.cores import ThreadCounts
from dflash_runtime.compute.cpu import backend as cpu_backend
from dflash_runtime.compute.cpu.backend import CpuBackend
from dflash_runtime.compute.thread_trial import (
    OnePass,
    counts_to_try,
    fastest_count,
    is_busy,
    keep_count,
    kept_count,
)
from dflash_runtime.compute.topology import Core, Topology
from dflash_runtime.engine.engine import Engine
from support.environments import cache_with_our_kernels
from support.random_models import ODD_SHAPES, write_qwen3moe

LIMIT_S = 0.3


class FakeMachine:
    """A clock that passes only in parts of passes: each takes its time over the threads' speed."""

    def __init__(
        self, parts_s: Sequence[float], speed: Callable[[int], float], *, noise: float = 0.0
    ) -> None:
        self.now_s = 100.0
        self.num_passes = 0
        self.used: list[int] = []
        self._parts_s, self._speed, self._noise = parts_s, speed, noise
        self._random = random.Random(1)
        self._threads = 0

    def use(self, num_threads: int) -> None:
        self._threads = num_threads

    def clock(self) -> float:
        return self.now_s

    def one_pass(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.num_passes += 1
        for part_s in self._parts_s:
            before()
            self.used.append(self._threads)
            cold = 3.0 if self.num_passes == 1 else 1.0
            factor = 1 + self._noise * self._random.random()
            self.now_s += cold * part_s * factor / self._speed(self._threads)
            after()

    def chosen(self, *counts: int) -> int | None:
        return fastest_count(self.one_pass, counts, self.use, limit_s=LIMIT_S, clock=self.clock)


def saturated(at: int, *, cost: float = 0.0) -> Callable[[int], float]:
    """Speed grows with threads up to some, and falls by `cost` with each further one."""
    return lambda threads: min(threads, at) * (1 - cost * max(0, threads - at))


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_fastest_count_is_found(noise: float) -> None:
    parts_s = [0.002 * (1 + part % 3) for part in range(12)]
    for at, best in ((4, 4), (8, 8), (6, 6), (16, 8)):
        machine = FakeMachine(parts_s, saturated(at, cost=0.1), noise=noise)
        assert machine.chosen(8, 6, 4) == best
        assert machine.now_s - 100 <= LIMIT_S + 0.01
        assert {8, 6, 4} == set(machine.used)


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    assert FakeMachine([0.001] * 10, saturated(4, cost=0.005)).chosen(8, 6, 4) == 8
    assert FakeMachine([0.001] * 10, saturated(8)).chosen(4, 8) == 8
    assert FakeMachine([0.001] * 10, lambda threads: 1.0).chosen(4, 8, 6, 2) == 4


def test_a_disturbance_is_met_by_all_counts_alike() -> None:
    """Every eighth pass takes five times as long."""

    class Disturbed(FakeMachine):
        def one_pass(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
            usual = self._speed
            if self.num_passes % 8 == 0:
                self._speed = lambda threads: usual(threads) / 5
            try:
                super().one_pass(before=before, after=after)
            finally:
                self._speed = usual

    assert Disturbed([0.001] * 6, saturated(4, cost=0.1)).chosen(8, 6, 4) == 4


@pytest.mark.parametrize("part_s", [0.01, 0.05, 0.2, 10.0])
def test_long_parts_are_timed_in_part_or_not_at_all(part_s: float) -> None:
    machine = FakeMachine([part_s] * 48, saturated(4, cost=0.1))
    chosen = machine.chosen(8, 6, 4)
    assert chosen == (4 if part_s < 0.1 else None)
    assert machine.now_s - 100 <= LIMIT_S + 3 * part_s
    assert FakeMachine([], saturated(4)).chosen(8, 4) is None


@pytest.mark.parametrize(
    ("prompts", "decode", "counts"),
    [
        (3, 3, (3, 2, 1)),
        (4, 4, (4, 3, 2)),
        (8, 8, (8, 6, 4)),
        (16, 16, (16, 12, 8, 4)),
        (96, 96, (96, 72, 48, 24)),
        (24, 8, (8, 24, 18, 12, 6)),
    ],
)
def test_counts_that_are_tried(prompts: int, decode: int, counts: tuple[int, ...]) -> None:
    assert counts_to_try(ThreadCounts(prompts, decode)) == counts


# -- kept counts ----------------------------------------------------------------------------------


def machine_of(num_cores: int, quota: float | None = None) -> Topology:
    return Topology(tuple(Core((cpu,), 0, False) for cpu in range(num_cores)), quota)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_qwen3moe(tmp_path / "m.gguf", ODD_SHAPES[0], seed=3)


def test_a_count_is_kept_for_a_model_on_a_machine(tmp_path: Path, model: Path) -> None:
    other = write_qwen3moe(tmp_path / "other.gguf", ODD_SHAPES[1], seed=3)
    same_shape = write_qwen3moe(tmp_path / "same.gguf", ODD_SHAPES[0], seed=4)
    folder, machine = str(tmp_path / "cache"), machine_of(8)
    with GgufFile.open(model) as file, GgufFile.open(other) as second:
        assert kept_count(file, machine, folder) is None
        keep_count(5, file, machine, cache_dir=folder)
        assert kept_count(file, machine, folder) == 5
        assert kept_count(second, machine, folder) is None
        assert kept_count(file, machine_of(9), folder) is None
        assert kept_count(file, machine_of(8, 6.0), folder) is None
    with GgufFile.open(same_shape) as file:
        assert kept_count(file, machine, folder) == 5


@pytest.mark.parametrize("content", ["", "x", "0", "9", "-1", "5" * 30, "\xff"])
def test_a_damaged_count_does_not_count(tmp_path: Path, model: Path, content: str) -> None:
    folder, machine = tmp_path / "cache", machine_of(8)
    with GgufFile.open(model) as file:
        keep_count(5, file, machine, cache_dir=str(folder))
        [place] = folder.glob("threads-*")
        place.write_bytes(content.encode("latin-1"))
        assert kept_count(file, machine, str(folder)) is None


def test_old_counts_are_removed_and_a_bad_folder_is_no_error(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "cache"
    with GgufFile.open(model) as file:
        for num_cores in range(3, 80):
            keep_count(3, file, machine_of(num_cores), cache_dir=str(folder))
        assert len(list(folder.glob("threads-*"))) == 64
        assert kept_count(file, machine_of(79), str(folder)) == 3
        no_folder = tmp_path / "file"
        no_folder.write_text("")
        keep_count(3, file, machine_of(3), cache_dir=str(no_folder))
        assert kept_count(file, machine_of(3), str(no_folder)) is None


# -- the backend ----------------------------------------------------------------------------------


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Topology:
    machine = machine_of(4)
    monkeypatch.setattr(cpu_backend, "read_topology", lambda: machine)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return machine


def choose(backend: CpuBackend, model: Path, one_pass: OnePass | None, **options: bool) -> int:
    with GgufFile.open(model) as file:
        backend.choose_threads(file, one_pass, **options)
    chosen = backend._workers.decode_threads
    backend.close()
    return chosen


def test_a_number_that_was_given_is_not_timed(
    four_cores: Topology, model: Path, tmp_path: Path
) -> None:
    def one_pass(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        raise AssertionError

    assert choose(CpuBackend(num_threads=4, cache_dir=str(tmp_path / "c")), model, one_pass) == 4
    assert choose(CpuBackend(cache_dir=str(tmp_path / "c")), model, None) == 4


def test_beside_a_device_a_processor_is_left_to_others(
    four_cores: Topology, model: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "c")
    assert choose(CpuBackend(cache_dir=folder), model, None, beside_device=True) == 3
    given = CpuBackend(num_threads=4, cache_dir=folder)
    assert choose(given, model, None, beside_device=True) == 4
    with GgufFile.open(model) as file:
        keep_count(2, file, four_cores, cache_dir=folder)
    assert choose(CpuBackend(cache_dir=folder), model, None, beside_device=True) == 2


def test_nothing_is_timed_while_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, four_cores: Topology, model: Path, tmp_path: Path
) -> None:
    def one_pass(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        raise AssertionError

    monkeypatch.setattr(os, "getloadavg", lambda: (0.6 * (os.cpu_count() or 1), 0.0, 0.0))
    assert is_busy()
    assert choose(CpuBackend(cache_dir=str(tmp_path / "c")), model, one_pass) == 4
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").glob("threads-*"))

    def unknown() -> tuple[float, ...]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert not is_busy()


def test_what_was_timed_is_used_from_then_on(
    four_cores: Topology, model: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "c")

    def failing(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        before()
        raise RuntimeError("a broken model")

    assert choose(CpuBackend(cache_dir=folder), model, failing) == 4
    backend = CpuBackend(cache_dir=folder)
    times_s = {4: 6e-3, 3: 2e-3, 2: 6e-3}

    def one_pass(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        for _ in range(4):
            before()
            end_s = time.perf_counter() + times_s[backend._workers.decode_threads]
            while time.perf_counter() < end_s:
                pass
            after()

    assert choose(backend, model, one_pass) == 3
    assert choose(CpuBackend(cache_dir=folder), model, failing) == 3
    assert choose(CpuBackend(cache_dir=folder), model, None) == 3


def test_real_steps_are_timed_and_change_no_result(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    settings = Settings(cache_dir=str(cache_with_our_kernels(tmp_path / "c")))
    tokens = [1, 2, 3]
    with Engine.open(model, settings=settings, threads=1) as engine:
        expected = engine.logits(tokens)
    monkeypatch.setattr(cpu_backend, "read_topology", lambda: machine_of(4))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with Engine.open(model, settings=settings) as engine:
        assert len(list((tmp_path / "c").glob("threads-*"))) == 1
        stats = engine.stats()
        assert not any(owner.requests for owner in stats.owners.values())
        assert not any(sum(counts) for counts in stats.selections.values())
        assert (engine.logits(tokens) == expected).all()
