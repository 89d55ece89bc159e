"""A GPU with any amount of free memory: the right logits, or one line that says what would fit.
No allocation fails, and the device takes no more than was predicted, and hardly less.

Emulated here, where memory is counted as CuPy's pool counts. On a real GPU, with `-m gpu`, the rest
of its memory is taken, and the driver is asked what is free while models are opened and used; with
`-s` there is a line for each.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.gpu_memory import Watch
from bench.random_moe import MIXES, write

from dflash_protocol.device import Device, DeviceKind
from dflash_runtime.compute import devices
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.chunk_room import MAX_CHUNK
from dflash_runtime.compute.gpu.device.devices import CONTEXT_BYTES, VENDORS, DeviceMemory
from dflash_runtime.compute.gpu.device.driver import open_driver
from dflash_runtime.compute.gpu.room import MODULES_BYTES
from dflash_runtime.engine import planning
from support.counting_device import PooledDevice
from support.gpu_budgets import Case, Opened, error_of, open_within, run_cases
from support.gpu_devices import first_gpu
from support.planned_gpu import install_planned_gpu
from support.random_models import Qwen3MoeShape, write_qwen3moe

MIB = 1 << 20
GPU = Device(DeviceKind.CUDA, 0)
DRIVER_BYTES = CONTEXT_BYTES + MODULES_BYTES
CHUNKS = (64, 48, 32, 20)
SMALL = Qwen3MoeShape(
    "small",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=12,
    num_experts_used=2,
    ffn_size=32,
    vocab_size=67,
)
FEW_MIB = Qwen3MoeShape(
    "some hundred MiB",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=32,
    num_experts_used=4,
    ffn_size=512,
    vocab_size=2000,
    context_length=4096,
)
LIMIT_S, MESSAGE_S = 480.0, 60.0


def prompt_of(shape: Qwen3MoeShape, length: int) -> list[int]:
    return [(7 * index + 11) % shape.vocab_size for index in range(length)]


class PooledGpu:
    """An emulated GPU with `free_bytes` before anything is taken, the driver's context included."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 40
        self.device = PooledDevice()
        monkeypatch.setattr(devices, "why_unusable", lambda kind: None)
        monkeypatch.setattr(devices, "_open_gpu", self._open)
        monkeypatch.setattr(planning, "GPU_CHUNKS", CHUNKS)
        install_planned_gpu(monkeypatch, [GPU], lambda: self._memory(self.free_bytes))

    def _open(
        self, device: Device, cache_dir: str | None = None, max_chunk: int = CHUNKS[0]
    ) -> CupyBackend:
        self.device = pooled = PooledDevice()

        def memory() -> DeviceMemory:
            return self._memory(self.free_bytes - CONTEXT_BYTES - pooled.pool.total_bytes)

        return CupyBackend(pooled, max_chunk=max_chunk, memory=memory)

    @staticmethod
    def _memory(free_bytes: int) -> DeviceMemory:
        return DeviceMemory(free_bytes, 1 << 40, is_shared_with_host=False)


def assert_refused_with_advice(found: Opened) -> None:
    assert "\n" not in found.refusal
    assert "fit" in found.refusal or "no room" in found.refusal, found.refusal


@pytest.mark.parametrize("num_cases", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_every_budget_of_an_emulated_gpu_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cases: int
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", SMALL, seed=4, tensor_type="F32")
    gpu, rng = PooledGpu(monkeypatch), random.Random(1)
    options: dict[str, Any] = {"context": 200, "chunk": CHUNKS[0], "prompt": prompt_of(SMALL, 90)}
    whole = open_within(path, GPU, **options)
    assert whole.logits is not None
    num_all = SMALL.num_layers * SMALL.num_experts
    assert whole.num_here == num_all
    most = whole.predicted_bytes - DRIVER_BYTES
    seen = []
    for _ in range(num_cases):
        gpu.free_bytes = DRIVER_BYTES + rng.randrange(most - 2 * MIB, most)
        found = open_within(path, GPU, **options)
        if found.logits is None:
            assert_refused_with_advice(found)
            continue
        seen.append(found.num_here)
        assert error_of(found, whole.logits) < 2e-3  # keys and values are rounded
        peak = gpu.device.pool.peak_bytes + DRIVER_BYTES
        assert peak <= found.predicted_bytes <= gpu.free_bytes
        assert found.predicted_bytes <= 1.02 * peak + 192 * MIB
    assert len(seen) >= num_cases // 2
    assert len({*seen}) >= min(2, num_cases // 5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("is_whole", "num_cases", "between_mib", "bound"),
    [
        (False, 200, (350, 2600), 5e-3),
        pytest.param(True, 12, (2000, 22_000), 3e-2, marks=pytest.mark.slow),
    ],
    ids=["small", "whole"],
)
def test_every_budget_of_a_gpu_is_kept(
    tmp_path: Path, is_whole: bool, num_cases: int, between_mib: tuple[int, int], bound: float
) -> None:
    device = first_gpu()
    path = tmp_path / "m.gguf"
    if is_whole:
        write(path, MIXES["q4_k_m"], num_layers=48, routing="qwen3")
    else:
        write_qwen3moe(path, FEW_MIB, seed=4, tensor_type="F32")
    rng = random.Random(2)
    budgets = [rng.randrange(*between_mib) * MIB for _ in range(num_cases)]
    cases = [Case(path, None), *(Case(path, budget) for budget in budgets)]
    options = {"context": 1024, "chunk": MAX_CHUNK, "prompt": prompt_of(FEW_MIB, 600)}
    driver = open_driver(VENDORS[device.kind])
    driver.use(device.index)
    watch = Watch(driver, device.index)
    at_first = watch.free()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_cases, args=(cases, device, options, theirs))
    results: list[tuple[Opened, int]] = []
    begun_s = time.monotonic()
    with watch.running():
        process.start()
        theirs.close()
        try:
            while len(results) < len(cases) and time.monotonic() < begun_s + LIMIT_S:
                taken = _received(ours)
                assert isinstance(taken, int), taken
                watch.begin()
                ours.send(None)
                found = _received(ours)
                assert isinstance(found, Opened), found
                results.append((found, at_first - watch.least - taken))
                ours.send(None)
        finally:
            process.kill()
            process.join()
    whole, rest = results[0][0], results[1:]
    assert whole.logits is not None
    print(f"\n{len(rest)} budgets in {time.monotonic() - begun_s:.0f} s")
    for (found, peak), budget in zip(rest, budgets, strict=False):
        print(
            f"{budget // MIB} MiB: {found.num_here} experts, predicted "
            f"{found.predicted_bytes // MIB}, peak {peak // MIB} {found.refusal}"
        )
    for (found, peak), _ in zip(rest, budgets, strict=False):
        if found.logits is None:
            assert_refused_with_advice(found)
            continue
        assert error_of(found, whole.logits) < bound
        assert peak <= found.predicted_bytes <= 1.02 * peak + 192 * MIB
    assert len(rest) == num_cases
    assert len({found.num_here for found, _ in rest}) >= min(8, num_cases // 2)
    assert np.isfinite(whole.logits).all()


def _received(pipe: Any) -> object:
    """What the other process tells next."""
    assert pipe.poll(MESSAGE_S), "nothing came"
    return pipe.recv()
