"""The GPU backend on whole models: float files against the reference, and the same bits however a
prompt is cut and whether a step is captured.

In the emulation here, and with `-m gpu` on a device, larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.kv_cache import KvType
from support.emulated_device import EmulatedDevice
from support.gpu_devices import first_gpu
from support.gpu_models import GpuModel, largest_error, reference_logits
from support.random_models import BLOCK_32_SHAPE, Qwen3MoeShape, write_qwen3moe

SMALL = Qwen3MoeShape(
    "small",
    num_layers=1,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=5,
    num_experts_used=2,
    ffn_size=32,
    vocab_size=67,
)
LARGE = Qwen3MoeShape(
    "large",
    num_layers=3,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=24,
    num_experts_used=6,
    ffn_size=256,
    vocab_size=1031,
)


def token_ids(count: int, shape: Qwen3MoeShape) -> I32Array:
    return np.random.default_rng(1).integers(0, shape.vocab_size, count).astype(np.int32)


def check(
    path: Path,
    shape: Qwen3MoeShape,
    device: KernelDevice,
    kv_type: KvType,
    bound: float,
    *,
    first: int = 3,
) -> None:
    """Chunks, steps and a captured step after the `first` tokens, which are one step if they are up
    to 8; `bound` of the error of the logits."""
    ids = token_ids(24, shape)
    expected = reference_logits(path, ids, kv_type)
    model = GpuModel(path, device, kv_type=kv_type)
    whole = model.logits(ids, [24])
    assert largest_error(whole, expected) < bound
    parts = model.logits(ids, [13, 9, 1, 1])
    assert (parts[:22] == whole[:22]).all()
    assert largest_error(parts, expected) < bound
    singly = model.logits(ids, [first] + [1] * (24 - first))
    assert largest_error(singly, expected) < bound
    step = model.captured_step()
    step.begin(int(ids[first]), first)
    step.start()
    assert (step.logits() == singly[first]).all()
    step.begin(int(ids[first]), first)
    chosen = []
    for _ in range(4):
        step.start()
        chosen.append(int(step.logits().argmax()))
    assert [step.token(first + index) for index in range(1, 5)] == chosen
    step.begin(int(ids[first]), first)
    for _ in range(4):  # without waiting for any
        step.start()
    assert [step.token(first + index) for index in range(1, 5)] == chosen
    step.close()
    model.close()


@pytest.mark.parametrize(
    ("kv_type", "bound", "first"),
    [
        (KvType.F32, 1e-5, 9),
        pytest.param(KvType.F32, 1e-5, 3, marks=pytest.mark.slow),
        pytest.param(KvType.F16, 1e-3, 3, marks=pytest.mark.slow),
    ],
)
def test_a_float32_model_in_the_emulation(
    tmp_path: Path, kv_type: KvType, bound: float, first: int
) -> None:
    path = write_qwen3moe(tmp_path / "model.gguf", SMALL, seed=2)
    check(path, SMALL, EmulatedDevice(), kv_type, bound, first=first)


@pytest.fixture(scope="module")
def gpu() -> Iterator[CupyDevice]:
    device = CupyDevice(first_gpu())
    yield device
    device.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tensor_type", "shape", "kv_type", "bound"),
    [
        ("F32", BLOCK_32_SHAPE, KvType.F32, 1e-4),
        ("F32", LARGE, KvType.F16, 1e-3),
        ("F16", LARGE, KvType.F16, 1e-3),
        ("BF16", LARGE, KvType.F16, 1e-3),
    ],
)
def test_float_models(
    tmp_path: Path,
    gpu: CupyDevice,
    tensor_type: str,
    shape: Qwen3MoeShape,
    kv_type: KvType,
    bound: float,
) -> None:
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=2, tensor_type=tensor_type)
    check(path, shape, gpu, kv_type, bound)
