"""The bench of a GPU's memory, on a device that only counts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu_memory import Case, Watch

from bench import gpu_memory
from dflash_runtime.compute import devices
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.engine.demo_model import demo_model_path
from support.counting_device import CountingDevice


def test_each_stage_is_told_and_the_table_compares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingDevice()

    def opened(device: Any, *, max_chunk: int, cache_dir: str | None) -> CupyBackend:
        pool = SimpleNamespace(
            total_bytes=lambda: counting.pool.total_bytes,
            used_bytes=lambda: counting.pool.used_bytes,
        )
        counting._memory = SimpleNamespace(_pool=pool)  # type: ignore[attr-defined]
        return CupyBackend(counting, max_chunk=max_chunk)

    monkeypatch.setattr(devices, "why_unusable", lambda kind: None)
    monkeypatch.setattr(devices, "_open_gpu", devices._open_gpu)  # is replaced, and put back
    monkeypatch.setattr(gpu_memory, "CupyBackend", opened)
    driver = SimpleNamespace(use=lambda index: None)
    monkeypatch.setattr(gpu_memory, "open_driver", lambda vendor: driver)
    stages, result = dict[str, int](), dict[str, Any]()

    def tell(stage: str, **told: Any) -> None:
        stages[stage] = counting.pool.peak_bytes
        result.update(told)

    case = Case(demo_model_path(), 1024, 512, "f16", 1 << 20, "cuda:0")
    gpu_memory._compute(case, tell)
    assert list(stages) == ["context", "open", "prompts", "decode", "trees", "logits", "end"]
    predicted, peak = result["predicted"], counting.pool.peak_bytes
    assert peak <= predicted["total"] - predicted["driver"] <= peak + (192 << 20)
    found = {"case": str(case), **result, "stages": stages, "peak": peak, "over": 5 << 20}
    rows = gpu_memory._table([found, {"case": "other", "error": "out of memory"}]).splitlines()
    assert len({len(row) for row in rows}) == 1
    assert "out of memory" in rows[-1]


def test_a_watch_that_begins_again_forgets_samples_from_before() -> None:
    free = [0]

    def memory_info() -> tuple[int, int]:
        found = free[0]
        time.sleep(0.002)  # most of the time a sample is under way
        return found, 1000

    driver = SimpleNamespace(use=lambda index: None, memory_info=memory_info)
    watch = Watch(driver, 0, sample_s=1e-4)  # type: ignore[arg-type]
    with watch.running():
        for most in range(100, 130):
            free[0] = 10
            watch.begin()
            free[0] = most
            watch.begin()
            time.sleep(0.006)
            assert watch.least == most
