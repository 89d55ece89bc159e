"""qwen35moe from metadata: what a good file says, and every way in which one can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import DeltaShape, KvLayer, ModelSpec, RecurrentLayer
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.random_gguf import random_tensors, write_model
from support.random_qwen35moe import SHAPES, Qwen35MoeShape

SHAPE = Qwen35MoeShape(
    num_layers=4, hidden_size=8, num_experts=3, num_experts_used=2, ffn_size=4, vocab_size=9
)
A = "qwen35moe"


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        return read_spec(file)


def write(
    path: Path,
    shape: Qwen35MoeShape = SHAPE,
    *,
    keys: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, F32Array]], dict[str, F32Array]] | None = None,
) -> Path:
    return write_model(path, shape, seed=1, keys=keys, change=change)


def refuse(path: Path, field: str, reason: str, kind: type[ModelFileError]) -> None:
    with GgufFile.open(path) as file, pytest.raises(kind, match=reason) as caught:
        read_spec(file)
    assert type(caught.value) is kind
    assert caught.value.field == field


def test_spec_says_what_the_metadata_says(tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "m.gguf"))
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == (A, 4, 8)
    assert spec.kv_layers == (KvLayer(2, 20, 20),)
    assert spec.recurrent_layers == (RecurrentLayer(4, DeltaShape(2, 4, 16, 16)),) * 3
    assert not spec.can_be_cut
    assert [layer.layer_id for layer in spec.moe.layers] == [0, 1, 2, 3]
    assert {(layer.num_experts, layer.ffn_size) for layer in spec.moe.layers} == {(3, 4)}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_layers_are_of_the_kind_that_the_file_says(shape: Qwen35MoeShape, tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "m.gguf", shape))
    num_recurrent = sum(shape.is_recurrent(layer_id) for layer_id in range(shape.num_layers))
    assert len(spec.recurrent_layers) == num_recurrent > 0
    assert len(spec.kv_layers) == shape.num_layers - num_recurrent > 0
    assert spec.num_layers == len(spec.moe.layers) == shape.num_layers
    for layer in spec.moe.layers:
        assert (layer.gate.tensor_name == layer.up.tensor_name) == shape.is_merged


def test_layers_may_be_named_by_numbers(tmp_path: Path) -> None:
    keys = {f"{A}.attention.recurrent_layers": [1, 1, 1, 0], f"{A}.full_attention_interval": 3}
    assert len(spec_of(write(tmp_path / "m.gguf", keys=keys)).recurrent_layers) == 3


def test_old_keys_give_widths(tmp_path: Path) -> None:
    keys = {
        f"{A}.expert_feed_forward_length": None,
        f"{A}.expert_shared_feed_forward_length": None,
        f"{A}.feed_forward_length": 28,
    }
    shape = replace(SHAPE, ffn_size=14)
    assert spec_of(write(tmp_path / "m.gguf", shape, keys=keys)).moe.layers[0].ffn_size == 14


@pytest.mark.parametrize(
    ("key", "value", "reason", "kind"),
    [
        ("nextn_predict_layers", 4, r"\b4\b.*\b4 blocks", ModelFileError),
        ("full_attention_interval", 0, "range", ModelFileError),
        ("attention.recurrent_layers", [True] * 3, r"\b3\b.*\b4\b", ModelFileError),
        ("attention.recurrent_layers", True, "array", ModelFileError),
        ("ssm.group_count", 3, "3 key heads", ModelFileError),
        ("ssm.inner_size", 65, r"\b4 heads\b.*\b16\b", ModelFileError),
        ("ssm.conv_kernel", 0, "range", ModelFileError),
        ("ssm.state_size", None, "missing", ModelFileError),
        ("rope.dimension_sections", None, "missing", ModelFileError),
        ("rope.dimension_sections", [2, 1, 1], "sections", ModelFileError),
        ("rope.dimension_sections", [0, 0, 0, 0], "sections", ModelFileError),
        ("rope.dimension_sections", [1, 1, 1, 1], r"pair 3\b", UnsupportedModel),
        ("rope.dimension_sections", [2, 1, 0, 1], r"pair 2\b", UnsupportedModel),
        ("rope.dimension_count", 22, r": 22\b", ModelFileError),
        ("rope.dimension_count", 7, r": 7\b", ModelFileError),
        ("attention.value_length", 10, "differs", UnsupportedModel),
        ("rope.scaling.type", "longrope", "longrope", UnsupportedModel),
        ("expert_used_count", 4, r"\b4 .*\b3\b", ModelFileError),
    ],
)
def test_wrong_keys_are_refused_by_name(
    key: str, value: Any, reason: str, kind: type[ModelFileError], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", keys={f"{A}.{key}": value})
    field = "ssm.time_step_rank" if key == "ssm.group_count" else key
    refuse(path, f"{A}.{field}", reason, kind)


def test_more_blocks_than_tensors_take_no_memory(tmp_path: Path) -> None:
    most = (1 << 31) - 1
    keys = {f"{A}.block_count": most, f"{A}.nextn_predict_layers": most - 1}
    path = write(tmp_path / "m.gguf", keys=keys)
    refuse(path, f"{A}.nextn_predict_layers", f"{most - 1} of {most} blocks", ModelFileError)


def test_tensors_that_nobody_computes_with_are_refused(tmp_path: Path) -> None:
    more = np.zeros(8, np.float32)
    for name in ("blk.0.ssm_norm.bias", "blk.4.attn_norm.weight", "output_norm.bias"):
        path = write(tmp_path / "m.gguf", change=lambda all_, name=name: {**all_, name: more})  # type: ignore[misc]
        refuse(path, name, "does not compute", UnsupportedModel)


# -- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".scale", ".weight.scale"])
def test_scales_of_products_and_experts_count(suffix: str, tmp_path: Path) -> None:
    """Weights times a scale beside them are the same model as weights that are larger."""
    shape = replace(SHAPES[1], num_layers=2)
    random = np.random.default_rng(5)
    ids = [int(i) for i in random.integers(0, shape.vocab_size, 20)]
    scaled = [
        name
        for name, values in random_tensors(shape, seed=1).items()
        if name.endswith(".weight") and values.ndim > 1 and "conv1d" not in name
    ]
    scaled.remove("token_embd.weight")

    def beside(all_: dict[str, F32Array]) -> dict[str, F32Array]:
        for index, name in enumerate(scaled):
            count = shape.num_experts if "_exps" in name else 1
            factors = np.linspace(0.5, 2, count + index, dtype=np.float32)[index:]
            all_[name.removesuffix(".weight") + suffix] = factors
            all_[name.removesuffix(".weight") + ".input_scale"] = np.ones(count, np.float32)
        return all_

    def within(all_: dict[str, F32Array]) -> dict[str, F32Array]:
        with_scales = beside(dict(all_))
        for name in scaled:
            factors = with_scales[name.removesuffix(".weight") + suffix]
            all_[name] = all_[name] * factors.reshape(-1, *[1] * (all_[name].ndim - 1))
        return all_

    logits = []
    for change in (beside, within):
        path = write(tmp_path / f"{change.__name__}.gguf", shape, change=change)
        with Engine.open(path, backend="reference") as engine:
            logits.append(engine.logits(ids))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-3)
    plain = write(tmp_path / "plain.gguf", shape)
    with Engine.open(plain, backend="reference") as engine:
        assert np.abs(engine.logits(ids) - logits[0]).max() > 0.1


def test_scales_must_be_numbers_of_32_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, A)
    for key, value in SHAPE.keys().items():
        match value:
            case int():
                writer.add_uint32(f"{A}.{key}", value)
            case float():
                writer.add_float32(f"{A}.{key}", value)
            case _:
                writer.add_array(f"{A}.{key}", value)
    for name, values in random_tensors(SHAPE, seed=1).items():
        writer.add_tensor(name, values)
    writer.add_tensor("blk.0.ssm_out.scale", np.ones(1, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse(path, "blk.0.ssm_out.scale", "only F32", UnsupportedModel)
