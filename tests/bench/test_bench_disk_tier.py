"""The bench of models that are larger than memory: one turn of ours within a memory cgroup."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from bench.disk_tier import OURS, PEER, DiskBench
from bench.memory_cgroup import memory_cgroup
from bench.planted_routing import Walk

from bench import disk_tier
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(
    "many experts",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=64,
    num_experts_used=2,
    ffn_size=1024,
    vocab_size=800,
    context_length=4096,
)
LIMIT = 460 << 20
"""Room for some of the 204 MiB of experts."""


@pytest.fixture
def own_resource_tracker() -> Iterator[None]:
    """The process that goes with a first spawned one ends here: other tests count processes."""
    tracker: Any = resource_tracker._resource_tracker
    had_one = tracker._fd is not None
    yield
    if not had_one:
        tracker._stop()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskBench:
    with memory_cgroup(LIMIT) as group:
        if group is None:
            pytest.skip("may not make a memory cgroup")
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=5, tensor_type="Q8_0")
    monkeypatch.setattr(Walk, "of_file", lambda path: Walk.of(SHAPE.vocab_size, 4))
    for name, value in (("_BEFORE", 8), ("_DISK_S", 0.2)):
        monkeypatch.setattr(disk_tier, name, value)
    part = LIMIT / path.stat().st_size
    return DiskBench(
        argparse.Namespace(model=path, part=part, rounds=1, tokens=4, prompt=40, threads=2)
    )


@pytest.mark.usefixtures("own_resource_tracker")
def test_a_turn_reads_experts_from_the_disk(bench: DiskBench) -> None:
    bench.turn(OURS, 0)
    assert {*bench.rates} == {"decode", "prompt", "the same prompt again"}
    [found] = bench.disk
    assert found["missed"] > 0
    assert found["failed"] == 0
    assert found["num_slots"] < SHAPE.num_layers * SHAPE.num_experts
    assert found["read"] > 0
    bench.rates["decode"][PEER] = [bench.rates["decode"][OURS][0] / 4]
    rows = {row[0]: row for row in bench.rows()}
    assert rows["decode, tokens/s"][3:] == ["4.00", "2.0"]
    assert 0.0 <= float(rows["experts predicted, of those chosen"][1]) <= 1.0
    assert rows["prompt, tokens/s"][2:] == ["", "", "3.0"]


@pytest.mark.usefixtures("own_resource_tracker")
def test_a_turn_in_which_all_of_it_fits(bench: DiskBench) -> None:
    bench._limit *= 3
    bench.turn(OURS, 0)
    assert bench.disk == []
    assert [row[0] for row in bench.rows()] == [f"{work}, tokens/s" for work in bench.rates]
