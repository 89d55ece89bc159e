"""Architectures on the GPU backend: float files against the reference, in chunks, in steps, and
in a captured step.

In the emulation here, and with `-m gpu` on a device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.models import llama4
from dflash_adapters.rope import AttentionTemperature, RopePairing, YarnScaling, rope_table
from dflash_adapters.spec import KvLayer, Mask
from dflash_protocol.errors import UnsupportedModel
from dflash_protocol.ids import F32Array, Phase
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.gpu.device.buffers import Buffers
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.layers.attention import AttentionForm, AttentionLauncher
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.placed_step import place
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.model.attention import norm_before
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step, forward, run_to_end
from dflash_runtime.compute.reference.ops import ReferenceOps
from dflash_runtime.compute.trees import Tree
from support.emulated_gpu import TINY
from support.gpu_devices import EMULATED, EMULATED_AND_GPU, opened_device
from support.gpu_models import SHAPES, GpuModel, largest_error, reference_logits
from support.random_gguf import SIZES_ON_GPU, write_model
from support.random_glm4moe import Glm4MoeShape
from support.random_models import write_qwen3moe

BOUND = 1e-4


def with_scales(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
    """Of products, as files of NVFP4 have them: one that is added, a router's, and a gated one."""
    names = "blk.0.ssm_out", "blk.1.ffn_gate_inp", "blk.2.ffn_down_shexp"
    return tensors | {
        f"{name}.scale": np.full(1, 0.3 + place, np.float32) for place, name in enumerate(names)
    }


CHANGES = {"qwen35moe": with_scales}


@pytest.mark.wide(1)
@pytest.mark.parametrize("which", EMULATED_AND_GPU)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: str
) -> None:
    monkeypatch.setattr(llama4, "_CHUNK", 7)  # or 8191 positions would have to be computed first
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 10)
    monkeypatch.setattr(sliding_window, "_ROW_UNIT", 8)
    shape = SHAPES[name]
    path = write_model(tmp_path / "model.gguf", shape, seed=2, change=CHANGES.get(name))
    ids = np.random.default_rng(1).integers(0, shape.vocab_size, 30).astype(np.int32)
    expected = reference_logits(path, ids, KvType.F32)
    with opened_device(which) as device:
        model = GpuModel(path, device, kv_type=KvType.F32)
        rows = {layer.window_rows for layer in model.cache.layers}
        has_spans = any(layer.mask.span for layer in model.spec.kv_layers)
        assert rows == ({0, 16} if has_spans else {0})
        # Kernels are compiled for each number of tokens up to eight.
        for chunks in ([30], [13, 9, 1, 1, 6], [6, 1, 23]):
            assert largest_error(model.logits(ids, chunks), expected) < BOUND
        singly = model.logits(ids[:20], [12] + [1] * 8)
        assert largest_error(singly, expected[:20]) < BOUND
        step = model.captured_step()
        for first in (20, 19):  # one that goes on, and one that is taken back
            step.begin(int(ids[first]), first)
            step.start()
            assert largest_error(step.logits(), expected[first]) < BOUND
        step.close()
        model.close()


def test_rows_too_wide_for_a_block_are_multiplied_in_parts(tmp_path: Path) -> None:
    """Eight rows of as many columns as GLM-4.5 has heads do not fit into 96 KiB."""
    shape = Glm4MoeShape(
        **SIZES_ON_GPU, num_layers=1, num_dense=0, num_groups=None, num_heads=96, head_dim=128
    )
    path = write_model(tmp_path / "model.gguf", shape, seed=2)
    ids = np.arange(8, dtype=np.int32)
    with opened_device(EMULATED) as device:
        assert device.max_shared_bytes < 4 * 8 * 96 * 128
        model = GpuModel(path, device, kv_type=KvType.F32)
        found = model.logits(ids, [8])
        model.close()
    assert largest_error(found, reference_logits(path, ids, KvType.F32)) < BOUND


