"""Architectures on the GPU backend: float files against the reference, in chunks, in steps, and
in a recorded step.

In the emulation here, and with `-m gpu` on a device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.ops import KvType
from dflash_protocol.errors import UnsupportedModel
from dflash_protocol.ids import F32Array
from support.gpu_devices import EMULATED, EMULATED_AND_GPU, opened_device
from support.gpu_models import SHAPES, GpuModel, largest_error, reference_logits
from support.random_gguf import write_model

BOUND = 1e-4


@pytest.mark.parametrize("which", EMULATED_AND_GPU)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_references(tmp_path: Path, name: str, which: str) -> None:
    shape = SHAPES[name]
    path = write_model(tmp_path / "model.gguf", shape, seed=2)
    ids = np.random.default_rng(1).integers(0, shape.vocab_size, 30).astype(np.int32)
    expected = reference_logits(path, ids, KvType.F32)
    with opened_device(which) as device:
        model = GpuModel(path, device, kv_type=KvType.F32)
        for chunks in ([30], [13, 9, 1, 1, 6], [3, 1, 26]):
            assert largest_error(model.logits(ids, chunks), expected) < BOUND
        singly = model.logits(ids[:20], [12] + [1] * 8)
        assert largest_error(singly, expected[:20]) < BOUND
        step = model.recorded_step()
        for first in (20, 19):  # one that goes on, and one that is taken back
            step.begin(int(ids[first]), first)
            step.start()
            assert largest_error(step.logits(), expected[first]) < BOUND
        step.close()
        model.close()


def test_scales_of_products_are_refused_by_name(tmp_path: Path) -> None:
    def with_scale(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        return {**tensors, "blk.0.ssm_out.scale": np.full(1, 0.5, np.float32)}

    path = write_model(tmp_path / "m.gguf", SHAPES["qwen35moe"], seed=2, change=with_scale)
    with opened_device(EMULATED) as device:
        model = GpuModel(path, device, kv_type=KvType.F32)
        with pytest.raises(UnsupportedModel, match="factors that the host knows"):
            model.logits(np.arange(9, dtype=np.int32), [9])
        model.close()
