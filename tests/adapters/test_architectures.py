"""Every adapter but qwen3moe's from metadata: what good files say, and how others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import YARN_KEYS
from dflash_adapters.loading import Loader, load_weights
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import CAUSAL, KvLayer, Mask, ModelSpec
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from dflash_protocol.ids import AnyArray, F32Array
from dflash_runtime.compute.reference.ops import ReferenceOps
from support import (
    random_glm4moe,
    random_gpt_oss,
    random_laguna,
    random_llama,
    random_llama4,
    random_olmoe,
    random_qwen2moe,
)
from support.architectures import RANDOM
from support.examples import examples
from support.random_gguf import RandomShape, with_fused_qkv, write_model
from support.random_llama import with_separate_experts
from support.random_models import Qwen3MoeShape
from support.random_qwen35moe import Qwen35MoeShape

OLMOE, QWEN2MOE = random_olmoe.SMALL, random_qwen2moe.SMALL
LLAMA, LAGUNA, LLAMA4 = random_llama.SMALL, random_laguna.SMALL, random_llama4.SMALL
GLM4MOE, GPT_OSS = random_glm4moe.SMALL, random_gpt_oss.SMALL
SHAPES = [module.SMALL for name, module in RANDOM.items() if name != "qwen35moe"]
WITH_OWN_KEYS: list[RandomShape] = [
    Qwen3MoeShape(num_layers=2),
    Qwen35MoeShape(num_layers=2, interval=2),
    Qwen35MoeShape("merged", num_layers=1, interval=1, is_merged=True),
]
"""Whose keys have tests of their own."""

MAY_BE_MISSING = {"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"}
MAY_BE_MISSING |= {"rope_freqs.weight"}


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        return read_spec(file)


def refuse(
    path: Path, field: str, reason: str, kind: type[ModelFileError] = ModelFileError
) -> None:
    """Reading the spec raises one line that names file, field and reason."""
    with GgufFile.open(path) as file, pytest.raises(kind, match=reason) as caught:
        read_spec(file)
    assert caught.value.field == field
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{path}: {field}")
    assert len(str(caught.value).splitlines()) == 1


of_each_shape = pytest.mark.parametrize(
    "shape",
    [*SHAPES, *WITH_OWN_KEYS],
    ids=lambda shape: f"{shape.architecture}-{shape.name}",
)


def is_optional(shape: RandomShape, name: str) -> bool:
    may_tie = hasattr(shape, "tied_output") and name == "output.weight"
    return may_tie or name.split(".", 2)[-1] in MAY_BE_MISSING or name in MAY_BE_MISSING


def without(name: str) -> Callable[[dict[str, F32Array]], dict[str, F32Array]]:
    return lambda tensors: {each: tensors[each] for each in tensors if each != name}


def with_tensor(
    name: str, values: F32Array
) -> Callable[[dict[str, F32Array]], dict[str, F32Array]]:
    return lambda tensors: {**tensors, name: values}


# -- tensors --------------------------------------------------------------------------------------


def test_a_model_whose_layers_are_all_dense_is_refused(tmp_path: Path) -> None:
    """Although its metadata counts experts."""
    shape = replace(GLM4MOE, num_dense=GLM4MOE.num_layers)
    path = write_model(tmp_path / "model.gguf", shape, seed=1)
    refuse(path, "glm4moe.expert_count", "no layer has experts", UnsupportedModel)


@of_each_shape
def test_a_missing_tensor_is_named(tmp_path: Path, shape: RandomShape) -> None:
    for name in shape.tensors():
        path = write_model(tmp_path / "model.gguf", shape, seed=1, change=without(name))
        if is_optional(shape, name):
            assert spec_of(path).architecture == shape.architecture
        else:
            named = name.replace("gate_up_exps", "gate_exps")  # there might be two instead of one
            refuse(path, named, "missing")


@of_each_shape
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, shape: RandomShape) -> None:
    for name, dims in shape.tensors().items():
        others = [(*dims[:axis], dims[axis] + 1, *dims[axis + 1 :]) for axis in range(len(dims))]
        if name == "token_embd.weight":
            others = others[1:]  # its rows are the vocabulary
        for other in (*others, (*dims, 2)):
            change = with_tensor(name, np.zeros(other, np.float32))
            path = write_model(tmp_path / "model.gguf", shape, seed=1, change=change)
            refuse(path, name, "expected")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
@pytest.mark.parametrize("name", ["odd.weight", "blk.1.attn_k_b.weight", "blk.9.attn_q.weight"])
def test_a_tensor_that_would_be_left_out_is_unsupported(
    tmp_path: Path, shape: RandomShape, name: str
) -> None:
    change = with_tensor(name, np.zeros(4, np.float32))
    path = write_model(tmp_path / "model.gguf", shape, seed=1, change=change)
    refuse(path, name, "does not compute with", UnsupportedModel)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_reading_the_spec_reads_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: RandomShape
) -> None:
    path = write_model(tmp_path / "model.gguf", shape, seed=1)

    def refuse_to_look(self: GgufFile, *place: int) -> None:
        raise AssertionError(f"looked at {place}")

    monkeypatch.setattr(GgufFile, "region", refuse_to_look)
    assert spec_of(path).moe.num_experts_total > 0


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias", "blk.1.attn_qkv.weight"]
)
def test_one_matrix_of_queries_keys_and_values_is_checked(tmp_path: Path, name: str) -> None:
    def narrower(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        fused = with_fused_qkv(tensors)
        return {**fused, name: fused[name][:-1]}

    refuse(
        write_model(tmp_path / "model.gguf", QWEN2MOE, seed=1, change=narrower), name, "expected"
    )


def test_one_matrix_may_have_three_biases(tmp_path: Path) -> None:
    def fused_but_biases(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        fused = with_fused_qkv(tensors)
        kept = {name: fused[name] for name in fused if "attn_qkv.bias" not in name}
        return kept | {name: tensors[name] for name in tensors if name.endswith(".bias")}

    path = write_model(tmp_path / "model.gguf", QWEN2MOE, seed=1, change=fused_but_biases)
    assert spec_of(path).num_layers == 2


# -- experts that are tensors of their own --------------------------------------------------------


def write_separate(
    path: Path, change: Callable[[dict[str, F32Array]], dict[str, F32Array]], **options: Any
) -> Path:
    return write_model(
        path,
        LLAMA,
        seed=1,
        change=lambda tensors: change(with_separate_experts(tensors)),
        **options,
    )


def test_each_expert_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    name = "blk.1.ffn_up.3.weight"
    refuse(write_separate(tmp_path / "missing.gguf", without(name)), name, "missing")
    wide = with_tensor(name, np.zeros((20, 49), np.float32))
    refuse(write_separate(tmp_path / "wide.gguf", wide), name, "expected")
    name = "blk.1.ffn_down.7.weight"
    more = with_tensor(name, np.zeros((48, 20), np.float32))
    refuse(write_separate(tmp_path / "more.gguf", more), name, "does not compute", UnsupportedModel)


def test_experts_of_a_layer_have_one_type(tmp_path: Path) -> None:
    name = "blk.1.ffn_gate.2.weight"
    path = write_separate(
        tmp_path / "model.gguf", dict, tensor_type=lambda each: "F16" if each == name else "F32"
    )
    refuse(path, name, "type F16, but F32 of blk.1.ffn_gate.0.weight", UnsupportedModel)


def test_separate_experts_lie_where_their_tensors_do(tmp_path: Path) -> None:
    with GgufFile.open(write_separate(tmp_path / "model.gguf", dict, split_into=3)) as file:
        layer = read_spec(file).moe.layers[1]
        for kind, projection in zip(("gate", "up", "down"), layer.projections, strict=True):
            for expert in range(layer.num_experts):
                tensor = file.tensor(f"blk.1.ffn_{kind}.{expert}.weight")
                place = tensor.shard_index, tensor.offset_bytes
                assert projection.place_of(expert) == place
                assert projection.num_bytes == tensor.num_bytes


# -- keys -----------------------------------------------------------------------------------------

BASE_KEYS = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_used_count",
]


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        pytest.param(shape, f"{shape.architecture}.{key}", id=f"{shape.architecture}.{key}")
        for shape in SHAPES
        for key in (*BASE_KEYS, *RANDOM[shape.architecture.replace("-", "_")].REQUIRED_KEYS)
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, shape: RandomShape, key: str) -> None:
    refuse(write_model(tmp_path / "model.gguf", shape, seed=1, keys={key: None}), key, "missing")


@pytest.mark.parametrize(
    ("shape", "key", "value", "reason"),
    [
        (OLMOE, "expert_used_count", 12, r"\b12 .*\b11\b"),
        (OLMOE, "attention.head_count_kv", 2, r"\b3 heads\b.*\b2\b"),
        (QWEN2MOE, "expert_shared_feed_forward_length", 0, r"\b0 .*range"),
        (QWEN2MOE, "rope.scaling.factor", 0.5, "range"),
        (LLAMA, "attention.scale", -1.0, "range"),
        (LAGUNA, "attention.head_count", [6, 4, 2], r"\b3 .*\b2 layers"),
        (LAGUNA, "attention.head_count", [6, 0], r"\b0 .*range"),
        (LAGUNA, "attention.head_count_kv", [4, 4], r"\b6 heads\b.*\b4\b"),
        (LAGUNA, "attention.sliding_window_pattern", [True], r"\b1 .*\b2 layers"),
        (LAGUNA, "attention.sliding_window_pattern", [1, 2], "0 … 1"),
        (LAGUNA, "rope.dimension_count", 14, r"\b14 .*\b12\b"),
        (LAGUNA, "rope.dimension_count_swa", 5, r"\b5 .*\b12\b"),
        (LLAMA4, "interleave_moe_layer_step", 0, r"\b0 .*range"),
        (GLM4MOE, "nextn_predict_layers", 2, r"\b2 of 2 blocks"),
        (GLM4MOE, "nextn_predict_layers", (1 << 31) - 1, r"\bof 2 blocks"),
        (GLM4MOE, "expert_group_count", 5, r"\b12 in 5 groups"),
        (random_glm4moe.SHAPES[2], "expert_group_used_count", 0, r"\b0 .*range"),
        (GLM4MOE, "expert_shared_count", 0, r"\b0 .*range"),
        (GPT_OSS, "attention.sliding_window", 0, r"\b0 .*range"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    tmp_path: Path, shape: RandomShape, key: str, value: Any, reason: str
) -> None:
    key = f"{shape.architecture}.{key}"
    refuse(write_model(tmp_path / "model.gguf", shape, seed=1, keys={key: value}), key, reason)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        (OLMOE, {"attention.clamp_kqv": 8.0}, r": .*\b0\.0\b"),
        (OLMOE, {"rope.dimension_count": 8}, r"attention\.key_length 14\b"),
        (QWEN2MOE, {"attention.value_length": 4}, r"attention\.key_length 8\b"),
        (LLAMA, {"rope.scaling.type": "longrope"}, "'longrope'"),
        (LAGUNA, {"expert_gating_func": 9}, r": .*\b9\b"),
        (LAGUNA, {**YARN, "rope.scaling.yarn_attn_factor": 1.5}, r"\b1\.5\b.*\b1 .*\b1\.20794\b"),
        (LAGUNA, {**YARN, "rope.scaling.yarn_ext_factor": 0.5}, r": .*\b1\b"),
        (LAGUNA, {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, r": .*\b0\b"),
        (LLAMA4, {"expert_used_count": 2}, r": .*\b2\b.*\b1\b"),
        (LLAMA4, {"attention.sliding_window": 0}, "every layer"),
        (GLM4MOE, {"rope.dimension_sections": [1, 1, 1, 1]}, "coordinate"),
        (GPT_OSS, {"attention.sliding_window_pattern": 3}, r": .*\b3\b.*\b2\b"),
        (GPT_OSS, {"rope.freq_base_swa": 1e4}, r": .*\b10000\.0\b"),
        (LLAMA4, {"attention.sliding_window_pattern": 3}, r": .*\b3\b.*\b4\b"),
    ],
)
def test_a_setting_that_is_not_computed_here_is_unsupported(
    tmp_path: Path, shape: RandomShape, changes: dict[str, Any], reason: str
) -> None:
    keys = {f"{shape.architecture}.{key}": value for key, value in changes.items()}
    path = write_model(tmp_path / "model.gguf", shape, seed=1, keys=keys)
    refuse(path, list(keys)[-1], reason, UnsupportedModel)


def test_betas_of_yarn_that_cannot_be_are_refused(tmp_path: Path) -> None:
    key = "laguna.rope.scaling.yarn_beta_fast"
    keys = {f"laguna.{name}": value for name, value in YARN.items()} | {key: 0.5}
    refuse(write_model(tmp_path / "model.gguf", LAGUNA, seed=1, keys=keys), key, "range")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_that_cannot_be_are_refused(tmp_path: Path, value: float) -> None:
    """When the model is loaded: a spec is made without them."""
    change = with_tensor("rope_freqs.weight", np.array([1, value, 1, 1], np.float32))
    path = write_model(tmp_path / "model.gguf", LLAMA, seed=1, change=change)
    with GgufFile.open(path) as file:
        assert read_spec(file).num_layers == 2
        loader: Loader[AnyArray] = ReferenceOps()
        with pytest.raises(ModelFileError, match=r"rope_freqs\.weight\b.*\b4\b"):
            load_weights(file, loader, describe(file))


NASTY: list[Any] = [None, 0, 1, 3, 1 << 16, (1 << 31) - 1, 1 << 31, -1.0, 0.0, 1e-38, 3e38]
NASTY += [float("nan"), float("inf"), "", "yarn", "none", True, [], [0, 1], [True, False]]
RARE_KEYS = ["rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"]
RARE_KEYS += [*YARN_KEYS, "rope.scale_linear", "rope.freq_base_swa", "attention.scale"]
RARE_KEYS += ["attention.sliding_window", "attention.sliding_window_pattern"]


@examples(60)
@given(data=st.data())
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_any_metadata_is_read_or_refused_as_a_model_file_error(
    tmp_path_factory: pytest.TempPathFactory, shape: RandomShape, data: st.DataObject
) -> None:
    names = st.sampled_from([*shape.keys(), *RARE_KEYS])
    changes = data.draw(st.dictionaries(names, st.sampled_from(NASTY), max_size=4))
    keys = {f"{shape.architecture}.{key}": value for key, value in changes.items()}
    path = tmp_path_factory.getbasetemp() / f"any-{shape.architecture}.gguf"
    write_model(path, shape, seed=1, keys=keys)
    with GgufFile.open(path) as file:
        try:
            read_spec(file)
        except ModelFileError as error:
            reason = str(error)
            assert len(reason.splitlines()) == 1


# -- what good files say --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_spec_says_what_the_metadata_says(tmp_path: Path, shape: RandomShape) -> None:
    spec = spec_of(write_model(tmp_path / "model.gguf", shape, seed=1))
    assert (spec.architecture, spec.num_layers) == (shape.architecture, 2)
    assert (spec.hidden_size, spec.vocab_size) == (shape.hidden_size, shape.vocab_size)
    assert len(spec.kv_layers) == 2
    assert spec.all_matrices_f32
    for layer in spec.moe.layers:
        stack = shape.tensors()[f"blk.{layer.layer_id}.ffn_down_exps.weight"]
        assert (layer.num_experts, layer.hidden_size, layer.ffn_size) == stack


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    laguna = spec_of(write_model(tmp_path / "a.gguf", random_laguna.SHAPES[0], seed=1))
    assert [layer.layer_id for layer in laguna.moe.layers] == [1, 2, 3, 4]
    llama4 = spec_of(write_model(tmp_path / "b.gguf", random_llama4.SHAPES[2], seed=1))
    assert [layer.layer_id for layer in llama4.moe.layers] == [2, 5]


def masks_of(path: Path) -> list[Mask]:
    return [kv.mask for kv in spec_of(path).kv_layers]


def test_each_layer_has_its_mask_and_heads(tmp_path: Path) -> None:
    window, chunk = Mask(window=16), Mask(chunk=8192)
    for shape, expected in (
        (random_laguna.SHAPES[0], [CAUSAL, window, window, window, CAUSAL]),
        (random_laguna.SHAPES[2], [CAUSAL, CAUSAL, CAUSAL]),
        (random_laguna.SHAPES[3], [window, CAUSAL, window, window]),
        (replace(LAGUNA, pattern=1), [CAUSAL, CAUSAL]),
        (random_gpt_oss.SHAPES[0], [window, CAUSAL, window, CAUSAL]),
        (random_llama4.SHAPES[0], [chunk, chunk, chunk, CAUSAL, chunk]),
        (random_llama.SHAPES[0], [CAUSAL] * 4),
    ):
        path = write_model(tmp_path / "model.gguf", shape, seed=1)
        assert masks_of(path) == expected, shape
    shape = replace(LAGUNA, num_heads=(6, 4))
    keys = {"laguna.attention.head_count_kv": [3, 2]}

    def with_three_kv_heads(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        wide = np.zeros((36, shape.hidden_size), np.float32)
        return {**tensors, "blk.0.attn_k.weight": wide, "blk.0.attn_v.weight": wide}

    path = write_model(
        tmp_path / "model.gguf", shape, seed=1, keys=keys, change=with_three_kv_heads
    )
    assert spec_of(path).kv_layers == (KvLayer(3, 12, 12), KvLayer(2, 12, 12, Mask(window=16)))