def test_a_head_too_wide_for_a_block_is_multiplied_in_parts(tmp_path: Path) -> None:
    """A tree is verified in a captured step too, whose tokens are the most likely ones."""
    shape = replace(TINY, num_layers=1, hidden_size=3584)
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=2, tensor_type="F16")
    ids = np.arange(8, dtype=np.int32)
    with opened_device(EMULATED) as device:
        assert device.max_shared_bytes < 4 * 7 * shape.hidden_size
        model = GpuModel(path, device, kv_type=KvType.F32)
        moe = model.backend.moe(model.banks, Phase.PREFILL, None)
        hidden = run_to_end(
            forward(model.model, Step.of_chunk(ids, 0, model.cache, Phase.PREFILL), moe)
        )
        logits = model.model.head(hidden)
        found = model.backend.to_host(logits)
        np.testing.assert_array_equal(model.backend.argmax(logits), found.argmax(axis=1))
        step = model.captured_step()
        result = step.verify(ids[1:], Tree(np.arange(-1, 6, dtype=np.int32), 1), ())
        assert result is not None
        np.testing.assert_array_equal(result.next_token_ids, found[1:].argmax(axis=1))
        step.close()
        model.close()
    assert largest_error(found, reference_logits(path, ids, KvType.F32)) < BOUND


def test_attention_with_all_that_a_layer_may_have(any_device: KernelDevice) -> None:
    """Norms after a rotation that is scaled, temperature and sinks; a chunk and a step."""
    table = rope_table(RopePairing.INTERLEAVED, 16, 1e4, scaling=YarnScaling(8.0, 64))
    assert table.scale > 1.1
    random = np.random.default_rng(3)
    rows = [random.standard_normal((20, heads * 16), np.float32) for heads in (4, 2, 2)]
    sinks = 2 * random.standard_normal(4, np.float32)
    kv, temperature = KvLayer(2, 16, 16, Mask(chunk=6)), AttentionTemperature(5, 0.3)
    cache = DeviceKvCache(any_device, (kv,), capacity=20, kv_type=KvType.F32)
    attention = AttentionLauncher(any_device, Buffers(any_device))
    ones = any_device.upload(np.ones(16, np.float32))
    form = AttentionForm(4, 0.3, query_weight=ones, key_weight=ones, temperature=temperature)
    form.table, form.eps = norm_before(table, 0.1)
    form.sinks = any_device.upload(sinks)
    ops = ReferenceOps()
    reference_cache = ops.new_kv_cache((kv,), 20, KvType.F32)
    for first, last in ((0, 17), (17, 20)):
        some = [each[first:last].copy() for each in rows]
        ids, positions = np.zeros(last - first, np.int32), np.arange(first, last, dtype=np.int32)
        step = place(Step.of_chunk(ids, first, cache, Phase.PREFILL), any_device, vocab_size=1)
        q, k, v = (any_device.upload(each) for each in some)
        out = Rows(any_device.empty(q.shape, np.float32))
        attention.launch(form, (q, k, v), step, cache_layer=0, out=out)
        queries, keys, values = (each.reshape(last - first, -1, 16) for each in some)
        ops.norm_and_rotate(queries, keys, positions, table, eps=0.1, norms_after=True)
        queries *= temperature.factors(positions)[:, None, None]
        attended = ops.attention(
            queries, keys, values, reference_cache, 0, positions, scale=0.3, sinks=sinks
        )
        expected = attended.reshape(last - first, -1)
        assert largest_error(any_device.download(out.array), expected) < 3e-6


def test_a_head_with_a_scale_is_refused_by_name_where_steps_are_recorded(tmp_path: Path) -> None:
    def with_scale(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        return {**tensors, "output.scale": np.full(1, 0.5, np.float32)}

    path = write_model(tmp_path / "m.gguf", SHAPES["olmoe"], seed=2, change=with_scale)
    with opened_device(EMULATED) as device:
        model = GpuModel(path, device, kv_type=KvType.F32)
        step = model.captured_step()
        step.begin(1, 0)
        with pytest.raises(UnsupportedModel, match=r"\bhead\b.*logits"):
            step.start()
        step.close()
        model.close()
