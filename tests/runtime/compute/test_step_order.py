"""Experts of a decode step have the same bits on processors and on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.numeric_class import in_step_order
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.step_order import sum_lanes
from support.expert_files import write_expert_layer
from support.gpu_devices import EMULATED_AND_GPU, opened_device

E, USED = 6, 3

Backends = tuple[CpuBackend, CupyBackend]
Types = tuple[TensorType, TensorType, TensorType]


@pytest.fixture(scope="module")
def processor() -> Iterator[CpuBackend]:
    backend = CpuBackend(num_threads=3)
    yield backend
    backend.close()


@pytest.fixture(scope="module", params=EMULATED_AND_GPU)
def gpu(request: pytest.FixtureRequest) -> Iterator[CupyBackend]:
    with opened_device(request.param) as device:
        backend = CupyBackend(device, max_chunk=20, scratch_bytes=1 << 20)
        yield backend
        backend.close()


def step_of(num_tokens: int, hidden_size: int) -> RoutedBatch:
    """With rows of very different sizes, one of them zero."""
    rng = np.random.default_rng(num_tokens)
    rows = rng.standard_normal((num_tokens, hidden_size)) * 10.0 ** rng.integers(-3, 3, hidden_size)
    rows[-1, : hidden_size // 2] = 0
    ids = [rng.permutation(E)[:USED] for _ in range(num_tokens)]
    return group_by_expert(
        rows.astype(np.float32),
        np.repeat(np.arange(num_tokens, dtype=np.int32), USED),
        np.concatenate(ids).astype(np.int32),
        weights=rng.random(num_tokens * USED, np.float32),
        phase=Phase.DECODE if num_tokens == 1 else Phase.VERIFY,
    )


def sums_of(
    backend: CpuBackend | CupyBackend, file: GgufFile, layer: Any, step: RoutedBatch
) -> F64Array:
    loaded = backend.load_experts(file, layer, np.arange(E, dtype=np.int32))
    bank = backend.bank_beside(in_step_order(""), loaded)
    out = np.zeros((step.num_tokens, layer.hidden_size))
    bank.accumulate(step, out)
    return out


SIZES = {1: (928, 96), 32: (160, 96), 64: (192, 320), 256: (512, 768)}
"""Hidden size and FFN size by the elements of the largest block."""


def check(
    folder: Path,
    backends: Backends,
    types: Types,
    **form: Any,
) -> None:
    size = max(each.layout.block_elements for each in types)
    hidden_size, ffn_size = SIZES[size]
    layer = write_expert_layer(
        folder / "m.gguf",
        num_experts=E,
        num_experts_used=USED,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        types=types,
        **form,
    )
    with GgufFile.open(folder / "m.gguf") as file:
        for num_tokens in (1, 5):
            step = step_of(num_tokens, hidden_size)
            processor, gpu = (sums_of(each, file, layer, step) for each in backends)
            assert np.abs(processor).max() > 0
            np.testing.assert_array_equal(processor, gpu)


FLOATS = TensorType.F32, TensorType.F16, TensorType.BF16


@pytest.mark.wide(1)
@pytest.mark.parametrize("tensor_type", [*FORMATS, *FLOATS], ids=lambda each: each.name)
def test_bits_of_each_type(
    tmp_path: Path, processor: CpuBackend, gpu: CupyBackend, tensor_type: TensorType
) -> None:
    check(tmp_path, (processor, gpu), (tensor_type,) * 3)


@pytest.mark.parametrize(
    "types",
    [
        (TensorType.F16, TensorType.Q8_0, TensorType.BF16),
        (TensorType.Q4_K, TensorType.F32, TensorType.Q5_0),
    ],
)
def test_bits_of_floats_beside_bytes(
    tmp_path: Path, processor: CpuBackend, gpu: CupyBackend, types: Types
) -> None:
    check(tmp_path, (processor, gpu), types)


@pytest.mark.parametrize(
    "form", [{"biases": True}, {"scales": True}, {"biases": True, "scales": True}]
)
def test_bits_of_other_forms(
    tmp_path: Path, processor: CpuBackend, gpu: CupyBackend, form: dict[str, bool]
) -> None:
    types = TensorType.Q4_K, TensorType.Q8_0, TensorType.Q6_K
    check(tmp_path, (processor, gpu), types, activation=Activation.GPT_OSS, **form)


def test_teams_leave_few_lanes_idle() -> None:
    for num_units, most in itertools.product(range(1, 300), (32, 64)):
        lanes = sum_lanes(num_units, most)
        taken = -(-num_units // lanes) * lanes
        assert lanes <= most
        assert 8 * taken <= 9 * num_units
    assert sum_lanes(32) == 32
    assert sum_lanes(32, 64) == 32
    assert sum_lanes(12) == 4
