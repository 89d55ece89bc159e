"""qwen3moe from metadata: what a good file says, and every way in which one can be wrong."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Attention, HeadNormRotary
from dflash_adapters.loading import model_spec
from dflash_adapters.models.qwen3moe import describe
from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopePairing, RopeTable, YarnScaling, rope_table
from dflash_adapters.spec import Activation, KvLayer, ModelSpec
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from support.examples import examples
from support.random_models import Qwen3MoeShape

SHAPE = Qwen3MoeShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=3,
    num_experts_used=2,
    ffn_size=5,
    vocab_size=7,
)
KEYS: dict[str, Any] = {
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 256,
    "qwen3moe.embedding_length": 8,
    "qwen3moe.feed_forward_length": 10,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 6,
    "qwen3moe.attention.value_length": 6,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.rope.freq_base": 1e4,
    "qwen3moe.rope.dimension_count": 6,
    "qwen3moe.expert_count": 3,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": 5,
}
ROPE = "qwen3moe.rope"
SCALING = "qwen3moe.rope.scaling"
SCALING_KEYS = [f"{SCALING}.{key}" for key in ("type", "factor", "original_context_length")]


def write(
    path: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    dtype: type[np.generic] = np.float32,
) -> Path:
    """A small model; `keys` and `tensors` are changed or, where None, left out.

    Numbers become uint32 and float32, negative ones int32. Every value of a tensor is the number
    of its expert.
    """
    writer = gguf.GGUFWriter(path, "qwen3moe")
    types = gguf.GGUFValueType
    for key, value in ({**KEYS, **(keys or {})}).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_key_value(key, value, types.BOOL)
            case int():
                writer.add_key_value(key, value, types.INT32 if value < 0 else types.UINT32)
            case float():
                writer.add_key_value(key, value, types.FLOAT32)
            case _:
                writer.add_key_value(key, value, types.STRING)
    for name, dims in ({**SHAPE.tensors(), **(tensors or {})}).items():
        if dims is not None:
            values = np.zeros(dims, dtype=dtype if "_exps" in name else np.float32)
            values += np.arange(dims[0], dtype=values.dtype).reshape(-1, *[1] * (len(dims) - 1))
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_spec(file: GgufFile) -> ModelSpec:
    return model_spec(file, describe(file))


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        return read_spec(file)


def rope_table_of(file: GgufFile) -> RopeTable:
    mixer = describe(file).layers[0].mixer
    assert isinstance(mixer, Attention)
    assert isinstance(mixer.positions, HeadNormRotary)
    return mixer.positions.rope.table()


def refuse(
    path: Path, field: str, reason: str | None, kind: type[ModelFileError] = ModelFileError
) -> ModelFileError:
    """Reading the spec raises one line that names file, field and reason."""
    with GgufFile.open(path) as file, pytest.raises(kind, match=reason) as caught:
        read_spec(file)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{path}: {field}")
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def test_spec_says_what_the_metadata_says(tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "some-model.gguf"))
    assert (spec.architecture, spec.name, spec.num_layers) == ("qwen3moe", "some-model", 2)
    assert (spec.hidden_size, spec.vocab_size, spec.context_length) == (8, 7, 256)
    assert spec.kv_layers == (KvLayer(2, 6, 6),) * 2
    assert spec.all_matrices_f32
    assert [layer.layer_id for layer in spec.moe.layers] == [0, 1]
    for layer in spec.moe.layers:
        assert (layer.num_experts, layer.num_experts_used) == (3, 2)
        assert (layer.hidden_size, layer.ffn_size) == (8, 5)
        assert layer.activation is Activation.SWIGLU
        assert [(p.rows, p.columns) for p in layer.projections] == [(5, 8), (5, 8), (8, 5)]
        assert layer.expert_bytes == 3 * 5 * 8 * 4
    assert spec.moe.num_experts_total == 6
    assert spec.moe.expert_bytes_total == 6 * 3 * 5 * 8 * 4


def test_a_model_is_called_by_its_own_name_if_it_has_one(tmp_path: Path) -> None:
    path = write(tmp_path / "file.gguf", keys={"general.name": "Qwen3 of some kind"})
    assert spec_of(path).name == "Qwen3 of some kind"


def test_projections_point_at_the_bytes_of_each_expert(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with GgufFile.open(path) as file:
        for layer in read_spec(file).moe.layers:
            for projection in layer.projections:
                for global_expert_id in range(3):
                    data = file.region(
                        projection.shard_index,
                        projection.offset_bytes + global_expert_id * projection.stride_bytes,
                        projection.num_bytes,
                    )
                    values = data.view(np.float32)
                    np.testing.assert_array_equal(values, np.full(40, float(global_expert_id)))


def test_reading_the_spec_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf")

    def refuse_to_look(self: GgufFile, *place: int) -> None:
        raise AssertionError(f"looked at {place}")

    monkeypatch.setattr(GgufFile, "region", refuse_to_look)
    assert spec_of(path).moe.num_experts_total == 6


def test_other_types_of_weights_are_seen(tmp_path: Path) -> None:
    spec = spec_of(write(tmp_path / "model.gguf", dtype=np.float16))
    assert not spec.all_matrices_f32
    assert spec.moe.layers[0].gate.tensor_type is TensorType.F16
    assert spec.moe.layers[0].expert_bytes == 3 * 5 * 8 * 2


def test_digest_is_of_everything_that_decides_what_an_expert_computes(tmp_path: Path) -> None:
    digests = [
        spec_of(write(tmp_path / "same.gguf")).moe.digest,
        spec_of(write(tmp_path / "half.gguf", dtype=np.float16)).moe.digest,
        spec_of(write(tmp_path / "k.gguf", keys={"qwen3moe.expert_used_count": 1})).moe.digest,
    ]
    assert len(set(digests)) == len(digests)
    assert spec_of(write(tmp_path / "again.gguf")).moe.digest == digests[0]


def test_old_files_without_derivable_keys_are_read(tmp_path: Path) -> None:
    """Heads as wide as the hidden size gives, as many of keys as of queries, a shared FFN width."""
    path = write(
        tmp_path / "model.gguf",
        keys={
            "qwen3moe.attention.head_count_kv": None,
            "qwen3moe.attention.key_length": None,
            "qwen3moe.attention.value_length": None,
            "qwen3moe.rope.dimension_count": None,
            "qwen3moe.rope.freq_base": None,
            "qwen3moe.expert_feed_forward_length": None,
        },
        tensors={
            f"blk.{layer_id}.{name}.weight": shape
            for layer_id in range(2)
            for name, shape in {
                "attn_q": (8, 8),
                "attn_k": (8, 8),
                "attn_v": (8, 8),
                "attn_output": (8, 8),
                "attn_q_norm": (2,),
                "attn_k_norm": (2,),
            }.items()
        },
    )
    spec = spec_of(path)
    assert spec.kv_layers[0] == KvLayer(4, 2, 2)
    assert spec.moe.layers[0].ffn_size == 5
    with GgufFile.open(path) as file:
        assert rope_table_of(file).inv_freq.tolist() == [1.0]


def test_a_file_without_a_head_ties_it_to_the_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tensors={"output.weight": None})
    assert spec_of(path).vocab_size == 7


REQUIRED = [
    "qwen3moe.block_count",
    "qwen3moe.context_length",
    "qwen3moe.embedding_length",
    "qwen3moe.attention.head_count",
    "qwen3moe.attention.layer_norm_rms_epsilon",
    "qwen3moe.expert_count",
    "qwen3moe.expert_used_count",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    refuse(write(tmp_path / "model.gguf", keys={key: None}), key, "missing")


def test_an_ffn_width_must_come_from_somewhere(tmp_path: Path) -> None:
    keys = {
        "qwen3moe.expert_feed_forward_length": None,
        "qwen3moe.feed_forward_length": None,
    }
    refuse(write(tmp_path / "model.gguf", keys=keys), "qwen3moe.feed_forward_length", "missing")


WHOLE_NUMBERS = [
    key
    for key, value in KEYS.items()
    # The last one is not looked at where experts have a width of their own.
    if isinstance(value, int) and key != "qwen3moe.feed_forward_length"
]


IMPOSSIBLE: list[tuple[Any, str]] = [
    (0, r"\b0 .*range"),
    (1 << 31, "range"),
    ((1 << 32) - 1, "range"),
    (-1, r"-1 .*\b0 … "),
    (1.0, "integer"),
    ("2", "integer"),
    (True, "integer"),
]


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_a_key_of_an_impossible_value_is_named(tmp_path: Path, key: str) -> None:
    for value, reason in IMPOSSIBLE:
        refuse(write(tmp_path / "model.gguf", keys={key: value}), key, reason)


@pytest.mark.parametrize(
    ("key", "value", "field", "reason"),
    [
        ("attention.head_count_kv", 3, "attention.head_count_kv", r"\b4 heads\b.*\b3\b"),
        ("attention.head_count_kv", 8, "attention.head_count_kv", r"\b4 heads\b.*\b8\b"),
        ("expert_used_count", 4, "expert_used_count", r"\b4 .*\b3\b"),
        ("attention.layer_norm_rms_epsilon", math.nan, None, "finite"),
        ("attention.layer_norm_rms_epsilon", math.inf, None, "finite"),
        ("attention.layer_norm_rms_epsilon", 1, None, "float"),
        ("rope.freq_base", 0.0, None, "range"),
        ("rope.freq_base", 1.0, None, "range"),
        ("rope.freq_base", -5.0, None, "range"),
        ("rope.freq_base", math.nan, None, "finite"),
        ("rope.scaling.factor", 0.0, None, "range"),
        ("rope.scaling.factor", -2.0, None, "range"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    tmp_path: Path, key: str, value: Any, field: str | None, reason: str
) -> None:
    path = write(tmp_path / "model.gguf", keys={f"qwen3moe.{key}": value})
    refuse(path, f"qwen3moe.{field or key}", reason)


@pytest.mark.parametrize("epsilon", [-1e-6, -1.0, 0.0, 1.0])
def test_an_epsilon_that_is_none_is_refused(tmp_path: Path, epsilon: float) -> None:
    """With a negative one, a norm would be the root of a negative number for small rows."""
    key = "qwen3moe.attention.layer_norm_rms_epsilon"
    refuse(write(tmp_path / "model.gguf", keys={key: epsilon}), key, None)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"attention.value_length": 4}, "attention.value_length", r"attention\.key_length 6\b"),
        ({"rope.dimension_count": 4}, "rope.dimension_count", r"attention\.key_length 6\b"),
        (
            {"attention.key_length": 7, "attention.value_length": 7, "rope.dimension_count": 7},
            "attention.key_length",
            "odd",
        ),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type", "'longrope'"),
        ({"rope.scaling.type": ""}, "rope.scaling.type", "''"),
        ({"rope.scaling.type": "a\nb"}, "rope.scaling.type", r"a\\nb"),
        ({"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor", r": .*\b1\b"),
    ],
)
def test_a_setting_that_is_not_computed_here_is_unsupported(
    tmp_path: Path, changes: dict[str, Any], field: str, reason: str
) -> None:
    keys = {f"qwen3moe.{key}": value for key, value in changes.items()}
    path = write(tmp_path / "model.gguf", keys=keys)
    refuse(path, f"qwen3moe.{field}", reason, UnsupportedModel)


@pytest.mark.parametrize("name", [name for name in SHAPE.tensors() if "blk.1." not in name])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    shape = SHAPE.tensors()[name]
    others: list[tuple[int, ...]] = [
        (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]) for axis in range(len(shape))
    ]
    if name == "token_embd.weight":
        others = others[1:]  # its rows are the vocabulary
    for number, other in enumerate([*others, (*shape, 2), shape[:-1] or (1,)]):
        path = write(tmp_path / f"{number}.gguf", tensors={name: other})
        error = refuse(path, name, "expected")
        assert str(other) in str(error)


def test_a_vocabulary_that_differs_from_the_heads_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tensors={"token_embd.weight": (9, 8)})
    refuse(path, "output.weight", r"shape \(7, 8\), expected \(9, 8\)")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_gate_shexp.weight", "odd"])
def test_a_tensor_that_would_be_left_out_is_unsupported(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", tensors={name: (8,)})
    refuse(path, name, "does not compute with", UnsupportedModel)


def test_weights_of_integers_are_unsupported(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", dtype=np.int16)
    refuse(path, "blk.0.ffn_gate_exps.weight", "I16", UnsupportedModel)


def test_more_layers_than_there_are_tensors_for_are_refused_quickly(tmp_path: Path) -> None:
    keys = {"qwen3moe.block_count": (1 << 31) - 1}
    refuse(write(tmp_path / "model.gguf", keys=keys), "blk.2.attn_norm.weight", "missing")


def test_a_head_wider_than_the_file_is_refused_before_anything_is_made_for_it(
    tmp_path: Path,
) -> None:
    wide = 1 << 24
    keys = {
        "qwen3moe.attention.key_length": wide,
        "qwen3moe.attention.value_length": wide,
        "qwen3moe.rope.dimension_count": wide,
    }
    path = write(tmp_path / "model.gguf", keys=keys)
    tracemalloc.start()
    try:
        refuse(path, "blk.0.attn_q.weight", "expected")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def rope_of(folder: Path, **scaling: Any) -> RopeTable:
    keys = {f"{ROPE}.freq_base": 5e4, "qwen3moe.context_length": 4096}
    keys |= {f"{SCALING}.{key}": value for key, value in scaling.items()}
    with GgufFile.open(write(folder / "model.gguf", keys=keys)) as file:
        return rope_table_of(file)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, {}),
        ({"type": "none", "factor": 4.0}, {}),
        ({"type": "linear", "factor": 2.5}, {"scaling": 2.5}),
        ({"type": "linear"}, {}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 1024},
            {"scaling": YarnScaling(4.0, 1024)},
        ),
        ({"type": "yarn", "factor": 4.0}, {"scaling": YarnScaling(4.0, 4096)}),
    ],
)
def test_context_scaling_is_read_from_the_file(
    tmp_path: Path, scaling: dict[str, Any], expected: dict[str, Any]
) -> None:
    table = rope_of(tmp_path, **scaling)
    wanted = rope_table(RopePairing.HALF_SPLIT, 6, 5e4, **expected)
    np.testing.assert_allclose(table.inv_freq, wanted.inv_freq, rtol=1e-7)
    assert table.scale == pytest.approx(wanted.scale)
    assert (table.pairing, table.num_rotated) == (RopePairing.HALF_SPLIT, 6)


def test_yarn_from_a_context_of_nothing_is_refused(tmp_path: Path) -> None:
    keys = {
        f"{SCALING}.type": "yarn",
        f"{SCALING}.factor": 4.0,
        f"{SCALING}.original_context_length": 0,
    }
    path = write(tmp_path / "model.gguf", keys=keys)
    refuse(path, f"{SCALING}.original_context_length", None)


NASTY: list[Any] = [None, 0, 1, 3, 1 << 16, (1 << 31) - 1, 1 << 31, -1, -1.0, 0.0, 1e-38, 3e38]
NASTY += [math.nan, math.inf, "", "yarn", "linear", True]


@examples(80)
@given(
    st.dictionaries(
        st.sampled_from([*KEYS, *SCALING_KEYS]),
        st.sampled_from(NASTY),
        max_size=4,
    )
)
def test_any_metadata_is_read_or_refused_as_a_model_file_error(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any-metadata.gguf", keys=keys)
    with GgufFile.open(path) as file:
        try:
            read_spec(file)
        except ModelFileError as error:
            reason = str(error)
            assert len(reason.splitlines()) == 1
